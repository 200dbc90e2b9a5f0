"""Q-learning from a replay: DQN and what has been added to it, as options of one learner.

Double (van Hasselt et al. 2016), dueling (Wang et al. 2016), prioritised replay (Schaul et al. 2016), n-step targets,
categorical values (C51, Bellemare et al. 2017), quantiles (QR-DQN, Dabney et al. 2018), noisy networks (Fortunato et
al. 2018); all but quantiles together are Rainbow (Hessel et al. 2018). Exploration rates may differ between envs
(Ape-X, Horgan et al. 2018).

What is held fixed when batch and number of envs change is the replay ratio; the target network's period is counted in
updates; for larger batches --lr-scale sqrt.
"""

import copy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import torch

from shoal.core.world import Group
from shoal.errors import ShoalError
from shoal.learn import losses
from shoal.learn.learner import Learner, LearnerConfig, require
from shoal.learn.replay import Replay, Sample
from shoal.learn.rollout import Rollout, stacked
from shoal.policy import QPolicy
from shoal.policy.q import check_choices

LEARNING, AIMING = 1, 2
"""Streams of the noise inside the network that learns and inside its target; acting has stream 0."""


@dataclass(frozen=True)
class QConfig(LearnerConfig):
    """Settings of Q-learning; by default plain DQN."""

    lr: float = 2.5e-4
    """Learning rate; with --lr-scale, of batches of --lr-batch samples."""
    clip_norm: float = 10.0
    """Largest norm of the gradient."""
    anneal: Literal["linear", "cosine", "none"] = "none"
    """How the learning rate falls over the rest of the run."""
    replay_size: int = 1_000_000
    """Transitions that are remembered, those of all envs and agents together."""
    batch_size: int = 256
    """Transitions that an update learns from."""
    replay_ratio: float = 8.0
    """How often a transition is learnt from on average: samples drawn over samples made."""
    learning_starts: int = 20_000
    """Transitions that are made before the first update."""
    target_period: int = 500
    """Updates between two copies to the target network."""
    tau: float | None = None
    """Let the target network follow by this share of the way at every update instead (none: by copies)."""
    huber: float | None = 1.0
    """Largest pull of a plain Q-value's error (none: no limit): low for returns of about 1, none for large ones."""
    n_step: int = 1
    """Rewards that a target sums before it looks at a value."""
    double: bool = False
    """Let the network that learns choose the action that the target network judges."""
    dueling: bool = False
    """Split Q-values into a value of the state and advantages of the choices."""
    prioritised: bool = False
    """Draw transitions the more often the larger their error was."""
    priority_alpha: float = 0.5
    """Power of the error that the probability of a transition grows with."""
    priority_beta: float = 0.4
    """How far weights make up for the priorities at the start of the run; at its end they do so fully (1)."""
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
        for name in ("replay_size", "batch_size", "target_period", "n_step", "atoms"):
            require(name.replace("_", "-"), getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("learning_starts", "quantiles", "epsilon_spread"):
            require(name.replace("_", "-"), getattr(self, name), getattr(self, name) >= 0, "at least 0")
        for name in ("priority_alpha", "priority_beta", "epsilon", "epsilon_end", "epsilon_share"):
            require(name.replace("_", "-"), getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")
        require("replay-ratio", self.replay_ratio, self.replay_ratio > 0, "above 0")
        require("huber", self.huber, self.huber is None or self.huber > 0, "above 0")
        require("tau", self.tau, self.tau is None or 0 < self.tau <= 1, "above 0 and at most 1")
        require("v-max", self.v_max, self.v_max > self.v_min, f"above --v-min ({self.v_min:g})")
        if self.atoms > 1 and self.quantiles:
            raise ShoalError(
                f"Values are made up of atoms ({self.atoms}) or of quantiles ({self.quantiles}), not both."
            )

    def batch(self, samples: int) -> int:
        return self.batch_size

    def head(self) -> dict[str, Any]:
        """The settings of the policy's head."""
        return {name: getattr(self, name) for name in self.network}

    def check_group(self, group: Group, core: bool) -> None:
        check_choices(group)
        if core:
            raise ShoalError("Q-learning has no use for a core yet; use --core none, or --algo ppo or a2c.")
        if group.every > 1:
            raise ShoalError(
                f"Q-learning learns from every step, but group {group.name!r} chooses at every {group.every} steps; "
                "use --algo ppo or a2c."
            )

    def check_rollout(self, steps: int, lanes: int, core: bool) -> None:
        least = (steps + self.n_step + 1) * lanes
        if self.replay_size < least:
            raise ShoalError(
                f"A replay of {self.replay_size:,} transitions is too short: rollouts of {steps} steps and targets of "
                f"{self.n_step} steps of {lanes:,} envs x agents need {least:,}; raise --replay-size, or lower "
                "--num-envs, --rollout or --n-step."
            )

    def updates_after(self, made: int) -> int:
        """Updates that are due in all after so many transitions since learning began: floor(ratio made / batch)."""
        return int(Fraction(str(self.replay_ratio)) * max(0, made) / self.batch_size)

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


class QLearner(Learner):
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
        lanes = rollout.samples // rollout.steps
        self.start = max(config.learning_starts, (config.n_step + rollout.stack + 1) * lanes)
        """Transitions before the first update: as many as asked for, and enough for targets of n steps."""
        self.replay = Replay(
            rollout,
            config.replay_size // lanes,
            config.n_step,
            config.gamma,
            prioritised=config.prioritised,
            alpha=config.priority_alpha,
            seed=seed,
        )
        self.target = _twin(policy)
        self.target_flat = self.optimiser.flat.clone()
        """The target network's parameters as one vector, laid out like the optimiser's."""
        for own, p in zip(self.target.parameters(), policy.parameters(), strict=True):
            own.requires_grad_(False)
            start = p.storage_offset()
            own.data = self.target_flat[start : start + p.numel()].view_as(p)
        plans = (policy.noise_plan(seed, LEARNING, self.updates), self.target.noise_plan(seed, AIMING, self.updates))
        self._noise = [plan for plan in plans if plan is not None]
        self.beta = torch.ones((), device=self.device)
        self._spread = _powers(rollout, config.epsilon_spread)
        self._made = 0
        """Transitions since learning began."""
        self._losses = self._wrap(self._losses_eager)
        self.set_progress(0.0)

    # --- one rollout, one update ------------------------------------------------------------------------------------

    def store(self) -> None:
        self.replay.append()
        if self.policy.has_moments:
            r = self.rollout
            seen = stacked(r.observation, r.age, slice(0, r.samples))
            self.policy.take_in(seen, None if r.alive is None else r.alive[:-1].flatten())

    def due(self, made: int) -> int:
        self._made = made - self.start
        return self.config.updates_after(self._made) - self.config.updates_after(self._made - self.rollout.samples)

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

    def cut(self) -> None:
        self.replay.cut()

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
        """Tell how much of the run is over: sets the learning rate, epsilon and the weights' beta."""
        super().set_progress(done)
        c = self.config
        assert self.rollout.epsilon is not None
        self.rollout.epsilon.copy_(torch.pow(c.epsilon_at(done), self._spread))
        self.beta.fill_(c.priority_beta + (1.0 - c.priority_beta) * done)

    def remark(self) -> str:
        c = self.config
        follow = f"copied every {c.target_period:,} updates" if c.tau is None else f"following by {c.tau:g}"
        drawn = "by priority" if c.prioritised else "evenly"
        return (
            f"{super().remark()}; a replay of {self.replay.reward.numel():,} transitions, drawn {drawn}, each "
            f"{c.replay_ratio:g} times; target network {follow}"
        )

    def read_metrics(self) -> dict[str, float]:
        means = super().read_metrics()
        means["replay_ratio"] = self._updates_read * self.config.batch_size / max(1, self._made)
        assert self.rollout.epsilon is not None
        means["epsilon"] = float(self.rollout.epsilon.mean())
        return means

    def state_dict(self) -> dict[str, torch.Tensor]:
        assert self.rollout.epsilon is not None
        state = {**super().state_dict(), "target": self.target_flat, "epsilon": self.rollout.epsilon}
        state.update({f"replay.{k}": v for k, v in self.replay.state_dict().items()})
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        super().load_state_dict(state)
        prefix = "replay."
        self.replay.load_state_dict({k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)})


def _twin(policy: QPolicy) -> QPolicy:
    """A copy with parameters and noise of its own, that sees as the policy does: running moments are shared."""
    twin = copy.deepcopy(policy)
    for own, other in zip(twin.modules(), policy.modules(), strict=True):
        for name, buffer in other.named_buffers(recurse=False):
            if name in other.state_dict():  # kept in checkpoints: no noise
                own.register_buffer(name, buffer)
    return twin


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
