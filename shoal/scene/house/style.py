"""Colors of a house, and the random variation and tessellation of one piece of furniture."""

from dataclasses import dataclass

import numpy as np

from shoal.scene.house.shapes import Color, steps

WHITE: Color = (0.96, 0.95, 0.93)
STEEL: Color = (0.72, 0.73, 0.75)
BLACK: Color = (0.1, 0.1, 0.11)
BRASS: Color = (0.8, 0.66, 0.38)
WOODS: tuple[Color, ...] = (
    (0.86, 0.66, 0.45), (0.72, 0.5, 0.32), (0.55, 0.36, 0.22), (0.93, 0.8, 0.62), (0.45, 0.3, 0.2), (0.8, 0.72, 0.62),
    (0.95, 0.94, 0.92), (0.32, 0.24, 0.2),
)  # fmt: skip
FABRICS: tuple[Color, ...] = (
    (0.45, 0.52, 0.6), (0.72, 0.68, 0.6), (0.6, 0.3, 0.25), (0.35, 0.45, 0.38), (0.85, 0.8, 0.72), (0.75, 0.55, 0.3),
    (0.3, 0.33, 0.42), (0.55, 0.5, 0.52), (0.8, 0.62, 0.58), (0.4, 0.56, 0.6),
)  # fmt: skip


@dataclass(frozen=True)
class Palette:
    """The wood and fabric colors used in one house."""

    woods: tuple[Color, ...]
    fabrics: tuple[Color, ...]


def house_palette(rng: np.random.Generator) -> Palette:
    """Draw two woods and four fabrics, once per house."""
    woods, fabrics = rng.permutation(len(WOODS))[:2], rng.permutation(len(FABRICS))[:4]
    return Palette(tuple(WOODS[k] for k in woods), tuple(FABRICS[k] for k in fabrics))


@dataclass(frozen=True)
class Style:
    """Variation of one piece. Shapes and colors are drawn before anything whose count depends on the fineness."""

    rng: np.random.Generator
    fine: float
    """Fineness: scales the segments of each curve; 1 is the default, near 0 only boxes remain."""
    palette: Palette

    def n(self, usual: float, least: int = 1) -> int:
        """Segments of a curve at this fineness, at least `least`."""
        return steps(self.fine, usual, least)

    def wood(self) -> Color:
        """A random wood of the house."""
        return self.palette.woods[int(self.rng.integers(len(self.palette.woods)))]

    def fabric(self) -> Color:
        """A random fabric of the house."""
        return self.palette.fabrics[int(self.rng.integers(len(self.palette.fabrics)))]

    def pick(self, count: int) -> int:
        """A random integer from 0 to `count` - 1."""
        return int(self.rng.integers(count))


def shade(color: Color, factor: float) -> Color:
    """The color times `factor`, clipped to 0 to 1."""
    red, green, blue = (min(1.0, max(0.0, c * factor)) for c in color)
    return red, green, blue
