"""PointNav: walk to a point given relative to the agent, and stop there."""

from dataclasses import dataclass
from typing import Any, no_type_check

import warp as wp

from shoal.core.errors import require
from shoal.core.settings import NonNegativeFloat, PositiveFloat
from shoal.core.store import Field
from shoal.nav.config import NavConfig
from shoal.nav.geodesic import distance_or
from shoal.nav.stages import (
    NUM_PREVIOUS,
    STOP,
    enter_scene,
    move,
    observe_previous_action,
    sample_start_and_goal,
    store_start,
)
from shoal.nav.walk import Ground
from shoal.nav.world import NavWorld


@dataclass(frozen=True)
class PointNavConfig(NavConfig):
    """Settings of PointNav."""

    min_distance: NonNegativeFloat = 1.0
    """Minimum geodesic distance from start to goal, in meters."""
    max_distance: NonNegativeFloat = 30.0
    """Maximum geodesic distance from start to goal, in meters."""
    success_distance: PositiveFloat = 0.2
    """Geodesic distance from the goal within which STOP succeeds, in meters."""
    slack_reward: float = -0.01
    """Reward of every step."""
    success_reward: float = 2.5
    """Reward of a successful STOP, multiplied by SPL."""

    def __post_init__(self):
        super().__post_init__()
        low, high = self.min_distance, self.max_distance
        require("min-distance", low, low <= high, f"at most --max-distance ({high:g})")


@wp.func
@no_type_check
def step_to_goal(
    env: int,
    agent: int,
    action: wp.array2d(dtype=int),
    row: wp.array2d(dtype=int),
    place: wp.array2d(dtype=wp.vec3),
    present: wp.array2d(dtype=wp.bool),
    goal_slot: wp.array2d(dtype=int),
    goal: wp.array2d(dtype=wp.vec3),
    start_distance: wp.array2d(dtype=float),
    distance: wp.array2d(dtype=float),
    walked: wp.array2d(dtype=float),
    merit: wp.array2d(dtype=wp.vec3),
    reward: wp.array2d(dtype=float),
    ground: Ground,
    field: wp.array3d(dtype=wp.uint16),
    success_distance: float,
    slack_reward: float,
    success_reward: float,
):
    """Reward: decrease of the geodesic distance, `slack_reward`, and SPL x `success_reward` for STOP at the goal."""
    if present[env, agent]:
        before = distance[env, agent]
        now = distance_or(
            before, ground, row[env, agent], field, goal_slot[env, agent], goal[env, agent], place[env, agent]
        )
        distance[env, agent] = now
        gain = before - now + slack_reward
        far = start_distance[env, agent]
        share = far / wp.max(wp.max(far, walked[env, agent]), 1.0e-6)
        soft = wp.max(0.0, 1.0 - now / wp.max(far, 1.0e-6)) * share
        won = float(0.0)
        if action[env, agent] == STOP:
            present[env, agent] = False
            if now < success_distance:
                won = 1.0
                gain += success_reward * share
        merit[env, agent] = wp.vec3(won, won * share, soft)
        reward[env, agent] = gain


@wp.func
@no_type_check
def score_episode(
    env: int,
    num_agents: int,
    present: wp.array2d(dtype=wp.bool),
    merit: wp.array2d(dtype=wp.vec3),
    success: wp.array(dtype=float),
    spl: wp.array(dtype=float),
    soft_spl: wp.array(dtype=float),
    terminated: wp.array(dtype=wp.bool),
):
    """Average the scores over the agents; terminate once all agents have stopped."""
    total = wp.vec3()
    left = int(0)
    for k in range(num_agents):
        total += merit[env, k]
        if present[env, k]:
            left += 1
    success[env] = total[0] / float(num_agents)
    spl[env] = total[1] / float(num_agents)
    soft_spl[env] = total[2] / float(num_agents)
    terminated[env] = left == 0


@wp.func
@no_type_check
def observe_goal(
    env: int,
    agent: int,
    place: wp.array2d(dtype=wp.vec3),
    yaw: wp.array2d(dtype=float),
    goal: wp.array2d(dtype=wp.vec3),
    first_extra: int,
    observation: wp.array3d(dtype=wp.float16),
):
    """Write the goal relative to the agent: horizontal distance [m], cosine and sine of the direction."""
    away = goal[env, agent] - place[env, agent]
    angle = wp.atan2(away[1], away[0]) - yaw[env, agent]
    first = first_extra + NUM_PREVIOUS
    observation[env, agent, first] = wp.float16(wp.sqrt(away[0] * away[0] + away[1] * away[1]))
    observation[env, agent, first + 1] = wp.float16(wp.cos(angle))
    observation[env, agent, first + 2] = wp.float16(wp.sin(angle))


class PointNav(NavWorld):
    """Walk to a point in a house.

    | | |
    |---|---|
    | observation | depth (or RGB, or both); the previous action; the goal's distance and direction |
    | action | stop, forward 0.25 m, turn left 10 degrees, turn right 10 degrees |
    | reward | decrease of the geodesic distance in meters, -0.01 per step, 2.5 x SPL for stopping at the goal |
    | end | stop (of all agents); truncated after 500 steps |
    | success | stop within 0.2 m of the goal (geodesic distance) |
    """

    Config = PointNavConfig
    config: PointNavConfig
    extra_observations = (("previous", NUM_PREVIOUS), ("goal", 3))
    reports = ("success", "spl", "soft_spl", "path_length", "collisions")
    step: Any = [move, step_to_goal, score_episode]
    reset: Any = [enter_scene, sample_start_and_goal, store_start]
    observe: Any = [observe_previous_action, observe_goal]
    settings = NavWorld.settings | dict(gpu=NavWorld.settings["gpu"] | dict(total_steps=70_000_000))

    @property
    def path_range(self) -> tuple[float, float]:
        return self.config.min_distance, self.config.max_distance

    @staticmethod
    def state(config: PointNavConfig) -> dict[str, Field]:
        return NavWorld.state(config) | dict(
            merit=Field(wp.vec3, (config.num_agents,), doc="success, SPL and SoftSPL at this step"),
            success=Field(float, doc="fraction of the agents that succeeded"),
            spl=Field(float, doc="success weighted by path length"),
            soft_spl=Field(float, doc="progress weighted by path length"),
        )
