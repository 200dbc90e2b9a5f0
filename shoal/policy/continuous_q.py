"""Policy of DDPG, TD3 and SAC: an actor, and critics that estimate the Q-values of its actions."""

import math

import torch
from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.spaces import Box
from shoal.core.world import Group
from shoal.policy.base import Policy, feature_size
from shoal.policy.heads import Head, to_box
from shoal.policy.mlp import MLP, Encoder, orthogonal, wide_linear

LOG_STD = (-5.0, 2.0)
"""Bounds of a stochastic actor's log standard deviation, before squashing."""

JOINT_FEATURES = 256
"""Width of the layer that joins an encoder's features with the action."""


class SquashedHead(Head):
    """Maps features to actions in [-1, 1]; the world receives them scaled to its bounds.

    Deterministic: a = tanh(m), plus normal noise of standard deviation `exploration_noise` while collecting.
    Stochastic: a = tanh(m + s n) with a state-dependent standard deviation s, and a temperature that weights the
    entropy.
    """

    gaussian_noise = True
    eval_epsilon = 0.0
    """Random-action rate of a stochastic evaluation."""

    def __init__(
        self, features: int, space: Box, stochastic: bool, exploration_noise: float, temperature: float | None
    ):
        super().__init__()
        self.space, self.stochastic, self.exploration_noise = space, stochastic, exploration_noise
        self.noise_width = 1 + space.size
        self.linear = orthogonal(nn.Linear(features, space.size * (1 + stochastic)), 0.01)
        if stochastic:
            self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature or 1.0)))

    def params(self, raw: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Means before squashing and, if stochastic, log standard deviations, [batch, size] each."""
        raw = raw.float()
        if not self.stochastic:
            return raw
        mean, log_std = raw.chunk(2, dim=-1)
        low, high = LOG_STD
        return torch.cat([mean, low + 0.5 * (high - low) * (torch.tanh(log_std) + 1.0)], dim=-1)

    def sample_squashed(self, params: torch.Tensor, normal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reparameterized actions [batch, size] of a stochastic actor, and their log-probabilities [batch].

        log p(a) = log N(u; m, s) - sum log(1 - tanh(u)^2), with log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)).
        """
        mean, log_std = params.chunk(2, dim=-1)
        u = mean + log_std.exp() * normal
        log_prob = -0.5 * normal.square() - log_std - 0.5 * math.log(2.0 * math.pi)
        squash = 2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))
        return torch.tanh(u), (log_prob - squash).sum(dim=-1)

    def explore(self, noise: torch.Tensor, rate: torch.Tensor | float) -> None:
        """Prepare noise [..., lanes, width] for `sample`, in place; `rate` is the probability of a random action."""
        noise[..., 0] = torch.special.ndtr(noise[..., 0]) + rate

    def sample(self, params: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions [..., *shape], and zeros instead of log-probabilities, which are unused.

        Noise is normal except for its first column (`explore`): where that is 1 or more, the action is uniform.
        """
        normal = noise[..., 1:]
        if self.stochastic:
            action = self.sample_squashed(params, normal)[0]
        else:
            action = (torch.tanh(params) + self.exploration_noise * normal).clamp(-1.0, 1.0)
        uniform = 2.0 * torch.special.ndtr(normal) - 1.0
        action = torch.where(noise[..., :1] >= 1.0, uniform, action)
        return action.unflatten(-1, self.space.shape), torch.zeros_like(noise[..., 0])

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        """Actions without noise."""
        return torch.tanh(params[..., : self.space.size]).unflatten(-1, self.space.shape)

    def to_world(self, action: torch.Tensor) -> torch.Tensor:
        """The action in the world's units."""
        return to_box(self.space, action)


class Critic(nn.Module):
    """Q-values [batch] of observations [batch, *shape] and actions [batch, size].

    An MLP encodes both, concatenated. The features of any other encoder are joined with the action in an extra layer.
    """

    def __init__(self, encoder: Encoder, observation_shape: tuple[int, ...], actions: int):
        super().__init__()
        self.encoder = encoder(observation_shape)
        self.concatenates_inputs = type(self.encoder) is MLP
        if self.concatenates_inputs:
            shape = (math.prod(observation_shape) + actions,)
            self.encoder = encoder(shape)
            features = feature_size(self.encoder, shape)
        else:
            self.joint = MLP((feature_size(self.encoder, observation_shape) + actions,), (JOINT_FEATURES,), "relu")
            features = JOINT_FEATURES
        self.linear = orthogonal(nn.Linear(features, 1), 1.0)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        if self.concatenates_inputs:
            features = self.encoder(torch.cat([observation.flatten(1), action], dim=-1))
        else:
            features = self.joint(torch.cat([self.encoder(observation).float(), action], dim=-1))
        return wide_linear(features, self.linear.weight, self.linear.bias).squeeze(-1)


class ContinuousQPolicy(Policy):
    """Maps observations [batch, *shape] to actions and their Q-values; `head` are settings of the SquashedHead."""

    head: SquashedHead
    explores = True

    def __init__(self, group: Group, encoder: Encoder, normalize: bool, critics: int, **head):
        if reason := unsupported_actions(group):
            raise ShoalError(f"{reason}.")
        assert isinstance(group.action, Box)
        super().__init__(group, encoder, normalize)
        self.head = SquashedHead(self.features, group.action, **head)
        self.critics = nn.ModuleList(
            Critic(encoder, group.policy_observation.shape, group.action.size) for _ in range(critics)
        )

    @property
    def actor(self) -> nn.Module:
        """The modules that choose actions."""
        return nn.ModuleList([self.policy_encoder, self.head])

    def distribution(self, observation: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Parameters of the head's distribution [batch, width]."""
        return self.head(self.policy_encoder(self._preprocess(observation)))

    def q_values(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Q-values of each critic, [critics, batch], for actions [batch, *shape]."""
        observation, action = self._preprocess(observation), action.view(len(action), -1)
        return torch.stack([critic(observation, action) for critic in self.critics])

    def _encoders(self) -> list[nn.Module]:
        return [self.policy_encoder, *(critic.encoder for critic in self.critics if isinstance(critic, Critic))]

    def activations(self) -> int:
        critics = [critic for critic in self.critics if isinstance(critic, Critic)]
        return super().activations() + sum(1 + 2 * JOINT_FEATURES * (not c.concatenates_inputs) for c in critics)


def unsupported_actions(group: Group) -> str:
    """The reason why DDPG, TD3 and SAC do not support a group's actions ("": they do)."""
    if not isinstance(group.action, Box):
        kind = type(group.action).__name__
        return f"DDPG, TD3 and SAC need Box actions, but group {group.name!r} uses {kind}"
    if not group.action.bounded:
        return f"DDPG, TD3 and SAC need bounded Box actions, but those of group {group.name!r} are unbounded"
    return ""
