"""Shortest paths on the host: the ground of a scene in NumPy, and the way down a field of distances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.nav.geodesic import UNREACHABLE, FieldMemory
from shoal.nav.ground import SLACK, SMALLEST_REGION, GroundMemory, cell_middles
from shoal.nav.walk import CLOSE

AROUND = np.array([(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1)])
"""Columns and rows from a cell to those around it, in the order of `walk.neighbor`."""


@dataclass(frozen=True)
class Floor:
    """The ground of one row of a ground memory, on the host; arrays are by storey, row and column of cells."""

    origin: np.ndarray
    """[2]: the corner of least x and y [m]."""
    cell: float
    """Side of a cell [m]."""
    radius: float
    climb: float
    height: np.ndarray
    """float32 [storey, row, column]: of the floor [m], NOWHERE where there is none."""
    clearance: np.ndarray
    """float32 [storey, row, column]: meters to the nearest obstacle."""
    region: np.ndarray
    """int32 [storey, row, column]: -1 where nobody can stand."""

    area: np.ndarray
    """float32 [storey, row, column]: square meters of the region."""

    @classmethod
    def of(cls, ground: GroundMemory, row: int) -> Floor:
        """The ground of a row that has been surveyed."""
        found, body = ground.found[row], ground.body
        width, depth, storeys = found.size
        area = np.where(found.region >= 0, found.area[found.region], 0.0)
        parts = (part.reshape(storeys, depth, width) for part in (found.height, found.clearance, found.region, area))
        return cls(found.origin[:2].astype(float), ground.cell, body.radius, body.climb, *parts)

    def of_column(self, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        """int [n]: the cell of each column x, y whose floor is nearest to height z, within a climb; -1 for none."""
        _, depth, width = self.height.shape
        inside = (x >= 0) & (y >= 0) & (x < width) & (y < depth)
        x, y = np.where(inside, x, 0), np.where(inside, y, 0)
        apart = np.abs(self.height[:, y, x] - z)
        s = apart.argmin(0)
        there = inside & (apart.min(0) <= self.climb + 1e-3)
        return np.where(there, (s * depth + y) * width + x, -1)

    def beside(self, cell: int) -> np.ndarray:
        """int [8]: the cells around one, on the floor that is reached by a step; -1 for none."""
        _, depth, width = self.height.shape
        y, x = divmod(cell % (depth * width), width)
        return self.of_column(x + AROUND[:, 0], y + AROUND[:, 1], np.full(8, self.height.flat[cell]))

    def around(self, cell: int) -> np.ndarray:
        """int [8]: the cells around one that an agent can go to, -1 for none; as `geodesic.find_links` has them."""
        region, clear = self.region.reshape(-1), self.clearance.reshape(-1)
        beside, least = self.beside(cell), self.radius - CLOSE
        near = np.where(beside >= 0, clear[beside], 0.0)

        def goes(k: int, other: int) -> bool:
            if other < 0 or region[other] != region[cell]:
                return False
            inside = int(clear[cell] >= least) + int(near[k] >= least)
            corners = [0 if AROUND[k, 0] > 0 else 1, 2 if AROUND[k, 1] > 0 else 3]
            if k < 4:
                across = [2, 3] if k < 2 else [0, 1]
                sides = np.concatenate([beside[across], self.beside(other)[across]])
                return inside > 0 or bool((clear[sides[sides >= 0]] >= least).any())
            if inside == 2:
                a, b, (c, d) = clear[cell], near[k], near[corners]
                return bool(max(c, d) >= least or (a * b - c * d) / (a + b - c - d) >= least)
            sides = beside[corners]
            return inside == 1 and bool((region[sides[sides >= 0]] >= 0).any())

        return np.array([other if goes(k, other) else -1 for k, other in enumerate(beside)])

    def middles(self, cells: np.ndarray) -> np.ndarray:
        """[n, 3]: the middles of cells, on their floor [m]."""
        return cell_middles(self.origin, self.cell, self.height, cells)

    def four(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int [4, n] and their weights: the cells whose middles lie around places [n, 3], -1 for none."""
        at = (places[:, :2] - self.origin) / self.cell - 0.5
        low = np.floor(at).astype(int)
        a, b = (at - low).T
        corners = [(0, 0), (1, 0), (0, 1), (1, 1)]
        cells = np.stack([self.of_column(low[:, 0] + i, low[:, 1] + j, places[:, 2]) for i, j in corners])
        weights = np.stack([(a if i else 1 - a) * (b if j else 1 - b) for i, j in corners])
        return cells, weights

    def straight(self, way: np.ndarray) -> np.ndarray | None:
        """[m, 3]: the straight line between the ends of a way [n, 3] that can be walked, on the floor, every half cell.

        None if something is in between. The line may come as near to obstacles as the way does at both ends: the
        middles of cells beside walls are a little nearer than an agent comes.
        """
        one, two = way[0], way[-1]
        count = math.ceil(float(np.linalg.norm((two - one)[:2])) / (0.5 * self.cell)) + 1
        share = np.linspace(0.0, 1.0, max(2, count))
        along = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(way[:, :2], axis=0), axis=1))])
        places = one + (two - one) * share[:, None]
        places[:, 2] = np.interp(share * along[-1], along, way[:, 2])
        cells, weights = self.four(places)
        clear = (np.where(cells >= 0, self.clearance.reshape(-1)[cells], 0.0) * weights).sum(0)
        least = max(self.radius - SLACK * self.cell, min(self.radius, clear[0], clear[-1]))
        at = np.floor((places[:, :2] - self.origin) / self.cell).astype(int)
        under = self.of_column(at[:, 0], at[:, 1], places[:, 2])
        if (clear < least - CLOSE).any() or (under < 0).any():
            return None
        places[1:-1, 2] = self.height.reshape(-1)[under[1:-1]]
        return places if (np.abs(np.diff(places[:, 2])) <= self.climb + 1e-3).all() else None

    def walkable(self) -> np.ndarray:
        """bool [storey, row, column]: floor that can be stood on, without the tops of things."""
        return (self.region >= 0) & (self.area >= min(SMALLEST_REGION, float(self.area.max())))


