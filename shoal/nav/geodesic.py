"""Geodesic distance: one distance field over the ground per goal, solved in parallel and read in constant time.

The field T solves the eikonal equation |grad T| = 1 on the cells where an agent can stand, by an upwind scheme. A cell
takes the earliest arrival of a front that passed the smaller neighbors along x and y, or along the two diagonals. The
front moves in the plane through the cell and these neighbors, which may slope. Within 1 m of the goal, cells from which
it is visible get the exact distance, since the scheme's error would be largest there.
"""

from typing import no_type_check

import torch
import warp as wp

from shoal.core.kernels import meet_block
from shoal.core.launch import Plan
from shoal.nav.ground import GroundMemory, upload
from shoal.nav.regions import can_cross
from shoal.nav.walk import (
    Ground,
    beside_diagonal,
    bilinear_weights,
    can_stand,
    cell_center,
    cell_of,
    clearest_cell,
    is_clear,
    neighbor,
    on_floor,
)

wp.set_module_options({"enable_backward": False})

MM_PER_METER = wp.constant(1000.0)
"""Fields are stored as uint16 millimeters."""

UNREACHABLE = wp.constant(65535)
"""Field value of cells without a path to the goal."""

EXACT_RADIUS = wp.constant(1.0)
"""Distance from the goal within which visible cells get their straight distance, in meters."""

INFINITE = wp.constant(1.0e9)
"""Initial distance of cells, in meters."""

THREADS = 512
"""GPU threads per field: one block."""


class FieldMemory:
    """`goals` distance fields for every row of a ground memory."""

    def __init__(self, ground: GroundMemory, goals: int):
        self.ground, self.goals = ground, goals
        rows, device = ground.memory.rows, ground.device
        self.goal = torch.zeros(rows, goals, 3, device=device)
        """float32 [rows, goals, 3]: positions of the goals on the floor [m]."""
        self.field = torch.full((rows, goals, ground.cells), -1, dtype=torch.int16, device=device)
        """int16 [rows, goals, cells], read as uint16: geodesic distance [mm], 65535 where there is no path."""
        self._work = torch.zeros(goals, ground.cells, device=device)
        self._links = torch.zeros(ground.cells, 8, dtype=torch.int32, device=device)
        self._changed = torch.zeros(goals, dtype=torch.int32, device=device)

    def solve(self, row: int, goals: torch.Tensor) -> None:
        """Compute the fields of a row for goals [goals, 3] on torch's current stream, without waiting."""
        upload(self.goal[row], goals)
        ground, device = self.ground.arrays, self.ground.device
        cells = len(self.ground.surveys[row].height)
        links, work = wp.from_torch(self._links), wp.from_torch(self._work)
        points = wp.from_torch(self.goal[row], dtype=wp.vec3)
        plan = Plan(device, cells)
        plan.add_kernel(find_links, cells, [ground, row, links], unit=64, block=128)
        plan.add_kernel(init_fields, cells * self.goals, [ground, row, cells, points, work], unit=cells, block=128)
        threads = THREADS if device.type == "cuda" else 1
        inputs = [threads, ground, row, cells, links, work, wp.from_torch(self._changed)]
        plan.add_kernel(solve_fields, self.goals * threads, inputs, unit=threads, block=threads)
        field = wp.from_torch(self.field[row], dtype=wp.uint16)
        plan.add_kernel(quantize_fields, cells * self.goals, [cells, work, field], unit=cells, block=128)
        plan()


@wp.func
@no_type_check
def has_clear_side(ground: Ground, row: int, i: int, other: int, k: int) -> bool:
    """Whether a clear cell is beside cell `i` or its k-th neighbor, across the step between them (k < 4)."""
    across = wp.where(k < 2, 2, 0)
    shared = bool(False)
    for side in range(2):
        shared = shared or is_clear(ground, row, neighbor(ground, row, i, across + side))
        shared = shared or is_clear(ground, row, neighbor(ground, row, other, across + side))
    return shared


@wp.func
@no_type_check
def is_floor(ground: Ground, row: int, i: int) -> bool:
    """Whether a cell belongs to a region; False for cell -1."""
    found = bool(False)
    if i >= 0:
        found = ground.region[row, i] >= 0
    return found


