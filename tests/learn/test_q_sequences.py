"""Q-learning from sequences against a slow reference: burn-in, episode ends, masks, agents that leave, priorities."""

import copy
import math
from decimal import Decimal, getcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shoal.algos.dqn import QConfig, QLearner, R2D2Config
from shoal.core import Box, Discrete, Group, MultiDiscrete, ShoalError
from shoal.learn import losses
from shoal.learn.rollout import allocate
from shoal.policy import QPolicy, mlp_encoder, rnn_maker
from tests.learn.test_replay import GAMMA, Reference

STEPS, ENVS, AGENTS = 3, 4, 2
BURN_IN, LENGTH = 2 * STEPS, 3 * STEPS
SEQUENCES = 12


# --- value rescaling --------------------------------------------------------------------------------------------------


def exact_rescaled(x: float, eps: float) -> Decimal:
    """sign(x) (sqrt(|x| + 1) - 1) + eps x in fifty digits."""
    getcontext().prec = 50
    size = abs(Decimal(x))
    return (Decimal(1) if x >= 0 else Decimal(-1)) * ((size + 1).sqrt() - 1) + Decimal(eps) * Decimal(x)


NUMBERS = [0.0, 1e-8, -1e-8, 3e-5, -1e-3, 0.1, -0.5, 1.0, 7.25, -300.0, 1e4, -1e6, 1e8]


@pytest.mark.parametrize("eps", [1e-3, 1e-2])
def test_rescaling_is_exact_at_all_sizes(eps):
    expected = torch.tensor([float(exact_rescaled(x, eps)) for x in NUMBERS], dtype=torch.float64)
    exactly = torch.tensor(NUMBERS, dtype=torch.float64)
    torch.testing.assert_close(losses.rescale(exactly, eps), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(losses.inverse_rescale(expected, eps), exactly, rtol=1e-13, atol=0)
    short = exactly.float()
    torch.testing.assert_close(losses.rescale(short, eps).double(), expected, rtol=3e-7, atol=0)
    torch.testing.assert_close(losses.inverse_rescale(expected.float(), eps).double(), exactly, rtol=6e-7, atol=0)


def test_rescaling_is_the_formula_of_the_paper_and_its_inverse():
    y, eps = torch.linspace(-40, 40, 401, dtype=torch.float64), losses.RESCALE_EPS
    root = torch.sqrt(1 + 4 * eps * (y.abs() + 1 + eps))
    torch.testing.assert_close(
        losses.inverse_rescale(y), torch.sign(y) * (((root - 1) / (2 * eps)) ** 2 - 1), atol=1e-9, rtol=0
    )
    torch.testing.assert_close(losses.rescale(losses.inverse_rescale(y)), y, atol=1e-12, rtol=0)


# --- the reference ----------------------------------------------------------------------------------------------------


def make(rnn="lstm", layers=1, stack=1, can_leave=False, masked=False, seed=0, burn_in=BURN_IN, **settings):
    """A learner, and the reference that filled its replay."""
    reference = Reference(
        STEPS * 24, STEPS, ENVS, AGENTS, seed, stack, can_leave, masked, ends=(0.06, 0.12), state_size=1
    )
    reference.observation, reference.final = (x / 125.0 - 1.0 for x in (reference.observation, reference.final))
    settings = dict(batch_size=SEQUENCES * LENGTH, buffer_size=ENVS * AGENTS * 45, gamma=GAMMA, **settings)
    config = QConfig(burn_in=burn_in, sequence_length=LENGTH, lr=1e-2, **settings)
    torch.manual_seed(seed)
    group = Group("g", Box(2), Discrete(3), AGENTS, masked=masked, can_leave=can_leave, stack=stack)
    policy = QPolicy(group, mlp_encoder((8,), "tanh"), False, rnn_maker(rnn, 5, layers), **config.head())
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.4 * torch.randn_like(p))
    size = policy.state_size
    reference.state = np.random.default_rng(seed).normal(size=(*reference.state.shape[:3], size)).astype(np.float32)
    reference.rollout = allocate([group], STEPS, ENVS, STEPS, torch.device("cpu"), size, explores=True)
    learner = QLearner(policy, reference.rollout, config, seed)
    with torch.no_grad():
        learner.target_flat.add_(0.2 * torch.randn_like(learner.target_flat))
    while reference.done < reference.total:
        reference.fill()
        learner.store()
    return learner, reference


