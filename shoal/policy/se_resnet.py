"""SE-ResNet9, a encoder for small images of distances or colors and for the numbers beside them (Shacklett et al. 2021).

Nine layers of convolution without normalization: squeeze and excitation (Hu et al. 2018) in blocks that begin as Fixup
does (Zhang et al. 2019), with nothing added by their residual branches and the shortcuts alone to carry the signal.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.spaces import Box
from shoal.policy.cnn import Conv, channels_come_last, far, image_size
from shoal.policy.mlp import linear, on_tensor_cores, orthogonal
from shoal.policy.normalize import RunningMoments

SQUARE = 4
"""Side of the squares of pixels that become channels."""

BINS = 10
"""One-hot channels beside each channel of distances."""

EMBEDDED = 32
"""Features of each part that is no image."""

SMALLEST = 16
"""Parts with three axes are images from this height and width on."""

LEAST_VARIANCE = 0.01
"""Colors [0, 1] that vary less are not spread further."""


class Sizes(NamedTuple):
    """How large a network is."""

    channels: tuple[int, ...]
    """Of each stage, of one block; all but the first halve the sides."""
    reduction: int
    """Channels per squeezed one."""
    compressed: int
    """Numbers that are left of an image before the last layer, about."""
    features: int


SIZES = {
    "se-resnet9": Sizes((64, 128, 256, 512), 16, 1024, 512),
    "se-resnet9-small": Sizes((16, 32, 64, 64), 8, 256, 128),
}
"""Name on the command line -> sizes: the paper's, and what a CPU can bear."""


def is_picture(shape: tuple[int, ...]) -> bool:
    """Whether a part of what is seen is an image for this network."""
    return len(shape) == 3 and min(image_size(shape)[1:]) >= SMALLEST


