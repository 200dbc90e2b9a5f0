"""Scene memory: packed scenes side by side in one block on a device, with a table of where each lies.

The block is allocated once, so a limit on device memory holds by construction, a CUDA graph keeps valid addresses when
scenes come and go, and neither loading nor unloading waits for the device.
"""

from dataclasses import dataclass

import torch

from shoal.core.errors import ShoalError
from shoal.core.store import full_device
from shoal.scene.pack import SECTIONS, Packed

RADIUS = len(SECTIONS)
"""Column of the table, after the first words of the sections: the radius of the scene around its origin (bits)."""

MIDDLE = RADIUS + 1
"""The first of three columns: the middle of the scene, which its places are relative to (bits)."""

EMPTY = -1
"""What the table holds for a row without a scene."""

WORD = 16
"""Bytes."""


@dataclass(frozen=True)
class _Lot:
    """A stretch of the block that a scene holds."""

    first: int
    words: int
    scene: Packed


class SceneMemory:
    """Room for `rows` scenes in `limit` bytes of `device`."""

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
                "give a smaller limit or fewer resident scenes."
            ) from error
        self.table = torch.full((rows, MIDDLE + 3), EMPTY, dtype=torch.int32, device=self.device)
        self._lots: list[_Lot | None] = [None] * rows

    @classmethod
    def holding(cls, scenes: list[Packed], device: str | torch.device) -> "SceneMemory":
        """Memory just large enough for these scenes, in rows 0, 1, ..."""
        memory = cls(sum(scene.nbytes for scene in scenes), len(scenes), device)
        for row, scene in enumerate(scenes):
            memory.put(row, scene)
        return memory

    @property
    def rows(self) -> int:
        return len(self._lots)

    @property
    def used(self) -> int:
        """Bytes that resident scenes hold."""
        return sum(lot.words for lot in self._lots if lot) * WORD

    def scene(self, row: int) -> Packed | None:
        """What lies in a row, or None."""
        lot = self._lots[row]
        return lot.scene if lot else None

    def find_room(self, scene: Packed) -> int | None:
        """The first word of the lowest gap that holds the scene, or None if every gap is too small."""
        need, start = len(scene.words), 0
        for lot in sorted((lot for lot in self._lots if lot), key=lambda lot: lot.first):
            if lot.first - start >= need:
                return start
            start = lot.first + lot.words
        return start if len(self.words) - start >= need else None

    def reserve(self, row: int, scene: Packed) -> None:
        """Set room aside for a scene in an empty row; it can be seen there once it was filled and published."""
        held = self._lots[row]
        if held:
            raise ShoalError(f"Row {row} of the scene memory holds {held.scene.name}; remove it first.")
        first = self.find_room(scene)
        if first is None:
            raise ShoalError(
                f"{scene.name} needs {scene.nbytes / 1e6:.1f} MB, but of {self.limit / 1e6:.1f} MB of scene memory "
                f"{(self.limit - self.used) / 1e6:.1f} MB are free; give a larger limit or fewer resident scenes."
            )
        self._lots[row] = _Lot(first, len(scene.words), scene)

    def _lot(self, row: int) -> _Lot:
        lot = self._lots[row]
        if lot is None:
            raise ShoalError(f"Row {row} of the scene memory is empty; reserve it first.")
        return lot

    def room(self, row: int) -> torch.Tensor:
        """The words that a row has been given, to be filled."""
        lot = self._lot(row)
        return self.words[lot.first : lot.first + lot.words]

    def publish(self, row: int) -> None:
        """Enter a filled row in the table, on torch's current stream."""
        lot = self._lot(row)
        radius = torch.from_numpy(abs(lot.scene.bounds).max(0)).norm().reshape(1).view(torch.int32)
        places = torch.tensor([lot.first + place for place in lot.scene.places], dtype=torch.int32)
        entry = torch.cat([places, radius, torch.from_numpy(lot.scene.middle).view(torch.int32)])
        if self.device.type == "cuda":
            entry = entry.pin_memory()  # so that the copy waits for nothing
        self.table[row].copy_(entry, non_blocking=True)

    def put(self, row: int, scene: Packed) -> None:
        """Copy a scene into an empty row, on torch's current stream."""
        self.reserve(row, scene)
        self.room(row).copy_(scene.words)
        self.publish(row)

    def close_gaps(self) -> None:
        """Move all scenes together, on torch's current stream, so that what is free is one piece."""
        start = 0
        for row in sorted((r for r, lot in enumerate(self._lots) if lot), key=lambda r: self._lot(r).first):
            lot = self._lot(row)
            if lot.first > start:
                self.words[start : start + lot.words] = self.room(row).clone()
                self._lots[row] = _Lot(start, lot.words, lot.scene)
                self.publish(row)
            start += lot.words

    def remove(self, row: int) -> None:
        """Give a row's memory back; from now on there is nothing to see in it."""
        self._lots[row] = None
        self.table[row] = EMPTY