def unroll(network: QPolicy, reference: Reference, first: int, env: int, agent: int, rows: int, burn_in: int):
    """Outputs of a network for each row of a sequence and its final observations, step by step."""
    state = torch.as_tensor(reference.state[first, env, agent])[None]
    q_logits, finals = [], {}

    def evaluate(seen):
        features = network.policy_encoder(torch.as_tensor(seen).float()[None])
        out, after = network.rnn.step(features, state)
        return network.head(out)[0], after

    for t in range(rows):
        with torch.set_grad_enabled(t >= burn_in and torch.is_grad_enabled()):
            outputs, state = evaluate(reference.seen(first + t, env, agent))
            q_logits.append(outputs)
            if reference.only_truncated[first + t, env]:
                finals[t] = evaluate(reference.final_seen(first + t, env)[agent])[0]
            if reference.terminated[first + t, env] or reference.truncated[first + t, env]:
                state = torch.zeros_like(state)
    return q_logits, finals


def reference_loss(learner: QLearner, reference: Reference, place: list[int], weight: list[float]):
    """Loss and priorities of some sequences, and the events in them."""
    c, replay, head = learner.config, learner.replay, learner.policy.head
    rows, total, priorities = c.burn_in + c.sequence_length + c.n_step, torch.zeros(()), []
    seen = SimpleNamespace(over=0, cut=0, left=0, on=0, lost=0, absent=0)
    for number, scale in zip(place, weight, strict=True):
        first, env, agent = reference.locate(replay, number, STEPS)
        own, own_finals = unroll(learner.policy, reference, first, env, agent, rows, c.burn_in)
        with torch.no_grad():
            aims, aim_finals = unroll(learner.target, reference, first, env, agent, rows, c.burn_in)
        kept = [
            t
            for t in range(rows)
            if reference.only_truncated[first + t, env] and reference.kept(replay, first + t, env)
        ][:2]
        errors = []
        for t in range(c.burn_in, c.burn_in + c.sequence_length):
            now = first + t
            what = reference.n_step_outcome(now, env, agent, c.n_step)
            later = what.row - first
            if not reference.alive[now, env, agent]:
                seen.absent += 1
                continue
            if what.kind == "cut" and later not in kept:
                seen.lost += 1
                continue
            setattr(seen, what.kind, getattr(seen, what.kind) + 1)
            ahead, allowed = torch.zeros(head.width), np.ones(3, bool)
            if what.kind in ("on", "cut"):
                selector, target = (
                    (own[later], aims[later]) if what.kind == "on" else (own_finals[later], aim_finals[later])
                )
                if what.kind == "on" and replay.mask is not None:
                    allowed = reference.mask[what.row, env, agent]
                q_values = head.q_values((selector if c.double_q else target).detach()[None])[0]
                choices = [k for k in range(3) if allowed[k]] or [0]
                ahead = target[max(choices, key=lambda k: float(q_values[k]))].detach()
            loss, off = one_loss(c, head, own[t][reference.action[now, env, agent]], ahead, what.reward, what.discount)
            total = total + scale * loss
            errors.append(float(off.detach()))
        priorities.append(0.9 * max(errors) + 0.1 * sum(errors) / len(errors) if errors else 0.0)
    return total / (len(place) * c.sequence_length), priorities, seen


def one_loss(c: QConfig, head, own: torch.Tensor, ahead: torch.Tensor, reward: float, discount: float):
    """Loss and error of the outputs of one choice, in float64 where needed."""
    if c.atoms > 1:
        given = (torch.tensor([float(x)]) for x in (reward, discount))
        aim = losses.categorical_projection(ahead.softmax(-1)[None], *given, head.support)
        loss = losses.cross_entropy(own[None], aim)[0]
        return loss, loss
    if c.quantiles:
        loss = losses.quantile_loss(own[None], (reward + discount * ahead)[None])[0]
        return loss, loss
    value = float(ahead[0])
    if c.rescale:  # as in the paper: the inverse, the target, and back
        eps = 1e-3
        root = (math.sqrt(1 + 4 * eps * (abs(value) + 1 + eps)) - 1) / (2 * eps)
        value = math.copysign(root**2 - 1, value)
    aim = reward + discount * value
    if c.rescale:
        aim = math.copysign(math.sqrt(abs(aim) + 1) - 1, aim) + 1e-3 * aim
    error = own[0] - aim
    return losses.huber(error, c.huber_delta), error.abs()


