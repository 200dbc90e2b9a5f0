"""Q-learning from a replay: DQN and what has been added to it, as options of one learner.

Double (van Hasselt et al. 2016), dueling (Wang et al. 2016), prioritized replay (Schaul et al. 2016), n-step targets,
categorical values (C51, Bellemare et al. 2017), quantiles (QR-DQN, Dabney et al. 2018), noisy networks (Fortunato et
al. 2018); all but quantiles together are Rainbow (Hessel et al. 2018). Exploration rates may differ between envs
(Ape-X, Horgan et al. 2018). A policy with an RNN learns from sequences, whose first rows only warm the rnn up (R2D2,
Kapturowski et al. 2019), and values may be rescaled (Pohlen et al. 2018).

The target network's period is counted in updates.
"""

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from shoal.algos.off_policy import OffPolicy, OffPolicyConfig
from shoal.core.errors import ShoalError, require
from shoal.core.world import Group
from shoal.learn import losses
from shoal.learn.replay import Sample, Sequences
from shoal.learn.rollout import Rollout
from shoal.policy import QPolicy
from shoal.policy.q import no_choices

LEARNING, AIMING = 1, 2
"""Streams of the noise inside the network that learns and inside its target; acting has stream 0."""

ETA = 0.9
"""How much the largest error of a sequence counts for its priority, beside the mean."""

ROUNDING = 1e-3
"""How far an estimated value may lie outside the atoms, as a share of their range."""


