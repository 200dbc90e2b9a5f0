"""The policy of the policy-gradient learners: torso, action head and value, with running normalisation inside."""

import torch
from torch import nn

from shoal.core.world import Group
from shoal.errors import ShoalError
from shoal.policy.core import CoreMaker
from shoal.policy.heads import make_head
from shoal.policy.mlp import MLP, Torso, linear, orthogonal
from shoal.policy.normalise import RunningMoments

OBSERVATION_CLIP = 10.0
"""Normalised observations are cut off at this many standard deviations."""


class ActorCritic(nn.Module):
    """What a group sees [batch, *seen] to a distribution over actions and a value [batch].

    A torso may say that it `takes_bytes`: images then reach it as uint8, and it scales them itself; or that it
    `scales_all` that it sees; or it names, as `pixels`, the numbers of a vector that it scales. None of these are
    normalised, whatever `normalise` says. A torso that has running moments of its own (`has_moments`) is told what was
    seen by `take_in`.

    With a `core` the policy remembers: it acts by `step` and learns by `sequence`, and what it knows of an episode is a
    state [batch, state_size], zeros at first. Policy and value then share one torso, whatever `shared` says.
    """

    def __init__(
        self,
        group: Group,
        torso: Torso,
        shared: bool,
        normalise: bool,
        log_std: float,
        core: CoreMaker | None = None,
    ):
        super().__init__()
        shape = group.seen.shape
        self.group = group
        self.shared = shared = shared or core is not None
        self.moments = RunningMoments(shape)
        self.policy_torso = torso(shape)
        self.as_bytes = group.observation.dtype == torch.uint8 and getattr(self.policy_torso, "takes_bytes", False)
        self.normalise = normalise and not self.as_bytes and not getattr(self.policy_torso, "scales_all", False)
        self.value_torso = self.policy_torso if shared else torso(shape)
        features = _features(self.policy_torso, shape)
        self.core = None if core is None else core(features)
        self.state_size = 0 if self.core is None else self.core.state_size
        """Numbers that an agent remembers (0: there is no core)."""
        features = features if self.core is None else self.core.size
        self.head = make_head(group.action, features, log_std)
        self.value_head = orthogonal(nn.Linear(features, 1), 1.0)

    def _see(self, observation: torch.Tensor) -> torch.Tensor:
        if self.as_bytes:
            return observation
        observation = observation.float()
        if not self.normalise:
            return observation
        scaled = (observation - self.moments.mean) * self.moments.scale()
        scaled = scaled.clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)
        pixels = getattr(self.policy_torso, "pixels", None)
        return scaled if pixels is None else torch.where(pixels, observation, scaled)

    def distribution(self, observation: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Parameters of the head's distribution [batch, width]."""
        return self.head(self.policy_torso(self._see(observation)), mask)

    def value(self, observation: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        """Values [batch]; with a core, of what is seen in a state."""
        if state is not None:
            return self.step(observation, state)[1]
        layer = self.value_head
        return linear(self.value_torso(self._see(observation)), layer.weight, layer.bias).float().squeeze(-1)

    def distribution_and_value(
        self, observation: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.shared:
            return self.distribution(observation, mask), self.value(observation)
        return self._both(self.policy_torso(self._see(observation)), mask)

    def step(
        self, observation: torch.Tensor, state: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Parameters, values and the state after, for one observation each in the state before it."""
        assert self.core is not None
        features, after = self.core.step(self.policy_torso(self._see(observation)), state)
        return *self._both(features, mask), after

    def sequence(
        self, observation: torch.Tensor, state: torch.Tensor, ended: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters and values of n sequences of observations, [T * n, ...], from the states [n, S] before the first.

        `ended` [T, n] tells where an episode ended with the step: the next observation is met with an empty state.
        """
        assert self.core is not None
        features = self.policy_torso(self._see(observation)).unflatten(0, ended.shape)
        return self._both(self.core.sequence(features, state, ended).flatten(0, 1), mask)

    def _both(self, features: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters and values on top of the same features, where one layer does for both."""
        both = (self.head.linear, self.value_head)
        weight, bias = torch.cat([layer.weight for layer in both]), torch.cat([layer.bias for layer in both])
        raw = linear(features, weight, bias)
        return self.head.params(raw[..., :-1], mask), raw[..., -1].float()

    @property
    def has_moments(self) -> bool:
        """Whether anything is normalised by what was seen before."""
        return self.normalise or any(getattr(torso, "has_moments", False) for torso in self._torsos())

    def take_in(self, observation: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Let running moments know what was seen [batch, *seen]; `weight` [batch] of 0 and 1 leaves samples out."""
        if self.normalise:
            self.moments.merge(observation, weight)
        for torso in self._torsos():
            if getattr(torso, "has_moments", False):
                torso.take_in(observation, weight)

    def _torsos(self) -> list[nn.Module]:
        return [self.policy_torso] if self.shared else [self.policy_torso, self.value_torso]

    def activations(self) -> int:
        """Numbers that one sample leaves behind on its way through: what an update has to keep."""
        counted = [self.head.linear.out_features, 1]
        if self.group.stack > 1:  # what is seen is put together for the occasion
            counted.append(self.group.seen.size)
        if self.core is not None:
            counted.append(self.core.activations())
        for torso in self._torsos():
            counted.append(_numbers(torso, self.moments.mean.shape))
        return sum(counted)


def _numbers(torso: nn.Module, shape: tuple[int, ...]) -> int:
    """Numbers that one sample leaves behind in a torso: two per output of a layer of an MLP, else one per output.

    A torso whose layers are no modules of their own counts by itself (`activations`).
    """
    if hasattr(torso, "activations"):
        return torso.activations()
    mlps = [m for m in torso.modules() if isinstance(m, MLP)]  # these do not call their layers as modules
    inside = {m for mlp in mlps for m in mlp.modules()}
    counted = [2 * m.out_features for m in inside if isinstance(m, nn.Linear)]
    modules = [m for m in torso.modules() if m not in inside and not list(m.children())]
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
