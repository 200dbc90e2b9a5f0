"""Sketches of floor plans: which rooms a house has and which rectangles they fill, before walls and doors are drawn."""

from collections.abc import Callable

import numpy as np

BUILDINGS = ("house", "cabin")
"""What is built: a home of several rooms, or a cabin of one or two for small machines and tests."""

STEP = 0.2
"""Meters between the lines on which the middles of walls lie."""

Rect = tuple[float, float, float, float]
"""The least x and y and the greatest x and y, meters."""

Space = tuple[str, list[Rect]]
"""A kind of room and its rectangles, wall middle to wall middle. People come in through the first space of a sketch."""

Shape = Callable[[np.random.Generator, list[str]], list[Space] | None]
"""A way to put kinds of rooms together."""

AREA = {
    "living": (18, 34), "kitchen": (9, 16), "bedroom": (10.5, 18), "bath": (5, 8.5), "study": (8.5, 13),
    "dining": (11, 17), "storage": (4.5, 7), "hall": (5, 12), "corridor": (0, 0),
}  # fmt: skip
"""Wanted square meters by kind of room."""
NARROWEST = {"living": 3.4, "kitchen": 2.6, "bedroom": 2.8, "bath": 1.8, "study": 2.6, "dining": 2.8, "storage": 1.6}
"""Meters between the middles of opposite walls, at least."""
AREAS = {"house": (60.0, 250.0), "cabin": (13.0, 34.0)}
"""Least and most square meters of a building, wall middle to wall middle."""
CABIN_ROOM = (13.0, 30.0)
"""Least and most of a cabin's room: 12 to 30 between the walls."""
CABIN_AREA = {"living": (15, 30), "dining": (13, 20), "kitchen": (13, 18), "bedroom": (13, 20), "study": (13, 17)}
"""Wanted square meters of a cabin's rooms; of two, people come in through the one that stands first here."""


def sketch(rng: np.random.Generator, building: str = "house") -> list[Space] | None:
    """Rooms that tile a building, or None where this draw did not work out."""
    kinds, shape = _cabin(rng) if building == "cabin" else _house(rng)
    # Several tries at one idea: else the shapes that seldom work out would be rarer than they are drawn.
    for _ in range(60):
        spaces = shape(rng, kinds)
        if spaces is not None:
            return _mirrored(rng, spaces)
    return None


def _house(rng: np.random.Generator) -> tuple[list[str], Shape]:
    kinds = _programme(rng)
    draw = rng.random()
    return kinds, _around if draw > 0.75 else (_angle if len(kinds) >= 7 and draw < 0.35 else _spine)


def _cabin(rng: np.random.Generator) -> tuple[list[str], Shape]:
    count, kinds = 1 + int(rng.integers(2)), list(CABIN_AREA)
    return [kinds[k] for k in sorted(rng.permutation(len(kinds))[:count])], _side_by_side


def _snap(value: float) -> float:
    return round(value / STEP) * STEP


def _programme(rng: np.random.Generator) -> list[str]:
    extras = ["bedroom", "study", "bedroom", "storage", "bath", "dining", "bedroom"]
    count = int(rng.choice(8, p=[0.08, 0.12, 0.17, 0.18, 0.17, 0.13, 0.09, 0.06]))
    order = [extras[k] for k in rng.permutation(len(extras))]
    return ["living", "kitchen", "bedroom", "bath"] + order[:count]


def _columns(rng: np.random.Generator, kinds: list[str]) -> list[list[str]]:
    """Groups of rooms that share a stretch of corridor; small rooms stand two deep, the second opens sideways."""
    small = [kind for kind in kinds if kind in ("bath", "storage")]
    columns = [[kind] for kind in kinds if kind not in small]
    if len(small) >= 2 and rng.random() < 0.7:
        columns.append([small.pop(0), small.pop(0)])
    columns += [[kind] for kind in small]
    return [columns[k] for k in rng.permutation(len(columns))]


def _wanted(rng: np.random.Generator, kind: str, areas: dict = AREA) -> float:
    return float(rng.uniform(*areas[kind]))


