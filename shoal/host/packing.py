"""Conversion of Gymnasium observations and actions to rows of arrays and back. Workers import this: no torch."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal.core.errors import ShoalError, excerpt

Write = Callable[[Any, np.ndarray], None]
"""Writes an observation to a row."""
Read = Callable[[np.ndarray], Any]
"""Makes an action from a row."""


@dataclass(frozen=True)
class PackedObservation:
    """Array form of an observation: images and vectors unchanged, all other spaces as one flat vector."""

    shape: tuple[int, ...]
    dtype: str
    """uint8 or float32."""
    low: float
    high: float
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes of the parts of a Dict or Tuple."""
    write: Write
    """Writes an observation to a row [*shape]."""


@dataclass(frozen=True)
class DiscretePart:
    """Part of an action: one integer per entry of `nvec`, from 0 to that entry - 1."""

    nvec: tuple[int, ...]

    @property
    def width(self) -> int:
        return len(self.nvec)


@dataclass(frozen=True)
class ContinuousPart:
    """Part of an action: real numbers between `low` and `high`."""

    shape: tuple[int, ...]
    low: float
    high: float

    @property
    def width(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class PackedAction:
    """Array form of an action, and how to convert rows to actions."""

    parts: tuple[DiscretePart | ContinuousPart, ...]
    flat: bool
    """A single Discrete space: rows are scalars."""
    read: Read
    """Makes an action from a row [*shape]."""
    read_all: Callable[[np.ndarray], Iterable[Any]]
    """Makes actions from rows [count, *shape]."""

    @property
    def dtype(self) -> str:
        return "int32" if all(isinstance(part, DiscretePart) for part in self.parts) else "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        if self.flat:
            return ()
        if len(self.parts) == 1 and isinstance(self.parts[0], ContinuousPart):
            return self.parts[0].shape
        return (sum(part.width for part in self.parts),)

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Random actions [count, *shape]; uniform from -1 to 1 where bounds are infinite."""
        columns = []
        for part in self.parts:
            if isinstance(part, DiscretePart):
                columns.append(random.integers(0, part.nvec, (count, part.width)))
            else:
                low, high = (part.low, part.high) if math.isfinite(part.low + part.high) else (-1.0, 1.0)
                columns.append(random.uniform(low, high, (count, part.width)))
        return np.concatenate(columns, axis=1).astype(self.dtype).reshape(count, *self.shape)


def pack_observation(space: spaces.Space) -> PackedObservation:
    """Array form of the observations of a Gymnasium space."""
    leaves = _leaves(space, "")
    _refuse_empty("observation", space, sum(math.prod(shape) for _, shape, _ in leaves))
    if isinstance(space, spaces.Box):
        return _pack_box(space)
    sizes = [math.prod(shape) for _, shape, _ in leaves]
    ends = np.cumsum(sizes).tolist()
    writes = [(write, end - size, end) for (_, _, write), size, end in zip(leaves, sizes, ends, strict=True)]

    def write(observation: Any, row: np.ndarray) -> None:
        for put, start, end in writes:
            put(observation, row[start:end])

    several = isinstance(space, (spaces.Dict, spaces.Tuple))
    parts = tuple((name, shape) for name, shape, _ in leaves) if several else ()
    return PackedObservation((ends[-1],), "float32", -math.inf, math.inf, parts, write)


def _refuse_empty(what: str, space: spaces.Space, size: int) -> None:
    if not size:
        raise ShoalError(f"An {what} must hold at least one number, but {excerpt(space)} holds none.")


def _pack_box(space: spaces.Box) -> PackedObservation:
    shape = space.shape or (1,)
    dtype = "uint8" if space.dtype == np.uint8 else "float32"

    def write(observation: Any, row: np.ndarray) -> None:
        row[...] = observation

    return PackedObservation(shape, dtype, float(np.min(space.low)), float(np.max(space.high)), (), write)


def _leaves(space: spaces.Space, name: str) -> list[tuple[str, tuple[int, ...], Write]]:
    """The parts of a space: a name, a shape, and what writes its values into a flat row."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        items = list(space.spaces.items()) if isinstance(space, spaces.Dict) else list(enumerate(space.spaces))
        return [
            (leaf, shape, _at_key(key, write))
            for key, part in items
            for leaf, shape, write in _leaves(part, f"{name}.{key}" if name else str(key))
        ]
    if isinstance(space, spaces.Box):
        # Only uint8 images keep their shape; float images have no known scale and are vectors.
        pixels = space.dtype == np.uint8 and len(space.shape) == 3
        return [(name, space.shape if pixels else (math.prod(space.shape),), _flat)]
    if isinstance(space, spaces.MultiBinary):
        return [(name, (math.prod(space.shape),), _flat)]
    if isinstance(space, spaces.Discrete):
        return [(name, (int(space.n),), _one_hot((int(space.n),), int(space.start)))]
    if isinstance(space, spaces.MultiDiscrete):
        nvec = tuple(int(n) for n in space.nvec.flatten())
        return [(name, (sum(nvec),), _one_hot(nvec, 0))]
    raise ShoalError(
        f"An observation of type {type(space).__name__} ({name or space}) cannot be stored; wrap the environment so "
        "that it gives Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them."
    )


def _flat(value: Any, row: np.ndarray) -> None:
    row[...] = np.asarray(value).reshape(-1)


def _at_key(key: Any, write: Write) -> Write:
    return lambda value, row: write(value[key], row)


def _one_hot(nvec: tuple[int, ...], start: int) -> Write:
    offsets = np.concatenate([[0], np.cumsum(nvec)[:-1]]) - start

    def write(value: Any, row: np.ndarray) -> None:
        row[...] = 0.0
        row[offsets + np.asarray(value).reshape(-1)] = 1.0

    return write


def pack_action(space: spaces.Space) -> PackedAction:
    """Array form of the actions of a Gymnasium space."""
    if isinstance(space, spaces.Discrete):
        # int64 is the dtype that the space samples; envs check it fastest.
        start = np.int64(space.start)
        read = lambda rows: rows.astype(np.int64) + start  # noqa: E731
        return PackedAction((DiscretePart((int(space.n),)),), True, read, read)
    parts, reads = _action_parts(space, "")
    _refuse_empty("action", space, len(parts))
    if len(parts) == 1 and isinstance(parts[0], ContinuousPart):
        read_flat = reads[0]
        return _row_by_row(parts, lambda row: read_flat(row.reshape(-1)))
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return _row_by_row(parts, reads[0])
    build = _builder(space)
    ends = np.cumsum([part.width for part in parts]).tolist()
    spans = [(read, end - part.width, end) for read, part, end in zip(reads, parts, ends, strict=True)]
    return _row_by_row(parts, lambda row: build(iter([f(row[a:b]) for f, a, b in spans])))


def _row_by_row(parts: list[DiscretePart | ContinuousPart], read: Read) -> PackedAction:
    return PackedAction(tuple(parts), False, read, lambda rows: map(read, rows))


def _builder(space: spaces.Space) -> Callable[[Any], Any]:
    """A function that builds a Dict or Tuple action from an iterator of the values of its parts."""
    if isinstance(space, spaces.Dict):
        by_key = {key: _builder(part) for key, part in space.spaces.items()}
        return lambda values: {key: build(values) for key, build in by_key.items()}
    if isinstance(space, spaces.Tuple):
        builders = [_builder(part) for part in space.spaces]
        return lambda values: tuple(build(values) for build in builders)
    return next


def _action_parts(space: spaces.Space, name: str) -> tuple[list[DiscretePart | ContinuousPart], list[Read]]:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        items = list(space.spaces.items()) if isinstance(space, spaces.Dict) else list(enumerate(space.spaces))
        parts: list[DiscretePart | ContinuousPart] = []
        reads: list[Read] = []
        for key, part in items:
            more = _action_parts(part, f"{name}.{key}" if name else str(key))
            parts += more[0]
            reads += more[1]
        return parts, reads
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return [DiscretePart((int(space.n),))], [lambda row: int(row[0]) + start]
    if isinstance(space, spaces.MultiDiscrete):
        dtype, shape = space.dtype, space.shape
        return [DiscretePart(tuple(int(n) for n in space.nvec.flatten()))], [
            lambda row: row.astype(dtype).reshape(shape)
        ]
    if isinstance(space, spaces.MultiBinary):
        shape = space.shape
        return [DiscretePart((2,) * math.prod(shape))], [lambda row: row.astype(np.int8).reshape(shape)]
    if isinstance(space, spaces.Box):
        return _action_box(space)
    raise ShoalError(
        f"An action of type {type(space).__name__} ({name or space}) is not supported; wrap the environment so that "
        "it takes Discrete, MultiDiscrete, MultiBinary, Box, or a Dict or Tuple of them."
    )


def _action_box(space: spaces.Box) -> tuple[list[DiscretePart | ContinuousPart], list[Read]]:
    """Bounds that differ between elements are scaled to -1 to 1; if one is infinite, actions are clipped instead."""
    low, high, dtype, shape = space.low.reshape(-1), space.high.reshape(-1), space.dtype, space.shape
    outer = space.shape or (1,)
    _refuse_empty("action", space, low.size)
    same = bool((low == low[0]).all() and (high == high[0]).all())
    if same:
        part = ContinuousPart(outer, float(low[0]), float(high[0]))
        return [part], [lambda row: row.astype(dtype).reshape(shape)]
    if np.isfinite(low).all() and np.isfinite(high).all():
        middle, half = (high + low) / 2.0, (high - low) / 2.0
        read = lambda row: (middle + half * np.clip(row, -1.0, 1.0)).astype(dtype).reshape(shape)  # noqa: E731
        return [ContinuousPart(outer, -1.0, 1.0)], [read]
    return [ContinuousPart(outer, -math.inf, math.inf)], [
        lambda row: np.clip(row, low, high).astype(dtype).reshape(shape)
    ]