KINDS = {
    "plain": {},
    "no burn-in": dict(rnn="gru", burn_in=0, n_step=2),
    "r2d2": dict(double_q=True, dueling=True, prioritized=True, rescale=True, n_step=3, masked=True, can_leave=True),
    "two layers, stacked": dict(rnn="gru", layers=2, stack=3, double_q=True, n_step=4, prioritized=True, masked=True),
    "rescaled": dict(rescale=True, huber_delta=None, can_leave=True),
    "atoms": dict(atoms=7, v_min=-2.0, v_max=2.0, double_q=True, can_leave=True, masked=True),
    "quantiles": dict(quantiles=5, layers=2, dueling=True, n_step=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_along_sequences_equals_that_of_a_slow_reference(kind):
    """Loss, gradient and priorities, computed row by row and sequence by sequence."""
    learner, reference = make(**KINDS[kind])
    prioritized = learner.config.prioritized
    if prioritized:  # priorities of all sizes
        places = torch.arange(learner.replay.tree.leaves.numel())
        learner.replay.update_priorities(places, torch.rand(len(places)) * 3)
    learner.set_progress(0.3)
    sample = copy.deepcopy(learner._draw())
    found = learner._losses(sample)
    gradient = learner.optimizer.gradient(found["loss"])
    place, weight = sample.index.tolist(), [1.0] * SEQUENCES
    if prioritized:
        leaf = learner.replay.tree.leaves[sample.index].double()
        weight = ((leaf / leaf.min()) ** -(0.4 + 0.6 * 0.3)).tolist()
    elif reference.rollout.alive is not None:  # uniform draws include sequences without an alive agent
        weight = sample.weight.tolist()
    loss, priorities, seen = reference_loss(learner, reference, place, weight)
    torch.testing.assert_close(found["loss"].detach(), loss.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["error"].detach(), torch.tensor(priorities), rtol=1e-4, atol=1e-5)
    expected = learner.optimizer.flatten(list(torch.autograd.grad(loss, learner.optimizer.parameters)))
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)
    assert min(seen.over, seen.cut, seen.on) > 0
    if reference.rollout.alive is not None:
        assert min(seen.left, seen.absent) > 0
    if prioritized:
        learner.replay.update_priorities(sample.index, found["error"].detach())
        raised = (torch.tensor(priorities) + 1e-6) ** learner.config.priority_alpha
        for number, value in dict(zip(place, raised.tolist(), strict=True)).items():
            assert float(learner.replay.tree.leaves[number]) == pytest.approx(value, rel=1e-3)


def test_the_burn_in_changes_the_loss_but_has_no_gradient():
    """Burn-in observations change the loss, but have no gradient."""
    learner, _ = make()
    sample = learner._draw()
    sample.terminated.zero_()
    sample.truncated.zero_()
    sample.observation = sample.observation.clone().requires_grad_()
    before = learner._losses(sample)["loss"]
    (reached,) = torch.autograd.grad(before, sample.observation)
    assert not reached[:BURN_IN].any()
    assert reached[BURN_IN : BURN_IN + LENGTH].flatten(1).any(1).all()
    assert not reached[BURN_IN + LENGTH :].any()
    with torch.no_grad():
        sample.observation[:BURN_IN].neg_()
    assert learner._losses(sample)["loss"] != before
    sample.state.neg_()  # the state before the first row
    assert learner._losses(sample)["loss"] != before


def test_invalid_rows_are_ignored():
    """Rows of agents that left, and rows whose final observation is not stored."""
    gradients = []
    for spoil in (0.0, 3.0):
        learner, _ = make(can_leave=True, prioritized=True)
        sample = learner._draw()
        sample.valid[:, 0] = False
        learned = slice(BURN_IN, BURN_IN + LENGTH)
        sample.n_step_reward[learned] += spoil * ~sample.valid[learned]
        found = learner._losses(sample)
        assert not found["error"][0].any()
        gradients.append(learner.optimizer.gradient(found["loss"]))
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    "settings",
    [
        dict(double_q=True, dueling=True, prioritized=True, rescale=True, n_step=3, tau=0.05),
        dict(atoms=21, noisy=True, dueling=True, prioritized=True),
        dict(quantiles=9, double_q=True),
    ],
    ids=["scalar values", "atoms", "quantiles"],
)
def test_all_options_learn_a_terminal_reward(settings):
    """All episodes end after one step with reward 1, so the Q-values of all parts converge to 1."""
    group = Group("g", Box(2), MultiDiscrete((2, 3)), AGENTS)
    config = QConfig(
        burn_in=0,
        sequence_length=STEPS,
        batch_size=32 * STEPS,
        buffer_size=360,
        lr=1e-2,
        lr_schedule="linear",
        **settings,
    )
    torch.manual_seed(0)
    policy = QPolicy(group, mlp_encoder((8,), "tanh"), False, rnn_maker("lstm", 8), **config.head())
    rollout = allocate([group], STEPS, ENVS, STEPS, torch.device("cpu"), policy.state_size, explores=True)
    learner = QLearner(policy, rollout, config, 0)
    for _ in range(15):
        rollout.observation.normal_()
        rollout.reward.fill_(1.0)
        rollout.terminated.fill_(True)
        rollout.action.copy_(torch.stack([torch.randint(n, rollout.action.shape[:3]) for n in (2, 3)], -1))
        learner.store()
    for i in range(150):
        learner.set_progress(i / 150)
        learner.update()
    policy.zero_noise()
    q_logits, _ = policy.sequence(rollout.observation[:-1].flatten(1, 2), torch.zeros(8, 16), torch.ones(3, 8).bool())
    q = policy.head.q_values(q_logits)
    q = losses.inverse_rescale(q) if config.rescale else q
    torch.testing.assert_close(q, torch.ones_like(q), atol=0.3, rtol=0)
    assert int(learner.optimizer.bad_steps) == 0


