"""Invalid worlds and actions are refused by name."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import warp as wp

from shoal.core import Box, Discrete, Field, ForGroup, Group, KernelWorld
from shoal.core.errors import ShoalError
from shoal.core.kernel_world import NO_LIMIT
from shoal.core.world import GroupOutputs, Outputs
from tests.helpers import Counting, saved

GROUPS = tuple(Group(name, observation=Box(1), action=Discrete(2)) for name in ("a", "b"))


@pytest.fixture(scope="module")
def counting():
    return Counting(9)


def world_with(step, config=None, **changes):
    """Counting with replaced parts."""
    parts = dict(state=Counting.state, groups=Counting.groups, step=step, reset=count_zero, observe=show_clock)
    parts["Config"] = config or KernelWorld.Config
    return type("Odd", (KernelWorld,), {**parts, **changes})


@wp.func
def count_zero(env: int, clock: wp.array[int]):
    clock[env] = 0


@wp.func
def show_clock(env: int, clock: wp.array[int], observation: wp.array2d[float]):
    observation[env, 0] = float(clock[env])


@wp.func
def misspelt(env: int, clok: wp.array[int]):
    clok[env] = 1


@wp.func
def wrong_type(env: int, clock: wp.array[float]):
    clock[env] = 1.0


@wp.func
def wrong_dimensions(env: int, clock: wp.array3d[int]):
    clock[env, 0, 0] = 1


@wp.func
def array_as_number(env: int, clock: int, reward: wp.array[float]):
    reward[env] = float(clock)


@wp.func
def without_env(clock: wp.array[int]):
    clock[0] = 1


@wp.func
def odd_rng(env: int, rng: int, clock: wp.array[int]):
    clock[env] = rng


@wp.func
def per_agent(env: int, agent: int, clock: wp.array[int]):
    clock[env] = agent


def plain_python(env, clock):
    clock[env] = 1


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (misspelt, r"misspelt.*'clok'.*did you mean 'clock'"),
        (wrong_type, r"wrong_type.*'clock'.*int32.*float"),
        (wrong_dimensions, r"wrong_dimensions.*'clock'.*3-D"),
        (array_as_number, r"array_as_number.*provides an array for the parameter 'clock'"),
        (without_env, r"without_env.*`env: int`"),
        (odd_rng, r"odd_rng.*rng: Random"),
        ([plain_python], r"plain_python.*@wp.func"),
    ],
)
def test_a_function_with_a_bad_parameter_is_named(step, says):
    with pytest.raises(ShoalError, match=says):
        world_with(step)(2)


def test_a_setting_taken_for_an_array_is_named():
    @dataclass(frozen=True)
    class Config:
        clok: int = 3

    with pytest.raises(ShoalError, match=r"misspelt.*\(a setting\) for the parameter 'clok'"):
        world_with(misspelt, Config)(2)


def test_a_setting_named_like_an_array_is_named():
    @dataclass(frozen=True)
    class Config:
        clock: int = 3

    with pytest.raises(ShoalError, match=r"Odd: clock is both a setting and an array"):
        world_with(count_zero, Config)(2)


def test_an_array_named_like_a_standard_one_is_named():
    with pytest.raises(ShoalError, match="'reward'"):
        world_with(count_zero, state=dict(clock=Field(int), reward=Field()))(2)


def test_a_function_per_agent_needs_a_group_where_there_are_several():
    with pytest.raises(ShoalError, match=r"per_agent.*ForGroup"):
        world_with(per_agent, groups=GROUPS)(2)


def test_an_unknown_group_is_named():
    with pytest.raises(ShoalError, match=r"There is no group of Odd named 'hippo'; choose one of: a, b\."):
        world_with(ForGroup("hippo", per_agent), groups=GROUPS)(2)


def test_a_missing_stage_and_missing_groups_are_named():
    with pytest.raises(ShoalError, match="`step`"):
        type("Odd", (KernelWorld,), dict(groups=Counting.groups))(2)
    with pytest.raises(ShoalError, match=r"Odd.*groups"):
        world_with(count_zero, groups=())(2)


@pytest.mark.parametrize("envs", [0, -3])
def test_a_world_needs_envs(envs):
    with pytest.raises(ShoalError, match=f"num_envs={envs}"):
        Counting(envs)


def test_a_time_limit_below_one_is_refused():
    with pytest.raises(ShoalError, match=r"max_steps.*0"):
        Counting(2, config=Counting.Config(max_steps=0))


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        (torch.zeros(9, 1), "'counter'.*int32.*float32"),
        (torch.zeros(9, dtype=torch.int32), r"'counter'.*\(9, 1\)"),
        (torch.zeros(8, 1, dtype=torch.int32), r"'counter'.*\(9, 1\).*\(8, 1\)"),
        (torch.full((9, 1), 3, dtype=torch.int32), "'counter'.*3 at index"),
        (torch.full((9, 1), -1, dtype=torch.int32), "'counter'.*-1 at index"),
        ({"other": torch.zeros(9, 1, dtype=torch.int32)}, "'counter'|'other'"),
    ],
)
def test_wrong_actions_are_named_and_change_nothing(counting, actions, says):
    counting.reset(0)
    before = saved(counting)
    with pytest.raises(ShoalError, match=says):
        counting.step(actions)
    for name, tensor in counting.state_dict().items():
        np.testing.assert_array_equal(tensor, before[name], err_msg=name)


def test_actions_for_a_group_that_does_not_exist_are_named(counting):
    counting.reset(0)
    actions = {"counter": torch.zeros(9, 1, dtype=torch.int32), "ghost": torch.zeros(9, 1, dtype=torch.int32)}
    with pytest.raises(ShoalError, match="ghost"):
        counting.step(actions)


def test_wrong_actions_are_refused_in_a_row_used_before(counting):
    """A tensor at a known address is checked again if its shape differs."""
    base = torch.zeros(9, 1, dtype=torch.int32)
    group = GroupOutputs(torch.zeros(9, 1, 2), torch.zeros(9, 1), torch.zeros(9, 1, 2))
    into = Outputs(torch.zeros(9, dtype=torch.bool), torch.zeros(9, dtype=torch.bool), {"counter": group})
    counting.reset(0)
    counting.step(base, into=into)
    with pytest.raises(ShoalError, match="'counter'"):
        counting.step(base[:4], into=into)


def test_step_before_reset_and_after_close():
    world = Counting(2)
    actions = torch.zeros(2, 1, dtype=torch.int32)
    for use in (lambda: world.step(actions), lambda: world.play({"counter": actions[None]})):
        with pytest.raises(ShoalError, match=r"counting.*reset"):
            use()
    world.reset(0)
    world.step(actions)
    world.close()
    for use in (lambda: world.step(actions), lambda: world.play({"counter": actions[None]})):
        with pytest.raises(ShoalError, match=r"counting.*close"):
            use()
    world.reset(0)
    assert world.step(actions).groups["counter"].reward.tolist() == [[1.0], [1.0]]


def test_time_limit_is_known_only_if_nothing_else_truncates():
    @wp.func
    def truncate(env: int, truncated: wp.array[wp.bool]):
        truncated[env] = True

    assert Counting(1).time_limit == 5
    assert world_with(count_zero)(1).time_limit == NO_LIMIT
    assert world_with(truncate, Counting.Config)(1).time_limit is None


@wp.func
def mixed_numbers(env: int, push: float, reward: wp.array[float]):
    reward[env] = 2 * push


@wp.func
def whole_push(env: int, push: int, reward: wp.array[float]):
    reward[env] = float(push)


@dataclass(frozen=True)
class Pushed:
    push: float = 0.5


def test_a_setting_of_another_type_is_named():
    with pytest.raises(ShoalError, match=r"'push' is annotated int, but the setting is 0.5"):
        world_with(whole_push, Pushed)(1)


def test_a_function_that_does_not_compile_is_refused_in_one_sentence():
    world = world_with(mixed_numbers, Pushed)(1)
    world.reset(0)
    with pytest.raises(ShoalError, match=r"does not compile.*mixed_numbers.*2 \* push"):
        world.step(torch.zeros(1, 1, dtype=torch.int32))


def test_a_forgotten_decorator_is_named():
    def bare(env: int, clock: wp.array[int]):
        clock[env] = 0

    with pytest.raises(ShoalError, match=r"bare takes `env` but has no @wp\.func"):
        world_with(bare)(1)
