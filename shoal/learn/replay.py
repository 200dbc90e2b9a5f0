"""Replay: the last steps of all envs on the device, drawn from in large batches, uniformly or by priority."""

from dataclasses import dataclass
from typing import Any

import torch
import warp as wp

from shoal.core.errors import ShoalError
from shoal.core.launch import Plan, init_warp
from shoal.core.mapped import mapped
from shoal.learn.frames import add_gather, add_keep, as_words, word_bytes
from shoal.learn.replay_kernels import (
    Ring,
    draw_by_priority,
    draw_uniform,
    lay_out,
    look,
    look_along,
    number_finals,
    set_leaves,
)
from shoal.learn.rollout import Rollout
from shoal.learn.sum_tree import BLOCK, UNIT, SumTree

MOST_PLACES = 2**30
"""Transitions that a replay can number."""

FINAL_SHARE = 8
"""Without a known time limit, one final observation is kept for every so many rows."""

FINALS_PER_SEQUENCE = 2
"""Without a known time limit, so many truncated episodes of one sequence come with their final observations."""


@dataclass
class Sample:
    """Transitions of n steps, [B, ...]. Its tensors are the replay's own: the next draw of its size overwrites them."""

    place: torch.Tensor
    """int64 [B]: which transition, (row * N + env) * A + agent."""
    seen: torch.Tensor
    """[B, *seen]: what the agent saw, frames joined as `stacked` does."""
    action: torch.Tensor
    """[B, *action]"""
    mask: torch.Tensor | None
    """bool [B, choices]: what was allowed then (None: everything)."""
    reward: torch.Tensor
    """float32 [B]: sum of gamma^k r over n steps, or as many as there were."""
    discount: torch.Tensor
    """float32 [B]: gamma^k of what `later` is worth; 0 where the episode terminated or the agent left by then."""
    later: torch.Tensor
    """[B, *seen]: what it saw k steps later; the real final observation where the episode was truncated by then."""
    later_mask: torch.Tensor | None
    """bool [B, choices]: what was allowed there; of final observations everything."""
    weight: torch.Tensor
    """float32 [B]: importance weight, at most 1; 0 for what does not count."""


@dataclass
class Sequences:
    """Sequences of L = burn_in + length + n_step rows, time first. Its tensors are overwritten as a sample's are.

    A network goes through `seen` row after row, from `state` on, and forgets all where an episode ended; it also looks
    at each of `final_seen` with what it remembered after row `final_row`. Let q [L + F, B] be what it makes of both,
    one after the other. The target of row t is then n_step_reward[t] + discount[t] * q[later[t]], if counts[t].
    """

    place: torch.Tensor
    """int64 [B]: which sequence, (number of the rollout in the ring * N + env) * A + agent."""
    state: torch.Tensor | None
    """[B, S]: what the agent remembered before the first row."""
    seen: torch.Tensor
    """[L, B, *seen]"""
    action: torch.Tensor
    """[L, B, *action]"""
    mask: torch.Tensor | None
    """bool [L, B, choices]"""
    reward: torch.Tensor
    """float32 [L, B]: of single steps."""
    terminated: torch.Tensor
    """bool [L, B]"""
    truncated: torch.Tensor
    """bool [L, B]: set without `terminated` where `final_seen` is wanted."""
    alive: torch.Tensor
    """bool [L, B]: whether the agent was in the game and chose."""
    n_step_reward: torch.Tensor
    """float32 [burn_in + length, B]: as `Sample.reward`."""
    discount: torch.Tensor
    """float32 [burn_in + length, B]: as `Sample.discount`."""
    later: torch.Tensor
    """int64 [burn_in + length, B]: the row of q to bootstrap from; from L on, that of a final observation."""
    counts: torch.Tensor
    """bool [burn_in + length, B]: `alive`, and the final observation, if there is need of one, is at hand."""
    final_seen: torch.Tensor
    """[F, B, *seen]: final observations of the first F truncated episodes of each sequence."""
    final_row: torch.Tensor
    """int64 [F, B]: the rows in which those episodes ended (-1: there are not so many)."""
    weight: torch.Tensor
    """float32 [B]: importance weight of the sequence."""


