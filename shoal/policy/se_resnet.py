"""SE-ResNet9, an encoder of small depth or color images and of vectors beside them (Shacklett et al. 2021).

Nine convolutions without normalization, with squeeze and excitation (Hu et al. 2018) and Fixup initialization (Zhang
et al. 2019): residual branches start at zero.
"""

import math
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.spaces import Box
from shoal.policy.cnn import Conv, channels_come_last, image_size, max_depth
from shoal.policy.mlp import linear, on_tensor_cores, orthogonal
from shoal.policy.normalize import RunningMoments

PATCH_SIZE = 4
"""Side of the square patches of pixels that become channels."""

DEPTH_BINS = 10
"""One-hot channels per channel of depth."""

EMBEDDING_SIZE = 32
"""Features of each part that is not an image."""

MIN_IMAGE_SIDE = 16
"""Minimum height and width of a part with three axes to count as an image [pixels]."""

MIN_COLOR_VARIANCE = 0.01
"""Lower bound of the variance that colors in [0, 1] are normalized by."""


class Sizes(NamedTuple):
    """Sizes of a network."""

    channels: tuple[int, ...]
    """Channels of each block; all blocks but the first halve height and width."""
    reduction: int
    """Reduction ratio of squeeze and excitation."""
    compressed: int
    """Approximate number of inputs of the last linear layer."""
    features: int
    """Outputs of the last linear layer."""


