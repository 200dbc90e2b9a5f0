"""A world of images (bytes) and mixed actions: through the collector, a learner, evaluation and random actions."""

from dataclasses import dataclass

import pytest
import torch
import warp as wp

from shoal.algos.ppo import PPO, PPOConfig
from shoal.core import Box, Discrete, Field, FrameStack, Group, KernelWorld, Mixed, MultiDiscrete
from shoal.policy import ActorCritic, NatureCNN, choose_encoder
from shoal.runs.evaluation import Player, RandomPolicy
from shoal.tools.bench import random_actions
from shoal.tools.check_rules import draw_noise, to_actions
from shoal.training.collector import Collector

ACTION = Mixed((Discrete(3), Box(2, -2.0, 4.0), MultiDiscrete((2, 5))))
ENVS = 6


@wp.func
def move(env: int, column: wp.array[int], action: wp.array2d[float], reward: wp.array[float]):
    total = float(0.0)
    for i in range(5):
        total += float(wp.pow(10.0, float(i))) * action[env, i]
    reward[env] = total
    column[env] = (column[env] + 1) % 36


@wp.func
def begin(env: int, env_id: wp.array[int], column: wp.array[int]):
    column[env] = env_id[env] % 36


@wp.func
def look(env: int, column: wp.array[int], observation: wp.array4d[wp.uint8]):
    for y in range(36):
        for x in range(36):
            observation[env, 0, y, x] = wp.where(x == column[env], wp.uint8(255), wp.uint8(0))


class Bar(KernelWorld):
    """A bright column moves; the reward depends on every part of the action."""

    @dataclass(frozen=True)
    class Config:
        max_steps: int = 4

    state = dict(column=Field(int))
    groups = (Group("g", observation=Box((1, 36, 36), 0, 255, dtype=torch.uint8), action=ACTION),)
    step, reset, observe = move, begin, look


@pytest.fixture
def made() -> Collector:
    world = FrameStack(Bar(ENVS, "cpu"), 2)
    torch.manual_seed(0)
    group = world.groups[0]
    policy = ActorCritic(group, choose_encoder("auto", group, (8,), "tanh"), True, True, 0.0)
    assert isinstance(policy.policy_encoder, NatureCNN)
    collector = Collector(world, {"g": policy}, 8, 0)
    collector.start(0)
    collector.collect()
    return collector


def test_the_world_receives_the_head_s_actions(made):
    rollout, head = made.rollouts["g"], made.policies["g"].head
    assert rollout.observation.dtype == torch.uint8
    taken = head.to_world(rollout.action)
    assert ((taken[..., 1:3] >= -2.0) & (taken[..., 1:3] <= 4.0)).all()
    assert not torch.equal(taken, rollout.action)
    for column, n in zip((0, 3, 4), (3, 2, 5), strict=True):
        assert set(taken[..., column].flatten().tolist()) <= set(map(float, range(n)))
    assert len(taken[..., 0].unique()) == 3
    expected = (taken * torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0])).sum(-1)
    torch.testing.assert_close(rollout.reward, expected, rtol=1e-4, atol=1e-2)


def test_an_update_of_a_cnn_with_mixed_actions(made):
    policy = made.policies["g"]
    learner = PPO(policy, made.rollouts["g"], PPOConfig(num_minibatches=2))
    learner.set_progress(0.0)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    learner.update()
    assert not float(learner.optimizer.bad_steps)
    for name, p in policy.named_parameters():
        assert torch.isfinite(p).all(), name
        assert not torch.equal(p, before[name]), name
    assert not policy.moments.count


@pytest.mark.parametrize("stochastic", [True, False])
def test_evaluation(made, stochastic):
    world = Bar(ENVS, "cpu")
    for policies, stacked in ((made.policies, 2), ({"g": RandomPolicy(world.groups[0])}, 1)):
        player = Player(FrameStack(world, stacked), policies, 0, stochastic)
        for _ in range(3):
            player.step()
        assert torch.isfinite(world.outputs.groups["g"].reward).all()


def test_random_actions_are_valid():
    world = Bar(64, "cpu")
    world.reset(0)
    actions, again = random_actions(world, 8)
    again()
    checked = to_actions(world, draw_noise(world, torch.Generator().manual_seed(0)), world.outputs)
    for found in (*actions["g"], checked["g"]):
        world.check_actions({"g": found})
        assert [len(found[..., column].unique()) for column in (0, 3, 4)] == [3, 2, 5]
        assert (found[..., 1:3].amin() >= -2.0) & (found[..., 1:3].amax() <= 4.0)
        assert found[..., 1:3].std() > 1.0
