"""Kitchen and bathroom: counters, sink, stove, fridge, toilet, basin, tub, shower, washing machine, radiators."""

import numpy as np

from shoal.scene.house.furniture import Size, _carcass
from shoal.scene.house.shapes import Color, Mesh, box, copies, cushion, join, lathe, panel, rod, sheet, tube
from shoal.scene.house.style import BLACK, STEEL, WHITE, Style, shade
from shoal.scene.house.textures import SurfaceType

_ENAMEL: Color = (0.95, 0.95, 0.94)
TOP = 0.04
"""Thickness of a worktop, meters."""


def _base(size: Size, style: Style) -> tuple[list[Mesh], float]:
    """A base cabinet, and the height of its body without the worktop."""
    w, d, h = size
    wood = style.palette.woods[0]
    rows, columns = (1, 2) if w > 0.7 else ((3, 1) if style.pick(3) == 0 else (1, 1))
    return [
        _carcass((w, d - 0.02, h - TOP), style, wood, rows, columns, legs=False, knob=1).moved((0, -0.01, 0))
    ], h - TOP


def _worktop(w: float, d: float, h: float, style: Style) -> Mesh:
    return box(
        (w, d, TOP), (0, 0, h - TOP / 2), SurfaceType.MARBLE, shade(style.palette.woods[1], 1.15), 0.008, style.fine
    )


def _tap(style: Style, reach: float, rise: float) -> Mesh:
    """A bent tap at the origin that pours towards +y."""
    a = np.linspace(np.pi, 0.0, style.n(12, 3))
    arc = np.stack([0 * a, reach / 2 + reach / 2 * np.cos(a), rise * 0.6 + rise * 0.4 * np.sin(a)], -1)
    path = np.concatenate([[(0, 0, 0)], arc, [(0, reach, rise * 0.5)]])
    spout = tube(path, 0.011, style.n(10, 4), SurfaceType.PLAIN, STEEL)
    base = lathe([(0.022, 0), (0.022, 0.02), (0.012, 0.03)], style.n(14, 5), SurfaceType.PLAIN, STEEL)
    lever = box((0.012, 0.012, 0.05), (0.03, 0, 0.04), SurfaceType.PLAIN, STEEL, 0.005, style.fine)
    return join([spout, base, lever])


def counter(size: Size, style: Style) -> Mesh:
    """A kitchen counter: base cabinet and worktop."""
    w, d, h = size
    parts, _ = _base(size, style)
    return join([*parts, _worktop(w, d, h, style)])


def kitchen_sink(size: Size, style: Style) -> Mesh:
    """A counter with a built-in steel sink and a tap."""
    w, d, h = size
    parts, body = _base(size, style)
    tint = shade(style.palette.woods[1], 1.15)
    hole_w, hole_d, deep = 0.44, 0.36, 0.16
    side, edge = (w - hole_w) / 2, (d - hole_d) / 2
    for s in (-1, 1):
        parts.append(box((side, d, TOP), (s * (w / 2 - side / 2), 0, h - TOP / 2), SurfaceType.MARBLE, tint))
        parts.append(box((hole_w, edge, TOP), (0, s * (d / 2 - edge / 2), h - TOP / 2), SurfaceType.MARBLE, tint))
    floor = max(body - deep + TOP, body + 0.002)
    parts.append(box((hole_w, hole_d, 0.004), (0, 0, floor), SurfaceType.PLAIN, shade(STEEL, 0.8)))
    rim = [((hole_w + 0.02, 0.012), (0, hole_d / 2)), ((hole_w + 0.02, 0.012), (0, -hole_d / 2))]
    rim += [((0.012, hole_d), (hole_w / 2, 0)), ((0.012, hole_d), (-hole_w / 2, 0))]
    for (a, b), (x, y) in rim:
        parts.append(
            box((a, b, 0.008 + h - floor), (x, y, (h + floor) / 2 + 0.004), SurfaceType.PLAIN, STEEL, 0.004, style.fine)
        )
    parts.append(_tap(style, 0.18, 0.28).moved((0, -d / 2 + 0.07, h)))
    return join(parts)


