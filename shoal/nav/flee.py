"""Flee: get as far from the start as possible, along the floor."""

from typing import Any, no_type_check

import warp as wp

from shoal.core.stages import agents_mean
from shoal.core.store import Field
from shoal.nav.geodesic import distance_or
from shoal.nav.stages import enter_scene, move, observe_previous_action, sample_start, store_start
from shoal.nav.walk import Ground
from shoal.nav.world import NavWorld


@wp.func
@no_type_check
def step_away(
    env: int,
    agent: int,
    row: wp.array2d(dtype=int),
    place: wp.array2d(dtype=wp.vec3),
    goal_slot: wp.array2d(dtype=int),
    goal: wp.array2d(dtype=wp.vec3),
    distance: wp.array2d(dtype=float),
    reward: wp.array2d(dtype=float),
    ground: Ground,
    field: wp.array3d(dtype=wp.uint16),
):
    """Reward: increase of the geodesic distance from the start."""
    before = distance[env, agent]
    now = distance_or(
        before, ground, row[env, agent], field, goal_slot[env, agent], goal[env, agent], place[env, agent]
    )
    distance[env, agent] = now
    reward[env, agent] = now - before


@wp.func
@no_type_check
def report_distance(env: int, distance: wp.array2d(dtype=float), fled: wp.array(dtype=float)):
    """Average the distance from the start over the agents."""
    fled[env] = agents_mean(env, distance)


class Flee(NavWorld):
    """Get as far from the start as possible.

    | | |
    |---|---|
    | observation | depth (or RGB, or both); the previous action |
    | action | forward 0.25 m, turn left 10 degrees, turn right 10 degrees |
    | reward | increase of the geodesic distance from the start, in meters |
    | end | truncated after 500 steps |
    """

    has_stop = False
    has_goal = False
    reports = ("fled", "path_length", "collisions")
    step: Any = [move, step_away, report_distance]
    reset: Any = [enter_scene, sample_start, store_start]
    observe: Any = [observe_previous_action]

    @staticmethod
    def state(config) -> dict[str, Field]:
        return NavWorld.state(config) | dict(
            fled=Field(float, unit="m", doc="geodesic distance from the start, mean over the agents")
        )
