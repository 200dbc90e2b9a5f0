"""Store, kernels, random numbers, spaces and the World contract: what every world stands on."""

from shoal.core.kernel_world import Each, KernelWorld
from shoal.core.maths import sincos, sincos_small, wrap_angle
from shoal.core.random import Random, integer, normal, uniform, uniform4
from shoal.core.spaces import Box, Discrete, Mixed, MultiDiscrete, Space
from shoal.core.store import Field, Store
from shoal.core.world import EpisodeStatistics, Group, GroupOutputs, Outputs, Places, World
from shoal.core.wrappers import ActionRepeat, Apply, FrameStack, TimeLimit, TransformObservation, TransformReward
from shoal.errors import ShoalError

__all__ = [
    "ActionRepeat",
    "Apply",
    "Box",
    "Discrete",
    "Each",
    "EpisodeStatistics",
    "Field",
    "FrameStack",
    "Group",
    "GroupOutputs",
    "KernelWorld",
    "Mixed",
    "MultiDiscrete",
    "Outputs",
    "Places",
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
