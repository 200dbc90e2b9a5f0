"""Learning from a replay of past steps: what all such learners share.

What is held fixed when batch and number of envs change is the replay ratio; for larger batches --lr-scale sqrt.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeVar

import torch

from shoal.core.errors import ShoalError, require
from shoal.core.spaces import check_range
from shoal.core.world import Group
from shoal.learn.learner import Learner, LearnerConfig, part_of
from shoal.learn.optim import Adam
from shoal.learn.replay import Replay
from shoal.learn.rollout import Rollout, stacked
from shoal.policy import Policy
from shoal.policy.normalize import share_buffers

PolicyKind = TypeVar("PolicyKind", bound=Policy)


@dataclass(frozen=True)
class OffPolicyConfig(LearnerConfig):
    """Settings that every learner with a replay has."""

    lr: float = 2.5e-4
    """Learning rate; with --lr-scale, of batches of --lr-batch samples."""
    max_grad_norm: float = 10.0
    """Largest norm of the gradient."""
    lr_schedule: Literal["linear", "cosine", "none"] = "none"
    """How the learning rate falls over the rest of the run."""
    buffer_size: int = 1_000_000
    """Transitions that are remembered, those of all envs and agents together."""
    replay_memory: float | None = None
    """Memory of the GPU for the replay [GiB]; if it takes more, observations are in the host's (none: no limit)."""
    batch_size: int = 256
    """Transitions that an update learns from."""
    replay_ratio: float = 8.0
    """How often a transition is learned from on average: samples drawn over samples made."""
    learning_starts: int = 20_000
    """Transitions that are made before the first update."""
    n_step: int = 1
    """Rewards that a target sums before it looks at a value."""
    prioritized: bool = False
    """Draw transitions the more often the larger their error was."""
    priority_alpha: float = 0.5
    """Power of the error that the probability of a transition grows with."""
    priority_beta: float = 0.4
    """How far weights make up for the priorities at the start of the run; at its end they do so fully (1)."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("buffer_size", "batch_size", "n_step"):
            require(name.replace("_", "-"), getattr(self, name), getattr(self, name) >= 1, "at least 1")
        require("replay-memory", self.replay_memory, (self.replay_memory or 0.0) >= 0, "at least 0")
        require("learning-starts", self.learning_starts, self.learning_starts >= 0, "at least 0")
        for name in ("priority_alpha", "priority_beta"):
            require(name.replace("_", "-"), getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")
        require("replay-ratio", self.replay_ratio, self.replay_ratio > 0, "above 0")

    def batch(self, samples: int) -> int:
        return self.batch_size

    @property
    def drawn(self) -> int:
        """Transitions that are drawn for one update."""
        return self.batch_size

    def head(self) -> dict[str, Any]:
        """The settings of the policy's head."""
        return {name: getattr(self, name) for name in self.network}

    @classmethod
    def unsupported(cls, group: Group) -> str:
        if group.action_interval == 1:
            return ""
        return f"A replay is learned from step by step, but group {group.name!r} chooses at every {group.action_interval} steps"

    def span(self, rnn: bool) -> tuple[int, int]:
        """Rows of a sequence that is drawn: those that warm an RNN up and those learned from; none for single steps."""
        return 0, 0

    def check_rollout(self, steps: int, lanes: int, rnn: bool) -> None:
        rows = sum(self.span(rnn))
        least = (steps + self.n_step + max(1, rows)) * lanes
        if self.buffer_size < least:
            sequences = f"sequences of {rows} rows, " if rows else ""
            raise ShoalError(
                f"A replay of {self.buffer_size:,} transitions is too short: {sequences}rollouts of {steps} steps and "
                f"targets of {self.n_step} steps of {lanes:,} envs x agents need {least:,}; raise --buffer-size, or "
                "lower --num-envs, --rollout-steps or --n-step."
            )

    def check_processes(self, steps: int, lanes: int, rnn: bool, processes: int) -> None:
        each = sum(self.span(rnn)[1:]) or 1  # a batch is made of whole sequences
        if self.batch_size % (processes * each):
            what = f"sequences of {each} steps" if each > 1 else "transitions"
            raise ShoalError(
                f"A batch of {self.batch_size} transitions cannot be shared out to {processes} processes in {what}; "
                f"use a --batch-size that is a multiple of {processes * each}."
            )

    def check_cuts(self, rnn: bool) -> None:
        if sum(self.span(rnn)):
            raise ShoalError(
                "--sync-frac does not go with sequences out of a replay, which reach over several whole rollouts; "
                "leave it out, or learn without an RNN."
            )

    def updates_after(self, made: int) -> int:
        """Updates that are due in all after so many transitions since learning began: floor(ratio made / drawn)."""
        return int(Fraction(str(self.replay_ratio)) * max(0, made) / self.drawn)


