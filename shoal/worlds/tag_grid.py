"""Tag on a grid."""

from dataclasses import dataclass
from typing import Annotated, no_type_check

import warp as wp

from shoal.core import Bounds, Box, Discrete, Field, ForGroup, Group, KernelWorld, Layout2D, Random, uniform4
from shoal.core.settings import Positive

ACTIONS = 5  # stay, +x, -x, +y, -y
PARTIAL = 6
SLOTS = 32
MAX_TAGGERS = 2**20 - 1
"""The array `nearest` has 20 bits for the index of a tagger."""
FAR = wp.constant(wp.int64(0x7FFFFFFFFFFFFFFF))


@wp.func
@no_type_check
def walk(action: int, size: int, x: int, y: int):
    """The cell after one action, and 1.0 if a wall stopped the agent."""
    to_x = x + wp.where(action == 1, 1, 0) - wp.where(action == 2, 1, 0)
    to_y = y + wp.where(action == 3, 1, 0) - wp.where(action == 4, 1, 0)
    inside_x = wp.clamp(to_x, 0, size)
    inside_y = wp.clamp(to_y, 0, size)
    hit = wp.where(inside_x != to_x or inside_y != to_y, 1.0, 0.0)
    return inside_x, inside_y, hit


@wp.func
@no_type_check
def move_runner(
    env: int,
    size: int,
    wall_penalty: float,
    runner_action: wp.array[int],
    runner_x: wp.array[int],
    runner_y: wp.array[int],
    runner_reward: wp.array[float],
    tagged: wp.array[float],
):
    x, y, hit = walk(runner_action[env], size, runner_x[env], runner_y[env])
    runner_x[env] = x
    runner_y[env] = y
    runner_reward[env] = -wall_penalty * hit
    tagged[env] = 0.0


@wp.func
@no_type_check
def move_tagger(
    env: int,
    agent: int,
    size: int,
    wall_penalty: float,
    action: wp.array2d[int],
    x: wp.array2d[int],
    y: wp.array2d[int],
    reward: wp.array2d[float],
    runner_x: wp.array[int],
    runner_y: wp.array[int],
    tagged: wp.array[float],
):
    to_x, to_y, hit = walk(action[env, agent], size, x[env, agent], y[env, agent])
    x[env, agent] = to_x
    y[env, agent] = to_y
    reward[env, agent] = -wall_penalty * hit
    if to_x == runner_x[env] and to_y == runner_y[env]:
        tagged[env] = 1.0  # several taggers may write, all the same value


@wp.func
@no_type_check
def end_game(
    env: int,
    tag_penalty: float,
    step_cost: float,
    tagged: wp.array[float],
    runner_reward: wp.array[float],
    terminated: wp.array[wp.bool],
):
    caught = tagged[env] > 0.0
    runner_reward[env] = runner_reward[env] + wp.where(caught, -tag_penalty, step_cost)
    terminated[env] = caught


@wp.func
@no_type_check
def reward_tagger(
    env: int, agent: int, tag_reward: float, step_cost: float, tagged: wp.array[float], reward: wp.array2d[float]
):
    """Every tagger gets the reward of a tag."""
    reward[env, agent] = reward[env, agent] + wp.where(tagged[env] > 0.0, tag_reward, -step_cost)


@wp.func
@no_type_check
def place_runner(
    env: int, rng: Random, size: int, random_start: bool, runner_x: wp.array[int], runner_y: wp.array[int]
):
    start = uniform4(rng, 0, 0.0, float(size + 1))
    runner_x[env] = wp.where(random_start, int(start[0]), 0)
    runner_y[env] = wp.where(random_start, int(start[1]), 0)


@wp.func
@no_type_check
def place_tagger(
    env: int, agent: int, rng: Random, size: int, random_start: bool, x: wp.array2d[int], y: wp.array2d[int]
):
    start = uniform4(rng, 1 + agent, 0.0, float(size + 1))
    x[env, agent] = wp.where(random_start, int(start[0]), size / 2)
    y[env, agent] = wp.where(random_start, int(start[1]), size / 2)