@wp.func
@no_type_check
def is_linked(ground: Ground, row: int, i: int, other: int, k: int) -> bool:
    """Whether an agent can go from cell `i` to its k-th neighbor, of the same region.

    No agent can stand on the center of a margin cell. Two margin cells are linked only along the edge of the same
    floor. A diagonal between a clear and a margin cell is linked if one of the cells beside it is floor.
    """
    inside = int(is_clear(ground, row, i)) + int(is_clear(ground, row, other))
    if k < 4:
        return inside > 0 or has_clear_side(ground, row, i, other, k)
    if inside == 2:
        return can_cross(ground, row, i, other, k)
    beside = beside_diagonal(ground, row, i, k)
    return inside == 1 and (is_floor(ground, row, beside[0]) or is_floor(ground, row, beside[1]))


@wp.kernel
@no_type_check
def find_links(first: int, ground: Ground, row: int, links: wp.array2d(dtype=int)):
    """For each cell, the neighbors that an agent can go to; -1 for none."""
    i = first + wp.tid()
    for k in range(8):
        link = int(-1)
        if ground.region[row, i] >= 0:
            other = neighbor(ground, row, i, k)
            if is_floor(ground, row, other):
                if ground.region[row, other] == ground.region[row, i] and is_linked(ground, row, i, other, k):
                    link = other
        links[i, k] = link


@wp.func
@no_type_check
def in_sight(ground: Ground, row: int, one: wp.vec3, two: wp.vec3) -> bool:
    """Whether an agent can walk straight from one point to the other."""
    steps = int(wp.ceil(wp.length(two - one) / (0.5 * ground.cell_size)))
    clear = bool(True)
    point = one
    for k in range(steps):
        if clear:
            share = float(k + 1) / float(steps)
            point = wp.vec3(one[0] + (two[0] - one[0]) * share, one[1] + (two[1] - one[1]) * share, point[2])
            clear = can_stand(ground, row, point)
            point = on_floor(ground, row, point)
    return clear


@wp.kernel
@no_type_check
def init_fields(
    first: int, ground: Ground, row: int, cells: int, goals: wp.array(dtype=wp.vec3), work: wp.array2d(dtype=float)
):
    """Write exact distances around each goal, negated as a mark, and INFINITE elsewhere."""
    n = first + wp.tid()
    g = n // cells
    i = n % cells
    value = INFINITE
    if ground.region[row, i] >= 0:
        center = cell_center(ground, row, i)
        straight = wp.length(goals[g] - center)
        if straight <= EXACT_RADIUS:
            if in_sight(ground, row, goals[g], center):
                value = -straight - 1.0e-6
    work[g, i] = value


@wp.func
@no_type_check
def min_neighbor(
    ground: Ground, row: int, links: wp.array2d(dtype=int), work: wp.array2d(dtype=float), g: int, i: int, k: int
) -> wp.vec2:
    """Smaller value of the two neighbors along an axis, and that neighbor's height relative to cell `i`."""
    best = wp.vec2(INFINITE, 0.0)
    for side in range(2):
        other = links[i, k + side]
        if other >= 0:
            value = wp.abs(work[g, other])
            if value < best[0]:
                best = wp.vec2(value, ground.height[row, other] - ground.height[row, i])
    return best


@wp.func
@no_type_check
def arrival_time(a: wp.vec2, b: wp.vec2, flat: float) -> float:
    """Geodesic distance T of a cell [m] from two neighbors: the update of the Eikonal equation in fast marching.

    With e and f the 3-D vectors from the cell to neighbors of distances T_a and T_b, T solves |grad T| = 1 where
    e grad T = T_a - T and f grad T = T_b - T. The solution is valid if T exceeds T_a and T_b and the front comes from
    between the neighbors.

    Args:
        a: T_a (INFINITE if unknown) and height relative to the cell of the first neighbor [m].
        b: The same of the second neighbor, in the perpendicular direction.
        flat: Squared horizontal distance of the cell to each neighbor [m²].

    Returns:
        The minimum of the valid solution and the paths through one neighbor, T_a + |e| and T_b + |f|; of these paths
        alone if the solution is invalid.
    """
    ee = flat + a[1] * a[1]
    ff = flat + b[1] * b[1]
    new = wp.min(a[0] + wp.sqrt(ee), b[0] + wp.sqrt(ff))
    if a[0] < INFINITE and b[0] < INFINITE:
        ef = a[1] * b[1]
        across = ee - 2.0 * ef + ff
        apart = a[0] - b[0]
        under = (ee * ff - ef * ef) * (across - apart * apart)
        if under > 0.0:
            both = a[0] + (wp.sqrt(under) - (ee - ef) * apart) / across
            late = wp.vec2(both - a[0], both - b[0])
            between = ff * late[0] >= ef * late[1] and ee * late[1] >= ef * late[0]
            if between and wp.min(late[0], late[1]) > 0.0:
                new = wp.min(new, both)
    return new


