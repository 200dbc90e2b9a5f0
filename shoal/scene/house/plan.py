"""Floor plans of houses: rooms around a corridor or hall, walls with thickness, doors and windows.

Rooms are unions of rectangles on a grid of 0.2 m. The center of a wall lies on a grid line: inner walls extend equally
to both sides, outer walls farther outwards. All random draws depend on the seed only.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shoal.scene.house.sketch import BUILDING_AREA, STEP, Rect, RoomSketch, sketch

HALF_WALL = 0.06
"""Half the thickness of an inner wall, meters."""
OUTER_WALL = 0.2
"""Thickness of outer walls outwards from their grid line, meters."""

CIRCULATION = ("corridor", "hall")
SOCIAL = ("living", "dining", "kitchen")
"""Kinds of rooms that may lead to other rooms."""


@dataclass(frozen=True)
class Zone:
    """A rectangle of a room with one use; an open-plan room has several."""

    kind: str
    rect: Rect
    """Between the walls, or to the border of the next zone."""


@dataclass(frozen=True)
class Room:
    """A room between walls, named after its first zone."""

    name: str
    zones: tuple[Zone, ...]
    rects: tuple[Rect, ...]
    """The floor between the walls, as disjoint rectangles."""

    @property
    def kind(self) -> str:
        """The use of the first zone: living, kitchen, bedroom, ..."""
        return self.zones[0].kind

    @property
    def area(self) -> float:
        """Floor area between the walls, m²."""
        return sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in self.rects)


@dataclass(frozen=True)
class Opening:
    """An opening in a wall: a door between two rooms, or a window or the entrance to the outside."""

    kind: str
    """"door", "window" or "entrance"."""
    rooms: tuple[int, int]
    """The rooms on the lower and the higher side of the wall; -1 is outside."""
    axis: int
    """The axis normal to the wall: 0 for a wall along y, at a fixed x."""
    at: float
    """Coordinate of the wall's center on that axis, meters."""
    low: float
    high: float
    """Range along the wall, meters."""
    bottom: float
    top: float
    """Meters above the floor."""


@dataclass(frozen=True)
class Wall:
    """A flat face of a wall towards a room, or towards the outside (room -1)."""

    room: int
    axis: int
    """The axis of its normal."""
    sign: int
    """+1 if the normal points to greater values of that axis, else -1."""
    at: float
    low: float
    high: float
    """Range along the other axis, meters."""


@dataclass(frozen=True)
class Plan:
    """A floor plan: rooms, wall faces and openings."""

    building: str
    """"house" or "cabin"."""
    seed: int
    height: float
    """Height from floor to ceiling, meters."""
    rooms: tuple[Room, ...]
    openings: tuple[Opening, ...]
    walls: tuple[Wall, ...]
    floors: tuple[tuple[int, Rect], ...]
    """Room and rectangle between wall centers; together they tile the house."""
    cover: tuple[Rect, ...]
    """The house with its outer walls, as disjoint rectangles."""
    bounds: Rect
    """Bounding box of the outer walls."""

    @property
    def doors(self) -> tuple[Opening, ...]:
        """The doors between rooms."""
        return tuple(opening for opening in self.openings if opening.kind == "door")

    @property
    def area(self) -> float:
        """Area between wall centers, m²."""
        return sum((x1 - x0) * (y1 - y0) for _, (x0, y0, x1, y1) in self.floors)

    def room_at(self, x: float, y: float) -> int:
        """The room at a point of the floor; -1 in walls and outside."""
        for number, room in enumerate(self.rooms):
            for x0, y0, x1, y1 in room.rects:
                if x0 <= x <= x1 and y0 <= y <= y1:
                    return number
        return -1


def house_plan(seed: int, building: str = "house") -> Plan:
    """The floor plan of a house or cabin."""
    rng = np.random.Generator(np.random.Philox(key=np.array([seed, 1], np.uint64)))
    while True:
        spaces = sketch(rng, building)
        plan = _plan_from_sketch(building, seed, rng, spaces) if spaces else None
        if plan:
            return plan


# Below, lengths are integer millimeters, so that equal coordinates compare equal.
_HALF, _OUTER, _WALL, _OUTSIDE = round(HALF_WALL * 1000), round(OUTER_WALL * 1000), -2, -1


@dataclass(frozen=True)
class _Run:
    """A straight section of wall between two rooms, in millimeters."""

    rooms: tuple[int, int]
    axis: int
    at: int
    low: int
    high: int


