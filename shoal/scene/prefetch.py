"""Prefetching of scenes: worker processes prepare them ahead of their use and hand them over as files."""

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
from shoal.scene.pack import PackedScene
from shoal.scene.sources import from_arrays

ATTEMPTS = 2
"""Attempts per scene when its worker process dies."""

MIN_FREE_BYTES = 2**30
"""Free bytes needed in memory for prepared scenes; with less, the folder with more free space is used."""


class ScenePrefetcher:
    """Worker processes that prepare scenes ahead of their use and return them in the order of `sources`."""

    def __init__(self, sources: Iterator[str], up: str, scale: float, workers: int):
        self._sources, self._settings = sources, dict(up=up, scale=scale)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._outcomes: dict[int, PackedScene | str] = {}
        self._next = 0
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._folder = TemporaryFolder("scenes", _folders_by_space())
        self._processes: list[subprocess.Popen] = []
        self._max_ahead = workers + 1
        self._threads = [threading.Thread(target=self._run_worker, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def get(self, wait: bool = False) -> PackedScene | str | None:
        """The next scene, or an error message if it could not be prepared; None if it is not ready."""
        with self._changed:
            while wait and self._next not in self._outcomes and not self._closed:
                self._changed.wait(0.1)
            outcome = self._outcomes.pop(self._next, None)
            if outcome is not None:
                self._next += 1
                self._changed.notify_all()
            return outcome

    def close(self) -> None:
        """Kill the worker processes and remove their files."""
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

    def _start_process(self) -> subprocess.Popen:
        # A separate session: Ctrl-C reaches only the program, which then ends its workers.
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
            if self._closed:  # while the process started
                process.kill()
        return process

    def _run_worker(self) -> None:
        """Thread that feeds one worker process and waits for its answers."""
        process = None
        while True:
            with self._changed:
                number, source = next(self._numbers), next(self._sources, None)  # under one lock, to keep their order
                while number >= self._next + self._max_ahead and not self._closed:
                    self._changed.wait(0.5)
                if self._closed:
                    return
            if source is None:
                return
            outcome: PackedScene | str = ""
            for _ in range(ATTEMPTS):
                try:
                    process = process or self._start_process()
                    outcome = self._request(process, source, self._folder.path / f"{number}.safetensors")
                except Exception as error:  # out of processes or files; `get` returns the message
                    outcome = f"{source} could not be prepared: {type(error).__name__}: {error}."
                    break
                if process.poll() is None or self._closed:
                    break
                # The process died, perhaps not because of this scene: retry in a new process.
                self._discard(process)
                process = None
            with self._changed:
                self._outcomes[number] = outcome
                self._changed.notify_all()

    def _discard(self, process: subprocess.Popen) -> None:
        with self._lock:
            if process in self._processes:
                self._processes.remove(process)

    def _request(self, process: subprocess.Popen, source: str, path: Path) -> PackedScene | str:
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


class ScenePreload:
    """Prepares scenes into the cache in the background. Scenes that fail raise their error when they are loaded."""

    def __init__(self, sources: Sequence[str], up: str, scale: float, workers: int):
        self._prefetcher = ScenePrefetcher(iter(sources), up, scale, workers)
        # Also runs at interpreter exit.
        self.close = weakref.finalize(self, self._prefetcher.close)
        """Stop preparing scenes, complete or not."""
        self._thread = threading.Thread(target=self._run, args=(len(sources),), daemon=True)
        self._thread.start()

    def _run(self, count: int) -> None:
        for _ in range(count):
            self._prefetcher.get(wait=True)
        self.close()

    def wait(self) -> None:
        """Wait until all scenes are prepared."""
        self._thread.join()


def _folders_by_space() -> list[Path]:
    """Candidate parents of the folder for prepared scenes, best first: in memory unless that lacks space."""
    folders = [MEMORY, temporary_folder()]
    if _free(folders[0]) < min(MIN_FREE_BYTES, _free(folders[1])):
        folders.reverse()
    return folders


def _free(folder: Path) -> int:
    """Free bytes of a folder's file system; 0 if the folder does not exist."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