def stove(size: Size, style: Style) -> Mesh:
    """A cooker: oven door, knobs, four rings and a pot."""
    w, d, h = size
    steel, pot = (STEEL, WHITE, (0.25, 0.26, 0.28))[style.pick(3)], style.fabric()
    parts = [box((w, d - 0.05, h - 0.012), (0, -0.025, (h - 0.012) / 2), SurfaceType.PLAIN, steel, 0.008, style.fine)]
    parts.append(box((w, d - 0.02, 0.012), (0, -0.01, h - 0.006), SurfaceType.PLAIN, BLACK, 0.004, style.fine))
    parts.append(
        box((w - 0.06, 0.02, 0.45), (0, d / 2 - 0.045, 0.4), SurfaceType.PLAIN, (0.15, 0.15, 0.17), 0.008, style.fine)
    )
    bar = [
        (-w / 2 + 0.06, d / 2 - 0.04, 0.66),
        (-w / 2 + 0.06, d / 2 - 0.012, 0.66),
        (w / 2 - 0.06, d / 2 - 0.012, 0.66),
        (w / 2 - 0.06, d / 2 - 0.04, 0.66),
    ]
    parts.append(tube(bar, 0.009, style.n(10, 4), SurfaceType.PLAIN, STEEL))
    knob = lathe([(0.02, 0), (0.018, 0.025), (0, 0.027)], style.n(16, 5), SurfaceType.PLAIN, BLACK).turned(
        0, -np.pi / 2
    )
    parts.append(copies(knob, [(x, d / 2 - 0.05, h - 0.1) for x in np.linspace(-0.2, 0.2, 5)]))
    ring = lathe([(0.055, 0), (0.085, 0.006), (0.09, 0.002)], style.n(28, 6), SurfaceType.PLAIN, (0.3, 0.3, 0.31))
    spots = [(x, y, h) for x in (-0.14, 0.14) for y in (-0.15, 0.12)]
    parts.append(copies(ring, spots))
    t = np.linspace(0, 1, style.n(6, 2))
    body = [(0, 0), *np.stack([0.09 + 0.01 * t, 0.13 * t], -1), (0.085, 0.14), (0.02, 0.16), (0.02, 0.18), (0, 0.185)]
    parts.append(lathe(body, style.n(28, 6), SurfaceType.PLAIN, pot, (spots[0][0], spots[0][1], h + 0.007)))
    return join(parts)


def hood(size: Size, style: Style) -> Mesh:
    """An extractor hood with its chimney; it hangs, z = 0 is its lower edge."""
    w, d, h = size
    style.pick(2)
    x, y = w / 2, d / 2
    low = np.array([(-x, -y), (x, -y), (x, y), (-x, y), (-x, -y)])
    up = np.array([(-0.12, -y), (0.12, -y), (0.12, -y + 0.25), (-0.12, -y + 0.25), (-0.12, -y)])
    rows = [np.column_stack([low, np.full(5, z)]) for z in (0.0, 0.06)] + [
        np.column_stack([up, np.full(5, z)]) for z in (0.25, h)
    ]
    under = panel(
        [(-x, -y, 0.004), (x, -y, 0.004), (x, y, 0.004), (-x, y, 0.004)], SurfaceType.PLAIN, shade(STEEL, 0.6)
    )
    return join([sheet(np.array(rows), SurfaceType.PLAIN, STEEL), under])


def wall_cupboard(size: Size, style: Style) -> Mesh:
    """A cupboard that hangs on the wall; z = 0 is its lower edge."""
    w, d, h = size
    wood = style.palette.woods[0]
    parts = [box((w, d - 0.02, h), (0, -0.01, h / 2), SurfaceType.WOOD, wood, 0.006, style.fine)]
    doors = max(1, round(w / 0.45))
    wide = w / doors
    face = box(
        (wide - 0.008, 0.016, h - 0.01),
        (0, d / 2 - 0.014, h / 2),
        SurfaceType.WOOD,
        shade(wood, 1.06),
        0.006,
        style.fine,
    )
    xs = (np.arange(doors) - (doors - 1) / 2) * wide
    parts.append(copies(face, [(x, 0, 0) for x in xs]))
    pull = rod(0.005, 0.12, style.n(8, 4), SurfaceType.PLAIN, STEEL)
    parts.append(
        copies(
            pull, [(x + (1 if k % 2 == 0 else -1) * (wide / 2 - 0.04), d / 2 - 0.0055, 0.05) for k, x in enumerate(xs)]
        )
    )
    return join(parts)


