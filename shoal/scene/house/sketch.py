"""Sketches of floor plans: the rooms of a building and their rectangles, without walls and doors."""

from collections.abc import Callable

import numpy as np

BUILDINGS = ("house", "cabin")
"""A house has several rooms; a cabin has one or two, for small machines and tests."""

STEP = 0.2
"""Meters between grid lines; wall centers lie on grid lines."""

Rect = tuple[float, float, float, float]
"""Minimum x, minimum y, maximum x, maximum y, meters."""

RoomSketch = tuple[str, list[Rect]]
"""A kind of room and its rectangles between wall centers. The entrance leads to the first room of a sketch."""

SketchFunction = Callable[[np.random.Generator, list[str]], list[RoomSketch] | None]
"""Arranges rooms of given kinds; returns None if the draw does not work out."""

AREA = {
    "living": (18, 34), "kitchen": (9, 16), "bedroom": (10.5, 18), "bath": (5, 8.5), "study": (8.5, 13),
    "dining": (11, 17), "storage": (4.5, 7), "hall": (5, 12), "corridor": (0, 0),
}  # fmt: skip
"""Range of areas by kind of room, m²."""
MIN_WIDTH = {"living": 3.4, "kitchen": 2.6, "bedroom": 2.8, "bath": 1.8, "study": 2.6, "dining": 2.8, "storage": 1.6}
"""Minimum distance between the centers of opposite walls, meters."""
BUILDING_AREA = {"house": (60.0, 250.0), "cabin": (13.0, 34.0)}
"""Minimum and maximum area of a building between wall centers, m²."""
CABIN_ROOM_AREA = (13.0, 30.0)
"""Minimum and maximum area of a cabin's room between wall centers, m²; 12 to 30 between the walls."""
CABIN_AREA = {"living": (15, 30), "dining": (13, 20), "kitchen": (13, 18), "bedroom": (13, 20), "study": (13, 17)}
"""Range of areas of a cabin's rooms, m²; of two rooms, the entrance leads to the one listed first here."""


def sketch(rng: np.random.Generator, building: str = "house") -> list[RoomSketch] | None:
    """Draw rooms that tile a building, or None if the draw does not work out."""
    kinds, arrange = _cabin_idea(rng) if building == "cabin" else _house_idea(rng)
    # Retry one arrangement: otherwise arrangements that often fail would be underrepresented.
    for _ in range(60):
        spaces = arrange(rng, kinds)
        if spaces is not None:
            return _flip_and_rotate(rng, spaces)
    return None


def _house_idea(rng: np.random.Generator) -> tuple[list[str], SketchFunction]:
    kinds = _draw_kinds(rng)
    draw = rng.random()
    return kinds, _windmill if draw > 0.75 else (_l_shape if len(kinds) >= 7 and draw < 0.35 else _spine)


def _cabin_idea(rng: np.random.Generator) -> tuple[list[str], SketchFunction]:
    count, kinds = 1 + int(rng.integers(2)), list(CABIN_AREA)
    return [kinds[k] for k in sorted(rng.permutation(len(kinds))[:count])], _side_by_side


def _snap(value: float) -> float:
    return round(value / STEP) * STEP


def _draw_kinds(rng: np.random.Generator) -> list[str]:
    extras = ["bedroom", "study", "bedroom", "storage", "bath", "dining", "bedroom"]
    count = int(rng.choice(8, p=[0.08, 0.12, 0.17, 0.18, 0.17, 0.13, 0.09, 0.06]))
    order = [extras[k] for k in rng.permutation(len(extras))]
    return ["living", "kitchen", "bedroom", "bath"] + order[:count]


def _columns(rng: np.random.Generator, kinds: list[str]) -> list[list[str]]:
    """Groups of rooms that share a section of corridor; two small rooms may be one behind the other."""
    small = [kind for kind in kinds if kind in ("bath", "storage")]
    columns = [[kind] for kind in kinds if kind not in small]
    if len(small) >= 2 and rng.random() < 0.7:
        columns.append([small.pop(0), small.pop(0)])
    columns += [[kind] for kind in small]
    return [columns[k] for k in rng.permutation(len(columns))]


