"""Connected regions of walkable ground: which cells an agent can go to from one another."""

from typing import no_type_check

import warp as wp

from shoal.nav.walk import CLEARANCE_TOLERANCE, NO_FLOOR, Ground, beside_diagonal, is_clear, neighbor

wp.set_module_options({"enable_backward": False})

MARGIN_FRACTION = wp.constant(0.45)
"""Fraction of a cell by which the center of a cell beside a wall may be too close to the wall and still be floor."""


@wp.func
@no_type_check
def ring_neighbor(k: int) -> int:
    """Argument of `neighbor` for the k-th cell counterclockwise around a cell."""
    order = wp.vector(0, 4, 2, 7, 1, 5, 3, 6, dtype=int)
    return order[k % 8]


@wp.func
@no_type_check
def is_margin(ground: Ground, row: int, i: int) -> bool:
    """Whether a cell lies along the edge of the floor, so that an agent can stand on a part of it.

    Its clear neighbors must be contiguous. A cell in a gap that is too narrow has clear neighbors on both sides, which
    it must not connect.
    """
    groups = int(0)
    clear = int(0)
    if ground.clearance[row, i] >= ground.radius - MARGIN_FRACTION * ground.cell_size:
        before = neighbor(ground, row, i, ring_neighbor(7))
        for k in range(8):
            other = neighbor(ground, row, i, ring_neighbor(k))
            if is_clear(ground, row, other):
                clear += 1
                joined = bool(False)
                if is_clear(ground, row, before):
                    rise = ground.height[row, other] - ground.height[row, before]
                    joined = wp.abs(rise) <= ground.max_step_height + 1.0e-3
                if not joined:
                    groups += 1
            before = other
    return clear == 8 or groups == 1


@wp.func
@no_type_check
def can_cross(ground: Ground, row: int, i: int, other: int, k: int) -> bool:
    """Whether an agent can step diagonally between two clear cells.

    Clearance is interpolated between four cells, a and b on one diagonal, c and d on the other. If neither c nor d is
    clear, the path leads over the saddle point, whose clearance is (ab - cd) / (a + b - c - d).
    """
    beside = beside_diagonal(ground, row, i, k)
    crosses = is_clear(ground, row, beside[0]) or is_clear(ground, row, beside[1])
    if not crosses:
        a = ground.clearance[row, i]
        b = ground.clearance[row, other]
        c = float(0.0)
        d = float(0.0)
        if beside[0] >= 0:
            c = ground.clearance[row, beside[0]]
        if beside[1] >= 0:
            d = ground.clearance[row, beside[1]]
        crosses = (a * b - c * d) / (a + b - c - d) >= ground.radius - CLEARANCE_TOLERANCE
    return crosses


@wp.kernel
@no_type_check
def find_floor_cells(first: int, ground: Ground, row: int):
    """Make every cell that an agent can stand on a region."""
    i = first + wp.tid()
    is_floor = bool(False)
    if ground.height[row, i] > NO_FLOOR:
        is_floor = is_clear(ground, row, i) or is_margin(ground, row, i)
    ground.region[row, i] = wp.where(is_floor, i, -1)


@wp.func
@no_type_check
def find_root(ground: Ground, row: int, i: int) -> int:
    """Root of a cell in the union-find forest: the first cell of its region, as joined so far."""
    at = int(i)
    above = ground.region[row, at]
    while above != at:
        at = above
        above = ground.region[row, at]
    return at


@wp.kernel
@no_type_check
def join_regions(first: int, ground: Ground, row: int):
    """Find the connected components of the walkable floor ("islands" in Habitat) by a parallel union-find.

    Each thread joins the component of a cell with those of the neighbors that an agent can step to. `region` holds the
    parent of each cell, which has a smaller number; roots are their own parent. If another thread has just changed a
    root, the thread continues with the root's new parent.
    """
    i = first + wp.tid()
    if ground.region[row, i] >= 0:
        inside = is_clear(ground, row, i)
        for k in range(8):
            other = neighbor(ground, row, i, k)
            joins = is_clear(ground, row, other)
            if joins and inside and k >= 4:
                joins = can_cross(ground, row, i, other, k)
            if joins:
                a = find_root(ground, row, i)
                b = find_root(ground, row, other)
                while a != b:
                    child = wp.max(a, b)
                    parent = wp.min(a, b)
                    was = wp.atomic_min(ground.region, row, child, parent)
                    a = parent
                    b = parent
                    if was != child:
                        a = find_root(ground, row, was)
                        b = find_root(ground, row, parent)


@wp.kernel
@no_type_check
def name_regions(first: int, ground: Ground, row: int):
    """Number every cell by the first cell of its region."""
    i = first + wp.tid()
    if ground.region[row, i] >= 0:
        ground.region[row, i] = find_root(ground, row, i)
