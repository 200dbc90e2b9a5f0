"""Wrappers against slow references around one env each, with ends at any time."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import warp as wp

from shoal.core import Box, Discrete, Field, Group, KernelWorld
from shoal.core.errors import ShoalError
from shoal.core.wrappers import ActionRepeat, Apply, FrameStack, TimeLimit, TransformObservation, TransformReward
from shoal.training.collector import truncations
from tests.helpers import Counting, CountingReference, assert_same, play_references, play_world, random_actions, saved

ENVS = 9

# --- references: each wraps one env with reset() and step() --------------------------------------------------------


class RepeatReference:
    def __init__(self, env, times):
        self.env, self.times = env, times

    def reset(self):
        return self.env.reset()

    def step(self, action):
        total = 0.0
        for _ in range(self.times):
            seen, reward, terminated, truncated = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return seen, total, terminated, truncated


class LimitReference:
    def __init__(self, env, steps):
        self.env, self.steps = env, steps

    def reset(self):
        self.count = 0
        return self.env.reset()

    def step(self, action):
        self.count += 1
        seen, reward, terminated, truncated = self.env.step(action)
        return seen, reward, terminated, truncated or self.count >= self.steps


class ChangeReference:
    def __init__(self, env, see=lambda x: x, pay=lambda x: x):
        self.env, self.see, self.pay = env, see, pay

    def reset(self):
        return self.see(self.env.reset())

    def step(self, action):
        seen, reward, *ends = self.env.step(action)
        return self.see(seen), self.pay(reward), *ends


def square_small(r):
    return r * r / 8.0


def sum_and_double(x):
    """Turns the two numbers of Counting's observation into three."""
    joined = [x[..., :1] + x[..., 1:], 2 * x]
    return torch.cat(joined, dim=-1) if isinstance(x, torch.Tensor) else np.concatenate(joined, axis=-1)


def show_half(outputs):
    for group in outputs.groups.values():
        group.observation.mul_(0.5)
        group.final_observation.mul_(0.5)
        group.reward.add_(3.0)


PAIRS = {
    "FrameStack": (lambda w: FrameStack(w, 3), lambda e: e),
    "ActionRepeat": (lambda w: ActionRepeat(w, 3), lambda e: RepeatReference(e, 3)),
    "ActionRepeat once": (lambda w: ActionRepeat(w, 1), lambda e: e),
    "TimeLimit": (lambda w: TimeLimit(w, 3), lambda e: LimitReference(e, 3)),
    "TimeLimit of one": (lambda w: TimeLimit(w, 1), lambda e: LimitReference(e, 1)),
    "TimeLimit beyond the world's": (lambda w: TimeLimit(w, 8), lambda e: LimitReference(e, 8)),
    "TransformReward": (lambda w: TransformReward(w, square_small), lambda e: ChangeReference(e, pay=square_small)),
    "TransformObservation": (
        lambda w: TransformObservation(w, sum_and_double, Box(3)),
        lambda e: ChangeReference(e, see=sum_and_double),
    ),
    "Apply": (lambda w: Apply(w, show_half), lambda e: ChangeReference(e, lambda x: 0.5 * x, lambda r: r + 3.0)),
    "stack of repeats": (lambda w: FrameStack(ActionRepeat(w, 2), 3), lambda e: RepeatReference(e, 2)),
    "repeat of stacks": (lambda w: ActionRepeat(FrameStack(w, 3), 2), lambda e: RepeatReference(e, 2)),
    "repeat of a limit": (
        lambda w: ActionRepeat(TimeLimit(w, 3), 2),
        lambda e: RepeatReference(LimitReference(e, 3), 2),
    ),
    "limit of repeats": (
        lambda w: TimeLimit(ActionRepeat(w, 2), 2),
        lambda e: LimitReference(RepeatReference(e, 2), 2),
    ),
    "limit of stacks": (lambda w: TimeLimit(FrameStack(w, 2), 3), lambda e: LimitReference(e, 3)),
    "stack of a limit": (lambda w: FrameStack(TimeLimit(w, 3), 2), lambda e: LimitReference(e, 3)),
    "limit of a limit": (lambda w: TimeLimit(TimeLimit(w, 4), 3), lambda e: LimitReference(LimitReference(e, 4), 3)),
    "limits around repeats": (
        lambda w: TimeLimit(ActionRepeat(TimeLimit(w, 4), 3), 2),
        lambda e: LimitReference(RepeatReference(LimitReference(e, 4), 3), 2),
    ),
    "repeat of repeats": (
        lambda w: ActionRepeat(ActionRepeat(w, 2), 2),
        lambda e: RepeatReference(RepeatReference(e, 2), 2),
    ),
    "all of them": (
        lambda w: TransformReward(FrameStack(ActionRepeat(TransformObservation(w, torch.neg), 2), 3), square_small),
        lambda e: ChangeReference(RepeatReference(ChangeReference(e, np.negative), 2), pay=square_small),
    ),
}


