"""The taste of a house: its colors, and how finely and how variously one piece of furniture is made."""

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
CLOTHS: tuple[Color, ...] = (
    (0.45, 0.52, 0.6), (0.72, 0.68, 0.6), (0.6, 0.3, 0.25), (0.35, 0.45, 0.38), (0.85, 0.8, 0.72), (0.75, 0.55, 0.3),
    (0.3, 0.33, 0.42), (0.55, 0.5, 0.52), (0.8, 0.62, 0.58), (0.4, 0.56, 0.6),
)  # fmt: skip


@dataclass(frozen=True)
class Taste:
    """A few woods and cloths that go through one house."""

    woods: tuple[Color, ...]
    cloths: tuple[Color, ...]


def house_taste(rng: np.random.Generator) -> Taste:
    """Two woods and four cloths, drawn once per house."""
    woods, cloths = rng.permutation(len(WOODS))[:2], rng.permutation(len(CLOTHS))[:4]
    return Taste(tuple(WOODS[k] for k in woods), tuple(CLOTHS[k] for k in cloths))


@dataclass(frozen=True)
class Style:
    """How one piece is made. Shapes and colors are drawn before anything whose count depends on the fineness."""

    rng: np.random.Generator
    fine: float
    """Fineness: 1 is usual, near 0 leaves plain boxes; segments along each curve grow with it."""
    taste: Taste

    def n(self, usual: float, least: int = 1) -> int:
        """Segments of a curve at this fineness."""
        return steps(self.fine, usual, least)

    def wood(self) -> Color:
        """One of the house's woods."""
        return self.taste.woods[int(self.rng.integers(len(self.taste.woods)))]

    def cloth(self) -> Color:
        """One of the house's cloths."""
        return self.taste.cloths[int(self.rng.integers(len(self.taste.cloths)))]

    def pick(self, count: int) -> int:
        """A number from 0 to `count` - 1."""
        return int(self.rng.integers(count))


def shade(color: Color, factor: float) -> Color:
    """The color made darker (below 1) or lighter, within what can be shown."""
    red, green, blue = (min(1.0, max(0.0, c * factor)) for c in color)
    return red, green, blue
