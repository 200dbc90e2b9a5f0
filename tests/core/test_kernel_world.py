"""Kernel worlds: batches, threads, restarts, statistics, saved states, worlds written with torch."""

import gc
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import warp as wp

from shoal.core import Box, Discrete, Field, Group, KernelWorld, Random, normal, uniform
from shoal.core.errors import ShoalError
from shoal.core.world import GroupOutputs, Outputs
from tests.helpers import (
    Counting,
    CountingReference,
    assert_same,
    play_references,
    play_world,
    random_actions,
    saved,
)

# --- Drift: random starts, steps and ends; as kernels and with torch ------------------------------------------------


@wp.func
def drift(
    env: int,
    rng: Random,
    action: wp.array[int],
    place: wp.array[wp.vec2],
    reward: wp.array[float],
    terminated: wp.array[wp.bool],
):
    push = float(action[env] - 1)
    p = place[env]
    x = p[0] + 0.25 * push + uniform(rng, 3, -0.5, 0.5)
    y = p[1] + normal(rng, 4)
    place[env] = wp.vec2(x, y)
    reward[env] = x
    terminated[env] = wp.abs(x) > 1.0


@wp.func
def scatter(env: int, rng: Random, place: wp.array[wp.vec2]):
    place[env] = wp.vec2(uniform(rng, 0, -1.0, 1.0), uniform(rng, 1, -1.0, 1.0))


@wp.func
def show_place(env: int, place: wp.array[wp.vec2], observation: wp.array[wp.vec2]):
    observation[env] = place[env]


class Drift(KernelWorld):
    @dataclass(frozen=True)
    class Config:
        max_steps: int = 6

    state = dict(place=Field(wp.vec2))
    groups = (Group("leaf", observation=Box(2), action=Discrete(3)),)
    step, reset, observe = drift, scatter, show_place


class TorchDrift(KernelWorld):
    @dataclass(frozen=True)
    class Config:
        max_steps: int = 6

    state = dict(place=Field(wp.vec2))
    groups = (Group("leaf", observation=Box(2), action=Discrete(3)),)

    def step(self, s):
        x = s.place[:, 0] + 0.25 * (s.action[:, 0] - 1) + self.uniform(-0.5, 0.5, stream=3)
        y = s.place[:, 1] + self.normal(stream=4)
        s.place.copy_(torch.stack([x, y], dim=1))
        s.reward[:, 0].copy_(x)
        s.terminated.copy_(x.abs() > 1.0)

    def reset(self, s):
        return {"place": self.uniform(-1.0, 1.0, (2,))}

    def observe(self, s):
        return s.place


@pytest.fixture(scope="module")
def counting():
    return Counting(9)


# --- restarts and statistics ----------------------------------------------------------------------------------------


def test_restart_in_the_same_step():
    """Env 0 ends at steps 1 and 6 (two flags), env 1 at 4 (its own rule), env 2 by the time limit at 5."""
    world = Counting(3)
    out = world.reset(0)
    group = out.groups["counter"]
    assert group.observation[:, 0].tolist() == [[0, 0], [0, 1000], [0, 2000]]
    rows = []
    for _ in range(6):
        out = world.step(torch.ones(3, 1, dtype=torch.int32))
        group = out.groups["counter"]
        rows.append([t.clone() for t in (group.observation, group.reward, out.terminated, out.truncated)])
    columns = zip(*rows, strict=True)
    observation, reward, terminated, truncated = (torch.stack(column).squeeze().tolist() for column in columns)
    # Lengths of episodes: env 0: 1, 6 -> truncated at 5; env 1: 4, 2; env 2: 7 -> truncated at 5, then 5: both flags.
    assert [[int(e[0]) for e in row] for row in observation] == [
        [0, 1, 1],
        [1, 2, 2],
        [2, 3, 3],
        [3, 0, 4],
        [4, 1, 0],
        [0, 0, 1],
    ]
    assert [[int(e[1]) % 1000 for e in row] for row in observation] == [
        [1, 0, 0],
        [1, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 2, 1],
    ]
    assert reward == [[11, 11, 11], [11, 12, 12], [12, 13, 13], [13, 14, 14], [14, 11, 15], [15, 12, 11]]
    assert [[int(f) for f in row] for row in terminated] == [
        [1, 0, 0],
        [0, 0, 0],
        [0, 0, 0],
        [0, 1, 0],
        [0, 0, 0],
        [0, 1, 0],
    ]
    assert [[int(f) for f in row] for row in truncated] == [
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 1],
        [1, 0, 0],
    ]
    final = world.outputs.groups["counter"].final_observation.squeeze().tolist()
    assert final == [[5, 1], [2, 1001], [5, 2000]]  # env 2 ended a step before: an old value


