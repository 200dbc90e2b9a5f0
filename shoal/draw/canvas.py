"""A small canvas in world coordinates: what a world's `picture` draws on."""

from collections.abc import Mapping

import numpy as np

from shoal.draw.layout import draw_agents
from shoal.draw.surface import Surface


class Canvas(Surface):
    """A picture of one env. Lengths are the world's; `view` says which part of it is shown; y points up."""

    def agents(self, size: float, crowds: Mapping[str, Mapping[str, np.ndarray]], step: int) -> None:
        """Agents in a square from 0 to `size`, with trails, and a line of text.

        `crowds` has for each group the arrays `x` and `y` [agent], perhaps `heading` [rad] and `alive`. This is what a
        world with `places` draws by itself.
        """
        draw_agents(self, size, crowds, step)