class OffPolicy(Learner):
    """Base of the learners that learn from a replay of past rollouts."""

    config: OffPolicyConfig

    def __init__(
        self,
        policy: Policy,
        rollout: Rollout,
        config: OffPolicyConfig,
        seed: int = 0,
        compiled: bool = False,
        bf16: bool = False,
    ):
        super().__init__(policy, rollout, config, seed, compiled, bf16)
        lanes = self.samples // rollout.steps
        self.batch = config.batch_size // self.reducer.size
        """Transitions of a batch that this process draws."""
        self.burn_in, self.sequence_length = config.span(policy.rnn is not None)
        """Rows of each sequence that only warm an RNN up, and those that are learned from."""
        rows = self.burn_in + self.sequence_length
        least = config.n_step + rollout.stack + 1 + (rows + rollout.steps if rows else 0)
        self.start = max(config.learning_starts, least * lanes)
        """Transitions before the first update: as many as asked for, and enough for targets of n steps."""
        self.replay = Replay(
            rollout,
            config.buffer_size // lanes,
            config.n_step,
            config.gamma,
            prioritized=config.prioritized,
            alpha=config.priority_alpha,
            seed=seed,
            sequences=rows,
            device_bytes=None if config.replay_memory is None else int(config.replay_memory * 2**30),
        )
        self.target, self.target_flats = make_target_network(policy, self.optimizers.values())
        """The network that targets are taken from, and its parameters, a vector for each optimizer."""
        self.beta = torch.ones((), device=self.device)
        self._made = -self.start
        """Transitions since learning began; below 0, so many are still to be made before."""

    # --- one rollout, one update ------------------------------------------------------------------------------------

    def store(self) -> None:
        self.replay.append()
        if self.policy.has_moments:
            r = self.rollout
            seen = stacked(r.observation, r.age, slice(0, r.samples))
            self.policy.update_normalizer(seen, None if r.alive is None else r.alive[:-1].flatten())

    def updates_due(self, made: int) -> int:
        self._made = made - self.start
        return self.config.updates_after(self._made) - self.config.updates_after(self._made - self.samples)

    def mark_discontinuity(self) -> None:
        self.replay.mark_discontinuity()

    def on_weights_loaded(self) -> None:
        self._soft_update(1.0)

    @torch.no_grad()
    def _soft_update(self, share: torch.Tensor | float) -> None:
        """Let the target network go a share of the way to where the network is."""
        for target, optimizer in zip(self.target_flats, self.optimizers.values(), strict=True):
            target.lerp_(optimizer.flat, share)

    # --- between updates -------------------------------------------------------------------------------------------

    def set_progress(self, done: float) -> None:
        """Tell how much of the run is over: sets the learning rate and the weights' beta."""
        super().set_progress(done)
        self.beta.fill_(self.config.priority_beta + (1.0 - self.config.priority_beta) * done)

    def describe(self) -> str:
        drawn = "by priority" if self.config.prioritized else "evenly"
        return (
            f"{super().describe()}; a replay of {self.replay.reward.numel() * self.reducer.size:,} transitions, drawn "
            f"{drawn}, each {self.config.replay_ratio:g} times{self.replay.describe()}"
        )

    def read_metrics(self) -> dict[str, float]:
        means = super().read_metrics()
        means["replay_ratio"] = self._updates_read * self.config.drawn / max(1, self._made)
        assert self.rollout.epsilon is not None
        rate = self.rollout.epsilon.mean()
        self.reducer.average(rate)
        means["epsilon"] = float(rate)
        return means

    def state_dict(self) -> dict[str, torch.Tensor]:
        assert self.rollout.epsilon is not None
        state = {**super().state_dict(), "epsilon": self.rollout.epsilon}
        state.update({f"replay.{k}": v for k, v in self.replay.state_dict().items()})
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        replay = part_of(state, "replay.")
        check_range("An action of the saved replay", replay["action"], self.policy.group.action)  # losses index by it
        super().load_state_dict(state)
        self.replay.load_state_dict(replay)

    def env_axes(self) -> dict[str, int]:
        replay = {f"replay.{name}": axis for name, axis in self.replay.env_axes().items()}
        return {**super().env_axes(), "epsilon": 0, **replay}


def make_target_network(policy: PolicyKind, optimizers: Iterable[Adam]) -> tuple[PolicyKind, list[torch.Tensor]]:
    """A copy to take targets from, and its parameters as vectors, laid out like those of the optimizers.

    It has parameters and noise of its own but sees as the policy does: running moments are shared.
    """
    made = copy.deepcopy(policy)
    share_buffers(made, policy)
    flats = {o.flat.untyped_storage().data_ptr(): o.flat.clone() for o in optimizers}
    for own, p in zip(made.parameters(), policy.parameters(), strict=True):
        own.requires_grad_(False)
        start = p.storage_offset()
        own.data = flats[p.untyped_storage().data_ptr()][start : start + p.numel()].view_as(p)
    return made, list(flats.values())
