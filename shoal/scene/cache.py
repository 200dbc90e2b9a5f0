"""Disk cache of prepared scenes: arrays in safetensors files, checksummed and replaced atomically."""

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

MAX_CACHE_BYTES = 20 * 10**9
"""Bytes. Beyond this size the least recently used entries are removed."""
_SUFFIX = ".safetensors"
_TEMPORARY = ".writing-"

Value = TypeVar("Value")


class DamagedError(Exception):
    """A cache file whose content differs from what was written."""


def cache_folder() -> Path:
    """`$SHOAL_CACHE`, or shoal/scenes in the platform's cache folder."""
    if os.environ.get("SHOAL_CACHE"):
        return Path(os.environ["SHOAL_CACHE"]).expanduser()
    return cache_root() / "scenes"


def cached(
    key: str,
    compute: Callable[[], Value],
    pack: Callable[[Value], tuple[dict[str, np.ndarray], dict]],
    unpack: Callable[[dict[str, np.ndarray], dict], Value],
) -> Value:
    """The value stored under this key, or else the result of `compute`, which is then stored.

    The cache never raises: a damaged entry is computed again and a folder that cannot be written only warns.

    Args:
        key: Must change whenever the value does: a hash of all inputs and a version.
        compute: Returns the value.
        pack: Turns a value into arrays and JSON metadata.
        unpack: The inverse of `pack`.
    """
    path = cache_folder() / f"{key}{_SUFFIX}"
    try:
        value = unpack(*read_arrays(path))
        _touch(path)
        return value
    except FileNotFoundError:
        pass
    except (DamagedError, KeyError, TypeError, ValueError) as error:
        warnings.warn(f"{path} is damaged ({error}); it is computed again.", stacklevel=2)
    except OSError as error:
        warnings.warn(f"{path} cannot be read: {error.strerror or error}.", stacklevel=2)
    value = compute()
    try:
        save_arrays(path, *pack(value))
        trim(path.parent, spare=path)
    except OSError as error:
        warnings.warn(f"{path.parent} cannot be written: {error.strerror or error}; nothing is cached.", stacklevel=2)
    return value


def save_arrays(path: Path, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    """Write arrays and JSON metadata to one file, atomically: to a temporary file that then replaces `path`."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    text = json.dumps(meta)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each writer has a temporary file; of two writers of one entry, the later one wins.
    handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, suffix=_SUFFIX, dir=path.parent)
    os.close(handle)
    try:
        try:
            save_file(arrays, temporary, {"meta": text, "check": _checksum(arrays, text)})
        except SafetensorError as error:  # safetensors reports a full disk like this
            raise OSError(str(error)) from None
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and metadata written by `save_arrays`.

    Raises:
        FileNotFoundError: If there is no such file.
        DamagedError: If the content differs from what was written.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(path)
    if not path.is_file():  # reading a pipe or a device would never return
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
    """Remove the least recently used entries until the folder is within its limit, and stale temporary files."""
    entries = []
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            status = path.lstat()
        except OSError:  # removed by another process
            continue
        if not stat.S_ISREG(status.st_mode):
            continue
        if path.name.startswith(_TEMPORARY):
            if time.time() - status.st_mtime > 24 * 3600:
                path.unlink(missing_ok=True)
        else:
            entries.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= (MAX_CACHE_BYTES if limit is None else limit):
            return
        if path != spare:
            path.unlink(missing_ok=True)
            total -= size


def _touch(path: Path) -> None:
    """Set an entry's modification time to its last use: many file systems do not store access times."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _checksum(arrays: dict[str, np.ndarray], text: str) -> str:
    """SHA-256 over names, dtypes, shapes and CRC-32 of the contents; detects accidents, not attacks."""
    parts = [text]
    for name in sorted(arrays):
        array = arrays[name]
        parts.append(f"{name} {array.dtype} {array.shape} {zlib.crc32(array.reshape(-1).view(np.uint8).data):08x}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
