"""Shoal's spaces of packed observations and actions."""

import math

import torch

from shoal.core.spaces import Box, Discrete, Mixed, MultiDiscrete, Space
from shoal.host.packing import ContinuousPart, DiscretePart, PackedAction, PackedObservation


def observation_space(observation: PackedObservation) -> Box:
    """The space of packed observations."""
    low, high = _bounds(observation.low, observation.high)
    return Box(observation.shape, low, high, dtype=getattr(torch, observation.dtype), parts=observation.parts)


def action_space(action: PackedAction) -> Space:
    """The space of packed actions."""
    spaces = [_part(part) for part in action.parts]
    if action.flat and isinstance(spaces[0], MultiDiscrete):
        return Discrete(spaces[0].nvec[0])
    if len(spaces) == 1:
        return spaces[0]
    if all(isinstance(space, MultiDiscrete) for space in spaces):
        return MultiDiscrete(tuple(n for part in action.parts if isinstance(part, DiscretePart) for n in part.nvec))
    return Mixed(tuple(spaces))


def _part(part: DiscretePart | ContinuousPart) -> MultiDiscrete | Box:
    return MultiDiscrete(part.nvec) if isinstance(part, DiscretePart) else Box(part.shape, part.low, part.high)


def _bounds(low: float, high: float) -> tuple[float, float]:
    """Bounds of an observation; beyond 1e30 they count as infinite, since float32 overflows at 3e38."""
    limit = 1e30
    return (low if low > -limit else -math.inf), (high if high < limit else math.inf)