def test_long_play_equals_the_reference(counting):
    """Forty steps with ends of every kind, including both flags at once."""
    actions = random_actions(40, 9)
    record = play_world(counting, actions)
    assert_same(record, play_references([CountingReference(i) for i in range(9)], actions))
    assert (record.terminated & record.truncated).any()
    assert (record.terminated & ~record.truncated).any()
    assert (record.truncated & ~record.terminated).any()


@pytest.mark.parametrize("max_steps", [1, 2])
def test_very_short_episodes_in_one_env(max_steps):
    world = Counting(1, config=Counting.Config(max_steps=max_steps))
    actions = random_actions(12, 1)
    record = play_world(world, actions)
    assert_same(record, play_references([CountingReference(0, max_steps)], actions))
    assert world.store.last_length.tolist() == [1 if max_steps == 1 or record.terminated[-1, 0] else 2]


def test_statistics_equal_the_references(counting):
    actions = random_actions(50, 9, seed=1)
    record = play_world(counting, actions)
    episodes, return_sum, length_sum = np.zeros(9, int), np.zeros(9), np.zeros(9, int)
    running, length, last_return, last_length = np.zeros(9), np.zeros(9, int), np.zeros(9), np.zeros(9, int)
    for t in range(50):
        running += record.reward[t]
        length += 1
        for i in np.flatnonzero(record.terminated[t] | record.truncated[t]):
            episodes[i] += 1
            return_sum[i] += running[i]
            length_sum[i] += length[i]
            last_return[i], last_length[i] = running[i], length[i]
            running[i] = length[i] = 0
    found = counting.statistics()
    np.testing.assert_array_equal(found.episodes, episodes)
    np.testing.assert_array_equal(found.return_sum["counter"], return_sum)
    np.testing.assert_array_equal(found.length_sum, length_sum)
    last = counting.last_episode()
    returns, lengths = last.returns, last.length
    np.testing.assert_array_equal(returns["counter"], last_return)
    np.testing.assert_array_equal(lengths, last_length)


def test_a_second_reset_starts_over(counting):
    """After a second reset with the same seed nothing is left of the first."""
    actions = random_actions(20, 9)
    first = play_world(counting, actions)
    assert_same(first, play_world(counting, actions))
    counting.reset(0)
    assert not counting.statistics().episodes.any()


def test_hold_keeps_envs_as_they_are(counting):
    """Held envs do not change; the others continue as if alone."""
    references = [CountingReference(i) for i in range(9)]
    seen = [reference.reset() for reference in references]
    counting.reset(0)
    rng = np.random.default_rng(0)
    for action in random_actions(30, 9):
        hold = rng.random(9) < 0.4
        out = counting.step(torch.as_tensor(action)[:, None], hold=torch.as_tensor(hold))
        group = out.groups["counter"]
        for i in np.flatnonzero(~hold):
            seen[i], reward, terminated, truncated = references[i].step(int(action[i]))
            assert bool(out.terminated[i]) == terminated
            assert bool(out.truncated[i]) == truncated
            assert float(group.reward[i, 0]) == reward
            if terminated or truncated:
                assert group.final_observation[i, 0].tolist() == seen[i].tolist()
                seen[i] = references[i].reset()
        np.testing.assert_array_equal(group.observation[:, 0], np.stack(seen))
    assert counting.statistics().episodes.tolist() == [reference.episode for reference in references]


def test_hold_keeps_the_last_final_observation(counting):
    """The final observation of an env stays readable while the env is held."""
    counting.reset(0)
    counting.step(torch.zeros(9, 1, dtype=torch.int32))
    assert counting.outputs.terminated[0]
    hold = torch.zeros(9, dtype=torch.bool)
    hold[0] = True
    out = counting.step(torch.zeros(9, 1, dtype=torch.int32), hold=hold)
    assert out.groups["counter"].final_observation[0, 0].tolist() == [1, 0]
    assert out.groups["counter"].observation[0, 0].tolist() == [0, 1]


def test_restart_begins_a_new_episode_where_asked(counting):
    counting.reset(0)
    for _ in range(2):
        counting.step(torch.zeros(9, 1, dtype=torch.int32))
    before = counting.outputs.groups["counter"].observation.clone()
    reward = counting.outputs.groups["counter"].reward.clone()
    mask = torch.zeros(9, dtype=torch.bool)
    mask[[2, 5]] = True
    counting.restart(mask)
    after = counting.outputs.groups["counter"]
    np.testing.assert_array_equal(after.observation[~mask], before[~mask])
    assert (after.observation[mask, 0, 0] == 0).all()
    np.testing.assert_array_equal(after.observation[mask, 0, 1], before[mask, 0, 1] + 1)
    np.testing.assert_array_equal(after.reward, reward)
    out = counting.step(torch.zeros(9, 1, dtype=torch.int32))
    assert out.groups["counter"].reward[mask, 0].tolist() == [1.0, 1.0]


