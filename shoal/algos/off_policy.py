"""Base of the off-policy learners, which learn from a replay.

When batch size or number of envs change, keep the replay ratio; for larger batches use --lr-scaling sqrt.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar

import torch

from shoal.core.errors import ShoalError
from shoal.core.settings import INT32, Bounds, NonNegative, NonNegativeFloat, Positive, PositiveFloat, UnitInterval
from shoal.core.spaces import check_range
from shoal.core.world import Group
from shoal.learn.learner import Learner, LearnerConfig, LearningRate, part_of
from shoal.learn.optim import Adam
from shoal.learn.replay import Replay
from shoal.learn.rollout import Rollout, stacked
from shoal.policy import Policy
from shoal.policy.normalize import share_buffers

SoftUpdate = Annotated[float, Bounds(gt=0, le=1)]
"""Coefficient of a soft update."""

PolicyKind = TypeVar("PolicyKind", bound=Policy)


@dataclass(frozen=True)
class OffPolicyConfig(LearnerConfig):
    """Settings of all off-policy algorithms."""

    lr: LearningRate = 2.5e-4
    """Learning rate; with --lr-scaling, for mini-batches of --lr-reference-batch samples."""
    max_grad_norm: PositiveFloat = 10.0
    """Maximum norm for gradient clipping."""
    lr_schedule: Literal["linear", "cosine", "none"] = "none"
    """Learning-rate schedule after the warmup."""
    buffer_size: Positive = 1_000_000
    """Size of the replay buffer in transitions, of all envs and agents."""
    replay_memory: NonNegativeFloat | None = None
    """GPU memory limit of the replay [GiB]; above it, observations are kept in host memory (none: no limit)."""
    batch_size: Annotated[int, Bounds(ge=1, le=INT32)] = 256
    """Transitions per update."""
    replay_ratio: PositiveFloat = 8.0
    """Ratio of transitions drawn to transitions collected: how often each is used on average."""
    learning_starts: NonNegative = 20_000
    """Transitions collected before the first update."""
    n_step: Positive = 1
    """Number of rewards in n-step targets."""
    prioritized: bool = False
    """Prioritized replay: draw transitions by TD error."""
    priority_alpha: UnitInterval = 0.5
    """Exponent of the TD error in the priority."""
    priority_beta: UnitInterval = 0.4
    """Initial exponent of the importance weights; it rises to 1 over the run."""

    def batch(self, samples: int) -> int:
        return self.batch_size

    @property
    def drawn(self) -> int:
        """Transitions drawn per update."""
        return self.batch_size

    def head(self) -> dict[str, Any]:
        """Settings of the policy's head."""
        return {name: getattr(self, name) for name in self.network_settings}

    @classmethod
    def unsupported(cls, group: Group) -> str:
        if group.action_interval == 1:
            return ""
        interval = group.action_interval
        return f"Off-policy algorithms need an action interval of 1, but that of group {group.name!r} is {interval}"

    def sequence_rows(self, rnn: bool) -> tuple[int, int]:
        """Burn-in and learned rows of drawn sequences; (0, 0) for single transitions."""
        return 0, 0

    def check_rollout(self, steps: int, lanes: int, rnn: bool) -> None:
        rows = sum(self.sequence_rows(rnn))
        least = (steps + self.n_step + max(1, rows)) * lanes
        if self.buffer_size < least:
            sequences = f"sequences of {rows} rows, " if rows else ""
            raise ShoalError(
                f"A replay buffer of {self.buffer_size:,} transitions is too short: {sequences}rollouts of {steps} "
                f"steps and {self.n_step}-step targets of {lanes:,} envs x agents need {least:,}; raise --buffer-size, "
                "or lower --num-envs, --rollout-steps or --n-step."
            )

    def check_processes(self, steps: int, lanes: int, rnn: bool, processes: int) -> None:
        each = sum(self.sequence_rows(rnn)[1:]) or 1  # batches consist of whole sequences
        if self.batch_size % (processes * each):
            what = f"sequences of {each} steps" if each > 1 else "transitions"
            raise ShoalError(
                f"A batch of {self.batch_size} transitions cannot be split between {processes} processes in {what}; "
                f"use a --batch-size that is a multiple of {processes * each}."
            )

    def check_preemption(self, rnn: bool) -> None:
        if sum(self.sequence_rows(rnn)):
            raise ShoalError(
                "--sync-frac does not support replay buffers of sequences, which span whole rollouts; use "
                "--sync-frac 0 or a policy without an RNN."
            )

    def updates_after(self, samples: int) -> int:
        """Total updates after `samples` transitions since learning started: floor(replay_ratio samples / drawn)."""
        return int(Fraction(str(self.replay_ratio)) * max(0, samples) / self.drawn)


