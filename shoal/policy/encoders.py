"""Choice of the encoder for a group's observations, and the encoder of observations of several parts."""

import math
from typing import Any

import torch
from torch import nn

from shoal.core.errors import ShoalError, unknown
from shoal.core.spaces import Box
from shoal.core.world import Group
from shoal.policy.actor_critic import mlp_encoder
from shoal.policy.cnn import ImpalaResNet, NatureCNN, channels_come_last, image_size, max_depth
from shoal.policy.mlp import Encoder
from shoal.policy.se_resnet import SIZES, SEResNet9

CNNS: dict[str, Any] = {"nature": NatureCNN, "impala": ImpalaResNet}

ENCODER_NAMES = ("auto", "mlp", *CNNS, *SIZES)
"""Encoders that can be chosen by name."""

MIN_IMAGE_SIDE = NatureCNN.min_side
"""Minimum height and width of an array with three axes to count as an image [pixels]."""


def is_image(shape: tuple[int, ...], frames: int = 1) -> bool:
    """Whether an observation is an image for a CNN, or `frames` of them joined along the first axis."""
    return len(shape) == 3 and min(image_size(shape, frames)[1:]) >= MIN_IMAGE_SIDE


def choose_encoder(name: str, group: Group, hidden: tuple[int, ...], activation: str) -> Encoder:
    """Return a factory of the encoder with this name for a group's observations.

    `auto` is the Nature CNN for images and the MLP for everything else. If images are parts of a vector, a CNN encodes
    them and the MLP the other parts; SE-ResNet9 encodes all parts, even without images.
    """
    if name not in ENCODER_NAMES:
        raise unknown("encoder", name, (*ENCODER_NAMES, "FILE.py:NAME"))
    mlp, space, frames = mlp_encoder(hidden, activation), group.policy_observation, group.stack
    images = is_image(space.shape, frames) or any(is_image(shape) for _, shape in space.parts)
    if name == "mlp" or (name == "auto" and not images):
        return mlp
    if name in SIZES and space.parts:  # also without images, so that blind agents have the same network
        return lambda shape: SEResNet9(space, frames, SIZES[name])
    images = any(is_image(shape) for _, shape in space.parts)
    if len(space.shape) != 3 and not images:
        raise ShoalError(
            f"--encoder {name} is for images, but group {group.name!r} observes {space.shape}; use --encoder mlp or "
            "auto."
        )
    if name in SIZES:
        return lambda shape: SEResNet9(space, frames, SIZES[name])
    cnn = CNNS["nature" if name == "auto" else name]
    if images:
        return lambda shape: MultiInput(space, cnn, mlp)
    return lambda shape: cnn(shape, frames)


class MultiInput(nn.Module):
    """Encoder of vectors with several parts: one CNN per image, one MLP for all other parts together.

    Pixels are divided by their maximum. Images with the same name are stacked frames, joined along the channels.
    """

    pixels: torch.Tensor
    """bool [size]: elements that are pixels, which are scaled here instead of normalized."""

    def __init__(self, space: Box, cnn: Encoder, mlp: Encoder):
        super().__init__()
        parts = space.parts
        self.shapes = [shape for _, shape in parts]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.images: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for i, (name, shape) in enumerate(parts):
            if is_image(shape):
                self.images.setdefault((name, shape), []).append(i)
        max_values = {"depth": max_depth(space), "color": 1.0}
        self.max_values = [max_values.get(space.kind(name), 255.0) for name, _ in self.images]
        """Maximum pixel value of each image."""
        in_images = {i for indices in self.images.values() for i in indices}
        self.vector_parts = [i for i in range(len(parts)) if i not in in_images]
        flags = [torch.full((size,), i in in_images) for i, size in enumerate(self.sizes)]
        self.register_buffer("pixels", torch.cat(flags), persistent=False)
        shapes = []
        for (_, shape), indices in self.images.items():
            channels, *sides = image_size(shape)
            shapes.append((channels * len(indices), *sides))
        self.cnns = nn.ModuleList(cnn(shape) for shape in shapes)
        self.mlp = mlp((sum(self.sizes[i] for i in self.vector_parts),)) if self.vector_parts else None

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        pieces = observation.split(self.sizes, dim=1)
        features = []
        for cnn, indices, max_value in zip(self.cnns, self.images.values(), self.max_values, strict=True):
            image = torch.cat([self._image(pieces[i], self.shapes[i]) for i in indices], dim=1)
            features.append(cnn(image.clamp(0.0, max_value) / max_value))
        if self.mlp is not None:
            features.append(self.mlp(torch.cat([pieces[i] for i in self.vector_parts], dim=1)))
        return torch.cat(features, dim=1)

    def _image(self, flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """[batch, C, H, W] from a flat image with channels first or last."""
        image = flat.unflatten(1, shape)
        return image.permute(0, 3, 1, 2) if channels_come_last(shape) else image
