"""A2C: one gradient step per rollout over the whole batch (Mnih et al. 2016, synchronous).

With V-trace, it is the learner of IMPALA (Espeholt et al. 2018).
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from shoal.algos.policy_gradient import PolicyGradient, PolicyGradientConfig
from shoal.core.errors import ShoalError
from shoal.core.settings import MAX_THREADS, Bounds
from shoal.learn import losses
from shoal.learn.learner import LearningRate


@dataclass(frozen=True)
class A2CConfig(PolicyGradientConfig):
    """Settings of A2C."""

    lr: LearningRate = 1e-3
    """Learning rate; with --lr-scaling, for mini-batches of --lr-reference-batch samples."""
    ent_coef: float = 0.01
    """Coefficient of the entropy bonus."""


@dataclass(frozen=True)
class IMPALAConfig(A2CConfig):
    """Settings of IMPALA: asynchronous A2C with V-trace."""

    vtrace: bool = True
    """Correct advantages and targets for policy lag with V-trace."""

    presets_of: ClassVar[str] = "a2c"
    run_defaults: ClassVar[dict[str, Any]] = dict(asynchronous=True)


@dataclass(frozen=True)
class A3CConfig(A2CConfig):
    """Settings of A3C: A2C with asynchronous actor-learners that share parameters."""

    actors: Annotated[int, Bounds(ge=1, le=MAX_THREADS)] = 4
    """Number of actor-learner threads; envs are split evenly."""

    presets_of: ClassVar[str] = "a2c"

    def check_rollout(self, steps: int, lanes: int, rnn: bool) -> None:
        if lanes % self.actors:
            raise ShoalError(
                f"{lanes} envs x agents cannot be split evenly between {self.actors} actors; change --num-envs or "
                "--actors."
            )

    def check_processes(self, steps: int, lanes: int, rnn: bool, processes: int) -> None:
        if processes > 1:
            raise ShoalError("A3C runs in one process; use --actors instead of --processes or --gpus.")


class A2C(PolicyGradient):
    """Advantage actor-critic."""

    metric_names = ("loss", "policy_gradient_loss", "value_loss", "entropy_loss")

    def _terms(self, batch, log_prob, value, weight):
        advantage = batch.advantage
        if self.config.vtrace:
            ratio = torch.exp(log_prob.detach() - batch.log_prob)
            advantage = ratio.clamp(max=self.config.rho_clip) * advantage
        return dict(
            policy_gradient_loss=losses.policy_gradient_loss(log_prob, advantage, weight),
            value_loss=losses.value_loss(value, batch.target, weight),
        )

    def _learn(self) -> None:
        self._optimizer_step(*self._gradient(None, *self._totals([None])), torch.ones((), device=self.device))
