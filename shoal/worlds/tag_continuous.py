"""Tag in a square."""

from dataclasses import dataclass
from typing import Annotated, no_type_check

import numpy as np
import warp as wp

from shoal.core import (
    Bounds,
    Box,
    Field,
    ForGroup,
    Group,
    KernelWorld,
    Layout2D,
    MultiDiscrete,
    Random,
    sincos,
    uniform4,
)
from shoal.core.settings import Positive, PositiveFloat

TURN = wp.constant(6.283185307179586)
NEIGHBOR_FEATURES = 7
OWN_FEATURES = 6
MAX_NEIGHBORS = 16

Distances = wp.types.vector(length=MAX_NEIGHBORS, dtype=float)
Indices = wp.types.vector(length=MAX_NEIGHBORS, dtype=int)

# Arrays have all agents of an env, taggers first. `me` is an index into them, `agent` the index within a group, `first`
# the index of the group's first agent. A motion is (speed, direction, acceleration).


@wp.func
@no_type_check
def drive(
    env: int,
    agent: int,
    first: int,
    size: float,
    max_speed: float,
    skill: float,
    edge_penalty: float,
    pushes: wp.array[float],
    turns: wp.array[float],
    action: wp.array3d[int],
    present: wp.array2d[wp.bool],
    position: wp.array2d[wp.vec2],
    motion: wp.array2d[wp.vec3],
    reward: wp.array2d[float],
):
    me = first + agent
    if present[env, me]:
        was = motion[env, me]
        fastest = max_speed * skill
        acceleration = was[2] + pushes[action[env, agent, 0]]
        direction = was[1] + turns[action[env, agent, 1]]
        direction = direction - TURN * wp.floor(direction / TURN)
        speed = wp.clamp(was[0] + acceleration, 0.0, fastest)
        sine, cosine = sincos(direction)
        x = position[env, me][0] + speed * cosine
        y = position[env, me][1] + speed * sine
        position[env, me] = wp.vec2(wp.clamp(x, 0.0, size), wp.clamp(y, 0.0, size))
        motion[env, me] = wp.vec3(speed, direction, wp.where(speed <= 0.0 or speed >= fastest, 0.0, acceleration))
        hit = x < 0.0 or x > size or y < 0.0 or y > size
        reward[env, agent] = wp.where(hit, -edge_penalty, 0.0)


@wp.func
@no_type_check
def tag_runners(
    env: int,
    agent: int,
    num_taggers: int,
    size: float,
    tag_distance: float,
    tag_penalty: float,
    step_reward: float,
    survival_reward: float,
    max_steps: int,
    step_count: wp.array[int],
    position: wp.array2d[wp.vec2],
    present: wp.array2d[wp.bool],
    alive: wp.array2d[wp.bool],
    tags: wp.array2d[int],
    left: wp.array[int],
    reward: wp.array2d[float],
):
    """A runner whose nearest tagger is close enough leaves the game; only that tagger gets the tag.

    Counts are integers, so they do not depend on the order of threads.
    """
    if alive[env, agent]:
        reach = tag_distance * size
        nearest = float(reach * reach)
        tagger = int(-1)
        for other in range(num_taggers):
            apart = wp.length_sq(position[env, other] - position[env, num_taggers + agent])
            if apart < nearest:
                nearest = apart
                tagger = other
        gain = float(step_reward)
        if tagger >= 0:
            alive[env, agent] = False
            present[env, num_taggers + agent] = False
            wp.atomic_add(tags, env, tagger, 1)
            wp.atomic_sub(left, env, 1)
            gain -= tag_penalty
        elif step_count[env] >= max_steps:
            gain += survival_reward
        reward[env, agent] = reward[env, agent] + gain


@wp.func
@no_type_check
def reward_taggers(
    env: int, agent: int, tag_reward: float, step_reward: float, tags: wp.array2d[int], reward: wp.array2d[float]
):
    reward[env, agent] = reward[env, agent] + step_reward + tag_reward * float(tags[env, agent])
    tags[env, agent] = 0


@wp.func
@no_type_check
def end_game(
    env: int,
    num_runners: int,
    max_steps: int,
    step_count: wp.array[int],
    left: wp.array[int],
    tagged: wp.array[float],
    terminated: wp.array[wp.bool],
):
    tagged[env] = float(num_runners - left[env])
    terminated[env] = left[env] == 0 or step_count[env] >= max_steps


@wp.func
@no_type_check
def reset_runner_count(env: int, num_runners: int, left: wp.array[int]):
    left[env] = num_runners