def _plan_from_sketch(building: str, seed: int, rng: np.random.Generator, spaces: list[RoomSketch]) -> Plan | None:
    units = [
        (kind, [tuple(round(v / STEP) * round(STEP * 1000) for v in rect) for rect in rects]) for kind, rects in spaces
    ]
    area = sum((x1 - x0) * (y1 - y0) for _, rects in units for x0, y0, x1, y1 in rects) / 1e6
    if not BUILDING_AREA[building][0] <= area <= BUILDING_AREA[building][1]:
        return None
    xs, ys = (np.unique([rect[k] for _, rects in units for rect in rects for k in (axis, axis + 2)]) for axis in (0, 1))
    cells = np.full((len(xs) + 1, len(ys) + 1), _OUTSIDE)
    for number, (_, rects) in enumerate(units):
        for x0, y0, x1, y1 in rects:
            i0, i1 = np.searchsorted(xs, (x0, x1))
            j0, j1 = np.searchsorted(ys, (y0, y1))
            cells[i0 + 1 : i1 + 1, j0 + 1 : j1 + 1] = number
    groups = [[k] for k in range(len(units))]
    if building == "house":
        groups = _merge_open_plan(rng, [kind for kind, _ in units], _runs(cells, xs, ys))
    lookup = np.full(len(units) + 1, _OUTSIDE)  # The last entry is for index -1, outside.
    for number, group in enumerate(groups):
        lookup[group] = number
    cells = lookup[cells]
    kinds = [[units[k][0] for k in group] for group in groups]
    runs = _runs(cells, xs, ys)
    doors = _doors(rng, kinds, runs)
    entrance = _entrance(rng, kinds, runs) if doors is not None else None
    if doors is None or entrance is None:
        return None
    windows = [window for run in runs for window in _windows(rng, kinds, run, entrance)]
    if building == "cabin":
        # Two windows in all: a cabin has outer walls on all sides and would get too many.
        windows = _limit_per_room(rng, windows, 2 // len(groups))
        if len(windows) < 2:
            return None
    fine_x, fine_y, fine = _thick_grid(cells, xs, ys)
    rooms = []
    names: dict[str, int] = {}
    for number, group in enumerate(groups):
        kind = units[group[0]][0]
        names[kind] = names.get(kind, 0) + 1
        zones = [Zone(units[k][0], _meters(_inner_rect(cells, xs, ys, rect))) for k in group for rect in units[k][1]]
        rects = _rectangles(fine == number, fine_x, fine_y)
        rooms.append(Room(f"{kind} {names[kind]}", tuple(zones), tuple(_meters(rect) for rect in rects)))
    return Plan(
        building=building,
        seed=seed,
        height=round(float(rng.uniform(2.45, 2.8)), 2),
        rooms=tuple(rooms),
        openings=(*doors, entrance, *windows),
        walls=tuple(_walls(fine, fine_x, fine_y)),
        floors=tuple(
            (number, _meters(rect)) for number, group in enumerate(groups) for k in group for rect in units[k][1]
        ),
        cover=tuple(_meters(rect) for rect in _rectangles(fine != _OUTSIDE, fine_x, fine_y)),
        bounds=_meters((fine_x[0], fine_y[0], fine_x[-1], fine_y[-1])),
    )


def _meters(rect) -> Rect:
    x0, y0, x1, y1 = (float(v) / 1000 for v in rect)
    return x0, y0, x1, y1


def _equal_ranges(keys: list) -> list[tuple[int, int]]:
    """Index ranges of equal neighbors."""
    edges = [0] + [k for k in range(1, len(keys)) if keys[k] != keys[k - 1]] + [len(keys)]
    return list(pairwise(edges))


def _runs(cells: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> list[_Run]:
    runs = []
    for axis, grid, across, along in ((0, cells, xs, ys), (1, cells.T, ys, xs)):
        for k, at in enumerate(across):
            keys = list(zip(grid[k].tolist(), grid[k + 1].tolist(), strict=True))
            for start, end in _equal_ranges(keys):
                if keys[start][0] != keys[start][1]:
                    runs.append(_Run(keys[start], axis, int(at), int(along[start - 1]), int(along[end - 1])))
    return runs


def _merge_open_plan(rng: np.random.Generator, kinds: list[str], runs: list[_Run]) -> list[list[int]]:
    """Groups of rooms without walls between them: sometimes two of living, dining and kitchen form one open plan."""
    groups = [[k] for k in range(len(kinds))]
    for run in runs:
        a, b = run.rooms
        if min(a, b) < 0 or run.high - run.low < 2400 or kinds[a] == kinds[b]:
            continue
        social = kinds[a] in SOCIAL and kinds[b] in SOCIAL
        if social and rng.random() < 0.45:
            first, second = (next(group for group in groups if k in group) for k in (a, b))
            if first is not second and len(first) + len(second) <= 2:
                first.extend(second)
                groups.remove(second)
    return [sorted(group, key=lambda k: SOCIAL.index(kinds[k]) if kinds[k] in SOCIAL else 0) for group in groups]


def _door_cost(through: str, to: str) -> float:
    """Cost of reaching one kind of room through another; high costs are unusual."""
    if through in CIRCULATION:
        return 1.0
    if through in SOCIAL:
        return {"bath": 4.0, "bedroom": 3.0}.get(to, 1.5)
    if through == "bedroom":
        return {"bath": 2.5, "storage": 3.0, "study": 5.0}.get(to, 12.0)
    return 5.0 if through == "study" and to in ("storage", "bath") else 20.0


def _doors(rng: np.random.Generator, kinds: list[list[str]], runs: list[_Run]) -> list[Opening] | None:
    """Doors that reach every room at minimum cost, and some more; None if a cost is too high."""
    inner = [run for run in runs if min(run.rooms) >= 0 and run.high - run.low >= 1200]
    best = [0.0] + [np.inf] * (len(kinds) - 1)
    way: list[_Run | None] = [None] * len(kinds)
    for _ in kinds:
        for run in inner:
            for a, b in (run.rooms, run.rooms[::-1]):
                cost = best[a] + min(_door_cost(through, to) for through in kinds[a] for to in kinds[b])
                if cost < best[b] - 1e-9:
                    best[b], way[b] = cost, run
    if max(best) > 8.0:
        return None
    chosen = [run for run in way if run is not None]
    pairs = {run.rooms for run in chosen}
    for run in inner:
        if run.rooms in pairs or run.rooms[::-1] in pairs:
            continue
        a, b = kinds[run.rooms[0]][0], kinds[run.rooms[1]][0]
        likely = 0.4 if a in (*SOCIAL, *CIRCULATION) and b in (*SOCIAL, *CIRCULATION) else 0.0
        if {a, b} == {"bedroom", "bath"}:
            likely = 0.15
        if rng.random() < likely:
            chosen.append(run)
            pairs.add(run.rooms)
    return [
        _opening(rng, run, "door", 840 + 50 * int(rng.integers(5)), 0, int(rng.integers(200, 211)) * 10)
        for run in chosen
    ]


def _opening(rng: np.random.Generator, run: _Run, kind: str, width: int, bottom: int, top: int) -> Opening:
    """An opening at a random place of the run; doors are more often near a corner of the room."""
    margin = _HALF + 100
    width = min(width, run.high - run.low - 2 * margin)
    room = run.high - run.low - 2 * margin - width
    place = rng.random()
    if kind == "door":
        place = place if rng.random() < 0.4 else float(np.clip((place < 0.5) + rng.uniform(-0.15, 0.15), 0, 1))
    low = run.low + margin + int(place * room) // 10 * 10
    return Opening(
        kind, run.rooms, run.axis, run.at / 1000, low / 1000, (low + width) / 1000, bottom / 1000, top / 1000
    )


def _entrance(rng: np.random.Generator, kinds: list[list[str]], runs: list[_Run]) -> Opening | None:
    outer = [run for run in runs if min(run.rooms) == _OUTSIDE and run.high - run.low >= 1300]
    social = [number for number, group in enumerate(kinds) if any(kind in SOCIAL for kind in group)]
    for wanted in ([0], social):
        fit = [run for run in outer if max(run.rooms) in wanted]
        if fit:
            return _opening(rng, fit[int(rng.integers(len(fit)))], "entrance", 950, 0, 2100)
    return None


def _windows(rng: np.random.Generator, kinds: list[list[str]], run: _Run, entrance: Opening) -> list[Opening]:
    kind = kinds[max(run.rooms)][0]
    length = run.high - run.low
    if min(run.rooms) != _OUTSIDE or kind == "storage" or rng.random() < 0.1:
        return []
    if kind == "bath":
        width, bottom, top = 600, 1300, 2000
    elif kind == "kitchen":
        width, bottom, top = int(rng.integers(10, 16)) * 100, 1100, 2100
    else:
        width, bottom, top = int(rng.integers(9, 19)) * 100, int(rng.choice([500, 800, 900])), 2150
    count = min(2 if kind != "bath" else 1, (length - 600) // (width + 700))
    windows = []
    for k in range(count):
        middle = run.low + length * (2 * k + 1) // (2 * count) // 10 * 10
        low, high = (middle - width // 2) / 1000, (middle + width // 2) / 1000
        same = (run.axis, run.at / 1000) == (entrance.axis, entrance.at)
        if same and low < entrance.high + 0.35 and high > entrance.low - 0.35:
            continue
        windows.append(Opening("window", run.rooms, run.axis, run.at / 1000, low, high, bottom / 1000, top / 1000))
    return windows


def _limit_per_room(rng: np.random.Generator, windows: list[Opening], most: int) -> list[Opening]:
    """A random choice of windows with at most `most` per room."""
    kept: list[Opening] = []
    for k in rng.permutation(len(windows)):
        if sum(max(window.rooms) == max(windows[k].rooms) for window in kept) < most:
            kept.append(windows[k])
    return kept


def _thick_grid(cells: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The plan with wall thickness on an uneven grid: lines in x and y, and the room of each cell, wall or outside."""
    lines = [np.unique((axis[:, None] + np.array([-_OUTER, -_HALF, _HALF, _OUTER])).ravel()) for axis in (xs, ys)]
    middles = [(line[:-1] + line[1:]) / 2 for line in lines]

    def around(reach: int) -> np.ndarray:
        places = [
            np.stack([np.searchsorted(axis, middle + shift, side="right") for shift in (-reach, 0, reach)])
            for axis, middle in zip((xs, ys), middles, strict=True)
        ]
        return cells[places[0][:, None, :, None], places[1][None, :, None, :]].reshape(9, *map(len, middles))

    near, far = around(_HALF), around(_OUTER)
    fine = np.where((far == _OUTSIDE).all(0), _OUTSIDE, _WALL)
    return lines[0], lines[1], np.where((near == near[0]).all(0) & (near[0] >= 0), near[0], fine)


def _walls(fine: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> list[Wall]:
    walls = []
    for axis, grid, across, along in ((0, fine, xs, ys), (1, fine.T, ys, xs)):
        padded = np.pad(grid, ((1, 1), (0, 0)), constant_values=_OUTSIDE)
        for k, at in enumerate(across):
            before, after = padded[k], padded[k + 1]
            for sign, behind, front in ((1, before, after), (-1, after, before)):
                keys = np.where((behind == _WALL) & (front != _WALL), front, _WALL).tolist()
                for start, end in _equal_ranges(keys):
                    if keys[start] != _WALL:
                        low, high = along[start] / 1000, along[end] / 1000
                        walls.append(Wall(keys[start], axis, sign, float(at) / 1000, float(low), float(high)))
    return walls


def _inner_rect(cells: np.ndarray, xs: np.ndarray, ys: np.ndarray, rect) -> tuple[int, int, int, int]:
    """A room's rectangle minus half a wall on each side with a wall."""
    x0, y0, x1, y1 = rect
    i0, i1 = np.searchsorted(xs, (x0, x1)) + 1
    j0, j1 = np.searchsorted(ys, (y0, y1)) + 1
    own = cells[i0, j0]
    left, right = (cells[i0 - 1, j0:j1] != own).any(), (cells[i1, j0:j1] != own).any()
    below, above = (cells[i0:i1, j0 - 1] != own).any(), (cells[i0:i1, j1] != own).any()
    return x0 + _HALF * left, y0 + _HALF * below, x1 - _HALF * right, y1 - _HALF * above


def _rectangles(mask: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> list[tuple[int, int, int, int]]:
    """The true cells as a few disjoint rectangles."""
    remaining = mask.copy()
    rects = []
    for i, j in zip(*np.nonzero(mask), strict=True):
        if not remaining[i, j]:
            continue
        row = remaining[i, j:]
        height = len(row) if row.all() else int(np.argmin(row))
        column = np.asarray(remaining[i:, j : j + height].all(1))
        width = len(column) if column.all() else int(np.argmin(column))
        remaining[i : i + width, j : j + height] = False
        rects.append((xs[i], ys[j], xs[i + width], ys[j + height]))
    return rects
