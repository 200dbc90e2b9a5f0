"""Furniture: seats, tables, beds and cabinets. Each function takes the size (width, depth, height) in meters.

A piece rests on z = 0 with its footprint centered on the origin. It faces +y; its back at -depth / 2 is at the wall.
"""

import numpy as np

from shoal.scene.house.shapes import Color, Mesh, box, copies, cushion, join, lathe, rod, sheet, tube, turned_leg
from shoal.scene.house.style import BLACK, BRASS, STEEL, Style, shade
from shoal.scene.house.textures import SurfaceType

Size = tuple[float, float, float]


def chair(size: Size, style: Style) -> Mesh:
    """A dining chair: turned legs, and a back of rails, spindles or a panel."""
    w, d, h = size
    wood, cloth, shape, back = style.wood(), style.fabric(), style.pick(3), style.pick(3)
    padded = style.rng.random() < 0.5
    seat, leg = 0.45, 0.022
    fine = style.fine
    inset_x, inset_y = w / 2 - 0.03, d / 2 - 0.035
    legs = turned_leg(leg, seat - 0.02, fine, SurfaceType.WOOD, wood, shape)
    places = [(x, y, 0) for x in (-inset_x, inset_x) for y in (-inset_y, inset_y)]
    parts = [
        copies(legs, places),
        box((w, d - 0.02, 0.035), (0, 0.01, seat - 0.0175), SurfaceType.WOOD, wood, 0.012, fine),
    ]
    if padded:
        parts.append(cushion((w - 0.02, d - 0.05, 0.06), (0, 0.02, seat + 0.015), fine, SurfaceType.FABRIC, cloth, 0.3))
    posts = style.n(6, 2)
    lean = np.linspace(0, 1, posts)
    for x in (-inset_x, inset_x):
        path = np.stack([np.full(posts, x), -inset_y + 0.012 - 0.02 * lean, seat + (h - seat) * lean], -1)
        path[-1, 2] = h
        parts.append(tube(path, np.linspace(leg, leg * 0.75, posts), style.n(10, 4), SurfaceType.WOOD, wood))
    y_top = -inset_y - 0.003
    rail = box((w - 0.02, 0.02, 0.08), (0, y_top, h - 0.05), SurfaceType.WOOD, wood, 0.009, fine)
    parts.append(rail)
    if back == 0:
        for z in (0.3, 0.62):
            parts.append(
                box(
                    (w - 0.06, 0.016, 0.05),
                    (0, y_top + 0.008, seat + (h - seat) * z),
                    SurfaceType.WOOD,
                    wood,
                    0.007,
                    fine,
                )
            )
    elif back == 1:
        bar = turned_leg(0.009, h - seat - 0.09, fine, SurfaceType.WOOD, wood, 1)
        parts.append(copies(bar, [(x, y_top + 0.008, seat) for x in np.linspace(-0.6, 0.6, 5) * inset_x]))
    else:
        middle = (seat + h) / 2 + 0.02
        parts.append(box((w - 0.1, 0.03, 0.3), (0, y_top + 0.012, middle), SurfaceType.FABRIC, cloth, 0.014, fine))
    if style.fine > 0.4:
        for x in (-inset_x, inset_x):
            stretcher = np.array([(x, -inset_y, 0.18), (x, 0, 0.18), (x, inset_y, 0.18)])
            parts.append(tube(stretcher, 0.01, style.n(8, 3), SurfaceType.WOOD, wood))
    return join(parts)


