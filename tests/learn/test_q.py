"""Q-learning against slow references: losses, updates, the target network, exploration."""

import copy
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

from shoal.algos.dqn import QConfig, QLearner, RainbowConfig
from shoal.core import Box, Discrete, Group, MultiDiscrete, ShoalError
from shoal.learn import losses
from shoal.learn.rollout import Rollout
from shoal.policy import QPolicy, mlp_encoder
from tests.helpers import random_rollout

STEPS, ENVS, AGENTS = 4, 8, 2
BATCH = 64
GROUPS = {
    "choices": Group("g", Box(3), Discrete(4), AGENTS),
    "masked choices that leave": Group("g", Box(3), Discrete(4), AGENTS, masked=True, can_leave=True),
    "several choices": Group("g", Box(3), MultiDiscrete((2, 3)), AGENTS),
}


def make(group=GROUPS["choices"], rows=40, seed=0, **settings) -> QLearner:
    """A learner with a replay full of random experience."""
    settings = dict(batch_size=BATCH, buffer_size=rows * ENVS * AGENTS, lr=1e-2, **settings)
    config = QConfig(**settings)
    torch.manual_seed(0)
    policy = QPolicy(group, mlp_encoder((16,), "tanh"), False, **config.head())
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * torch.randn_like(p))
    learner = QLearner(policy, memory(group), config, seed)
    for turn in range(rows // STEPS):
        fill(learner.rollout, group, turn)
        learner.store()
    return learner


def memory(group: Group) -> Rollout:
    rollout = random_rollout(STEPS, ENVS, AGENTS, group.can_leave, 0, group=group)
    rollout.epsilon = torch.zeros(ENVS, AGENTS)
    return rollout


def fill(rollout: Rollout, group: Group, seed: int) -> None:
    torch.manual_seed(seed)
    for name, tensor in vars(random_rollout(STEPS, ENVS, AGENTS, group.can_leave, seed, group=group)).items():
        if isinstance(tensor, torch.Tensor):
            getattr(rollout, name).copy_(tensor)
    rollout.observation.normal_()
    rollout.final_observation.normal_()
    nvec = getattr(group.action, "nvec", None) or (group.action.n,)
    choices = [torch.randint(n, (STEPS, ENVS, AGENTS)) for n in nvec]
    rollout.action.copy_(choices[0] if isinstance(group.action, Discrete) else torch.stack(choices, -1))
    if rollout.action_mask is not None:
        rollout.action_mask.copy_(torch.rand(rollout.action_mask.shape) < 0.6)
        rollout.action_mask[..., 0] = True


# --- losses -----------------------------------------------------------------------------------------------------------


def projection_reference(probs, reward, discount, v_min, v_max):
    """Distribute the probability of each shifted atom to its two neighbors."""
    n = probs.shape[1]
    gap = (v_max - v_min) / (n - 1)
    out = np.zeros_like(probs)
    for row in range(len(probs)):
        for j in range(n):
            place = min(max(reward[row] + discount[row] * (v_min + j * gap), v_min), v_max)
            b = (place - v_min) / gap
            low, high = min(math.floor(b + 1e-9), n - 1), min(math.ceil(b - 1e-9), n - 1)
            if low == high:
                out[row, low] += probs[row, j]
            else:
                out[row, low] += probs[row, j] * (high - b)
                out[row, high] += probs[row, j] * (b - low)
    return out


def test_categorical_projection():
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(11), 50)
    reward, discount = rng.normal(0, 4, 50), rng.choice([0.0, 0.9, 1.0], 50)
    reward[:5] = 0.0  # lands on the atoms
    given = (torch.tensor(x, dtype=torch.float64) for x in (probs, reward, discount))
    found = losses.categorical_projection(*given, torch.linspace(-5, 5, 11, dtype=torch.float64))
    np.testing.assert_allclose(found, projection_reference(probs, reward, discount, -5.0, 5.0), atol=1e-9)
    np.testing.assert_allclose(found.sum(1), 1.0)


def test_quantile_loss():
    rng = np.random.default_rng(0)
    quantile, target = rng.normal(0, 2, (20, 5)), rng.normal(0, 2, (20, 7))
    by_hand = np.zeros(20)
    for row in range(20):
        for i in range(5):
            for j in range(7):
                u = target[row, j] - quantile[row, i]
                size = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
                by_hand[row] += abs((i + 0.5) / 5 - (u < 0)) * size / 7
    np.testing.assert_allclose(losses.quantile_loss(torch.tensor(quantile), torch.tensor(target)), by_hand)


