"""Encoders of images [batch, C, H, W] or [batch, H, W, C]: the Nature CNN and the IMPALA ResNet.

Bytes are scaled from 0..255 to 0..1; floats are not scaled.
"""

import math

import torch
from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.spaces import Box
from shoal.policy.mlp import on_tensor_cores, orthogonal

NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel size and stride of each convolution."""

IMPALA = (16, 32, 32)
"""Channels of each section."""

RESIDUAL_BLOCKS = 2
"""Residual blocks per section of the IMPALA ResNet."""

MAX_DEPTH = 10.0
"""Depth is clipped here and divided by it [m]."""


def max_depth(space: Box) -> float:
    """Distance at which the depth of a space is clipped [m]: its bound, up to `MAX_DEPTH`."""
    return min(MAX_DEPTH, space.high)


def image_size(shape: tuple[int, ...], frames: int = 1) -> tuple[int, int, int]:
    """Channels, height and width of an observation after its `frames` stacked images are concatenated as channels.

    Stacked images [C, H, W] share the channel axis; images [H, W, C] are stacked along the height.
    """
    if not channels_come_last(shape, frames):
        return shape[0], shape[1], shape[2]
    return frames * shape[2], shape[0] // frames, shape[1]


def channels_come_last(shape: tuple[int, ...], frames: int = 1) -> bool:
    """Whether images are [H, W, C] with one, three or four channels, and not [C, H, W]."""
    return shape[2] in (1, 3, 4) and shape[0] // frames > shape[2]


class ImageInput(nn.Module):
    """Converts images to floats [batch, C, H, W], with stacked frames along the channels."""

    def __init__(self, shape: tuple[int, ...], frames: int):
        super().__init__()
        self.frames = frames
        self.channels_last = channels_come_last(shape, frames)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image
        if self.channels_last:
            x = x.unflatten(1, (self.frames, -1)).permute(0, 1, 4, 2, 3).flatten(1, 2)
        kind = torch.bfloat16 if on_tensor_cores(x) else torch.float32  # bf16 holds all of 0..255 exactly
        if x.is_cuda:  # tensor cores need channels last in memory; one pass converts type and layout
            x = x.to(kind, memory_format=torch.channels_last)
        else:
            x = x.to(kind)
        return x.mul_(1.0 / 255.0) if image.dtype == torch.uint8 else x


class Conv(nn.Conv2d):
    """A convolution that converts its weights to channels last for tensor cores, on every call.

    They cannot be stored that way: the optimizer keeps all parameters of a policy in one flat vector.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not input.is_cuda:
            return self._conv_forward(input, self.weight, self.bias)
        if self.can_fold(input):
            return self.folded(input)
        return self._conv_forward(input, self.weight.contiguous(memory_format=torch.channels_last), self.bias)

    def can_fold(self, input: torch.Tensor) -> bool:
        """Whether `folded` applies: fewer than 8 input channels, and sizes that are multiples of the stride."""
        side = self.stride[0]
        plain = self.padding == (0, 0) and self.dilation == (1, 1) and self.groups == 1 and self.stride == (side, side)
        whole = all(size % side == 0 for size in (*input.shape[2:], *self.kernel_size))
        return self.in_channels < 8 and side > 1 and plain and whole

    def folded(self, input: torch.Tensor) -> torch.Tensor:
        """The same convolution with stride 1: pixel unshuffle turns stride x stride pixels into channels."""
        image, weight = (
            nn.functional.pixel_unshuffle(x, self.stride[0]).contiguous(memory_format=torch.channels_last)
            for x in (input, self.weight)
        )
        return nn.functional.conv2d(image, weight, self.bias)


class NatureCNN(nn.Sequential):
    """Three convolutions and one linear layer (Mnih et al. 2015), for `frames` images stacked by channel."""

    takes_bytes = True
    min_side = 36

    def __init__(self, shape: tuple[int, ...], frames: int = 1, features: int = 512):
        channels, *sides = image_size(shape, frames)
        if min(sides) < self.min_side:
            raise ShoalError(
                f"The Nature CNN needs images of at least {self.min_side} x {self.min_side} pixels, got "
                f"{sides[0]} x {sides[1]}; use --encoder impala or --encoder mlp."
            )
        layers: list[nn.Module] = [ImageInput(shape, frames)]
        for out, kernel, stride in NATURE:
            layers += [orthogonal(Conv(channels, out, kernel, stride), math.sqrt(2.0)), nn.ReLU()]
            channels, sides = out, [(side - kernel) // stride + 1 for side in sides]
        super().__init__(*layers, *_feature_layers(channels * math.prod(sides), features))


class ImpalaResNet(nn.Sequential):
    """Three sections of a convolution, 2x pooling and two residual blocks (Espeholt et al. 2018).

    `width` multiplies the channels. Observations are `frames` images of any size, stacked by channel.
    """

    takes_bytes = True

    def __init__(self, shape: tuple[int, ...], frames: int = 1, width: int = 1, features: int = 256):
        channels, *sides = image_size(shape, frames)
        layers: list[nn.Module] = [ImageInput(shape, frames)]
        for out in (width * section for section in IMPALA):
            # Gain 1: no ReLU precedes this convolution.
            layers += [orthogonal(Conv(channels, out, 3, padding=1), 1.0), nn.MaxPool2d(3, 2, padding=1)]
            layers += [Residual(out) for _ in range(RESIDUAL_BLOCKS)]
            channels, sides = out, [-(-side // 2) for side in sides]
        super().__init__(*layers, nn.ReLU(), *_feature_layers(channels * math.prod(sides), features))


class Residual(nn.Module):
    """A residual block of two convolutions: x + f(x)."""

    def __init__(self, channels: int):
        super().__init__()
        first, second = (Conv(channels, channels, 3, padding=1) for _ in range(2))
        # Every block adds variance to the features; this gain lets all of them together about double it.
        gain = math.sqrt(2.0 / (RESIDUAL_BLOCKS * len(IMPALA)))
        self.layers = nn.Sequential(nn.ReLU(), orthogonal(first, math.sqrt(2.0)), nn.ReLU(), orthogonal(second, gain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def _feature_layers(inputs: int, features: int) -> list[nn.Module]:
    """Flattens the last channels and maps them to features."""
    return [nn.Flatten(), orthogonal(nn.Linear(inputs, features), math.sqrt(2.0)), nn.ReLU()]
