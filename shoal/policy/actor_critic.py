"""The policy of the policy-gradient learners: torso, action head and value, with running normalisation inside."""

import torch
from torch import nn

from shoal.core.world import Group
from shoal.errors import ShoalError
from shoal.policy.heads import make_head
from shoal.policy.mlp import MLP, Torso, orthogonal
from shoal.policy.normalise import RunningMoments

OBSERVATION_CLIP = 10.0
"""Normalised observations are cut off at this many standard deviations."""


class ActorCritic(nn.Module):
    """Observations [batch, *shape] to a distribution over actions and a value [batch]."""

    def __init__(self, group: Group, torso: Torso, shared: bool, normalise: bool, log_std: float):
        super().__init__()
        shape = group.observation.shape
        self.group = group
        self.normalise = normalise
        self.moments = RunningMoments(shape)
        self.policy_torso = torso(shape)
        self.value_torso = self.policy_torso if shared else torso(shape)
        features = _features(self.policy_torso, shape)
        self.head = make_head(group.action, features, log_std)
        self.value_head = orthogonal(nn.Linear(features, 1), 1.0)

    def _see(self, observation: torch.Tensor) -> torch.Tensor:
        observation = observation.float()
        if not self.normalise:
            return observation
        scaled = (observation - self.moments.mean) * self.moments.scale()
        return scaled.clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)

    def distribution(self, observation: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Parameters of the head's distribution [batch, width]."""
        return self.head(self.policy_torso(self._see(observation)), mask)

    def value(self, observation: torch.Tensor) -> torch.Tensor:
        return self.value_head(self.value_torso(self._see(observation))).float().squeeze(-1)

    def distribution_and_value(
        self, observation: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self._see(observation)
        features = self.policy_torso(seen)
        others = features if self.value_torso is self.policy_torso else self.value_torso(seen)
        return self.head(features, mask), self.value_head(others).float().squeeze(-1)

    def activations(self) -> int:
        """Numbers that one sample leaves behind on its way through: what an update has to keep."""
        counted = [0]
        modules = [m for m in self.modules() if not list(m.children())]
        hooks = [m.register_forward_hook(lambda *given: counted.append(given[-1].numel())) for m in modules]
        with torch.no_grad():
            weight = next(self.parameters())
            self.distribution_and_value(torch.zeros(1, *self.moments.mean.shape, device=weight.device))
        for hook in hooks:
            hook.remove()
        return sum(counted)


def _features(torso: nn.Module, shape: tuple[int, ...]) -> int:
    """The width of a torso's output, found by showing it one observation."""
    with torch.no_grad():
        out = torso(torch.zeros(1, *shape))
    if not isinstance(out, torch.Tensor) or out.ndim != 2 or out.shape[0] != 1:
        got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise ShoalError(
            f"The policy network must map [batch, {', '.join(map(str, shape))}] to [batch, features]; got {got}."
        )
    return out.shape[1]


def mlp_torso(hidden: tuple[int, ...], activation: str) -> Torso:
    """A maker of MLPs."""
    return lambda shape: MLP(shape, hidden, activation)
