"""The shell of a house: floors, ceilings, walls with openings, doors, windows, baseboards and cornices."""

from dataclasses import dataclass

import numpy as np

from shoal.scene.house.plan import HALF_WALL, OUTER_WALL, Opening, Plan, Wall
from shoal.scene.house.shapes import Color, Mesh, box, build, join, lathe, molding, panel, steps
from shoal.scene.house.style import WHITE, WOODS
from shoal.scene.house.textures import SurfaceType

ROOF = 0.25
"""Meters from the ceiling to the top of the house."""
LINING = 0.02
"""Thickness of a door frame's boards, meters; the clear width is the opening minus twice this."""
HORIZON = 0.36
"""Eye height in the texture of the view, as a fraction from its bottom."""

_WALLS: tuple[Color, ...] = (
    (0.96, 0.94, 0.9), (0.93, 0.9, 0.82), (0.86, 0.9, 0.87), (0.84, 0.88, 0.93), (0.95, 0.87, 0.82), (0.9, 0.9, 0.9),
    (0.78, 0.84, 0.8), (0.94, 0.9, 0.74), (0.76, 0.8, 0.86), (0.87, 0.8, 0.84),
)  # fmt: skip
_STONES: tuple[Color, ...] = ((0.9, 0.88, 0.84), (0.75, 0.76, 0.77), (0.82, 0.72, 0.62), (0.6, 0.66, 0.68))
_CARPETS: tuple[Color, ...] = ((0.75, 0.7, 0.62), (0.55, 0.6, 0.66), (0.66, 0.56, 0.5), (0.6, 0.65, 0.55))


@dataclass(frozen=True)
class Finish:
    """Surface types and colors of one room."""

    floor: SurfaceType
    floor_tint: Color
    wall: SurfaceType
    wall_tint: Color
    cornice: bool


def finishes(plan: Plan, rng: np.random.Generator) -> list[Finish]:
    """A finish for each room: one wooden floor for the house, tiles in wet rooms, a wall color per room."""
    boards = SurfaceType.PLANKS if rng.random() < 0.6 else SurfaceType.PARQUET
    wood = WOODS[int(rng.integers(6))]  # No floors of white or black wood.
    result = []
    for room in plan.rooms:
        draw, color, stone, soft = rng.random(3), *(int(rng.integers(n)) for n in (len(_WALLS), 4, 4))
        floor, floor_tint, wall = boards, wood, SurfaceType.PLASTER
        if room.kind == "bath" or (room.kind in ("kitchen", "storage") and draw[0] < 0.6):
            floor, floor_tint = (SurfaceType.TILES if draw[1] < 0.7 else SurfaceType.CHECKS), _STONES[stone]
        elif room.kind in ("bedroom", "study") and draw[0] < 0.4:
            floor, floor_tint = SurfaceType.CARPET, _CARPETS[soft]
        elif room.kind == "hall" and draw[0] < 0.4:
            floor, floor_tint = SurfaceType.MARBLE, _STONES[stone]
        if room.kind == "bath":
            wall = SurfaceType.WALL_TILES
        elif room.kind in ("bedroom", "dining", "study", "living", "corridor") and draw[2] < 0.35:
            wall = SurfaceType.PAPER_STRIPES if draw[1] < 0.5 else SurfaceType.PAPER_LEAVES
        elif room.kind in ("living", "kitchen", "dining") and draw[2] > 0.92:
            wall, color = SurfaceType.BRICK, 0
        tint = (0.78, 0.5, 0.4) if wall == SurfaceType.BRICK else _WALLS[color]
        result.append(Finish(floor, floor_tint, wall, tint, room.kind in ("living", "bedroom", "dining", "hall")))
    return result


