"""Q-learning from a replay: DQN and what has been added to it, as options of one learner.

Double (van Hasselt et al. 2016), dueling (Wang et al. 2016), prioritised replay (Schaul et al. 2016), n-step targets,
categorical values (C51, Bellemare et al. 2017), quantiles (QR-DQN, Dabney et al. 2018), noisy networks (Fortunato et
al. 2018); all but quantiles together are Rainbow (Hessel et al. 2018). Exploration rates may differ between envs
(Ape-X, Horgan et al. 2018).

The target network's period is counted in updates.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from shoal.core.world import Group
from shoal.errors import ShoalError
from shoal.learn import losses
from shoal.learn.learner import require
from shoal.learn.off_policy import OffPolicy, OffPolicyConfig, twin
from shoal.learn.replay import Sample
from shoal.learn.rollout import Rollout
from shoal.policy import QPolicy
from shoal.policy.q import check_choices

LEARNING, AIMING = 1, 2
"""Streams of the noise inside the network that learns and inside its target; acting has stream 0."""


@dataclass(frozen=True)
class QConfig(OffPolicyConfig):
    """Settings of Q-learning; by default plain DQN."""

    target_period: int = 500
    """Updates between two copies to the target network."""
    tau: float | None = None
    """Let the target network follow by this share of the way at every update instead (none: by copies)."""
    huber: float | None = 1.0
    """Largest pull of a plain Q-value's error (none: no limit): low for returns of about 1, none for large ones."""
    double: bool = False
    """Let the network that learns choose the action that the target network judges."""
    dueling: bool = False
    """Split Q-values into a value of the state and advantages of the choices."""
    atoms: int = 1
    """Numbers from v-min to v-max whose probabilities make up a Q-value (1: it is one number; C51: 51)."""
    v_min: float = -10.0
    """Least return that atoms can tell."""
    v_max: float = 10.0
    """Highest return that atoms can tell."""
    quantiles: int = 0
    """Quantiles that make up a Q-value (0: none; QR-DQN: 200)."""
    noisy: bool = False
    """Explore by noise in the last layer's weights, besides epsilon."""
    epsilon: float = 1.0
    """How often agents act at random at first."""
    epsilon_end: float = 0.05
    """How often they do so later."""
    epsilon_share: float = 0.2
    """Share of the run over which it falls."""
    epsilon_spread: float = 0.0
    """Let the envs differ: epsilon^(1 + spread i / (N - 1)) for env i of N (Ape-X: 7)."""

    network: ClassVar[tuple[str, ...]] = ("dueling", "noisy", "atoms", "v_min", "v_max", "quantiles")

    def __post_init__(self):
        super().__post_init__()
        for name in ("target_period", "atoms"):
            require(name.replace("_", "-"), getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("quantiles", "epsilon_spread"):
            require(name.replace("_", "-"), getattr(self, name), getattr(self, name) >= 0, "at least 0")
        for name in ("epsilon", "epsilon_end", "epsilon_share"):
            require(name.replace("_", "-"), getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")
        require("huber", self.huber, self.huber is None or self.huber > 0, "above 0")
        require("tau", self.tau, self.tau is None or 0 < self.tau <= 1, "above 0 and at most 1")
        require("v-max", self.v_max, self.v_max > self.v_min, f"above --v-min ({self.v_min:g})")
        if self.atoms > 1 and self.quantiles:
            raise ShoalError(
                f"Values are made up of atoms ({self.atoms}) or of quantiles ({self.quantiles}), not both."
            )

    def head(self) -> dict[str, Any]:
        """The settings of the policy's head."""
        return {name: getattr(self, name) for name in self.network}

    def check_group(self, group: Group, core: bool) -> None:
        check_choices(group)
        if core:
            raise ShoalError("Q-learning has no use for a core yet; use --core none, or --algo ppo or a2c.")
        super().check_group(group, core)

    def epsilon_at(self, done: float) -> float:
        """How often agents act at random after a share `done` of the run."""
        t = 1.0 if done >= self.epsilon_share else done / self.epsilon_share
        return self.epsilon + (self.epsilon_end - self.epsilon) * t


@dataclass(frozen=True)
class RainbowConfig(QConfig):
    """Settings of Rainbow: everything at once."""

    n_step: int = 3
    """Rewards that a target sums before it looks at a value."""
    double: bool = True
    """Let the network that learns choose the action that the target network judges."""
    dueling: bool = True
    """Split Q-values into a value of the state and advantages of the choices."""
    prioritised: bool = True
    """Draw transitions the more often the larger their error was."""
    atoms: int = 51
    """Numbers from v-min to v-max whose probabilities make up a Q-value (1: it is one number; C51: 51)."""
    noisy: bool = True
    """Explore by noise in the last layer's weights, besides epsilon."""
    epsilon_end: float = 0.0
    """How often they do so later."""
    epsilon_share: float = 0.1
    """Share of the run over which it falls."""


class QLearner(OffPolicy):
    """Learns what choices are worth from a replay of past rollouts."""

    metric_names = ("loss", "q_value", "td_error")
    policy: QPolicy
    config: QConfig

    def __init__(
        self,
        policy: QPolicy,
        rollout: Rollout,
        config: QConfig,
        seed: int = 0,
        compiled: bool = False,
        bf16: bool = False,
    ):
        super().__init__(policy, rollout, config, seed, compiled, bf16)
        made, self.target_flat = twin(policy, self.optimiser)
        self.target = cast(QPolicy, made)
        plans = (policy.noise_plan(seed, LEARNING, self.updates), self.target.noise_plan(seed, AIMING, self.updates))
        self._noise = [plan for plan in plans if plan is not None]
        self._spread = _powers(rollout, config.epsilon_spread)
        self._losses = self._wrap(self._losses_eager)
        self.set_progress(0.0)

    # --- one rollout, one update ------------------------------------------------------------------------------------

    def update(self) -> None:
        for plan in self._noise:
            plan()
        sample = self.replay.sample(self.config.batch_size, self.beta)
        found = self._losses(sample)
        self._descend(found, self.optimiser.gradient(found["loss"]), torch.ones((), device=self.device))
        with torch.no_grad():
            if self.config.prioritised:
                self.replay.update_priorities(sample.place, found["error"].detach())
            self._count()
            self._follow()

    def adopt(self) -> None:
        self.target_flat.copy_(self.optimiser.flat)

    def _follow(self) -> None:
        """Let the target network follow: a share of the way, or all of it when a period is over."""
        c = self.config
        share = (self.updates % c.target_period == 0).float() if c.tau is None else c.tau
        self.target_flat.lerp_(self.optimiser.flat, share)

    def _losses_eager(self, sample: Sample) -> dict[str, torch.Tensor]:
        """The loss, and by how much each sample was off; what the parts of an action lose is added up."""
        head = self.policy.head
        with self._precision():
            numbers = self.policy.numbers(sample.seen)
        with torch.no_grad():
            later, chosen = self._judged(sample)
        action = sample.action.view(len(sample.place), -1).long()
        loss = worth = error = torch.zeros_like(sample.reward)
        for i, part in enumerate(numbers.split(head.nvec, dim=1)):
            own = _pick(part, action[:, i])
            ahead = _pick(later.split(head.nvec, dim=1)[i], chosen[:, i])
            lost, off = self._lost(own, ahead, sample)
            loss, error = loss + lost, error + off
            worth = worth + head.worth(own.unsqueeze(1)).squeeze(1) / len(head.nvec)
        weight = sample.weight
        return dict(
            loss=(weight * loss).mean(), error=error, q_value=worth.detach().mean(), td_error=error.detach().mean()
        )

    def _judged(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """What the target network tells of the choices n steps later, and which of them are taken [batch, parts]."""
        head = self.policy.head
        with self._precision():
            later = self.target.numbers(sample.later)
            judge = self.policy.numbers(sample.later) if self.config.double else later
        return later, head.best(head.worth(judge, sample.later_mask))

    def _lost(self, own: torch.Tensor, ahead: torch.Tensor, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and size of the error [batch] of numbers [batch, width], given those n steps later."""
        head = self.policy.head
        if head.atoms > 1:
            aim = losses.categorical_projection(ahead.softmax(-1), sample.reward, sample.discount, head.support)
            lost = losses.cross_entropy(own, aim)
            return lost, lost
        aim = sample.reward.unsqueeze(-1) + sample.discount.unsqueeze(-1) * ahead
        if head.quantiles:
            lost = losses.quantile_loss(own, aim)
            return lost, lost
        error = (own - aim).squeeze(-1)
        return losses.huber(error, self.config.huber), error.abs()

    # --- between updates -------------------------------------------------------------------------------------------

    def set_progress(self, done: float) -> None:
        """Tell how much of the run is over: sets epsilon too."""
        super().set_progress(done)
        c = self.config
        assert self.rollout.epsilon is not None
        self.rollout.epsilon.copy_(torch.pow(c.epsilon_at(done), self._spread))

    def remark(self) -> str:
        c = self.config
        follow = f"copied every {c.target_period:,} updates" if c.tau is None else f"following by {c.tau:g}"
        return f"{super().remark()}; target network {follow}"

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {**super().state_dict(), "target": self.target_flat}


def _powers(rollout: Rollout, spread: float) -> torch.Tensor:
    """What epsilon is raised to for each env and agent, [N, A]."""
    envs, agents = rollout.reward.shape[1:]
    return torch.linspace(1.0, 1.0 + spread, envs, device=rollout.reward.device).unsqueeze(-1).expand(-1, agents)


def _pick(numbers: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """The numbers [batch, width] of one choice each [batch], out of [batch, choices, width]."""
    if not numbers.is_cuda:
        return numbers[torch.arange(len(choice)), choice]
    # The gradient of a gather scatters, which a compiler cannot fuse with its neighbours; that of a sum it can.
    here = torch.arange(numbers.shape[1], device=choice.device) == choice.unsqueeze(-1)
    return torch.where(here.unsqueeze(-1), numbers, 0.0).sum(dim=1)
