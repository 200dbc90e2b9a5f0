"""Shared arrays: NumPy arrays over an unnamed file in memory, which is freed with the last process that maps it."""

import errno
import math
import mmap
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable

import numpy as np

from shoal.core.errors import ShoalError, temporary_folder

ALIGNMENT = 64
"""Bytes: each array begins at a cache line."""

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape of an array, sent to workers as JSON."""

STEP, HOLD, RESTART, RESET = range(4)
"""Commands to an env: take a step, do nothing, start a new episode, or start a new episode with a given seed."""


class SharedArrays:
    """The arrays of a layout in memory shared with the worker processes; `arrays[name]` is a NumPy array."""

    def __init__(self, layout: Layout, descriptor: int | None = None):
        self.layout = layout
        offsets, size = {}, 0
        for name, (dtype, shape) in layout.items():
            offsets[name] = size
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            size += -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self.descriptor = _unnamed_file(size) if descriptor is None else descriptor
        self.map = mmap.mmap(self.descriptor, size)
        self.buffer = np.frombuffer(self.map, dtype=np.uint8)
        """uint8 [size]: the bytes of all arrays."""
        self._arrays = {}
        for name, (dtype, shape) in layout.items():
            count = math.prod(shape)
            self._arrays[name] = np.frombuffer(self.map, dtype, count, offsets[name]).reshape(shape)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def close(self) -> None:
        """Close the file; the memory is freed with the last reference to an array."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


SHARED_MEMORY = "/dev/shm"


def _unnamed_file(size: int) -> int:
    """Descriptor of an unnamed file whose space is reserved; otherwise a write raises SIGBUS once memory runs out.

    An anonymous file in memory is tried first, since the size of /dev/shm (64 MB in many containers) does not limit it.
    """
    problems = []
    for make in (_in_memory, _in_shared_memory):
        try:
            return _reserved(make, size)
        except OSError as error:
            problems.append(error)
    disk = str(temporary_folder())
    try:
        descriptor = _reserved(lambda: _in_folder(disk), size)
    except OSError as error:
        raise ShoalError(
            f"Envs in processes need {size:,} bytes of shared memory, but memory and {SHARED_MEMORY} "
            f"({_free(SHARED_MEMORY)} bytes free) fail with {problems[-1].strerror!r}, and {disk} ({_free(disk)} bytes "
            f"free) with {error.strerror!r}; enlarge {SHARED_MEMORY} (docker run --shm-size), set TMPDIR to a folder "
            "with room, or lower --num-envs."
        ) from None
    warnings.warn(
        f"{SHARED_MEMORY} has no room for the {size:,} bytes that envs share ({_free(SHARED_MEMORY)} bytes free), so "
        f"a file in {disk} holds them, which may be slower; docker run --shm-size enlarges {SHARED_MEMORY}.",
        stacklevel=2,
    )
    return descriptor


def _reserved(make: Callable[[], int], size: int) -> int:
    descriptor = make()
    try:
        os.truncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _in_memory() -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return os.memfd_create("shoal-envs")


def _in_shared_memory() -> int:
    return _in_folder(SHARED_MEMORY)


def _in_folder(folder: str) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


def _free(folder: str) -> str:
    """Free bytes of a folder's file system, for a message."""
    try:
        return f"{shutil.disk_usage(folder).free:,}"
    except OSError:
        return "no"
