"""Shared arrays: their space is reserved, and an error names size and remedy if there is none."""

import errno
import gc
import os

import numpy as np
import pytest

from shoal.core.errors import ShoalError
from shoal.host import memory
from shoal.host.memory import SharedArrays
from shoal.scene import prefetch

LAYOUT = {"a": ("float32", (1000, 3)), "b": ("uint8", (7,)), "none": ("bool", (0,))}


def full_after(monkeypatch, places):
    """Make the first `places` reservations fail with ENOSPC."""
    asked = []
    reserve = os.posix_fallocate

    def fill(descriptor, offset, size):
        asked.append(size)
        if len(asked) <= places:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fill)
    return asked


@pytest.mark.parametrize("places", [0, 1, 2])
def test_arrays_use_the_first_place_with_space(places, monkeypatch, recwarn):
    asked = full_after(monkeypatch, places)
    before = set(os.listdir("/proc/self/fd"))
    arrays = SharedArrays(LAYOUT)
    assert len(asked) == places + 1
    assert asked[0] >= 12_007
    arrays["a"][...] = 1.5
    again = SharedArrays(LAYOUT, os.dup(arrays.descriptor))
    assert (again["a"] == 1.5).all()
    assert os.fstat(arrays.descriptor).st_blocks * 512 >= 12_007  # reserved, not promised
    messages = [str(w.message) for w in recwarn.list]
    assert len(messages) == (places == 2)
    if messages:
        assert f"{asked[0]:,} bytes" in messages[0]
        assert "--shm-size" in messages[0]
    for made in (again, arrays):
        made.close()
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 2  # of the mappings, until the arrays are deleted


def test_without_space_the_error_names_size_and_remedy(monkeypatch):
    asked = full_after(monkeypatch, 99)
    gc.collect()  # drops arrays of other tests
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ShoalError) as caught:
        SharedArrays(LAYOUT)
    assert len(asked) == 3
    assert len(os.listdir("/proc/self/fd")) == before
    said = str(caught.value)
    assert "\n" not in said
    for part in (f"{asked[0]:,} bytes", "No space left", "/dev/shm", "--shm-size", "TMPDIR", "--num-envs"):
        assert part in said


def test_a_missing_shared_memory_folder_is_skipped(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "SHARED_MEMORY", str(tmp_path / "missing"))
    monkeypatch.delattr(os, "memfd_create")
    with pytest.warns(UserWarning, match="missing has no room for the .* bytes"):
        arrays = SharedArrays(LAYOUT)
    assert not np.any(arrays["a"])
    arrays.close()


def test_scenes_are_passed_in_the_folder_with_more_free_space(monkeypatch, tmp_path):
    free = {prefetch.MEMORY: 64 * 2**20, tmp_path: 2**40}
    monkeypatch.setattr(prefetch, "temporary_folder", lambda: tmp_path)
    monkeypatch.setattr(prefetch, "_free", free.__getitem__)
    assert prefetch._folders_by_space() == [tmp_path, prefetch.MEMORY]
    free[prefetch.MEMORY] = 2 * prefetch.MIN_FREE_BYTES
    assert prefetch._folders_by_space() == [prefetch.MEMORY, tmp_path]
