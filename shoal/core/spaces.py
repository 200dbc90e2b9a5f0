"""Spaces of observations and actions: Discrete, MultiDiscrete, Box and Mixed; checks of tensors against them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Union

import torch

from shoal.core.errors import ShoalError, unknown

KINDS = ("plain", "depth", "color", "choice")
"""Kinds of the parts of an observation."""

MAX_CHOICES = 2**20
"""Maximum number of choices of an action: a policy has a logit for each."""


@dataclass(frozen=True)
class Discrete:
    """One choice out of `n`, stored as int32."""

    n: int
    odds: tuple[float, ...] = ()
    """Relative probabilities of the choices under a new policy and in random exploration (empty: equal). Use low odds
    for a choice that ends the episode: with few choices, chance would end it before anything is learned."""

    def __post_init__(self):
        object.__setattr__(self, "odds", tuple(float(x) for x in self.odds))
        if self.n < 1:
            raise ShoalError(f"Discrete needs at least one choice, got n={self.n}.")
        if self.n > MAX_CHOICES:
            raise ShoalError(f"Discrete can have up to {MAX_CHOICES:,} choices, got n={self.n}.")
        if self.odds and (len(self.odds) != self.n or min(self.odds) <= 0):
            raise ShoalError(f"Discrete needs odds above 0 for each of its {self.n} choices, got {self.odds}.")

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def dtype(self) -> torch.dtype:
        return torch.int32


@dataclass(frozen=True)
class MultiDiscrete:
    """Several independent choices; part i is one out of `nvec[i]`. Stored as int32."""

    nvec: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "nvec", tuple(int(n) for n in self.nvec))
        if not self.nvec or min(self.nvec) < 1:
            raise ShoalError(f"MultiDiscrete needs at least one choice in each part, got nvec={self.nvec}.")
        if sum(self.nvec) > MAX_CHOICES:
            raise ShoalError(f"MultiDiscrete can have up to {MAX_CHOICES:,} choices in all, got nvec={self.nvec}.")

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)

    @property
    def dtype(self) -> torch.dtype:
        return torch.int32


@dataclass(frozen=True, init=False)
class Box:
    """Real numbers of a given shape, each between `low` and `high` (the same bounds for all)."""

    shape: tuple[int, ...]
    low: float = -math.inf
    high: float = math.inf
    dtype: torch.dtype = torch.float32
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Names and shapes of the parts of a flat vector, in order (empty: one part).

    Images among them hold values from 0 to 255, unless `kinds` says otherwise. Parts with the same name and shape are
    frames of one image, the newest last.
    """
    kinds: tuple[tuple[str, str], ...] = ()
    """Kinds of parts, by name, where a network needs more than the shape.

    `depth` is an image of one channel with distances [m], `color` an image with values from 0 to 1, `choice` a one-hot
    vector.
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        low: float = -math.inf,
        high: float = math.inf,
        dtype: torch.dtype = torch.float32,
        parts: Iterable[tuple[str, Sequence[int]]] = (),
        kinds: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    ):
        """An int `shape` is a vector."""
        pairs = kinds.items() if isinstance(kinds, Mapping) else kinds
        values = dict(
            shape=(shape,) if isinstance(shape, int) else tuple(shape),
            low=low,
            high=high,
            dtype=dtype,
            parts=tuple((str(name), tuple(sizes)) for name, sizes in parts),
            kinds=tuple((str(name), str(kind)) for name, kind in pairs),
        )
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        shape = self.shape
        if not shape or min(shape) < 1:
            raise ShoalError(f"Box needs a shape of positive sizes, got {shape}.")
        if not self.low < self.high:
            raise ShoalError(f"Box needs low < high, got low={self.low}, high={self.high}.")
        total = sum(math.prod(sizes) for _, sizes in self.parts)
        if self.parts and shape != (total,):
            raise ShoalError(f"Box with parts needs the shape of a vector of all of them, ({total},), got {shape}.")
        shapes = dict(self.parts)
        for name, kind in self.kinds:
            if name not in shapes:
                raise unknown("part of a Box with a kind:", name, shapes)
            if kind not in KINDS:
                raise unknown(f"kind of part {name!r} of a Box:", kind, KINDS)
            if kind == "depth" and (len(shapes[name]) != 3 or 1 not in shapes[name][::2]):
                raise ShoalError(
                    f"Part {name!r} of a Box has distances in one channel, so its shape cannot be {shapes[name]}; use "
                    "(height, width, 1)."
                )

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def kind(self, part: str) -> str:
        """The kind of a part; `plain` if none is declared."""
        return dict(self.kinds).get(part, "plain")

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


@dataclass(frozen=True)
class Mixed:
    """Choices and real numbers in one float32 vector, part after part; choices are whole numbers in it."""

    parts: tuple[Union[Discrete, MultiDiscrete, Box], ...]

    def __post_init__(self):
        object.__setattr__(self, "parts", tuple(self.parts))
        for part in self.parts:
            if not isinstance(part, (Discrete, MultiDiscrete, Box)):
                raise ShoalError(f"Mixed consists of Discrete, MultiDiscrete and Box, got {part!r} among its parts.")
        if not self.parts:
            raise ShoalError("Mixed needs at least one part, got none.")

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of vector elements of each part."""
        return tuple(math.prod(part.shape) for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.widths),)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a tensor [..., width], each [..., width of the part]."""
        return list(tensor.split(self.widths, dim=-1))


Space = Union[Discrete, MultiDiscrete, Box, Mixed]


def check_tensor(label: str, tensor: torch.Tensor, space: Space, batch: tuple[int, ...], device: torch.device) -> None:
    """Refuse a tensor whose type, shape or device does not fit `space`. `label` starts the message."""
    if not isinstance(tensor, torch.Tensor):
        raise ShoalError(f"{label} must be a torch tensor, got {type(tensor).__name__}.")
    shape = (*batch, *space.shape)
    if tuple(tensor.shape) != shape:
        raise ShoalError(f"{label} must have shape {shape} for {space}, got {tuple(tensor.shape)}.")
    if tensor.dtype != space.dtype:
        raise ShoalError(f"{label} must be {space.dtype} for {space}, got {tensor.dtype}.")
    if tensor.device != device:
        raise ShoalError(f"{label} must be on {device}, got {tensor.device}.")


def check_range(label: str, tensor: torch.Tensor, space: Space) -> None:
    """Refuse values outside `space`. This waits for the GPU: do not call it during a rollout."""
    if isinstance(space, Mixed):
        for i, (part, values) in enumerate(zip(space.parts, space.split(tensor), strict=True)):
            check_range(f"{label}, part {i},", values, part)
        return
    if isinstance(space, Box):
        ok = torch.isfinite(tensor)
        limit = "finite"
    else:
        top = space.n if isinstance(space, Discrete) else torch.tensor(space.nvec, device=tensor.device)
        ok = (tensor >= 0) & (tensor < top) & (tensor % 1 == 0)
        limit = f"within {space}"
    if not bool(ok.all()):  # sync: a deliberate check, outside rollouts
        where = tuple(int(i) for i in (~ok).nonzero()[0])
        raise ShoalError(f"{label} must be {limit}, got {tensor[where].item()} at index {where}.")