def shortest_path(floor: Floor, field: np.ndarray, place: Sequence[float], goal: Sequence[float]) -> np.ndarray | None:
    """[n, 3]: the corners of the shortest path from a place to a goal; None if there is no way.

    `field` uint16 [cells] holds millimeters along the floor to the goal. The path goes down the field from cell to
    cell and is then pulled taut: straight wherever an agent can walk straight.
    """
    start, end = np.asarray(place, float), np.asarray(goal, float)
    field = np.asarray(field)[: floor.height.size].astype(int)
    cells, _ = floor.four(start[None])
    near = cells[cells >= 0]
    near = near[field[near] != UNREACHABLE]
    if not len(near):
        return None
    away = np.linalg.norm(floor.middles(near) - start, axis=1)
    at = int(near[(field[near] / 1000 + away).argmin()])
    way = [at]
    while True:
        around = floor.around(at)
        around = around[around >= 0]
        lower = around[field[around] < field[at]]
        if not len(lower):
            break
        gain = (field[at] - field[lower]) / np.linalg.norm(floor.middles(lower) - floor.middles(np.array([at])), axis=1)
        at = int(lower[gain.argmax()])
        way.append(at)
    points = np.concatenate([start[None], floor.middles(np.array(way)), end[None]])
    taut = np.concatenate(_pull(floor, points))
    # Then backwards: corners that one direction cuts badly the other cuts well.
    pieces = [_slanted(piece, floor.climb) for piece in _pull(floor, taut[::-1])]
    return np.concatenate([piece[:-1] for piece in pieces] + [pieces[-1][-1:]])[::-1].copy()


def _pull(floor: Floor, points: np.ndarray) -> list[np.ndarray]:
    """Straight pieces of a way, each as long as an agent can walk straight past the points in between."""
    pieces, at, last = [], 0, len(points) - 1
    while at < last:
        reach, stride = at + 1, 1
        best = points[at : reach + 1]
        # Ever longer strides while the end is in sight, then ever shorter ones.
        while stride:
            to = min(reach + stride, last)
            piece = floor.straight(points[at : to + 1]) if to > reach else None
            if piece is not None:
                best, reach, stride = piece, to, 2 * stride
            else:
                stride //= 2
        pieces.append(best)
        at = reach
    return pieces


def _slanted(piece: np.ndarray, tolerance: float) -> np.ndarray:
    """A straight piece with only those of its points that its height needs, within a tolerance: stairs become ramps."""
    if len(piece) < 3:
        return piece
    share = np.linspace(0.0, 1.0, len(piece))
    off = np.abs(piece[:, 2] - (piece[0, 2] + (piece[-1, 2] - piece[0, 2]) * share))
    worst = int(off.argmax())
    if off[worst] <= tolerance:
        return piece[[0, -1]]
    return np.concatenate([_slanted(piece[: worst + 1], tolerance)[:-1], _slanted(piece[worst:], tolerance)])


def length_of(path: np.ndarray) -> float:
    """Meters along a path [n, 3]."""
    return float(np.linalg.norm(np.diff(path, axis=0), axis=1).sum())


def field_of(fields: FieldMemory, row: int, slot: int) -> np.ndarray:
    """uint16 [cells]: millimeters along the floor to a goal, on the host."""
    return fields.field[row, slot].cpu().numpy().view(np.uint16)
