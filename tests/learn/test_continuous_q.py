"""DDPG, TD3 and SAC against slow references: squashed actions, updates, exploration."""

import copy
import math
from fractions import Fraction

import pytest
import torch
from torch import distributions

from shoal.algos.continuous_q import ContinuousQ, DDPGConfig, SACConfig, TD3Config
from shoal.algos.registry import check_group
from shoal.core import Box, Discrete, Group, ShoalError
from shoal.policy import ContinuousQPolicy, choose_encoder, mlp_encoder
from shoal.policy.continuous_q import SquashedHead
from tests.helpers import random_rollout

STEPS, ENVS, AGENTS, BATCH = 4, 8, 2, 64
GROUPS = {
    "one number": Group("g", Box(3), Box(1, -2.0, 2.0), AGENTS),
    "a table of numbers": Group("g", Box(3), Box((2, 2), -1.0, 3.0), AGENTS),
    "those who leave": Group("g", Box(3), Box(2, -1.0, 1.0), AGENTS, can_leave=True),
}
KINDS = {"ddpg": DDPGConfig, "td3": TD3Config, "sac": SACConfig}


def make(kind="sac", group=GROUPS["one number"], rows=40, **settings) -> ContinuousQ:
    """A learner with a replay full of random experience."""
    config = KINDS[kind](**dict(batch_size=BATCH, buffer_size=rows * ENVS * AGENTS, lr=1e-2, **settings))
    torch.manual_seed(0)
    policy = ContinuousQPolicy(group, mlp_encoder((16,), "tanh"), False, **config.head())
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * torch.randn_like(p))
    rollout = random_rollout(STEPS, ENVS, AGENTS, group.can_leave, 0, group=group)
    rollout.epsilon = torch.zeros(ENVS, AGENTS)
    learner = ContinuousQ(policy, rollout, config, seed=5)
    for turn in range(rows // STEPS):
        torch.manual_seed(turn)
        for name, tensor in vars(random_rollout(STEPS, ENVS, AGENTS, group.can_leave, turn, group=group)).items():
            if isinstance(tensor, torch.Tensor):
                getattr(rollout, name).copy_(tensor)
        rollout.observation.normal_()
        rollout.action.uniform_(-1.0, 1.0)
        learner.store()
    return learner


# --- the head ---------------------------------------------------------------------------------------------------------


def test_squashed_actions_have_the_density_of_a_transformed_normal():
    torch.manual_seed(0)
    head = SquashedHead(4, Box((3,), -1.0, 1.0), True, 0.1, None).double()
    params = head.params(torch.randn(50, 6, dtype=torch.float64)).double()
    mean, log_std = params.chunk(2, dim=-1)
    action, log_prob = head.sample_squashed(params, torch.randn(50, 3, dtype=torch.float64))
    normal = distributions.Normal(mean, log_std.exp())
    reference = distributions.TransformedDistribution(normal, [distributions.TanhTransform(cache_size=0)])
    inside = action.abs().amax(dim=-1) < 0.999
    assert int(inside.sum()) > 10
    torch.testing.assert_close(log_prob[inside], reference.log_prob(action)[inside].sum(-1), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("stochastic", [False, True])
def test_random_actions_have_the_given_rate(stochastic):
    torch.manual_seed(0)
    space = Box((2,), -1.0, 3.0)
    head = SquashedHead(4, space, stochastic, 0.05, None)
    params = head.params(torch.full((20_000, 2 + 2 * stochastic), -3.0))
    noise = torch.randn(20_000, head.noise_width)
    head.explore(noise, 0.25)
    action, _ = head.sample(params, noise)
    assert float((action[:, 0] > 0).float().mean()) == pytest.approx(0.125, abs=0.01)
    world = head.to_world(action)
    assert float(world.min()) >= -1.0
    assert 2.9 < float(world.max()) <= 3.0
    torch.testing.assert_close(head.to_world(head.mode(params))[0], torch.full((2,), 1.0 + 2.0 * math.tanh(-3.0)))


def test_image_features_and_actions_are_joined_in_an_extra_layer():
    group = Group("g", Box((1, 40, 40)), Box(2, -1.0, 1.0))
    policy = ContinuousQPolicy(group, choose_encoder("nature", group, (8,), "relu"), False, **SACConfig().head())
    seen = torch.randn(5, 1, 40, 40)
    assert policy.q_values(seen, torch.zeros(5, 2)).shape == (2, 5)
    apart = policy.q_values(seen, torch.ones(5, 2)) - policy.q_values(seen, -torch.ones(5, 2))
    assert bool((apart != 0).all())
    assert policy.activations() > 0


# --- an update --------------------------------------------------------------------------------------------------------


class Reference:
    """The algorithms written plainly, with torch's optimizers."""

    def __init__(self, learner: ContinuousQ):
        c = learner.config
        self.c, self.policy, self.target = c, copy.deepcopy(learner.policy), copy.deepcopy(learner.policy)
        self.parts = [list(self.policy.critics.parameters()), list(self.policy.actor.parameters())]
        self.optimizers = [torch.optim.Adam(part, lr=c.lr, eps=c.adam_eps) for part in self.parts]
        self.entropy = -float(learner.policy.group.action.size)

    def drawn(self, policy, seen, normal):
        mean, log_std = policy.distribution(seen).chunk(2, -1)
        u = mean + log_std.exp() * normal
        log_prob = distributions.Normal(mean.double(), log_std.double().exp()).log_prob(u.double())
        return torch.tanh(u), (log_prob - torch.log(1 - torch.tanh(u.double()) ** 2)).sum(-1).float()

    def descend(self, which, loss):
        optimizer, part = self.optimizers[which], self.parts[which]
        for p in self.policy.parameters():
            p.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(part, self.c.max_grad_norm)
        optimizer.step()

    def critics(self, sample, normal):
        c, bonus = self.c, 0.0
        with torch.no_grad():
            if c.stochastic:
                action, log_prob = self.drawn(self.policy, sample.next_observation, normal)
                bonus = -torch.exp(self.policy.head.log_temperature) * log_prob
            else:
                noise = (c.target_policy_noise * normal).clamp(-c.target_noise_clip, c.target_noise_clip)
                action = (torch.tanh(self.target.distribution(sample.next_observation)) + noise).clamp(-1, 1)
            ahead = self.target.q_values(sample.next_observation, action)
            lowest = torch.minimum(ahead[0], ahead[-1])
            aim = sample.reward + sample.discount * (lowest + bonus)
        self.descend(
            0, sum((sample.weight * (q - aim) ** 2 / 2).mean() for q in self.policy.q_values(*seen_of(sample)))
        )

    def actor(self, sample, normal):
        counts = (sample.weight > 0).float()
        if self.c.stochastic:
            action, log_prob = self.drawn(self.policy, sample.observation, normal)
            log_alpha = self.policy.head.log_temperature
            loss = (counts * (log_alpha.detach().exp() * log_prob - self.lowest(sample, action))).mean()
            loss = loss - (counts * log_alpha * (log_prob + self.entropy).detach()).mean()
        else:
            loss = -(counts * self.lowest(sample, torch.tanh(self.policy.distribution(sample.observation)))).mean()
        self.descend(1, loss)
        with torch.no_grad():
            for own, other in zip(self.target.parameters(), self.policy.parameters(), strict=True):
                own.lerp_(other, self.c.tau)

    def lowest(self, sample, action):
        return self.policy.q_values(sample.observation, action).min(dim=0).values


def seen_of(sample):
    return sample.observation, sample.action


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("ddpg", {}), ("td3", dict(n_step=3)), ("sac", {}), ("sac", dict(prioritized=True, tau=0.1))],
    ids=["ddpg", "td3", "sac", "prioritized"],
)
def test_updates_equal_the_reference(kind, settings, group):
    learner = make(kind, GROUPS[group], **settings)
    reference, draw = Reference(learner), learner.replay.sample
    drawn = []

    def sample(*given):
        drawn.append(copy.deepcopy(draw(*given)))
        return draw_again(*given)

    def draw_again(*given):
        learner.replay.counter.sub_(1)
        return draw(*given)

    learner.replay.sample = sample
    for _ in range(5):
        drawn.clear()
        learner.update()
        assert len(drawn) == learner.config.policy_delay
        for made, normal in zip(drawn, learner.noise, strict=False):
            reference.critics(made, normal)
        reference.actor(drawn[-1], learner.noise[-1])
    assert float(learner.noise.std()) == pytest.approx(1.0, abs=0.15)
    for one, other in ((learner.policy, reference.policy), (learner.target, reference.target)):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-4)