def fridge(size: Size, style: Style) -> Mesh:
    """A fridge with a freezer door below."""
    w, d, h = size
    tint = (STEEL, WHITE, (0.7, 0.25, 0.22), (0.6, 0.75, 0.72))[style.pick(4)]
    parts = [
        box(
            (w, d - 0.09, h - 0.03),
            (0, -0.045, 0.03 + (h - 0.03) / 2),
            SurfaceType.PLAIN,
            shade(tint, 0.92),
            0.01,
            style.fine,
        )
    ]
    parts.append(box((w - 0.04, d - 0.12, 0.03), (0, -0.045, 0.015), SurfaceType.PLAIN, BLACK))
    split = 0.36 * h
    for low, high in ((0.04, split - 0.005), (split + 0.005, h)):
        parts.append(
            box(
                (w, 0.06, high - low),
                (0, d / 2 - 0.06, (low + high) / 2),
                SurfaceType.PLAIN,
                tint,
                0.02,
                1.3 * style.fine,
            )
        )
        mid = split - 0.22 if high < h else split + 0.28
        grip = [
            (w / 2 - 0.06, d / 2 - 0.035, mid - 0.15),
            (w / 2 - 0.06, d / 2 - 0.01, mid - 0.13),
            (w / 2 - 0.06, d / 2 - 0.01, mid + 0.13),
            (w / 2 - 0.06, d / 2 - 0.035, mid + 0.15),
        ]
        parts.append(tube(grip, 0.009, style.n(8, 4), SurfaceType.PLAIN, STEEL))
    return join(parts)


def toilet(size: Size, style: Style) -> Mesh:
    """A toilet with cistern, bowl, seat and lid."""
    w, d, h = size
    wood = style.wood() if style.pick(3) == 0 else _ENAMEL
    parts = [
        box(
            (w, 0.18, h - 0.42),
            (0, -d / 2 + 0.09, 0.42 + (h - 0.42) / 2),
            SurfaceType.PLAIN,
            _ENAMEL,
            0.03,
            1.4 * style.fine,
        )
    ]
    n, m = style.n(12, 4), style.n(28, 8)
    t, angle = np.linspace(0, 1, n)[:, None], np.linspace(0, 2 * np.pi, m + 1)[None]
    wide = (w / 2) * (0.55 + 0.42 * t**2)
    length = (d - 0.2) / 2 * (0.62 + 0.36 * t**2)
    center = -d / 2 + 0.19 + (d - 0.2) / 2 * (0.85 + 0.15 * t)
    points = np.stack(np.broadcast_arrays(wide * np.cos(angle), center + length * np.sin(angle), 0.4 * t), -1)
    parts.append(sheet(points, SurfaceType.PLAIN, _ENAMEL))
    seat = [(0.0, 0.4), (0.96, 0.4), (1.0, 0.41), (1.0, 0.425), (0.95, 0.435), (0.0, 0.437)]
    lid = lathe(seat, m, SurfaceType.PLAIN, wood)
    scale = np.array([w / 2, (d - 0.2) / 2, 1.0], np.float32)
    shift = np.array([0, -d / 2 + 0.19 + (d - 0.2) / 2, 0], np.float32)
    parts.append(Mesh(lid.vertices * scale + shift, lid.triangles, lid.uv, lid.surface, lid.tint))
    parts.append(
        lathe(
            [(0.02, 0), (0.02, 0.01), (0, 0.012)],
            style.n(14, 5),
            SurfaceType.PLAIN,
            STEEL,
            (0, -d / 2 + 0.09, h - 0.012),
        )
    )
    return join(parts)


def basin(size: Size, style: Style) -> Mesh:
    """A washbasin in a vanity unit."""
    w, d, h = size
    wood = style.wood()
    body = _carcass((w - 0.04, d - 0.04, h - 0.14), style, wood, 1, 2, legs=True)
    n, m = style.n(12, 4), 8 * style.n(4)  # Multiples of 8 meet the corners of the square rim.
    t, angle = np.linspace(0, 1, n)[:, None], np.linspace(0, 2 * np.pi, m + 1)[None]
    bowl = np.stack(
        np.broadcast_arrays(
            (w / 2 - 0.08) * t**0.5 * np.cos(angle),
            0.02 + (d / 2 - 0.09) * t**0.5 * np.sin(angle),
            h - 0.11 * (1 - t**2),
        ),
        -1,
    )
    parts = [body, sheet(bowl[1:] if n > 4 else bowl, SurfaceType.PLAIN, shade(_ENAMEL, 0.97))]
    # The rim joins the round bowl to the square edge: equal angles, distances scaled to a square.
    ray = np.stack([np.cos(angle[0]), np.sin(angle[0])], -1)
    square = ray / np.abs(ray).max(1, keepdims=True) * [w / 2, d / 2]
    edge = np.column_stack([square, np.full(m + 1, h)])
    parts.append(sheet(np.stack([bowl[-1], edge, edge - [0, 0, 0.14]]), SurfaceType.PLAIN, _ENAMEL))
    parts.append(_tap(style, 0.13, 0.16).moved((0, -d / 2 + 0.06, h)))
    return join(parts)


