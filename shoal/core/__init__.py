"""Store, kernels, random numbers, spaces and the World contract: what every world stands on."""

from shoal.core.errors import ShoalError
from shoal.core.kernel_world import Each, KernelWorld
from shoal.core.maths import sincos, wrap_angle
from shoal.core.random import Random, integer, normal, uniform, uniform4
from shoal.core.spaces import Box, Discrete, MultiDiscrete, Space
from shoal.core.store import Field, Store
from shoal.core.world import EpisodeStatistics, Group, GroupOutputs, Outputs, World

__all__ = [
    "Box",
    "Discrete",
    "Each",
    "EpisodeStatistics",
    "Field",
    "Group",
    "GroupOutputs",
    "KernelWorld",
    "MultiDiscrete",
    "Outputs",
    "Random",
    "ShoalError",
    "Space",
    "Store",
    "World",
    "integer",
    "normal",
    "sincos",
    "uniform",
    "uniform4",
    "wrap_angle",
]