def office_chair(size: Size, style: Style) -> Mesh:
    """A swivel chair on a star of five castors."""
    w, d, h = size
    cloth, fine = style.fabric(), style.fine
    reach = min(w, d) / 2 - 0.03
    angle = np.arange(5) * 2 * np.pi / 5 + 0.3
    wheel = cushion((0.05, 0.05, 0.05), (0, 0, 0.025), fine * 0.7, SurfaceType.PLAIN, BLACK, 1.0)
    parts = [copies(wheel, np.stack([reach * np.cos(angle), reach * np.sin(angle), 0 * angle], -1))]
    arm = tube(
        [(0, 0, 0.1), (0.5 * reach, 0, 0.085), (reach, 0, 0.06)],
        [0.03, 0.022, 0.015],
        style.n(8, 4),
        SurfaceType.PLAIN,
        BLACK,
    )
    parts += [arm.moved((0, 0, 0), float(a)) for a in angle]
    parts.append(rod(0.028, 0.34, style.n(12, 5), SurfaceType.PLAIN, STEEL, (0, 0, 0.08)))
    parts.append(cushion((w - 0.1, d - 0.1, 0.1), (0, 0.02, 0.46), fine, SurfaceType.FABRIC, cloth, 0.4))
    parts.append(
        cushion(
            (w - 0.14, 0.09, h - 0.58), (0, -d / 2 + 0.08, 0.58 + (h - 0.58) / 2), fine, SurfaceType.FABRIC, cloth, 0.5
        )
    )
    spine = [(0, -0.05, 0.42), (0, -d / 2 + 0.12, 0.43), (0, -d / 2 + 0.03, 0.5), (0, -d / 2 + 0.03, 0.75)]
    parts.append(tube(spine, 0.02, style.n(8, 4), SurfaceType.PLAIN, BLACK))
    for x in (-w / 2 + 0.04, w / 2 - 0.04):
        rest = [(x * 0.5, 0, 0.42), (x, 0.02, 0.46), (x, 0.02, 0.62)]
        parts.append(tube(rest, 0.014, style.n(8, 4), SurfaceType.PLAIN, BLACK))
        parts.append(box((0.06, 0.24, 0.03), (x, 0.03, 0.635), SurfaceType.PLAIN, BLACK, 0.013, fine))
    return join(parts)


def table(size: Size, style: Style) -> Mesh:
    """A table on four turned legs with an apron; a square one may be round on a pedestal."""
    w, d, h = size
    wood, shape, fine = style.wood(), style.pick(3), style.fine
    round_top = style.rng.random() < 0.6
    if abs(w - d) < 0.01 and round_top:
        edge = np.linspace(-np.pi / 2, np.pi / 2, style.n(5, 2))
        rim = np.stack([w / 2 - 0.015 + 0.015 * np.cos(edge), h - 0.016 + 0.016 * np.sin(edge)], -1)
        parts = [lathe([(0, h - 0.032), *rim, (0, h)], style.n(36, 8), SurfaceType.WOOD, wood)]
        t = np.linspace(0, 1, style.n(18, 4))
        column = 0.05 + 0.03 * np.sin(7 * t) * (1 - t) + 0.1 * np.exp(-14 * t) * (t < 0.5)
        parts.append(lathe(np.stack([column, t * (h - 0.03)], -1), style.n(18, 5), SurfaceType.WOOD, wood))
        foot = [(0, 0, 0.16), (0.3 * w / 2, 0, 0.1), (0.75 * w / 2, 0, 0.025)]
        one = tube(foot, [0.035, 0.03, 0.022], style.n(8, 4), SurfaceType.WOOD, wood)
        return join(parts + [one.moved((0, 0, 0), k * np.pi / 2 + np.pi / 4) for k in range(4)])
    parts = [box((w, d, 0.035), (0, 0, h - 0.0175), SurfaceType.WOOD, wood, 0.012, fine)]
    leg = turned_leg(min(0.04, 0.045 * h + 0.01), h - 0.035, fine, SurfaceType.WOOD, wood, shape)
    x, y = w / 2 - 0.07, d / 2 - 0.07
    parts.append(copies(leg, [(a, b, 0) for a in (-x, x) for b in (-y, y)]))
    rail = min(0.08, 0.14 * h)
    for side in (-1, 1):
        parts.append(
            box(
                (2 * x, 0.02, rail),
                (0, side * y, h - 0.035 - rail / 2),
                SurfaceType.WOOD,
                shade(wood, 0.92),
                0.004,
                fine * 0.7,
            )
        )
        parts.append(
            box(
                (0.02, 2 * y, rail),
                (side * x, 0, h - 0.035 - rail / 2),
                SurfaceType.WOOD,
                shade(wood, 0.92),
                0.004,
                fine * 0.7,
            )
        )
    return join(parts)


