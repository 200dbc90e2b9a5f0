"""Advantages and discounted sums against slow references in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.learn.returns import advantage_plan, discounted_plan
from shoal.learn.rollout import Rollout
from tests.helpers import random_rollout, reference_advantages


def advantages(rollout: Rollout, value, final_value, gamma, lam, scale=1.0, **lag) -> tuple[np.ndarray, np.ndarray]:
    advantage, target = torch.full_like(rollout.reward, np.nan), torch.full_like(rollout.reward, np.nan)
    arrays = [torch.as_tensor(a, dtype=torch.float32) for a in (value, final_value, [scale])]
    advantage_plan(rollout, *arrays, advantage, target, gamma, lam, **lag)()
    return advantage.numpy(), target.numpy()


def compare(rollout: Rollout, gamma=0.9, lam=0.8, scale=1.0, seed=0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    steps, envs, agents = rollout.reward.shape
    value = rng.normal(size=(steps + 1, envs, agents)).astype(np.float32)
    final_value = rng.normal(size=(steps, envs, agents)).astype(np.float32)
    found = advantages(rollout, value, final_value, gamma, lam, scale)
    expected = reference_advantages(rollout, value, final_value, gamma, lam, scale)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    return found


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 12),
    envs=st.integers(1, 5),
    agents=st.integers(1, 3),
    leaves=st.booleans(),
    waits=st.booleans(),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_advantages_equal_the_reference(steps, envs, agents, leaves, waits, gamma, lam, seed):
    compare(random_rollout(steps, envs, agents, leaves, seed, waits=waits), gamma, lam, seed=seed)


def test_an_agent_that_leaves_at_a_truncation_does_not_bootstrap():
    """The env was truncated, but this agent had left, so its final value is ignored."""
    rollout = random_rollout(1, 1, 2, True, 0)
    rollout.terminated.fill_(False)
    rollout.truncated.fill_(True)
    rollout.reward.fill_(2.0)
    rollout.alive.fill_(True)
    rollout.final_alive.copy_(torch.tensor([[[True, False]]]))
    advantage, _ = advantages(rollout, [[[3.0, 3.0]], [[5.0, 5.0]]], [[[7.0, 7.0]]], gamma=0.5, lam=0.9)
    assert advantage[0, 0].tolist() == [2.0 + 0.5 * 7.0 - 3.0, 2.0 - 3.0]


def test_without_a_stored_final_observation_the_own_value_is_bootstrapped():
    """With more truncations than slots, nothing beyond the stored final values is read."""
    rollout = random_rollout(3, 1, 1, False, 0)
    rollout.terminated.fill_(False)
    rollout.truncated.fill_(True)
    rollout.reward.zero_()
    memory = torch.tensor([5.0, 1e6, 1e6]).view(3, 1, 1)
    value = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1)
    advantage, _ = advantages(rollout, value, memory[:1], gamma=0.5, lam=0.9)
    assert advantage[:, 0, 0].tolist() == [0.5 * 5.0 - 1.0, 0.5 * 2.0 - 2.0, 0.5 * 3.0 - 3.0]


def test_rewards_between_two_decisions_belong_to_the_first():
    """Computed by hand: decisions at rows 0 and 3."""
    rollout = random_rollout(4, 1, 1, False, 0, 0.0, 0.0, waits=True)
    rollout.is_decision_step.copy_(torch.tensor([1, 0, 0, 1, 1]).bool().view(5, 1, 1))
    rollout.reward.copy_(torch.tensor([1.0, 2.0, 4.0, 8.0]).view(4, 1, 1))
    value = torch.tensor([3.0, 100.0, 100.0, 5.0, 6.0]).view(5, 1, 1)
    advantage, _ = advantages(rollout, value, np.zeros((4, 1, 1)), gamma=0.5, lam=0.5)
    second = 8.0 + 0.5 * 6.0 - 5.0
    first = 1.0 + 0.5 * 2.0 + 0.25 * 4.0 + 0.125 * (5.0 + 0.5 * second) - 3.0
    np.testing.assert_allclose(advantage.ravel(), [first, 0.0, 0.0, second])


@pytest.mark.parametrize(
    ("terminates", "truncates"), [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)], ids=["end", "cut", "both", "none"]
)
@pytest.mark.parametrize("leaves", [True, False])
def test_advantages_when_every_step_ends_the_same_way(terminates, truncates, leaves):
    compare(random_rollout(9, 3, 2, leaves, 0, terminates, truncates))


def test_one_env_and_one_step():
    """Computed by hand: A = r + gamma V' - V, with V' the next value, 0, or that of the final observation."""
    for terminated, truncated, following in [(0, 0, 5.0), (1, 0, 0.0), (0, 1, 7.0), (1, 1, 0.0)]:
        rollout = random_rollout(1, 1, 1, False, 0)
        rollout.reward.fill_(2.0)
        rollout.terminated.fill_(bool(terminated))
        rollout.truncated.fill_(bool(truncated))
        advantage, target = advantages(rollout, [[[3.0]], [[5.0]]], [[[7.0]]], gamma=0.5, lam=0.9)
        assert advantage.item() == 2.0 + 0.5 * following - 3.0
        assert target.item() == 2.0 + 0.5 * following


def test_all_agents_dead_from_the_start():
    """Advantages are 0, and targets equal the values."""
    rollout = random_rollout(6, 4, 3, True, 0, 0.0, 0.0)
    rollout.alive.fill_(False)
    advantage, _ = compare(rollout)
    assert not advantage.any()


def test_rows_after_death_are_ignored():
    """Rewards and values after an agent left do not change its earlier advantages."""
    rng = np.random.default_rng(0)
    value = rng.normal(size=(9, 2, 2)).astype(np.float32)
    rollout = random_rollout(8, 2, 2, True, 0, 0.0, 0.0)
    rollout.alive.fill_(True)
    rollout.alive[5:, :, 0] = False
    before, _ = advantages(rollout, value, np.zeros((8, 2, 2)), 0.9, 0.9)
    rollout.reward[5:, :, 0] = 1e6
    value[5:, :, 0] = 1e6
    after, _ = advantages(rollout, value, np.zeros((8, 2, 2)), 0.9, 0.9)
    np.testing.assert_array_equal(before, after)


def test_lambda_one_sums_rewards_and_lambda_zero_is_the_td_error():
    rollout = random_rollout(7, 2, 1, False, 1, 0.0, 0.0)
    value = np.random.default_rng(0).normal(size=(8, 2, 1)).astype(np.float32)
    reward = rollout.reward.numpy()
    _, returns = advantages(rollout, value, np.zeros((7, 2, 1)), gamma=1.0, lam=1.0)
    np.testing.assert_allclose(returns[0], reward.sum(axis=0) + value[-1], rtol=1e-5)
    errors, _ = advantages(rollout, value, np.zeros((7, 2, 1)), gamma=0.5, lam=0.0)
    np.testing.assert_allclose(errors, reward + 0.5 * value[1:] - value[:-1], rtol=1e-5, atol=1e-6)


def test_rewards_are_scaled():
    compare(random_rollout(8, 3, 1, False, 2), scale=0.25)


def test_many_envs_over_threads(monkeypatch):
    """Slices over CPU threads give each env the same advantages."""
    monkeypatch.setattr("shoal.core.launch.cpu_threads", lambda: 2)
    rollout = random_rollout(3, 8200, 1, False, 3)
    value = np.random.default_rng(0).normal(size=(4, 8200, 1)).astype(np.float32)
    final = np.random.default_rng(1).normal(size=(3, 8200, 1)).astype(np.float32)
    found, _ = advantages(rollout, value, final, 0.9, 0.9)
    expected, _ = reference_advantages(rollout, value, final, 0.9, 0.9)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(steps=st.integers(1, 10), envs=st.integers(1, 4), agents=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_discounted_sums_equal_the_reference_over_several_rollouts(steps, envs, agents, seed):
    """Sums continue across rollouts and restart with each episode."""
    carry = torch.zeros(envs, agents)
    running = np.zeros((envs, agents))
    total = torch.zeros(steps, envs, agents)
    for i in range(3):
        rollout = random_rollout(steps, envs, agents, False, seed + i)
        discounted_plan(rollout, carry, total, 0.9)()
        for t in range(steps):
            running = 0.9 * running + rollout.reward[t].numpy()
            np.testing.assert_allclose(total[t], running, rtol=1e-4, atol=1e-4)
            running[(rollout.terminated[t] | rollout.truncated[t]).numpy()] = 0.0
        np.testing.assert_allclose(carry, running, rtol=1e-4, atol=1e-4)


# --- V-trace ----------------------------------------------------------------------------------------------------------


def vtrace_reference(rollout, value, final_value, ratio, gamma, lam, rho, c):
    """The paper's sum definition of the targets, without recursion."""
    steps, envs, agents = rollout.reward.shape
    target, advantage = np.zeros((2, steps, envs, agents))
    reward, terminated, truncated = (x.numpy() for x in (rollout.reward, rollout.terminated, rollout.truncated))
    for env in range(envs):
        slots = np.cumsum(truncated[:, env] & ~terminated[:, env]) - 1
        for agent in range(agents):
            w, v = ratio[:, env, agent], value[:, env, agent]

            def after(t, env=env, agent=agent, slots=slots, v=v):
                """Bootstrap value after row t, and whether the episode continues."""
                if terminated[t, env]:
                    return 0.0, False
                return (final_value[slots[t], env, agent], False) if truncated[t, env] else (v[t + 1], True)

            for start in range(steps):
                total, weight = v[start], 1.0
                for t in range(start, steps):
                    ahead, goes_on = after(t)
                    total += weight * min(w[t], rho) * (reward[t, env, agent] + gamma * ahead - v[t])
                    weight *= gamma * lam * min(w[t], c)
                    if not goes_on:
                        break
                target[start, env, agent] = total
            for t in range(steps):
                ahead, goes_on = after(t)
                if goes_on and t + 1 < steps:
                    ahead += lam * (target[t + 1, env, agent] - v[t + 1])
                advantage[t, env, agent] = reward[t, env, agent] + gamma * ahead - v[t]
    return advantage, target


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 10),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.7, 1.0]),
    clips=st.sampled_from([(1.0, 1.0), (2.0, 0.5), (0.3, 1.5)]),
    seed=st.integers(0, 2**31),
)
def test_vtrace_equals_the_reference(steps, gamma, lam, clips, seed):
    rollout, rng = random_rollout(steps, 3, 2, False, seed), np.random.default_rng(seed)
    value, final_value = rng.normal(size=(2, steps + 1, 3, 2)).astype(np.float32)
    ratio = np.exp(rng.normal(size=(steps, 3, 2))).astype(np.float32)
    expected = vtrace_reference(rollout, value, final_value, ratio, gamma, lam, *clips)
    found = advantages(rollout, value, final_value[:steps], gamma, lam, ratio=torch.tensor(ratio), clips=clips)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("waits", [False, True])
def test_vtrace_on_policy_equals_gae(waits):
    rollout, rng = random_rollout(9, 4, 3, True, 3, waits=waits), np.random.default_rng(0)
    value, final_value = rng.normal(size=(2, 10, 4, 3)).astype(np.float32)
    plain = advantages(rollout, value, final_value, 0.97, 0.9)
    traced = advantages(rollout, value, final_value, 0.97, 0.9, ratio=torch.ones(9, 4, 3))
    for one, other in zip(plain, traced, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