def test_quantiles_converge_to_the_distribution():
    """Gradient descent converges to the quantiles of the samples."""
    torch.manual_seed(0)
    quantile = torch.zeros(1, 5, requires_grad=True)
    shown = torch.rand(1, 4000) * 100.0  # wide, so that the quadratic part of the loss is negligible
    optimizer = torch.optim.Adam([quantile], lr=1.0)
    for _ in range(400):
        optimizer.zero_grad()
        losses.quantile_loss(quantile, shown).sum().backward()
        optimizer.step()
    torch.testing.assert_close(quantile.detach(), torch.tensor([[10.0, 30.0, 50.0, 70.0, 90.0]]), atol=3.0, rtol=0)


@pytest.mark.parametrize("limit", [0.5, 1.0, None])
def test_huber(limit):
    x = torch.linspace(-3, 3, 61)
    reference = (
        0.5 * x.square() if limit is None else torch.nn.functional.huber_loss(x, 0 * x, reduction="none", delta=limit)
    )
    torch.testing.assert_close(losses.huber(x, limit), reference)


# --- an update --------------------------------------------------------------------------------------------------------


def reference_update(learner: QLearner, policy: QPolicy, target: QPolicy, optimizer, sample) -> float:
    """(Double) Q-learning written plainly."""
    c, nvec = learner.config, policy.head.nvec
    with torch.no_grad():
        later = target.distribution(sample.next_observation)
        selector = policy.distribution(sample.next_observation) if c.double_q else later
        if sample.next_action_mask is not None:
            selector = selector.masked_fill(~sample.next_action_mask, -torch.inf)
    action = sample.action.view(BATCH, -1).long()
    loss = 0.0
    pieces = (policy.distribution(sample.observation), later, selector)
    for i, (q, ahead, chooser) in enumerate(zip(*(x.split(nvec, 1) for x in pieces), strict=True)):
        best = ahead.gather(1, chooser.argmax(1, keepdim=True)).squeeze(1)
        aim = sample.reward + sample.discount * best
        error = torch.nn.functional.smooth_l1_loss(q.gather(1, action[:, i : i + 1]).squeeze(1), aim, reduction="none")
        loss = loss + (sample.weight * error).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), c.max_grad_norm)
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize(
    "settings",
    [
        dict(target_update_interval=3),
        dict(target_update_interval=2, double_q=True, n_step=3),
        dict(tau=0.1, dueling=True, prioritized=True),
    ],
    ids=["plain", "double", "following"],
)
def test_updates_equal_the_reference(kind, settings):
    learner = make(GROUPS[kind], **settings)
    policy = copy.deepcopy(learner.policy)
    target = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2, eps=learner.config.adam_eps)
    for update in range(1, 8):
        drawn = learner.replay.counter.clone()
        sample = copy.deepcopy(learner.replay.sample(BATCH, learner.beta))
        learner.replay.counter.copy_(drawn)
        learner.update()
        loss = reference_update(learner, policy, target, optimizer, sample)
        assert learner.read_metrics()["loss"] == pytest.approx(loss, rel=1e-4)
        with torch.no_grad():
            share = learner.config.tau or float(update % learner.config.target_update_interval == 0)
            for own, other in zip(target.parameters(), policy.parameters(), strict=True):
                own.lerp_(other, share)
    for one, other in ((learner.policy, policy), (learner.target, target)):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_double_dqn_evaluates_the_online_choice_with_the_target_network():
    """The online network prefers choice 0, whose target value is 1; that of choice 1 is 5."""
    for double, expected in ((False, 2.0 + 0.9 * 5.0), (True, 2.0 + 0.9 * 1.0)):
        learner = make(double_q=double)
        with torch.no_grad():
            for network, q_values in ((learner.policy, (3.0, 0.0, 0.0, 0.0)), (learner.target, (1.0, 5.0, 0.0, 0.0))):
                network.head.linear.weight.zero_()
                network.head.linear.bias.copy_(torch.tensor(q_values))
        sample = learner.replay.sample(BATCH)
        sample.reward.fill_(2.0)
        sample.discount.fill_(0.9)
        sample.action.fill_(2)  # Q-value 0
        torch.testing.assert_close(learner._losses(sample)["error"], torch.full((BATCH,), expected))


def test_agents_that_left_are_ignored():
    flat = []
    for spoil in (0.0, 100.0):
        learner = make(GROUPS["masked choices that leave"])
        learner.replay.frames[~learner.replay.alive] += spoil
        sample = learner.replay.sample(BATCH)
        assert bool((sample.weight == 0).any())
        flat.append(learner.optimizer.gradient(learner._losses(sample)["loss"]))
    assert torch.equal(*flat)


