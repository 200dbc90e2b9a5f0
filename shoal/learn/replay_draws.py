"""Batches drawn from a replay, and the buffers and plans that fill them."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import warp as wp

from shoal.core.launch import Plan
from shoal.learn.frames import add_gather
from shoal.learn.replay_kernels import gather_sequence_rows, gather_sequence_targets, gather_transitions
from shoal.learn.rollout import Rollout
from shoal.learn.sum_tree import BLOCK, UNIT

FINALS_PER_SEQUENCE = 2
"""Final observations per sequence when the time limit is unknown."""


@dataclass
class Sample:
    """A batch of n-step transitions, [B, ...]. The next draw of the same size overwrites its tensors."""

    index: torch.Tensor
    """int64 [B]: index of the transition, (row * N + env) * A + agent."""
    observation: torch.Tensor
    """[B, *shape]: observation with stacked frames, as returned by `stacked`."""
    action: torch.Tensor
    """[B, *action]"""
    action_mask: torch.Tensor | None
    """bool [B, choices]: allowed choices (None: all)."""
    reward: torch.Tensor
    """float32 [B]: sum of gamma^k r over n steps, fewer if the episode ended before."""
    discount: torch.Tensor
    """float32 [B]: gamma^k, the factor of the bootstrap value; 0 if the episode terminated or the agent left."""
    next_observation: torch.Tensor
    """[B, *shape]: observation k steps later; the final observation if the episode was truncated before."""
    next_action_mask: torch.Tensor | None
    """bool [B, choices]: allowed choices there; all for final observations."""
    weight: torch.Tensor
    """float32 [B]: importance weight, at most 1; 0 for samples that are ignored."""


@dataclass
class Sequences:
    """Sequences of L = burn_in + length + n_step rows, time first. The next draw overwrites its tensors.

    A network runs over `observation` from `state`, and zeroes its state where an episode ended. It also evaluates each
    `final_observation` with its state after row `final_row`. With both outputs concatenated to q [L + F, B], the target
    of row t is n_step_reward[t] + discount[t] * q[next_row[t]], if valid[t].
    """

    index: torch.Tensor
    """int64 [B]: index of the sequence, (rollout's position in the ring * N + env) * A + agent."""
    state: torch.Tensor | None
    """[B, S]: recurrent state before the first row."""
    observation: torch.Tensor
    """[L, B, *shape]"""
    action: torch.Tensor
    """[L, B, *action]"""
    action_mask: torch.Tensor | None
    """bool [L, B, choices]"""
    reward: torch.Tensor
    """float32 [L, B]: one-step rewards."""
    terminated: torch.Tensor
    """bool [L, B]"""
    truncated: torch.Tensor
    """bool [L, B]: rows with `truncated` and not `terminated` need a final observation."""
    alive: torch.Tensor
    """bool [L, B]: whether the agent was alive and chose its action."""
    n_step_reward: torch.Tensor
    """float32 [burn_in + length, B]: as `Sample.reward`."""
    discount: torch.Tensor
    """float32 [burn_in + length, B]: as `Sample.discount`."""
    next_row: torch.Tensor
    """int64 [burn_in + length, B]: row of q to bootstrap from; from L on, the row of a final observation."""
    valid: torch.Tensor
    """bool [burn_in + length, B]: `alive`, and any final observation that the target needs is available."""
    final_observation: torch.Tensor
    """[F, B, *shape]: final observations of the first F truncated episodes of each sequence."""
    final_row: torch.Tensor
    """int64 [F, B]: rows in which those episodes ended (-1: fewer than F)."""
    weight: torch.Tensor
    """float32 [B]: importance weight of the sequence."""


class Source(Protocol):
    """The parts of a replay that draws read; see `Replay`."""

    device: torch.device
    rollout: Rollout
    n_step: int
    gamma: float
    sequences: int
    time_limit: int | None
    frames: torch.Tensor
    finals: torch.Tensor
    ring: Any
    stride: int

    def add_draw(self, plan: Plan, index: torch.Tensor, priority: torch.Tensor) -> None:
        """Append the choice of indices [B], with their priorities [B]."""


class TransitionDraw:
    """Buffers of a draw of `batch` transitions, and the plan that fills them."""

    def __init__(self, replay: Source, batch: int):
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=replay.device)

        stack, shape = replay.rollout.stack, replay.finals.shape[3:]
        self.index, self.next_index = (zeros(batch, dtype=torch.int64) for _ in range(2))
        self.priority, self.reward, self.discount = (zeros(batch) for _ in range(3))
        self.valid = zeros(batch, dtype=torch.bool)
        self.source, self.next_source = (zeros(batch, stack, dtype=torch.int32) for _ in range(2))
        self.observation, self.next_observation = (zeros(batch, *shape, dtype=replay.frames.dtype) for _ in range(2))
        self.plan = Plan(replay.device, batch)
        replay.add_draw(self.plan, self.index, self.priority)
        names = "index priority next_index reward discount valid source next_source"
        outputs = [wp.from_torch(getattr(self, name)) for name in names.split()]
        inputs = [replay.ring, replay.n_step, replay.gamma, *outputs]
        self.plan.add_kernel(gather_transitions, batch, inputs, unit=UNIT, block=BLOCK)
        for source, out in ((self.source, self.observation), (self.next_source, self.next_observation)):
            add_gather(self.plan, source, replay.frames, replay.finals, out, 3)