class SEResNet9(nn.Module):
    """What is seen, [batch, *seen], to features: those of its images, then 32 for each other part.

    - Distances (parts of the kind `depth`, or an image of floats with one channel) are cut off at 10 m or the bound of
      the space, divided by that and joined with ten one-hot bins: 11 channels.
    - Bytes, and images that are parts, are scaled to 0..1 and normalized by the running moments of each channel.
    - Images of one size are joined along their channels; frames of a stack too. Sides must be multiples of four.
    - Every other part has a linear layer of its own; without a bias if it is a `choice`, which makes it an embedding.

    Seeing 64 x 64 distances, three numbers and a choice of five, with an RNN of two LSTM layers of 512 on top and four
    actions, a policy has the 10,988,085 parameters of the paper:

        stem, 1 x 1, 16 x 11 to 64 channels, no bias                11,264
        blocks: 3 x 3 and 1 x 1 convolutions, no biases          4,890,624
        blocks: squeeze and excitation, with biases                 44,540   (43,520 + 1,020)
        blocks: four biases and a multiplier each, scalars              20
        compression, 3 x 3 to 256 channels, with bias            1,179,904
        last layer, 1,024 to 512, no bias, and LayerNorm           525,312
        three numbers to 32 (128), a choice of five to 32 (160)        288
        LSTM, two layers with two bias vectors each              4,333,568
        heads: actions 2,052, value 513                              2,565
    """

    takes_bytes = True
    pixels: torch.Tensor | None
    """Which numbers of a vector are not to be normalized before: images, scaled here, and choices."""

    def __init__(self, seen: Box, frames: int = 1, sizes: Sizes = SIZES["se-resnet9"]):
        super().__init__()
        parts = seen.parts or (("", seen.shape),)
        self.widths = [math.prod(shape) for _, shape in parts]
        self.scales_all = not seen.parts
        pictures: dict[str, Picture] = {}
        networks: dict[tuple[int, int], list[int]] = {}
        for i, (name, shape) in enumerate(parts):
            if seen.parts and not is_picture(shape):
                continue
            count = 1 if seen.parts else frames
            single = image_size(shape, count)[0] == count
            depth = seen.kind(name) == "depth" if seen.parts else single and seen.dtype != torch.uint8
            most = 255.0 if seen.dtype == torch.uint8 or (seen.parts and seen.kind(name) != "color") else 1.0
            known = bool(seen.parts) or seen.dtype == torch.uint8
            pictures[str(i)] = picture = Picture(shape, count, far(seen) if depth else None, most if known else None)
            networks.setdefault(picture.sides, []).append(i)
        self.pictures = nn.ModuleDict(pictures)
        self.layout = list(networks.values())
        """Which parts are the images of each network."""
        self.networks = nn.ModuleList(
            Network(sides, sum(pictures[str(i)].planes for i in places), sizes) for sides, places in networks.items()
        )
        self.rest = [i for i in range(len(parts)) if str(i) not in pictures]
        biased = [seen.kind(parts[i][0]) != "choice" for i in self.rest]
        self.embeddings = nn.ModuleList(
            nn.Linear(self.widths[i], EMBEDDED, bias=bias) for i, bias in zip(self.rest, biased, strict=True)
        )
        for layer in self.embeddings:
            nn.init.orthogonal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        numbers = {i for i, bias in zip(self.rest, biased, strict=True) if bias}
        flags = [torch.full((width,), i not in numbers) for i, width in enumerate(self.widths)]
        self.register_buffer("pixels", torch.cat(flags) if seen.parts else None, persistent=False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        pieces = observation.flatten(1).split(self.widths, dim=1)
        features = []
        for network, places in zip(self.networks, self.layout, strict=True):
            planes = [self.pictures[str(i)](pieces[i]) for i in places]
            features.append(network(torch.cat(planes, dim=-1) if len(planes) > 1 else planes[0]))
        # Numbers may need more digits than bf16 has.
        with torch.autocast("cuda" if observation.is_cuda else "cpu", enabled=False):
            for layer, i in zip(self.embeddings, self.rest, strict=True):
                features.append(layer(pieces[i].float()))
        return torch.cat([part.float() for part in features], dim=1)

    @property
    def has_moments(self) -> bool:
        """Whether there are colors to normalize."""
        return any(picture.moments is not None for picture in self.pictures.values())

    @torch.no_grad()
    def update_normalizer(self, observation: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Let the running moments of colors know what was seen, in place; `weight` [batch] leaves samples out."""
        pieces = observation.flatten(1).split(self.widths, dim=1)
        for i, picture in self.pictures.items():
            picture.update_normalizer(pieces[int(i)], weight)

    def activations(self) -> int:
        """Numbers that one sample leaves behind."""
        return sum(network.activations() for network in self.networks) + EMBEDDED * len(self.rest)


class Picture(nn.Module):
    """Flat images of distances or colors as planes [batch, height, width, planes], `frames` of them side by side."""

    def __init__(self, shape: tuple[int, ...], frames: int, far: float | None, most: float | None):
        """Distances end at `far` [m] (None: there are none); colors at `most`, or are taken as they are (None)."""
        super().__init__()
        channels, *sides = image_size(shape, frames)
        self.shape, self.frames, self.far, self.most = shape, frames, far, most
        self.sides = sides[0], sides[1]
        self.channels_last = channels_come_last(shape, frames)
        self.planes = channels * (1 if far is None else 1 + BINS)
        self.moments = RunningMoments((channels,)) if far is None and most is not None else None

    def forward(self, flat: torch.Tensor) -> torch.Tensor:
        x = self._pixels(flat)
        if self.far is not None:
            share = (x.clamp(0.0, self.far) / self.far).unsqueeze(-1)
            plane = torch.arange(-1, BINS, device=x.device)  # -1 is the distance itself
            full = (share * BINS).floor().clamp(max=BINS - 1) == plane
            x = torch.where(plane < 0, share, full.to(share.dtype)).flatten(3)
        elif self.moments is not None:
            x = (x - self.moments.mean) * torch.rsqrt(self.moments.var.clamp(min=LEAST_VARIANCE))
        return x.bfloat16() if on_tensor_cores(x) else x

    def update_normalizer(self, flat: torch.Tensor, weight: torch.Tensor | None) -> None:
        """Let the moments know these images."""
        if self.moments is None:
            return
        if weight is not None:
            weight = weight.unsqueeze(-1).expand(-1, math.prod(self.sides)).reshape(-1)
        self.moments.merge(self._pixels(flat).flatten(0, 2), weight)

    def _pixels(self, flat: torch.Tensor) -> torch.Tensor:
        """[batch, height, width, channels], colors from 0 to 1."""
        image = flat.unflatten(1, self.shape)
        if self.channels_last:
            image = image.unflatten(1, (self.frames, -1)).permute(0, 2, 3, 1, 4).flatten(3)
        else:
            image = image.permute(0, 2, 3, 1)
        return image.float() if self.far is not None or self.most is None else image.float() * (1.0 / self.most)


class Network(nn.Module):
    """Planes [batch, height, width, planes] to features."""

    def __init__(self, sides: tuple[int, int], planes: int, sizes: Sizes):
        super().__init__()
        if any(side % SQUARE for side in sides):
            raise ShoalError(
                f"SE-ResNet9 needs images whose height and width are multiples of {SQUARE}, got {sides[0]} x "
                f"{sides[1]}; use --encoder nature or impala."
            )
        first, height, width = sizes.channels[0], sides[0] // SQUARE, sides[1] // SQUARE
        self.stem = nn.Linear(planes * SQUARE**2, first, bias=False)  # a 1 x 1 convolution
        nn.init.orthogonal_(self.stem.weight, math.sqrt(2.0))
        self._kept = height * width * (planes * SQUARE**2 + first)
        blocks, before = [], first
        for i, channels in enumerate(sizes.channels):
            stride = 2 if i else 1
            self._kept += 2 * before * height * width
            height, width = -(-height // stride), -(-width // stride)
            self._kept += (7 * channels + before) * height * width
            blocks.append(Block(before, channels, stride, sizes.reduction, len(sizes.channels)))
            before = channels
        self.blocks = nn.Sequential(*blocks)
        left = max(8, 8 * round(sizes.compressed / (height * width) / 8))  # tensor cores want multiples of eight
        self.compress = orthogonal(Conv(before, left, 3, padding=1), math.sqrt(2.0))
        self.last = nn.Linear(left * height * width, sizes.features, bias=False)
        nn.init.orthogonal_(self.last.weight, math.sqrt(2.0))
        self.norm = nn.LayerNorm(sizes.features)
        self._kept += 2 * self.last.in_features + 4 * sizes.features

    def forward(self, planes: torch.Tensor) -> torch.Tensor:
        x = planes.unflatten(2, (-1, SQUARE)).unflatten(1, (-1, SQUARE)).transpose(2, 3).flatten(3)
        x = F.relu(F.linear(x, self.stem.weight)).permute(0, 3, 1, 2)  # channels are last in memory from here on
        x = F.relu(self.compress(self.blocks(x))).flatten(1)
        return F.relu(self.norm(F.linear(x, self.last.weight)))

    def activations(self) -> int:
        """Numbers that one sample leaves behind."""
        return self._kept


class Block(nn.Module):
    """relu(s(y) y + shortcut(x)), y = k conv(relu(conv(x + a) + b) + c) + d, s the excitation: a weight per channel.

    The second convolution begins with zeros and the first with weights of the usual spread / sqrt(blocks): then the
    whole network changes at the same pace however many blocks it has. Where sides or channels change, the shortcut is
    a mean over 3 x 3 pixels and a 1 x 1 convolution of x + a.
    """

    def __init__(self, before: int, channels: int, stride: int, reduction: int, blocks: int):
        super().__init__()
        self.stride = stride
        self.first = Conv(before, channels, 3, stride, padding=1, bias=False)
        self.second = Conv(channels, channels, 3, padding=1, bias=False)
        self.shortcut = Conv(before, channels, 1, bias=False) if stride > 1 or before != channels else None
        self.shifts = nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(()))
        self.squeeze = orthogonal(nn.Linear(channels, channels // reduction), math.sqrt(2.0))
        self.excite = orthogonal(nn.Linear(channels // reduction, channels), 1.0)
        nn.init.normal_(self.first.weight, std=math.sqrt(2.0 / (9 * channels * blocks)))
        nn.init.zeros_(self.second.weight)
        nn.init.constant_(self.squeeze.bias, 0.1)  # y begins with zeros, at which a ReLU has no gradient
        if self.shortcut is not None:
            nn.init.normal_(self.shortcut.weight, std=math.sqrt(2.0 / before))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = self.shifts.unbind()  # without an axis, they leave bf16 what it is
        shifted = x + a
        y = self.second(F.relu(self.first(shifted) + b) + c) * self.scale + d
        weight = F.relu(linear(y.mean(dim=(2, 3)), self.squeeze.weight, self.squeeze.bias))
        weight = torch.sigmoid(linear(weight, self.excite.weight, self.excite.bias)).to(y.dtype)
        if self.shortcut is not None:
            pooled = shifted if self.stride == 1 else F.avg_pool2d(shifted, 3, self.stride, padding=1)
            x = self.shortcut(pooled)
        return F.relu(y * weight[:, :, None, None] + x)
