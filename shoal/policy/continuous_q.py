"""The policy of the Q-learners of real-valued actions: an actor, and critics that tell what its actions are worth."""

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
"""Bounds of the logarithm of a stochastic actor's spread, before actions are squashed."""

JOINED = 256
"""Width of the layer in which features of a encoder that sees no actions meet the action."""


class SquashedHead(Head):
    """From features to actions between -1 and 1, which the world receives scaled to its bounds.

    Deterministic: a = tanh(m), and normal noise of `exploration_noise` is added when agents act. Stochastic: a = tanh(m + s
    n), with a spread s that depends on the state, and a temperature that weighs entropy against return.
    """

    gaussian_noise = True
    played_rate = 0.0
    """How often it acts at random where actions are drawn in an evaluation."""

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
        """Means before squashing and, of a stochastic actor, logarithms of the spread, [batch, size] each."""
        raw = raw.float()
        if not self.stochastic:
            return raw
        mean, spread = raw.chunk(2, dim=-1)
        low, high = LOG_STD
        return torch.cat([mean, low + 0.5 * (high - low) * (torch.tanh(spread) + 1.0)], dim=-1)

    def drawn(self, params: torch.Tensor, normal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions [batch, size] of a stochastic actor from normal noise, and their log-probabilities [batch].

        log p(a) = log N(u; m, s) - sum log(1 - tanh(u)^2), with log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)).
        """
        mean, log_std = params.chunk(2, dim=-1)
        u = mean + log_std.exp() * normal
        log_prob = -0.5 * normal.square() - log_std - 0.5 * math.log(2.0 * math.pi)
        squash = 2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))
        return torch.tanh(u), (log_prob - squash).sum(dim=-1)

    def explore(self, noise: torch.Tensor, rate: torch.Tensor | float) -> None:
        """Let agents act at random at a rate: fresh noise [..., lanes, width] becomes what `sample` takes."""
        noise[..., 0] = torch.special.ndtr(noise[..., 0]) + rate

    def sample(self, params: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions, and zeros for their log-probabilities, which nobody needs.

        Noise is normal, but for its first column (`explore`): where that has reached 1, any action is as likely.
        """
        normal = noise[..., 1:]
        if self.stochastic:
            action = self.drawn(params, normal)[0]
        else:
            action = (torch.tanh(params) + self.exploration_noise * normal).clamp(-1.0, 1.0)
        evenly = 2.0 * torch.special.ndtr(normal) - 1.0
        action = torch.where(noise[..., :1] >= 1.0, evenly, action)
        return action.unflatten(-1, self.space.shape), torch.zeros_like(noise[..., 0])

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        """Actions without noise."""
        return torch.tanh(params[..., : self.space.size]).unflatten(-1, self.space.shape)

    def to_world(self, action: torch.Tensor) -> torch.Tensor:
        """What the world receives for an action of this head."""
        return to_box(self.space, action)


class Critic(nn.Module):
    """What actions [batch, size] are worth where [batch, *seen] is seen: Q-values [batch].

    An MLP sees both together; features of any other encoder are joined with the action by a layer of their own.
    """

    def __init__(self, encoder: Encoder, seen: tuple[int, ...], actions: int):
        super().__init__()
        self.encoder = encoder(seen)
        self.together = type(self.encoder) is MLP
        if self.together:
            shape = (math.prod(seen) + actions,)
            self.encoder = encoder(shape)
            features = feature_size(self.encoder, shape)
        else:
            self.joint = MLP((feature_size(self.encoder, seen) + actions,), (JOINED,), "relu")
            features = JOINED
        self.linear = orthogonal(nn.Linear(features, 1), 1.0)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        if self.together:
            features = self.encoder(torch.cat([observation.flatten(1), action], dim=-1))
        else:
            features = self.joint(torch.cat([self.encoder(observation).float(), action], dim=-1))
        return wide_linear(features, self.linear.weight, self.linear.bias).squeeze(-1)


class ContinuousQPolicy(Policy):
    """What a group sees [batch, *seen] to actions, and what they are worth; `head` are settings of the SquashedHead."""

    head: SquashedHead
    explores = True

    def __init__(self, group: Group, encoder: Encoder, normalize: bool, critics: int, **head):
        if reason := no_bounded_box(group):
            raise ShoalError(f"{reason}.")
        super().__init__(group, encoder, normalize)
        self.head = SquashedHead(self.features, group.action, **head)
        self.critics = nn.ModuleList(
            Critic(encoder, group.policy_observation.shape, group.action.size) for _ in range(critics)
        )

    @property
    def actor(self) -> nn.Module:
        """The parts that choose actions."""
        return nn.ModuleList([self.policy_encoder, self.head])

    def distribution(self, observation: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Parameters of the head's distribution [batch, width]."""
        return self.head(self.policy_encoder(self._see(observation)))

    def q_values(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """What each critic says that actions [batch, *shape] are worth, [critics, batch]."""
        seen, action = self._see(observation), action.view(len(action), -1)
        return torch.stack([critic(seen, action) for critic in self.critics])

    def _torsos(self) -> list[nn.Module]:
        return [self.policy_encoder, *(critic.encoder for critic in self.critics if isinstance(critic, Critic))]

    def activations(self) -> int:
        return super().activations() + sum(1 + 2 * JOINED * (not critic.together) for critic in self.critics)


def no_bounded_box(group: Group) -> str:
    """Why DDPG, TD3 and SAC do not support the actions of a group; "" if they do."""
    if not isinstance(group.action, Box):
        return f"DDPG, TD3 and SAC choose real numbers, but group {group.name!r} acts by {type(group.action).__name__}"
    if not group.action.bounded:
        return f"DDPG, TD3 and SAC need actions with bounds, but those of group {group.name!r} have none"
    return ""