class SequenceDraw:
    """Buffers of a draw of `batch` sequences, and the plan that fills them."""

    def __init__(self, replay: Source, batch: int):
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=replay.device)

        stack, shape, span = replay.rollout.stack, replay.finals.shape[3:], replay.sequences
        rows = span + replay.n_step
        limit = replay.time_limit
        finals = min(rows, FINALS_PER_SEQUENCE) if limit is None else -(-rows // limit)
        self.index, self.priority = zeros(batch, dtype=torch.int64), zeros(batch)
        self.drawable = zeros(batch, dtype=torch.bool)
        """Whether the sequence has a positive priority."""
        self.cell, self.final_index = zeros(rows, batch, dtype=torch.int64), zeros(rows, batch, dtype=torch.int32)
        self.alive, self.valid = zeros(rows, batch, dtype=torch.bool), zeros(span, batch, dtype=torch.bool)
        self.reward, self.discount = zeros(span, batch), zeros(span, batch)
        self.next_row = zeros(span, batch, dtype=torch.int64)
        self.source = zeros(rows, batch, stack, dtype=torch.int32)
        self.final_source = zeros(finals, batch, stack, dtype=torch.int32)
        self.final_row = zeros(finals, batch, dtype=torch.int64)
        self.observation = zeros(rows, batch, *shape, dtype=replay.frames.dtype)
        self.final_observation = zeros(finals, batch, *shape, dtype=replay.frames.dtype)
        self.plan = Plan(replay.device, batch)
        replay.add_draw(self.plan, self.index, self.priority)
        names = "index priority drawable cell alive final_index final_row source final_source"
        outputs = [wp.from_torch(getattr(self, name)) for name in names.split()]
        inputs = [replay.ring, replay.stride, *outputs]
        self.plan.add_kernel(gather_sequence_rows, batch, inputs, unit=64, block=BLOCK)
        names = "index alive final_index reward discount next_row valid"
        outputs = [wp.from_torch(getattr(self, name)) for name in names.split()]
        inputs = [replay.ring, replay.stride, batch, replay.n_step, replay.gamma, *outputs]
        self.plan.add_kernel(gather_sequence_targets, span * batch, inputs, unit=batch, block=BLOCK)
        for source, out in ((self.source, self.observation), (self.final_source, self.final_observation)):
            add_gather(self.plan, source.flatten(0, 1), replay.frames, replay.finals, out.flatten(0, 1), 3)