def desk(size: Size, style: Style) -> Mesh:
    """A writing desk: a top, a block of drawers and two legs."""
    w, d, h = size
    wood, shape, fine = style.wood(), style.pick(3), style.fine
    parts = [box((w, d, 0.03), (0, 0, h - 0.015), SurfaceType.WOOD, wood, 0.01, fine)]
    block = _carcass((0.4, d - 0.06, h - 0.03), style, wood, rows=3, columns=1, legs=False)
    parts.append(block.moved((w / 2 - 0.22, 0, 0)))
    leg = turned_leg(0.026, h - 0.03, fine, SurfaceType.WOOD, wood, shape)
    parts.append(copies(leg, [(-w / 2 + 0.05, y, 0) for y in (-d / 2 + 0.05, d / 2 - 0.05)]))
    parts.append(box((w - 0.46, 0.015, 0.25), (-0.2, -d / 2 + 0.05, h - 0.16), SurfaceType.WOOD, shade(wood, 0.92)))
    return join(parts)


def sofa(size: Size, style: Style) -> Mesh:
    """A sofa or armchair: arms, seat and back cushions, throw pillows."""
    w, d, h = size
    cloth, accent, wood, fine = style.fabric(), style.fabric(), style.wood(), style.fine
    arm = 0.18 if w > 1.2 else 0.14
    seats = max(1, round((w - 2 * arm) / 0.7))
    tilt = style.rng.uniform(-0.5, 0.5, 2)
    parts = [box((w - 0.02, d - 0.04, 0.2), (0, 0, 0.2), SurfaceType.FABRIC, shade(cloth, 0.9), 0.03, fine)]
    for side in (-1, 1):
        parts.append(
            box((arm, d, 0.5), (side * (w / 2 - arm / 2), 0, 0.36), SurfaceType.FABRIC, cloth, 0.07, 1.6 * fine)
        )
    parts.append(
        box(
            (w - 2 * arm + 0.04, 0.2, h - 0.25),
            (0, -d / 2 + 0.1, 0.23 + (h - 0.25) / 2),
            SurfaceType.FABRIC,
            cloth,
            0.07,
            1.6 * fine,
        )
    )
    width = (w - 2 * arm) / seats
    xs = (np.arange(seats) - (seats - 1) / 2) * width
    seat = cushion((width - 0.01, d - 0.22, 0.17), (0, 0.09, 0.375), 1.5 * fine, SurfaceType.FABRIC, cloth, 0.22)
    rest = cushion((width - 0.02, 0.18, 0.42), (0, 0, 0), 1.5 * fine, SurfaceType.FABRIC, cloth, 0.35).turned(0, 0.16)
    parts.append(copies(seat, [(x, 0, 0) for x in xs]))
    parts.append(copies(rest, [(x, -d / 2 + 0.25, min(0.64, h - 0.2)) for x in xs]))
    if w > 1.2:
        pillow = cushion((0.42, 0.15, 0.4), (0, 0, 0), 1.3 * fine, SurfaceType.FABRIC, accent, 0.45).turned(0, 0.35)
        edge = w / 2 - arm - 0.2
        parts += [
            pillow.moved((s * edge, 0.03, 0.64), s * 0.3 + 0.2 * float(t)) for s, t in zip((-1, 1), tilt, strict=True)
        ]
    foot = turned_leg(0.025, 0.11, fine * 0.6, SurfaceType.WOOD, wood)
    parts.append(
        copies(foot, [(x, y, 0) for x in (-w / 2 + 0.08, w / 2 - 0.08) for y in (-d / 2 + 0.08, d / 2 - 0.08)])
    )
    return join(parts)