def shell(plan: Plan, rng: np.random.Generator, fine: float) -> list[tuple[str, Mesh]]:
    """The building without furniture, as labeled parts."""
    rooms = finishes(plan, rng)
    facade = Finish(SurfaceType.PLASTER, WHITE, SurfaceType.BRICK, (0.8, 0.5, 0.4), False)
    trim: Color = WHITE if rng.random() < 0.7 else WOODS[int(rng.integers(5))]
    parts: list[tuple[str, Mesh]] = []
    for number, finish in enumerate(rooms):
        rects = [rect for room, rect in plan.floors if room == number]
        parts.append(("floor", join([_level(rect, 0.0, finish.floor, finish.floor_tint) for rect in rects])))
        parts.append(("ceiling", join([_level(rect, plan.height, SurfaceType.PLASTER, WHITE) for rect in rects])))
        walls = [wall for wall in plan.walls if wall.room == number]
        faces = [_face(plan, wall, 0.0, plan.height, finish) for wall in walls]
        faces += [strip for wall in walls for strip in _baseboards(plan, wall, trim, fine, finish)]
        if finish.wall == SurfaceType.WALL_TILES and fine > 0.5:
            faces += [_tiling(plan, wall, finish.wall_tint) for wall in walls]
        parts.append(("wall", join(faces)))
    outer = [_face(plan, wall, -0.05, plan.height + ROOF, facade) for wall in plan.walls if wall.room < 0]
    parts.append(
        ("wall", join(outer + [_level(rect, plan.height + ROOF, SurfaceType.PLASTER, WHITE) for rect in plan.cover]))
    )
    # Extends under the outer walls, where the entrance passes through them.
    parts.append(("floor", join([_level(rect, -0.01, SurfaceType.PLAIN, (0.6, 0.58, 0.55)) for rect in plan.cover])))
    for opening in plan.openings:
        if opening.kind == "window":
            parts.append(("window", _window(opening, trim, fine)))
        else:
            parts.append(("door", _doorway(opening, trim, fine)))
    return parts


def _level(rect, z: float, surface: SurfaceType, tint: Color) -> Mesh:
    x0, y0, x1, y1 = rect
    corners = [(x0, y0, z), (x1, y0, z), (x1, y1, z), (x0, y1, z)]
    return panel(corners, surface, tint, [(x0, y0), (x1, y0), (x1, y1), (x0, y1)])


def holes_in(plan: Plan, wall: Wall) -> list[Opening]:
    """The openings in this wall face."""
    reach = HALF_WALL if wall.room >= 0 else OUTER_WALL
    return [
        o
        for o in plan.openings
        if o.axis == wall.axis
        and wall.room in o.rooms
        and abs(abs(o.at - wall.at) - reach) < 1e-3
        and o.low > wall.low - 1e-3
        and o.high < wall.high + 1e-3
        and o.rooms[0 if wall.sign < 0 else 1] == wall.room
    ]


def _face(plan: Plan, wall: Wall, bottom: float, top: float, finish: Finish) -> Mesh:
    holes = holes_in(plan, wall)
    along = np.unique([wall.low, wall.high, *(o.low for o in holes), *(o.high for o in holes)])
    up = np.unique([bottom, top, *(max(o.bottom, bottom) for o in holes), *(o.top for o in holes)])
    u, z = np.meshgrid(along, up, indexing="ij")
    spot = np.arange(u.size).reshape(u.shape)
    middle_u, middle_z = (along[:-1] + along[1:]) / 2, (up[:-1] + up[1:]) / 2
    keep = np.ones((len(middle_u), len(middle_z)), bool)
    for o in holes:
        inside = (middle_u > o.low) & (middle_u < o.high)
        keep &= ~(inside[:, None] & ((middle_z > o.bottom) & (middle_z < o.top))[None])
    a, b, c, d = spot[:-1, :-1][keep], spot[1:, :-1][keep], spot[1:, 1:][keep], spot[:-1, 1:][keep]
    triangles = np.stack([a, b, c, a, c, d], -1).reshape(-1, 3)
    flat = np.stack([u.ravel(), z.ravel()], -1)
    return build(
        _wall_points(wall.axis, wall.at, u.ravel(), 0.0, z.ravel()),
        triangles,
        finish.wall,
        finish.wall_tint,
        flat[triangles],
    )


def _wall_points(axis: int, at: float, along, across, up) -> np.ndarray:
    """Points [..., 3] of a wall from coordinates `along` it, `across` it relative to `at`, and `up`, in meters."""
    along, across, up = np.broadcast_arrays(along, np.asarray(at) + across, up)
    return np.stack([across, along, up] if axis == 0 else [along, across, up], -1)


def _into_wall(mesh: Mesh, axis: int, at: float) -> Mesh:
    """Place a mesh that is modeled along x, with y across, into a wall."""
    vertices = _wall_points(axis, at, mesh.vertices[:, 0], mesh.vertices[:, 1], mesh.vertices[:, 2]).astype(np.float32)
    return Mesh(vertices, mesh.triangles, mesh.uv, mesh.surface, mesh.tint)


def _free_ranges(plan: Plan, wall: Wall, margin: float, least: float = 0.05) -> list[tuple[float, float]]:
    """Ranges along the lower edge of a face that are free of doors."""
    spans, start = [], wall.low
    for o in sorted((o for o in holes_in(plan, wall) if o.bottom < 0.1), key=lambda o: o.low):
        spans.append((start, o.low - margin))
        start = o.high + margin
    spans.append((start, wall.high))
    return [(a, b) for a, b in spans if b - a > least]