@pytest.fixture(params=PAIRS, ids=list(PAIRS))
def pair(request):
    return PAIRS[request.param]


def counting(max_steps: int = 5):
    return Counting(ENVS, config=Counting.Config(max_steps=max_steps))


def test_a_wrapper_equals_its_reference(pair):
    wrap, reference = pair
    actions = random_actions(40, ENVS)
    record = play_world(wrap(counting()), actions)
    assert_same(record, play_references([reference(CountingReference(i)) for i in range(ENVS)], actions))
    assert (record.terminated | record.truncated).any(axis=0).all()


def test_spaces_have_the_shapes_of_the_outputs(pair):
    world = pair[0](counting())
    group = world.groups[0]
    out = world.reset(0).groups["counter"]
    shape = (ENVS, 1, *group.observation.shape)
    assert (tuple(out.observation.shape), tuple(out.final_observation.shape)) == (shape, shape)


def test_stacks_are_of_policy_observations():
    """A world outputs each observation once; the group has the number that a policy gets."""
    world = TimeLimit(FrameStack(FrameStack(counting(), 2), 3), 4)
    (group,) = world.groups
    assert (group.stack, group.observation, group.policy_observation) == (6, Box(2), Box(12))
    assert replace(group, observation=Box((3, 8, 8)), stack=4).policy_observation.shape == (12, 8, 8)
    with pytest.raises(ShoalError, match="stack=0"):
        replace(group, stack=0)


def test_a_second_reset_starts_over(pair):
    world = pair[0](counting())
    actions = random_actions(11, ENVS)
    assert_same(play_world(world, actions), play_world(world, actions))


@pytest.fixture
def saved_and_loaded(pair):
    """A world in the middle of episodes, and another that has loaded its state."""
    world, other = pair[0](counting()), pair[0](counting())
    play_world(world, random_actions(13, ENVS))
    other.load_state_dict(saved(world))
    return world, other


def test_a_saved_state_continues_bit_for_bit(saved_and_loaded):
    world, other = saved_and_loaded
    actions = random_actions(17, ENVS, seed=1)
    expected = play_world(world, actions, seed=None)
    assert_same(play_world(other, actions, seed=None), expected, steps_only=True)


def test_a_loaded_state_has_the_same_observation(saved_and_loaded):
    world, other = saved_and_loaded
    one, two = world.outputs.groups["counter"], other.outputs.groups["counter"]
    np.testing.assert_array_equal(two.observation, one.observation)


def test_hold_keeps_envs_as_they_are(pair):
    """Outputs of held envs do not change; the others continue as their references do."""
    wrap, reference = pair
    world, references = wrap(counting()), [reference(CountingReference(i)) for i in range(ENVS)]
    world.reset(0)
    seen = [t.reset() for t in references]
    rng = np.random.default_rng(0)
    for action in random_actions(30, ENVS):
        hold = rng.random(ENVS) < 0.4
        out = world.step(torch.as_tensor(action)[:, None], hold=torch.as_tensor(hold))
        group = out.groups["counter"]
        for i in np.flatnonzero(~hold):
            seen[i], reward, terminated, truncated = references[i].step(int(action[i]))
            assert (bool(out.terminated[i]), bool(out.truncated[i])) == (terminated, truncated)
            assert float(group.reward[i, 0]) == reward
            if terminated or truncated:
                assert group.final_observation[i, 0].tolist() == seen[i].tolist()
                seen[i] = references[i].reset()
        np.testing.assert_array_equal(group.observation[:, 0], np.stack(seen))


