"""Explore: see as much of a house as possible by walking through it."""

from dataclasses import dataclass

import warp as wp

from shoal.core.stages import agents_mean
from shoal.core.store import Field
from shoal.nav.stages import draw_start, enter_scene, keep_start, move, show_previous
from shoal.nav.world import NavConfig, NavWorld

REACH = wp.constant(32)
"""Cells on each side of the start that are told apart."""

STOREY = wp.constant(2.0)
"""Meters of height from which on cells above one another are told apart."""

LEVELS = 4

WORDS = (2 * REACH) ** 2 * LEVELS // 32
"""Numbers that hold a bit for each cell."""


@dataclass(frozen=True)
class ExploreConfig(NavConfig):
    """Settings of Explore."""

    square: float = 1.0
    """Meters of a cell a side."""
    prize: float = 0.25
    """Reward for a cell that was not entered before."""


@wp.func
def cell_bit(place: wp.vec3, start: wp.vec3, start_yaw: float, square: float) -> int:
    """The number of the cell of a place, in a grid that lies as the agent stood when it began, in its middle."""
    away = place - start
    ahead = wp.cos(start_yaw) * away[0] + wp.sin(start_yaw) * away[1]
    left = wp.cos(start_yaw) * away[1] - wp.sin(start_yaw) * away[0]
    x = wp.clamp(int(wp.floor(ahead / square + 0.5)) + REACH, 0, 2 * REACH - 1)
    y = wp.clamp(int(wp.floor(left / square + 0.5)) + REACH, 0, 2 * REACH - 1)
    level = wp.clamp(int(wp.floor(away[2] / STOREY + 0.5)) + LEVELS // 2, 0, LEVELS - 1)
    return (level * 2 * REACH + y) * 2 * REACH + x


@wp.func
def enter_cells(
    env: int,
    agent: int,
    square: float,
    prize: float,
    place: wp.array2d(dtype=wp.vec3),
    start: wp.array2d(dtype=wp.vec3),
    start_yaw: wp.array2d(dtype=float),
    visited: wp.array3d(dtype=int),
    cells: wp.array2d(dtype=float),
    reward: wp.array2d(dtype=float),
):
    """Reward for each new cell."""
    bit = cell_bit(place[env, agent], start[env, agent], start_yaw[env, agent], square)
    mask = 1 << (bit % 32)
    word = visited[env, agent, bit // 32]
    if (word & mask) == 0:
        visited[env, agent, bit // 32] = word | mask
        cells[env, agent] = cells[env, agent] + 1.0
        reward[env, agent] = prize


@wp.func
def count_cells(env: int, cells: wp.array2d(dtype=float), explored: wp.array(dtype=float)):
    """The mean over the agents."""
    explored[env] = agents_mean(env, cells)


@wp.func
def forget_cells(
    env: int,
    agent: int,
    square: float,
    place: wp.array2d(dtype=wp.vec3),
    start: wp.array2d(dtype=wp.vec3),
    start_yaw: wp.array2d(dtype=float),
    visited: wp.array3d(dtype=int),
    cells: wp.array2d(dtype=float),
):
    """Only the cell of the start is known."""
    for i in range(WORDS):
        visited[env, agent, i] = 0
    bit = cell_bit(place[env, agent], start[env, agent], start_yaw[env, agent], square)
    visited[env, agent, bit // 32] = 1 << (bit % 32)
    cells[env, agent] = 1.0


class Explore(NavWorld):
    """Walk through as many places of a house as possible.

    | | |
    |---|---|
    | observation | depth (or RGB, or both); the last action |
    | action | forward 0.25 m, turn left 10 degrees, turn right 10 degrees |
    | reward | 0.25 for each cell of 1 m x 1 m that is entered for the first time |
    | end | truncated after 500 steps |
    """

    Config = ExploreConfig
    stops = False
    goals_shown = False
    reports = ("explored", "path_length", "collisions")
    step = [move, enter_cells, count_cells]
    reset = [enter_scene, draw_start, keep_start, forget_cells]
    observe = [show_previous]

    @staticmethod
    def state(config: ExploreConfig) -> dict[str, Field]:
        return NavWorld.state(config) | dict(
            visited=Field(int, (config.agents, WORDS), doc="a bit for each cell"),
            cells=Field(float, (config.agents,), doc="visited so far"),
            explored=Field(float, doc="cells visited, mean over the agents"),
        )
