"""Standing and walking on the ground: functions that kernels of worlds and queries share."""

import warp as wp

NOWHERE = wp.constant(-1.0e6)
"""Height of a floor that is not there."""

CLOSE = wp.constant(1.0e-3)
"""Meters that an agent may be nearer to obstacles than its radius."""


@wp.struct
class Ground:
    """The ground of all scenes of a memory; see `ground.GroundMemory` for what the arrays hold."""

    cell: float
    radius: float
    climb: float
    origin: wp.array(dtype=wp.vec3)
    size: wp.array(dtype=wp.vec3i)
    height: wp.array2d(dtype=float)
    clearance: wp.array2d(dtype=float)
    region: wp.array2d(dtype=int)


@wp.func
def cell_of(ground: Ground, row: int, x: int, y: int, z: float) -> int:
    """The cell of a column of the grid whose floor is nearest to height z, within a climb; -1 if there is none."""
    size = ground.size[row]
    best = int(-1)
    if x >= 0 and y >= 0 and x < size[0] and y < size[1]:
        least = ground.climb + 1.0e-3
        for s in range(size[2]):
            i = (s * size[1] + y) * size[0] + x
            step = wp.abs(ground.height[row, i] - z)
            if step <= least:
                least = step
                best = i
    return best


@wp.func
def cell_at(ground: Ground, row: int, place: wp.vec3) -> int:
    """The cell under a place, or -1."""
    x = int(wp.floor((place[0] - ground.origin[row][0]) / ground.cell))
    y = int(wp.floor((place[1] - ground.origin[row][1]) / ground.cell))
    return cell_of(ground, row, x, y, place[2])


@wp.func
def neighbor(ground: Ground, row: int, i: int, k: int) -> int:
    """The k-th cell around cell `i`, on the floor that an agent reaches by a step, or -1.

    0 and 1 lie along x, 2 and 3 along y, 4 and 5 along one diagonal, 6 and 7 along the other.
    """
    sign = 1 - 2 * (k % 2)
    dx = wp.where(k // 2 == 1, 0, sign)
    dy = wp.where(k // 2 == 0, 0, wp.where(k // 2 == 3, -sign, sign))
    size = ground.size[row]
    j = i % (size[0] * size[1])
    return cell_of(ground, row, j % size[0] + dx, j // size[0] + dy, ground.height[row, i])


@wp.func
def beside_diagonal(ground: Ground, row: int, i: int, k: int) -> wp.vec2i:
    """The two cells that the step from cell `i` to its k-th neighbor, along a diagonal, passes between."""
    sign = 1 - 2 * (k % 2)
    along_x = neighbor(ground, row, i, wp.where(sign > 0, 0, 1))
    along_y = neighbor(ground, row, i, wp.where(wp.where(k < 6, sign, -sign) > 0, 2, 3))
    return wp.vec2i(along_x, along_y)


@wp.func
def cell_middle(ground: Ground, row: int, i: int) -> wp.vec3:
    """The middle of a cell, on its floor."""
    size = ground.size[row]
    j = i % (size[0] * size[1])
    x = ground.origin[row][0] + (float(j % size[0]) + 0.5) * ground.cell
    y = ground.origin[row][1] + (float(j // size[0]) + 0.5) * ground.cell
    return wp.vec3(x, y, ground.height[row, i])


@wp.func
def between_cells(ground: Ground, row: int, place: wp.vec3) -> wp.vec4:
    """Column and row of the cell whose middle is next below a place, and how far the place is towards the next."""
    x = (place[0] - ground.origin[row][0]) / ground.cell - 0.5
    y = (place[1] - ground.origin[row][1]) / ground.cell - 0.5
    return wp.vec4(wp.floor(x), wp.floor(y), x - wp.floor(x), y - wp.floor(y))


@wp.func
def clearance_at(ground: Ground, row: int, place: wp.vec3) -> wp.vec3:
    """Clearance at a place, interpolated between the middles of cells, and its slope along x and y."""
    at = between_cells(ground, row, place)
    a = at[2]
    b = at[3]
    c = wp.vec4()
    for k in range(4):
        i = cell_of(ground, row, int(at[0]) + k % 2, int(at[1]) + k // 2, place[2])
        value = float(0.0)
        if i >= 0:
            value = ground.clearance[row, i]
        c[k] = value
    low = c[0] * (1.0 - a) + c[1] * a
    high = c[2] * (1.0 - a) + c[3] * a
    along_x = ((c[1] - c[0]) * (1.0 - b) + (c[3] - c[2]) * b) / ground.cell
    along_y = (high - low) / ground.cell
    return wp.vec3(low * (1.0 - b) + high * b, along_x, along_y)


@wp.func
def standing_cell(ground: Ground, row: int, place: wp.vec3) -> int:
    """Of the cells around a place the one with the most clearance, or -1: beside a wall, the one that counts."""
    at = between_cells(ground, row, place)
    best = int(-1)
    most = float(0.0)
    for k in range(4):
        i = cell_of(ground, row, int(at[0]) + k % 2, int(at[1]) + k // 2, place[2])
        if i >= 0:
            if ground.clearance[row, i] > most:
                most = ground.clearance[row, i]
                best = i
    return best


@wp.func
def is_clear(ground: Ground, row: int, i: int) -> bool:
    """Whether an agent can stand on the middle of a cell; there is none at -1."""
    clear = bool(False)
    if i >= 0:
        clear = ground.clearance[row, i] >= ground.radius - CLOSE
    return clear


@wp.func
def can_stand(ground: Ground, row: int, place: wp.vec3) -> bool:
    """Whether an agent's middle may be here."""
    stands = bool(False)
    if cell_at(ground, row, place) >= 0:
        stands = clearance_at(ground, row, place)[0] >= ground.radius - CLOSE
    return stands


@wp.struct
class Walk:
    """Where a walk ended, and whether something was in the way."""

    place: wp.vec3
    blocked: bool


@wp.func
def on_floor(ground: Ground, row: int, place: wp.vec3) -> wp.vec3:
    """The place, at the height of the floor under it."""
    i = cell_at(ground, row, place)
    z = place[2]
    if i >= 0:
        z = ground.height[row, i]
    return wp.vec3(place[0], place[1], z)


@wp.func
def walk(ground: Ground, row: int, place: wp.vec3, along: wp.vec2, slide: bool) -> Walk:
    """Move by `along`, in steps of half a cell; where something is in the way, slide along it or stop."""
    out = Walk()
    out.place = place
    out.blocked = False
    steps = int(wp.ceil(wp.length(along) / (0.5 * ground.cell)))
    going = bool(True)
    for _ in range(steps):
        if going:
            step = along / float(steps)
            next = wp.vec3(out.place[0] + step[0], out.place[1] + step[1], out.place[2])
            if not can_stand(ground, row, next):
                out.blocked = True
                going = False
                if slide:
                    # Back to where the clearance is enough, up its slope.
                    c = clearance_at(ground, row, next)
                    up = wp.vec2(c[1], c[2])
                    steep = wp.length(up)
                    if steep > 1.0e-3:
                        back = wp.min((ground.radius - c[0]) / steep, 0.5 * ground.cell)
                        next = wp.vec3(next[0] + up[0] / steep * back, next[1] + up[1] / steep * back, next[2])
                        going = can_stand(ground, row, next)
            if going:
                out.place = on_floor(ground, row, next)
    return out
