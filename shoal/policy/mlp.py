"""Torsos: from an observation to features. Any nn.Module that maps [batch, *shape] to [batch, features] will do."""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}

Torso = Callable[[tuple[int, ...]], nn.Module]
"""Makes a torso for the shape of one observation."""


class MLP(nn.Module):
    """Fully connected layers with one activation after each, orthogonal weights and zero biases."""

    def __init__(self, shape: tuple[int, ...], hidden: tuple[int, ...], activation: str):
        super().__init__()
        sizes = [math.prod(shape), *hidden]
        layers: list[nn.Module] = []
        for a, b in pairwise(sizes):
            layers += [orthogonal(nn.Linear(a, b), math.sqrt(2.0)), ACTIVATIONS[activation]()]
        self.layers = nn.ModuleList(layers)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        x = observation.flatten(1)
        for layer in self.layers:
            x = linear(x, layer.weight, layer.bias) if isinstance(layer, nn.Linear) else layer(x)
        return x


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A linear layer; for tensor cores, which want multiples of eight, sizes are padded with zeros."""
    rows, columns = weight.shape
    if not (x.is_cuda and torch.is_autocast_enabled("cuda")) or (rows % 8 == 0 and columns % 8 == 0):
        return F.linear(x, weight, bias)
    weight = F.pad(weight, (0, -columns % 8, 0, -rows % 8))
    return F.linear(F.pad(x, (0, -columns % 8)), weight, F.pad(bias, (0, -rows % 8)))[..., :rows]


def orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    """Orthogonal weights of a given gain and zero bias (Saxe et al. 2014; the usual start for policy gradients)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