def _draw_area(rng: np.random.Generator, kind: str, areas: dict = AREA) -> float:
    return float(rng.uniform(*areas[kind]))


def _row(
    rng: np.random.Generator, rect: Rect, axis: int, outer: int, columns: list[list[str]], jog=True, areas: dict = AREA
) -> list[RoomSketch] | None:
    """Rooms side by side along `axis` in the rectangle; rooms may be set back from its outer edge (+1 or -1 across)."""
    low, high = rect[axis], rect[axis + 2]
    near, far = (rect[1 - axis], rect[3 - axis])[:: 1 if outer > 0 else -1]
    depth = abs(far - near)
    weights = np.array([sum(_draw_area(rng, kind, areas) for kind in column) for column in columns])
    cuts = np.concatenate([[0], np.cumsum(weights) / weights.sum()]) * (high - low) + low
    cuts = [_snap(cut) for cut in cuts]
    spaces: list[RoomSketch] = []
    for column, start, end in zip(columns, cuts[:-1], cuts[1:], strict=True):
        width = end - start
        back = float(rng.choice([0.0, 0.0, 0.0, 0.6, 1.2])) * jog
        reach = depth - back if depth - back >= 2.8 * len(column) ** 0.6 else depth
        edges = [0.0, reach] if len(column) == 1 else [0.0, _snap(reach * rng.uniform(0.42, 0.58)), reach]
        for kind, a, b in zip(column, edges[:-1], edges[1:], strict=True):
            if min(width, b - a) < MIN_WIDTH[kind] - 1e-6 or max(width, b - a) > 7.8:
                return None
            if width * (b - a) > 1.6 * areas[kind][1]:
                return None
            spaces.append((kind, [_rect(axis, start, end, near + outer * a, near + outer * b)]))
    return spaces


def _rect(axis: int, low: float, high: float, near: float, far: float) -> Rect:
    near, far = min(near, far), max(near, far)
    return (low, near, high, far) if axis == 0 else (near, low, far, high)


def _distribute(columns: list[list[str]], depths: list[float], rng: np.random.Generator) -> list[list[list[str]]]:
    """Assign the columns to rows of these depths, in proportion to the depths."""
    rows: list[list[list[str]]] = [[] for _ in depths]
    filled = np.zeros(len(depths))
    for column in sorted(columns, key=lambda column: -sum(AREA[kind][1] for kind in column)):
        row = int(np.argmin(filled + rng.random(len(depths)) * 0.5))
        rows[row].append(column)
        filled[row] += sum(sum(AREA[kind]) / 2 for kind in column) / depths[row]
    return [[row[k] for k in rng.permutation(len(row))] for row in rows]


def _spine(rng: np.random.Generator, kinds: list[str]) -> list[RoomSketch] | None:
    """Two rows of rooms along a straight corridor; sometimes the living room fills the whole end."""
    width, first, second = (_snap(rng.uniform(*span)) for span in ((1.4, 2.0), (3.2, 5.0), (3.2, 5.0)))
    kinds = list(kinds)
    through = rng.random() < 0.5 and len(kinds) > 4
    if through:
        kinds.remove("living")
    columns = _columns(rng, kinds)
    if len(columns) < 2:
        return None
    rows = _distribute(columns, [first, second], rng)
    if not all(rows):
        return None
    total = sum(sum(AREA[kind]) / 2 for kind in kinds)
    length = _snap(total / (first + second) * rng.uniform(0.95, 1.15))
    spaces: list[RoomSketch] = [("corridor", [(0.0, first, length, first + width)])]
    for rect, outer, row in (
        ((0.0, 0.0, length, first), -1, rows[0]),
        ((0.0, first + width, length, first + width + second), 1, rows[1]),
    ):
        rooms = _row(rng, rect, 0, outer, row)
        if rooms is None:
            return None
        spaces += rooms
    if through:
        depth = first + width + second
        end = _snap(max(3.4, _draw_area(rng, "living") / depth))
        back = float(rng.choice([0.0, 0.6, 1.2, 1.8]))
        spaces.append(("living", [(-end, back, 0.0, depth)]))
    return spaces


