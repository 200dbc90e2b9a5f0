"""Floor plans of houses: rooms around a corridor or hall, walls with thickness, doors and windows.

Rooms are unions of rectangles on lines 0.2 m apart. A wall's middle runs along such a line: half an inner wall's
thickness belongs to each side, and outer walls are thicker outwards. Every random draw comes from the seed.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shoal.scene.house.sketch import AREAS, STEP, Rect, Space, sketch

HALF_WALL = 0.06
"""Half the thickness of an inner wall, meters."""
OUTER_WALL = 0.2
"""How far outer walls reach outwards from their line, meters."""

CENTRAL = ("corridor", "hall")
WORLDLY = ("living", "dining", "kitchen")
"""Kinds that people walk through."""


@dataclass(frozen=True)
class Zone:
    """A rectangle of a room with one use; an open-plan room has several."""

    kind: str
    rect: Rect
    """Between the walls; where the room goes on it reaches to the next zone."""


@dataclass(frozen=True)
class Room:
    """A space between walls; its first zone names it."""

    name: str
    zones: tuple[Zone, ...]
    rects: tuple[Rect, ...]
    """All floor between the walls, as rectangles that do not overlap."""

    @property
    def kind(self) -> str:
        """The use of the first zone: living, kitchen, bedroom, ..."""
        return self.zones[0].kind

    @property
    def area(self) -> float:
        """Square meters between the walls."""
        return sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in self.rects)


@dataclass(frozen=True)
class Opening:
    """A hole in a wall: a door between two rooms, or a window or the entrance, which lead outside."""

    kind: str
    """"door", "window" or "entrance"."""
    rooms: tuple[int, int]
    """The rooms below and above the wall's line; -1 is outside."""
    axis: int
    """The axis the wall crosses: 0 when it runs along y, at a fixed x."""
    at: float
    """Where the wall's line is on that axis."""
    low: float
    high: float
    """From where to where along the wall."""
    bottom: float
    top: float
    """Meters above the floor."""


@dataclass(frozen=True)
class Wall:
    """One flat face of a wall, seen from a room (or from outside: room -1)."""

    room: int
    axis: int
    """The axis it faces along."""
    sign: int
    """+1 when it faces towards greater values of that axis."""
    at: float
    low: float
    high: float
    """From where to where along the other axis."""


@dataclass(frozen=True)
class Plan:
    """A floor plan: rooms, their walls' faces, and the openings between them."""

    building: str
    """"house" or "cabin"."""
    seed: int
    height: float
    """From floor to ceiling, meters."""
    rooms: tuple[Room, ...]
    openings: tuple[Opening, ...]
    walls: tuple[Wall, ...]
    floors: tuple[tuple[int, Rect], ...]
    """Room and rectangle, wall middle to wall middle: together they tile the house."""
    cover: tuple[Rect, ...]
    """The house with its outer walls, as rectangles that do not overlap."""
    bounds: Rect
    """Around the outer walls."""

    @property
    def doors(self) -> tuple[Opening, ...]:
        """The doorways between rooms."""
        return tuple(opening for opening in self.openings if opening.kind == "door")

    @property
    def area(self) -> float:
        """Square meters, wall middle to wall middle."""
        return sum((x1 - x0) * (y1 - y0) for _, (x0, y0, x1, y1) in self.floors)

    def room_at(self, x: float, y: float) -> int:
        """The room over this point of the floor, -1 in walls and outside."""
        for number, room in enumerate(self.rooms):
            for x0, y0, x1, y1 in room.rects:
                if x0 <= x <= x1 and y0 <= y <= y1:
                    return number
        return -1


def house_plan(seed: int, building: str = "house") -> Plan:
    """The floor plan of the house or cabin `seed`."""
    rng = np.random.Generator(np.random.Philox(key=np.array([seed, 1], np.uint64)))
    while True:
        spaces = sketch(rng, building)
        plan = _drawn(building, seed, rng, spaces) if spaces else None
        if plan:
            return plan


# From here to the plan all lengths are whole millimeters, so that equal places are equal numbers.
_HALF, _OUTER, _WALL, _OUTSIDE = round(HALF_WALL * 1000), round(OUTER_WALL * 1000), -2, -1


@dataclass(frozen=True)
class _Run:
    """A straight stretch of wall between two rooms."""

    rooms: tuple[int, int]
    axis: int
    at: int
    low: int
    high: int


