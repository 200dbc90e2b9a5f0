"""A2C and PPO against a plain torch version of one update; skipped steps and ignored agents."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, Normal

from shoal.algos.a2c import A2C, A2CConfig
from shoal.algos.ppo import PPO, PPOConfig
from shoal.core import Box, Discrete, Group, MultiDiscrete, ShoalError
from shoal.learn.rollout import Rollout
from shoal.learn.shuffle import order_plan
from shoal.policy import ActorCritic, mlp_encoder
from tests.helpers import advantage_reference, random_rollout

STEPS, ENVS, AGENTS = 6, 4, 2
SAMPLES = STEPS * ENVS * AGENTS
PLAIN = Group("g", observation=Box(3), action=Discrete(4), agents=AGENTS)
GROUPS = {
    "choices": PLAIN,
    "masked choices that leave": Group("g", Box(3), Discrete(4), AGENTS, masked=True, can_leave=True),
    "several choices": Group("g", Box(3), MultiDiscrete((2, 3)), AGENTS),
    "numbers": Group("g", Box(3), Box(2, -1.0, 1.0), AGENTS, can_leave=True),
}


def make_policy(group: Group, normalize=False, shared_encoder=True) -> ActorCritic:
    torch.manual_seed(0)
    policy = ActorCritic(group, mlp_encoder((16,), "tanh"), shared_encoder, normalize, -0.3)
    with torch.no_grad():
        for p in policy.head.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return policy


def make_rollout(policy: ActorCritic, seed=0, off_policy=0.3) -> Rollout:
    """Random experience; log-probabilities of the behavior policy differ by noise of size `off_policy`."""
    group = policy.group
    torch.manual_seed(seed)
    rollout = random_rollout(STEPS, ENVS, AGENTS, group.can_leave, seed, group=group)
    rollout.observation.normal_()
    rollout.final_observation.normal_()
    if group.masked:
        rollout.action_mask.copy_(torch.rand(rollout.action_mask.shape) < 0.6)
        rollout.action_mask[..., 0] = True
    mask = None if rollout.action_mask is None else rollout.action_mask[:-1].flatten(0, 2)
    with torch.no_grad():
        params = policy.distribution(rollout.observation[:-1].flatten(0, 2), mask)
        noise = torch.rand if not isinstance(group.action, Box) else torch.randn
        action, log_prob = policy.head.sample(params, noise(SAMPLES, policy.head.noise_width))
    rollout.action.copy_(action.view_as(rollout.action))
    rollout.log_prob.copy_((log_prob + off_policy * torch.randn(SAMPLES)).view_as(rollout.log_prob))
    return rollout


# --- the reference --------------------------------------------------------------------------------------------------


def reference_log_prob(policy, params, action):
    """Log-probability and entropy with torch.distributions."""
    space = policy.group.action
    if isinstance(space, Box):
        mean, log_std = params.chunk(2, dim=-1)
        reference = Independent(Normal(mean, log_std.exp()), 1)
        return reference.log_prob(action), reference.entropy()
    nvec = (space.n,) if isinstance(space, Discrete) else space.nvec
    references = [Categorical(logits=part) for part in params.split(nvec, dim=-1)]
    columns = action.view(len(action), -1).long()
    return sum(t.log_prob(columns[:, i]) for i, t in enumerate(references)), sum(t.entropy() for t in references)


def reference_update(policy: ActorCritic, rollout: Rollout, c, picks: list[torch.Tensor]) -> list[float]:
    """The update written plainly: values, advantages, then one step of Adam per mini-batch."""
    observation = rollout.observation[:-1].flatten(0, 2)
    with torch.no_grad():
        value = policy.value(rollout.observation.flatten(0, 2)).view(STEPS + 1, ENVS, AGENTS).numpy()
        final_value = policy.value(rollout.final_observation.flatten(0, 2)).view(STEPS, ENVS, AGENTS).numpy()
    advantage, target = advantage_reference(rollout, value, final_value, c.gamma, c.gae_lambda)
    advantage, target = (torch.as_tensor(a, dtype=torch.float32).flatten() for a in (advantage, target))
    old_value, old_log_prob = torch.as_tensor(value[:-1]).flatten(), rollout.log_prob.flatten()
    action = rollout.action.flatten(0, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=c.lr, eps=c.adam_eps)
    found = []
    for pick in picks:
        if rollout.alive is not None:
            pick = pick[rollout.alive[:-1].flatten()[pick]]
        mask = None if rollout.action_mask is None else rollout.action_mask[:-1].flatten(0, 2)[pick]
        log_prob, entropy = reference_log_prob(policy, policy.distribution(observation[pick], mask), action[pick])
        a = advantage[pick]
        if c.normalize_advantage:
            a = (a - a.mean()) / a.std(correction=0)
        v, r = policy.value(observation[pick]), target[pick]
        if isinstance(c, PPOConfig):
            ratio = torch.exp(log_prob - old_log_prob[pick])
            policy_loss = -torch.min(ratio * a, ratio.clamp(1 - c.clip_range, 1 + c.clip_range) * a).mean()
        else:
            policy_loss = -(log_prob * a).mean()
        errors = (v - r) ** 2
        if getattr(c, "clip_range_vf", None) is not None:
            near = torch.clamp(v, old_value[pick] - c.clip_range_vf, old_value[pick] + c.clip_range_vf)
            errors = torch.max(errors, (near - r) ** 2)
        loss = policy_loss + c.vf_coef * 0.5 * errors.mean() - c.ent_coef * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), c.max_grad_norm)
        optimizer.step()
        found.append(loss.item())
    return found


def assert_same_policy(one: ActorCritic, other: ActorCritic, tolerance: float = 2e-5) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def vector(policy: ActorCritic) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()]).clone()


def learner(kind, policy, rollout, config, seed=0):
    made = kind(policy, rollout, config, seed)
    made.set_progress(0.0)
    return made


ALL = torch.arange(SAMPLES)


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (A2C, A2CConfig(lr=0.01, ent_coef=0.02)),
        (A2C, A2CConfig(lr=0.01, max_grad_norm=1e6, normalize_advantage=False, vf_coef=1.3)),
        (PPO, PPOConfig(lr=0.01, epochs=1, num_minibatches=1)),
        (
            PPO,
            PPOConfig(
                lr=0.01,
                epochs=1,
                num_minibatches=1,
                clip_range_vf=0.1,
                ent_coef=0.05,
                max_grad_norm=0.1,
                gae_lambda=0.5,
            ),
        ),
    ],
    ids=["A2C", "A2C free", "PPO", "PPO clipped"],
)
def test_one_step_equals_the_reference(kind, config, group):
    policy = make_policy(group)
    rollout, reference = make_rollout(policy), copy.deepcopy(policy)
    start = vector(policy)
    made = learner(kind, policy, rollout, config)
    made.update()
    (loss,) = reference_update(reference, rollout, config, [ALL])
    assert_same_policy(policy, reference)
    assert (vector(policy) - start).abs().max() > 1e-3
    assert made.read_metrics()["loss"] == pytest.approx(loss, abs=1e-4)


def test_the_entropy_coefficient_decays():
    """With a final fraction of 0.2, 1 - 0.75 x 0.8 = 0.4 of it remains after three quarters of the run."""
    policy = make_policy(PLAIN)
    rollout, reference = make_rollout(policy), copy.deepcopy(policy)
    config = PPOConfig(
        lr=0.01, lr_schedule="none", epochs=1, num_minibatches=1, ent_coef=0.5, ent_coef_final_fraction=0.2
    )
    made = PPO(policy, rollout, config)
    made.set_progress(0.75)
    made.update()
    reference_update(reference, rollout, dataclasses.replace(config, ent_coef=0.2), [ALL])
    assert_same_policy(policy, reference)


def test_separate_encoders_equal_the_reference():
    policy = make_policy(PLAIN, shared_encoder=False)
    rollout, reference = make_rollout(policy), copy.deepcopy(policy)
    config = PPOConfig(lr=0.01, epochs=1, num_minibatches=1)
    learner(PPO, policy, rollout, config).update()
    reference_update(reference, rollout, config, [ALL])
    assert_same_policy(policy, reference)


@pytest.mark.parametrize("group", ["choices", "masked choices that leave"])
def test_epochs_and_minibatches_equal_the_reference(group):
    """Three epochs of two mini-batches, in the learner's order."""
    policy = make_policy(GROUPS[group])
    rollout, reference = make_rollout(policy), copy.deepcopy(policy)
    config = PPOConfig(lr=0.003, epochs=3, num_minibatches=2)
    learner(PPO, policy, rollout, config, seed=5).update()
    picks = []
    for epoch in range(3):
        order = torch.zeros(SAMPLES, dtype=torch.int32)
        order_plan(order, 5, epoch, torch.zeros(1, dtype=torch.int32))()
        picks += order.long().split(SAMPLES // 2)
    losses = reference_update(reference, rollout, config, picks)
    assert len(losses) == 6
    assert_same_policy(policy, reference, 1e-4)


def test_every_update_has_a_different_order():
    policy = make_policy(PLAIN)
    made = learner(PPO, policy, make_rollout(policy), PPOConfig(epochs=1, num_minibatches=2))
    orders = []
    for _ in range(3):
        made.update()
        orders.append(made.order.tolist())
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("kind", [A2C, PPO])
def test_rewarded_actions_become_likely(kind):
    """Choice 2 has reward 1, the others 0; after some updates it is chosen most of the time."""
    policy = make_policy(PLAIN)
    config = (A2CConfig if kind is A2C else PPOConfig)(lr=0.02, gamma=0.0)
    rollout = make_rollout(policy, off_policy=0.0)
    made = learner(kind, policy, rollout, config)
    for seed in range(20):
        fresh = make_rollout(policy, seed, off_policy=0.0)
        for name in ("observation", "action", "log_prob"):
            getattr(rollout, name).copy_(getattr(fresh, name))
        rollout.reward.copy_(rollout.action == 2)
        made.update()
    seen = torch.randn(200, 3)
    assert policy.distribution(seen).softmax(-1)[:, 2].mean() > 0.6
    assert make_policy(PLAIN).distribution(seen).softmax(-1)[:, 2].mean() < 0.4


# --- ignored samples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize_reward", [False, True])
@pytest.mark.parametrize("kind", [A2C, PPO])
@pytest.mark.parametrize("group", ["masked choices that leave", "numbers"])
def test_dead_agents_contribute_nothing(kind, group, normalize_reward):
    """The contents of rows of agents that have left do not change the update, bit for bit."""
    results = []
    for change in (False, True):
        policy = make_policy(GROUPS[group], normalize=True)
        rollout = make_rollout(policy)
        dead = ~rollout.alive
        assert dead[:-1].any()
        if change:
            rollout.observation[dead] = 7.0
            rollout.reward[dead[:-1]] = 50.0
            rollout.log_prob[dead[:-1]] = -4.0
            rollout.action[dead[:-1]] = 0
        config = (A2CConfig if kind is A2C else PPOConfig)(lr=0.01, normalize_reward=normalize_reward)
        learner(kind, policy, rollout, config).update()
        results.append((vector(policy), policy.moments.mean.clone(), policy.moments.var.clone()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_dead_agents_do_not_affect_the_explained_variance():
    """Values of dead agents do not change the explained variance of the others."""
    reports = []
    for seen in (0.0, 30.0):
        policy = make_policy(GROUPS["numbers"])
        rollout = make_rollout(policy)
        rollout.observation[~rollout.alive] = seen
        made = learner(A2C, policy, rollout, A2CConfig())
        made.update()
        reports.append(made.read_metrics()["explained_variance"])
    assert reports[0] == pytest.approx(reports[1], abs=1e-5)


def test_a_rollout_without_alive_agents_changes_nothing():
    """A rollout without alive agents gives a zero gradient and no NaN."""
    policy = make_policy(GROUPS["numbers"], normalize=True)
    rollout = make_rollout(policy)
    rollout.alive.fill_(False)
    before = vector(policy)
    made = learner(PPO, policy, rollout, PPOConfig())
    made.update()
    assert torch.equal(vector(policy), before)
    assert float(made.optimizer.bad_steps) == 0.0


# --- skipped steps --------------------------------------------------------------------------------------------------


def test_target_kl_stops_the_remaining_steps():
    """The first step on the policy's own experience has a KL of 0; a tiny target stops all later ones."""
    results = {}
    for name, config in {
        "one": PPOConfig(lr=0.01, epochs=1, num_minibatches=1),
        "stopped": PPOConfig(lr=0.01, epochs=5, num_minibatches=1, target_kl=1e-8),
        "five": PPOConfig(lr=0.01, epochs=5, num_minibatches=1),
        "generous": PPOConfig(lr=0.01, epochs=5, num_minibatches=1, target_kl=1e9),
    }.items():
        policy = make_policy(PLAIN)
        made = learner(PPO, policy, make_rollout(policy, off_policy=0.0), config)
        made.update()
        results[name] = vector(policy), float(made.optimizer.steps)
    torch.testing.assert_close(results["stopped"][0], results["one"][0], rtol=0, atol=1e-6)
    assert torch.equal(results["generous"][0], results["five"][0])
    assert [results[name][1] for name in ("one", "stopped", "five", "generous")] == [1, 1, 5, 5]


def test_target_kl_stops_all_later_mini_batches():
    """One sample with a large ratio stops its mini-batch and all later ones, but not those before."""
    for sample in range(0, SAMPLES, 7):
        policy = make_policy(PLAIN)
        rollout = make_rollout(policy, off_policy=0.0)
        rollout.log_prob.view(-1)[sample] -= 6.0
        made = learner(PPO, policy, rollout, PPOConfig(lr=1e-6, epochs=1, num_minibatches=4, target_kl=1.0))
        made.update()
        place = made.order.tolist().index(sample) // (SAMPLES // 4)
        assert float(made.optimizer.steps) == place


def test_target_kl_is_reset_for_the_next_rollout():
    policy = make_policy(PLAIN)
    rollout = make_rollout(policy, off_policy=0.0)
    made = learner(PPO, policy, rollout, PPOConfig(lr=0.01, epochs=3, num_minibatches=1, target_kl=1e-8))
    for update in range(1, 4):
        rollout.log_prob.copy_(make_rollout(policy, off_policy=0.0).log_prob)
        rollout.action.copy_(make_rollout(policy, off_policy=0.0).action)
        made.update()
        assert float(made.optimizer.steps) == update


@pytest.mark.parametrize("kind", [A2C, PPO])
def test_a_reward_that_is_not_finite_changes_nothing(kind):
    policy = make_policy(PLAIN)
    rollout = make_rollout(policy)
    rollout.reward[2, 1, 0] = torch.nan
    before = vector(policy)
    made = learner(kind, policy, rollout, A2CConfig() if kind is A2C else PPOConfig(epochs=1, num_minibatches=1))
    made.update()
    assert torch.equal(vector(policy), before)
    assert float(made.optimizer.bad_steps) == 1.0


@pytest.mark.parametrize("num_minibatches", [5, 7, SAMPLES + 1])
def test_minibatches_that_do_not_divide_are_refused(num_minibatches):
    policy = make_policy(PLAIN)
    with pytest.raises(ShoalError, match=rf"{SAMPLES} samples.*{num_minibatches} mini-batches"):
        PPO(policy, make_rollout(policy), PPOConfig(num_minibatches=num_minibatches))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (dict(lr=0.0), "--lr.*0.0"),
        (dict(gamma=1.5), "--gamma.*1.5"),
        (dict(gae_lambda=-0.1), "--gae-lambda.*-0.1"),
        (dict(max_grad_norm=0.0), "--max-grad-norm.*0.0"),
        (dict(epochs=0), "--epochs.*0"),
        (dict(lr_reference_batch=0), "--lr-reference-batch.*0"),
        (dict(lr_warmup=1.0), "--lr-warmup.*1.0"),
        (dict(lr_final_fraction=-0.1), "--lr-final-fraction.*-0.1"),
        (dict(weight_decay=-1.0), "--weight-decay.*-1.0"),
        (dict(optimizer="gae_lambda"), "--optimizer.*gae_lambda"),
        (dict(lr_schedule="cosin"), "--lr-schedule.*cosin"),
        (dict(num_minibatches=0), "--num-minibatches.*0"),
        (dict(clip_range=0.0), "--clip-range.*0.0"),
    ],
)
def test_bad_settings_are_refused(settings, says):
    with pytest.raises(ShoalError, match=says):
        PPOConfig(**settings)


# --- around the update ----------------------------------------------------------------------------------------------


def test_observation_moments_are_updated_after_learning():
    """The update uses the moments of collection; afterwards they include its observations."""
    policy = make_policy(PLAIN, normalize=True)
    earlier = 3.0 + 2.0 * torch.randn(100, 3)
    policy.moments.merge(earlier)
    rollout, reference = make_rollout(policy), copy.deepcopy(policy)
    config = A2CConfig(lr=0.01)
    learner(A2C, policy, rollout, config).update()
    reference_update(reference, rollout, config, [ALL])
    assert_same_policy(policy, reference)
    everything = torch.cat([earlier, rollout.observation[:-1].flatten(0, 2)]).double().numpy()
    np.testing.assert_allclose(policy.moments.mean, everything.mean(axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(policy.moments.var, everything.var(axis=0), rtol=1e-4)


def test_rewards_are_divided_by_the_standard_deviation_of_the_discounted_return():
    policy = make_policy(PLAIN)
    rollout, reference = make_rollout(policy), copy.deepcopy(policy)
    rollout.reward.mul_(20.0)
    config = A2CConfig(lr=0.01, normalize_reward=True)
    learner(A2C, policy, rollout, config).update()
    running, sums = np.zeros((ENVS, AGENTS)), []
    for t in range(STEPS):
        running = config.gamma * running + rollout.reward[t].numpy()
        sums.append(running.copy())
        running[(rollout.terminated[t] | rollout.truncated[t]).numpy()] = 0.0
    rollout.reward.div_(float(np.std(sums)))
    reference_update(reference, rollout, config, [ALL])
    assert_same_policy(policy, reference)


def test_the_learning_rate_decays_to_zero():
    policy = make_policy(PLAIN)
    rollout = make_rollout(policy)
    for anneal, expected in [("linear", [0.1, 0.075, 0.0]), ("none", [0.1, 0.1, 0.1])]:
        made = A2C(policy, rollout, A2CConfig(lr=0.1, lr_schedule=anneal))
        found = []
        for done in (0.0, 0.25, 1.0):
            made.set_progress(done)
            found.append(float(made.optimizer.lr))
        assert found == pytest.approx(expected)


SQRT = dict(lr=5e-4, lr_scaling="sqrt", lr_warmup=0.01, lr_schedule="cosine", lr_final_fraction=0.01)


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        (SQRT, {0.0: 0.0, 0.004: 0.4, 0.01: 1.0, 0.505: 0.505, 1.0: 0.01, 1.1: 0.01}),
        (dict(lr_schedule="cosine"), {0.0: 1.0, 1 / 3: 0.75, 0.5: 0.5, 2 / 3: 0.25, 1.0: 0.0}),
        (dict(lr_schedule="linear", lr_final_fraction=0.5), {0.0: 1.0, 0.5: 0.75, 1.0: 0.5}),
        (dict(lr_schedule="linear", lr_warmup=0.5), {0.25: 0.5, 0.5: 1.0, 0.75: 0.5, 1.0: 0.0}),
        (dict(lr_schedule="none", lr_warmup=0.1, lr_final_fraction=0.3), {0.05: 0.5, 0.1: 1.0, 1.0: 1.0}),
    ],
)
def test_learning_rate_schedules(settings, shares):
    config = PPOConfig(**settings)
    for done, share in shares.items():
        assert config.lr_factor(done) == pytest.approx(share, abs=1e-9)


def test_learning_rates_grow_with_the_mini_batch():
    """PPO's mini-batch is a part of the rollout, A2C's all of it, over all agents."""
    policy = make_policy(PLAIN)
    rollout = make_rollout(policy)
    for kind, config, batch in ((PPO, PPOConfig, SAMPLES // 2), (A2C, A2CConfig, SAMPLES)):
        more = dict(num_minibatches=2) if kind is PPO else {}
        for rule, factor in (("none", 1.0), ("sqrt", (batch / 6) ** 0.5), ("linear", batch / 6)):
            made = learner(kind, policy, rollout, config(lr=0.01, lr_scaling=rule, lr_reference_batch=6, **more))
            assert float(made.optimizer.lr) == pytest.approx(0.01 * factor)
            assert made.peak_lr == pytest.approx(0.01 * factor)
    assert PPOConfig(**SQRT).peak_lr(1024) == pytest.approx(1e-3)


def test_the_description_of_updates():
    policy = make_policy(PLAIN)
    rollout = make_rollout(policy)
    plain = PPO(policy, rollout, PPOConfig(num_minibatches=2)).describe()
    assert plain == "Adam, mini-batches of 24 samples, learning rate 0.0003, linear decay to 0"
    config = PPOConfig(**SQRT, lr_reference_batch=6, num_minibatches=2, optimizer="lamb", micro_batch_size=8)
    assert PPO(policy, rollout, config).describe() == (
        "Lamb, weight decay 0.01, mini-batches of 24 samples in 3 passes, learning rate "
        "0.0005 x sqrt(24 / 6) = 0.001, warmup over 1 % of the run, cosine decay to 1 % of it"
    )


@pytest.mark.parametrize("kind", [A2C, PPO])
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_passes_with_every_optimizer(kind, optimizer):
    """One pass and four passes of a mini-batch give the same step, also with agents that leave."""
    weights = []
    for micro_batch_size in (SAMPLES, SAMPLES // 4):
        policy = make_policy(GROUPS["masked choices that leave"])
        config = (A2CConfig if kind is A2C else PPOConfig)(
            lr=0.01, optimizer=optimizer, micro_batch_size=micro_batch_size
        )
        if kind is PPO:
            config = dataclasses.replace(config, num_minibatches=1, epochs=2)
        made = learner(kind, policy, make_rollout(policy), config)
        assert len(made._passes(SAMPLES)) == SAMPLES // micro_batch_size
        made.update()
        weights.append(vector(policy))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [A2C, PPO])
def test_a_saved_state_continues_bit_for_bit(kind):
    config = A2CConfig(normalize_reward=True) if kind is A2C else PPOConfig(normalize_reward=True)
    policy, other = make_policy(PLAIN, normalize=True), make_policy(PLAIN, normalize=True)
    rollout = make_rollout(policy)
    made = learner(kind, policy, rollout, config)
    made.update()
    made.update()
    resumed = learner(kind, other, rollout, config)
    other.load_state_dict(policy.state_dict())
    resumed.load_state_dict({name: t.clone() for name, t in made.state_dict().items()})
    made.update()
    resumed.update()
    assert torch.equal(vector(policy), vector(other))
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_metrics_are_means_since_the_last_read():
    policy = make_policy(PLAIN)
    rollout = make_rollout(policy)
    made = learner(A2C, policy, rollout, A2CConfig(lr=1e-12))
    made.update()
    one = made.read_metrics()
    for _ in range(3):
        made.update()
    three = made.read_metrics()
    assert set(one) == {*A2C.metric_names, "gradient_norm", "explained_variance"}
    for name in one:
        assert one[name] == pytest.approx(three[name], rel=1e-4, abs=1e-6)
        assert one[name] != 0.0