def bed(size: Size, style: Style) -> Mesh:
    """A bed with headboard, mattress, pillows and a blanket with folds; the head is at the back."""
    w, d, h = size
    wood, cloth, shape, fine = style.wood(), style.fabric(), style.pick(3), style.fine
    wave = style.rng.uniform(0, 2 * np.pi, 6)
    parts = [box((w, d - 0.06, 0.16), (0, 0.02, 0.24), SurfaceType.WOOD, wood, 0.015, fine)]
    leg = turned_leg(0.035, 0.18, fine, SurfaceType.WOOD, wood, shape)
    parts.append(copies(leg, [(x, y, 0) for x in (-w / 2 + 0.06, w / 2 - 0.06) for y in (-d / 2 + 0.1, d / 2 - 0.1)]))
    parts.append(
        box((w - 0.06, d - 0.12, 0.2), (0, 0.02, 0.41), SurfaceType.FABRIC, (0.95, 0.94, 0.92), 0.05, 1.5 * fine)
    )
    board = -d / 2 + 0.025
    if shape == 0:
        parts.append(box((w, 0.05, h - 0.15), (0, board, 0.15 + (h - 0.15) / 2), SurfaceType.WOOD, wood, 0.02, fine))
    elif shape == 1:
        pads = max(2, round(w / 0.3))
        width = w / pads
        pad = cushion(
            (width, 0.05, h - 0.4), (0, board, 0.4 + (h - 0.4) / 2), fine, SurfaceType.FABRIC, shade(cloth, 0.85), 0.25
        )
        parts.append(copies(pad, [((k - (pads - 1) / 2) * width, 0, 0) for k in range(pads)]))
    else:
        for z in (0.5, h - 0.04):
            parts.append(box((w, 0.04, 0.07), (0, board, z), SurfaceType.WOOD, wood, 0.015, fine))
        bar = turned_leg(0.014, h - 0.57, fine, SurfaceType.WOOD, wood, 1)
        parts.append(
            copies(bar, [(x, board, 0.53) for x in np.linspace(-w / 2 + 0.06, w / 2 - 0.06, max(4, round(w / 0.15)))])
        )
    heads = 2 if w > 1.3 else 1
    pillow = cushion(
        (min(0.62, w / heads - 0.12), 0.4, 0.16), (0, 0, 0), 1.5 * fine, SurfaceType.FABRIC, (0.97, 0.96, 0.95), 0.4
    )
    pillow = pillow.turned(0, 0.25)
    parts.append(copies(pillow, [((k - (heads - 1) / 2) * w / 2, -d / 2 + 0.3, 0.6) for k in range(heads)]))
    parts.append(_blanket(w, d, style, cloth, wave))
    return join(parts)


def _blanket(w: float, d: float, style: Style, cloth: Color, wave: np.ndarray) -> Mesh:
    m, n = style.n(44, 5), style.n(44, 4)
    # Across: down one side, over the bed, down the other; the parameter is the length of cloth in meters.
    drop, top = 0.16, 0.525
    s = np.linspace(-(w / 2 + drop), w / 2 + drop, m)
    s = np.sort(np.concatenate([s[1:-1], [-(w / 2 + drop), w / 2 + drop, -w / 2 + 0.01, w / 2 - 0.01]]))
    over = np.clip(np.abs(s) - (w / 2 - 0.01), 0, None)
    x = np.clip(s, -w / 2 + 0.01, w / 2 - 0.01)
    y = np.linspace(-d / 2 + 0.62, d / 2 - 0.035, n)
    fold = 0.006 * (np.sin(9 * s[:, None] + 5 * y + wave[0]) + np.sin(14 * y - 6 * s[:, None] + wave[1]))
    hang = (over > 0)[:, None] * 0.008 * (1 + np.sin(26 * y[None] + wave[2]))
    z = top + fold - over[:, None]
    z[over > 0] = np.minimum(z[over > 0], top - over[over > 0][:, None])
    points = np.stack([x[:, None] + np.sign(s)[:, None] * (hang - 0.008), np.broadcast_to(y, z.shape), z], -1)
    uv = np.stack(np.broadcast_arrays(s[:, None], y[None]), -1)
    return sheet(points, SurfaceType.FABRIC, cloth, uv)