class OffPolicy(Learner):
    """Base of the learners with a replay."""

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
        """Transitions of a batch drawn by this process."""
        self.burn_in, self.sequence_length = config.sequence_rows(policy.rnn is not None)
        """Rows of each sequence that only warm up the RNN, and rows that are learned from."""
        rows = self.burn_in + self.sequence_length
        least = config.n_step + rollout.stack + 1 + (rows + rollout.steps if rows else 0)
        self.start = max(config.learning_starts, least * lanes)
        """Transitions before the first update: `learning_starts`, or more if a draw needs them."""
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
        """The target network, and its parameters as one vector per optimizer."""
        self.beta = torch.ones((), device=self.device)
        self._learned_samples = -self.start
        """Transitions collected since learning started; negative before."""

    # --- one rollout, one update ------------------------------------------------------------------------------------

    def store(self) -> None:
        self.replay.append()
        if self.policy.has_moments:
            r = self.rollout
            seen = stacked(r.observation, r.age, slice(0, r.samples))
            self.policy.update_normalizer(seen, None if r.alive is None else r.alive[:-1].flatten())

    def updates_due(self, samples: int) -> int:
        self._learned_samples = samples - self.start
        before = self._learned_samples - self.samples
        return self.config.updates_after(self._learned_samples) - self.config.updates_after(before)

    def mark_discontinuity(self) -> None:
        self.replay.mark_discontinuity()

    def on_weights_loaded(self) -> None:
        self._soft_update(1.0)

    @torch.no_grad()
    def _soft_update(self, share: torch.Tensor | float) -> None:
        """Move the target network's weights by a fraction `share` towards the network's."""
        for target, optimizer in zip(self.target_flats, self.optimizers.values(), strict=True):
            target.lerp_(optimizer.flat, share)

    # --- between updates -------------------------------------------------------------------------------------------

    def set_progress(self, done: float) -> None:
        """Set the learning rate and the importance weights' beta for the completed fraction of the run."""
        super().set_progress(done)
        self.beta.fill_(self.config.priority_beta + (1.0 - self.config.priority_beta) * done)

    def describe(self) -> str:
        how = "by priority" if self.config.prioritized else "uniformly"
        size = self.replay.reward.numel() * self.reducer.size
        return (
            f"{super().describe()}; replay of {size:,} transitions drawn {how}, "
            f"replay ratio {self.config.replay_ratio:g}{self.replay.describe()}"
        )

    def read_metrics(self) -> dict[str, float]:
        means = super().read_metrics()
        means["replay_ratio"] = self._updates_read * self.config.drawn / max(1, self._learned_samples)
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
        check_range("An action of the saved replay", replay["action"], self.policy.group.action)  # an index of losses
        super().load_state_dict(state)
        self.replay.load_state_dict(replay)

    def env_axes(self) -> dict[str, int]:
        replay = {f"replay.{name}": axis for name, axis in self.replay.env_axes().items()}
        return {**super().env_axes(), "epsilon": 0, **replay}


def make_target_network(policy: PolicyKind, optimizers: Iterable[Adam]) -> tuple[PolicyKind, list[torch.Tensor]]:
    """Create a target network, and its parameters as vectors with the optimizers' layout.

    It copies parameters and noise, and shares running moments with the policy.
    """
    target = copy.deepcopy(policy)
    share_buffers(target, policy)
    flats = {o.flat.untyped_storage().data_ptr(): o.flat.clone() for o in optimizers}
    for own, p in zip(target.parameters(), policy.parameters(), strict=True):
        own.requires_grad_(False)
        start = p.storage_offset()
        own.data = flats[p.untyped_storage().data_ptr()][start : start + p.numel()].view_as(p)
    return target, list(flats.values())
