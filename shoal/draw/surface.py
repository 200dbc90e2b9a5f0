"""Lines, shapes and text in world coordinates."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from shoal.core.errors import unknown

COLORS = {
    "paper": (250, 250, 247),
    "ink": (38, 50, 72),
    "gray": (168, 174, 184),
    "orange": (230, 126, 52),
    "green": (60, 150, 100),
    "blue": (58, 118, 190),
    "red": (200, 62, 58),
}

Point = tuple[float, float]

Part = tuple[float, float, float, float]
"""A part of a picture: left, top, right, bottom [pixels from the top left]."""


class Surface:
    """A picture of one env. Coordinates are the world's, y points up; `view` selects the visible part."""

    sin = staticmethod(math.sin)
    cos = staticmethod(math.cos)

    def __init__(self, width: int = 320, height: int = 240, smooth: int = 2, memory: dict[str, Any] | None = None):
        self.width, self.height, self.smooth = width, height, smooth
        self.memory = {} if memory is None else memory
        """Data that the pictures of one env share; a recording clears it when an episode begins."""
        self.image = Image.new("RGB", (width * smooth, height * smooth), COLORS["paper"])
        self.draw = ImageDraw.Draw(self.image)
        self.view(-1.0, 1.0, -1.0, 1.0)

    def view(self, left: float, right: float, bottom: float, top: float, part: Part | None = None) -> None:
        """Select the visible part of the world: as large as fits, centered in the picture or in a `part` of it."""
        x0, y0, x1, y1 = self._pixels(part)
        self.scale = min((x1 - x0) / (right - left), (y1 - y0) / (top - bottom))
        x, y = (x0 + x1) / 2, (y0 + y1) / 2
        self.origin = (x - self.scale * (left + right) / 2, y + self.scale * (bottom + top) / 2)

    def _pixels(self, part: Part | None) -> Part:
        """A part of the picture in pixels of the oversampled image."""
        left, top, right, bottom = part or (0, 0, self.width, self.height)
        return left * self.smooth, top * self.smooth, right * self.smooth, bottom * self.smooth

    def at(self, point: Point) -> Point:
        """The pixel of a point of the world."""
        return self.origin[0] + self.scale * point[0], self.origin[1] - self.scale * point[1]

    def line(self, points: Sequence[Point], color: str, width: float) -> None:
        """Draw a line through points."""
        size = max(1, round(self.scale * width))
        self.draw.line([self.at(p) for p in points], self.rgb(color), size, joint="curve")

    def polygon(self, points: Sequence[Point], color: str) -> None:
        """Draw a filled polygon."""
        self.draw.polygon([self.at(p) for p in points], self.rgb(color))

    def box(self, center: Point, width: float, height: float, color: str) -> None:
        """Draw a filled rectangle."""
        x, y = center
        w, h = width / 2, height / 2
        self.polygon([(x - w, y - h), (x + w, y - h), (x + w, y + h), (x - w, y + h)], color)

    def disc(self, center: Point, radius: float, color: str) -> None:
        """Draw a filled circle."""
        x, y = self.at(center)
        r = radius * self.scale
        self.draw.ellipse((x - r, y - r, x + r, y + r), self.rgb(color))

    def text(self, corner: tuple[int, int], text: str, color: str = "ink") -> int:
        """Draw text at a corner [pixels from the top left] and return its width [pixels]."""
        font = _font(12 * self.smooth)
        self.draw.text((corner[0] * self.smooth, corner[1] * self.smooth), text, self.rgb(color), font)
        return round(font.getlength(text) / self.smooth)

    def paste(self, picture: np.ndarray, part: Part | None = None) -> None:
        """Insert a picture [height, width, 3]: as large as fits, centered in this picture or in a `part` of it."""
        x0, y0, x1, y1 = self._pixels(part)
        scale = min((x1 - x0) / picture.shape[1], (y1 - y0) / picture.shape[0])
        w, h = round(picture.shape[1] * scale), round(picture.shape[0] * scale)
        resampling = Image.Resampling.BOX if scale >= 1 else Image.Resampling.LANCZOS
        self.image.paste(
            Image.fromarray(picture).resize((w, h), resampling), (int(x0 + x1 - w) // 2, int(y0 + y1 - h) // 2)
        )

    def array(self) -> np.ndarray:
        """The finished picture [height, width, 3]."""
        return np.asarray(self.image.reduce(self.smooth))

    @staticmethod
    def rgb(color: str) -> tuple[int, ...]:
        """The RGB values of a color's name or of #rrggbb."""
        if color.startswith("#"):
            return ImageColor.getrgb(color)
        if color not in COLORS:
            raise unknown("color", color, COLORS)
        return COLORS[color]


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)