def test_step_into_given_tensors_equals_plain_steps(counting):
    """Rows of a rollout get the same outputs as the world's own arrays, and the world continues from there."""
    actions = random_actions(16, 9)
    expected = play_world(counting, actions)
    counting.reset(0)
    observation, reward = torch.full((16, 9, 1, 2), -1.0), torch.full((16, 9, 1), -1.0)
    terminated, truncated = torch.ones(16, 9, dtype=torch.bool), torch.ones(16, 9, dtype=torch.bool)
    final = torch.zeros(9, 1, 2)
    rows = torch.as_tensor(actions)[:, :, None]
    for t in range(16):
        into = Outputs(terminated[t], truncated[t], {"counter": GroupOutputs(observation[t], reward[t], final)})
        assert counting.step(rows[t], into=into) is into
    np.testing.assert_array_equal(observation[:, :, 0], expected.observation)
    np.testing.assert_array_equal(reward[:, :, 0], expected.reward)
    np.testing.assert_array_equal(terminated, expected.terminated)
    np.testing.assert_array_equal(truncated, expected.truncated)


def test_step_into_reads_actions_laid_out_in_any_way(counting):
    """Two tensors that begin at the same address, one with gaps, are two different actions."""
    base = torch.as_tensor(random_actions(1, 18)[0])
    group = GroupOutputs(torch.zeros(9, 1, 2), torch.zeros(9, 1), torch.zeros(9, 1, 2))
    into = Outputs(torch.zeros(9, dtype=torch.bool), torch.zeros(9, dtype=torch.bool), {"counter": group})
    counting.reset(0)
    for actions in (base[:9], base[::2]):
        counting.reset(0)
        counting.step(actions[:, None], into=into)
        assert group.reward[:, 0].tolist() == (1 + 10 * actions).tolist()


def test_play_equals_step_by_step(counting):
    actions = random_actions(20, 9, seed=4)
    expected = play_world(counting, actions)
    state = saved(counting)
    counting.reset(0)
    counting.play({"counter": torch.as_tensor(actions)[:, :, None]})()
    np.testing.assert_array_equal(counting.outputs.groups["counter"].observation[:, 0], expected.observation[-1])
    for name in ("clock", "episode", "step_count", "finished", "return_sum", "length_sum", "last_return", "reward"):
        np.testing.assert_array_equal(counting.store[name], state[name], err_msg=name)


# --- batches and threads --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large_drift():
    actions = random_actions(20, 8192)
    return actions, play_world(Drift(8192), actions, seed=3)


def part(record, rows: slice):
    return type(record)(record.first[rows], *(a[:, rows] for name, a in vars(record).items() if name != "first"))


def test_an_env_does_not_depend_on_its_batch(large_drift):
    """Env i does the same, bit for bit, in a batch of 8, of 1 and of 8192, over restarts."""
    actions, record = large_drift
    assert (record.terminated | record.truncated)[:, :8].any(axis=0).all()
    assert_same(play_world(Drift(8), actions[:, :8], seed=3), part(record, slice(0, 8)))
    assert_same(play_world(Drift(1), actions[:, :1], seed=3), part(record, slice(0, 1)))


def test_a_batch_can_be_split_over_processes(large_drift):
    """A world with envs 4096 to 4100 of a larger one does the same."""
    actions, record = large_drift
    world = Drift(5)
    world.reset(3, first_env=4096)
    assert_same(play_world(world, actions[:, 4096:4101], seed=None), part(record, slice(4096, 4101)))


def test_envs_and_seeds_differ(large_drift):
    actions, record = large_drift
    assert len(np.unique(record.first, axis=0)) == 8192
    assert not (play_world(Drift(8), actions[:, :8], seed=4).first == record.first[:8]).any()


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads, monkeypatch):
    """With uneven slices over CPU threads, results are those of one thread."""
    envs = 3 * 4096 + 5
    actions = random_actions(10, envs)
    records = []
    for n in (1, threads):
        monkeypatch.setattr("shoal.core.launch.cpu_threads", lambda n=n: n)
        records.append(play_world(Drift(envs), actions))
    assert_same(*records)


def test_play_on_threads_equals_step_by_step(monkeypatch):
    monkeypatch.setattr("shoal.core.launch.cpu_threads", lambda: 2)
    world = Drift(8195)
    actions = random_actions(10, 8195)
    expected = play_world(world, actions)
    world.reset(0)
    world.play({"leaf": torch.as_tensor(actions)[:, :, None]})()
    np.testing.assert_array_equal(world.outputs.groups["leaf"].observation[:, 0], expected.observation[-1])


