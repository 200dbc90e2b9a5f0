"""Temporary folders, removed when their process ends, or by the next start of Shoal after a kill."""

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.core.errors import ShoalError, temporary_folder

PREFIX = "shoal-"
OWNER = ".shoal-owner"
"""A file in each folder, locked while the folder's process is alive."""

MEMORY = Path("/dev/shm")
"""The file system in memory, on Linux."""

_open: "set[TemporaryFolder]" = set()
"""Open folders of this process."""


@atexit.register
def close_all() -> None:
    """Remove the open folders of this process."""
    for folder in list(_open):
        folder.close()


class TemporaryFolder:
    """A new private folder: `path` holds files until `close`, or until the end of this process."""

    def __init__(self, purpose: str, parents: Sequence[Path] = ()):
        """Create the folder in the first writable one of `parents`; `purpose` is part of its name.

        Default: the system's folder for temporary files.
        """
        remove_abandoned(parents)
        self._process = os.getpid()
        while not self._create(purpose, parents or [temporary_folder()]):
            pass
        _open.add(self)

    def _create(self, purpose: str, parents: Sequence[Path]) -> bool:
        """Create the folder and lock it; False if another process removed it in between as abandoned."""
        problems = []
        for parent in parents:
            try:
                self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=parent))
                self._lock = os.open(self.path / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                break
            except OSError as error:
                problems.append(f"{parent} ({error.strerror})")
        else:
            raise ShoalError(
                f"No temporary folder can be created in {' or '.join(problems)}; set TMPDIR to a writable folder."
            )
        with contextlib.suppress(OSError):  # a file system without locks: abandoned folders stay there
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        if os.fstat(self._lock).st_nlink:
            return True
        os.close(self._lock)
        return False

    def close(self) -> None:
        """Remove the folder, in the process that created it and not in its forks. Safe to call more than once."""
        if self._lock < 0 or os.getpid() != self._process:
            return
        _open.discard(self)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_abandoned(parents: Sequence[Path] = ()) -> None:
    """Remove this user's temporary folders whose process was killed, in the default folders and in `parents`."""
    for folder in _own_folders(parents):
        with contextlib.suppress(OSError):  # locked by its owner, or removed in the meantime
            lock = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _own_folders(parents: Sequence[Path]) -> Iterator[Path]:
    """Folders of this user that carry the prefix and an owner file."""
    for base in (tempfile.gettempdir, lambda: MEMORY, *(lambda parent=parent: parent for parent in parents)):
        with contextlib.suppress(OSError), os.scandir(base()) as entries:
            for entry in entries:
                if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        yield Path(entry.path)
