"""Actor-critic policy of the policy-gradient algorithms: encoder, action head and value head."""

import torch
from torch import nn

from shoal.core.world import Group
from shoal.policy.base import Policy
from shoal.policy.heads import make_head
from shoal.policy.mlp import MLP, Encoder, linear, orthogonal, wide_linear
from shoal.policy.recurrent import RNNMaker


class ActorCritic(Policy):
    """Maps observations [batch, *shape] to action distributions [batch, width] and values [batch].

    With an RNN, `step` acts and `sequence` learns. The recurrent state [batch, state_size] is zero at an episode's
    start, and actor and critic always share one encoder.
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
        self.shared_encoder = shared_encoder or rnn is not None
        self.value_encoder = self.policy_encoder if self.shared_encoder else encoder(group.policy_observation.shape)
        self.head = make_head(group.action, self.features, log_std_init)
        self.value_head = orthogonal(nn.Linear(self.features, 1), 1.0)

    def distribution(self, observation: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Parameters of the head's distribution [batch, width]."""
        return self.head(self.policy_encoder(self._preprocess(observation)), mask)

    def value(self, observation: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        """Values [batch]; with an RNN, given the recurrent state [batch, state_size]."""
        if state is not None:
            return self.step(observation, state)[1]
        layer = self.value_head
        return linear(self.value_encoder(self._preprocess(observation)), layer.weight, layer.bias).float().squeeze(-1)

    def distribution_and_value(
        self, observation: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters of the distribution [batch, width] and values [batch]."""
        if not self.shared_encoder:
            return self.distribution(observation, mask), self.value(observation)
        return self._both(self.policy_encoder(self._preprocess(observation)), mask)

    def step(
        self, observation: torch.Tensor, state: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Advance the RNN by one step.

        Returns:
            Parameters of the distribution [batch, width], values [batch], next state [batch, state_size].
        """
        assert self.rnn is not None
        features, after = self.rnn.step(self.policy_encoder(self._preprocess(observation)), state)
        return *self._both(features, mask), after

    def sequence(
        self, observation: torch.Tensor, state: torch.Tensor, ended: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Unroll the RNN over n sequences of T steps.

        Args:
            observation: [T * n, *shape].
            state: State before the first step [n, state_size].
            ended: bool [T, n], whether the episode ended with the step; the state is then reset to zero.
            mask: bool [T * n, choices], the allowed choices.

        Returns:
            Parameters of the distribution [T * n, width] and values [T * n].
        """
        assert self.rnn is not None
        features = self.policy_encoder(self._preprocess(observation)).unflatten(0, ended.shape)
        return self._both(self.rnn.sequence(features, state, ended).flatten(0, 1), mask)

    def _both(self, features: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters and values from shared features, in one matrix product."""
        both = (self.head.linear, self.value_head)
        weight, bias = torch.cat([layer.weight for layer in both]), torch.cat([layer.bias for layer in both])
        # float32 after an RNN: its output is float32, and advantages are small differences between values.
        raw = (linear if self.rnn is None else wide_linear)(features, weight, bias)
        return self.head.params(raw[..., :-1], mask), raw[..., -1].float()

    def _encoders(self) -> list[nn.Module]:
        return [self.policy_encoder] if self.shared_encoder else [self.policy_encoder, self.value_encoder]


def mlp_encoder(hidden: tuple[int, ...], activation: str) -> Encoder:
    """A factory of MLP encoders."""
    return lambda shape: MLP(shape, hidden, activation)
