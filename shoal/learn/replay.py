"""Replay buffer: the last steps of all envs on the device, sampled uniformly or by priority."""

from typing import Any

import torch
import warp as wp

from shoal.core.errors import ShoalError
from shoal.core.launch import Plan, init_warp
from shoal.core.mapped import mapped
from shoal.learn.frames import add_store_finals, as_words, word_size
from shoal.learn.replay_draws import Sample, SequenceDraw, Sequences, TransitionDraw
from shoal.learn.replay_kernels import Ring, assign_final_serials, draw_by_priority, draw_uniform, set_new_priorities
from shoal.learn.rollout import Rollout
from shoal.learn.sum_tree import BLOCK, UNIT, SumTree

MAX_TRANSITIONS = 2**30
"""Maximum number of transitions of a replay, whose indices are int32."""

FINAL_SHARE = 8
"""Rows per stored final observation when the time limit is unknown."""


class Replay:
    """A ring buffer of the last steps of one policy's envs and agents, allocated once.

    It stores observations (`frames` [R, N, A, *shape], each frame once, in the observation's dtype), actions, rewards,
    flags, masks, and the final observations of truncated episodes (`finals` [K, N, A, *stacked shape]), all in device
    memory, or observations in host memory. A row's next observation is the next row of the ring, so the newest `n_step`
    rows are incomplete; the oldest `stack - 1` rows have lost their history. Neither are drawn.

    `append`, the draws and `update_priorities` read nothing on the host and can be part of a CUDA graph. Agents with an
    action interval k (`Rollout.is_decision_step`) contribute the steps at which they choose; `n_step` must be a
    multiple of k.
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
        """Allocate a replay.

        Args:
            rollout: The rollout that `append` copies. Its time limit bounds the number of final observations; without
                one, those of a fraction of the rows are kept.
            steps: Rows of the ring, rounded up to whole rollouts.
            n_step: Steps of the targets.
            gamma: Discount factor.
            prioritized: Draw by priority instead of uniformly.
            alpha: Exponent of the priorities.
            eps: Added to errors before the exponent.
            seed: Seed of the draws.
            sequences: Rows of each drawn sequence, burn-in included (0: draw transitions).
            device_bytes: Above this size, observations are in page-locked host memory, which the GPU reads directly.
        """
        init_warp()
        self.rollout, self.n_step, self.gamma, self.seed = rollout, n_step, gamma, seed & 0x7FFFFFFF
        self.sequences, self.time_limit = sequences, rollout.time_limit
        each, (envs, agents) = rollout.steps, rollout.reward.shape[1:]
        self.device = rollout.reward.device
        blocks = -(-steps // each)
        self.steps = blocks * each
        """R: rows of the ring, one per step."""
        self.stride, self._span = (each, sequences) if sequences else (1, 1)
        """Rows per drawable unit: a rollout for sequences, else one."""
        self._check(sequences % each)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        def ring_of(rows: torch.Tensor | None) -> torch.Tensor | None:
            return None if rows is None else zeros(self.steps, *rows.shape[1:], dtype=rows.dtype)

        needed = self.steps * Replay.bytes_per_step(rollout, prioritized, sequences > 0)
        self.on_host = device_bytes is not None and needed > device_bytes and self.device.type == "cuda"
        """Whether observations are in page-locked host memory."""
        allocate = mapped if self.on_host else torch.zeros
        self.frames = allocate(
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
        """int32 [R, N]: serial number, per env, of the final observation of the episode truncated here; else -1."""
        final = rollout.final_observation
        room = _final_room(final.shape[0], self.steps, each, self.time_limit, rollout.preempted is not None)
        self.finals = allocate((room, *final.shape[1:]), dtype=final.dtype, device=self.device)
        self.final_alive = None if rollout.final_alive is None else zeros(room, envs, agents, dtype=torch.bool)
        self.final_count = zeros(envs, dtype=torch.int32)
        """int32 [N]: final observations of each env so far. Serial number i is in slot i % K."""
        self.state = None
        """[blocks, N, A, S]: recurrent state before each rollout; only for sequences."""
        if sequences and rollout.rnn_state is not None:
            self.state = zeros(blocks, *rollout.rnn_state.shape[1:], dtype=rollout.rnn_state.dtype)
        self.head = zeros(1, dtype=torch.int32)
        """int32 [1]: next row to write."""
        self.filled = zeros(1, dtype=torch.int32)
        """int32 [1]: number of rows written, up to R."""
        self.counter = zeros(1, dtype=torch.int32)
        """int32 [1]: number of draws, the counter of their random numbers."""
        self.tree = SumTree(self.steps // self.stride * envs * agents, self.device, alpha, eps) if prioritized else None
        self._new_finals = zeros(envs, dtype=torch.int32)
        self._first_leaf = zeros(1, dtype=torch.int32)
        self._pairs = [
            (_blocks(stored, each), _blocks(new, each))
            for stored, new in [
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
            if stored is not None and new is not None
        ]
        self.ring = self._kernel_arguments()
        """The replay as an argument of kernels."""
        self._finals_plan, self._leaves_plan = self._plan_finals(), self._plan_leaves()
        self._draws: dict[Any, Any] = {}

    def _check(self, left_over: int) -> None:
        r = self.rollout
        least = r.steps + self.n_step + r.stack - 1 + self._span
        if self.n_step < 1:
            raise ShoalError(f"n_step must be at least 1, got {self.n_step}.")
        if left_over:
            raise ShoalError(f"Sequences of {self.sequences} steps must be multiples of rollouts of {r.steps} steps.")
        if self.steps < least:
            raise ShoalError(f"A replay buffer of {self.steps} steps is too short; it needs at least {least} steps.")
        if self.steps * r.reward[0].numel() > MAX_TRANSITIONS:
            raise ShoalError(
                f"A replay buffer holds up to {MAX_TRANSITIONS:,} transitions; reduce its {self.steps} steps."
            )

    # --- writing ----------------------------------------------------------------------------------------------------

    def append(self) -> None:
        """Copy the rollout into the ring."""
        each = self.rollout.steps
        block = (self.head // each).long()
        for stored, new in self._pairs:
            stored.index_copy_(0, block, new)
        if self.state is not None and self.rollout.rnn_state is not None:
            self.state.index_copy_(0, block, self.rollout.rnn_state[:1])
        self._finals_plan()
        self.head.add_(each).remainder_(self.steps)
        self.filled.add_(each).clamp_(max=self.steps)
        if self._leaves_plan is not None:
            self._leaves_plan()

    def mark_discontinuity(self) -> None:
        """End all n-step windows at the last appended row, because the next rollout does not continue it."""
        last = (self.head - 1).remainder(self.steps).long()
        self.truncated.index_fill_(0, last, True)  # a row without a final observation gets weight 0

    def _plan_finals(self) -> Plan:
        """Plan that assigns serial numbers to a rollout's final observations and stores them."""
        r = self.rollout
        slots, envs = r.final_observation.shape[0], r.reward.shape[1]
        plan = Plan(self.device, envs)
        inputs = [self.ring, r.steps, slots, wp.from_torch(self._new_finals)]
        plan.add_kernel(assign_final_serials, envs, inputs, unit=UNIT, block=BLOCK)
        add_store_finals(plan, slots, self._new_finals, self.final_count, r.final_observation, self.finals)
        if r.final_alive is not None and self.final_alive is not None:
            add_store_finals(plan, slots, self._new_finals, self.final_count, r.final_alive, self.final_alive)
        return plan

    def _plan_leaves(self) -> Plan | None:
        """Plan that sets priorities of rows that can now be sampled or were overwritten. None for a uniform replay."""
        if self.tree is None:
            return None
        each, stride, cells = self.rollout.steps, self.stride, self.reward[0].numel()
        window = self._span + self.n_step
        max_behind = (window + each - 1) // stride  # units behind the head: the oldest that just became complete
        units = max_behind + -(-(self.rollout.stack - 1) // stride)
        plan = Plan(self.device, units * cells)

        def find_first_leaf() -> None:
            rows = (self.head - max_behind * stride).remainder(self.steps)
            torch.mul(rows // stride, cells, out=self._first_leaf)

        plan.add_function(find_first_leaf)
        top, nodes = wp.from_torch(self.tree.top), wp.from_torch(self.tree.nodes)
        inputs = [self.ring, max_behind, stride, self._span, window, top, nodes]
        plan.add_kernel(set_new_priorities, units * cells, inputs, unit=UNIT, block=BLOCK)
        plan.steps += self.tree.range_plan(self._first_leaf, units * cells).steps
        return plan

    # --- drawing ----------------------------------------------------------------------------------------------------

    def sample(self, batch: int, beta: torch.Tensor | float = 1.0) -> Sample:
        """Draw transitions. At least n_step + stack + 1 rows must have been appended.

        Args:
            batch: Number of transitions.
            beta: Exponent of the importance weights.
        """
        if self.sequences:
            raise ShoalError("This replay buffer holds sequences; use sample_sequences() instead of sample().")
        if batch not in self._draws:
            self._draws[batch] = TransitionDraw(self, batch)
        draw = self._draws[batch]
        draw.plan()
        self.counter.add_(1)
        mask = next_mask = None
        if self.mask is not None:
            masks = self.mask.flatten(0, 2)
            mask = masks[draw.index]
            next_mask = masks[draw.next_index] | (draw.next_source[:, :1] < 0)
        return Sample(
            index=draw.index,
            observation=draw.observation,
            action=self.action.flatten(0, 2)[draw.index],
            action_mask=mask,
            reward=draw.reward,
            discount=draw.discount,
            next_observation=draw.next_observation,
            next_action_mask=next_mask,
            weight=self._weights(draw.priority, draw.valid, beta),
        )

    def sample_sequences(self, batch: int, burn_in: int, length: int, beta: torch.Tensor | float = 1.0) -> Sequences:
        """Draw sequences that start at the beginning of rollouts.

        Their rows plus one rollout must have been appended.

        Args:
            batch: Number of sequences.
            burn_in: Leading rows that only warm up the RNN.
            length: Rows that are learned from.
            beta: Exponent of the importance weights.
        """
        each = self.rollout.steps
        if burn_in % each or length % each or burn_in + length != self.sequences:
            raise ShoalError(
                f"Burn-in ({burn_in} steps) and length ({length} steps) must be multiples of rollouts of {each} steps "
                f"and add up to this replay buffer's sequences of {self.sequences} steps."
            )
        if batch not in self._draws:
            self._draws[batch] = SequenceDraw(self, batch)
        draw = self._draws[batch]
        draw.plan()
        self.counter.add_(1)
        cell, rows = draw.cell, draw.cell // self.reward.shape[2]
        return Sequences(
            index=draw.index,
            state=None if self.state is None else self.state.flatten(0, 2)[draw.index],
            observation=draw.observation,
            action=self.action.flatten(0, 2)[cell],
            action_mask=None if self.mask is None else self.mask.flatten(0, 2)[cell],
            reward=self.reward.flatten()[cell],
            terminated=self.terminated.flatten()[rows],
            truncated=self.truncated.flatten()[rows],
            alive=draw.alive,
            n_step_reward=draw.reward,
            discount=draw.discount,
            next_row=draw.next_row,
            valid=draw.valid,
            final_observation=draw.final_observation,
            final_row=draw.final_row,
            weight=self._weights(draw.priority, draw.drawable, beta),
        )

    def update_priorities(self, index: torch.Tensor, error: torch.Tensor) -> None:
        """Set priorities to (|error| + eps)^alpha for indices and TD errors [B]; no effect on uniform replays."""
        if self.tree is not None:
            self.tree.update(index, error.detach())
            self.rollout.reducer.maximum(self.tree.top)

    def _weights(self, priority: torch.Tensor, valid: torch.Tensor, beta: torch.Tensor | float) -> torch.Tensor:
        """Importance weights (n P(i))^-beta over the batch's maximum: (min p / p)^beta; 0 if not `valid`.

        With several processes, each draws the same number from its own priorities p with sum s, so s / p
        replaces 1 / p.
        """
        if self.tree is None:
            return valid.float()
        if self.rollout.reducer.size > 1:
            inverse = self.tree.nodes[-1] / priority
            largest = inverse.masked_fill(~valid, 0.0).amax()
            self.rollout.reducer.maximum(largest)
            return torch.pow(inverse / largest, beta).masked_fill(~valid, 0.0)
        smallest = priority.masked_fill(~valid, torch.inf).amin()
        return torch.pow(smallest / priority, beta).masked_fill(~valid, 0.0)

    def add_draw(self, plan: Plan, index: torch.Tensor, priority: torch.Tensor) -> None:
        """Append a random choice of indices [B], with their priorities [B], to a plan."""
        batch = index.numel()
        out = [wp.from_torch(index), wp.from_torch(priority)]
        random = [self.seed, wp.from_torch(self.counter)]
        reducer = self.rollout.reducer
        if self.tree is None:
            which = [batch, reducer.rank, reducer.size]
            inputs = [self.ring, *which, *random, self.stride, self._span, self._span + self.n_step, *out]
            plan.add_kernel(draw_uniform, batch, inputs, unit=UNIT, block=BLOCK)
        else:
            inputs = [batch, reducer.rank, *random, *self.tree.inputs, *out]
            plan.add_kernel(draw_by_priority, batch, inputs, unit=UNIT, block=BLOCK)

    def _kernel_arguments(self) -> Any:
        """The replay as a `Ring` struct."""
        ring = Ring()
        ring.rows, ring.stack, ring.num_slots = self.steps, self.rollout.stack, self.finals.shape[0]
        ring.envs, ring.agents = self.reward.shape[1:]
        ring.can_leave, ring.can_wait = self.alive is not None, self.is_decision_step is not None
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
        """Text for the log if observations are stored in CPU memory; else empty."""
        return ", observations in the host's memory" if self.on_host else ""

    @staticmethod
    def bytes_per_step(rollout: Rollout, prioritized: bool = False, sequences: bool = False) -> int:
        """Bytes per step of all envs, including a share of the final observations. Works on torch's meta device.

        With sequences, priorities and recurrent states are stored once per rollout.
        """
        stride = rollout.steps if sequences else 1
        rows = [rollout.observation, rollout.action, rollout.reward, rollout.terminated, rollout.truncated]
        rows += [
            t for t in (rollout.age, rollout.alive, rollout.is_decision_step, rollout.action_mask) if t is not None
        ]
        total = sum(t[0].nbytes for t in rows) + 4 * rollout.terminated.shape[1]
        if prioritized:
            total += rollout.reward[0].nbytes * 33 // (32 * stride)
        if sequences and rollout.rnn_state is not None:
            total += rollout.rnn_state[0].nbytes // stride
        final = rollout.final_observation
        per_preemption = (rollout.preempted is not None) / rollout.steps
        share = min(final.shape[0] / rollout.steps, 1 / FINAL_SHARE + per_preemption)
        if rollout.time_limit is not None:
            share = 1 / rollout.time_limit + per_preemption
        return total + round(share * final[0].nbytes)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.state_dict().values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors that later draws depend on, by name."""
        names = "frames age action mask reward terminated truncated alive is_decision_step serial finals final_alive"
        state = {name: getattr(self, name) for name in f"{names} final_count state head filled counter".split()}
        if self.tree is not None:
            state |= dict(priority=self.tree.leaves.view(-1, *self.reward.shape[1:]), top=self.tree.top)
        return {name: tensor for name, tensor in state.items() if tensor is not None}

    def env_axes(self) -> dict[str, int]:
        """Axis of the envs in each state tensor that has one, by the tensor's name."""
        whole = ("head", "filled", "counter", "top")
        return {name: 0 if name == "final_count" else 1 for name in self.state_dict() if name not in whole}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Copy a state dict into the replay.

        Raises:
            ShoalError: Names or shapes do not match, or an index is out of range; nothing is copied.
        """
        own = self.state_dict()
        bad = [n for n in own.keys() | state.keys() if n not in own or n not in state or state[n].shape != own[n].shape]
        if bad:
            raise ShoalError(f"The saved replay buffer does not match this one in: {', '.join(sorted(bad))}.")
        bounds = dict(head=self.steps - self.rollout.steps, filled=self.steps, final_count=2**31 - 1)
        for name, largest in bounds.items():  # kernels use these as indices
            low, high = (int(end) for end in state[name].aminmax())
            if low < 0 or high > largest or (name == "head" and high % self.rollout.steps):
                raise ShoalError(
                    f"The saved replay buffer is damaged: {name} must be within 0 and {largest}, got {low} to {high}."
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        if self.tree is not None:
            self.tree.recompute_sums()


def _blocks(rows: torch.Tensor, each: int) -> torch.Tensor:
    """Rows as blocks of `each`, [blocks, words], since copies of wide words are fastest."""
    blocks = rows.unflatten(0, (-1, each))
    return as_words(blocks, 1, word_size(rows[0]))


def _final_room(slots: int, rows: int, each: int, time_limit: int | None, preemptible: bool) -> int:
    """Number of final observations stored per env: all of the ring, or a share of its rows without a time limit.

    `preemptible` rollouts have one more each.
    """
    blocks = rows // each
    if time_limit is not None:
        return max(slots, -(-rows // time_limit) + 1 + preemptible * blocks)
    return min(slots * blocks, max(slots, rows // FINAL_SHARE) + preemptible * blocks)