@wp.func
@no_type_check
def place_agents(
    env: int,
    agent: int,
    first: int,
    rng: Random,
    size: float,
    fixed_start: bool,
    position: wp.array2d[wp.vec2],
    motion: wp.array2d[wp.vec3],
    present: wp.array2d[wp.bool],
):
    """Place agents at random, at rest, in one of four directions. With `fixed_start`: as in episode 0 of env 0."""
    me = first + agent
    source = Random()
    source.seed = rng.seed
    source.env = wp.where(fixed_start, wp.uint32(0), rng.env)
    source.episode = wp.where(fixed_start, wp.uint32(0), rng.episode)
    source.step = rng.step
    draw = uniform4(source, me, 0.0, 1.0)
    position[env, me] = wp.vec2(size * draw[0], size * draw[1])
    motion[env, me] = wp.vec3(0.0, 0.25 * TURN * wp.floor(4.0 * draw[2]), 0.0)
    present[env, me] = True


@wp.func
@no_type_check
def observe_neighbors(
    env: int,
    agent: int,
    first: int,
    num_taggers: int,
    num_neighbors: int,
    size: float,
    max_speed: float,
    max_acceleration: float,
    max_steps: int,
    egocentric: bool,
    step_count: wp.array[int],
    position: wp.array2d[wp.vec2],
    motion: wp.array2d[wp.vec3],
    present: wp.array2d[wp.bool],
    observation: wp.array3d[float],
):
    """Observe the nearest agents that are in the game, nearest first."""
    me = first + agent
    row = observation[env, agent]
    if not present[env, me]:
        for i in range(row.shape[0]):
            row[i] = 0.0
        return
    here = position[env, me]
    # Sorted lists in registers. Only the last `num_neighbors` of MAX_NEIGHBORS elements are used. The others hold -1,
    # below any distance, so that the loop that keeps the lists sorted has a constant length and can be unrolled.
    nearest = Distances()
    index = Indices()
    for i in range(MAX_NEIGHBORS):
        nearest[i] = wp.where(i < MAX_NEIGHBORS - num_neighbors, -1.0, 3.4e38)
        index[i] = -1
    for other in range(position.shape[1]):
        apart = wp.length_sq(position[env, other] - here)
        if apart < nearest[MAX_NEIGHBORS - 1] and other != me and present[env, other]:
            candidate = int(other)
            for i in range(MAX_NEIGHBORS):
                old_apart = nearest[i]
                old_index = index[i]
                closer = apart < old_apart
                nearest[i] = wp.where(closer, apart, old_apart)
                index[i] = wp.where(closer, candidate, old_index)
                apart = wp.where(closer, old_apart, apart)
                candidate = wp.where(closer, old_index, candidate)
    mine = motion[env, me]
    sine = float(0.0)
    cosine = float(1.0)
    if egocentric:
        sine, cosine = sincos(mine[1])
    for i in range(MAX_NEIGHBORS):
        at = NEIGHBOR_FEATURES * (i - (MAX_NEIGHBORS - num_neighbors))
        if at >= 0:
            other = index[i]
            there = position[env, wp.max(other, 0)] - here
            change = motion[env, wp.max(other, 0)] - mine
            found = wp.where(other >= 0, 1.0, 0.0)
            row[at] = found * (there[0] * cosine + there[1] * sine) / (1.4142135623730951 * size)
            row[at + 1] = found * (there[1] * cosine - there[0] * sine) / (1.4142135623730951 * size)
            row[at + 2] = found * change[0] / max_speed
            row[at + 3] = found * change[2] / max_acceleration
            row[at + 4] = found * change[1] / TURN
            row[at + 5] = wp.where(other < num_taggers, found, 0.0)
            row[at + 6] = found
    end = NEIGHBOR_FEATURES * num_neighbors
    row[end] = float(step_count[env]) / float(max_steps)
    if egocentric:
        x = 0.5 - here[0] / size
        y = 0.5 - here[1] / size
        row[end + 1] = x * cosine + y * sine
        row[end + 2] = y * cosine - x * sine
        row[end + 3] = mine[0] / max_speed
        row[end + 4] = mine[2] / max_acceleration
        row[end + 5] = cosine
        row[end + 6] = sine


