"""Prepared scenes on disk, so that the second load is fast: arrays in safetensors, checksummed, replaced atomically."""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from shoal.core.environment import cache_root

LARGEST_CACHE = 20 * 10**9
"""Bytes. Beyond it the entries that were not used for longest go."""
_ENDING = ".safetensors"
_WRITING = ".writing-"

Made = TypeVar("Made")


class DamagedError(Exception):
    """A file of the cache that is not what was written."""


def cache_folder() -> Path:
    """`$SHOAL_CACHE`, or shoal/scenes in the folder where this platform keeps what can be made again."""
    if os.environ.get("SHOAL_CACHE"):
        return Path(os.environ["SHOAL_CACHE"]).expanduser()
    return cache_root() / "scenes"


def cached(
    key: str,
    make: Callable[[], Made],
    pack: Callable[[Made], tuple[dict[str, np.ndarray], dict]],
    unpack: Callable[[dict[str, np.ndarray], dict], Made],
) -> Made:
    """What was stored under this key, or else what `make` makes, stored.

    The key must change whenever the outcome would: a hash of all that goes into it, and a version. Nothing about the
    cache stops the work: a damaged entry is made anew, and a folder that cannot be written only warns.
    """
    path = cache_folder() / f"{key}{_ENDING}"
    try:
        made = unpack(*read_arrays(path))
        _touch(path)
        return made
    except FileNotFoundError:
        pass
    except (DamagedError, KeyError, TypeError, ValueError) as error:
        warnings.warn(f"{path} is damaged ({error}); it is made anew.", stacklevel=2)
    except OSError as error:
        warnings.warn(f"{path} cannot be read: {error.strerror or error}.", stacklevel=2)
    made = make()
    try:
        save_arrays(path, *pack(made))
        trim(path.parent, spare=path)
    except OSError as error:
        warnings.warn(f"{path.parent} cannot be written: {error.strerror or error}; nothing is cached.", stacklevel=2)
    return made


def save_arrays(path: Path, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    """Write arrays and what JSON can hold to one file: under another name first, so that no half of it is ever seen."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    text = json.dumps(meta)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Every writer has its own temporary file; of two that write the same entry, the later one wins.
    handle, temporary = tempfile.mkstemp(prefix=_WRITING, suffix=_ENDING, dir=path.parent)
    os.close(handle)
    try:
        try:
            save_file(arrays, temporary, {"meta": text, "check": _checksum(arrays, text)})
        except SafetensorError as error:  # how it reports a full disk
            raise OSError(str(error)) from None
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What `save_arrays` wrote. FileNotFoundError where there is nothing, DamagedError where it is something else."""
    if not os.path.lexists(path):
        raise FileNotFoundError(path)
    if not path.is_file():  # a pipe or a device would never end
        raise DamagedError("it is not a file")
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = json.loads(header["meta"])
        intact = header["check"] == _checksum(arrays, header["meta"])
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DamagedError(str(error)) from None
    if not intact:
        raise DamagedError("its checksum differs")
    return arrays, meta


def trim(folder: Path, spare: Path | None = None, limit: int | None = None) -> None:
    """Remove the entries that were not used for longest until the folder is within its limit, and old leftovers."""
    entries = []
    for path in folder.glob(f"*{_ENDING}"):
        try:
            status = path.lstat()
        except OSError:  # another process was faster
            continue
        if not stat.S_ISREG(status.st_mode):
            continue
        if path.name.startswith(_WRITING):
            if time.time() - status.st_mtime > 24 * 3600:
                path.unlink(missing_ok=True)
        else:
            entries.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= (LARGEST_CACHE if limit is None else limit):
            return
        if path != spare:
            path.unlink(missing_ok=True)
            total -= size


def _touch(path: Path) -> None:
    """Note that an entry was used: many disks do not keep the time of reading."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _checksum(arrays: dict[str, np.ndarray], text: str) -> str:
    """Over names, types, shapes and contents; CRC-32 of the contents, which is there against accidents, not attacks."""
    parts = [text]
    for name in sorted(arrays):
        array = arrays[name]
        parts.append(f"{name} {array.dtype} {array.shape} {zlib.crc32(array.reshape(-1).view(np.uint8)):08x}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
