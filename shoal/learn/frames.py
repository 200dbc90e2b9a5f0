"""Copies of observations of any dtype, as rows of machine words."""

from functools import cache
from typing import Any, no_type_check

import torch
import warp as wp

from shoal.core.launch import Plan

wp.set_module_options({"enable_backward": False})

MAX_LANES = 32
"""Maximum number of GPU threads that copy one frame."""

BLOCK = 128

WORDS_PER_CORE = 32_768
"""Words per CPU core of a copy; with fewer, a second core does not pay off."""

WORDS = {8: (torch.int64, wp.int64), 4: (torch.int32, wp.int32), 1: (torch.uint8, wp.uint8)}
"""Word size [bytes] -> dtype in torch and in Warp."""


def word_size(frame: torch.Tensor) -> int:
    """The largest word size that divides a frame's bytes, since copies of wide words are fastest."""
    return next(size for size in WORDS if frame.nbytes % size == 0)


def as_words(tensor: torch.Tensor, batch: int, size: int) -> torch.Tensor:
    """A view of a tensor with `batch` leading dimensions as [rows, words]."""
    rows = tensor.flatten(0, batch - 1)
    return rows.flatten(1).view(WORDS[size][0]) if rows.ndim > 1 else rows.unsqueeze(1).view(WORDS[size][0])


def add_gather(
    plan: Plan, source: torch.Tensor, frames: torch.Tensor, finals: torch.Tensor, out: torch.Tensor, batch: int
) -> None:
    """Append a gather of stacked observations to a plan.

    Args:
        plan: The plan.
        source: int32 [n, stack]; i >= 0 is frame i of `frames`, and -1 - i the same stack position of `finals` i.
        frames: Single frames [..., *shape], with `batch` leading dimensions.
        finals: Final observations with stacked frames [..., *stacked shape], with `batch` leading dimensions.
        out: [n, *stacked shape].
        batch: Number of leading dimensions.
    """
    size = word_size(frames[(0,) * batch])
    arrays = [wp.from_torch(as_words(t, lead, size)) for t, lead in ((frames, batch), (finals, batch), (out, 1))]
    lanes = _threads_per_frame(plan, arrays[0])
    count, stack = source.shape
    inputs = [lanes, stack, wp.from_torch(source), *arrays]
    unit = _frames_per_core(arrays[0])
    plan.add_kernel(gather_kernel(WORDS[size][1]), count * stack * lanes, inputs, unit=unit, block=BLOCK)


def add_store_finals(
    plan: Plan, slots: int, num_new: torch.Tensor, count: torch.Tensor, finals: torch.Tensor, ring: torch.Tensor
) -> None:
    """Append a copy of new final observations into each env's ring to a plan.

    Args:
        plan: The plan.
        slots: Number of slots of `finals`.
        num_new: int32 [N], slots of `finals` in use.
        count: int32 [N], final observations of the env so far, including these.
        finals: [slots, N, A, ...].
        ring: [K, N, A, ...]; observation i of an env goes to slot i % K.
    """
    envs, agents = finals.shape[1:3]
    size = word_size(finals[0, 0, 0])
    arrays = [wp.from_torch(as_words(t, 3, size)) for t in (finals, ring)]
    lanes = _threads_per_frame(plan, arrays[0])
    inputs = [lanes, envs, agents, ring.shape[0], wp.from_torch(num_new), wp.from_torch(count), *arrays]
    threads = slots * envs * agents * lanes
    plan.add_kernel(store_kernel(WORDS[size][1]), threads, inputs, unit=_frames_per_core(arrays[0]), block=BLOCK)


def _threads_per_frame(plan: Plan, frames: wp.array) -> int:
    """Threads per frame: on a GPU, adjacent threads copy adjacent words; on a CPU, one thread copies the frame."""
    return min(MAX_LANES, frames.shape[1]) if plan.device.type == "cuda" else 1


def _frames_per_core(frames: wp.array) -> int:
    """Minimum number of frames per CPU core, one thread each."""
    return -(-WORDS_PER_CORE // frames.shape[1])


@cache
def gather_kernel(word: Any) -> Any:
    """The kernel of `add_gather` for one word type."""

    @no_type_check
    def gather(
        first: int,
        lanes: int,
        stack: int,
        source: wp.array2d(dtype=int),
        frames: wp.array2d(dtype=word),
        finals: wp.array2d(dtype=word),
        out: wp.array2d(dtype=word),
    ):
        i = first + wp.tid()
        frame = (i // lanes) % stack
        sample = i // (lanes * stack)
        size = frames.shape[1]
        row = source[sample, frame]
        for w in range(i % lanes, size, lanes):
            at = frame * size + w
            if row >= 0:
                out[sample, at] = frames[row, w]
            else:
                out[sample, at] = finals[-1 - row, at]

    return wp.kernel(gather, module="unique", module_options={"enable_backward": False})


@cache
def store_kernel(word: Any) -> Any:
    """The kernel of `add_store_finals` for one word type."""

    @no_type_check
    def store(
        first: int,
        lanes: int,
        envs: int,
        agents: int,
        capacity: int,
        num_new: wp.array(dtype=int),
        count: wp.array(dtype=int),
        finals: wp.array2d(dtype=word),
        ring: wp.array2d(dtype=word),
    ):
        i = first + wp.tid()
        row = i // lanes
        agent = row % agents
        env = (row // agents) % envs
        slot = row // (agents * envs)
        if slot < num_new[env]:
            cell = (count[env] - num_new[env] + slot) % capacity
            for w in range(i % lanes, finals.shape[1], lanes):
                ring[(cell * envs + env) * agents + agent, w] = finals[row, w]

    return wp.kernel(store, module="unique", module_options={"enable_backward": False})