@pytest.mark.parametrize("settings", [dict(atoms=21), dict(quantiles=9), dict(noisy=True, dueling=True, atoms=11)])
def test_distributions_learn_a_terminal_reward(settings):
    """All episodes end after one step with reward 1, so all Q-values converge to 1."""
    learner = make(lr_schedule="linear", **settings)
    learner.replay.reward.fill_(1.0)
    learner.replay.terminated.fill_(True)
    for i in range(300):
        learner.set_progress(i / 300)
        learner.update()
    learner.policy.zero_noise()
    sample = learner.replay.sample(BATCH)
    q = learner.policy.distribution(sample.observation).gather(1, sample.action.long().view(-1, 1))
    torch.testing.assert_close(q, torch.ones_like(q), atol=0.25, rtol=0)


@pytest.mark.parametrize(
    ("settings", "reward", "ends", "warns"),
    [
        (dict(atoms=51), 1.0, 0.05, True),  # 1 / (1 - 0.99 * 0.95) = 16.8
        (dict(atoms=51, v_min=-1.0, v_max=20.0), 1.0, 0.05, False),
        (dict(atoms=51, v_min=-1.0, v_max=10.0, gamma=0.9), 1.0, 0.0, False),  # exactly at the limit
        (dict(atoms=51), -1.0, 0.0, True),
        (dict(atoms=51), 0.05, 0.0, False),
        (dict(quantiles=9), 1.0, 0.0, False),
    ],
)
def test_values_outside_the_atoms_warn_once(settings, reward, ends, warns):
    learner = make(rows=400, **settings)
    learner.updates_due(10**6)
    learner.replay.reward.fill_(reward)
    learner.replay.terminated.zero_()[: round(ends * 400)] = True
    for expected in (warns, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learner.read_metrics()
        assert ["--v-min" in str(warning.message) for warning in caught] == [True] * expected


def test_errors_become_priorities():
    learner = make(prioritized=True)
    before = learner.replay.tree.leaves.clone()
    learner.update()
    changed = int((learner.replay.tree.leaves != before).sum())
    assert 0 < changed <= BATCH


def test_moments_are_shared_with_the_target():
    torch.manual_seed(0)
    policy = QPolicy(GROUPS["choices"], mlp_encoder((16,), "tanh"), True)
    learner = QLearner(policy, memory(GROUPS["choices"]), QConfig(buffer_size=1000))
    learner.rollout.observation.normal_(5.0, 3.0)
    learner.store()
    seen = torch.randn(4, 3)
    assert float(policy.moments.count) == STEPS * ENVS * AGENTS
    assert torch.equal(policy.distribution(seen), learner.target.distribution(seen))


# --- schedules and exploration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.1, 0.37, 1.0, 7.3])
@pytest.mark.parametrize("starts", [0, 333])
def test_the_number_of_updates_is_exact(ratio, starts):
    learner = make(replay_ratio=ratio, learning_starts=starts)
    each, total = learner.rollout.samples, 0
    for turn in range(1, 500):
        total += learner.updates_due(turn * each)
        since = max(0, turn * each - learner.start)
        assert total == Fraction(str(ratio)) * since // BATCH
    assert learner.start >= max(starts, 3 * ENVS * AGENTS)


def test_exploration_decays_and_differs_between_envs():
    learner = make(exploration_initial_eps=0.8, exploration_final_eps=0.2, exploration_fraction=0.5)
    for done, expected in ((0.0, 0.8), (0.25, 0.5), (0.5, 0.2), (1.0, 0.2)):
        learner.set_progress(done)
        torch.testing.assert_close(learner.rollout.epsilon, torch.full((ENVS, AGENTS), expected))
    learner = make(exploration_initial_eps=0.4, exploration_final_eps=0.4, apex_alpha=7.0)
    expected = torch.tensor([0.4 ** (1 + 7 * i / (ENVS - 1)) for i in range(ENVS)])
    torch.testing.assert_close(learner.rollout.epsilon, expected.unsqueeze(-1).expand(-1, AGENTS))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(atoms=51, quantiles=10), "not both"),
        (dict(v_min=1.0, v_max=1.0), "--v-max must be above --v-min"),
        (dict(replay_ratio=0.0), "--replay-ratio must be above 0"),
        (dict(exploration_initial_eps=1.5), "--exploration-initial-eps must be between 0 and 1"),
        (dict(n_step=0), "--n-step must be at least 1"),
        (dict(tau=0.0), "--tau must be above 0"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ShoalError, match=words):
        QConfig(**settings)
    assert RainbowConfig().atoms == 51


def test_a_replay_that_is_too_short_is_refused():
    with pytest.raises(ShoalError, match="too short"):
        make(rows=4, n_step=3)
