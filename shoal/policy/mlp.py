"""MLP encoder. Any nn.Module that maps observations [batch, *shape] to features [batch, width] is an encoder."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}

Encoder = Callable[[tuple[int, ...]], nn.Module]
"""Factory of an encoder, called with the shape of one observation."""

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class MLP(nn.Module):
    """Fully connected layers, each followed by the activation; weights start orthogonal and biases at 0."""

    def __init__(self, shape: tuple[int, ...], hidden: tuple[int, ...], activation: str):
        super().__init__()
        sizes = [math.prod(shape), *hidden]
        layers: list[nn.Module] = []
        for a, b in pairwise(sizes):
            layers += [orthogonal(nn.Linear(a, b), math.sqrt(2.0)), ACTIVATIONS[activation]()]
        self.layers = nn.ModuleList(layers)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        x = observation.flatten(1)
        layers: list[Any] = list(self.layers)  # slicing a ModuleList is slow
        for layer, activation in zip(layers[::2], layers[1::2], strict=True):
            if isinstance(activation, nn.ReLU) and on_tensor_cores(x):
                operands = _padded(x, layer.weight, layer.bias)
                has_ones = operands[0].shape[1] > layer.in_features
                x = _LinearReLU.apply(*operands, has_ones)[..., : layer.out_features]
            else:
                x = activation(linear(x, layer.weight, layer.bias))
        return x


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A linear layer; for tensor cores, sizes are padded to multiples of eight."""
    if not on_tensor_cores(x):
        return F.linear(x, weight, bias)
    return F.linear(*_padded(x, weight, bias))[..., : weight.shape[0]]


def wide_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A linear layer in float32 even under autocast, for outputs whose small differences matter."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), weight, bias)


def on_tensor_cores(x: torch.Tensor) -> bool:
    """Whether products with x run in bf16 on a GPU."""
    return x.is_cuda and torch.is_autocast_enabled("cuda")


def _padded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """bf16 operands of a linear layer, padded to multiples of eight: x with ones, weights with zeros."""
    rows, columns = weight.shape
    more_rows, more_columns = -rows % 8, -columns % 8
    if more_columns:
        x, weight = F.pad(x, (0, more_columns), value=1.0), F.pad(weight, (0, more_columns))
    if more_rows:
        weight, bias = F.pad(weight, (0, 0, 0, more_rows)), F.pad(bias, (0, more_rows))
    return x.bfloat16(), weight.bfloat16(), bias.bfloat16()


class _LinearReLU(torch.autograd.Function):
    """A linear layer and ReLU in one pass over memory, the bottleneck of small layers.

    With `has_ones`, the last column of x is all ones, so the last column of the weight's gradient is the bias's.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, has_ones: bool) -> torch.Tensor:
        y = torch._addmm_activation(bias, x, weight.t())  # pyright: ignore[reportPrivateImportUsage]
        ctx.save_for_backward(x, weight, y)
        ctx.has_ones = has_ones
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        grad = torch.where(y > 0, gradients[0], 0)
        for_x = grad @ weight if ctx.needs_input_grad[0] else None
        for_weight = grad.t() @ x
        return for_x, for_weight, for_weight[:, -1] if ctx.has_ones else grad.sum(dim=0), None


def orthogonal(layer: Layer, gain: float) -> Layer:
    """Initialize a layer with orthogonal weights of a given gain and zero bias (Saxe et al. 2014)."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