def test_agents_that_left_are_ignored():
    flat = []
    for spoil in (0.0, 100.0):
        learner = make("sac", GROUPS["those who leave"])
        learner.replay.frames[~learner.replay.alive] += spoil
        learner.update()
        flat.append(torch.cat([o.flat for o in learner.optimizers.values()]))
    assert torch.equal(*flat)


def test_the_temperature_rises_while_entropy_is_below_the_target():
    for wanted, rises in ((3.0, True), (-3.0, False)):
        learner = make("sac", target_entropy=wanted)
        before = float(learner.policy.head.log_temperature.detach())
        for _ in range(5):
            learner.update()
        assert (float(learner.policy.head.log_temperature.detach()) > before) == rises
        fixed = make("sac", temperature=0.3)
        before = float(fixed.policy.head.log_temperature.detach())
        fixed.update()
        assert float(fixed.policy.head.log_temperature.detach()) == before


# --- schedules and exploration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_the_number_of_updates_is_exact(kind):
    learner = make(kind, replay_ratio=7.3, learning_starts=333)
    each, total, drawn = learner.rollout.samples, 0, BATCH * learner.config.policy_delay
    for turn in range(1, 300):
        total += learner.updates_due(turn * each)
        since = max(0, turn * each - learner.start)
        assert total == Fraction("7.3") * since // drawn
        assert bool((learner.rollout.epsilon == (1.0 if turn * each < learner.start else 0.0)).all())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(critics=0), "--critics must be between 1 and 256"),
        (dict(tau=0.0), "--tau must be above 0"),
        (dict(temperature=0.0), "--temperature must be above 0"),
        (dict(exploration_noise=-1.0), "--exploration-noise must be at least 0"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ShoalError, match=words):
        SACConfig(**settings)


@pytest.mark.parametrize(
    ("action", "words"), [(Discrete(3), "group 'g' uses Discrete"), (Box(2), "need bounded Box actions")]
)
def test_unsupported_actions_are_refused(action, words):
    with pytest.raises(ShoalError, match=words):
        check_group(SACConfig(), Group("g", Box(3), action))
