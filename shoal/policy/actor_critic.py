"""The policy of the policy-gradient learners: torso, action head and value, with running normalisation inside."""

import torch
from torch import nn

from shoal.core.world import Group
from shoal.errors import ShoalError
from shoal.policy.heads import make_head
from shoal.policy.mlp import MLP, Torso, linear, orthogonal
from shoal.policy.normalise import RunningMoments

OBSERVATION_CLIP = 10.0
"""Normalised observations are cut off at this many standard deviations."""


class ActorCritic(nn.Module):
    """Observations [batch, *shape] to a distribution over actions and a value [batch]."""

    def __init__(self, group: Group, torso: Torso, shared: bool, normalise: bool, log_std: float):
        super().__init__()
        shape = group.observation.shape
        self.group = group
        self.shared = shared
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
        layer = self.value_head
        return linear(self.value_torso(self._see(observation)), layer.weight, layer.bias).float().squeeze(-1)

    def distribution_and_value(
        self, observation: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.shared:
            return self.distribution(observation, mask), self.value(observation)
        both = (self.head.linear, self.value_head)  # on top of one torso, one layer does for both
        weight, bias = torch.cat([layer.weight for layer in both]), torch.cat([layer.bias for layer in both])
        raw = linear(self.policy_torso(self._see(observation)), weight, bias)
        return self.head.params(raw[..., :-1], mask), raw[..., -1].float()

    def activations(self) -> int:
        """Numbers that one sample leaves behind on its way through: what an update has to keep."""
        counted = [self.head.linear.out_features, 1]
        torsos = {id(torso): torso for torso in (self.policy_torso, self.value_torso)}.values()
        for torso in torsos:
            counted.append(_numbers(torso, self.moments.mean.shape))
        return sum(counted)


def _numbers(torso: nn.Module, shape: tuple[int, ...]) -> int:
    """Numbers that one sample leaves behind in a torso: two per output of a layer of an MLP."""
    if isinstance(torso, MLP):
        return sum(2 * layer.out_features for layer in torso.layers if isinstance(layer, nn.Linear))
    counted = []
    modules = [m for m in torso.modules() if not list(m.children())]
    hooks = [m.register_forward_hook(lambda *given: counted.append(given[-1].numel())) for m in modules]
    with torch.no_grad():
        weight = next(torso.parameters(), torch.zeros(0))
        torso(torch.zeros(1, *shape, device=weight.device))
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