@wp.func
@no_type_check
def clear_nearest(env: int, nearest: wp.array2d[wp.int64]):
    for slot in range(SLOTS):
        nearest[env, slot] = FAR


@wp.func
@no_type_check
def find_nearest(
    env: int,
    agent: int,
    full_observation: bool,
    x: wp.array2d[int],
    y: wp.array2d[int],
    runner_x: wp.array[int],
    runner_y: wp.array[int],
    nearest: wp.array2d[wp.int64],
):
    """Find the tagger nearest to the runner: the smallest (squared distance, index), in any order of threads.

    Atomic operations on a single address would serialize a thousand threads, so taggers are spread over slots.
    """
    if not full_observation:
        dx = wp.int64(x[env, agent] - runner_x[env])
        dy = wp.int64(y[env, agent] - runner_y[env])
        wp.atomic_min(nearest, env, agent % SLOTS, ((dx * dx + dy * dy) << wp.int64(20)) | wp.int64(agent))


@wp.func
@no_type_check
def write_full(
    env: int,
    me: int,
    size: int,
    max_steps: int,
    step_count: wp.array[int],
    tagger_x: wp.array2d[int],
    tagger_y: wp.array2d[int],
    runner_x: wp.array[int],
    runner_y: wp.array[int],
    row: wp.array[float],
):
    """Write the full observation of agent `me`; the runner is the last agent."""
    scale = 1.0 / float(size)
    taggers = tagger_x.shape[1]
    for other in range(taggers):
        row[4 * other] = float(tagger_x[env, other]) * scale
        row[4 * other + 1] = float(tagger_y[env, other]) * scale
        row[4 * other + 2] = 1.0
        row[4 * other + 3] = wp.where(other == me, 1.0, 0.0)
    row[4 * taggers] = float(runner_x[env]) * scale
    row[4 * taggers + 1] = float(runner_y[env]) * scale
    row[4 * taggers + 2] = 0.0
    row[4 * taggers + 3] = wp.where(me == taggers, 1.0, 0.0)
    row[4 * taggers + 4] = float(step_count[env]) / float(max_steps)


@wp.func
@no_type_check
def write_partial(
    x: int, y: int, other_x: int, other_y: int, is_tagger: float, size: int, time: float, row: wp.array[float]
):
    """Write the partial observation: the agent itself, and the runner or the nearest tagger."""
    scale = 1.0 / float(size)
    row[0] = float(x) * scale
    row[1] = float(y) * scale
    row[2] = float(other_x) * scale
    row[3] = float(other_y) * scale
    row[4] = is_tagger
    row[5] = time


@wp.func
@no_type_check
def observe_tagger(
    env: int,
    agent: int,
    full_observation: bool,
    size: int,
    max_steps: int,
    step_count: wp.array[int],
    tagger_x: wp.array2d[int],
    tagger_y: wp.array2d[int],
    runner_x: wp.array[int],
    runner_y: wp.array[int],
    observation: wp.array3d[float],
):
    if full_observation:
        write_full(
            env, agent, size, max_steps, step_count, tagger_x, tagger_y, runner_x, runner_y, observation[env, agent]
        )
    else:
        time = float(step_count[env]) / float(max_steps)
        x = tagger_x[env, agent]
        y = tagger_y[env, agent]
        write_partial(x, y, runner_x[env], runner_y[env], 1.0, size, time, observation[env, agent])


@wp.func
@no_type_check
def observe_runner(
    env: int,
    full_observation: bool,
    size: int,
    max_steps: int,
    step_count: wp.array[int],
    tagger_x: wp.array2d[int],
    tagger_y: wp.array2d[int],
    runner_x: wp.array[int],
    runner_y: wp.array[int],
    nearest: wp.array2d[wp.int64],
    runner_observation: wp.array2d[float],
):
    if full_observation:
        taggers = tagger_x.shape[1]
        row = runner_observation[env]
        write_full(env, taggers, size, max_steps, step_count, tagger_x, tagger_y, runner_x, runner_y, row)
    else:
        best = nearest[env, 0]
        for slot in range(1, SLOTS):
            best = wp.min(best, nearest[env, slot])
        nearest_tagger = int(best & wp.int64(0xFFFFF))
        time = float(step_count[env]) / float(max_steps)
        x = tagger_x[env, nearest_tagger]
        y = tagger_y[env, nearest_tagger]
        write_partial(runner_x[env], runner_y[env], x, y, 0.0, size, time, runner_observation[env])