def _l_shape(rng: np.random.Generator, kinds: list[str]) -> list[RoomSketch] | None:
    """An L-shaped corridor with rooms on all sides."""
    width = _snap(rng.uniform(1.4, 1.8))
    front, back, east, west = (_snap(rng.uniform(3.2, 4.6)) for _ in range(4))
    rows = _distribute(_columns(rng, kinds), [back, east, front, west], rng)
    if not all(rows):
        return None
    needs = [sum(sum(AREA[kind]) / 2 for column in row for kind in column) for row in rows]
    length = _snap(max(needs[0] / back - width, needs[2] / front) * rng.uniform(0.95, 1.1))
    drop = _snap(max(needs[1] / east - front - width - back, needs[3] / west, 2.6) * rng.uniform(0.95, 1.1))
    if length < west:
        return None
    top, right = front + width, length + width
    spaces: list[RoomSketch] = [("corridor", [(0.0, front, right, top), (length, -drop, right, front)])]
    # The last two rows meet in the inner corner: a setback there would leave a gap between two outer walls.
    for rect, axis, outer, row, jog in (
        ((0.0, top, right, top + back), 0, 1, rows[0], True),
        ((right, -drop, right + east, top + back), 1, 1, rows[1], True),
        ((0.0, 0.0, length, front), 0, -1, rows[2], False),
        ((length - west, -drop, length, 0.0), 1, -1, rows[3], False),
    ):
        rooms = _row(rng, rect, axis, outer, row, jog)
        if rooms is None:
            return None
        spaces += rooms
    return spaces


def _windmill(rng: np.random.Generator, kinds: list[str]) -> list[RoomSketch] | None:
    """Four wings around a rectangular hall, like the sails of a windmill."""
    wide, deep = _snap(rng.uniform(2.4, 3.6)), _snap(rng.uniform(2.4, 3.6))
    depths = [_snap(rng.uniform(3.0, 4.8)) for _ in range(4)]
    rows = _distribute(_columns(rng, kinds), depths, rng)
    if not all(rows):
        return None
    north, east, south, west = depths
    spaces: list[RoomSketch] = [("hall", [(0.0, 0.0, wide, deep)])]
    for rect, axis, outer, row in (
        ((-west, deep, wide, deep + north), 0, 1, rows[0]),
        ((wide, 0.0, wide + east, deep + north), 1, 1, rows[1]),
        ((0.0, -south, wide + east, 0.0), 0, -1, rows[2]),
        ((-west, -south, 0.0, deep), 1, -1, rows[3]),
    ):
        rooms = _row(rng, rect, axis, outer, row)
        if rooms is None:
            return None
        spaces += rooms
    return spaces


def _side_by_side(rng: np.random.Generator, kinds: list[str]) -> list[RoomSketch] | None:
    """Rooms of a cabin in one row."""
    depth = _snap(rng.uniform(3.2, 5.4))
    length = _snap(sum(_draw_area(rng, kind, CABIN_AREA) for kind in kinds) / depth)
    spaces = _row(rng, (0.0, 0.0, length, depth), 0, 1, [[kind] for kind in kinds], areas=CABIN_AREA)
    areas = [(x1 - x0) * (y1 - y0) for _, rects in spaces or () for x0, y0, x1, y1 in rects]
    fit = (
        spaces
        and CABIN_ROOM_AREA[0] <= min(areas)
        and max(areas) <= CABIN_ROOM_AREA[1]
        and sum(areas) <= BUILDING_AREA["cabin"][1]
    )
    return spaces if fit else None


def _flip_and_rotate(rng: np.random.Generator, spaces: list[RoomSketch]) -> list[RoomSketch]:
    """Rooms flipped and rotated at random, with the minimum corner at the origin."""
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
