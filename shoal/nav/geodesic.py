"""Geodesic distance: for each goal a field over the ground, solved in parallel, read in constant time.

The field T is the solution of the eikonal equation |grad T| = 1 on the cells where an agent can stand, by an upwind
scheme: a front that passed the lesser neighbors along x and y goes on straight in the plane through them and the cell,
which may slope; and the same along the two diagonals, whichever arrives first. Around the goal, as far as it is in
sight, T is the exact distance: there the scheme would err most.
"""

import torch
import warp as wp

from shoal.core.kernels import meet_block
from shoal.core.launch import Plan
from shoal.nav.ground import GroundMemory, can_cross, send
from shoal.nav.walk import (
    Ground,
    beside_diagonal,
    between_cells,
    can_stand,
    cell_middle,
    cell_of,
    is_clear,
    neighbor,
    on_floor,
    standing_cell,
)

wp.set_module_options({"enable_backward": False})

MILLI = wp.constant(1000.0)
"""Fields are kept in millimeters, 16 bits each."""

UNREACHABLE = wp.constant(65535)

EXACT = wp.constant(1.0)
"""Meters around a goal within which what is in sight of it is measured straight."""

FARTHEST = wp.constant(1.0e9)

THREADS = 512
"""Threads of a GPU that work on one field together."""


class FieldMemory:
    """`goals` fields for every row of a ground memory."""

    def __init__(self, ground: GroundMemory, goals: int):
        self.ground, self.goals = ground, goals
        rows, device = ground.memory.rows, ground.device
        self.goal = torch.zeros(rows, goals, 3, device=device)
        """float32 [rows, goals, 3]: the places, on the floor."""
        self.field = torch.full((rows, goals, ground.cells), -1, dtype=torch.int16, device=device)
        """The bits of uint16 [rows, goals, cells]: millimeters along the floor; 65535 where there is no way."""
        self._work = torch.zeros(goals, ground.cells, device=device)
        self._links = torch.zeros(ground.cells, 8, dtype=torch.int32, device=device)
        self._changed = torch.zeros(goals, dtype=torch.int32, device=device)

    def solve(self, row: int, goals: torch.Tensor) -> None:
        """Compute the fields of a row for these goals [goals, 3], on torch's current stream; it waits for nothing."""
        send(self.goal[row], goals)
        ground, device = self.ground.ground, self.ground.device
        cells = len(self.ground.found[row].height)
        links, work = wp.from_torch(self._links), wp.from_torch(self._work)
        places = wp.from_torch(self.goal[row], dtype=wp.vec3)
        plan = Plan(device, cells)
        plan.add_kernel(find_links, cells, [ground, row, links], unit=64, block=128)
        plan.add_kernel(sow, cells * self.goals, [ground, row, cells, places, work], unit=cells, block=128)
        threads = THREADS if device.type == "cuda" else 1
        inputs = [threads, ground, row, cells, links, work, wp.from_torch(self._changed)]
        plan.add_kernel(march, self.goals * threads, inputs, unit=threads, block=threads)
        field = wp.from_torch(self.field[row], dtype=wp.uint16)
        plan.add_kernel(keep, cells * self.goals, [cells, work, field], unit=cells, block=128)
        plan()


@wp.func
def shares_clear(ground: Ground, row: int, i: int, other: int, k: int) -> bool:
    """Whether a cell that an agent can stand on lies beside both cell `i` and its k-th neighbor, along x or y."""
    across = wp.where(k < 2, 2, 0)
    shared = bool(False)
    for side in range(2):
        shared = shared or is_clear(ground, row, neighbor(ground, row, i, across + side))
        shared = shared or is_clear(ground, row, neighbor(ground, row, other, across + side))
    return shared


@wp.func
def is_floor(ground: Ground, row: int, i: int) -> bool:
    """Whether a cell belongs to a region; there is none at -1."""
    found = bool(False)
    if i >= 0:
        found = ground.region[row, i] >= 0
    return found


@wp.func
def is_linked(ground: Ground, row: int, i: int, other: int, k: int) -> bool:
    """Whether an agent can go from cell `i` to its k-th neighbor, of the same region.

    Between two cells of the margin, where it cannot stand in the middle, only along the edge of the same floor; around
    a corner between floor and margin, if one of the two cells beside the diagonal is of the floor.
    """
    inside = int(is_clear(ground, row, i)) + int(is_clear(ground, row, other))
    if k < 4:
        return inside > 0 or shares_clear(ground, row, i, other, k)
    if inside == 2:
        return can_cross(ground, row, i, other, k)
    beside = beside_diagonal(ground, row, i, k)
    return inside == 1 and (is_floor(ground, row, beside[0]) or is_floor(ground, row, beside[1]))


@wp.kernel
def find_links(first: int, ground: Ground, row: int, links: wp.array2d(dtype=int)):
    """The cells around each that an agent can go to; -1 for none."""
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
def in_sight(ground: Ground, row: int, one: wp.vec3, two: wp.vec3) -> bool:
    """Whether an agent can walk straight from one place to the other."""
    steps = int(wp.ceil(wp.length(two - one) / (0.5 * ground.cell)))
    clear = bool(True)
    place = one
    for k in range(steps):
        if clear:
            share = float(k + 1) / float(steps)
            place = wp.vec3(one[0] + (two[0] - one[0]) * share, one[1] + (two[1] - one[1]) * share, place[2])
            clear = can_stand(ground, row, place)
            place = on_floor(ground, row, place)
    return clear


