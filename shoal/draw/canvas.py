"""The canvas in world coordinates on which a world's `picture` draws."""

from collections.abc import Mapping

import numpy as np

from shoal.draw.layout import draw_agents
from shoal.draw.surface import Surface


class Canvas(Surface):
    """A picture of one env. Coordinates are the world's, y points up; `view` selects the visible part."""

    def agents(self, size: float, groups: Mapping[str, Mapping[str, np.ndarray]], step: int) -> None:
        """Draw agents in a square from 0 to `size`, with trails and a line of text, as for a world with `layout`.

        `groups` has the arrays of each group: `x` and `y` [agent], optionally `heading` [rad] and `alive`.
        """
        draw_agents(self, size, groups, step)