def _row(
    rng: np.random.Generator, rect: Rect, axis: int, outer: int, columns: list[list[str]], jog=True, areas: dict = AREA
) -> list[Space] | None:
    """Rooms side by side along `axis` in the rectangle, whose outer edge (+1 or -1 across) may step back."""
    low, high = rect[axis], rect[axis + 2]
    near, far = (rect[1 - axis], rect[3 - axis])[:: 1 if outer > 0 else -1]
    depth = abs(far - near)
    weights = np.array([sum(_wanted(rng, kind, areas) for kind in column) for column in columns])
    cuts = np.concatenate([[0], np.cumsum(weights) / weights.sum()]) * (high - low) + low
    cuts = [_snap(cut) for cut in cuts]
    spaces: list[Space] = []
    for column, start, end in zip(columns, cuts[:-1], cuts[1:], strict=True):
        width = end - start
        back = float(rng.choice([0.0, 0.0, 0.0, 0.6, 1.2])) * jog
        reach = depth - back if depth - back >= 2.8 * len(column) ** 0.6 else depth
        edges = [0.0, reach] if len(column) == 1 else [0.0, _snap(reach * rng.uniform(0.42, 0.58)), reach]
        for kind, a, b in zip(column, edges[:-1], edges[1:], strict=True):
            if min(width, b - a) < NARROWEST[kind] - 1e-6 or max(width, b - a) > 7.8:
                return None
            if width * (b - a) > 1.6 * areas[kind][1]:
                return None
            spaces.append((kind, [_rect(axis, start, end, near + outer * a, near + outer * b)]))
    return spaces


def _rect(axis: int, low: float, high: float, near: float, far: float) -> Rect:
    near, far = min(near, far), max(near, far)
    return (low, near, high, far) if axis == 0 else (near, low, far, high)


def _dealt(columns: list[list[str]], depths: list[float], rng: np.random.Generator) -> list[list[list[str]]]:
    """The columns dealt to rows of these depths, so that each row gets about its share."""
    rows: list[list[list[str]]] = [[] for _ in depths]
    filled = np.zeros(len(depths))
    for column in sorted(columns, key=lambda column: -sum(AREA[kind][1] for kind in column)):
        row = int(np.argmin(filled + rng.random(len(depths)) * 0.5))
        rows[row].append(column)
        filled[row] += sum(sum(AREA[kind]) / 2 for kind in column) / depths[row]
    return [[row[k] for k in rng.permutation(len(row))] for row in rows]


def _spine(rng: np.random.Generator, kinds: list[str]) -> list[Space] | None:
    """Two rows of rooms along a straight corridor; sometimes the living room fills the whole end."""
    width, first, second = (_snap(rng.uniform(*span)) for span in ((1.4, 2.0), (3.2, 5.0), (3.2, 5.0)))
    kinds = list(kinds)
    through = rng.random() < 0.5 and len(kinds) > 4
    if through:
        kinds.remove("living")
    columns = _columns(rng, kinds)
    if len(columns) < 2:
        return None
    rows = _dealt(columns, [first, second], rng)
    if not all(rows):
        return None
    total = sum(sum(AREA[kind]) / 2 for kind in kinds)
    length = _snap(total / (first + second) * rng.uniform(0.95, 1.15))
    spaces: list[Space] = [("corridor", [(0.0, first, length, first + width)])]
    for rect, outer, row in (
        ((0.0, 0.0, length, first), -1, rows[0]),
        ((0.0, first + width, length, first + width + second), 1, rows[1]),
    ):
        made = _row(rng, rect, 0, outer, row)
        if made is None:
            return None
        spaces += made
    if through:
        depth = first + width + second
        end = _snap(max(3.4, _wanted(rng, "living") / depth))
        back = float(rng.choice([0.0, 0.6, 1.2, 1.8]))
        spaces.append(("living", [(-end, back, 0.0, depth)]))
    return spaces


