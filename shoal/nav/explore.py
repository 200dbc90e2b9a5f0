"""Explore: see as much of a house as possible by walking through it."""

from dataclasses import dataclass
from typing import Annotated, Any, no_type_check

import warp as wp

from shoal.core.settings import Bounds
from shoal.core.stages import agents_mean
from shoal.core.store import Field
from shoal.nav.config import NavConfig
from shoal.nav.stages import enter_scene, move, observe_previous_action, sample_start, store_start
from shoal.nav.world import NavWorld

HALF_GRID = wp.constant(32)
"""Cells on each side of the start; cells beyond count as the outermost one."""

LEVEL_HEIGHT = wp.constant(2.0)
"""Height of a level of the grid, in meters."""

LEVELS = 4

WORDS = (2 * HALF_GRID) ** 2 * LEVELS // 32
"""Length of a bit mask over all cells, in 32-bit words."""


@dataclass(frozen=True)
class ExploreConfig(NavConfig):
    """Settings of Explore."""

    coverage_cell_size: Annotated[float, Bounds(gt=0, lt=1000)] = 1.0
    """Side of a cell of the coverage grid, in meters."""
    coverage_reward: float = 0.25
    """Reward for entering a new cell."""


@wp.func
@no_type_check
def cell_index(point: wp.vec3, start: wp.vec3, start_yaw: float, size: float) -> int:
    """Index of the cell that contains a point. The grid is centered on the start and aligned with the start yaw."""
    away = point - start
    ahead = wp.cos(start_yaw) * away[0] + wp.sin(start_yaw) * away[1]
    left = wp.cos(start_yaw) * away[1] - wp.sin(start_yaw) * away[0]
    x = wp.clamp(int(wp.floor(ahead / size + 0.5)) + HALF_GRID, 0, 2 * HALF_GRID - 1)
    y = wp.clamp(int(wp.floor(left / size + 0.5)) + HALF_GRID, 0, 2 * HALF_GRID - 1)
    level = wp.clamp(int(wp.floor(away[2] / LEVEL_HEIGHT + 0.5)) + LEVELS // 2, 0, LEVELS - 1)
    return (level * 2 * HALF_GRID + y) * 2 * HALF_GRID + x


@wp.func
@no_type_check
def visit_cells(
    env: int,
    agent: int,
    coverage_cell_size: float,
    coverage_reward: float,
    place: wp.array2d(dtype=wp.vec3),
    start: wp.array2d(dtype=wp.vec3),
    start_yaw: wp.array2d(dtype=float),
    visited: wp.array3d(dtype=int),
    cells: wp.array2d(dtype=float),
    reward: wp.array2d(dtype=float),
):
    """Reward: `coverage_reward` for entering a new cell."""
    bit = cell_index(place[env, agent], start[env, agent], start_yaw[env, agent], coverage_cell_size)
    mask = 1 << (bit % 32)
    word = visited[env, agent, bit // 32]
    if (word & mask) == 0:
        visited[env, agent, bit // 32] = word | mask
        cells[env, agent] = cells[env, agent] + 1.0
        reward[env, agent] = coverage_reward


@wp.func
@no_type_check
def count_cells(env: int, cells: wp.array2d(dtype=float), explored: wp.array(dtype=float)):
    """Average the number of visited cells over the agents."""
    explored[env] = agents_mean(env, cells)


@wp.func
@no_type_check
def reset_cells(
    env: int,
    agent: int,
    coverage_cell_size: float,
    place: wp.array2d(dtype=wp.vec3),
    start: wp.array2d(dtype=wp.vec3),
    start_yaw: wp.array2d(dtype=float),
    visited: wp.array3d(dtype=int),
    cells: wp.array2d(dtype=float),
):
    """Mark only the start cell as visited."""
    for i in range(WORDS):
        visited[env, agent, i] = 0
    bit = cell_index(place[env, agent], start[env, agent], start_yaw[env, agent], coverage_cell_size)
    visited[env, agent, bit // 32] = 1 << (bit % 32)
    cells[env, agent] = 1.0


class Explore(NavWorld):
    """Enter as many cells of a grid over a house as possible.

    | | |
    |---|---|
    | observation | depth (or RGB, or both); the previous action |
    | action | forward 0.25 m, turn left 10 degrees, turn right 10 degrees |
    | reward | 0.25 for each cell of 1 m x 1 m entered for the first time |
    | end | truncated after 500 steps |
    """

    Config = ExploreConfig
    config: ExploreConfig
    has_stop = False
    has_goal = False
    reports = ("explored", "path_length", "collisions")
    step: Any = [move, visit_cells, count_cells]
    reset: Any = [enter_scene, sample_start, store_start, reset_cells]
    observe: Any = [observe_previous_action]

    @staticmethod
    def state(config: ExploreConfig) -> dict[str, Field]:
        return NavWorld.state(config) | dict(
            visited=Field(int, (config.num_agents, WORDS), doc="bit mask over the cells"),
            cells=Field(float, (config.num_agents,), doc="number of visited cells"),
            explored=Field(float, doc="visited cells, mean over the agents"),
        )