def test_final_observations_stay_while_an_env_is_held(pair):
    """An outer wrapper may hold an env that has just ended: its final observation must remain."""
    world = pair[0](counting())
    world.reset(0)
    actions = torch.zeros(ENVS, 1, dtype=torch.int32)
    out = world.step(actions)
    for _ in range(4):
        if (out.terminated | out.truncated).any():
            break
        out = world.step(actions)
    ended = out.terminated | out.truncated
    assert ended.any()
    before = out.groups["counter"].final_observation[ended].clone()
    out = world.step(actions, hold=ended)
    np.testing.assert_array_equal(out.groups["counter"].final_observation[ended], before)


def test_restart_changes_only_the_envs_of_its_mask(pair):
    """Envs of the mask start their next episode; nothing else changes, and no reward."""
    wrap, reference = pair
    world, references = wrap(counting()), [reference(CountingReference(i)) for i in range(ENVS)]
    record = play_references(references, random_actions(6, ENVS))
    play_world(world, random_actions(6, ENVS))
    out, group = world.outputs, world.outputs.groups["counter"]
    mask = torch.zeros(ENVS, dtype=torch.bool)
    mask[[1, 4]] = True
    world.restart(mask)
    expected = record.observation[-1].copy()
    for i in (1, 4):
        expected[i] = references[i].reset()
    np.testing.assert_array_equal(group.observation[:, 0], expected)
    np.testing.assert_array_equal(group.reward[:, 0], record.reward[-1])
    np.testing.assert_array_equal(out.terminated, record.terminated[-1])
    np.testing.assert_array_equal(out.truncated, record.truncated[-1])
    ended = record.terminated[-1] | record.truncated[-1]
    np.testing.assert_array_equal(group.final_observation[ended, 0], record.final[-1][ended])


def test_statistics_are_those_of_the_world():
    """A transformed reward does not change the returns that are reported."""
    plain, changed = counting(), TransformReward(counting(), lambda r: 0 * r)
    actions = random_actions(20, ENVS)
    play_world(plain, actions)
    play_world(changed, actions)
    np.testing.assert_array_equal(plain.statistics().return_sum["counter"], changed.statistics().return_sum["counter"])
    np.testing.assert_array_equal(plain.last_episode().length, changed.last_episode().length)


def test_an_episode_truncated_by_a_wrapper_counts_as_finished():
    world = TimeLimit(counting(), 2)
    actions = random_actions(12, ENVS)
    record = play_world(world, actions)
    np.testing.assert_array_equal(world.statistics().episodes, (record.terminated | record.truncated).sum(axis=0))
    assert world.statistics().length_sum.sum() == 12 * ENVS - world.world.store.step_count.sum()


def test_time_limits_of_wrappers():
    assert ActionRepeat(counting(5), 2).time_limit == 3
    assert TimeLimit(counting(5), 3).time_limit == 3
    assert TimeLimit(counting(5), 9).time_limit == 5
    assert FrameStack(counting(5), 2).time_limit == 5


@wp.func
def drift(env: int, x: wp.array[float]):
    x[env] = x[env] + 1.0


@wp.func
def arrive(env: int, x: wp.array[float]):
    x[env] = 0.0


@wp.func
def look(env: int, x: wp.array[float], observation: wp.array2d[float]):
    observation[env, 0] = x[env]


class Endless(KernelWorld):
    """No time limit, and nothing that truncates."""

    @dataclass(frozen=True)
    class Config:
        """Nothing to set."""

    state = dict(x=Field(float))
    groups = (Group("one", observation=Box(1), action=Discrete(2)),)
    step, reset, observe = [drift], [arrive], [look]