def _angle(rng: np.random.Generator, kinds: list[str]) -> list[Space] | None:
    """A corridor that turns a corner, with rooms on all its sides: a house in the shape of an L."""
    width = _snap(rng.uniform(1.4, 1.8))
    front, back, east, west = (_snap(rng.uniform(3.2, 4.6)) for _ in range(4))
    rows = _dealt(_columns(rng, kinds), [back, east, front, west], rng)
    if not all(rows):
        return None
    needs = [sum(sum(AREA[kind]) / 2 for column in row for kind in column) for row in rows]
    length = _snap(max(needs[0] / back - width, needs[2] / front) * rng.uniform(0.95, 1.1))
    drop = _snap(max(needs[1] / east - front - width - back, needs[3] / west, 2.6) * rng.uniform(0.95, 1.1))
    if length < west:
        return None
    top, right = front + width, length + width
    spaces: list[Space] = [("corridor", [(0.0, front, right, top), (length, -drop, right, front)])]
    # The last two rows meet in the inner corner: a step back there would leave a slit between two outer walls.
    for rect, axis, outer, row, jog in (
        ((0.0, top, right, top + back), 0, 1, rows[0], True),
        ((right, -drop, right + east, top + back), 1, 1, rows[1], True),
        ((0.0, 0.0, length, front), 0, -1, rows[2], False),
        ((length - west, -drop, length, 0.0), 1, -1, rows[3], False),
    ):
        made = _row(rng, rect, axis, outer, row, jog)
        if made is None:
            return None
        spaces += made
    return spaces


def _around(rng: np.random.Generator, kinds: list[str]) -> list[Space] | None:
    """Four wings like the sails of a windmill around a square hall."""
    wide, deep = _snap(rng.uniform(2.4, 3.6)), _snap(rng.uniform(2.4, 3.6))
    depths = [_snap(rng.uniform(3.0, 4.8)) for _ in range(4)]
    rows = _dealt(_columns(rng, kinds), depths, rng)
    if not all(rows):
        return None
    north, east, south, west = depths
    spaces: list[Space] = [("hall", [(0.0, 0.0, wide, deep)])]
    for rect, axis, outer, row in (
        ((-west, deep, wide, deep + north), 0, 1, rows[0]),
        ((wide, 0.0, wide + east, deep + north), 1, 1, rows[1]),
        ((0.0, -south, wide + east, 0.0), 0, -1, rows[2]),
        ((-west, -south, 0.0, deep), 1, -1, rows[3]),
    ):
        made = _row(rng, rect, axis, outer, row)
        if made is None:
            return None
        spaces += made
    return spaces


def _side_by_side(rng: np.random.Generator, kinds: list[str]) -> list[Space] | None:
    """Rooms in one row, each of the size of a cabin's."""
    depth = _snap(rng.uniform(3.2, 5.4))
    length = _snap(sum(_wanted(rng, kind, CABIN_AREA) for kind in kinds) / depth)
    spaces = _row(rng, (0.0, 0.0, length, depth), 0, 1, [[kind] for kind in kinds], areas=CABIN_AREA)
    areas = [(x1 - x0) * (y1 - y0) for _, rects in spaces or () for x0, y0, x1, y1 in rects]
    fit = spaces and CABIN_ROOM[0] <= min(areas) and max(areas) <= CABIN_ROOM[1] and sum(areas) <= AREAS["cabin"][1]
    return spaces if fit else None


def _mirrored(rng: np.random.Generator, spaces: list[Space]) -> list[Space]:
    """Flipped and turned at random, with the least corner at the origin."""
    flip, turn = rng.random() < 0.5, int(rng.integers(4))

    def moved(rect: Rect) -> Rect:
        x0, y0, x1, y1 = rect
        if flip:
            x0, x1 = -x1, -x0
        for _ in range(turn):
            x0, y0, x1, y1 = -y1, x0, -y0, x1
        return x0, y0, x1, y1

    turned = [(kind, [moved(rect) for rect in rects]) for kind, rects in spaces]
    left = min(rect[0] for _, rects in turned for rect in rects)
    low = min(rect[1] for _, rects in turned for rect in rects)
    return [
        (kind, [(_snap(x0 - left), _snap(y0 - low), _snap(x1 - left), _snap(y1 - low)) for x0, y0, x1, y1 in rects])
        for kind, rects in turned
    ]
