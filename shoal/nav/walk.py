"""Standing and walking on the ground: Warp functions for the kernels of worlds and queries."""

from typing import no_type_check

import warp as wp

NO_FLOOR = wp.constant(-1.0e6)
"""Height of a cell without floor."""

CLEARANCE_TOLERANCE = wp.constant(1.0e-3)
"""Amount by which clearance may be less than the agent's radius, in meters."""


@wp.struct
class Ground:
    """The ground of all scenes in memory; the arrays are those of `ground.GroundMemory`."""

    cell_size: float
    radius: float
    max_step_height: float
    origin: wp.array(dtype=wp.vec3)
    dims: wp.array(dtype=wp.vec3i)
    height: wp.array2d(dtype=float)
    clearance: wp.array2d(dtype=float)
    region: wp.array2d(dtype=int)


@wp.func
@no_type_check
def cell_of(ground: Ground, row: int, x: int, y: int, z: float) -> int:
    """Cell of column (x, y) with the floor height nearest to z, within `max_step_height`; -1 if there is none."""
    dims = ground.dims[row]
    best = int(-1)
    if x >= 0 and y >= 0 and x < dims[0] and y < dims[1]:
        least = ground.max_step_height + 1.0e-3
        for s in range(dims[2]):
            i = (s * dims[1] + y) * dims[0] + x
            step = wp.abs(ground.height[row, i] - z)
            if step <= least:
                least = step
                best = i
    return best


@wp.func
@no_type_check
def cell_at(ground: Ground, row: int, point: wp.vec3) -> int:
    """Cell under a point, or -1."""
    x = int(wp.floor((point[0] - ground.origin[row][0]) / ground.cell_size))
    y = int(wp.floor((point[1] - ground.origin[row][1]) / ground.cell_size))
    return cell_of(ground, row, x, y, point[2])


