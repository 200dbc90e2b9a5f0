"""Which encoder suits what a group sees, and the encoder for observations of several parts."""

import math
from typing import Any

import torch
from torch import nn

from shoal.core.errors import ShoalError, unknown
from shoal.core.spaces import Box
from shoal.core.world import Group
from shoal.policy.actor_critic import mlp_encoder
from shoal.policy.cnn import ImpalaResNet, NatureCNN, channels_come_last, far, image_size
from shoal.policy.mlp import Encoder
from shoal.policy.se_resnet import SIZES, SEResNet9

CNNS: dict[str, Any] = {"nature": NatureCNN, "impala": ImpalaResNet}

NAMES = ("auto", "mlp", *CNNS, *SIZES)
"""encoders that can be chosen by name."""

IMAGE_SIDE = NatureCNN.smallest
"""What has three axes and at least this height and width is taken for an image."""


def is_image(shape: tuple[int, ...], frames: int = 1) -> bool:
    """Whether what is seen is an image (or `frames` of them, joined along their first axis), worth a CNN."""
    return len(shape) == 3 and min(image_size(shape, frames)[1:]) >= IMAGE_SIDE


def choose_encoder(name: str, group: Group, hidden: tuple[int, ...], activation: str) -> Encoder:
    """A maker of the encoder that a name stands for, given what a group sees.

    `auto` is the Nature CNN for images and the MLP for everything else. Where images are parts of a vector, the CNN
    is for them and the MLP for the rest of it; SE-ResNet9 sees to all parts itself, whether there are images or not.
    """
    if name not in NAMES:
        raise unknown("policy", name, (*NAMES, "FILE.py:NAME"))
    mlp, seen, frames = mlp_encoder(hidden, activation), group.policy_observation, group.stack
    images = is_image(seen.shape, frames) or any(is_image(shape) for _, shape in seen.parts)
    if name == "mlp" or (name == "auto" and not images):
        return mlp
    if name in SIZES and seen.parts:  # with or without images: a blind agent has the same network, less them
        return lambda shape: SEResNet9(seen, frames, SIZES[name])
    images = any(is_image(shape) for _, shape in seen.parts)
    if len(seen.shape) != 3 and not images:
        raise ShoalError(
            f"--encoder {name} is for images, but group {group.name!r} sees {seen.shape}; use --encoder mlp or auto."
        )
    if name in SIZES:
        return lambda shape: SEResNet9(seen, frames, SIZES[name])
    cnn = CNNS["nature" if name == "auto" else name]
    if images:
        return lambda shape: MultiInput(seen, cnn, mlp)
    return lambda shape: cnn(shape, frames)


class MultiInput(nn.Module):
    """A vector of several parts: every image goes through a CNN of its own, the rest, joined, through an MLP.

    Pixels become shares of the largest that there can be; images of one name are frames of a stack, joined along their
    channels.
    """

    pixels: torch.Tensor
    """Which numbers are pixels: they are scaled here, and so not normalized before."""

    def __init__(self, seen: Box, cnn: Encoder, mlp: Encoder):
        super().__init__()
        parts = seen.parts
        self.shapes = [shape for _, shape in parts]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.images: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for i, (name, shape) in enumerate(parts):
            if is_image(shape):
                self.images.setdefault((name, shape), []).append(i)
        most = {"depth": far(seen), "color": 1.0}
        self.most = [most.get(seen.kind(name), 255.0) for name, _ in self.images]
        """The largest number in each image."""
        inside = {i for places in self.images.values() for i in places}
        self.rest = [i for i in range(len(parts)) if i not in inside]
        flags = [torch.full((size,), i in inside) for i, size in enumerate(self.sizes)]
        self.register_buffer("pixels", torch.cat(flags), persistent=False)
        shapes = []
        for (_, shape), places in self.images.items():
            channels, *sides = image_size(shape)
            shapes.append((channels * len(places), *sides))
        self.cnns = nn.ModuleList(cnn(shape) for shape in shapes)
        self.mlp = mlp((sum(self.sizes[i] for i in self.rest),)) if self.rest else None

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        pieces = observation.split(self.sizes, dim=1)
        features = []
        for cnn, places, most in zip(self.cnns, self.images.values(), self.most, strict=True):
            image = torch.cat([self._image(pieces[i], self.shapes[i]) for i in places], dim=1)
            features.append(cnn(image.clamp(0.0, most) / most))
        if self.mlp is not None:
            features.append(self.mlp(torch.cat([pieces[i] for i in self.rest], dim=1)))
        return torch.cat(features, dim=1)

    def _image(self, flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """[batch, C, H, W] of a flat image, however its axes stand."""
        image = flat.unflatten(1, shape)
        return image.permute(0, 3, 1, 2) if channels_come_last(shape) else image