class TagGrid(KernelWorld):
    """Taggers chase one runner on a grid; a tag rewards all of them (WarpDrive's Tag, grid).

    | | |
    |---|---|
    | observation | `full_observation`: for every agent x, y (/ size), 1 for taggers, 1 for itself; then time / |
    | | max_steps |
    | or | own x, y; x, y of the runner, or for the runner of the nearest tagger; 1 for taggers; time / max_steps |
    | action | stay, +x, -x, +y, -y |
    | reward | after a tag `tag_reward` for every tagger, -`tag_penalty` for the runner; else the step cost |
    | | is paid by taggers and earned by the runner; -`wall_penalty` against a wall |
    | end | terminated when a tagger is on the runner's cell, truncated after `max_steps` |
    """

    @dataclass(frozen=True)
    class Config:
        num_taggers: Annotated[int, Bounds(ge=1, le=MAX_TAGGERS)] = 4
        """Taggers per env, besides one runner."""
        size: Positive = 100
        """Largest coordinate of a cell: x and y are 0 to `size`, inclusive."""
        max_steps: Positive = 100
        """Steps before an episode is truncated."""
        full_observation: bool = True
        """Observe all agents, instead of six values."""
        random_start: bool = False
        """Start in random cells, instead of taggers in the middle and the runner in a corner."""
        wall_penalty: float = 0.1
        """Penalty for hitting a wall."""
        tag_reward: float = 10.0
        """Reward of each tagger for a tag."""
        tag_penalty: float = 5.0
        """Penalty of the runner for being tagged."""
        step_cost: float = 0.01
        """Cost of a step without a tag for each tagger, and reward for the runner."""

    @staticmethod
    def state(config):
        cells = Field(int, (config.num_taggers,), unit="cells")
        return dict(
            tagger_x=cells,
            tagger_y=cells,
            runner_x=Field(int, (1,), unit="cells"),
            runner_y=Field(int, (1,), unit="cells"),
            tagged=Field(float, doc="1 once the runner is tagged"),
            nearest=Field(wp.int64, (SLOTS,), doc="squared distance and index of the nearest tagger"),
        )

    @staticmethod
    def groups(config):
        observation = Box(4 * (config.num_taggers + 1) + 1 if config.full_observation else PARTIAL)
        return (
            Group("tagger", observation=observation, action=Discrete(ACTIONS), agents=config.num_taggers),
            Group("runner", observation=observation, action=Discrete(ACTIONS)),
        )

    step = (move_runner, ForGroup("tagger", move_tagger), end_game, ForGroup("tagger", reward_tagger))
    reset = (place_runner, ForGroup("tagger", place_tagger))
    observe = (clear_nearest, ForGroup("tagger", find_nearest), ForGroup("tagger", observe_tagger), observe_runner)
    reports = ("tagged",)
    layout = Layout2D(size="size")
    settings = dict(
        common=dict(
            one_policy=True,
            hidden=(64, 64),
            activation="relu",
            shared_encoder=True,
            gamma=0.97,
            ent_coef=0.02,
            world=dict(size=12, random_start=True),
        ),
        cpu=dict(total_steps=3_000_000, num_envs=256, rollout_steps=50),
        gpu=dict(total_steps=200_000_000, num_envs=2000, rollout_steps=100),
        ppo=dict(lr=1e-3, num_minibatches=4, epochs=2),
        a2c=dict(lr=1e-3, max_grad_norm=3.0),
        dqn=dict(
            rollout_steps=4, lr=5e-4, lr_schedule="linear", n_step=3, double_q=True, replay_ratio=1.0, batch_size=1024
        ),
        dqn_cpu=dict(total_steps=500_000, num_envs=128, learning_starts=50_000, buffer_size=500_000),
    )