@wp.func
@no_type_check
def neighbor(ground: Ground, row: int, i: int, k: int) -> int:
    """The k-th of the 8 neighbors of cell `i`, at most one step higher or lower, or -1.

    0 and 1 are along x, 2 and 3 along y, 4 and 5 along one diagonal, 6 and 7 along the other.
    """
    sign = 1 - 2 * (k % 2)
    dx = wp.where(k // 2 == 1, 0, sign)
    dy = wp.where(k // 2 == 0, 0, wp.where(k // 2 == 3, -sign, sign))
    dims = ground.dims[row]
    j = i % (dims[0] * dims[1])
    return cell_of(ground, row, j % dims[0] + dx, j // dims[0] + dy, ground.height[row, i])


@wp.func
@no_type_check
def beside_diagonal(ground: Ground, row: int, i: int, k: int) -> wp.vec2i:
    """The two cells on either side of the diagonal step from cell `i` to its k-th neighbor."""
    sign = 1 - 2 * (k % 2)
    along_x = neighbor(ground, row, i, wp.where(sign > 0, 0, 1))
    along_y = neighbor(ground, row, i, wp.where(wp.where(k < 6, sign, -sign) > 0, 2, 3))
    return wp.vec2i(along_x, along_y)


@wp.func
@no_type_check
def cell_center(ground: Ground, row: int, i: int) -> wp.vec3:
    """Center of a cell, on its floor."""
    dims = ground.dims[row]
    j = i % (dims[0] * dims[1])
    x = ground.origin[row][0] + (float(j % dims[0]) + 0.5) * ground.cell_size
    y = ground.origin[row][1] + (float(j // dims[0]) + 0.5) * ground.cell_size
    return wp.vec3(x, y, ground.height[row, i])


@wp.func
@no_type_check
def bilinear_weights(ground: Ground, row: int, point: wp.vec3) -> wp.vec4:
    """For bilinear interpolation at a point: column and row of the lower cell, and the weights of the upper one."""
    x = (point[0] - ground.origin[row][0]) / ground.cell_size - 0.5
    y = (point[1] - ground.origin[row][1]) / ground.cell_size - 0.5
    return wp.vec4(wp.floor(x), wp.floor(y), x - wp.floor(x), y - wp.floor(y))


@wp.func
@no_type_check
def clearance_at(ground: Ground, row: int, point: wp.vec3) -> wp.vec3:
    """Clearance at a point, interpolated between cell centers, and its gradient along x and y."""
    at = bilinear_weights(ground, row, point)
    a = at[2]
    b = at[3]
    c = wp.vec4()
    for k in range(4):
        i = cell_of(ground, row, int(at[0]) + k % 2, int(at[1]) + k // 2, point[2])
        value = float(0.0)
        if i >= 0:
            value = ground.clearance[row, i]
        c[k] = value
    low = c[0] * (1.0 - a) + c[1] * a
    high = c[2] * (1.0 - a) + c[3] * a
    along_x = ((c[1] - c[0]) * (1.0 - b) + (c[3] - c[2]) * b) / ground.cell_size
    along_y = (high - low) / ground.cell_size
    return wp.vec3(low * (1.0 - b) + high * b, along_x, along_y)


@wp.func
@no_type_check
def clearest_cell(ground: Ground, row: int, point: wp.vec3) -> int:
    """The cell with the most clearance among the four around a point, or -1."""
    at = bilinear_weights(ground, row, point)
    best = int(-1)
    most = float(0.0)
    for k in range(4):
        i = cell_of(ground, row, int(at[0]) + k % 2, int(at[1]) + k // 2, point[2])
        if i >= 0:
            if ground.clearance[row, i] > most:
                most = ground.clearance[row, i]
                best = i
    return best


@wp.func
@no_type_check
def is_clear(ground: Ground, row: int, i: int) -> bool:
    """Whether an agent can stand on the center of a cell; False for cell -1."""
    clear = bool(False)
    if i >= 0:
        clear = ground.clearance[row, i] >= ground.radius - CLEARANCE_TOLERANCE
    return clear


@wp.func
@no_type_check
def can_stand(ground: Ground, row: int, point: wp.vec3) -> bool:
    """Whether an agent can stand with its center at this point."""
    standable = bool(False)
    if cell_at(ground, row, point) >= 0:
        standable = clearance_at(ground, row, point)[0] >= ground.radius - CLEARANCE_TOLERANCE
    return standable


@wp.struct
class Walk:
    """End of a walk, and whether an obstacle blocked it."""

    point: wp.vec3
    blocked: bool


@wp.func
@no_type_check
def on_floor(ground: Ground, row: int, point: wp.vec3) -> wp.vec3:
    """The point at the height of the floor under it."""
    i = cell_at(ground, row, point)
    z = point[2]
    if i >= 0:
        z = ground.height[row, i]
    return wp.vec3(point[0], point[1], z)


@wp.func
@no_type_check
def walk(ground: Ground, row: int, point: wp.vec3, displacement: wp.vec2, allow_sliding: bool) -> Walk:
    """Move by `displacement` in steps of half a cell; at an obstacle, slide along it or stop."""
    out = Walk()
    out.point = point
    out.blocked = False
    steps = int(wp.ceil(wp.length(displacement) / (0.5 * ground.cell_size)))
    going = bool(True)
    for _ in range(steps):
        if going:
            step = displacement / float(steps)
            next = wp.vec3(out.point[0] + step[0], out.point[1] + step[1], out.point[2])
            if not can_stand(ground, row, next):
                out.blocked = True
                going = False
                if allow_sliding:
                    # Move up the gradient of the clearance until it reaches the radius.
                    c = clearance_at(ground, row, next)
                    up = wp.vec2(c[1], c[2])
                    steep = wp.length(up)
                    if steep > 1.0e-3:
                        back = wp.min((ground.radius - c[0]) / steep, 0.5 * ground.cell_size)
                        next = wp.vec3(next[0] + up[0] / steep * back, next[1] + up[1] / steep * back, next[2])
                        going = can_stand(ground, row, next)
            if going:
                out.point = on_floor(ground, row, next)
    return out
