"""encoders for images [batch, C, H, W], or [batch, H, W, C]: the Nature CNN and the IMPALA ResNet.

Bytes are scaled from 0..255 to 0..1 inside; floats are taken as they are.
"""

import math

import torch
from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.spaces import Box
from shoal.policy.mlp import on_tensor_cores, orthogonal

NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, side of the kernel and stride of each convolution."""

IMPALA = (16, 32, 32)
"""Channels of each section."""

BLOCKS = 2
"""Residual blocks of each section of the IMPALA ResNet."""

FAR = 10.0
"""Distances are cut off here, and become shares of it [m]."""


def far(seen: Box) -> float:
    """Where the distances of a space end [m]: at its bound, unless that is further away than they are looked at."""
    return min(FAR, seen.high)


def image_size(shape: tuple[int, ...], frames: int = 1) -> tuple[int, int, int]:
    """Channels, height and width of what is seen: `frames` images joined along their first axis."""
    if not channels_come_last(shape, frames):
        return shape[0], shape[1], shape[2]
    return frames * shape[2], shape[0] // frames, shape[1]


def channels_come_last(shape: tuple[int, ...], frames: int = 1) -> bool:
    """Whether images are [H, W, C] with one, three or four channels, as most programs keep them, and not [C, H, W]."""
    return shape[2] in (1, 3, 4) and shape[0] // frames > shape[2]


class Pixels(nn.Module):
    """Images as convolutions want them: [batch, C, H, W], the frames of a stack among the channels, floats."""

    def __init__(self, shape: tuple[int, ...], frames: int):
        super().__init__()
        self.frames = frames
        self.channels_last = channels_come_last(shape, frames)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image
        if self.channels_last:
            x = x.unflatten(1, (self.frames, -1)).permute(0, 1, 4, 2, 3).flatten(1, 2)
        kind = torch.bfloat16 if on_tensor_cores(x) else torch.float32  # bf16 holds all of 0..255 exactly
        if x.is_cuda:  # tensor cores want channels last in memory too; type and layout change in one pass
            x = x.to(kind, memory_format=torch.channels_last)
        else:
            x = x.to(kind)
        return x.mul_(1.0 / 255.0) if image.dtype == torch.uint8 else x


class Conv(nn.Conv2d):
    """A convolution whose weights follow its input to the layout that tensor cores want.

    They cannot stay in it: the optimizer keeps all parameters of a policy in one flat vector.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not input.is_cuda:
            return self._conv_forward(input, self.weight, self.bias)
        if self.can_fold(input):
            return self.folded(input)
        return self._conv_forward(input, self.weight.contiguous(memory_format=torch.channels_last), self.bias)

    def can_fold(self, input: torch.Tensor) -> bool:
        """Whether there are fewer channels than tensor cores work on, and whole squares of pixels to make more of."""
        side = self.stride[0]
        plain = self.padding == (0, 0) and self.dilation == (1, 1) and self.groups == 1 and self.stride == (side, side)
        whole = all(size % side == 0 for size in (*input.shape[2:], *self.kernel_size))
        return self.in_channels < 8 and side > 1 and plain and whole

    def folded(self, input: torch.Tensor) -> torch.Tensor:
        """The same sums with stride 1: squares of pixels, as many as a stride, become channels."""
        image, weight = (
            nn.functional.pixel_unshuffle(x, self.stride[0]).contiguous(memory_format=torch.channels_last)
            for x in (input, self.weight)
        )
        return nn.functional.conv2d(image, weight, self.bias)


class NatureCNN(nn.Sequential):
    """Three convolutions and one layer (Mnih et al. 2015). `frames` of the shape are a stack."""

    takes_bytes = True
    smallest = 36

    def __init__(self, shape: tuple[int, ...], frames: int = 1, features: int = 512):
        channels, *sides = image_size(shape, frames)
        if min(sides) < self.smallest:
            raise ShoalError(
                f"The Nature CNN needs images of at least {self.smallest} x {self.smallest} pixels, got "
                f"{sides[0]} x {sides[1]}; use --encoder impala or --encoder mlp."
            )
        layers: list[nn.Module] = [Pixels(shape, frames)]
        for out, kernel, stride in NATURE:
            layers += [orthogonal(Conv(channels, out, kernel, stride), math.sqrt(2.0)), nn.ReLU()]
            channels, sides = out, [(side - kernel) // stride + 1 for side in sides]
        super().__init__(*layers, *_flat(channels * math.prod(sides), features))


class ImpalaResNet(nn.Sequential):
    """Three sections, each a convolution, a pooling to half the side and two residual blocks (Espeholt et al. 2018).

    `width` multiplies the channels. `frames` of the shape are a stack. Images may be of any size.
    """

    takes_bytes = True

    def __init__(self, shape: tuple[int, ...], frames: int = 1, width: int = 1, features: int = 256):
        channels, *sides = image_size(shape, frames)
        layers: list[nn.Module] = [Pixels(shape, frames)]
        for out in (width * section for section in IMPALA):
            # No ReLU goes before this convolution: there is no half of the signal to make up for.
            layers += [orthogonal(Conv(channels, out, 3, padding=1), 1.0), nn.MaxPool2d(3, 2, padding=1)]
            layers += [Residual(out) for _ in range(BLOCKS)]
            channels, sides = out, [-(-side // 2) for side in sides]
        super().__init__(*layers, nn.ReLU(), *_flat(channels * math.prod(sides), features))


class Residual(nn.Module):
    """What two convolutions add to their input."""

    def __init__(self, channels: int):
        super().__init__()
        first, second = (Conv(channels, channels, 3, padding=1) for _ in range(2))
        # Every block adds to the spread of the features; together they shall about double it, however many there are.
        last = math.sqrt(2.0 / (BLOCKS * len(IMPALA)))
        self.layers = nn.Sequential(nn.ReLU(), orthogonal(first, math.sqrt(2.0)), nn.ReLU(), orthogonal(second, last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def _flat(inputs: int, features: int) -> list[nn.Module]:
    """From the last channels to features."""
    return [nn.Flatten(), orthogonal(nn.Linear(inputs, features), math.sqrt(2.0)), nn.ReLU()]
