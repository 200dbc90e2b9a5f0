"""Top-down maps: the ground of a scene, and paths, goals and agents on it."""

import math

import numpy as np
from PIL import Image, ImageFilter

from shoal.draw.canvas import Canvas
from shoal.draw.surface import Part
from shoal.nav.paths import HostGround
from shoal.nav.regions import MARGIN_FRACTION
from shoal.nav.walk import NO_FLOOR

AGENTS = ("orange", "blue", "green", "#c8a814")
"""Colors of agents, assigned in turn; similar to `cameras.BODY_COLORS`."""

FLOOR, NARROW, OBJECTS, EDGE = (255, 255, 255), (232, 235, 240), (206, 211, 218), (112, 122, 138)
"""RGB colors of open floor, floor beside obstacles, floor that is not walkable, and the outline of walkable floor."""

MARGIN = 0.4
"""Margin of a map around the walkable floor, in meters."""

PINHOLE = 7
"""Largest hole in an object that is filled, in cells."""

ARROW = np.array([(1.5, 0.0), (-1.0, 0.9), (-0.5, 0.0), (-1.0, -0.9)])
"""Corners of the arrow for an agent that faces along x, in units of its size."""


class TopDownMap:
    """The ground of one row from above, x to the right and y up; levels are drawn on top of one another."""

    def __init__(self, ground: HostGround):
        self.ground, self._walkable = ground, ground.walkable()
        standable = np.asarray(self._walkable.any(axis=0))
        if not standable.any():
            standable = np.ones_like(standable)
        rows, columns = np.flatnonzero(standable.any(1)), np.flatnonzero(standable.any(0))
        pad = round(MARGIN / ground.cell_size)
        depth, width = standable.shape
        self._rows = slice(max(0, rows[0] - pad), min(depth, rows[-1] + 1 + pad))
        self._columns = slice(max(0, columns[0] - pad), min(width, columns[-1] + 1 + pad))
        x0, y0 = ground.origin + ground.cell_size * np.array([self._columns.start, self._rows.start])
        x1, y1 = ground.origin + ground.cell_size * np.array([self._columns.stop, self._rows.stop])
        self.bounds = (float(x0), float(x1), float(y0), float(y1))
        """Left, right, bottom and top edge of the map [m]."""
        self._drawn: tuple[tuple[int, int], np.ndarray] | None = None

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the largest map within `width` x `height` pixels."""
        left, right, bottom, top = self.bounds
        scale = min(width / (right - left), height / (top - bottom))
        return max(1, round(scale * (right - left))), max(1, round(scale * (top - bottom)))

    def image(self, width: int, height: int) -> np.ndarray:
        """uint8 [height, width, 3]: the ground alone, as large as fits; edges are interpolated between cells."""
        size = self.size(width, height)
        if self._drawn is None or self._drawn[0] != size:
            self._drawn = size, self._draw(*size)
        return self._drawn[1]

    def _draw(self, width: int, height: int) -> np.ndarray:
        ground = self.ground
        standable = np.where(self._walkable, ground.clearance, 0.0).max(0)[self._rows, self._columns]
        there = (ground.height > NO_FLOOR).any(0)[self._rows, self._columns]
        # Fill pinholes in objects, where their tops are too steep or too low to be floor.
        whole = Image.fromarray(np.pad(there, PINHOLE).astype(np.uint8))
        for close in (ImageFilter.MaxFilter, ImageFilter.MinFilter):
            whole = whole.filter(close(2 * (PINHOLE // 2) + 1))
        there = np.asarray(whole)[PINHOLE:-PINHOLE, PINHOLE:-PINHOLE]

        def enlarged(cells: np.ndarray) -> np.ndarray:
            image = Image.fromarray(np.ascontiguousarray(cells[::-1], dtype=np.float32))
            return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))

        clear, there = enlarged(standable), enlarged(there)
        limit = ground.radius - MARGIN_FRACTION * ground.cell_size
        walkable = clear >= limit
        open_floor = np.clip((clear - limit) / 0.35, 0.0, 1.0)[..., None]
        image = np.full((height, width, 3), 250.0)
        image[..., 2] = 247.0
        image[there >= 0.5] = OBJECTS
        image = np.where(walkable[..., None], np.array(NARROW) + (np.array(FLOOR) - NARROW) * open_floor, image)
        edge = np.zeros_like(walkable)
        for axis in (0, 1):
            for turn in (1, -1):
                edge |= walkable & ~np.roll(walkable, turn, axis)
        image[edge] = EDGE
        return np.clip(image, 0, 255).astype(np.uint8)

    def draw_ground(self, canvas: Canvas, part: Part | None = None) -> None:
        """Draw the ground on a part of a canvas; canvas coordinates are meters of the scene afterwards."""
        canvas.view(*self.bounds, part)
        left, right, bottom, top = self.bounds
        (x0, y0), (x1, y1) = canvas.at((left, top)), canvas.at((right, bottom))
        image = self.image(round(x1 - x0), round(y1 - y0))
        canvas.paste(image, part)

    def draw_path(self, canvas: Canvas, points: np.ndarray, color: str, width: float = 2.5) -> None:
        """Draw a path [n, 2 or more], `width` pixels wide."""
        if len(points) > 1:
            canvas.line([(x, y) for x, y in points[:, :2]], color, width * canvas.smooth / canvas.scale)

    def draw_shortest_path(self, canvas: Canvas, points: np.ndarray, color: str) -> None:
        """Draw the shortest path as a light band, below the agent's path."""
        self.draw_path(canvas, points, lighten(canvas, color, 0.45), 6.0)
        for end in (points[0], points[-1]):
            canvas.disc((end[0], end[1]), 3.0 * canvas.smooth / canvas.scale, lighten(canvas, color, 0.45))

    def draw_start(self, canvas: Canvas, point: np.ndarray, color: str) -> None:
        """Draw the start as a ring."""
        pixel = canvas.smooth / canvas.scale
        for radius, tint in ((4.5, color), (2.5, "#ffffff")):
            canvas.disc((point[0], point[1]), radius * pixel, tint)

    def draw_goal(self, canvas: Canvas, point: np.ndarray, color: str) -> None:
        """Draw the goal as a target."""
        pixel = canvas.smooth / canvas.scale
        for radius, tint in ((8.0, color), (6.0, "#ffffff"), (4.0, color)):
            canvas.disc((point[0], point[1]), radius * pixel, tint)

    def draw_agent(self, canvas: Canvas, point: np.ndarray, yaw: float, color: str) -> None:
        """Draw an agent as an arrow along its yaw [rad]."""
        size = 6.5 * canvas.smooth / canvas.scale
        turn = np.array([[math.cos(yaw), -math.sin(yaw)], [math.sin(yaw), math.cos(yaw)]])
        for scale, tint in ((1.45, "#ffffff"), (1.0, color)):
            corners = np.asarray(point)[:2] + (scale * size * ARROW) @ turn.T
            canvas.polygon([(x, y) for x, y in corners], tint)


def lighten(canvas: Canvas, color: str, share: float) -> str:
    """A color mixed with white; `share` is the fraction of the color."""
    return "#" + "".join(f"{round(share * c + (1 - share) * 255):02x}" for c in canvas.rgb(color))
