"""The policy of the policy-gradient learners: encoder, action head and value, with running normalization inside."""

import torch
from torch import nn

from shoal.core.world import Group
from shoal.policy.base import Policy
from shoal.policy.heads import make_head
from shoal.policy.mlp import MLP, Encoder, linear, orthogonal, wide_linear
from shoal.policy.recurrent import RNNMaker


class ActorCritic(Policy):
    """What a group sees [batch, *seen] to a distribution over actions and a value [batch].

    With a `rnn` the policy remembers: it acts by `step` and learns by `sequence`, and what it knows of an episode is a
    state [batch, state_size], zeros at first. Policy and value then share one encoder, whatever `shared_encoder` says.
    """

    def __init__(
        self,
        group: Group,
        encoder: Encoder,
        shared_encoder: bool,
        normalize: bool,
        log_std_init: float,
        rnn: RNNMaker | None = None,
    ):
        super().__init__(group, encoder, normalize, rnn)
        self.shared = shared_encoder or rnn is not None
        self.value_encoder = self.policy_encoder if self.shared else encoder(group.policy_observation.shape)
        self.head = make_head(group.action, self.features, log_std_init)
        self.value_head = orthogonal(nn.Linear(self.features, 1), 1.0)

    def distribution(self, observation: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Parameters of the head's distribution [batch, width]."""
        return self.head(self.policy_encoder(self._see(observation)), mask)

    def value(self, observation: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        """Values [batch]; with an RNN, of what is seen in a state."""
        if state is not None:
            return self.step(observation, state)[1]
        layer = self.value_head
        return linear(self.value_encoder(self._see(observation)), layer.weight, layer.bias).float().squeeze(-1)

    def distribution_and_value(
        self, observation: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.shared:
            return self.distribution(observation, mask), self.value(observation)
        return self._both(self.policy_encoder(self._see(observation)), mask)

    def step(
        self, observation: torch.Tensor, state: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Parameters, values and the state after, for one observation each in the state before it."""
        assert self.rnn is not None
        features, after = self.rnn.step(self.policy_encoder(self._see(observation)), state)
        return *self._both(features, mask), after

    def sequence(
        self, observation: torch.Tensor, state: torch.Tensor, ended: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters and values of n sequences of observations, [T * n, ...], from the states [n, S] before the first.

        `ended` [T, n] tells where an episode ended with the step: the next observation is met with an empty state.
        """
        assert self.rnn is not None
        features = self.policy_encoder(self._see(observation)).unflatten(0, ended.shape)
        return self._both(self.rnn.sequence(features, state, ended).flatten(0, 1), mask)

    def _both(self, features: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters and values on top of the same features, where one layer does for both."""
        both = (self.head.linear, self.value_head)
        weight, bias = torch.cat([layer.weight for layer in both]), torch.cat([layer.bias for layer in both])
        # What an RNN puts out is float32 anyway, and advantages are small differences between values.
        raw = (linear if self.rnn is None else wide_linear)(features, weight, bias)
        return self.head.params(raw[..., :-1], mask), raw[..., -1].float()

    def _torsos(self) -> list[nn.Module]:
        return [self.policy_encoder] if self.shared else [self.policy_encoder, self.value_encoder]


def mlp_encoder(hidden: tuple[int, ...], activation: str) -> Encoder:
    """A maker of MLPs."""
    return lambda shape: MLP(shape, hidden, activation)
