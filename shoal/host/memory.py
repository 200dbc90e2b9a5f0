"""Arrays that processes share: one unnamed file in memory, so nothing is left behind however a process ends."""

import math
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np

ALIGNMENT = 64
"""Arrays begin at cache lines."""

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> element type and shape of an array; plain enough to be sent to a worker as JSON."""

STEP, HOLD, RESTART, RESET = range(4)
"""What an env is to do next: step, stay as it is, begin a new episode, or begin anew from its seed."""


class SharedArrays:
    """The arrays of a layout in memory that worker processes map too. Reading `arrays[name]` gives a NumPy array."""

    def __init__(self, layout: Layout, descriptor: int | None = None):
        self.layout = layout
        places, size = {}, 0
        for name, (dtype, shape) in layout.items():
            places[name] = size
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            size += -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self.descriptor = _unnamed_file(size) if descriptor is None else descriptor
        self.map = mmap.mmap(self.descriptor, size)
        self.whole = np.frombuffer(self.map, dtype=np.uint8)
        self._arrays = {}
        for name, (dtype, shape) in layout.items():
            count = math.prod(shape)
            self._arrays[name] = np.frombuffer(self.map, dtype, count, places[name]).reshape(shape)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def close(self) -> None:
        """Let go of the file; the memory goes when the last array is forgotten."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _unnamed_file(size: int) -> int:
    """A file without a name, in memory where the system has a place for that."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor = os.dup(file.fileno())
    os.truncate(descriptor, size)
    return descriptor