def bathtub(size: Size, style: Style) -> Mesh:
    """A tub with a rounded inside, an apron and a tap."""
    w, d, h = size
    style.pick(2)
    low = 0.22  # Higher than a step, so the bottom is not walkable floor.
    n, m = style.n(14, 4), 8 * style.n(6)
    t, angle = np.linspace(0, 1, n)[:, None], np.linspace(0, 2 * np.pi, m + 1)[None]
    ray = np.sign(np.cos(angle)) * np.abs(np.cos(angle)) ** 0.5, np.sign(np.sin(angle)) * np.abs(np.sin(angle)) ** 0.5
    scale = 0.8 + 0.2 * t**0.7
    inside = np.stack(
        np.broadcast_arrays((w / 2 - 0.07) * scale * ray[0], (d / 2 - 0.07) * scale * ray[1], low + (h - low) * t**1.6),
        -1,
    )
    square = np.stack([np.cos(angle[0]), np.sin(angle[0])], -1)
    square = square / np.abs(square).max(1, keepdims=True) * [w / 2, d / 2]
    edge = np.column_stack([square, np.full(m + 1, h)])
    middle = np.broadcast_to(np.array([0, 0, low]), inside[0].shape)
    parts = [sheet(np.concatenate([middle[None], inside]), SurfaceType.PLAIN, shade(_ENAMEL, 0.97))]
    parts.append(sheet(np.stack([inside[-1], edge, edge * [1, 1, 0]]), SurfaceType.PLAIN, _ENAMEL))
    tap = _tap(style, 0.14, 0.16).moved((0, 0, 0), -np.pi / 2)
    return join([*parts, tap.moved((-w / 2 + 0.04, 0, h))])


def shower(size: Size, style: Style) -> Mesh:
    """A shower tray with a rail, a hose and a half-drawn curtain."""
    w, d, h = size
    cloth = style.fabric()
    parts = [box((w, d, 0.1), (0, 0, 0.05), SurfaceType.PLAIN, _ENAMEL, 0.02, style.fine)]
    parts.append(lathe([(0.04, 0.1005), (0.035, 0.104), (0, 0.104)], style.n(20, 6), SurfaceType.PLAIN, STEEL))
    pole = [
        (0, -d / 2 + 0.03, 0.9),
        (0, -d / 2 + 0.03, h - 0.25),
        (0, -d / 2 + 0.08, h - 0.12),
        (0, -d / 2 + 0.3, h - 0.12),
    ]
    parts.append(tube(pole, 0.01, style.n(10, 4), SurfaceType.PLAIN, STEEL))
    parts.append(
        lathe(
            [(0, h - 0.15), (0.09, h - 0.15), (0.08, h - 0.135), (0.015, h - 0.12)],
            style.n(24, 6),
            SurfaceType.PLAIN,
            STEEL,
            (0, -d / 2 + 0.3, 0),
        )
    )
    parts.append(box((0.14, 0.05, 0.05), (0, -d / 2 + 0.03, 0.95), SurfaceType.PLAIN, STEEL, 0.02, style.fine))
    bar = (
        rod(0.01, w, style.n(10, 4), SurfaceType.PLAIN, STEEL)
        .turned(1, np.pi / 2)
        .moved((-w / 2, d / 2 - 0.04, h - 0.06))
    )
    wide, folds = 0.45 * w, 6
    u, t = np.linspace(0, 1, style.n(54, 13))[None], np.linspace(0, 1, style.n(12, 2))[:, None]
    y = d / 2 - 0.04 + 0.03 * np.cos(2 * np.pi * folds * u + np.sin(4 * t))
    cloth_points = np.stack(np.broadcast_arrays(-w / 2 + 0.01 + wide * u, y, 0.15 + (h - 0.22) * t), -1)
    return join([*parts, bar, sheet(cloth_points, SurfaceType.FABRIC, shade(cloth, 1.3))])


def washing_machine(size: Size, style: Style) -> Mesh:
    """A front loader."""
    w, d, h = size
    style.pick(2)
    parts = [box((w, d - 0.04, h), (0, -0.02, h / 2), SurfaceType.PLAIN, _ENAMEL, 0.012, style.fine)]
    t = np.linspace(0, np.pi, style.n(8, 3))
    ring = np.stack([0.17 - 0.03 * np.cos(t) * -1, 0.022 * np.sin(t)], -1)
    door = [
        lathe(ring, style.n(32, 8), SurfaceType.PLAIN, STEEL),
        lathe([(0.15, 0.006), (0, 0.02)], style.n(32, 8), SurfaceType.PLAIN, (0.25, 0.3, 0.35)),
    ]
    parts += [piece.turned(0, -np.pi / 2).moved((0, d / 2 - 0.04, 0.45)) for piece in door]
    parts.append(
        box(
            (w - 0.04, 0.01, 0.1), (0, d / 2 - 0.037, h - 0.08), SurfaceType.PLAIN, (0.8, 0.82, 0.84), 0.004, style.fine
        )
    )
    knob = lathe([(0.03, 0), (0.026, 0.03), (0, 0.032)], style.n(18, 5), SurfaceType.PLAIN, STEEL).turned(0, -np.pi / 2)
    return join([*parts, knob.moved((0.12, d / 2 - 0.034, h - 0.08))])


