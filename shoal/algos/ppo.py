"""PPO: epochs of mini-batches over one rollout with a clipped objective (Schulman et al. 2017)."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from shoal.algos.policy_gradient import PolicyGradient, PolicyGradientConfig
from shoal.core.errors import ShoalError
from shoal.core.settings import Bounds, Positive, PositiveFloat
from shoal.learn import losses
from shoal.learn.shuffle import order_plan

OTHER_PROCESS = 0x2545F491
"""Offset between the shuffle seeds of consecutive processes."""

MAX_EPOCHS = 1000
"""Maximum number of epochs, since each needs a kernel launch for its shuffle."""


@dataclass(frozen=True)
class PPOConfig(PolicyGradientConfig):
    """Settings of PPO."""

    epochs: Annotated[int, Bounds(ge=1, le=MAX_EPOCHS)] = 4
    """Epochs over each rollout."""
    num_minibatches: Positive = 4
    """Mini-batches per epoch; must divide the rollout's samples (with an RNN: envs x agents)."""
    clip_range: PositiveFloat = 0.2
    """Clip range of the probability ratio."""
    clip_range_vf: PositiveFloat | None = None
    """Clip range of the value function (none: no clipping)."""
    target_kl: PositiveFloat | None = None
    """Skip the rest of an update once the approximate KL divergence exceeds this (none: never)."""

    def batch(self, samples: int) -> int:
        return samples // self.num_minibatches

    def check_rollout(self, steps: int, lanes: int, rnn: bool) -> None:
        if rnn and lanes % self.num_minibatches:
            raise ShoalError(
                f"With an RNN, mini-batches hold whole sequences, but the {lanes} sequences (num-envs x agents) do not "
                f"divide into {self.num_minibatches} mini-batches; change --num-envs or --num-minibatches."
            )
        if steps * lanes % self.num_minibatches:
            raise ShoalError(
                f"A rollout of {steps * lanes} samples (num-envs x agents x rollout) does not divide into "
                f"{self.num_minibatches} mini-batches; change --num-envs, --rollout-steps or --num-minibatches."
            )

    def check_processes(self, steps: int, lanes: int, rnn: bool, processes: int) -> None:
        units = lanes if rnn else steps * lanes
        if units % self.num_minibatches:
            what = "sequences" if rnn else "samples"
            raise ShoalError(
                f"Each of {processes} processes has {units} {what} of a rollout, which do not divide into "
                f"{self.num_minibatches} mini-batches; change --num-envs, --num-minibatches or the number of processes."
            )


@dataclass(frozen=True)
class APPOConfig(PPOConfig):
    """Settings of APPO: asynchronous PPO with V-trace."""

    epochs: Annotated[int, Bounds(ge=1, le=MAX_EPOCHS)] = 1
    """Epochs over each rollout."""
    vtrace: bool = True
    """Correct advantages and targets for policy lag with V-trace."""

    presets_of: ClassVar[str] = "ppo"
    run_defaults: ClassVar[dict[str, Any]] = dict(asynchronous=True)


class PPO(PolicyGradient):
    """Proximal policy optimization."""

    metric_names = ("loss", "policy_gradient_loss", "value_loss", "entropy_loss", "approx_kl", "clip_fraction")
    config: PPOConfig

    def __init__(self, policy, rollout, config: PPOConfig, seed: int = 0, compiled: bool = False, bf16: bool = False):
        super().__init__(policy, rollout, config, seed, compiled, bf16)
        self.order = torch.zeros(self.units, dtype=torch.int32, device=self.device)
        # Each process shuffles its own samples.
        own = seed + OTHER_PROCESS * self.reducer.rank
        self._shuffles = [order_plan(self.order, own, epoch, self.updates) for epoch in range(config.epochs)]

    def _terms(self, batch, log_prob, value, weight):
        c = self.config
        if c.clip_range_vf is None:
            value_loss = losses.value_loss(value, batch.target, weight)
        else:
            value_loss = losses.clipped_value_loss(value, batch.value, batch.target, c.clip_range_vf, weight)
        with torch.no_grad():
            kl = losses.approximate_kl(log_prob, batch.log_prob, weight)
            clipped = losses.clip_fraction(log_prob, batch.log_prob, c.clip_range, weight)
        return dict(
            policy_gradient_loss=losses.clipped_policy_loss(
                log_prob, batch.log_prob, batch.advantage, c.clip_range, weight
            ),
            value_loss=value_loss,
            approx_kl=kl,
            clip_fraction=clipped,
        )

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.order.nbytes

    def _learn(self) -> None:
        go = torch.ones((), device=self.device)
        size = self.order.shape[0] // self.config.num_minibatches
        for shuffle in self._shuffles:
            shuffle()
            picks = self.order.split(size)
            for pick, totals in zip(picks, self._totals(picks), strict=True):
                terms, gradient = self._gradient(pick, totals)
                if self.config.target_kl is not None:
                    # A flag on the device, not a branch, turns the remaining steps into no-ops.
                    # A KL of NaN does not set it: the optimizer refuses the gradient.
                    kl = terms["approx_kl"].clone()
                    self.reducer.average(kl)
                    go = torch.where(kl > self.config.target_kl, 0.0, go)
                self._optimizer_step(terms, gradient, go)
