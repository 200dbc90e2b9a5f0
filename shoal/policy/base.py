"""Base of all policies: an encoder, an optional RNN, and running normalization of observations."""

from typing import Any, Protocol, cast

import torch
from torch import nn

from shoal.core.errors import ShoalError, excerpt
from shoal.core.launch import Plan
from shoal.core.world import Group
from shoal.policy.mlp import MLP, Encoder
from shoal.policy.normalize import RunningMoments
from shoal.policy.recurrent import RNNMaker

OBSERVATION_CLIP = 10.0
"""Normalized observations are clipped to this many standard deviations."""


class NormalizingEncoder(Protocol):
    """An encoder with running moments, whose `has_moments` is true."""

    def update_normalizer(self, observation: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Update the moments with observations [batch, *shape]; samples of `weight` [batch] 0 are ignored."""


class Policy(nn.Module):
    """Base of all policies: encoder, optional RNN and running moments of observations; subclasses add heads.

    An encoder may define these attributes:

    - `takes_bytes`: images reach it as uint8, and it scales them.
    - `scales_all`: it scales its whole input.
    - `pixels`: bool mask of the elements of a vector that it scales.
    - `has_moments`: it has running moments, which `update_normalizer(observation, weight)` updates.

    Input that the encoder scales is not normalized, even if `normalize` is set.
    """

    head: Any
    """Maps features to actions; see shoal/policy/heads.py."""
    explores = False
    """Whether it explores with the random-action rates of `Rollout.epsilon` instead of a distribution."""

    def __init__(self, group: Group, encoder: Encoder, normalize: bool, rnn: RNNMaker | None = None):
        super().__init__()
        shape = group.policy_observation.shape
        self.group = group
        self.shared_encoder = rnn is not None
        """Whether actor and critic share an encoder, so that acting also computes values."""
        self.moments = RunningMoments(shape)
        self.policy_encoder = encoder(shape)
        self.as_bytes = group.observation.dtype == torch.uint8 and getattr(self.policy_encoder, "takes_bytes", False)
        self.normalize = normalize and not self.as_bytes and not getattr(self.policy_encoder, "scales_all", False)
        features = feature_size(self.policy_encoder, shape)
        self.rnn = None if rnn is None else rnn(features)
        self.state_size = 0 if self.rnn is None else self.rnn.state_size
        """Size of an agent's recurrent state (0: no RNN)."""
        self.features = features if self.rnn is None else self.rnn.size
        """Width of the heads' input."""

    def _preprocess(self, observation: torch.Tensor) -> torch.Tensor:
        if self.as_bytes:
            return observation
        observation = observation.float()
        if not self.normalize:
            return observation
        scaled = (observation - self.moments.mean) * self.moments.scale()
        scaled = scaled.clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)
        pixels = getattr(self.policy_encoder, "pixels", None)
        return scaled if pixels is None else torch.where(pixels, observation, scaled)

    def distribution(self, observation: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Parameters of the head, [batch, width]."""
        raise ShoalError("Policy is a base class; use ActorCritic, QPolicy or ContinuousQPolicy.")

    def step(
        self, observation: torch.Tensor, state: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """With an RNN: parameters of the head, values [batch] and the next state [batch, state_size]."""
        raise ShoalError("This policy has no RNN; use distribution() instead of step().")

    def noise_plan(self, seed: int, stream: int, counter: torch.Tensor) -> Plan | None:
        """Plan that resamples the noise of noisy layers, keyed by a counter on the device (None: no noisy layers)."""
        return None

    def zero_noise(self) -> None:
        """Set the noise of noisy layers to zero, until it is resampled."""

    @property
    def has_moments(self) -> bool:
        """Whether any running moments are in use."""
        return self.normalize or any(getattr(encoder, "has_moments", False) for encoder in self._encoders())

    def update_normalizer(self, observation: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Update running moments with observations [batch, *shape]; samples of `weight` [batch] 0 are ignored."""
        if self.normalize:
            self.moments.merge(observation, weight)
        for encoder in self._encoders():
            if getattr(encoder, "has_moments", False):
                cast(NormalizingEncoder, encoder).update_normalizer(observation, weight)

    def _encoders(self) -> list[nn.Module]:
        return [self.policy_encoder]

    def activations(self) -> int:
        """Number of activations per sample that an update keeps for the backward pass."""
        counted = [self.head.linear.out_features, 1]
        if self.group.stack > 1:  # the stacked copy of the frames
            counted.append(self.group.policy_observation.size)
        if self.rnn is not None:
            counted.append(self.rnn.activations())
        for encoder in self._encoders():
            counted.append(_torso_activations(encoder, self.moments.mean.shape))
        return sum(counted)


def _torso_activations(encoder: nn.Module, shape: tuple[int, ...]) -> int:
    """Number of activations per sample in an encoder: two per output of an MLP's layer, else one per output.

    An encoder with a method `activations` reports its own count.
    """
    if own_count := getattr(encoder, "activations", None):
        return own_count()
    mlps = [m for m in encoder.modules() if isinstance(m, MLP)]  # an MLP does not call its layers, so hooks miss them
    inside = {m for mlp in mlps for m in mlp.modules()}
    counted = [2 * m.out_features for m in inside if isinstance(m, nn.Linear)]
    modules = [m for m in encoder.modules() if m not in inside and not list(m.children())]
    if not modules:
        return sum(counted)
    hooks = [m.register_forward_hook(lambda *given: counted.append(given[-1].numel())) for m in modules]
    with torch.no_grad():
        weight = next(encoder.parameters(), torch.zeros(0))
        encoder(torch.zeros(1, *shape, device=weight.device))
    for hook in hooks:
        hook.remove()
    return sum(counted)


def feature_size(encoder: nn.Module, shape: tuple[int, ...]) -> int:
    """Width of an encoder's output, found with a forward pass of two zero observations."""
    if not isinstance(encoder, nn.Module):
        raise ShoalError(f"The policy network must be a torch.nn.Module, got {excerpt(encoder)}.")
    batch = 2
    with torch.no_grad():
        out = encoder(torch.zeros(batch, *shape))
    if not isinstance(out, torch.Tensor) or out.ndim != 2 or out.shape[0] != batch or not out.is_floating_point():
        got = f"{tuple(out.shape)} of {out.dtype}" if isinstance(out, torch.Tensor) else type(out).__name__
        raise ShoalError(
            f"The policy network must map floats [batch, {', '.join(map(str, shape))}] to floats [batch, features]; "
            f"a batch of {batch} gave {got}."
        )
    return out.shape[1]
