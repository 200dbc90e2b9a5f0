"""A2C: one step down the policy gradient per rollout, over the whole batch (Mnih et al. 2016, synchronous)."""

from dataclasses import dataclass

import torch

from shoal.learn import losses
from shoal.learn.policy_gradient import PolicyGradient, PolicyGradientConfig


@dataclass(frozen=True)
class A2CConfig(PolicyGradientConfig):
    """Settings of A2C."""

    lr: float = 1e-3
    """Learning rate of Adam."""
    entropy: float = 0.01
    """Weight of the entropy bonus."""


class A2C(PolicyGradient):
    """Advantage actor-critic."""

    metric_names = ("loss", "policy_gradient_loss", "value_loss", "entropy_loss")

    def _losses_eager(self, pick: torch.Tensor | None) -> dict[str, torch.Tensor]:
        log_prob, entropy, value, advantage, target, weight = self._evaluate(pick)
        policy_loss = losses.policy_gradient_loss(log_prob, advantage, weight)
        value_loss = losses.value_loss(value, target, weight)
        entropy_loss = -losses.weighted_mean(entropy, weight)
        loss = policy_loss + self.config.value_weight * value_loss + self.config.entropy * entropy_loss
        return dict(loss=loss, policy_gradient_loss=policy_loss, value_loss=value_loss, entropy_loss=entropy_loss)

    def _learn(self) -> None:
        self._descend(self._losses(None), torch.ones((), device=self.device))
