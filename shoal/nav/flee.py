"""Flee: get as far from the start as possible, along the floor."""

import warp as wp

from shoal.core.stages import agents_mean
from shoal.core.store import Field
from shoal.nav.geodesic import distance_or
from shoal.nav.stages import draw_start, enter_scene, keep_start, move, show_previous
from shoal.nav.walk import Ground
from shoal.nav.world import NavWorld


@wp.func
def run_away(
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
    """Reward is the way gained."""
    before = distance[env, agent]
    now = distance_or(
        before, ground, row[env, agent], field, goal_slot[env, agent], goal[env, agent], place[env, agent]
    )
    distance[env, agent] = now
    reward[env, agent] = now - before


@wp.func
def how_far(env: int, distance: wp.array2d(dtype=float), fled: wp.array(dtype=float)):
    """The mean over the agents."""
    fled[env] = agents_mean(env, distance)


class Flee(NavWorld):
    """Get as far from the start as possible.

    | | |
    |---|---|
    | observation | depth (or RGB, or both); the last action |
    | action | forward 0.25 m, turn left 10 degrees, turn right 10 degrees |
    | reward | meters gained from the start, along the floor |
    | end | truncated after 500 steps |
    """

    stops = False
    goals_shown = False
    reports = ("fled", "path_length", "collisions")
    step = [move, run_away, how_far]
    reset = [enter_scene, draw_start, keep_start]
    observe = [show_previous]

    @staticmethod
    def state(config) -> dict[str, Field]:
        return NavWorld.state(config) | dict(fled=Field(float, unit="m", doc="along the floor from the start"))