class TagContinuous(KernelWorld):
    """Taggers chase runners in a square; both choose acceleration and turn (WarpDrive's Tag, continuous).

    | | |
    |---|---|
    | observation | for each of the `num_neighbors` nearest agents in the game, nearest first: x, y (/ diagonal), |
    | | speed, acceleration (/ their limits), direction (/ full turn), relative to the agent, 1 for taggers, 1; then |
    | | time / max_steps. Only with `egocentric` does an agent observe its own direction |
    | action | acceleration and turn: 0 for none, else one of evenly spaced levels |
    | reward | tagger: `tag_reward` per tag; runner: -`tag_penalty` when tagged, `survival_reward` if never tagged; |
    | | both: `step_reward`, -`edge_penalty` |
    | end | terminated when no runner is left or after `max_steps`: the time is part of the game |

    A runner is tagged when its nearest tagger is closer than `tag_distance` times the size. It then leaves the game.
    """

    @dataclass(frozen=True)
    class Config:
        num_taggers: Positive = 10
        """Taggers per env."""
        num_runners: Positive = 100
        """Runners per env."""
        size: PositiveFloat = 20.0
        """Side of the square [m]."""
        max_steps: Positive = 500
        """Length of a game [steps]."""
        num_neighbors: Annotated[int, Bounds(ge=1, le=MAX_NEIGHBORS)] = 10
        """Number of nearest agents in an observation (up to 16)."""
        egocentric: bool = False
        """Observe positions ahead and to the left instead of along x and y, and the agent's own state: position of
        the square's center, speed, acceleration, cosine and sine of the direction."""
        max_speed: PositiveFloat = 1.0
        """Speed limit at skill 1 [m/step]."""
        max_acceleration: PositiveFloat = 0.1
        """Maximum change of the acceleration in a step [m/step^2]."""
        max_turn: float = 2.356
        """Maximum turn in a step [rad]."""
        acceleration_levels: Positive = 20
        """Number of choices of the acceleration, besides none."""
        turn_levels: Positive = 20
        """Number of choices of the turn, besides none."""
        tagger_skill: PositiveFloat = 1.0
        """Factor of the speed limit of taggers."""
        runner_skill: PositiveFloat = 1.0
        """Factor of the speed limit of runners."""
        tag_distance: float = 0.02
        """Reach of a tagger, as a fraction of the size."""
        tag_reward: float = 10.0
        """Reward of the tagger for a tag."""
        tag_penalty: float = 10.0
        """Penalty of the runner for being tagged."""
        survival_reward: float = 1.0
        """Reward of a runner that is never tagged, at the end."""
        step_reward: float = 0.0
        """Reward of every agent in the game, per step."""
        edge_penalty: float = 0.0
        """Penalty for hitting the edge."""
        fixed_start: bool = False
        """Start every episode of every env in the same positions, instead of random ones."""

    @staticmethod
    def state(config):
        agents = config.num_taggers + config.num_runners
        return dict(
            position=Field(wp.vec2, (agents,), unit="m"),
            motion=Field(wp.vec3, (agents,), unit="m/step, rad, m/step^2"),
            present=Field(bool, (agents,), doc="in the game"),
            tags=Field(int, (config.num_taggers,), doc="runners tagged in this step"),
            left=Field(int, doc="runners in the game"),
            tagged=Field(float, doc="runners tagged in this episode"),
        )

    @staticmethod
    def groups(config):
        observation = Box(NEIGHBOR_FEATURES * config.num_neighbors + 1 + (OWN_FEATURES if config.egocentric else 0))
        action = MultiDiscrete((config.acceleration_levels + 1, config.turn_levels + 1))
        return (
            Group("tagger", observation=observation, action=action, agents=config.num_taggers),
            Group("runner", observation=observation, action=action, agents=config.num_runners, can_leave=True),
        )

    @staticmethod
    def tables(config):
        pushes = np.linspace(-config.max_acceleration, config.max_acceleration, config.acceleration_levels)
        turns = np.linspace(-config.max_turn, config.max_turn, config.turn_levels)
        return {name: np.array([0.0, *levels], np.float32) for name, levels in (("pushes", pushes), ("turns", turns))}

    step = (
        ForGroup("tagger", drive),
        ForGroup("runner", drive),
        ForGroup("runner", tag_runners),
        ForGroup("tagger", reward_taggers),
        end_game,
    )
    reset = (reset_runner_count, ForGroup("tagger", place_agents), ForGroup("runner", place_agents))
    observe = (ForGroup("tagger", observe_neighbors), ForGroup("runner", observe_neighbors))
    reports = ("tagged",)
    layout = Layout2D(size="size", x="position[0]", y="position[1]", heading="motion[1]")
    settings = dict(
        common=dict(hidden=(256, 256), activation="relu", shared_encoder=True, gamma=0.98),
        cpu=dict(
            total_steps=1_000_000,
            num_envs=32,
            rollout_steps=50,
            hidden=(64, 64),
            world=dict(num_taggers=5, num_runners=50, max_steps=100, egocentric=True),
        ),
        gpu=dict(total_steps=20_000_000, num_envs=100, rollout_steps=250, world=dict(egocentric=True)),
        ppo=dict(
            lr=2e-3,
            gamma=0.97,
            gae_lambda=0.9,
            num_minibatches=8,
            epochs=1,
            activation="tanh",
            normalize_reward=True,
            group_settings=("tagger.ent_coef=0.05", "runner.ent_coef=0.003"),
        ),
        a2c=dict(lr=1e-3, ent_coef=0.05, group_settings=("runner.lr=5e-3",)),
    )