def _strip_ends(wall: Wall, low: float, high: float, z: float) -> tuple[list[float], list[float]]:
    """Start and end of a strip along the face, with the room on its left."""
    if (wall.sign > 0) == (wall.axis == 0):
        low, high = high, low
    start, end = (_wall_points(wall.axis, wall.at, u, 0.0, z).tolist() for u in (low, high))
    return start, end


def _baseboards(plan: Plan, wall: Wall, trim: Color, fine: float, finish: Finish) -> list[Mesh]:
    strips = []
    if finish.wall != SurfaceType.WALL_TILES:
        t = np.linspace(0, np.pi / 2, steps(fine, 5, 2))
        profile = np.stack([0.014 * np.sin(t), 0.075 + 0.02 * np.cos(t)], -1)
        profile = np.concatenate([[(0.0, 0.095)], profile if fine > 0.1 else profile[-1:], [(0.014, 0.0)]])
        for low, high in _free_ranges(plan, wall, 0.07):
            strips.append(molding(profile, *_strip_ends(wall, low, high, 0.0), SurfaceType.PLAIN, trim))
    if finish.cornice and fine > 0.3:
        t = np.linspace(0, np.pi / 2, steps(fine, 6, 2))
        profile = np.stack([0.07 * (1 - np.cos(t)) + 0.004, -0.08 + 0.07 * np.sin(t)], -1)
        profile = np.concatenate([[(0.0, -0.085)], profile, [(0.08, -0.002)]])
        strips.append(molding(profile, *_strip_ends(wall, wall.low, wall.high, plan.height), SurfaceType.PLAIN, WHITE))
    return strips


def _tiling(plan: Plan, wall: Wall, tint: Color) -> Mesh:
    """Tiles as geometry, up to door height."""
    size, rise, gap = 0.15, 0.004, 0.004
    u, z = np.meshgrid(np.arange(wall.low, wall.high - 0.6 * size, size), np.arange(14) * size, indexing="ij")
    u, z = u.ravel(), z.ravel()
    wide = np.minimum(size, wall.high - u)
    keep = np.ones(len(u), bool)
    for o in holes_in(plan, wall):
        margin = 0.07 if o.kind != "window" else 0.0
        inside_u, inside_z = (
            (u + wide > o.low - margin) & (u < o.high + margin),
            (z + size > o.bottom) & (z < o.top + margin),
        )
        keep &= ~(inside_u & inside_z)
    u, z, wide = u[keep], z[keep], wide[keep]
    outer = np.array([(0, 0), (1, 0), (1, 1), (0, 1)])
    corner_u = u[:, None] + np.where(outer[:, 0], wide[:, None] - gap / 2, gap / 2)
    corner_z = z[:, None] + np.where(outer[:, 1], size - gap / 2, gap / 2)
    inner_u = corner_u + np.where(outer[:, 0], -0.006, 0.006)
    inner_z = corner_z + np.where(outer[:, 1], -0.006, 0.006)
    all_u, all_z = np.concatenate([corner_u, inner_u], 1), np.concatenate([corner_z, inner_z], 1)
    across = np.broadcast_to(wall.sign * np.repeat([0.001, rise], 4), all_u.shape)
    points = _wall_points(wall.axis, wall.at, all_u.ravel(), across.ravel(), all_z.ravel())
    sides = [(k, (k + 1) % 4, 4 + (k + 1) % 4, k, 4 + (k + 1) % 4, 4 + k) for k in range(4)]
    one = np.array([(4, 5, 6), (4, 6, 7), *np.array(sides).reshape(-1, 3)])
    triangles = (one[None] + 8 * np.arange(len(u))[:, None, None]).reshape(-1, 3)
    red, green, blue = (0.95 * c for c in tint)
    return build(points, triangles, SurfaceType.PLAIN, (red, green, blue))