def _carcass(
    size: Size, style: Style, wood: Color, rows: int, columns: int, legs: bool, knob: int | None = None
) -> Mesh:
    """A cabinet's body with a grid of fronts, each with a knob or bar."""
    w, d, h = size
    fine = style.fine
    foot = min(0.12, 0.2 * h) if legs else 0.05
    knob = style.pick(2) if knob is None else knob
    parts = [box((w, d - 0.03, h - foot), (0, -0.015, foot + (h - foot) / 2), SurfaceType.WOOD, wood, 0.008, fine)]
    if legs:
        leg = turned_leg(0.02, foot, fine * 0.7, SurfaceType.WOOD, wood)
        parts.append(
            copies(leg, [(x, y, 0) for x in (-w / 2 + 0.05, w / 2 - 0.05) for y in (-d / 2 + 0.05, d / 2 - 0.08)])
        )
    else:
        parts.append(box((w - 0.04, d - 0.1, foot), (0, -0.03, foot / 2), SurfaceType.PLAIN, shade(wood, 0.5)))
    wide, high = (w - 0.02) / columns, (h - foot - 0.03) / rows
    face = box((wide - 0.008, 0.018, high - 0.008), (0, 0, 0), SurfaceType.WOOD, shade(wood, 1.06), 0.006, fine)
    centers = [
        (-w / 2 + 0.01 + (c + 0.5) * wide, d / 2 - 0.023, foot + 0.015 + (r + 0.5) * high)
        for r in range(rows)
        for c in range(columns)
    ]
    parts.append(copies(face, centers))
    if fine < 0.1:
        return join(parts)
    tall = high > 1.2 * wide
    if knob == 0 or fine < 0.3:
        shape = [(0.006, 0), (0.006, 0.006), (0.012, 0.009), (0.011, 0.013), (0, 0.014)]
        pull = lathe(shape if fine > 0.3 else shape[2:], style.n(12, 4), SurfaceType.PLAIN, BRASS).turned(0, -np.pi / 2)
        shift = wide / 2 - 0.05 if tall else 0.0
    else:
        reach = 0.06
        bend = np.array([(-reach, 0, 0), (-reach, 0.01, 0), (0, 0.0125, 0), (reach, 0.01, 0), (reach, 0, 0)])
        pull = tube(bend, 0.004, style.n(8, 4), SurfaceType.PLAIN, STEEL)
        if tall:
            pull = pull.turned(1, np.pi / 2)
        shift = wide / 2 - 0.04 if tall else 0.0
    # The knobs of neighboring doors are next to each other.
    sides = [(1 if k % columns % 2 == 0 else -1) for k in range(len(centers))]
    parts.append(
        copies(pull, [(x + s * shift, d / 2 - 0.0145, z) for (x, _, z), s in zip(centers, sides, strict=True)])
    )
    return join(parts)


def nightstand(size: Size, style: Style) -> Mesh:
    """A small cabinet with two drawers."""
    return _carcass(size, style, style.wood(), 2, 1, True)


def dresser(size: Size, style: Style) -> Mesh:
    """A chest of drawers."""
    return _carcass(size, style, style.wood(), max(2, round(size[2] / 0.25)), max(1, round(size[0] / 0.6)), True)


def sideboard(size: Size, style: Style) -> Mesh:
    """A low cabinet with doors."""
    return _carcass(size, style, style.wood(), 1, max(2, round(size[0] / 0.5)), True)


def wardrobe(size: Size, style: Style) -> Mesh:
    """A tall cabinet with a cornice."""
    w, d, h = size
    wood = style.wood()
    body = _carcass((w - 0.04, d - 0.02, h - 0.06), style, wood, 1, max(2, round(w / 0.5)), False, knob=1)
    return join([body, box((w, d, 0.06), (0, 0, h - 0.03), SurfaceType.WOOD, wood, 0.02, style.fine)])


def bookshelf(size: Size, style: Style) -> Mesh:
    """A bookcase filled with books of many colors."""
    w, d, h = size
    wood = style.wood()
    count = max(3, round(h / 0.34))
    parts, gap = _frame(size, SurfaceType.WOOD, wood, count, style.fine)
    parts.append(_books(w - 0.06, d, [0.03 + (k + 0.0) * gap + 0.01 for k in range(count)], gap - 0.03, style))
    return join(parts)


def _frame(size: Size, surface: SurfaceType, tint: Color, count: int, fine: float) -> tuple[list[Mesh], float]:
    """An open case with `count` shelves, and the height from one to the next."""
    w, d, h = size
    parts = [box((0.022, d, h), (s * (w / 2 - 0.011), 0, h / 2), surface, tint, 0.004, fine) for s in (-1, 1)]
    parts.append(box((w - 0.03, 0.008, h - 0.02), (0, -d / 2 + 0.006, h / 2), surface, shade(tint, 0.8)))
    gap = (h - 0.05) / count
    board = box((w - 0.04, d - 0.02, 0.02), (0, 0, 0), surface, tint, 0.004, fine)
    parts.append(copies(board, [(0, 0, 0.03 + k * gap) for k in range(count)] + [(0, 0, h - 0.012)]))
    return parts, gap


