"""Shortest paths on the host: the ground of a scene in NumPy, and descent of a distance field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.nav.geodesic import UNREACHABLE, FieldMemory
from shoal.nav.ground import MIN_REGION_AREA, GroundMemory, cell_centers
from shoal.nav.regions import MARGIN_FRACTION
from shoal.nav.walk import CLEARANCE_TOLERANCE, NO_FLOOR

NEIGHBORS = np.array([(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1)])
"""Column and row offsets of the 8 neighbors, in the order of `walk.neighbor`."""


@dataclass(frozen=True)
class HostGround:
    """Copy of one scene's walkable-floor grid in CPU memory; arrays are [level, y, x]."""

    origin: np.ndarray
    """[2]: lower corner of the grid [m]."""
    cell_size: float
    """Side of a cell [m]."""
    radius: float
    """Radius of the agent [m]."""
    max_step_height: float
    """Highest step [m]."""
    height: np.ndarray
    """float32: height of the floor [m], NO_FLOOR where there is none."""
    clearance: np.ndarray
    """float32: distance to the nearest obstacle [m]."""
    region: np.ndarray
    """int32: connected region; -1 where no agent can stand."""
    area: np.ndarray
    """float32: area of the region [m²]."""

    @classmethod
    def of(cls, ground: GroundMemory, row: int) -> HostGround:
        """The ground of a surveyed row."""
        found, body = ground.surveys[row], ground.body
        width, depth, levels = found.dims
        area = np.where(found.region >= 0, found.area[found.region], 0.0)
        parts = (part.reshape(levels, depth, width) for part in (found.height, found.clearance, found.region, area))
        return cls(found.origin[:2].astype(float), ground.cell_size, body.radius, body.max_step_height, *parts)

    def cells_at(self, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        """int [n]: cell of each column (x, y) with the floor nearest to height z, within a step height; -1 for none."""
        _, depth, width = self.height.shape
        inside = (x >= 0) & (y >= 0) & (x < width) & (y < depth)
        x, y = np.where(inside, x, 0), np.where(inside, y, 0)
        apart = np.abs(self.height[:, y, x] - z)
        s = apart.argmin(0)
        there = inside & (apart.min(0) <= self.max_step_height + 1e-3)
        return np.where(there, (s * depth + y) * width + x, -1)

    def neighbors(self, cell: int) -> np.ndarray:
        """int [8]: neighbors of a cell, at most one step higher or lower; -1 for none."""
        _, depth, width = self.height.shape
        y, x = divmod(cell % (depth * width), width)
        return self.cells_at(x + NEIGHBORS[:, 0], y + NEIGHBORS[:, 1], np.full(8, self.height.flat[cell]))

    def links(self, cell: int) -> np.ndarray:
        """int [8]: neighbors of a cell that an agent can go to, -1 for none; the same as `geodesic.find_links`."""
        region, clear = self.region.reshape(-1), self.clearance.reshape(-1)
        beside, least = self.neighbors(cell), self.radius - CLEARANCE_TOLERANCE
        near = np.where(beside >= 0, clear[beside], 0.0)

        def is_linked(k: int, other: int) -> bool:
            if other < 0 or region[other] != region[cell]:
                return False
            inside = int(clear[cell] >= least) + int(near[k] >= least)
            corners = [0 if NEIGHBORS[k, 0] > 0 else 1, 2 if NEIGHBORS[k, 1] > 0 else 3]
            if k < 4:
                across = [2, 3] if k < 2 else [0, 1]
                sides = np.concatenate([beside[across], self.neighbors(other)[across]])
                return inside > 0 or bool((clear[sides[sides >= 0]] >= least).any())
            if inside == 2:
                a, b, (c, d) = clear[cell], near[k], near[corners]
                return bool(max(c, d) >= least or (a * b - c * d) / (a + b - c - d) >= least)
            sides = beside[corners]
            return inside == 1 and bool((region[sides[sides >= 0]] >= 0).any())

        return np.array([other if is_linked(k, other) else -1 for k, other in enumerate(beside)])

    def cell_centers(self, cells: np.ndarray) -> np.ndarray:
        """[n, 3]: centers of cells, on their floor [m]."""
        return cell_centers(self.origin, self.cell_size, self.height, cells)

    def bilinear_weights(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The four cells (int [4, n], -1 for none) around points [n, 3], and their weights [4, n]."""
        at = (points[:, :2] - self.origin) / self.cell_size - 0.5
        low = np.floor(at).astype(int)
        a, b = (at - low).T
        corners = [(0, 0), (1, 0), (0, 1), (1, 1)]
        cells = np.stack([self.cells_at(low[:, 0] + i, low[:, 1] + j, points[:, 2]) for i, j in corners])
        weights = np.stack([(a if i else 1 - a) * (b if j else 1 - b) for i, j in corners])
        return cells, weights

    def straight_line(self, path: np.ndarray) -> np.ndarray | None:
        """[m, 3]: points on the floor, every half cell, of the straight line between the ends of a path [n, 3].

        None if the line is blocked. Its clearance may be as small as that of both ends, since the centers of cells
        beside walls are slightly closer than an agent's radius.
        """
        one, two = path[0], path[-1]
        count = math.ceil(float(np.linalg.norm((two - one)[:2])) / (0.5 * self.cell_size)) + 1
        share = np.linspace(0.0, 1.0, max(2, count))
        along = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(path[:, :2], axis=0), axis=1))])
        points = one + (two - one) * share[:, None]
        points[:, 2] = np.interp(share * along[-1], along, path[:, 2])
        cells, weights = self.bilinear_weights(points)
        clear = (np.where(cells >= 0, self.clearance.reshape(-1)[cells], 0.0) * weights).sum(0)
        least = max(self.radius - MARGIN_FRACTION * self.cell_size, min(self.radius, clear[0], clear[-1]))
        at = np.floor((points[:, :2] - self.origin) / self.cell_size).astype(int)
        under = self.cells_at(at[:, 0], at[:, 1], points[:, 2])
        if (clear < least - CLEARANCE_TOLERANCE).any() or (under < 0).any():
            return None
        points[1:-1, 2] = self.height.reshape(-1)[under[1:-1]]
        return points if (np.abs(np.diff(points[:, 2])) <= self.max_step_height + 1e-3).all() else None

    def walkable(self) -> np.ndarray:
        """bool [level, row, column]: cells that agents can stand on, without small regions (tops of furniture)."""
        return (self.region >= 0) & (self.area >= min(MIN_REGION_AREA, float(self.area.max())))

    def image(self) -> np.ndarray:
        """uint8 [row, column, 3], one pixel per cell, y up: walkable floor light, other floor gray, no floor black."""
        image = np.zeros((*self.height.shape[1:], 3), np.uint8)
        image[(self.height > NO_FLOOR).any(0)] = (70, 70, 74)
        image[(self.region >= 0).any(0)] = (205, 220, 205)
        return image[::-1]


def shortest_path(
    ground: HostGround, field: np.ndarray, point: np.ndarray | Sequence[float], goal: np.ndarray | Sequence[float]
) -> np.ndarray | None:
    """Shortest path by descent of a distance field from cell to cell, followed by string pulling.

    Args:
        ground: ground of the scene.
        field: uint16 [cells], geodesic distance to the goal [mm].
        point: start [3], in meters.
        goal: goal [3], in meters.

    Returns:
        Corners of the path [n, 3], or None if there is no path.
    """
    start, end = np.asarray(point, float), np.asarray(goal, float)
    field = np.asarray(field)[: ground.height.size].astype(int)
    cells, _ = ground.bilinear_weights(start[None])
    near = cells[cells >= 0]
    near = near[field[near] != UNREACHABLE]
    if not len(near):
        return None
    away = np.linalg.norm(ground.cell_centers(near) - start, axis=1)
    at = int(near[(field[near] / 1000 + away).argmin()])
    path = [at]
    while True:
        around = ground.links(at)
        around = around[around >= 0]
        lower = around[field[around] < field[at]]
        if not len(lower):
            break
        gain = (field[at] - field[lower]) / np.linalg.norm(
            ground.cell_centers(lower) - ground.cell_centers(np.array([at])), axis=1
        )
        at = int(lower[gain.argmax()])
        path.append(at)
    points = np.concatenate([start[None], ground.cell_centers(np.array(path)), end[None]])
    pulled = np.concatenate(_pull_string(ground, points))
    # A second pass backwards shortens corners that the first one cut badly.
    pieces = [_simplify(piece, ground.max_step_height) for piece in _pull_string(ground, pulled[::-1])]
    return np.concatenate([piece[:-1] for piece in pieces] + [pieces[-1][-1:]])[::-1].copy()


def _pull_string(ground: HostGround, points: np.ndarray) -> list[np.ndarray]:
    """Straight pieces of a path, each as long as its straight line is not blocked."""
    pieces, at, last = [], 0, len(points) - 1
    while at < last:
        end, stride = at + 1, 1
        best = points[at : end + 1]
        # Double the stride while the line is free, then halve it.
        while stride:
            to = min(end + stride, last)
            piece = ground.straight_line(points[at : to + 1]) if to > end else None
            if piece is not None:
                best, end, stride = piece, to, 2 * stride
            else:
                stride //= 2
        pieces.append(best)
        at = end
    return pieces


def _simplify(piece: np.ndarray, tolerance: float) -> np.ndarray:
    """Remove points of a straight piece whose height is within `tolerance` of a straight line (Douglas-Peucker)."""
    if len(piece) < 3:
        return piece
    share = np.linspace(0.0, 1.0, len(piece))
    off = np.abs(piece[:, 2] - (piece[0, 2] + (piece[-1, 2] - piece[0, 2]) * share))
    worst = int(off.argmax())
    if off[worst] <= tolerance:
        return piece[[0, -1]]
    return np.concatenate([_simplify(piece[: worst + 1], tolerance)[:-1], _simplify(piece[worst:], tolerance)])


def path_length(path: np.ndarray) -> float:
    """Length of a path [n, 3], in meters."""
    return float(np.linalg.norm(np.diff(path, axis=0), axis=1).sum())


def host_field(fields: FieldMemory, row: int, slot: int) -> np.ndarray:
    """uint16 [cells], on the host: geodesic distance to a goal [mm]."""
    return fields.field[row, slot].cpu().numpy().view(np.uint16)