@wp.kernel
@no_type_check
def solve_fields(
    first: int,
    threads: int,
    ground: Ground,
    row: int,
    cells: int,
    links: wp.array2d(dtype=int),
    work: wp.array2d(dtype=float),
    changed: wp.array(dtype=int),
):
    """Update all cells from their neighbors until nothing changes; one block of threads per goal."""
    n = first + wp.tid()
    g = n // threads
    lane = n % threads
    width = ground.dims[row][0]
    sweep = int(0)
    going = bool(True)
    while going:
        if lane == 0:
            changed[g] = 0
        meet_block()
        for k in range(lane, cells, threads):
            # On a CPU each pass sweeps in another direction (fast sweeping).
            y = k // width
            x = k % width
            if (sweep & 1) == 1:
                x = width - 1 - x
            if (sweep & 2) == 2:
                y = cells // width - 1 - y
            i = y * width + x
            old = work[g, i]
            if old > 0.0 and ground.region[row, i] >= 0:
                new = old
                for stencil in range(2):
                    a = min_neighbor(ground, row, links, work, g, i, 4 * stencil)
                    b = min_neighbor(ground, row, links, work, g, i, 4 * stencil + 2)
                    new = wp.min(new, arrival_time(a, b, float(1 + stencil) * ground.cell_size * ground.cell_size))
                if new < old - 1.0e-5:
                    work[g, i] = new
                    changed[g] = 1
        meet_block()
        going = changed[g] != 0
        meet_block()
        sweep += 1


@wp.kernel
@no_type_check
def quantize_fields(first: int, cells: int, work: wp.array2d(dtype=float), field: wp.array2d(dtype=wp.uint16)):
    """Convert fields from meters to millimeters."""
    n = first + wp.tid()
    g = n // cells
    i = n % cells
    meters = wp.abs(work[g, i])
    value = UNREACHABLE
    if meters < 65.0:
        value = int(meters * MM_PER_METER + 0.5)
    field[g, i] = wp.uint16(value)


@wp.func
@no_type_check
def distance_at(
    ground: Ground, row: int, field: wp.array3d(dtype=wp.uint16), g: int, goal: wp.vec3, point: wp.vec3
) -> float:
    """Geodesic distance from a point to goal `g` of a row [m]; inf where there is no path."""
    straight = wp.length(goal - point)
    i = clearest_cell(ground, row, point)
    if i < 0:
        return wp.inf
    here = float(int(field[row, g, i])) / MM_PER_METER
    # If the cell's distance is the straight one, the goal is visible.
    if straight <= EXACT_RADIUS and wp.abs(here - wp.length(goal - cell_center(ground, row, i))) < 2.0e-3:
        return straight
    at = bilinear_weights(ground, row, point)
    total = float(0.0)
    weight = float(0.0)
    for k in range(4):
        j = cell_of(ground, row, int(at[0]) + k % 2, int(at[1]) + k // 2, point[2])
        if j >= 0:
            value = int(field[row, g, j])
            if value != UNREACHABLE:
                w = wp.where(k % 2 == 1, at[2], 1.0 - at[2]) * wp.where(k // 2 == 1, at[3], 1.0 - at[3])
                total += w * float(value) / MM_PER_METER
                weight += w
    found = float(wp.inf)
    if weight > 1.0e-6:
        found = wp.max(total / weight, straight)
    return found


@wp.func
@no_type_check
def distance_or(
    fallback: float,
    ground: Ground,
    row: int,
    field: wp.array3d(dtype=wp.uint16),
    g: int,
    goal: wp.vec3,
    point: wp.vec3,
) -> float:
    """As `distance_at`, but `fallback` where there is no path."""
    found = distance_at(ground, row, field, g, goal, point)
    return wp.where(found > 1.0e6, fallback, found)