@wp.kernel
def sow(
    first: int, ground: Ground, row: int, cells: int, goals: wp.array(dtype=wp.vec3), work: wp.array2d(dtype=float)
):
    """Exact distances around each goal, with their sign turned to mark them; elsewhere as far as can be."""
    n = first + wp.tid()
    g = n // cells
    i = n % cells
    value = FARTHEST
    if ground.region[row, i] >= 0:
        middle = cell_middle(ground, row, i)
        straight = wp.length(goals[g] - middle)
        if straight <= EXACT:
            if in_sight(ground, row, goals[g], middle):
                value = -straight - 1.0e-6
    work[g, i] = value


@wp.func
def lesser(
    ground: Ground, row: int, links: wp.array2d(dtype=int), work: wp.array2d(dtype=float), g: int, i: int, k: int
) -> wp.vec2:
    """The lesser of the two neighbors along an axis, and how much higher it lies."""
    best = wp.vec2(FARTHEST, 0.0)
    for side in range(2):
        other = links[i, k + side]
        if other >= 0:
            value = wp.abs(work[g, other])
            if value < best[0]:
                best = wp.vec2(value, ground.height[row, other] - ground.height[row, i])
    return best


@wp.func
def arrival(a: wp.vec2, b: wp.vec2, flat: float) -> float:
    """When a front that passed two neighbors, `flat` m² away across from one another, arrives here.

    With e and f the ways to them, T solves |grad T| = 1 where e grad T = a - T and f grad T = b - T. The front must
    come from between the two, and after both.
    """
    ee = flat + a[1] * a[1]
    ff = flat + b[1] * b[1]
    new = wp.min(a[0] + wp.sqrt(ee), b[0] + wp.sqrt(ff))
    if a[0] < FARTHEST and b[0] < FARTHEST:
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
def march(
    first: int,
    threads: int,
    ground: Ground,
    row: int,
    cells: int,
    links: wp.array2d(dtype=int),
    work: wp.array2d(dtype=float),
    changed: wp.array(dtype=int),
):
    """Lower every cell to what its neighbors say, again and again until nothing changes; a block of threads a goal."""
    n = first + wp.tid()
    g = n // threads
    lane = n % threads
    width = ground.size[row][0]
    turn = int(0)
    going = bool(True)
    while going:
        if lane == 0:
            changed[g] = 0
        meet_block()
        for k in range(lane, cells, threads):
            # On a CPU each pass sweeps in another direction, which carries values far at once.
            y = k // width
            x = k % width
            if (turn & 1) == 1:
                x = width - 1 - x
            if (turn & 2) == 2:
                y = cells // width - 1 - y
            i = y * width + x
            old = work[g, i]
            if old > 0.0 and ground.region[row, i] >= 0:
                new = old
                for stencil in range(2):
                    a = lesser(ground, row, links, work, g, i, 4 * stencil)
                    b = lesser(ground, row, links, work, g, i, 4 * stencil + 2)
                    new = wp.min(new, arrival(a, b, float(1 + stencil) * ground.cell * ground.cell))
                if new < old - 1.0e-5:
                    work[g, i] = new
                    changed[g] = 1
        meet_block()
        going = changed[g] != 0
        meet_block()
        turn += 1


@wp.kernel
def keep(first: int, cells: int, work: wp.array2d(dtype=float), field: wp.array2d(dtype=wp.uint16)):
    """Fields in millimeters."""
    n = first + wp.tid()
    g = n // cells
    i = n % cells
    meters = wp.abs(work[g, i])
    value = UNREACHABLE
    if meters < 65.0:
        value = int(meters * MILLI + 0.5)
    field[g, i] = wp.uint16(value)


@wp.func
def distance_at(
    ground: Ground, row: int, field: wp.array3d(dtype=wp.uint16), g: int, goal: wp.vec3, place: wp.vec3
) -> float:
    """Meters along the floor from a place to goal `g` of a row; inf where there is no way."""
    straight = wp.length(goal - place)
    i = standing_cell(ground, row, place)
    if i < 0:
        return wp.inf
    here = float(int(field[row, g, i])) / MILLI
    # Where the cell's own distance is the straight one, the goal is in sight.
    if straight <= EXACT and wp.abs(here - wp.length(goal - cell_middle(ground, row, i))) < 2.0e-3:
        return straight
    at = between_cells(ground, row, place)
    total = float(0.0)
    weight = float(0.0)
    for k in range(4):
        j = cell_of(ground, row, int(at[0]) + k % 2, int(at[1]) + k // 2, place[2])
        if j >= 0:
            value = int(field[row, g, j])
            if value != UNREACHABLE:
                w = wp.where(k % 2 == 1, at[2], 1.0 - at[2]) * wp.where(k // 2 == 1, at[3], 1.0 - at[3])
                total += w * float(value) / MILLI
                weight += w
    found = float(wp.inf)
    if weight > 1.0e-6:
        found = wp.max(total / weight, straight)
    return found


@wp.func
def distance_or(
    otherwise: float,
    ground: Ground,
    row: int,
    field: wp.array3d(dtype=wp.uint16),
    g: int,
    goal: wp.vec3,
    place: wp.vec3,
) -> float:
    """As `distance_at`; another number where there is no way."""
    found = distance_at(ground, row, field, g, goal, place)
    return wp.where(found > 1.0e6, otherwise, found)
