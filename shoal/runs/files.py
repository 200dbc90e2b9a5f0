"""Read and write files of a run folder: regular files only, links not followed, replacement atomic.

A run folder may come from a stranger: any entry may be a link, a pipe, a device or a file of any size. Every function
raises FileError with the path.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from shoal.core.errors import FileError, excerpt, reading, writing

TEXT_LIMIT = 2**26
"""Maximum bytes of a text file."""

KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe"}


def _require(kind: int, mode: int) -> None:
    """Raise OSError unless `mode` is of a kind: stat.S_IFREG, stat.S_IFDIR."""
    if stat.S_IFMT(mode) != kind:
        raise OSError(errno.EINVAL, f"it is {KINDS.get(stat.S_IFMT(mode), 'a device')}, not {KINDS[kind]}")


def _open(path: Path, flags: int) -> int:
    """Descriptor of a regular file; raises OSError for other kinds, without blocking on a pipe."""
    with contextlib.suppress(FileNotFoundError):
        _require(stat.S_IFREG, os.lstat(path).st_mode)
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        _require(stat.S_IFREG, os.fstat(handle).st_mode)  # it may have been replaced since
    except OSError:
        os.close(handle)
        raise
    return handle


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    with reading(path), os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
        yield file


def read_bytes(path: Path, limit: int = TEXT_LIMIT) -> bytes:
    """The content of a file; raises FileError above `limit` bytes."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than {limit}")
        return file.read(limit)


def read_json(path: Path) -> Any:
    """The parsed value of a JSON file."""
    data = read_bytes(path)
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not valid JSON: {excerpt(error)}.") from None


def sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size(path: Path) -> int:
    """Bytes of a file."""
    with _opened(path) as file:
        return os.fstat(file.fileno()).st_size


def append(path: Path, data: bytes) -> None:
    """Append to a file; on failure the file keeps its old content."""
    with writing(path):
        handle = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            before = os.fstat(handle).st_size
            try:
                while data:
                    data = data[os.write(handle, data) :]
            except OSError:
                os.ftruncate(handle, before)
                raise
        finally:
            os.close(handle)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields an empty file beside `path`, with the same suffix, that replaces `path` after the block.

    A link at `path` is replaced; its target stays.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    with writing(path):
        remove(temporary)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            remove(temporary)
            raise


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a killed process leaves the old one."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode(errors="backslashreplace"))


def open_lock(path: Path) -> int:
    """Descriptor of a file to lock, created if absent; its content stays."""
    with writing(path):
        return _open(path, os.O_RDWR | os.O_CREAT)


def sync(path: Path) -> None:
    """Wait until a file or folder has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content; errors are ignored."""
    if is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def make_folder(path: Path) -> Path:
    """Create a folder of the run unless it exists; refuses a link."""
    with writing(path):
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        _require(stat.S_IFDIR, os.lstat(path).st_mode)
    return path


def is_folder(path: Path) -> bool:
    """Whether a path is a folder and not a link."""
    return os.path.isdir(path) and not os.path.islink(path)


def list_folder(path: Path) -> list[str]:
    """Sorted names in a folder of the run; [] if it is absent."""
    with reading(path):
        try:
            _require(stat.S_IFDIR, os.lstat(path).st_mode)
        except FileNotFoundError:
            return []
        return sorted(os.listdir(path))
