"""Copying what agents saw, whatever its type: rows of words, gathered from frames and final observations."""

from functools import cache
from typing import Any

import torch
import warp as wp

from shoal.core.launch import Plan

wp.set_module_options({"enable_backward": False})

LANES = 32
"""The most threads of a GPU that share a frame."""

BLOCK = 128

PER_CORE = 32_768
"""Words of a copy below which a second core of a CPU costs more than it brings."""

WORDS = {8: (torch.int64, wp.int64), 4: (torch.int32, wp.int32), 1: (torch.uint8, wp.uint8)}
"""Bytes of a word -> its type in torch and in Warp."""


def word_bytes(frame: torch.Tensor) -> int:
    """The widest word that frames like this one are made of: copies care for bytes alone, wide ones are fastest."""
    return next(size for size in WORDS if frame.nbytes % size == 0)


def as_words(tensor: torch.Tensor, batch: int, size: int) -> torch.Tensor:
    """A tensor with `batch` leading dimensions as rows of words, [rows, words], over the same memory."""
    rows = tensor.flatten(0, batch - 1)
    return rows.flatten(1).view(WORDS[size][0]) if rows.ndim > 1 else rows.unsqueeze(1).view(WORDS[size][0])


def add_gather(
    plan: Plan, source: torch.Tensor, frames: torch.Tensor, finals: torch.Tensor, out: torch.Tensor, batch: int
) -> None:
    """Append a copy to `out` [n, *seen] of the frames that `source` [n, stack] (int32) numbers.

    A number from 0 on is a frame of `frames` [..., *shape] (`batch` leading dimensions); -1 - i is the part of final
    observation i, of `finals` [..., *seen], that stands in this place of the stack.
    """
    size = word_bytes(frames[(0,) * batch])
    arrays = [wp.from_torch(as_words(t, lead, size)) for t, lead in ((frames, batch), (finals, batch), (out, 1))]
    lanes = _lanes(plan, arrays[0])
    count, stack = source.shape
    inputs = [lanes, stack, wp.from_torch(source), *arrays]
    plan.add_kernel(gather_kernel(WORDS[size][1]), count * stack * lanes, inputs, unit=_unit(arrays[0]), block=BLOCK)


def add_keep(
    plan: Plan, slots: int, taken: torch.Tensor, count: torch.Tensor, fresh: torch.Tensor, kept: torch.Tensor
) -> None:
    """Append a copy of what is in the first `taken` [N] slots of `fresh` [slots, N, A, ...] to each env's ring `kept`.

    That ring is [K, N, A, ...]; `count` [N] is how many it has been given, those of now included.
    """
    envs, agents = fresh.shape[1:3]
    size = word_bytes(fresh[0, 0, 0])
    arrays = [wp.from_torch(as_words(t, 3, size)) for t in (fresh, kept)]
    lanes = _lanes(plan, arrays[0])
    inputs = [lanes, envs, agents, kept.shape[0], wp.from_torch(taken), wp.from_torch(count), *arrays]
    threads = slots * envs * agents * lanes
    plan.add_kernel(keep_kernel(WORDS[size][1]), threads, inputs, unit=_unit(arrays[0]), block=BLOCK)


def _lanes(plan: Plan, frames: wp.array) -> int:
    """Threads that share a frame: neighbors read neighboring words; a core of a CPU reads on by itself."""
    return min(LANES, frames.shape[1]) if plan.device.type == "cuda" else 1


def _unit(frames: wp.array) -> int:
    """Threads that a core of a CPU gets at least, one per frame."""
    return -(-PER_CORE // frames.shape[1])


@cache
def gather_kernel(word: Any) -> Any:
    """`add_gather` for words of one type."""

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
        place = (i // lanes) % stack
        sample = i // (lanes * stack)
        size = frames.shape[1]
        row = source[sample, place]
        for w in range(i % lanes, size, lanes):
            at = place * size + w
            if row >= 0:
                out[sample, at] = frames[row, w]
            else:
                out[sample, at] = finals[-1 - row, at]

    return wp.kernel(gather, module="unique", module_options={"enable_backward": False})


@cache
def keep_kernel(word: Any) -> Any:
    """`add_keep` for words of one type."""

    def keep(
        first: int,
        lanes: int,
        envs: int,
        agents: int,
        room: int,
        taken: wp.array(dtype=int),
        count: wp.array(dtype=int),
        fresh: wp.array2d(dtype=word),
        kept: wp.array2d(dtype=word),
    ):
        i = first + wp.tid()
        row = i // lanes
        agent = row % agents
        env = (row // agents) % envs
        slot = row // (agents * envs)
        if slot < taken[env]:
            place = (count[env] - taken[env] + slot) % room
            for w in range(i % lanes, fresh.shape[1], lanes):
                kept[(place * envs + env) * agents + agent, w] = fresh[row, w]

    return wp.kernel(keep, module="unique", module_options={"enable_backward": False})
