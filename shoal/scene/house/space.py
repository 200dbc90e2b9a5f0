"""Placement of furniture in a room: finds where a piece fits at a wall or in the open and keeps the floor connected."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shoal.scene.house.plan import Opening, Plan, Wall, Zone
from shoal.scene.house.shell import holes_in
from shoal.scene.house.sketch import Rect

CELL = 0.1
"""Cell size of the grid for connectivity, meters."""
CLEARANCES = (0.26, 0.18)
"""Half sides of the two squares whose free floor must stay connected, meters. An agent of radius 0.2 m passes wherever
the first does; the second also covers nooks in which only the agent fits."""
MAX_LOST_AREA = 0.06
"""Maximum area of free floor that furniture may disconnect in one room, m²."""
DOORWAY_DEPTH = 0.85
"""Depth in front of a door that stays empty, meters."""


@dataclass(frozen=True)
class Item:
    """A placed piece of furniture. Pieces of equal kind, size and style share a mesh."""

    kind: str
    size: tuple[float, float, float]
    """Width, depth, height; meters."""
    x: float
    y: float
    z: float
    """Center of its lower side, meters."""
    yaw: float
    """Radians; at 0 it faces +y."""
    style: int
    """Seed of its surface."""
    room: int

    @property
    def rect(self) -> Rect:
        """Its footprint on the floor."""
        return _footprint(self.x, self.y, self.size[0], self.size[1], self.yaw)

    def beside(self, right: float, ahead: float) -> tuple[float, float]:
        """The point `right` meters along the piece's +x and `ahead` meters towards its front."""
        cos, sin = np.cos(self.yaw), np.sin(self.yaw)
        return self.x + right * cos - ahead * sin, self.y + right * sin + ahead * cos


def _footprint(x: float, y: float, width: float, depth: float, yaw: float) -> Rect:
    cos, sin = abs(np.cos(yaw)), abs(np.sin(yaw))
    half_x, half_y = (width * cos + depth * sin) / 2, (width * sin + depth * cos) / 2
    return x - half_x, y - half_y, x + half_x, y + half_y


