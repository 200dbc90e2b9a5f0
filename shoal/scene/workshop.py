"""The workshop: processes that prepare scenes ahead of their use, and hand them over as files."""

import itertools
import json
import os
import shutil
import subprocess
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.core.children import python_command
from shoal.core.errors import temporary_folder
from shoal.core.temporary import MEMORY, TemporaryFolder
from shoal.scene.cache import DamagedError, read_arrays
from shoal.scene.pack import Packed
from shoal.scene.sources import from_arrays

ATTEMPTS = 2
"""How often a scene is tried whose process dies."""

ROOM = 2**30
"""Bytes that scenes on their way may take: with less in memory, they go where more is free."""


class Workshop:
    """Worker processes that prepare scenes ahead of their use, delivered in order whichever is ready first."""

    def __init__(self, sources: Iterator[str], up: str, scale: float, workers: int):
        self._sources, self._settings = sources, dict(up=up, scale=scale)
        self._lock = threading.Lock()
        self._number = itertools.count()
        self._done: dict[int, Packed | str] = {}
        self._next = 0
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._folder = TemporaryFolder("scenes", _places())
        self._processes: list[subprocess.Popen] = []
        self._ahead = workers + 1
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def take(self, wait: bool = False) -> Packed | str | None:
        """The next scene, or the reason why it could not be prepared; None if it is not ready."""
        with self._changed:
            while wait and self._next not in self._done and not self._closed:
                self._changed.wait(0.1)
            outcome = self._done.pop(self._next, None)
            if outcome is not None:
                self._next += 1
                self._changed.notify_all()
            return outcome

    def close(self) -> None:
        """End the processes and remove their files."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            processes = list(self._processes)
        for process in processes:
            process.kill()
            process.wait()
        for thread in self._threads:
            thread.join()
        self._folder.close()

    def _start(self) -> subprocess.Popen:
        # A group of its own: Ctrl-C is for the program, which then ends its workers.
        process = subprocess.Popen(
            python_command("shoal.scene.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        with self._lock:
            self._processes.append(process)
            if self._closed:  # while it was being started
                process.kill()
        return process

    def _work(self) -> None:
        """One worker's life, in a thread that only waits for it."""
        process = None
        while True:
            with self._changed:
                number, source = next(self._number), next(self._sources, None)  # together: scenes keep their order
                while number >= self._next + self._ahead and not self._closed:
                    self._changed.wait(0.5)
                if self._closed:
                    return
            if source is None:
                return
            outcome: Packed | str = ""
            for _ in range(ATTEMPTS):
                try:
                    process = process or self._start()
                    outcome = self._ask(process, source, self._folder.path / f"{number}.safetensors")
                except Exception as error:  # no more processes or files to be had: whoever waits must hear of it
                    outcome = f"{source} could not be prepared: {type(error).__name__}: {error}."
                    break
                if process.poll() is None or self._closed:
                    break
                # The process died: of this scene, or of something else. A new one will tell.
                self._forget(process)
                process = None
            with self._changed:
                self._done[number] = outcome
                self._changed.notify_all()

    def _forget(self, process: subprocess.Popen) -> None:
        with self._lock:
            if process in self._processes:
                self._processes.remove(process)

    def _ask(self, process: subprocess.Popen, source: str, path: Path) -> Packed | str:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"source": source, "path": str(path), **self._settings}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            answer = json.loads(line) if line else {}
            if not line:
                code = process.wait()
                return f"{source} could not be prepared: its process ended with code {code}."
            if "error" in answer:
                return answer["error"]
            return from_arrays(*read_arrays(path))
        except (OSError, ValueError, DamagedError) as error:
            process.kill()
            process.wait()
            return f"{source} could not be prepared: {error}."
        finally:
            path.unlink(missing_ok=True)


class Errand:
    """Prepares scenes that will be wanted later: then they are in the cache. What cannot be prepared is told then."""

    def __init__(self, sources: Sequence[str], up: str, scale: float, workers: int):
        self._workshop = Workshop(iter(sources), up, scale, workers)
        # At the end of the program too.
        self.close = weakref.finalize(self, self._workshop.close)
        """End it, done or not."""
        self._thread = threading.Thread(target=self._run, args=(len(sources),), daemon=True)
        self._thread.start()

    def _run(self, count: int) -> None:
        for _ in range(count):
            self._workshop.take(wait=True)
        self.close()

    def wait(self) -> None:
        """Until all is done."""
        self._thread.join()


def _places() -> list[Path]:
    """Where the folder for scenes on their way is made, best first: in memory where that has room."""
    places = [MEMORY, temporary_folder()]
    if _free(places[0]) < min(ROOM, _free(places[1])):
        places.reverse()
    return places


def _free(folder: Path) -> int:
    """Free bytes of a folder's file system; none where there is no folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