def _doorway(o: Opening, trim: Color, fine: float) -> Mesh:
    """Lining and casing of a doorway; the entrance also gets a closed leaf."""
    front = OUTER_WALL if o.rooms[1] < 0 else HALF_WALL
    back = OUTER_WALL if o.rooms[0] < 0 else HALF_WALL
    depth, middle, height = front + back + 0.02, (front - back) / 2, o.top - o.bottom
    wide, center = o.high - o.low, (o.low + o.high) / 2
    parts = []
    for u in (o.low + LINING / 2, o.high - LINING / 2):
        parts.append(box((LINING, depth, height), (u, middle, height / 2), SurfaceType.WOOD, trim))
    parts.append(box((wide, depth, LINING), (center, middle, o.top - LINING / 2), SurfaceType.WOOD, trim))
    for y in (-back - 0.008, front + 0.008) if fine > 0.1 else ():
        for u in (o.low - 0.03, o.high + 0.03):
            parts.append(
                box((0.07, 0.016, o.top + 0.03), (u, y, (o.top + 0.03) / 2), SurfaceType.WOOD, trim, 0.006, fine)
            )
        parts.append(box((wide + 0.14, 0.02, 0.07), (center, y, o.top + 0.035), SurfaceType.WOOD, trim, 0.006, fine))
    if o.kind == "entrance":
        leaf = door_leaf((wide - 2 * LINING, 0.05, o.top - LINING), (0.42, 0.27, 0.2), fine)
        parts.append(leaf.moved((o.low + LINING, middle, 0.0)))
    return _into_wall(join(parts), o.axis, o.at)


def door_leaf(size, tint: Color, fine: float) -> Mesh:
    """A paneled door, hinged at the origin, along +x, with a handle on both sides."""
    w, d, h = size
    parts = [box((w, d, h - 0.01), (w / 2, 0, h / 2 + 0.005), SurfaceType.WOOD, tint)]
    handle = np.array(
        [(0, 0), (0.024, 0), (0.024, 0.008), (0.01, 0.012), (0.01, 0.035), (0.027, 0.045), (0.02, 0.06), (0, 0.062)]
    )
    knob = lathe(
        handle if fine > 0.3 else handle[[1, 3, 5, 7]], steps(fine, 14, 4), SurfaceType.PLAIN, (0.75, 0.72, 0.65)
    )
    for side in (-1, 1):
        for low, high in ((0.12, 0.42), (0.48, 0.93)) if fine > 0.2 else ():
            size_z = (high - low) * h
            rim = box(
                (w - 0.24, 0.016, size_z),
                (w / 2, side * d / 2, (low + high) / 2 * h),
                SurfaceType.WOOD,
                tint,
                0.008,
                fine,
            )
            parts.append(rim)
        parts.append(knob.turned(0, -side * np.pi / 2).moved((w - 0.07, side * d / 2, 1.02)))
    return join(parts)


def _window(o: Opening, trim: Color, fine: float) -> Mesh:
    """Reveal, frame, bars, sill and a pane with the texture of the view."""
    out = 1 if o.rooms[1] < 0 else -1
    inner, outer, glass = -out * HALF_WALL, out * OUTER_WALL, out * 0.08
    wide, high = o.high - o.low, o.top - o.bottom
    center, middle = (o.low + o.high) / 2, (o.bottom + o.top) / 2
    parts = []
    for a, b in (
        ((o.low, o.bottom), (o.high, o.bottom)),
        ((o.high, o.bottom), (o.high, o.top)),
        ((o.high, o.top), (o.low, o.top)),
        ((o.low, o.top), (o.low, o.bottom)),
    ):
        corners = [(a[0], inner, a[1]), (b[0], inner, b[1]), (b[0], outer, b[1]), (a[0], outer, a[1])]
        parts.append(panel(corners, SurfaceType.PLAIN, WHITE))
    corners = [(u, glass, z) for u, z in ((o.low, o.bottom), (o.high, o.bottom), (o.high, o.top), (o.low, o.top))]
    scene = [(0.22 * (u + o.at), HORIZON + 0.22 * (z - 1.25)) for u, _, z in corners]
    parts.append(panel(corners, SurfaceType.VIEW, (1.0, 1.0, 1.0), scene))
    bars = [((wide, 0.06, 0.06), (center, o.bottom + 0.03)), ((wide, 0.06, 0.06), (center, o.top - 0.03))]
    bars += [((0.06, 0.058, high), (o.low + 0.03, middle)), ((0.06, 0.058, high), (o.high - 0.03, middle))]
    for u in np.linspace(o.low, o.high, max(1, round(wide / 0.7)) + 1)[1:-1]:
        bars.append(((0.07, 0.062, high - 0.02), (float(u), middle)))
    if high > 1.1:
        bars.append(((wide - 0.02, 0.04, 0.035), (center, o.bottom + 0.7 * high)))
    for size, (u, z) in bars:
        parts.append(box(size, (u, glass, z), SurfaceType.PLAIN, trim, 0.01, fine))
    sill = abs(glass - inner) + 0.07
    place = (center, (glass + inner) / 2 - out * 0.035, o.bottom - 0.005)
    parts.append(box((wide + 0.12, sill, 0.03), place, SurfaceType.MARBLE, WHITE, 0.01, fine))
    return _into_wall(join(parts), o.axis, o.at)
