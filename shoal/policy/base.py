"""What every policy has: a encoder, perhaps an RNN, and running normalization of what it sees."""

from typing import Any

import torch
from torch import nn

from shoal.core.errors import ShoalError, excerpt
from shoal.core.launch import Plan
from shoal.core.world import Group
from shoal.policy.mlp import MLP, Encoder
from shoal.policy.normalize import RunningMoments
from shoal.policy.recurrent import RNNMaker

OBSERVATION_CLIP = 10.0
"""Normalized observations are cut off at this many standard deviations."""


class Policy(nn.Module):
    """Base of the policies: a encoder, perhaps an RNN, and running moments of what is seen; heads are a policy's own.

    A encoder may say that it `takes_bytes`: images then reach it as uint8, and it scales them itself; or that it
    `scales_all` that it sees; or it names, as `pixels`, the numbers of a vector that it scales. None of these are
    normalized, whatever `normalize` says. A encoder that has running moments of its own (`has_moments`) is told what was
    seen by `take_in`.
    """

    head: Any
    """From features to actions; see shoal/policy/heads.py."""
    explores = False
    """Whether its actions are random by a rate that rollouts hold (`Rollout.epsilon`), not by a distribution."""

    def __init__(self, group: Group, encoder: Encoder, normalize: bool, rnn: RNNMaker | None = None):
        super().__init__()
        shape = group.policy_observation.shape
        self.group = group
        self.shared = rnn is not None
        """Whether values come with the actions."""
        self.moments = RunningMoments(shape)
        self.policy_encoder = encoder(shape)
        self.as_bytes = group.observation.dtype == torch.uint8 and getattr(self.policy_encoder, "takes_bytes", False)
        self.normalize = normalize and not self.as_bytes and not getattr(self.policy_encoder, "scales_all", False)
        features = feature_size(self.policy_encoder, shape)
        self.rnn = None if rnn is None else rnn(features)
        self.state_size = 0 if self.rnn is None else self.rnn.state_size
        """Numbers that an agent remembers (0: there is no rnn)."""
        self.features = features if self.rnn is None else self.rnn.size
        """Width of what heads stand on."""

    def _see(self, observation: torch.Tensor) -> torch.Tensor:
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
        """What the head chooses by, [batch, width]."""
        raise ShoalError("Policy is the base of ActorCritic and QPolicy; use one of them.")

    def step(
        self, observation: torch.Tensor, state: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """With an RNN: what the head chooses by, values [batch], and the state after, in the state before."""
        raise ShoalError("This policy has no rnn; it acts by what it sees alone.")

    def noise_plan(self, seed: int, stream: int, counter: torch.Tensor) -> Plan | None:
        """What fills the network with fresh noise, keyed by a counter on the device (None: there is none in it)."""
        return None

    def zero_noise(self) -> None:
        """Take all noise out of the network, until it is filled again."""

    @property
    def has_moments(self) -> bool:
        """Whether anything is normalized by what was seen before."""
        return self.normalize or any(getattr(encoder, "has_moments", False) for encoder in self._torsos())

    def update_normalizer(self, observation: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Let running moments know what was seen [batch, *seen]; `weight` [batch] of 0 and 1 leaves samples out."""
        if self.normalize:
            self.moments.merge(observation, weight)
        for encoder in self._torsos():
            if getattr(encoder, "has_moments", False):
                encoder.update_normalizer(observation, weight)

    def _torsos(self) -> list[nn.Module]:
        return [self.policy_encoder]

    def activations(self) -> int:
        """Numbers that one sample leaves behind on its way through: what an update has to keep."""
        counted = [self.head.linear.out_features, 1]
        if self.group.stack > 1:  # what is seen is put together for the occasion
            counted.append(self.group.policy_observation.size)
        if self.rnn is not None:
            counted.append(self.rnn.activations())
        for encoder in self._torsos():
            counted.append(_numbers(encoder, self.moments.mean.shape))
        return sum(counted)


def _numbers(encoder: nn.Module, shape: tuple[int, ...]) -> int:
    """Numbers that one sample leaves behind in a encoder: two per output of a layer of an MLP, else one per output.

    A encoder whose layers are no modules of their own counts by itself (`activations`).
    """
    if hasattr(encoder, "activations"):
        return encoder.activations()
    mlps = [m for m in encoder.modules() if isinstance(m, MLP)]  # these do not call their layers as modules
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
    """The width of a encoder's output, found by showing it two observations."""
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