@dataclass(frozen=True)
class QConfig(OffPolicyConfig):
    """Settings of Q-learning; by default plain DQN."""

    target_update_interval: int = 500
    """Updates between two copies to the target network."""
    tau: float | None = None
    """Let the target network follow by this share of the way at every update instead (none: by copies)."""
    huber_delta: float | None = 1.0
    """Largest pull of a plain Q-value's error (none: no limit): low for returns of about 1, none for large ones."""
    double_q: bool = False
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
    exploration_initial_eps: float = 1.0
    """How often agents act at random at first."""
    exploration_final_eps: float = 0.05
    """How often they do so later."""
    exploration_fraction: float = 0.2
    """Share of the run over which it falls."""
    apex_alpha: float = 0.0
    """Let the envs differ: epsilon^(1 + spread i / (N - 1)) for env i of N (Ape-X: 7)."""
    burn_in: int = 32
    """With an RNN: steps that each sequence begins with to warm the rnn up, and that are not learned from."""
    sequence_length: int = 64
    """With an RNN: steps of each sequence that are learned from; a batch has batch-size / sequence-length of them."""
    rescale: bool = False
    """Learn h(Q) = sign(Q) (sqrt(|Q| + 1) - 1) + Q / 1000 in place of Q: for rewards of all sizes."""

    network: ClassVar[tuple[str, ...]] = ("dueling", "noisy", "atoms", "v_min", "v_max", "quantiles")

    def __post_init__(self):
        super().__post_init__()
        for name in ("target_update_interval", "atoms", "sequence_length"):
            require(name.replace("_", "-"), getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("quantiles", "apex_alpha", "burn_in"):
            require(name.replace("_", "-"), getattr(self, name), getattr(self, name) >= 0, "at least 0")
        for name in ("exploration_initial_eps", "exploration_final_eps", "exploration_fraction"):
            require(name.replace("_", "-"), getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")
        require("huber-delta", self.huber_delta, self.huber_delta is None or self.huber_delta > 0, "above 0")
        require("tau", self.tau, self.tau is None or 0 < self.tau <= 1, "above 0 and at most 1")
        require("v-max", self.v_max, self.v_max > self.v_min, f"above --v-min ({self.v_min:g})")
        if self.atoms > 1 and self.quantiles:
            raise ShoalError(
                f"Values are made up of atoms ({self.atoms}) or of quantiles ({self.quantiles}), not both."
            )
        if self.rescale and (self.atoms > 1 or self.quantiles):
            raise ShoalError(
                "--rescale is for Q-values that are plain numbers; use --atoms 1 and --quantiles 0 with it."
            )

    def span(self, rnn: bool) -> tuple[int, int]:
        return (self.burn_in, self.sequence_length) if rnn else (0, 0)

    @classmethod
    def unsupported(cls, group: Group) -> str:
        return no_choices(group) or super().unsupported(group)

    def check_rollout(self, steps: int, lanes: int, rnn: bool) -> None:
        if rnn and (self.burn_in % steps or self.sequence_length % steps):
            near = [
                max(least, round(rows / steps)) * steps
                for rows, least in ((self.burn_in, 0), (self.sequence_length, 1))
            ]
            raise ShoalError(
                f"A policy with an RNN learns from whole rollouts, but --burn-in {self.burn_in} and --sequence-length "
                f"{self.sequence_length} are no multiples of --rollout-steps {steps}; use --burn-in {near[0]} --sequence-length {near[1]}, "
                "or another --rollout-steps."
            )
        if rnn and self.batch_size % self.sequence_length:
            batch = max(1, round(self.batch_size / self.sequence_length)) * self.sequence_length
            raise ShoalError(
                f"A policy with an RNN learns from whole sequences, but --batch-size {self.batch_size} is no multiple "
                f"of --sequence-length {self.sequence_length}; use --batch-size {batch}, or another --sequence-length."
            )
        super().check_rollout(steps, lanes, rnn)

    def epsilon_at(self, done: float) -> float:
        """How often agents act at random after a share `done` of the run."""
        t = 1.0 if done >= self.exploration_fraction else done / self.exploration_fraction
        return self.exploration_initial_eps + (self.exploration_final_eps - self.exploration_initial_eps) * t


@dataclass(frozen=True)
class RainbowConfig(QConfig):
    """Settings of Rainbow: everything at once."""

    n_step: int = 3
    """Rewards that a target sums before it looks at a value."""
    double_q: bool = True
    """Let the network that learns choose the action that the target network judges."""
    dueling: bool = True
    """Split Q-values into a value of the state and advantages of the choices."""
    prioritized: bool = True
    """Draw transitions the more often the larger their error was."""
    atoms: int = 51
    """Numbers from v-min to v-max whose probabilities make up a Q-value (1: it is one number; C51: 51)."""
    noisy: bool = True
    """Explore by noise in the last layer's weights, besides epsilon."""
    exploration_final_eps: float = 0.0
    """How often they do so later."""
    exploration_fraction: float = 0.1
    """Share of the run over which it falls."""


@dataclass(frozen=True)
class R2D2Config(QConfig):
    """Settings of R2D2: a policy with an RNN, learned from sequences."""

    lr: float = 5e-4
    """Learning rate; with --lr-scale, of batches of --lr-batch samples."""
    gamma: float = 0.997
    """Discount per step."""
    max_grad_norm: float = 40.0
    """Largest norm of the gradient."""
    batch_size: int = 1280
    """Transitions that an update learns from."""
    replay_ratio: float = 2.0
    """How often a transition is learned from on average: samples drawn over samples made."""
    n_step: int = 5
    """Rewards that a target sums before it looks at a value."""
    double_q: bool = True
    """Let the network that learns choose the action that the target network judges."""
    dueling: bool = True
    """Split Q-values into a value of the state and advantages of the choices."""
    prioritized: bool = True
    """Draw transitions the more often the larger their error was."""
    priority_alpha: float = 0.9
    """Power of the error that the probability of a transition grows with."""
    priority_beta: float = 0.6
    """How far weights make up for the priorities at the start of the run; at its end they do so fully (1)."""
    exploration_initial_eps: float = 0.4
    """How often agents act at random at first."""
    exploration_final_eps: float = 0.4
    """How often they do so later."""
    apex_alpha: float = 7.0
    """Let the envs differ: epsilon^(1 + spread i / (N - 1)) for env i of N (Ape-X: 7)."""
    burn_in: int = 40
    """With an RNN: steps that each sequence begins with to warm the rnn up, and that are not learned from."""
    sequence_length: int = 80
    """With an RNN: steps of each sequence that are learned from; a batch has batch-size / sequence-length of them."""
    rescale: bool = True
    """Learn h(Q) = sign(Q) (sqrt(|Q| + 1) - 1) + Q / 1000 in place of Q: for rewards of all sizes."""

    run: ClassVar[dict[str, Any]] = dict(rnn="lstm", rollout_steps=40)

    def check_rnn(self, rnn: bool) -> None:
        if not rnn:
            raise ShoalError("R2D2 learns what to remember and needs an RNN; use --rnn lstm or gru, or --algo dqn.")


class TDBatch(NamedTuple):
    """What an update learns from, one row per transition."""

    numbers: torch.Tensor
    """[n, choices, width]: what the network tells of the choices."""
    ahead: torch.Tensor
    """[n, parts, width]: what the target network tells of the best choices n steps later."""
    action: torch.Tensor
    """int64 [n, parts]"""
    reward: torch.Tensor
    """float32 [n]: of n steps."""
    discount: torch.Tensor
    """float32 [n]: of what comes later."""
    weight: torch.Tensor
    """float32 [n]: how much it counts."""


class QLearner(OffPolicy):
    """Learns what choices are worth from a replay of past rollouts."""

    metric_names = ("loss", "q_value", "td_error")
    policy: QPolicy
    target: QPolicy
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
        (self.target_flat,) = self.target_flats
        plans = (policy.noise_plan(seed, LEARNING, self.updates), self.target.noise_plan(seed, AIMING, self.updates))
        self._noise = [plan for plan in plans if plan is not None]
        self._spread = _powers(rollout, config.apex_alpha)
        self._losses = self._wrap(self._losses_eager)
        self._warned = False
        self.set_progress(0.0)

    # --- one rollout, one update ------------------------------------------------------------------------------------

    def update(self) -> None:
        for plan in self._noise:
            plan()
        sample = self._drawn()
        found = self._losses(sample)
        self._optimizer_step(found, self.optimizer.gradient(found["loss"]), torch.ones((), device=self.device))
        with torch.no_grad():
            if self.config.prioritized:
                self.replay.update_priorities(sample.place, found["error"].detach())
            self._count()
            c = self.config
            self._soft_update((self.updates % c.target_update_interval == 0).float() if c.tau is None else c.tau)

    def _drawn(self) -> Sample | Sequences:
        """Fresh experience: transitions, or with an RNN sequences."""
        if self.policy.rnn is None:
            return self.replay.sample(self.batch, self.beta)
        count = self.batch // self.sequence_length
        return self.replay.sample_sequences(count, self.burn_in, self.sequence_length, self.beta)

    def _losses_eager(self, sample: Sample | Sequences) -> dict[str, torch.Tensor]:
        """The loss, and by how much each sample was off; what the parts of an action lose is added up."""
        head = self.policy.head
        lesson = self._along(sample) if isinstance(sample, Sequences) else self._single(sample)
        loss = worth = error = torch.zeros_like(lesson.reward)
        for i, part in enumerate(lesson.numbers.split(head.nvec, dim=1)):
            own = _pick(part, lesson.action[:, i])
            lost, off = self._lost(own, lesson.ahead[:, i], lesson)
            loss, error = loss + lost, error + off
            told = head.q_values(own.detach().unsqueeze(1)).squeeze(1)
            worth = worth + (losses.unscaled(told) if self.config.rescale else told) / len(head.nvec)
        found = dict(loss=(lesson.weight * loss).mean(), q_value=worth.mean(), td_error=error.detach().mean())
        if isinstance(sample, Sequences):
            counts = sample.counts[self.burn_in :]
            error = error.view_as(counts)
            found["td_error"] = losses.weighted_mean(error.detach(), counts.float())
            error = _sequence_error(error, counts)
        return dict(found, error=error)

    def _single(self, sample: Sample) -> TDBatch:
        """What there is to learn from single transitions."""
        with self._precision():
            numbers = self.policy.q_logits(sample.seen)
            with torch.no_grad():
                later = self.target.q_logits(sample.later)
                judge = self.policy.q_logits(sample.later) if self.config.double_q else later
        ahead = self._best(later, judge, sample.later_mask)
        action = sample.action.view(len(sample.place), -1).long()
        return TDBatch(numbers, ahead, action, sample.reward, sample.discount, sample.weight)

    def _along(self, sample: Sequences) -> TDBatch:
        """What there is to learn along sequences, row after row: both networks warm up first, without a gradient.

        The numbers of the rows from there on and, after them, of the final observations are what targets look at.
        """
        burn_in, length = self.burn_in, self.sequence_length
        seen, ended, final = sample.seen[burn_in:], sample.terminated | sample.truncated, sample.final_seen
        with self._precision():
            with torch.no_grad():
                state = self._warm(self.policy, sample, ended)
                later, then = self.target.sequence(seen, self._warm(self.target, sample, ended), ended[burn_in:])
            numbers, states = self.policy.sequence(seen, state, ended[burn_in:])
            with torch.no_grad():
                judge = later = torch.cat([later, self._finals(self.target, sample, then)])
                if self.config.double_q:
                    judge = torch.cat([numbers.detach(), self._finals(self.policy, sample, states.detach())])
        mask = sample.mask
        if mask is not None:
            mask = torch.cat([mask[burn_in:], mask.new_ones(*final.shape[:2], mask.shape[-1])]).flatten(0, 1)
        ahead = self._best(later.flatten(0, 1), judge.flatten(0, 1), mask)
        batch = len(sample.place)
        place = (sample.later[burn_in:] - burn_in) * batch + torch.arange(batch, device=self.device)
        learned = slice(burn_in, burn_in + length)
        return TDBatch(
            numbers[:length].flatten(0, 1),
            ahead[place.flatten()],
            sample.action[learned].reshape(length * batch, -1).long(),
            sample.n_step_reward[learned].flatten(),
            sample.discount[learned].flatten(),
            (sample.weight * sample.counts[learned]).flatten(),
        )

    def _warm(self, network: QPolicy, sample: Sequences, ended: torch.Tensor) -> torch.Tensor:
        """What a network remembers [batch, S] after the burn-in."""
        assert sample.state is not None
        if not self.burn_in:
            return sample.state
        return network.after(sample.seen[: self.burn_in], sample.state, ended[: self.burn_in])

    def _finals(self, network: QPolicy, sample: Sequences, states: torch.Tensor) -> torch.Tensor:
        """A network's numbers [F, batch, choices, width] of final observations, given its states after the burn-in."""
        place = (sample.final_row - self.burn_in).clamp(min=0)  # those of the burn-in, or not there, are not asked for
        then = states.gather(0, place.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        numbers = network.q_logits(sample.final_seen.flatten(0, 1), then.flatten(0, 1))
        return numbers.unflatten(0, place.shape)

    def _best(self, later: torch.Tensor, judge: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Numbers [n, parts, width], out of `later` [n, choices, width], of the choices that `judge` holds for best."""
        head = self.policy.head
        with torch.no_grad():
            chosen = head.best(head.q_values(judge, mask))
            parts = enumerate(later.split(head.nvec, dim=1))
            return torch.stack([_pick(part, chosen[:, i]) for i, part in parts], dim=1)

    def _lost(self, own: torch.Tensor, ahead: torch.Tensor, lesson: TDBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and size of the error [n] of numbers [n, width], given those n steps later."""
        head = self.policy.head
        if head.atoms > 1:
            aim = losses.categorical_projection(ahead.softmax(-1), lesson.reward, lesson.discount, head.support)
            lost = losses.cross_entropy(own, aim)
            return lost, lost
        if self.config.rescale:
            ahead = losses.unscaled(ahead)
        aim = lesson.reward.unsqueeze(-1) + lesson.discount.unsqueeze(-1) * ahead
        if self.config.rescale:
            aim = losses.rescaled(aim)
        if head.quantiles:
            lost = losses.quantile_loss(own, aim)
            return lost, lost
        error = (own - aim).squeeze(-1)
        return losses.huber(error, self.config.huber_delta), error.abs()

    # --- between updates -------------------------------------------------------------------------------------------

    def set_progress(self, done: float) -> None:
        """Tell how much of the run is over: sets epsilon too."""
        super().set_progress(done)
        c = self.config
        assert self.rollout.epsilon is not None
        self.rollout.epsilon.copy_(torch.pow(c.epsilon_at(done), self._spread))

    def describe(self) -> str:
        c = self.config
        follow = f"copied every {c.target_update_interval:,} updates" if c.tau is None else f"following by {c.tau:g}"
        along = (
            f"; sequences of {self.sequence_length} steps after {self.burn_in} to warm up"
            if self.sequence_length
            else ""
        )
        return f"{super().describe()}{along}; target network {follow}"

    def read_metrics(self) -> dict[str, float]:
        self._check_support()
        return super().read_metrics()

    def _check_support(self) -> None:
        """Warn once if the mean value of states lies outside the atoms.

        It is r / (1 - gamma (1 - p)), for the replay's mean reward r and its share p of terminating steps.
        """
        c = self.config
        if c.atoms == 1 or self._warned or self._made < 0 or self.reducer.rank:
            return
        rows = slice(0, int(self.replay.filled))  # sync: once per log interval
        share = float(self.replay.terminated[rows].float().mean())
        value = float(self.replay.reward[rows].mean()) / max(1.0 - c.gamma * (1.0 - share), 1e-9)
        slack = ROUNDING * (c.v_max - c.v_min)
        if not c.v_min - slack <= value <= c.v_max + slack:
            self._warned = True
            warnings.warn(
                f"Values of group {self.policy.group.name!r} are about {value:.3g}, but the {c.atoms} atoms reach from "
                f"--v-min {c.v_min:g} to --v-max {c.v_max:g}; set them to the range of discounted returns.",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {**super().state_dict(), "target": self.target_flat}


def _sequence_error(error: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """eta max |e| + (1 - eta) mean |e| over the rows of sequences [rows, n] that count   (Kapturowski et al. 2019)."""
    size = error.abs() * counts
    return ETA * size.amax(dim=0) + (1.0 - ETA) * size.sum(dim=0) / counts.sum(dim=0).clamp(min=1)


def _powers(rollout: Rollout, spread: float) -> torch.Tensor:
    """What epsilon is raised to for each env and agent, [N, A]."""
    (envs, agents), reducer = rollout.reward.shape[1:], rollout.reducer
    powers = torch.linspace(1.0, 1.0 + spread, envs * reducer.size, device=rollout.reward.device)
    return powers.view(reducer.size, envs)[reducer.rank].unsqueeze(-1).expand(-1, agents)


def _pick(numbers: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """The numbers [batch, width] of one choice each [batch], out of [batch, choices, width]."""
    if not numbers.is_cuda:
        return numbers[torch.arange(len(choice), device=choice.device), choice]
    # The gradient of a gather scatters, which a compiler cannot fuse with its neighbors; that of a sum it can.
    here = torch.arange(numbers.shape[1], device=choice.device) == choice.unsqueeze(-1)
    return torch.where(here.unsqueeze(-1), numbers, 0.0).sum(dim=1)
