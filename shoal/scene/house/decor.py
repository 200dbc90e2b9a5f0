"""Decoration: lamps, plants, rugs, curtains, pictures, mirrors, screens and small objects on tables.

Sizes and origins as in `furniture`; wall pieces have their back at -depth / 2 and their lower edge at z = 0.
"""

import numpy as np

from shoal.scene.house.furniture import Size
from shoal.scene.house.shapes import Color, Mesh, box, copies, cushion, join, lathe, panel, rod, sheet, tube
from shoal.scene.house.style import BLACK, BRASS, STEEL, WHITE, Style, shade
from shoal.scene.house.textures import SurfaceType

_GLOW: Color = (1.0, 0.95, 0.82)
_SOIL: Color = (0.3, 0.22, 0.17)
_POTS: tuple[Color, ...] = ((0.75, 0.45, 0.33), (0.92, 0.9, 0.87), (0.35, 0.4, 0.45), (0.6, 0.65, 0.6))
_GREENS: tuple[Color, ...] = ((0.36, 0.56, 0.28), (0.28, 0.48, 0.28), (0.45, 0.62, 0.33), (0.3, 0.5, 0.38))


def _drum(radius: float, height: float, low: float, style: Style, tint: Color, flare: float = 0.75) -> Mesh:
    """A pleated lampshade, open below and above."""
    m, n = style.n(40, 6), style.n(8, 1) + 1
    angle, t = np.linspace(0, 2 * np.pi, m + 1), np.linspace(0, 1, n)[:, None]
    pleat = 1 - 0.035 * (1 + np.cos(angle * max(4, m // 2))) * (style.fine > 0.5)
    around = radius * (1 - (1 - flare) * t) * pleat
    points = np.stack(np.broadcast_arrays(around * np.cos(angle), around * np.sin(angle), low + height * t), -1)
    return sheet(points, SurfaceType.FABRIC, tint)


def floor_lamp(size: Size, style: Style) -> Mesh:
    """A standing lamp: a base, a slim pole and a shade."""
    w, _, h = size
    metal = BRASS if style.pick(2) else BLACK
    base = [(0, 0), (0.13, 0), (0.13, 0.012), (0.04, 0.03), (0.012, 0.05)]
    parts = [
        lathe(base, style.n(24, 6), SurfaceType.PLAIN, metal),
        rod(0.012, h - 0.3, style.n(10, 4), SurfaceType.PLAIN, metal, (0, 0, 0.02)),
    ]
    bulb = cushion((0.07, 0.07, 0.1), (0, 0, h - 0.2), style.fine, SurfaceType.PLAIN, _GLOW, 1.0)
    return join([*parts, bulb, _drum(w / 2, 0.3, h - 0.3, style, _GLOW)])


def table_lamp(size: Size, style: Style) -> Mesh:
    """A lamp with a turned foot."""
    w, _, h = size
    tint = (style.fabric(), BRASS, WHITE)[style.pick(3)]
    t = np.linspace(0, 1, style.n(22, 4))
    radius = 0.25 * w * (0.35 + 0.65 * np.sin(np.pi * np.clip(t * 1.1, 0, 1)) ** 0.8) + 0.12 * w * np.exp(-20 * t)
    foot = lathe([(0, 0), *np.stack([radius, t * 0.6 * h], -1)], style.n(20, 5), SurfaceType.PLAIN, tint)
    return join([foot, _drum(w / 2, 0.45 * h, 0.55 * h, style, _GLOW)])


def pendant(size: Size, style: Style) -> Mesh:
    """A lamp that hangs from the ceiling at z = `size[2]`."""
    w, _, h = size
    shape, tint = style.pick(3), (BLACK, BRASS, WHITE, style.fabric())[style.pick(4)]
    low = h - min(h, 0.55)
    parts = [rod(0.004, h - low - 0.15, style.n(6, 3), SurfaceType.PLAIN, BLACK, (0, 0, low + 0.15))]
    parts.append(lathe([(0.05, h - 0.03), (0.045, h - 0.005), (0, h - 0.002)], style.n(20, 6), SurfaceType.PLAIN, tint))
    if shape == 0:
        parts.append(_drum(w / 2, 0.22, low, style, _GLOW, 0.95))
    elif shape == 1:
        t = np.linspace(0, np.pi / 2, style.n(12, 3))
        dome = np.stack([w / 2 * np.cos(t) + 0.01, low + 0.2 * np.sin(t)], -1)
        parts.append(lathe(dome, style.n(32, 6), SurfaceType.PLAIN, tint))
        parts.append(cushion((0.09, 0.09, 0.11), (0, 0, low + 0.08), style.fine, SurfaceType.PLAIN, _GLOW, 1.0))
    else:
        parts.append(
            cushion((0.8 * w, 0.8 * w, 0.8 * w), (0, 0, low + 0.4 * w), 1.7 * style.fine, SurfaceType.PLAIN, _GLOW, 1.0)
        )
    return join(parts)


def flush_lamp(size: Size, style: Style) -> Mesh:
    """A flat lamp under the ceiling."""
    w, _, h = size
    t = np.linspace(0, np.pi / 2, style.n(8, 3))
    bowl = np.stack([w / 2 * np.sin(t), h - 0.02 - (h - 0.02) * np.cos(t)], -1)
    ring = lathe([(w / 2, h - 0.025), (w / 2, h - 0.002)], style.n(32, 6), SurfaceType.PLAIN, BRASS)
    return join([lathe(bowl, style.n(32, 6), SurfaceType.PLAIN, _GLOW), ring])


def _leaves(
    bases: np.ndarray, yaw: np.ndarray, length: np.ndarray, rise: np.ndarray, width, style: Style, tint
) -> Mesh:
    """N curved leaves that grow outwards from `bases` and bend down; `rise` [N] is the initial slope in radians."""
    count, n = len(bases), style.n(7, 2)
    t = np.linspace(0, 1, n)
    # The slope decreases linearly along the leaf: integrate its direction.
    slope = rise[:, None] - 1.5 * t * (0.4 + 0.6 * np.cos(rise)[:, None])
    step = length[:, None] / (n - 1)
    out = np.concatenate([np.zeros((count, 1)), np.cumsum(np.cos(slope[:, :-1]) * step, 1)], 1)
    up = np.concatenate([np.zeros((count, 1)), np.cumsum(np.sin(slope[:, :-1]) * step, 1)], 1)
    across = np.array([-0.5, 0.0, 0.5])
    half = np.asarray(width).reshape(-1, 1, 1) * across
    sag = np.array([0.12, 0.0, 0.12]) * np.asarray(width).reshape(-1, 1, 1)
    cos, sin = np.cos(yaw)[:, None, None], np.sin(yaw)[:, None, None]
    x = out[..., None] * cos - half * sin
    y = out[..., None] * sin + half * cos
    points = np.stack([x, y, np.broadcast_to(up[..., None] + sag, x.shape)], -1) + bases[:, None, None]
    v, u = np.meshgrid(t, across + 0.5, indexing="ij")
    one = sheet(points[0], SurfaceType.LEAF, (1, 1, 1), np.stack([u, v], -1))
    many = copies(one, np.zeros((count, 3)), tints=tint)
    return Mesh(points.reshape(-1, 3).astype(np.float32), many.triangles, many.uv, many.surface, many.tint)


def plant(size: Size, style: Style) -> Mesh:
    """A plant in a pot: a rosette of long leaves, a palm, or a little tree."""
    w, _, h = size
    shape, pot, green = style.pick(3), _POTS[style.pick(4)], _GREENS[style.pick(4)]
    tall = min(0.32, 0.35 * h)
    wide = min(0.17, 0.42 * w)
    outside = [(0, 0), (0.72 * wide, 0), (0.9 * wide, 0.7 * tall), (wide, 0.8 * tall), (wide, tall)]
    inside = [(0.88 * wide, tall), (0.86 * wide, 0.9 * tall)]
    if style.fine < 0.1:
        outside, inside = [outside[1], outside[-1]], []
    parts = [lathe([*outside, *inside], style.n(26, 6), SurfaceType.PLAIN, pot)]
    parts.append(lathe([(0.86 * wide, 0.9 * tall), (0, 0.93 * tall)], style.n(16, 6), SurfaceType.PLAIN, _SOIL))
    rng = style.rng
    reach = w / 2 - 0.02
    if shape == 0:
        count = style.n(46, 5)
        yaw = np.arange(count) * 2.39996
        rise = rng.uniform(0.75, 1.4, count)
        length = (h - tall) * rng.uniform(0.6, 0.95, count) * np.sin(rise)
        # Limit the length so that the leaf stays within the footprint.
        length = np.minimum(length, reach / np.maximum(0.35, np.cos(rise - 0.5)))
        bases = np.stack([0.25 * wide * np.cos(yaw), 0.25 * wide * np.sin(yaw), np.full(count, 0.9 * tall)], -1)
        width = 0.05 + 0.09 * length
    else:
        stems = 5 if shape == 1 else 1
        tops = []
        for k in range(stems):
            angle, high = 2 * np.pi * k / stems + 0.3, h * (0.72 - 0.07 * (k % 3))
            spread = 0.25 * reach if stems > 1 else 0.02
            t = np.linspace(0, 1, style.n(8, 2))[:, None]
            path = np.array([(0, 0, 0.85 * tall)]) + t * np.array([(0, 0, high - 0.85 * tall)])
            path[:, :2] += t**2 * spread * np.array([np.cos(angle), np.sin(angle)])
            parts.append(tube(path, 0.012 if stems > 1 else 0.022, style.n(8, 4), SurfaceType.WOOD, (0.5, 0.38, 0.26)))
            tops.append(path[-1])
        per = style.n(26 if stems > 1 else 130, 2 if stems > 1 else 9)
        count = per * stems
        yaw = rng.uniform(0, 2 * np.pi, count)
        rise = rng.uniform(0.1, 1.2, count)
        length = np.minimum(rng.uniform(0.16, 0.3, count), 0.24 * h)
        bases = np.repeat(np.array(tops), per, 0)
        bases[:, 2] -= rng.uniform(0, 0.3, count) * (h - tall)
        if stems == 1:
            far = rng.uniform(0, 0.35, count) * reach
            bases[:, 0] += far * np.cos(yaw)
            bases[:, 1] += far * np.sin(yaw)
        length = np.minimum(length, reach - np.hypot(bases[:, 0], bases[:, 1]) - 0.03)
        width = 0.5 * length
    tint = np.asarray(green) * rng.uniform(0.8, 1.15, (count, 1))
    leaves = _leaves(bases, yaw, length, rise, width, style, np.clip(tint, 0, 1))
    limit = np.array([w / 2, w / 2, h], np.float32)
    vertices = np.clip(leaves.vertices, [-w / 2, -w / 2, 0.3 * tall], limit)
    parts.append(Mesh(vertices.astype(np.float32), leaves.triangles, leaves.uv, leaves.surface, leaves.tint))
    return join(parts)


def rug(size: Size, style: Style) -> Mesh:
    """A flat rug with a pattern, and fringes at both ends."""
    w, d, h = size
    tint = style.fabric()
    inner = w / 2 - 0.06
    top = panel(
        [(-inner, -d / 2, h), (inner, -d / 2, h), (inner, d / 2, h), (-inner, d / 2, h)],
        SurfaceType.RUG,
        shade(tint, 1.2),
    )
    parts = [top]
    for y in (-d / 2, d / 2):
        parts.append(panel([(-inner, y, 0), (inner, y, 0), (inner, y, h), (-inner, y, h)], SurfaceType.PLAIN, tint))
    for x in (-inner, inner):
        parts.append(panel([(x, -d / 2, 0), (x, d / 2, 0), (x, d / 2, h), (x, -d / 2, h)], SurfaceType.PLAIN, tint))
    count = style.n(d / 0.025, 0)
    if style.fine > 0.4:
        knot = box((0.055, 0.008, 0.5 * h), (0, 0, 0.3 * h), SurfaceType.PLAIN, (0.9, 0.87, 0.8))
        y = np.linspace(-d / 2 + 0.01, d / 2 - 0.01, count)
        place = [np.stack([np.full(count, s * (inner + 0.03)), y, 0 * y], -1) for s in (-1, 1)]
        parts.append(copies(knot, np.concatenate(place), yaws=style.rng.uniform(-0.08, 0.08, 2 * count)))
    return join(parts)


def curtain(size: Size, style: Style) -> Mesh:
    """A curtain with folds, on a rod."""
    w, d, h = size
    tint, folds = style.fabric(), max(3, round(w / 0.07))
    m, n = max(folds * 2 + 1, style.n(folds * 9)), style.n(14, 2)
    u, t = np.linspace(0, 1, m)[None], np.linspace(0, 1, n)[:, None]
    depth = (0.35 + 0.13 * np.sin(5 * t)) * (d - 0.02) * np.cos(2 * np.pi * folds * u + 0.8 * np.sin(3 * t + 9 * u))
    x = (u - 0.5) * w * (0.97 - 0.05 * np.sin(np.pi * t))
    points = np.stack(np.broadcast_arrays(x, depth, (h - 0.04) * t), -1)
    metal = rod(0.012, w, style.n(10, 4), SurfaceType.PLAIN, BRASS).turned(1, np.pi / 2).moved((-w / 2, 0, h - 0.015))
    return join([sheet(points, SurfaceType.FABRIC, shade(tint, 1.15)), metal])


def picture(size: Size, style: Style) -> Mesh:
    """A framed painting with a white mount."""
    w, d, h = size
    surface = (SurfaceType.PICTURE_A, SurfaceType.PICTURE_B, SurfaceType.PICTURE_C)[style.pick(3)]
    frame = (style.wood(), BLACK, BRASS)[style.pick(3)]
    parts = _rim(w, d, h, 0.03, frame, style.fine)
    back = -d / 2 + 0.4 * d
    corners = [(w / 2, back, 0), (-w / 2, back, 0), (-w / 2, back, h), (w / 2, back, h)]
    parts.append(panel(np.array(corners) * [0.98, 1, 1], SurfaceType.PLAIN, WHITE))
    inner = np.array([(0.78, 0.11), (0.78, 0.11), (0.78, 0.89), (0.78, 0.89)])
    art = [(x * a, back + 0.002, h * b) for (x, _, _), (a, b) in zip(corners, inner, strict=True)]
    return join([*parts, panel(art, surface, (1, 1, 1))])


def _rim(w: float, d: float, h: float, thick: float, tint: Color, fine: float) -> list[Mesh]:
    if fine < 0.1:
        return [box((w, 0.3 * d, h), (0, -0.35 * d, h / 2), SurfaceType.WOOD, tint)]
    parts = [box((w, d, thick), (0, 0, z), SurfaceType.WOOD, tint, 0.008, fine) for z in (thick / 2, h - thick / 2)]
    side = (thick, d * 0.96, h - 0.002)
    return parts + [
        box(side, (s * (w / 2 - thick / 2), 0, h / 2), SurfaceType.WOOD, tint, 0.008, fine) for s in (-1, 1)
    ]


def mirror(size: Size, style: Style) -> Mesh:
    """A framed mirror, pale silver: the renderer has no reflections."""
    w, d, h = size
    frame = (style.wood(), STEEL, BRASS)[style.pick(3)]
    parts = _rim(w, d, h, 0.035, frame, style.fine)
    corners = [(w / 2, 0, 0.01), (-w / 2, 0, 0.01), (-w / 2, 0, h - 0.01), (w / 2, 0, h - 0.01)]
    return join([*parts, panel(corners, SurfaceType.PLAIN, (0.82, 0.87, 0.9))])


def clock(size: Size, style: Style) -> Mesh:
    """A round wall clock."""
    w, d, h = size
    t = np.linspace(0, np.pi, style.n(10, 3))
    ring = np.stack([w / 2 - 0.02 - 0.02 * np.cos(t) * -1, d * np.sin(t) * 0.9], -1)
    face = lathe([(0, 0.3 * d), (w / 2 - 0.02, 0.3 * d)], style.n(36, 8), SurfaceType.PLAIN, WHITE)
    parts = [lathe(ring, style.n(36, 8), SurfaceType.PLAIN, BLACK), face]
    angle = np.arange(12) * np.pi / 6
    mark = box((0.03, 0.006, 0.004), (0.4 * w, 0, 0.35 * d), SurfaceType.PLAIN, BLACK)
    parts += [mark.moved((0, 0, 0), float(a)) for a in angle[:: 1 if style.fine > 0.3 else 3]]
    for a, reach in ((1.2, 0.22), (2.9, 0.33)):
        parts.append(
            box((reach * w, 0.008, 0.004), (reach * w / 2, 0, 0.45 * d), SurfaceType.PLAIN, BLACK).moved((0, 0, 0), a)
        )
    return join(parts).turned(0, -np.pi / 2).moved((0, -d / 2, h / 2))


def television(size: Size, style: Style) -> Mesh:
    """A flat screen on a foot."""
    w, d, h = size
    style.pick(2)
    parts = [box((w, 0.035, h - 0.07), (0, 0, 0.07 + (h - 0.07) / 2), SurfaceType.PLAIN, BLACK, 0.012, style.fine)]
    corners = [
        (w / 2 - 0.015, 0.0185, 0.09),
        (-w / 2 + 0.015, 0.0185, 0.09),
        (-w / 2 + 0.015, 0.0185, h - 0.02),
        (w / 2 - 0.015, 0.0185, h - 0.02),
    ]
    parts.append(panel(corners, SurfaceType.PLAIN, (0.16, 0.19, 0.25)))
    parts.append(box((0.3 * w, d, 0.015), (0, 0, 0.0075), SurfaceType.PLAIN, BLACK, 0.006, style.fine))
    parts.append(rod(0.02, 0.08, style.n(10, 4), SurfaceType.PLAIN, BLACK, (0, 0, 0.01)))
    return join(parts)


def _plate(radius: float, style: Style, tint: Color) -> Mesh:
    t = np.linspace(0, 1, style.n(7, 2))
    outline = np.stack([radius * (0.6 + 0.4 * t), 0.004 + 0.016 * t**2], -1)
    return lathe(
        [(0, 0), (0.6 * radius, 0), *outline, (0.58 * radius, 0.008), (0, 0.007)],
        style.n(28, 6),
        SurfaceType.PLAIN,
        tint,
    )


def _cup(style: Style, tint: Color) -> Mesh:
    t = np.linspace(0, 1, style.n(7, 2))
    outside = np.stack([0.028 + 0.012 * t**0.6, 0.09 * t], -1)
    bowl = lathe([(0, 0), *outside, (0.036, 0.088), (0.028, 0.01), (0, 0.008)], style.n(20, 5), SurfaceType.PLAIN, tint)
    a = np.linspace(-np.pi / 2, np.pi / 2, style.n(9, 3))
    handle = np.stack([0.037 + 0.022 * np.cos(a), 0 * a, 0.045 + 0.025 * np.sin(a)], -1)
    return join([bowl, tube(handle, 0.004, style.n(6, 3), SurfaceType.PLAIN, tint)])


def tableware(size: Size, style: Style) -> Mesh:
    """Plates and cups for a table of this size, and a bowl of fruit in the middle."""
    w, d, _ = size
    tint = (WHITE, (0.75, 0.83, 0.88), (0.9, 0.82, 0.7))[style.pick(3)]
    parts = [fruit((0.3, 0.3, 0.14), style)]
    across = 0 if w < 1.0 else 1 + (w > 1.7)
    places = [(x, s * (d / 2 - 0.17)) for s in (-1, 1) for x in (np.arange(across) - (across - 1) / 2) * 0.6] or [
        (0, d / 2 - 0.17)
    ]
    parts.append(copies(_plate(0.12, style, tint), [(x, y, 0) for x, y in places]))
    if style.fine > 0.2:
        parts.append(
            copies(_cup(style, tint), [(x + 0.16, y * 0.8, 0) for x, y in places], yaws=np.arange(len(places)) * 1.7)
        )
    return join(parts)


def fruit(size: Size, style: Style) -> Mesh:
    """A bowl of fruit."""
    w, _, h = size
    t = np.linspace(0, 1, style.n(9, 3))
    outside = np.stack([w / 2 * (0.35 + 0.65 * t**0.6), 0.6 * h * t], -1)
    parts = [
        lathe(
            [(0, 0), *outside, (0.44 * w, 0.55 * h), (0.2 * w, 0.12 * h), (0, 0.1 * h)],
            style.n(28, 6),
            SurfaceType.PLAIN,
            style.fabric(),
        )
    ]
    ball = cushion((0.27 * w, 0.27 * w, 0.27 * w), (0, 0, 0), style.fine, SurfaceType.PLAIN, (1, 1, 1), 1.0)
    angle = np.arange(5) * 2 * np.pi / 5
    place = np.stack([0.2 * w * np.cos(angle), 0.2 * w * np.sin(angle), np.full(5, 0.5 * h)], -1)
    place = place[: style.n(9, 2)]
    tints = np.array([(0.85, 0.25, 0.2), (0.95, 0.6, 0.2), (0.6, 0.75, 0.25), (0.9, 0.8, 0.3), (0.8, 0.3, 0.25)])[
        : len(place)
    ]
    return join([*parts, copies(ball, place, tints=tints)])


def vase(size: Size, style: Style) -> Mesh:
    """A vase with flowers."""
    w, _, h = size
    tint, bloom = (
        style.fabric(),
        ((0.9, 0.35, 0.35), (0.95, 0.8, 0.35), (0.85, 0.6, 0.85), (0.97, 0.95, 0.92))[style.pick(4)],
    )
    t = np.linspace(0, 1, style.n(18, 4))
    radius = 0.28 * w * (0.6 + 0.4 * np.sin(4.4 * t + 0.4))
    parts = [lathe([(0, 0), *np.stack([radius, 0.5 * h * t], -1)], style.n(22, 6), SurfaceType.PLAIN, tint)]
    blooms = style.n(9, 2)
    for a, r in zip(np.arange(blooms) * 2.4, np.linspace(0.05, 0.34, blooms), strict=True):
        top = (r * w * np.cos(a), r * w * np.sin(a), h - 0.04 - 0.25 * r * h)
        parts.append(
            tube(
                [(0, 0, 0.3 * h), (0.4 * top[0], 0.4 * top[1], 0.65 * h), top],
                0.003,
                style.n(5, 3),
                SurfaceType.PLAIN,
                _GREENS[1],
            )
        )
        parts.append(cushion((0.055, 0.055, 0.045), top, 0.8 * style.fine, SurfaceType.PLAIN, bloom, 1.0))
    return join(parts)


def books(size: Size, style: Style) -> Mesh:
    """A small pile of books lying flat."""
    w, d, h = size
    count = max(2, round(h / 0.03))
    tints = np.array([style.fabric() for _ in range(count)])
    book = box((1, 1, 1), (0, 0, 0.5), SurfaceType.PLAIN, (1, 1, 1), 0.08, style.fine)
    scale = np.stack(
        [np.linspace(0.8, 0.6, count) * w, np.linspace(0.8, 0.65, count) * d, np.full(count, h / count - 0.001)], -1
    )
    yaw = style.rng.uniform(-0.2, 0.2, count)
    return copies(book, [(0, 0, k * h / count) for k in range(count)], scale, yaw, tints)


def laptop(size: Size, style: Style) -> Mesh:
    """An open laptop; the screen faces +y."""
    w, d, h = size
    style.pick(2)
    parts = [box((w, 0.22, 0.016), (0, d / 2 - 0.11, 0.008), SurfaceType.PLAIN, STEEL, 0.005, style.fine)]
    key = box((0.016, 0.014, 0.003), (0, 0, 0), SurfaceType.PLAIN, BLACK)
    if style.fine > 0.4:
        x, y = np.meshgrid(np.linspace(-0.42, 0.42, 14) * w, d / 2 - 0.2 + np.arange(5) * 0.019)
        parts.append(copies(key, np.stack([x.ravel(), y.ravel(), np.full(x.size, 0.0175)], -1)))
    lid = box((w, 0.008, h - 0.02), (0, 0, (h - 0.02) / 2), SurfaceType.PLAIN, STEEL, 0.003, style.fine)
    shown = [
        (w / 2 - 0.01, 0.005, 0.015),
        (-w / 2 + 0.01, 0.005, 0.015),
        (-w / 2 + 0.01, 0.005, h - 0.03),
        (w / 2 - 0.01, 0.005, h - 0.03),
    ]
    lid = join([lid, panel(shown, SurfaceType.PLAIN, (0.35, 0.5, 0.68))]).turned(0, 0.2)
    return join([*parts, lid.moved((0, d / 2 - 0.22, 0.012))])