def radiator(size: Size, style: Style) -> Mesh:
    """A ribbed radiator on the wall; z = 0 is the floor."""
    w, d, h = size
    style.pick(2)
    low = 0.12
    count = max(3, round(w / 0.07)) if style.fine > 0.2 else 2
    rib = box(
        (0.7 * w / count, d - 0.02, h - low),
        (0, 0.005, low + (h - low) / 2),
        SurfaceType.PLAIN,
        WHITE,
        0.016,
        style.fine,
    )
    parts = [copies(rib, [(x, 0, 0) for x in (np.arange(count) - (count - 1) / 2) * (w / count)])]
    for z in (low + 0.06, h - 0.06):
        parts.append(box((w, 0.03, 0.03), (0, 0.0, z), SurfaceType.PLAIN, WHITE, 0.01, style.fine))
    parts.append(rod(0.012, low + 0.06, style.n(8, 4), SurfaceType.PLAIN, STEEL, (w / 2 - 0.02, -d / 2 + 0.02, 0)))
    return join(parts)


def towel_rail(size: Size, style: Style) -> Mesh:
    """A ladder of warm pipes with a towel over it; z = 0 is its lower end."""
    w, d, h = size
    cloth = style.fabric()
    side = rod(0.012, h, style.n(10, 4), SurfaceType.PLAIN, STEEL)
    parts = [copies(side, [(x, 0, 0) for x in (-w / 2 + 0.012, w / 2 - 0.012)])]
    bar = rod(0.009, w - 0.03, style.n(8, 4), SurfaceType.PLAIN, STEEL).turned(1, np.pi / 2)
    count = max(4, round(h / 0.12))
    parts.append(copies(bar, [(-w / 2 + 0.015, 0, z) for z in np.linspace(0.05, h - 0.03, count)]))
    over = np.linspace(-0.35, 0.35, style.n(24, 5))
    y = np.clip(over * 6, -1, 1) * (d / 2 - 0.008)
    u = np.linspace(-0.35, 0.35, style.n(12, 2)) * w
    ripple = 0.004 * np.sin(40 * u)[None] * np.sign(over)[:, None]
    points = np.stack(np.broadcast_arrays(u[None], y[:, None] + ripple, (h - 0.015 - np.abs(over) * 0.9)[:, None]), -1)
    parts.append(sheet(points, SurfaceType.FABRIC, shade(cloth, 1.2)))
    return join(parts)


def bin_(size: Size, style: Style) -> Mesh:
    """A pedal bin."""
    w, _, h = size
    tint = (STEEL, WHITE, style.fabric())[style.pick(3)]
    t = np.linspace(0, np.pi / 2, style.n(8, 2))
    lid = np.stack([w / 2 * np.cos(t), 0.85 * h + 0.15 * h * np.sin(t)], -1)
    return join(
        [
            lathe([(0, 0), (0.9 * w / 2, 0), (w / 2, 0.84 * h)], style.n(28, 6), SurfaceType.PLAIN, tint),
            lathe(lid, style.n(28, 6), SurfaceType.PLAIN, BLACK),
        ]
    )


def basket(size: Size, style: Style) -> Mesh:
    """A laundry basket with cloth in it."""
    w, _, h = size
    cloth, rows, sides = style.fabric(), style.n(22, 3), style.n(36, 8)
    t = np.linspace(0, 1, rows)
    weave = 1 + 0.03 * np.sin(np.pi * np.arange(rows)) + 0.015 * (-1.0) ** np.arange(rows) * (style.fine > 0.4)
    body = lathe(
        [(0, 0), *np.stack([w / 2 * 0.95 * (0.85 + 0.13 * t) * weave, h * 0.9 * t], -1)],
        sides,
        SurfaceType.WOOD,
        (0.78, 0.62, 0.42),
    )
    heap = cushion((0.8 * w, 0.8 * w, 0.3 * h), (0, 0, 0.85 * h), style.fine, SurfaceType.FABRIC, cloth, 0.8)
    return join([body, heap])
