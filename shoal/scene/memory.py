"""Scene memory: packed scenes in one preallocated block on a device, with a table of their offsets.

The block is allocated once, so the limit on device memory holds by construction, addresses in CUDA graphs stay valid
when scenes are swapped, and neither loading nor unloading synchronizes with the device.
"""

from dataclasses import dataclass

import torch

from shoal.core.errors import ShoalError
from shoal.core.store import full_device
from shoal.scene.pack import SECTIONS, PackedScene

RADIUS = len(SECTIONS)
"""Column of the table after the section offsets: the radius of the scene around its origin in meters (float32 bits)."""

CENTER = RADIUS + 1
"""First of three columns: the center of the scene in meters, subtracted from its coordinates (float32 bits)."""

EMPTY = -1
"""Table entry of a row without a scene."""

WORD = 16
"""Bytes of a word."""


@dataclass(frozen=True)
class _Allocation:
    """Words [first, first + words) of the block, which hold `scene`."""

    first: int
    words: int
    scene: PackedScene


class SceneMemory:
    """A block of `limit` bytes on `device` for up to `rows` scenes."""

    def __init__(self, limit: int, rows: int, device: str | torch.device):
        self.device = full_device(device)
        limit = int(limit)
        self.limit = limit // WORD * WORD
        try:
            self.words = torch.empty(max(1, limit // WORD), 4, device=self.device)
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(self.device)[0]
            raise ShoalError(
                f"{limit / 1e9:.1f} GB of scene memory do not fit on {self.device} ({free / 1e9:.1f} GB are free); "
                "lower --memory-limit or --scenes-in-memory (of a ScenePool: `limit`, `resident`)."
            ) from error
        self.table = torch.full((rows, CENTER + 3), EMPTY, dtype=torch.int32, device=self.device)
        self._allocations: list[_Allocation | None] = [None] * rows

    @classmethod
    def holding(cls, scenes: list[PackedScene], device: str | torch.device) -> "SceneMemory":
        """Memory that holds exactly these scenes, in rows 0, 1, ..."""
        memory = cls(sum(scene.nbytes for scene in scenes), len(scenes), device)
        for row, scene in enumerate(scenes):
            memory.put(row, scene)
        return memory

    @property
    def rows(self) -> int:
        return len(self._allocations)

    @property
    def used(self) -> int:
        """Bytes occupied by scenes."""
        return sum(allocation.words for allocation in self._allocations if allocation) * WORD

    def scene(self, row: int) -> PackedScene | None:
        """The scene in a row, or None."""
        allocation = self._allocations[row]
        return allocation.scene if allocation else None

    def find_gap(self, scene: PackedScene) -> int | None:
        """The first word of the lowest gap that fits the scene, or None if every gap is too small."""
        need, start = len(scene.words), 0
        for allocation in sorted(
            (allocation for allocation in self._allocations if allocation), key=lambda allocation: allocation.first
        ):
            if allocation.first - start >= need:
                return start
            start = allocation.first + allocation.words
        return start if len(self.words) - start >= need else None

    def reserve(self, row: int, scene: PackedScene) -> None:
        """Allocate words for a scene in an empty row; kernels see it once its slot is filled and published."""
        held = self._allocations[row]
        if held:
            raise ShoalError(f"Slot {row} of the scene memory holds {held.scene.name}; remove that scene first.")
        first = self.find_gap(scene)
        if first is None:
            raise ShoalError(
                f"{scene.name} needs {scene.nbytes / 1e6:.1f} MB, but of {self.limit / 1e6:.1f} MB of scene memory "
                f"{(self.limit - self.used) / 1e6:.1f} MB are free; "
                "raise --memory-limit or lower --scenes-in-memory (of a ScenePool: `limit`, `resident`)."
            )
        self._allocations[row] = _Allocation(first, len(scene.words), scene)

    def _allocation(self, row: int) -> _Allocation:
        allocation = self._allocations[row]
        if allocation is None:
            raise ShoalError(f"Slot {row} of the scene memory is empty; reserve it for a scene first.")
        return allocation

    def slot(self, row: int) -> torch.Tensor:
        """float32 [words, 4]: the view of the block allocated to a row."""
        allocation = self._allocation(row)
        return self.words[allocation.first : allocation.first + allocation.words]

    def publish(self, row: int) -> None:
        """Write the offsets of a filled row to the table, on torch's current stream."""
        allocation = self._allocation(row)
        radius = torch.from_numpy(abs(allocation.scene.bounds).max(0)).norm().reshape(1).view(torch.int32)
        places = torch.tensor(
            [allocation.first + place for place in allocation.scene.section_starts], dtype=torch.int32
        )
        entry = torch.cat([places, radius, torch.from_numpy(allocation.scene.center).view(torch.int32)])
        if self.device.type == "cuda":
            entry = entry.pin_memory()  # makes the copy asynchronous
        self.table[row].copy_(entry, non_blocking=True)

    def put(self, row: int, scene: PackedScene) -> None:
        """Copy a scene into an empty row, on torch's current stream."""
        self.reserve(row, scene)
        self.slot(row).copy_(scene.words)
        self.publish(row)

    def compact(self) -> None:
        """Close the gaps between scenes, on torch's current stream, so that the free words are contiguous."""
        start = 0
        for row in sorted(
            (r for r, allocation in enumerate(self._allocations) if allocation), key=lambda r: self._allocation(r).first
        ):
            allocation = self._allocation(row)
            if allocation.first > start:
                self.words[start : start + allocation.words] = self.slot(row).clone()
                self._allocations[row] = _Allocation(start, allocation.words, allocation.scene)
                self.publish(row)
            start += allocation.words

    def remove(self, row: int) -> None:
        """Free a row's memory and mark the row empty in the table."""
        self._allocations[row] = None
        self.table[row] = EMPTY