SIZES = {
    "se-resnet9": Sizes((64, 128, 256, 512), 16, 1024, 512),
    "se-resnet9-small": Sizes((16, 32, 64, 64), 8, 256, 128),
}
"""Name on the command line -> sizes: the paper's, and smaller ones for CPUs."""


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether a part of an observation is an image for this network."""
    return len(shape) == 3 and min(image_size(shape)[1:]) >= MIN_IMAGE_SIDE


class SEResNet9(nn.Module):
    """Maps observations [batch, *shape] to features: those of the images, then 32 for each other part.

    - Depth (parts of the kind `depth`, or one float image with one channel) is clipped at 10 m or the bound of the
      space, divided by that and concatenated with ten one-hot bins: 11 channels.
    - Bytes, and images that are parts, are scaled to 0..1 and normalized by the running moments of each channel.
    - Images of one size and stacked frames are concatenated along the channels. Height and width must be multiples of
      four.
    - Each other part has a linear layer; that of a `choice` has no bias, so it is an embedding.

    With 64 x 64 depth, three numbers, a choice of five, two LSTM layers of 512 and four actions, a policy has the
    10,988,085 parameters of the paper:

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
    """bool [size]: elements that must not be normalized: images, which are scaled here, and choices."""

    def __init__(self, space: Box, frames: int = 1, sizes: Sizes = SIZES["se-resnet9"]):
        super().__init__()
        parts = space.parts or (("", space.shape),)
        self.widths = [math.prod(shape) for _, shape in parts]
        self.scales_all = not space.parts
        pictures: dict[str, ImagePlanes] = {}
        networks: dict[tuple[int, int], list[int]] = {}
        for i, (name, shape) in enumerate(parts):
            if space.parts and not is_image(shape):
                continue
            count = 1 if space.parts else frames
            single = image_size(shape, count)[0] == count
            depth = space.kind(name) == "depth" if space.parts else single and space.dtype != torch.uint8
            max_value = 255.0 if space.dtype == torch.uint8 or (space.parts and space.kind(name) != "color") else 1.0
            known = bool(space.parts) or space.dtype == torch.uint8
            limit = max_depth(space) if depth else None
            pictures[str(i)] = image = ImagePlanes(shape, count, limit, max_value if known else None)
            networks.setdefault(image.sides, []).append(i)
        self.pictures = nn.ModuleDict(pictures)
        self.network_parts = list(networks.values())
        """Indices of the parts that are images of each network."""
        self.networks = nn.ModuleList(
            Network(sides, sum(pictures[str(i)].planes for i in indices), sizes) for sides, indices in networks.items()
        )
        self.vector_parts = [i for i in range(len(parts)) if str(i) not in pictures]
        biased = [space.kind(parts[i][0]) != "choice" for i in self.vector_parts]
        embeddings = [
            nn.Linear(self.widths[i], EMBEDDING_SIZE, bias=bias)
            for i, bias in zip(self.vector_parts, biased, strict=True)
        ]
        self.embeddings = nn.ModuleList(embeddings)
        for layer in embeddings:
            nn.init.orthogonal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        numbers = {i for i, bias in zip(self.vector_parts, biased, strict=True) if bias}
        flags = [torch.full((width,), i not in numbers) for i, width in enumerate(self.widths)]
        self.register_buffer("pixels", torch.cat(flags) if space.parts else None, persistent=False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        pieces = observation.flatten(1).split(self.widths, dim=1)
        features = []
        for network, indices in zip(self.networks, self.network_parts, strict=True):
            planes = [self.pictures[str(i)](pieces[i]) for i in indices]
            features.append(network(torch.cat(planes, dim=-1) if len(planes) > 1 else planes[0]))
        # Vectors may need more precision than bf16.
        with torch.autocast("cuda" if observation.is_cuda else "cpu", enabled=False):
            for layer, i in zip(self.embeddings, self.vector_parts, strict=True):
                features.append(layer(pieces[i].float()))
        return torch.cat([part.float() for part in features], dim=1)

    @property
    def has_moments(self) -> bool:
        """Whether there are color images to normalize."""
        return any(image.moments is not None for _, image in self._images())

    @torch.no_grad()
    def update_normalizer(self, observation: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Update the running moments of colors in place; samples of `weight` [batch] 0 are ignored."""
        pieces = observation.flatten(1).split(self.widths, dim=1)
        for i, image in self._images():
            image.update_normalizer(pieces[i], weight)

    def activations(self) -> int:
        """Number of activations per sample kept for the backward pass."""
        networks = cast(list[Network], list(self.networks))
        return sum(network.activations() for network in networks) + EMBEDDING_SIZE * len(self.vector_parts)

    def _images(self) -> "list[tuple[int, ImagePlanes]]":
        """Part index and module of each image."""
        return [(int(i), cast(ImagePlanes, image)) for i, image in self.pictures.items()]


class ImagePlanes(nn.Module):
    """Converts flat depth or color images to planes [batch, height, width, planes], with `frames` concatenated."""

    def __init__(self, shape: tuple[int, ...], frames: int, max_depth: float | None, max_value: float | None):
        """Clip depth at `max_depth` [m] (None: no depth); divide colors by `max_value` (None: do not scale)."""
        super().__init__()
        channels, *sides = image_size(shape, frames)
        self.shape, self.frames, self.max_depth, self.max_value = shape, frames, max_depth, max_value
        self.sides = sides[0], sides[1]
        self.channels_last = channels_come_last(shape, frames)
        self.planes = channels * (1 if max_depth is None else 1 + DEPTH_BINS)
        self.moments = RunningMoments((channels,)) if max_depth is None and max_value is not None else None

    def forward(self, flat: torch.Tensor) -> torch.Tensor:
        x = self._pixels(flat)
        if self.max_depth is not None:
            scaled = (x.clamp(0.0, self.max_depth) / self.max_depth).unsqueeze(-1)
            plane = torch.arange(-1, DEPTH_BINS, device=x.device)  # -1: the depth itself
            one_hot = (scaled * DEPTH_BINS).floor().clamp(max=DEPTH_BINS - 1) == plane
            x = torch.where(plane < 0, scaled, one_hot.to(scaled.dtype)).flatten(3)
        elif self.moments is not None:
            x = (x - self.moments.mean) * torch.rsqrt(self.moments.var.clamp(min=MIN_COLOR_VARIANCE))
        return x.bfloat16() if on_tensor_cores(x) else x

    def update_normalizer(self, flat: torch.Tensor, weight: torch.Tensor | None) -> None:
        """Update the moments with these images."""
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
        if self.max_depth is not None or self.max_value is None:
            return image.float()
        return image.float() * (1.0 / self.max_value)


class Network(nn.Module):
    """Maps planes [batch, height, width, planes] to features."""

    def __init__(self, sides: tuple[int, int], planes: int, sizes: Sizes):
        super().__init__()
        if any(side % PATCH_SIZE for side in sides):
            raise ShoalError(
                f"SE-ResNet9 needs images whose height and width are multiples of {PATCH_SIZE}, got {sides[0]} x "
                f"{sides[1]}; use --encoder nature or impala."
            )
        first, height, width = sizes.channels[0], sides[0] // PATCH_SIZE, sides[1] // PATCH_SIZE
        self.stem = nn.Linear(planes * PATCH_SIZE**2, first, bias=False)  # a 1 x 1 convolution
        nn.init.orthogonal_(self.stem.weight, math.sqrt(2.0))
        self._activations = height * width * (planes * PATCH_SIZE**2 + first)
        blocks, before = [], first
        for i, channels in enumerate(sizes.channels):
            stride = 2 if i else 1
            self._activations += 2 * before * height * width
            height, width = -(-height // stride), -(-width // stride)
            self._activations += (7 * channels + before) * height * width
            blocks.append(Block(before, channels, stride, sizes.reduction, len(sizes.channels)))
            before = channels
        self.blocks = nn.Sequential(*blocks)
        left = max(8, 8 * round(sizes.compressed / (height * width) / 8))  # a multiple of eight for tensor cores
        self.compress = orthogonal(Conv(before, left, 3, padding=1), math.sqrt(2.0))
        self.last = nn.Linear(left * height * width, sizes.features, bias=False)
        nn.init.orthogonal_(self.last.weight, math.sqrt(2.0))
        self.norm = nn.LayerNorm(sizes.features)
        self._activations += 2 * self.last.in_features + 4 * sizes.features

    def forward(self, planes: torch.Tensor) -> torch.Tensor:
        x = planes.unflatten(2, (-1, PATCH_SIZE)).unflatten(1, (-1, PATCH_SIZE)).transpose(2, 3).flatten(3)
        x = F.relu(F.linear(x, self.stem.weight)).permute(0, 3, 1, 2)  # channels last in memory from here on
        x = F.relu(self.compress(self.blocks(x))).flatten(1)
        return F.relu(self.norm(F.linear(x, self.last.weight)))

    def activations(self) -> int:
        """Number of activations per sample kept for the backward pass."""
        return self._activations


class Block(nn.Module):
    """relu(s(y) y + shortcut(x)), y = k conv(relu(conv(x + a) + b) + c) + d, with s the excitation per channel.

    The second convolution starts at zero, and the first with He standard deviation / sqrt(blocks), so that the rate of
    change does not depend on the number of blocks. Where height or channels change, the shortcut is 3 x 3
    average pooling and a 1 x 1 convolution of x + a.
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
        nn.init.constant_(self.squeeze.bias, 0.1)  # y starts at zero, where a ReLU has no gradient
        if self.shortcut is not None:
            nn.init.normal_(self.shortcut.weight, std=math.sqrt(2.0 / before))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = self.shifts.unbind()  # 0-dimensional, so bf16 inputs stay bf16
        shifted = x + a
        y = self.second(F.relu(self.first(shifted) + b) + c) * self.scale + d
        weight = F.relu(linear(y.mean(dim=(2, 3)), self.squeeze.weight, self.squeeze.bias))
        weight = torch.sigmoid(linear(weight, self.excite.weight, self.excite.bias)).to(y.dtype)
        if self.shortcut is not None:
            pooled = shifted if self.stride == 1 else F.avg_pool2d(shifted, 3, self.stride, padding=1)
            x = self.shortcut(pooled)
        return F.relu(y * weight[:, :, None, None] + x)