def _books(width: float, depth: float, floors: list[float], room: float, style: Style) -> Mesh:
    """Rows of books on shelves at these heights; at low fineness a row is a few blocks."""
    rng = style.rng
    thick = 0.032 if style.fine > 0.3 else 0.4 * width
    per_row = int(width * 0.93 / thick)
    count = per_row * len(floors)
    wide = rng.uniform(0.7, 1.25, count) * thick
    tall = rng.uniform(0.6, 0.97, count) * room
    deep = rng.uniform(0.6, 0.85, count) * (depth - 0.03)
    here = rng.random(count) < 0.9
    row = np.repeat(np.arange(len(floors)), per_row)
    start = np.cumsum(wide.reshape(len(floors), per_row), 1)
    start -= wide.reshape(len(floors), per_row)
    left = start.ravel() - width / 2 + 0.01
    fits = (left + wide < width / 2 - 0.005) & here
    colors = np.array([(0.55, 0.2, 0.18), (0.2, 0.3, 0.45), (0.25, 0.4, 0.3), (0.85, 0.8, 0.7), (0.75, 0.55, 0.25),
                        (0.3, 0.25, 0.3), (0.7, 0.7, 0.72), (0.45, 0.32, 0.22), (0.85, 0.45, 0.3)])  # fmt: skip
    tint = colors[rng.integers(len(colors), size=count)] * rng.uniform(0.8, 1.1, (count, 1))
    low = np.asarray(floors)[row]
    center = np.stack([left + wide / 2, -depth / 2 + 0.02 + deep / 2, low + tall / 2], -1)[fits]
    scale = np.stack([wide - 0.002, deep, tall], -1)[fits]
    book = box((1, 1, 1), (0, 0, 0), SurfaceType.PLAIN, (1, 1, 1), 0.12, 0.4 * style.fine)
    return copies(book, center, scale, tints=np.clip(tint[fits], 0, 1))


def storage_shelf(size: Size, style: Style) -> Mesh:
    """Metal shelving with cardboard boxes and tins."""
    w, d, h = size
    count = max(3, round(h / 0.45))
    parts, gap = _frame(size, SurfaceType.PLAIN, shade(STEEL, 0.8), count, style.fine)
    per_row = max(2, int(w / 0.36))
    rng = style.rng
    k, row = np.meshgrid(np.arange(per_row), np.arange(count))
    k, row = k.ravel(), row.ravel()
    slot = (w - 0.08) / per_row
    wide, tall = slot * rng.uniform(0.6, 0.92, k.size), (gap - 0.04) * rng.uniform(0.45, 0.95, k.size)
    deep = (d - 0.06) * rng.uniform(0.7, 1.0, k.size)
    x = -w / 2 + 0.04 + (k + 0.5) * slot
    tint = np.array([(0.76, 0.6, 0.42), (0.8, 0.66, 0.48), (0.55, 0.6, 0.65), (0.85, 0.83, 0.8)])[
        rng.integers(4, size=k.size)
    ]
    crate = box((1, 1, 1), (0, 0, 0), SurfaceType.PLAIN, (1, 1, 1), 0.04, style.fine)
    place = np.stack([x, np.zeros(k.size), 0.04 + row * gap + tall / 2], -1)
    parts.append(copies(crate, place, np.stack([wide, deep, tall], -1), tints=tint))
    return join(parts)


def coat_rack(size: Size, style: Style) -> Mesh:
    """A stand with hooks and two coats."""
    h = size[2]
    wood, cloth, other = style.wood(), style.fabric(), style.fabric()
    parts = [turned_leg(0.025, h, style.fine, SurfaceType.WOOD, wood, 1)]
    parts.append(lathe([(0, 0), (0.16, 0), (0.15, 0.03), (0, 0.05)], style.n(20, 6), SurfaceType.WOOD, wood))
    hook = tube(
        [(0, 0, h - 0.12), (0.08, 0, h - 0.14), (0.13, 0, h - 0.05)], 0.01, style.n(8, 4), SurfaceType.WOOD, wood
    )
    parts += [hook.moved((0, 0, 0), k * np.pi / 2) for k in range(4)]
    m, n = style.n(24, 6), style.n(12, 3)
    angle, t = np.linspace(0, 2 * np.pi, m), np.linspace(0, 1, n)[:, None]
    for side, color in ((-1, cloth), (1, other)):
        wide = (0.035 + 0.07 * t) * (1 + 0.15 * np.cos(7 * angle))
        x = side * 0.11 + wide * np.cos(angle) * 0.8
        y, z = wide * np.sin(angle) * 1.1, h - 0.15 - 0.9 * t + 0 * angle
        coat = sheet(np.stack(np.broadcast_arrays(x, y, z), -1), SurfaceType.FABRIC, color)
        parts.append(coat)
    return join(parts)
