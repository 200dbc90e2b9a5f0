"""Heads: map features to a distribution over actions, one class per kind of action space.

Heads sample from given noise, which is keyed by env and step, so that an env's actions do not depend on its batch.
The parameters of a distribution are one tensor [batch, width].
"""

import math
from typing import TypeAlias, cast

import torch
from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.spaces import Box, Discrete, Mixed, MultiDiscrete, Space
from shoal.policy.mlp import linear, orthogonal

MASKED = -1e9
"""Logit of a masked choice: its probability is exactly 0 in float32."""

UNROLLED = 16
"""Up to this many choices, cumulative sums are unrolled: a compiler fuses them, bit for bit reproducibly."""

BELOW_ONE = 1.0 - 2.0**-24
"""The largest float32 below 1."""


class Head(nn.Module):
    """Base of the heads: a linear layer whose output `params` maps to the parameters of a distribution."""

    linear: nn.Linear

    def forward(self, features: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.params(linear(features, self.linear.weight, self.linear.bias), mask)

    def params(self, raw: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Parameters of the distribution, from the linear layer's output."""
        raise ShoalError("Head is a base class; use CategoricalHead, GaussianHead or MixedHead.")


class CategoricalHead(Head):
    """Independent categorical choices, part i of `nvec[i]`; actions of a `flat` head (one part) have no last axis."""

    gaussian_noise = False

    def __init__(self, features: int, nvec: tuple[int, ...], flat: bool, odds: tuple[float, ...] = ()):
        super().__init__()
        self.nvec = nvec
        self.flat = flat
        self.noise_width = len(nvec)
        self.linear = orthogonal(nn.Linear(features, sum(nvec)), 0.01)
        if odds:
            self.linear.bias.data.copy_(torch.tensor(odds).log())

    def params(self, raw: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        logits = raw.float()
        return logits if mask is None else torch.where(mask, logits, MASKED)

    def _parts(self, logits: torch.Tensor) -> list[torch.Tensor]:
        parts = [logits] if len(self.nvec) == 1 else list(logits.split(self.nvec, dim=-1))
        return [torch.log_softmax(part, dim=-1) for part in parts]

    def sample(self, params: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions and their log-probabilities by inverse transform sampling, with noise in [0, 1)."""
        actions, total = [], torch.zeros_like(noise[..., 0])
        for i, log_probs in enumerate(self._parts(params)):
            choice = inverse_cumulative(log_probs.exp(), noise[..., i : i + 1])
            total = total + log_probs.gather(-1, choice).squeeze(-1)
            actions.append(choice)
        return self._join(actions), total

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        """The most likely actions."""
        return self._join([part.argmax(dim=-1, keepdim=True) for part in self._parts(params)])

    def log_prob_and_entropy(self, params: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.flat:
            action = action.unsqueeze(-1)
        log_prob = entropy = torch.zeros_like(params[..., 0])
        for i, log_probs in enumerate(self._parts(params)):
            log_prob = log_prob + _take_choice(log_probs, action[..., i : i + 1])
            entropy = entropy - (log_probs.exp() * log_probs).sum(dim=-1)
        return log_prob, entropy

    def to_world(self, action: torch.Tensor) -> torch.Tensor:
        """The action in the world's units."""
        return action

    def _join(self, choices: list[torch.Tensor]) -> torch.Tensor:
        action = choices[0] if len(choices) == 1 else torch.cat(choices, dim=-1)
        return (action.squeeze(-1) if self.flat else action).to(torch.int32)


class GaussianHead(Head):
    """A diagonal normal distribution with a state-independent standard deviation.

    Its unit is half the range of the action space: 0 is the middle, 1 the upper bound. The world receives the
    action scaled and clipped; log-probabilities are those of the unclipped action.
    """

    gaussian_noise = True

    def __init__(self, features: int, space: Box, log_std: float):
        super().__init__()
        self.space = space
        self.noise_width = space.size
        self.linear = orthogonal(nn.Linear(features, space.size), 0.01)
        self.log_std = nn.Parameter(torch.full((space.size,), log_std))

    def params(self, raw: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        mean = raw.float()
        return torch.cat([mean, self.log_std.expand_as(mean)], dim=-1)

    def sample(self, params: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = params.chunk(2, dim=-1)
        action = mean + log_std.exp() * noise
        log_prob = (-0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)).sum(dim=-1)
        return action.unflatten(-1, self.space.shape), log_prob

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        return params.chunk(2, dim=-1)[0].unflatten(-1, self.space.shape)

    def log_prob_and_entropy(self, params: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = params.chunk(2, dim=-1)
        deviation = (action.flatten(-len(self.space.shape)) - mean) * torch.exp(-log_std)
        log_prob = (-0.5 * deviation.square() - log_std - 0.5 * math.log(2.0 * math.pi)).sum(dim=-1)
        entropy = (log_std + 0.5 * math.log(2.0 * math.pi * math.e)).sum(dim=-1)
        return log_prob, entropy

    def to_world(self, action: torch.Tensor) -> torch.Tensor:
        return to_box(self.space, action)


class MixedHead(Head):
    """Discrete and continuous parts in one action vector, with one head each on a shared linear layer.

    All noise is normal; for discrete parts, the normal's CDF maps it to uniform noise.
    """

    gaussian_noise = True

    def __init__(self, features: int, space: Mixed, log_std: float):
        super().__init__()
        self.space = space
        parts = [make_head(part, features, log_std) for part in space.parts]
        self.raw_widths = [part.linear.out_features for part in parts]
        self.param_widths = [
            2 * n if part.gaussian_noise else n for part, n in zip(parts, self.raw_widths, strict=True)
        ]
        self.linear = orthogonal(nn.Linear(features, sum(self.raw_widths)), 0.01)
        self.linear.bias.data.copy_(torch.cat([part.linear.bias.detach() for part in parts]))
        for part in parts:
            del part.linear
        self.parts = nn.ModuleList(parts)
        self.noise_width = sum(space.widths)

    def _heads(self) -> "list[ActionHead]":
        return cast("list[ActionHead]", list(self.parts))

    def params(self, raw: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        pieces = zip(self._heads(), raw.split(self.raw_widths, dim=-1), strict=True)
        return torch.cat([part.params(piece) for part, piece in pieces], dim=-1)

    def sample(self, params: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        actions, total = [], torch.zeros_like(noise[..., 0])
        for part, piece, normal in zip(self._heads(), self._split_params(params), self.space.split(noise), strict=True):
            part_noise = normal if part.gaussian_noise else torch.special.ndtr(normal).clamp(max=BELOW_ONE)
            action, log_prob = part.sample(piece, part_noise)
            actions.append(action)
            total = total + log_prob
        return self._join(actions), total

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        pieces = self._split_params(params)
        return self._join([part.mode(piece) for part, piece in zip(self._heads(), pieces, strict=True)])

    def log_prob_and_entropy(self, params: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_prob = entropy = torch.zeros_like(params[..., 0])
        pieces, chosen = self._split_params(params), self._split_action(action)
        for part, piece, choice in zip(self._heads(), pieces, chosen, strict=True):
            more = part.log_prob_and_entropy(piece, choice)
            log_prob, entropy = log_prob + more[0], entropy + more[1]
        return log_prob, entropy

    def to_world(self, action: torch.Tensor) -> torch.Tensor:
        return self._join([part.to_world(a) for part, a in zip(self._heads(), self._split_action(action), strict=True)])

    def _split_params(self, params: torch.Tensor) -> list[torch.Tensor]:
        return list(params.split(self.param_widths, dim=-1))

    def _split_action(self, action: torch.Tensor) -> list[torch.Tensor]:
        """The action of each part, in the part's shape and dtype."""
        pairs = zip(self.space.parts, self.space.split(action), strict=True)
        return [piece.view(*piece.shape[:-1], *part.shape).to(part.dtype) for part, piece in pairs]

    def _join(self, actions: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.space.parts, actions, strict=True)
        flat = [a.flatten(-len(part.shape)) if part.shape else a.unsqueeze(-1) for part, a in pairs]
        return torch.cat([a.float() for a in flat], dim=-1)


def to_box(space: Box, action: torch.Tensor) -> torch.Tensor:
    """Actions in units of half a space's range (0: its middle), scaled and clipped to the space."""
    if space.bounded:
        middle, half = (space.high + space.low) / 2.0, (space.high - space.low) / 2.0
        action = middle + half * action
    return action.clamp(space.low, space.high)


def _take_choice(log_probs: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """The log-probability of each row's choice [..., 1]."""
    if not log_probs.is_cuda:
        return log_probs.gather(-1, choice.long()).squeeze(-1)
    # A gather's gradient is a scatter, which a compiler cannot fuse; the gradient of a masked sum it can.
    here = torch.arange(log_probs.shape[-1], device=choice.device) == choice
    return torch.where(here, log_probs, 0.0).sum(dim=-1)


def inverse_cumulative(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The first choice [..., 1] whose cumulative probability exceeds the noise [..., 1]."""
    # Noise scaled by the last entry stays below it, so a masked choice (probability 0) is never taken.
    if probs.shape[-1] > UNROLLED:
        cumulative = probs.cumsum(dim=-1)
        return (cumulative <= noise * cumulative[..., -1:]).sum(dim=-1, keepdim=True)
    running = [probs[..., :1]]
    for k in range(1, probs.shape[-1]):
        running.append(running[-1] + probs[..., k : k + 1])
    level = noise * running[-1]
    choice = torch.zeros_like(level, dtype=torch.int64)
    for passed in running[:-1]:
        choice = choice + (passed <= level)
    return choice


ActionHead: TypeAlias = CategoricalHead | GaussianHead | MixedHead


def make_head(space: Space, features: int, log_std: float) -> ActionHead:
    """The head for an action space."""
    if isinstance(space, Discrete):
        return CategoricalHead(features, (space.n,), flat=True, odds=space.odds)
    if isinstance(space, MultiDiscrete):
        return CategoricalHead(features, space.nvec, flat=False)
    if isinstance(space, Mixed):
        return MixedHead(features, space, log_std)
    return GaussianHead(features, space, log_std)