def test_acting_equals_unrolling_the_sequence():
    """Outputs and states of `sequence` equal those of `step`."""
    learner, _ = make(rnn="gru", layers=2, dueling=True)
    policy = learner.policy
    torch.manual_seed(1)
    seen, ended, state = torch.randn(7, 4, 2), torch.rand(7, 4) < 0.3, torch.randn(4, policy.state_size)
    with torch.no_grad():
        q_logits, states = policy.sequence(seen, state, ended)
        last = policy.final_state(seen, state, ended)
        for t in range(7):
            q, value, state = policy.step(seen[t], state)
            torch.testing.assert_close(q, policy.head.q_values(q_logits[t]))
            torch.testing.assert_close(state, states[t])
            assert not value.any()
            state = state.masked_fill(ended[t].unsqueeze(-1), 0.0)
        torch.testing.assert_close(last, state)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "steps", "message"),
    [
        (dict(burn_in=40, sequence_length=80), 32, "use --burn-in 32 --sequence-length 64"),
        (dict(burn_in=3, sequence_length=4), 16, "use --burn-in 0 --sequence-length 16"),
        (dict(batch_size=200), 32, "use --batch-size 192"),
        (dict(batch_size=20), 32, "use --batch-size 64"),
        (dict(buffer_size=3000), 32, "sequences of 96 rows"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(settings, steps, message):
    config = QConfig(**settings)
    with pytest.raises(ShoalError, match=message):
        config.check_rollout(steps, 64, rnn=True)
    if "buffer_size" not in settings:
        config.check_rollout(steps, 64, rnn=False)


def test_the_suggested_settings_are_valid():
    QConfig(burn_in=32, sequence_length=64).check_rollout(32, 64, rnn=True)
    QConfig(burn_in=0, sequence_length=16).check_rollout(16, 64, rnn=True)
    QConfig(batch_size=192).check_rollout(32, 64, rnn=True)


@pytest.mark.parametrize("settings", [dict(atoms=51), dict(quantiles=10)])
def test_distributions_are_not_rescaled(settings):
    with pytest.raises(ShoalError, match="--rescale needs scalar Q-values"):
        QConfig(rescale=True, **settings)


def test_r2d2_needs_an_rnn():
    R2D2Config().check_rnn(True)
    with pytest.raises(ShoalError, match="needs an RNN; use --rnn lstm or gru"):
        R2D2Config().check_rnn(False)
