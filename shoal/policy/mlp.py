"""Torsos: from an observation to features. Any nn.Module that maps [batch, *shape] to [batch, features] will do."""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
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
        self.layers = nn.Sequential(*layers)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layers(observation.flatten(1))


def orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    """Orthogonal weights of a given gain and zero bias (Saxe et al. 2014; the usual start for policy gradients)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
