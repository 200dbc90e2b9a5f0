"""PointNav: walk to a point given relative to the agent, and say when it is reached."""

from dataclasses import dataclass

import warp as wp

from shoal.core.errors import require
from shoal.core.store import Field
from shoal.nav.geodesic import distance_or
from shoal.nav.stages import PREVIOUS, STOP, draw_route, enter_scene, keep_start, move, show_previous
from shoal.nav.walk import Ground
from shoal.nav.world import NavConfig, NavWorld


@dataclass(frozen=True)
class PointNavConfig(NavConfig):
    """Settings of PointNav."""

    min_distance: float = 1.0
    """Meters from start to goal at least, along the floor."""
    max_distance: float = 30.0
    """Meters at most."""
    reach: float = 0.2
    """Meters from the goal, along the floor, within which STOP succeeds."""
    slack: float = 0.01
    """Reward that each step costs."""
    bonus: float = 2.5
    """Reward for STOP, times SPL."""

    def __post_init__(self):
        super().__post_init__()
        low, high = self.min_distance, self.max_distance
        require("min-distance", low, 0 <= low <= high, f"between 0 and --max-distance {high:g}")
        require("reach", self.reach, self.reach > 0, "above 0")


@wp.func
def pursue(
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
    reach: float,
    slack: float,
    bonus: float,
):
    """Reward is the way gained, less a little for each step, and for STOP at the goal the SPL."""
    if present[env, agent]:
        before = distance[env, agent]
        now = distance_or(
            before, ground, row[env, agent], field, goal_slot[env, agent], goal[env, agent], place[env, agent]
        )
        distance[env, agent] = now
        gain = before - now - slack
        far = start_distance[env, agent]
        share = far / wp.max(wp.max(far, walked[env, agent]), 1.0e-6)
        soft = wp.max(0.0, 1.0 - now / wp.max(far, 1.0e-6)) * share
        won = float(0.0)
        if action[env, agent] == STOP:
            present[env, agent] = False
            if now < reach:
                won = 1.0
                gain += bonus * share
        merit[env, agent] = wp.vec3(won, won * share, soft)
        reward[env, agent] = gain


@wp.func
def judge(
    env: int,
    agents: int,
    present: wp.array2d(dtype=wp.bool),
    merit: wp.array2d(dtype=wp.vec3),
    success: wp.array(dtype=float),
    spl: wp.array(dtype=float),
    soft_spl: wp.array(dtype=float),
    terminated: wp.array(dtype=wp.bool),
):
    """The episode is over when everybody has stopped."""
    total = wp.vec3()
    left = int(0)
    for k in range(agents):
        total += merit[env, k]
        if present[env, k]:
            left += 1
    success[env] = total[0] / float(agents)
    spl[env] = total[1] / float(agents)
    soft_spl[env] = total[2] / float(agents)
    terminated[env] = left == 0


@wp.func
def show_goal(
    env: int,
    agent: int,
    place: wp.array2d(dtype=wp.vec3),
    yaw: wp.array2d(dtype=float),
    goal: wp.array2d(dtype=wp.vec3),
    first_extra: int,
    observation: wp.array3d(dtype=wp.float16),
):
    """Where the goal is from here: distance, cosine and sine of the direction."""
    away = goal[env, agent] - place[env, agent]
    angle = wp.atan2(away[1], away[0]) - yaw[env, agent]
    first = first_extra + PREVIOUS
    observation[env, agent, first] = wp.float16(wp.sqrt(away[0] * away[0] + away[1] * away[1]))
    observation[env, agent, first + 1] = wp.float16(wp.cos(angle))
    observation[env, agent, first + 2] = wp.float16(wp.sin(angle))


class PointNav(NavWorld):
    """Walk to a point in a house.

    | | |
    |---|---|
    | observation | depth (or RGB, or both); the last action; the goal's distance and direction |
    | action | stop, forward 0.25 m, turn left 10 degrees, turn right 10 degrees |
    | reward | meters gained along the floor, -0.01 per step, 2.5 x SPL for stopping at the goal |
    | end | stop (of all agents); truncated after 500 steps |
    | success | stop within 0.2 m of the goal, along the floor |
    """

    Config = PointNavConfig
    extras = (("previous", PREVIOUS), ("goal", 3))
    reports = ("success", "spl", "soft_spl", "path_length", "collisions")
    step = [move, pursue, judge]
    reset = [enter_scene, draw_route, keep_start]
    observe = [show_previous, show_goal]
    settings = NavWorld.settings | dict(gpu=NavWorld.settings["gpu"] | dict(total_steps=70_000_000))

    @property
    def ways(self) -> tuple[float, float]:
        return self.config.min_distance, self.config.max_distance

    @staticmethod
    def state(config: PointNavConfig) -> dict[str, Field]:
        return NavWorld.state(config) | dict(
            merit=Field(wp.vec3, (config.agents,), doc="success, SPL and SoftSPL, as of now"),
            success=Field(float, doc="share of the agents that succeeded"),
            spl=Field(float, doc="success weighted by path length"),
            soft_spl=Field(float, doc="progress weighted by path length"),
        )