def test_worlds_that_never_truncate_keep_room_for_one_final_observation():
    world = Endless(2)
    assert truncations(world.time_limit, 64) == truncations(TimeLimit(Endless(2), 300).time_limit, 64) == 1
    assert truncations(TimeLimit(world, 16).time_limit, 64) == 4
    assert ActionRepeat(world, 4).time_limit > 10**8


@pytest.mark.parametrize(
    "make", [lambda w: FrameStack(w, 0), lambda w: ActionRepeat(w, 0), lambda w: TimeLimit(w, 0)], ids=["F", "A", "T"]
)
def test_counts_below_one_are_refused(make):
    with pytest.raises(ShoalError, match=r"at least one.*0"):
        make(counting())


@pytest.mark.parametrize(
    "wrap", [lambda w: FrameStack(w, 2), lambda w: ActionRepeat(w, 2), lambda w: TimeLimit(w, 2)], ids=["F", "A", "T"]
)
def test_a_wrapped_world_refuses_steps_before_reset_and_wrong_actions(wrap):
    world = wrap(counting())
    with pytest.raises(ShoalError, match="reset"):
        world.step(torch.zeros(ENVS, 1, dtype=torch.int32))
    world.reset(0)
    with pytest.raises(ShoalError, match="'counter'"):
        world.step(torch.full((ENVS, 1), 7, dtype=torch.int32))


# --- agents that leave, masked choices ------------------------------------------------------------------------------


@wp.func
def quit_in_turn(env: int, clock: wp.array[int], alive: wp.array2d[wp.bool], reward: wp.array2d[float]):
    """Agent k leaves at step k + 1; there are three, and the world itself never ends."""
    clock[env] = clock[env] + 1
    for agent in range(3):
        reward[env, agent] = 1.0
        if clock[env] == agent + 1:
            alive[env, agent] = False


@wp.func
def clock_zero(env: int, clock: wp.array[int]):
    clock[env] = 0


@wp.func
def show_clock_and_mask(
    env: int, clock: wp.array[int], observation: wp.array3d[float], action_mask: wp.array3d[wp.bool]
):
    """Choice 1 is allowed in the first step of an episode only."""
    for agent in range(3):
        observation[env, agent, 0] = float(clock[env])
        action_mask[env, agent, 0] = True
        action_mask[env, agent, 1] = clock[env] == 0


class Quitters(KernelWorld):
    @dataclass(frozen=True)
    class Config:
        max_steps: int = 100

    state = dict(clock=Field(int))
    groups = (Group("g", observation=Box(1), action=Discrete(2), agents=3, masked=True, can_leave=True),)
    step, reset, observe = quit_in_turn, clock_zero, show_clock_and_mask


@pytest.mark.parametrize(
    ("wrap", "stride", "length"),
    [
        pytest.param(lambda w: w, 1, 100, id="bare"),
        pytest.param(lambda w: TimeLimit(w, 3), 1, 3, id="TimeLimit"),
        pytest.param(lambda w: FrameStack(w, 2), 1, 100, id="FrameStack"),
        pytest.param(lambda w: ActionRepeat(w, 2), 2, 100, id="ActionRepeat"),
        pytest.param(lambda w: TransformReward(TimeLimit(w, 2), torch.neg), 1, 2, id="TransformReward of TimeLimit"),
    ],
)
def test_alive_and_mask_pass_through(wrap, stride, length):
    """After every step, alive flags and masks belong to the episode of the observation."""
    world = wrap(Quitters(4))
    out = world.reset(0)
    for t in range(8):
        clock = (t % length) * stride
        group = out.groups["g"]
        assert (group.observation[:, :, -1] == clock).all()
        assert group.alive.tolist() == [[clock <= agent for agent in range(3)]] * 4
        assert group.action_mask.tolist() == [[[True, clock == 0]] * 3] * 4
        out = world.step(torch.zeros(4, 3, dtype=torch.int32))