def test_a_world_is_freed_without_the_garbage_collector():
    """A reference cycle would keep its memory until the next collection."""
    world = Drift(8)
    play_world(world, random_actions(3, 8))
    reference = weakref.ref(world)
    gc.disable()
    try:
        del world
        assert reference() is None
    finally:
        gc.enable()


# --- saved states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Drift, TorchDrift])
def test_a_saved_state_continues_bit_for_bit(kind):
    world = kind(8)
    actions = random_actions(30, 8)
    play_world(world, actions[:13], seed=5)
    state = saved(world)
    expected = play_world(world, actions[13:], seed=None)
    other = kind(8)
    other.load_state_dict(state)
    assert_same(play_world(other, actions[13:], seed=None), expected)
    for name, tensor in world.state_dict().items():
        np.testing.assert_array_equal(tensor, other.state_dict()[name], err_msg=name)


def test_the_state_of_another_number_of_envs_is_refused():
    small, large = Counting(1), Counting(4)
    small.reset(0)
    large.reset(0)
    with pytest.raises((ShoalError, RuntimeError)):
        large.load_state_dict(saved(small))


# --- worlds written with torch --------------------------------------------------------------------------------------


def test_torch_world_equals_the_kernel_world():
    """Random numbers, restarts and statistics are equal; results differ by rounding at most."""
    actions = random_actions(40, 16)
    one, other = Drift(16), TorchDrift(16)
    kernels, methods = play_world(one, actions, seed=9), play_world(other, actions, seed=9)
    assert_same(kernels, methods)
    assert kernels.terminated.any()
    np.testing.assert_array_equal(one.statistics().return_sum["leaf"], other.statistics().return_sum["leaf"])


def test_torch_world_with_hold_equals_the_kernel_world():
    one, other = Drift(16), TorchDrift(16)
    one.reset(2)
    other.reset(2)
    rng = np.random.default_rng(0)
    for row in random_actions(25, 16):
        hold = torch.as_tensor(rng.random(16) < 0.5)
        actions = torch.as_tensor(row)[:, None]
        a, b = one.step(actions, hold=hold), other.step(actions, hold=hold)
        np.testing.assert_array_equal(a.groups["leaf"].observation, b.groups["leaf"].observation)
        np.testing.assert_array_equal(a.terminated, b.terminated)
        np.testing.assert_array_equal(a.groups["leaf"].reward, b.groups["leaf"].reward)
    np.testing.assert_array_equal(one.statistics().episodes, other.statistics().episodes)


@pytest.mark.parametrize("bounds", [(-0.6, -0.4), (0.1, 0.7)])
def test_torch_uniform_is_the_kernels_uniform(bounds):
    """`self.uniform` gives the bits of a kernel's `uniform` for any bounds."""
    low, high = bounds

    @wp.func
    def put(env: int, rng: Random, low: float, high: float, place: wp.array[float]):
        place[env] = uniform(rng, 5, low, high)

    @wp.func
    def nothing(env: int, place: wp.array[float]):
        place[env] = place[env]

    @wp.func
    def show(env: int, place: wp.array[float], observation: wp.array2d[float]):
        observation[env, 0] = place[env]

    class Put(KernelWorld):
        @dataclass(frozen=True)
        class Config:
            low: float
            high: float

        state = dict(place=Field())
        groups = (Group("g", observation=Box(1), action=Discrete(1)),)
        step, reset, observe = nothing, put, show

    world = Put(512, config=Put.Config(low, high))
    world.reset(1)
    np.testing.assert_array_equal(world.store.place, world.uniform(low, high, stream=5))


class TorchQuitters(KernelWorld):
    """Two agents; agent 0 leaves after two steps."""

    state = dict(clock=Field(int))
    groups = (Group("g", observation=Box(1), action=Discrete(2), agents=2, can_leave=True),)

    def step(self, s):
        s.clock.add_(1)
        s.alive[:, 0] = s.clock < 2

    def reset(self, s):
        return {"clock": torch.zeros_like(s.clock)}

    def observe(self, s):
        return s.clock[:, None, None].expand(-1, 2, 1)


def test_torch_step_does_not_change_alive_of_held_envs():
    world = TorchQuitters(3)
    world.reset(0)
    actions = torch.zeros(3, 2, dtype=torch.int32)
    world.step(actions)
    out = world.step(actions, hold=torch.tensor([False, True, False]))
    assert out.groups["g"].alive.tolist() == [[False, True], [True, True], [False, True]]
    assert out.groups["g"].observation[:, 0, 0].tolist() == [2, 1, 2]


def test_a_world_with_a_torch_step_has_no_known_time_limit():
    assert TorchDrift(1).time_limit is None