def _drawn(building: str, seed: int, rng: np.random.Generator, spaces: list[Space]) -> Plan | None:
    units = [
        (kind, [tuple(round(v / STEP) * round(STEP * 1000) for v in rect) for rect in rects]) for kind, rects in spaces
    ]
    area = sum((x1 - x0) * (y1 - y0) for _, rects in units for x0, y0, x1, y1 in rects) / 1e6
    if not AREAS[building][0] <= area <= AREAS[building][1]:
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
        groups = _opened(rng, [kind for kind, _ in units], _runs(cells, xs, ys))
    lookup = np.full(len(units) + 1, _OUTSIDE)  # The last entry stands for outside, -1.
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
        # Two in all; with outer walls all around it would have more than a house's rooms.
        windows = _some(rng, windows, 2 // len(groups))
        if len(windows) < 2:
            return None
    fine_x, fine_y, fine = _fine(cells, xs, ys)
    rooms = []
    names: dict[str, int] = {}
    for number, group in enumerate(groups):
        kind = units[group[0]][0]
        names[kind] = names.get(kind, 0) + 1
        zones = [Zone(units[k][0], _meters(_between(cells, xs, ys, rect))) for k in group for rect in units[k][1]]
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


def _stretches(keys: list) -> list[tuple[int, int]]:
    """Where equal neighbors begin and end."""
    edges = [0] + [k for k in range(1, len(keys)) if keys[k] != keys[k - 1]] + [len(keys)]
    return list(pairwise(edges))


def _runs(cells: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> list[_Run]:
    runs = []
    for axis, grid, across, along in ((0, cells, xs, ys), (1, cells.T, ys, xs)):
        for k, at in enumerate(across):
            keys = list(zip(grid[k].tolist(), grid[k + 1].tolist(), strict=True))
            for start, end in _stretches(keys):
                if keys[start][0] != keys[start][1]:
                    runs.append(_Run(keys[start], axis, int(at), int(along[start - 1]), int(along[end - 1])))
    return runs


def _opened(rng: np.random.Generator, kinds: list[str], runs: list[_Run]) -> list[list[int]]:
    """The rooms as groups without walls between them: now and then living, dining and kitchen are one space."""
    groups = [[k] for k in range(len(kinds))]
    for run in runs:
        a, b = run.rooms
        if min(a, b) < 0 or run.high - run.low < 2400 or kinds[a] == kinds[b]:
            continue
        worldly = kinds[a] in WORLDLY and kinds[b] in WORLDLY
        if worldly and rng.random() < 0.45:
            first, second = (next(group for group in groups if k in group) for k in (a, b))
            if first is not second and len(first) + len(second) <= 2:
                first.extend(second)
                groups.remove(second)
    return [sorted(group, key=lambda k: WORLDLY.index(kinds[k]) if kinds[k] in WORLDLY else 0) for group in groups]


def _cost(through: str, to: str) -> float:
    """How odd a door is that leads to one kind of room only through another."""
    if through in CENTRAL:
        return 1.0
    if through in WORLDLY:
        return {"bath": 4.0, "bedroom": 3.0}.get(to, 1.5)
    if through == "bedroom":
        return {"bath": 2.5, "storage": 3.0, "study": 5.0}.get(to, 12.0)
    return 5.0 if through == "study" and to in ("storage", "bath") else 20.0


def _doors(rng: np.random.Generator, kinds: list[list[str]], runs: list[_Run]) -> list[Opening] | None:
    """Doors that reach every room on the least odd way, and some more; None when a way would be too odd."""
    inner = [run for run in runs if min(run.rooms) >= 0 and run.high - run.low >= 1200]
    best = [0.0] + [np.inf] * (len(kinds) - 1)
    way: list[_Run | None] = [None] * len(kinds)
    for _ in kinds:
        for run in inner:
            for a, b in (run.rooms, run.rooms[::-1]):
                cost = best[a] + min(_cost(through, to) for through in kinds[a] for to in kinds[b])
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
        likely = 0.4 if a in (*WORLDLY, *CENTRAL) and b in (*WORLDLY, *CENTRAL) else 0.0
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
    """A hole somewhere in the run; doors stay near a corner of the room more often than not."""
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
    worldly = [number for number, group in enumerate(kinds) if any(kind in WORLDLY for kind in group)]
    for wanted in ([0], worldly):
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


def _some(rng: np.random.Generator, windows: list[Opening], most: int) -> list[Opening]:
    """The windows, but no more than so many in any room."""
    kept: list[Opening] = []
    for k in rng.permutation(len(windows)):
        if sum(max(window.rooms) == max(windows[k].rooms) for window in kept) < most:
            kept.append(windows[k])
    return kept


def _fine(cells: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The plan with thick walls on a grid of uneven lines: the room of each cell, or wall, or outside."""
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
                for start, end in _stretches(keys):
                    if keys[start] != _WALL:
                        low, high = along[start] / 1000, along[end] / 1000
                        walls.append(Wall(keys[start], axis, sign, float(at) / 1000, float(low), float(high)))
    return walls


def _between(cells: np.ndarray, xs: np.ndarray, ys: np.ndarray, rect) -> tuple[int, int, int, int]:
    """A room's rectangle less half a wall on each side that has one."""
    x0, y0, x1, y1 = rect
    i0, i1 = np.searchsorted(xs, (x0, x1)) + 1
    j0, j1 = np.searchsorted(ys, (y0, y1)) + 1
    own = cells[i0, j0]
    left, right = (cells[i0 - 1, j0:j1] != own).any(), (cells[i1, j0:j1] != own).any()
    below, above = (cells[i0:i1, j0 - 1] != own).any(), (cells[i0:i1, j1] != own).any()
    return x0 + _HALF * left, y0 + _HALF * below, x1 - _HALF * right, y1 - _HALF * above


def _rectangles(mask: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> list[tuple[int, int, int, int]]:
    """The true cells as few rectangles that do not overlap."""
    left = mask.copy()
    rects = []
    for i, j in zip(*np.nonzero(mask), strict=True):
        if not left[i, j]:
            continue
        row = left[i, j:]
        height = len(row) if row.all() else int(np.argmin(row))
        column = left[i:, j : j + height].all(1)
        width = len(column) if column.all() else int(np.argmin(column))
        left[i : i + width, j : j + height] = False
        rects.append((xs[i], ys[j], xs[i + width], ys[j + height]))
    return rects