class Space:
    """A room during furnishing: the placed items, occupied floor and walls, and the connectivity of the floor."""

    def __init__(self, plan: Plan, number: int, rng: np.random.Generator):
        self.plan, self.number, self.rng = plan, number, rng
        self.room = plan.rooms[number]
        self.walls = [wall for wall in plan.walls if wall.room == number]
        self.holes = {wall: holes_in(plan, wall) for wall in self.walls}
        self.items: list[Item] = []
        self.blocked: list[Rect] = []
        self.hung: list[tuple[Wall, float, float, float, float]] = []
        self.doorways: dict[Opening, Rect] = {}
        self.entries: list[tuple[float, float]] = []
        for wall in self.walls:
            for o in self.holes[wall]:
                if o.kind != "window":
                    self.doorways[o] = _floor_strip(wall, o.low - 0.05, o.high + 0.05, DOORWAY_DEPTH)
                    x0, y0, x1, y1 = _floor_strip(wall, o.low, o.high, 0.7)
                    self.entries.append(((x0 + x1) / 2, (y0 + y1) / 2))
        self._make_grid()

    def style(self) -> int:
        """A random seed for the surface of a piece."""
        return int(self.rng.integers(1 << 31))

    def windows(self, wall: Wall) -> list[Opening]:
        """The windows in a wall face."""
        return [o for o in self.holes[wall] if o.kind == "window"]

    # -- Free floor --------------------------------------------------------------------------------------------------

    def _make_grid(self) -> None:
        rects = np.array(self.room.rects)
        x0, y0 = rects[:, 0].min(), rects[:, 1].min()
        x1, y1 = rects[:, 2].max(), rects[:, 3].max()
        self.grid_x = np.arange(x0 + CELL / 2, x1, CELL)
        self.grid_y = np.arange(y0 + CELL / 2, y1, CELL)
        self.free = [self._free_cells(clearance) for clearance in CLEARANCES]

    def _free_cells(self, clearance: float) -> np.ndarray:
        """bool [X, Y]: cells where a square of half side `clearance` meters lies between the walls."""
        free = np.ones((len(self.grid_x), len(self.grid_y)), bool)
        for dx in (-clearance, 0, clearance):
            for dy in (-clearance, 0, clearance):
                inside = np.zeros_like(free)
                for a, b, c, d in self.room.rects:
                    in_x = (self.grid_x + dx >= a) & (self.grid_x + dx <= c)
                    in_y = (self.grid_y + dy >= b) & (self.grid_y + dy <= d)
                    inside |= in_x[:, None] & in_y[None]
                free &= inside
        return free

    def stays_connected(self, rects: Iterable[Rect]) -> bool:
        """Whether all doors and nearly all free floor stay connected if these rectangles are occupied too."""
        filled = [*self.blocked, *rects]
        left, low = self.grid_x[0], self.grid_y[0]
        spots = [(int((x - left) / CELL + 0.5), int((y - low) / CELL + 0.5)) for x, y in self.entries]
        for free, clearance in zip(self.free, CLEARANCES, strict=True):
            free = free.copy()
            for x0, y0, x1, y1 in filled:
                i0, i1 = np.searchsorted(self.grid_x, (x0 - clearance, x1 + clearance))
                j0, j1 = np.searchsorted(self.grid_y, (y0 - clearance, y1 + clearance))
                free[i0:i1, j0:j1] = False
            if not all(free[spot] for spot in spots):
                return False
            numbers = regions(free)
            home = numbers[spots[0]]
            if (
                any(numbers[spot] != home for spot in spots)
                or ((numbers > 0) & (numbers != home)).sum() * CELL**2 > MAX_LOST_AREA
            ):
                return False
        return True

    def fits(self, rects: np.ndarray, gap: float = 0.0, ignore: Iterable[Rect] = ()) -> np.ndarray:
        """bool [N]: which rectangles [N, 4] lie in the room and overlap neither furniture nor doorways."""
        size = (rects[:, 2] - rects[:, 0]) * (rects[:, 3] - rects[:, 1])
        inside = sum(_overlap(rects, np.array(room)) for room in self.room.rects)
        fit = np.asarray(inside) > size - 1e-6
        ignored = list(ignore)
        for other in self.blocked:
            if other not in ignored:
                fit &= _overlap(rects, np.array(other) + np.array([-gap, -gap, gap, gap])) < 1e-6
        for door in self.doorways.values():
            fit &= _overlap(rects, np.array(door)) < 1e-6
        return fit

    # -- Placing -----------------------------------------------------------------------------------------------------

    def put(self, kind: str, size, x: float, y: float, yaw: float, z: float = 0.0, solid=True, style=None) -> Item:
        """Place a piece without checks."""
        style = self.style() if style is None else style
        width, depth, height = (float(s) for s in size)
        item = Item(kind, (width, depth, height), float(x), float(y), float(z), float(yaw), style, self.number)
        self.items.append(item)
        if solid:
            self.blocked.append(item.rect)
        return item

    def try_place(self, kind: str, size, x: float, y: float, yaw: float, gap=0.0, ignore=(), style=None) -> Item | None:
        """Place a piece if it fits and the floor stays connected; None otherwise."""
        rect = _footprint(x, y, size[0], size[1], yaw)
        if not self.fits(np.array([rect]), gap, ignore)[0] or not self.stays_connected([rect]):
            return None
        return self.put(kind, size, x, y, yaw, style=style)

    def wall_spots(
        self, zone: Zone, size, ahead: float = 0.0, gap: float = 0.03
    ) -> list[tuple[float, float, float, Wall, float]]:
        """Free poses (x, y, yaw, wall, fraction along it) with the back at a wall of the zone."""
        width, depth, height = size
        found = []
        for wall in self.walls:
            low, high = _shared_range(wall, zone)
            if high - low < width + 0.02:
                continue
            inner = np.arange(low + width / 2 + 0.01, high - width / 2 - 0.01, 0.1)
            along = np.append(inner, high - width / 2 - 0.01)
            off = wall.at + wall.sign * (depth / 2 + 0.01)
            deep = wall.at + wall.sign * (depth + 0.01 + ahead)
            near, far = min(wall.at, deep), max(wall.at, deep)
            shrink = 1e-4 * np.ones_like(along)
            across = (near + shrink, far - shrink)
            sides = (along - width / 2, along + width / 2)
            columns = (
                (across[0], sides[0], across[1], sides[1])
                if wall.axis == 0
                else (sides[0], across[0], sides[1], across[1])
            )
            fit = self.fits(np.stack(columns, -1), gap)
            for o in self.windows(wall):
                if height > o.bottom - 0.02:
                    fit &= (sides[1] < o.low - 0.05) | (sides[0] > o.high + 0.05)
            for other, a, b, bottom, _ in self.hung:
                if other is wall and height > bottom:
                    fit &= (sides[1] < a) | (sides[0] > b)
            yaw = facing(wall)
            for u in along[fit]:
                x, y = (off, u) if wall.axis == 0 else (u, off)
                found.append((float(x), float(y), yaw, wall, float((u - low) / (high - low))))
        return found

    def place_at_wall(self, zone: Zone, kind: str, size, ahead=0.4, corner=0.0, gap=0.03, style=None) -> Item | None:
        """Place a piece with its back at a wall and `ahead` meters free in front; `corner` > 0 prefers corners."""
        places = self.wall_spots(zone, size, ahead, gap)
        if not places:
            return None
        score = self.rng.random(len(places))
        score += corner * np.array([abs(place[4] - 0.5) * 2 for place in places])
        for k in np.argsort(-score)[:: max(1, len(places) // 40)][:6]:
            x, y, yaw, _, _ = places[k]
            rect = _footprint(x, y, size[0], size[1], yaw)
            if self.stays_connected([rect]):
                return self.put(kind, size, x, y, yaw, style=style)
        return None

    def free_middle(self, zone: Zone, width: float, depth: float) -> tuple[float, float, float] | None:
        """A free pose (x, y, yaw) for a rectangle away from walls, near the middle of the zone."""
        x0, y0, x1, y1 = zone.rect
        best = None
        for yaw in (0.0, np.pi / 2):
            half = np.array([width, depth] if yaw == 0.0 else [depth, width]) / 2
            if x1 - x0 < 2 * half[0] or y1 - y0 < 2 * half[1]:
                continue
            x, y = np.meshgrid(np.linspace(x0 + half[0], x1 - half[0], 9), np.linspace(y0 + half[1], y1 - half[1], 9))
            x, y = x.ravel(), y.ravel()
            rects = np.stack([x - half[0], y - half[1], x + half[0], y + half[1]], -1)
            score = -np.hypot(x - (x0 + x1) / 2, y - (y0 + y1) / 2) + 0.5 * self.rng.random(len(x))
            score[~self.fits(rects)] = -np.inf
            k = int(score.argmax())
            if np.isfinite(score[k]) and (best is None or score[k] > best[0]):
                best = (float(score[k]), float(x[k]), float(y[k]), yaw)
        return None if best is None else best[1:]

    def hang(
        self, kind: str, size, bottom: float, wall: Wall, u: float, solid=False, style=None, gap=0.05
    ) -> Item | None:
        """Hang a piece on a wall at coordinate `u` along it if the place is free; None otherwise."""
        width, depth, height = size
        low, high = u - width / 2, u + width / 2
        if low < wall.low + 0.05 or high > wall.high - 0.05:
            return None
        if any(low < o.high + 0.1 and high > o.low - 0.1 for o in self.holes[wall]):
            return None
        for other, a, b, c, d in self.hung:
            if other is wall and low < b and high > a and bottom < d and bottom + height > c:
                return None
        x0, y0, x1, y1 = _floor_strip(wall, low, high, depth + 0.01)
        for item in self.items:
            a, b, c, d = item.rect
            behind = x0 < c and x1 > a and y0 < d and y1 > b
            if behind and item.z < bottom + height and item.z + item.size[2] > bottom - 0.02:
                return None
        if solid and not self.stays_connected([(x0, y0, x1, y1)]):
            return None
        self.hung.append((wall, low - gap, high + gap, bottom, bottom + height))
        off = wall.at + wall.sign * (depth / 2 + 0.006)
        x, y = (off, u) if wall.axis == 0 else (u, off)
        return self.put(kind, size, x, y, facing(wall), z=bottom, solid=solid, style=style)


def facing(wall: Wall) -> float:
    """The yaw of a piece whose back is at this wall, radians."""
    return float(-wall.sign * np.pi / 2) if wall.axis == 0 else (0.0 if wall.sign > 0 else float(np.pi))


def _floor_strip(wall: Wall, low: float, high: float, depth: float) -> Rect:
    """The floor along a range of a wall, `depth` meters wide."""
    near, far = sorted((wall.at, wall.at + wall.sign * depth))
    return (near, low, far, high) if wall.axis == 0 else (low, near, high, far)


def _shared_range(wall: Wall, zone: Zone) -> tuple[float, float]:
    """The range of the wall that bounds the zone; (0, 0) if there is none."""
    across, along = (zone.rect[0], zone.rect[2]), (zone.rect[1], zone.rect[3])
    if wall.axis == 1:
        across, along = along, across
    if abs(wall.at - across[0 if wall.sign > 0 else 1]) > 0.07:
        return 0.0, 0.0
    return max(wall.low, along[0]), min(wall.high, along[1])


def _overlap(rects: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Overlap of each rectangle [N, 4] with the other, m²."""
    wide = np.minimum(rects[:, 2], other[2]) - np.maximum(rects[:, 0], other[0])
    deep = np.minimum(rects[:, 3], other[3]) - np.maximum(rects[:, 1], other[1])
    return np.clip(wide, 0, None) * np.clip(deep, 0, None)


def regions(free: np.ndarray) -> np.ndarray:
    """int32 [X, Y]: labels of the 4-connected regions of free cells, from 1; 0 where not free."""
    edges = np.diff(np.pad(free, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    row, start = np.nonzero(edges == 1)
    end = np.nonzero(edges == -1)[1]
    touch = (row[:, None] + 1 == row) & (start[:, None] < end) & (start < end[:, None])
    parent = list(range(len(row)))

    def root(k: int) -> int:
        while parent[k] != k:
            parent[k] = k = parent[parent[k]]
        return k

    for a, b in np.argwhere(touch).tolist():
        parent[root(a)] = root(b)
    numbers = np.zeros(free.shape, np.int32)
    numbers[free] = np.repeat(np.array([root(k) + 1 for k in parent], np.int32), end - start)
    return numbers
