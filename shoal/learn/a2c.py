"""A2C: one step down the policy gradient per rollout, over the whole batch (Mnih et al. 2016, synchronous)."""

from dataclasses import dataclass

import torch

from shoal.learn import losses
from shoal.learn.policy_gradient import PolicyGradient, PolicyGradientConfig


@dataclass(frozen=True)
class A2CConfig(PolicyGradientConfig):
    """Settings of A2C."""

    lr: float = 1e-3
    """Learning rate; with --lr-scale, of batches of --lr-batch samples."""
    entropy: float = 0.01
    """Weight of the entropy bonus."""


class A2C(PolicyGradient):
    """Advantage actor-critic."""

    metric_names = ("loss", "policy_gradient_loss", "value_loss", "entropy_loss")

    def _terms(self, batch, log_prob, value, weight):
        return dict(
            policy_gradient_loss=losses.policy_gradient_loss(log_prob, batch.advantage, weight),
            value_loss=losses.value_loss(value, batch.target, weight),
        )

    def _learn(self) -> None:
        self._descend(*self._gradient(None), torch.ones((), device=self.device))
