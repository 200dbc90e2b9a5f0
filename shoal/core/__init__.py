"""Store, kernels, random numbers, spaces and the World contract: the base of every world.

Names are imported on first use: worker processes on the CPU import parts of this package without torch and Warp.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.core.author_stages import ForGroup
    from shoal.core.errors import ShoalError
    from shoal.core.kernel_world import KernelWorld
    from shoal.core.math_functions import sincos, sincos_small, wrap_angle
    from shoal.core.random import Random, integer, normal, uniform, uniform4
    from shoal.core.settings import Bounds
    from shoal.core.spaces import Box, Discrete, Mixed, MultiDiscrete, Space
    from shoal.core.store import Field, Store
    from shoal.core.world import EpisodeStatistics, Group, GroupOutputs, Layout2D, Outputs, World
    from shoal.core.wrappers import ActionRepeat, Apply, FrameStack, TimeLimit, TransformObservation, TransformReward

_MODULES = {
    "ActionRepeat": "wrappers",
    "Apply": "wrappers",
    "Bounds": "settings",
    "Box": "spaces",
    "Discrete": "spaces",
    "ForGroup": "author_stages",
    "EpisodeStatistics": "world",
    "Field": "store",
    "FrameStack": "wrappers",
    "Group": "world",
    "GroupOutputs": "world",
    "KernelWorld": "kernel_world",
    "Mixed": "spaces",
    "MultiDiscrete": "spaces",
    "Outputs": "world",
    "Layout2D": "world",
    "Random": "random",
    "ShoalError": "errors",
    "Space": "spaces",
    "Store": "store",
    "TimeLimit": "wrappers",
    "TransformObservation": "wrappers",
    "TransformReward": "wrappers",
    "World": "world",
    "integer": "random",
    "normal": "random",
    "sincos": "math_functions",
    "sincos_small": "math_functions",
    "uniform": "random",
    "uniform4": "random",
    "wrap_angle": "math_functions",
}
"""Public name -> module of this package."""

__all__ = [
    "ActionRepeat",
    "Apply",
    "Bounds",
    "Box",
    "Discrete",
    "EpisodeStatistics",
    "Field",
    "ForGroup",
    "FrameStack",
    "Group",
    "GroupOutputs",
    "KernelWorld",
    "Layout2D",
    "Mixed",
    "MultiDiscrete",
    "Outputs",
    "Random",
    "ShoalError",
    "Space",
    "Store",
    "TimeLimit",
    "TransformObservation",
    "TransformReward",
    "World",
    "integer",
    "normal",
    "sincos",
    "sincos_small",
    "uniform",
    "uniform4",
    "wrap_angle",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"shoal.core has no {name!r}; it offers: {', '.join(__all__)}")
    return getattr(importlib.import_module(f"shoal.core.{_MODULES[name]}"), name)