class Replay:
    """A ring of the last steps of one policy's envs and agents, allocated once.

    All of it is in the device's memory, or observations in the host's: those (each frame once, `frames` [R, N, A,
    *shape], in their own type), actions, rewards, flags, masks, and the final observations of truncated episodes
    (`finals` [K, N, A, *seen]). A row's next observation is the next row of the ring, so the newest `n_step` rows wait
    for their future; and the oldest `stack - 1` rows have lost their history. Neither are drawn.

    `append`, the draws and `update_priorities` read nothing on the host and can be part of a CUDA graph. Agents that
    choose at every k-th step (`Rollout.is_decision_step`) count where they choose; `n_step` must then be a multiple of k.
    """

    def __init__(
        self,
        rollout: Rollout,
        steps: int,
        n_step: int,
        gamma: float,
        *,
        prioritized: bool = False,
        alpha: float = 0.5,
        eps: float = 1e-6,
        seed: int = 0,
        sequences: int = 0,
        device_bytes: int | None = None,
    ):
        """`steps` is rounded up to whole rollouts. `sequences` > 0 are the rows of those to be drawn, burn-in included.

        The rollout's time limit tells how many final observations there can be; otherwise a share of the rows is kept.
        Beyond `device_bytes` in all, observations are in the host's memory, and the GPU reads them from there.
        """
        init_warp()
        self.rollout, self.n_step, self.gamma, self.seed = rollout, n_step, gamma, seed & 0x7FFFFFFF
        self.sequences, self.time_limit = sequences, rollout.time_limit
        each, (envs, agents) = rollout.steps, rollout.reward.shape[1:]
        self.device = rollout.reward.device
        blocks = -(-steps // each)
        self.steps = blocks * each
        """R: rows of the ring, one for every step."""
        self._stride, self._span = (each, sequences) if sequences else (1, 1)
        self._check(sequences % each)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        def ring_of(rows: torch.Tensor | None) -> torch.Tensor | None:
            return None if rows is None else zeros(self.steps, *rows.shape[1:], dtype=rows.dtype)

        needed = self.steps * Replay.bytes_per_step(rollout, prioritized, sequences > 0)
        self.on_host = device_bytes is not None and needed > device_bytes and self.device.type == "cuda"
        """Whether observations are in the host's memory, page-locked."""
        seen = mapped if self.on_host else torch.zeros
        self.frames = seen(
            (self.steps, *rollout.observation.shape[1:]), dtype=rollout.observation.dtype, device=self.device
        )
        self.age, self.alive, self.is_decision_step = (
            ring_of(rollout.age),
            ring_of(rollout.alive),
            ring_of(rollout.is_decision_step),
        )
        self.action = zeros(self.steps, *rollout.action.shape[1:], dtype=rollout.action.dtype)
        self.mask = ring_of(rollout.action_mask)
        self.reward = zeros(self.steps, envs, agents)
        self.terminated, self.truncated = (zeros(self.steps, envs, dtype=torch.bool) for _ in range(2))
        self.serial = torch.full((self.steps, envs), -1, dtype=torch.int32, device=self.device)
        """int32 [R, N]: number of the final observation of the episode truncated here, among all of its env; or -1."""
        final = rollout.final_observation
        room = _final_room(final.shape[0], self.steps, each, self.time_limit, rollout.cut is not None)
        self.finals = seen((room, *final.shape[1:]), dtype=final.dtype, device=self.device)
        self.final_alive = None if rollout.final_alive is None else zeros(room, envs, agents, dtype=torch.bool)
        self.final_count = zeros(envs, dtype=torch.int32)
        """int32 [N]: final observations that each env has brought so far. Number i is in slot i % K."""
        self.state = None
        """[blocks, N, A, S]: what agents remembered before each rollout; for sequences alone."""
        if sequences and rollout.rnn_state is not None:
            self.state = zeros(blocks, *rollout.rnn_state.shape[1:], dtype=rollout.rnn_state.dtype)
        self.head = zeros(1, dtype=torch.int32)
        """The row that is written next."""
        self.filled = zeros(1, dtype=torch.int32)
        """Rows that hold anything."""
        self.counter = zeros(1, dtype=torch.int32)
        """Draws so far: with the seed, it makes the random numbers."""
        self.tree = (
            SumTree(self.steps // self._stride * envs * agents, self.device, alpha, eps) if prioritized else None
        )
        self._taken = zeros(envs, dtype=torch.int32)
        self._begin = zeros(1, dtype=torch.int32)
        self._pairs = [
            (_blocks(kept, each), _blocks(new, each))
            for kept, new in [
                (self.frames, rollout.observation[rollout.stack - 1 : -1]),
                (self.age, None if rollout.age is None else rollout.age[:-1]),
                (self.alive, None if rollout.alive is None else rollout.alive[:-1]),
                (self.is_decision_step, None if rollout.is_decision_step is None else rollout.is_decision_step[:-1]),
                (self.mask, None if rollout.action_mask is None else rollout.action_mask[:-1]),
                (self.action, rollout.action),
                (self.reward, rollout.reward),
                (self.terminated, rollout.terminated),
                (self.truncated, rollout.truncated),
            ]
            if kept is not None and new is not None
        ]
        self._ring = self._struct()
        self._finals_plan, self._leaves_plan = self._plan_finals(), self._plan_leaves()
        self._draws: dict[Any, Any] = {}

    def _check(self, left_over: int) -> None:
        r = self.rollout
        least = r.steps + self.n_step + r.stack - 1 + self._span
        if self.n_step < 1:
            raise ShoalError(f"A replay needs n_step of 1 or more, got {self.n_step}.")
        if left_over:
            raise ShoalError(f"Sequences of {self.sequences} rows are not whole rollouts of {r.steps} steps.")
        if self.steps < least:
            raise ShoalError(f"A replay of {self.steps} steps is too short: it needs {least} steps or more here.")
        if self.steps * r.reward[0].numel() > MOST_PLACES:
            raise ShoalError(f"A replay can hold {MOST_PLACES:,} transitions; {self.steps} steps here are more.")

    # --- writing ----------------------------------------------------------------------------------------------------

    def append(self) -> None:
        """Take in the rollout as it is now."""
        each = self.rollout.steps
        block = (self.head // each).long()
        for kept, new in self._pairs:
            kept.index_copy_(0, block, new)
        if self.state is not None and self.rollout.rnn_state is not None:
            self.state.index_copy_(0, block, self.rollout.rnn_state[:1])
        self._finals_plan()
        self.head.add_(each).remainder_(self.steps)
        self.filled.add_(each).clamp_(max=self.steps)
        if self._leaves_plan is not None:
            self._leaves_plan()

    def mark_discontinuity(self) -> None:
        """What is appended next does not follow on what was appended last (worlds began anew): windows end between."""
        last = (self.head - 1).remainder(self.steps).long()
        self.truncated.index_fill_(0, last, True)  # where no episode ended there, no final observation is found

    def _plan_finals(self) -> Plan:
        """Numbers the final observations of a rollout and keeps them."""
        r = self.rollout
        slots, envs = r.final_observation.shape[0], r.reward.shape[1]
        plan = Plan(self.device, envs)
        inputs = [self._ring, r.steps, slots, wp.from_torch(self._taken)]
        plan.add_kernel(number_finals, envs, inputs, unit=UNIT, block=BLOCK)
        add_keep(plan, slots, self._taken, self.final_count, r.final_observation, self.finals)
        if r.final_alive is not None and self.final_alive is not None:
            add_keep(plan, slots, self._taken, self.final_count, r.final_alive, self.final_alive)
        return plan

    def _plan_leaves(self) -> Plan | None:
        """Priorities of what came and of what went."""
        if self.tree is None:
            return None
        each, stride, cells = self.rollout.steps, self._stride, self.reward[0].numel()
        window = self._span + self.n_step
        farthest = (window + each - 1) // stride  # units behind the head: these have their future just now
        units = farthest + -(-(self.rollout.stack - 1) // stride)
        plan = Plan(self.device, units * cells)

        def begin() -> None:
            rows = (self.head - farthest * stride).remainder(self.steps)
            torch.mul(rows // stride, cells, out=self._begin)

        plan.add_function(begin)
        top, nodes = wp.from_torch(self.tree.top), wp.from_torch(self.tree.nodes)
        inputs = [self._ring, farthest, stride, self._span, window, top, nodes]
        plan.add_kernel(set_leaves, units * cells, inputs, unit=UNIT, block=BLOCK)
        plan.steps += self.tree.range_plan(self._begin, units * cells).steps
        return plan

    # --- drawing ----------------------------------------------------------------------------------------------------

    def sample(self, batch: int, beta: torch.Tensor | float = 1.0) -> Sample:
        """Draw transitions. At least n_step + stack + 1 rows must have been appended."""
        if self.sequences:
            raise ShoalError("This replay was made for sequences; draw with sample_sequences.")
        if batch not in self._draws:
            self._draws[batch] = _Draw(self, batch)
        draw = self._draws[batch]
        draw.plan()
        self.counter.add_(1)
        mask = later_mask = None
        if self.mask is not None:
            masks = self.mask.flatten(0, 2)
            mask = masks[draw.place]
            later_mask = masks[draw.later_place] | (draw.later_source[:, :1] < 0)
        return Sample(
            place=draw.place,
            seen=draw.seen,
            action=self.action.flatten(0, 2)[draw.place],
            mask=mask,
            reward=draw.reward,
            discount=draw.discount,
            later=draw.later,
            later_mask=later_mask,
            weight=self._weights(draw.priority, draw.counts, beta),
        )

    def sample_sequences(self, batch: int, burn_in: int, length: int, beta: torch.Tensor | float = 1.0) -> Sequences:
        """Draw sequences that begin where rollouts began. At least as many rows and one rollout must be there."""
        each = self.rollout.steps
        if burn_in % each or length % each or burn_in + length != self.sequences:
            raise ShoalError(
                f"A burn-in of {burn_in} and {length} rows must be whole rollouts of {each} steps, and together the "
                f"sequences of {self.sequences} rows that this replay was made for."
            )
        if batch not in self._draws:
            self._draws[batch] = _SequenceDraw(self, batch)
        draw = self._draws[batch]
        draw.plan()
        self.counter.add_(1)
        at, rows = draw.at, draw.at // self.reward.shape[2]
        return Sequences(
            place=draw.place,
            state=None if self.state is None else self.state.flatten(0, 2)[draw.place],
            seen=draw.seen,
            action=self.action.flatten(0, 2)[at],
            mask=None if self.mask is None else self.mask.flatten(0, 2)[at],
            reward=self.reward.flatten()[at],
            terminated=self.terminated.flatten()[rows],
            truncated=self.truncated.flatten()[rows],
            alive=draw.alive,
            n_step_reward=draw.reward,
            discount=draw.discount,
            later=draw.later,
            counts=draw.counts,
            final_seen=draw.final_seen,
            final_row=draw.final_row,
            weight=self._weights(draw.priority, draw.counted, beta),
        )

    def update_priorities(self, place: torch.Tensor, error: torch.Tensor) -> None:
        """What was drawn has shown these errors: priorities become (|error| + eps)^alpha. Uniform: nothing to do."""
        if self.tree is not None:
            self.tree.update(place, error.detach())
            self.rollout.reducer.maximum(self.tree.top)

    def _weights(self, priority: torch.Tensor, counts: torch.Tensor, beta: torch.Tensor | float) -> torch.Tensor:
        """(n P(i))^-beta over the largest of the batch: (least priority / priority)^beta; 0 for what counts not.

        Each process draws as many from its own priorities p of sum s; in place of 1 / p there stands s / p.
        """
        if self.tree is None:
            return counts.float()
        if self.rollout.reducer.size > 1:
            odds = self.tree.nodes[-1] / priority
            most = odds.masked_fill(~counts, 0.0).amax()
            self.rollout.reducer.maximum(most)
            return torch.pow(odds / most, beta).masked_fill(~counts, 0.0)
        least = priority.masked_fill(~counts, torch.inf).amin()
        return torch.pow(least / priority, beta).masked_fill(~counts, 0.0)

    def _add_draw(self, plan: Plan, draw: "_Draw | _SequenceDraw") -> None:
        """Append the choice of places, with the priorities they had."""
        batch = draw.place.numel()
        out = [wp.from_torch(draw.place), wp.from_torch(draw.priority)]
        random = [self.seed, wp.from_torch(self.counter)]
        reducer = self.rollout.reducer
        if self.tree is None:
            which = [batch, reducer.rank, reducer.size]
            inputs = [self._ring, *which, *random, self._stride, self._span, self._span + self.n_step, *out]
            plan.add_kernel(draw_uniform, batch, inputs, unit=UNIT, block=BLOCK)
        else:
            inputs = [batch, reducer.rank, *random, *self.tree.inputs, *out]
            plan.add_kernel(draw_by_priority, batch, inputs, unit=UNIT, block=BLOCK)

    def _struct(self) -> Any:
        """What kernels see of this replay."""
        ring = Ring()
        ring.rows, ring.stack, ring.kept = self.steps, self.rollout.stack, self.finals.shape[0]
        ring.envs, ring.agents = self.reward.shape[1:]
        ring.leaves, ring.waits = self.alive is not None, self.is_decision_step is not None
        for name in ("head", "filled", "reward", "terminated", "truncated", "serial", "final_count"):
            setattr(ring, name, wp.from_torch(getattr(self, name)))
        never = torch.zeros(1, 1, 1, dtype=torch.bool, device=self.device)
        self._unused = never, torch.zeros(1, 1, dtype=torch.int32, device=self.device)
        for name in ("alive", "is_decision_step", "final_alive"):
            found = getattr(self, name)
            setattr(ring, name, wp.from_torch(never if found is None else found))
        ring.age = wp.from_torch(self._unused[1] if self.age is None else self.age)
        return ring

    # --- size and state ---------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Where it is, in words, if not where one would think."""
        return ", observations in the host's memory" if self.on_host else ""

    @staticmethod
    def bytes_per_step(rollout: Rollout, prioritized: bool = False, sequences: bool = False) -> int:
        """Memory for one step of all envs; of final observations a share. Works on torch's meta device.

        For sequences there are priorities, and what agents remembered, once per rollout.
        """
        stride = rollout.steps if sequences else 1
        rows = [rollout.observation, rollout.action, rollout.reward, rollout.terminated, rollout.truncated]
        rows += [
            t for t in (rollout.age, rollout.alive, rollout.is_decision_step, rollout.action_mask) if t is not None
        ]
        found = sum(t[0].nbytes for t in rows) + 4 * rollout.terminated.shape[1]
        if prioritized:
            found += rollout.reward[0].nbytes * 33 // (32 * stride)
        if sequences and rollout.rnn_state is not None:
            found += rollout.rnn_state[0].nbytes // stride
        final = rollout.final_observation
        cuts = (rollout.cut is not None) / rollout.steps
        share = min(final.shape[0] / rollout.steps, 1 / FINAL_SHARE + cuts)
        if rollout.time_limit is not None:
            share = 1 / rollout.time_limit + cuts
        return found + round(share * final[0].nbytes)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.state_dict().values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every tensor that the future depends on, by name."""
        names = "frames age action mask reward terminated truncated alive is_decision_step serial finals final_alive final_count"
        found = {name: getattr(self, name) for name in f"{names} state head filled counter".split()}
        if self.tree is not None:
            found |= dict(priority=self.tree.leaves.view(-1, *self.reward.shape[1:]), top=self.tree.top)
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def env_axes(self) -> dict[str, int]:
        """Names of the state that have the envs along an axis, and which."""
        whole = ("head", "filled", "counter", "top")
        return {name: 0 if name == "final_count" else 1 for name in self.state_dict() if name not in whole}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Overwrite every tensor in place; names and shapes must match exactly, or nothing is changed."""
        own = self.state_dict()
        bad = [n for n in own.keys() | state.keys() if n not in own or n not in state or state[n].shape != own[n].shape]
        if bad:
            raise ShoalError(f"The saved replay does not fit this one in: {', '.join(sorted(bad))}.")
        largest = dict(head=self.steps - self.rollout.steps, filled=self.steps, final_count=2**31 - 1)
        for name, most in largest.items():  # kernels index by these
            low, high = (int(end) for end in state[name].aminmax())
            if low < 0 or high > most or (name == "head" and high % self.rollout.steps):
                raise ShoalError(
                    f"The saved replay is damaged: {name} must be within 0 and {most}, got {low} to {high}."
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        if self.tree is not None:
            self.tree.renew()


class _Draw:
    """Memory for draws of one size, and the plan that fills it."""

    def __init__(self, replay: Replay, batch: int):
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=replay.device)

        stack, seen = replay.rollout.stack, replay.finals.shape[3:]
        self.place, self.later_place = (zeros(batch, dtype=torch.int64) for _ in range(2))
        self.priority, self.reward, self.discount = (zeros(batch) for _ in range(3))
        self.counts = zeros(batch, dtype=torch.bool)
        self.source, self.later_source = (zeros(batch, stack, dtype=torch.int32) for _ in range(2))
        self.seen, self.later = (zeros(batch, *seen, dtype=replay.frames.dtype) for _ in range(2))
        self.plan = Plan(replay.device, batch)
        replay._add_draw(self.plan, self)
        names = "place priority later_place reward discount counts source later_source"
        outputs = [wp.from_torch(getattr(self, name)) for name in names.split()]
        inputs = [replay._ring, replay.n_step, replay.gamma, *outputs]
        self.plan.add_kernel(look, batch, inputs, unit=UNIT, block=BLOCK)
        for source, out in ((self.source, self.seen), (self.later_source, self.later)):
            add_gather(self.plan, source, replay.frames, replay.finals, out, 3)


class _SequenceDraw:
    """The same for sequences."""

    def __init__(self, replay: Replay, batch: int):
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=replay.device)

        stack, seen, span = replay.rollout.stack, replay.finals.shape[3:], replay.sequences
        rows = span + replay.n_step
        limit = replay.time_limit
        finals = min(rows, FINALS_PER_SEQUENCE) if limit is None else -(-rows // limit)
        self.place, self.priority = zeros(batch, dtype=torch.int64), zeros(batch)
        self.counted = zeros(batch, dtype=torch.bool)
        self.at, self.final_index = zeros(rows, batch, dtype=torch.int64), zeros(rows, batch, dtype=torch.int32)
        self.alive, self.counts = zeros(rows, batch, dtype=torch.bool), zeros(span, batch, dtype=torch.bool)
        self.reward, self.discount, self.later = zeros(span, batch), zeros(span, batch), zeros(span, batch).long()
        self.source = zeros(rows, batch, stack, dtype=torch.int32)
        self.final_source = zeros(finals, batch, stack, dtype=torch.int32)
        self.final_row = zeros(finals, batch, dtype=torch.int64)
        self.seen = zeros(rows, batch, *seen, dtype=replay.frames.dtype)
        self.final_seen = zeros(finals, batch, *seen, dtype=replay.frames.dtype)
        self.plan = Plan(replay.device, batch)
        replay._add_draw(self.plan, self)
        names = "place priority counted at alive final_index final_row source final_source"
        outputs = [wp.from_torch(getattr(self, name)) for name in names.split()]
        self.plan.add_kernel(lay_out, batch, [replay._ring, replay._stride, *outputs], unit=64, block=BLOCK)
        names = "place alive final_index reward discount later counts"
        outputs = [wp.from_torch(getattr(self, name)) for name in names.split()]
        inputs = [replay._ring, replay._stride, batch, replay.n_step, replay.gamma, *outputs]
        self.plan.add_kernel(look_along, span * batch, inputs, unit=batch, block=BLOCK)
        for source, out in ((self.source, self.seen), (self.final_source, self.final_seen)):
            add_gather(self.plan, source.flatten(0, 1), replay.frames, replay.finals, out.flatten(0, 1), 3)


def _blocks(rows: torch.Tensor, each: int) -> torch.Tensor:
    """Rows as blocks of `each`, [blocks, words]: a copy is fastest with wide words."""
    blocks = rows.unflatten(0, (-1, each))
    return as_words(blocks, 1, word_bytes(rows[0]))


def _final_room(slots: int, rows: int, each: int, time_limit: int | None, cuts: bool) -> int:
    """Final observations to keep per env: all that can be in the ring, or without a limit a share of its rows.

    If rollouts are cut short, each has one more.
    """
    blocks = rows // each
    if time_limit is not None:
        return max(slots, -(-rows // time_limit) + 1 + cuts * blocks)
    return min(slots * blocks, max(slots, rows // FINAL_SHARE) + cuts * blocks)
