"""Scene pool: N envs share K resident scenes, which are swapped one at a time in the background.

    worker processes  prepare scenes (parse, build the tree) and hand them over as files
    upload thread     reads the files and copies them to the device in chunks, on a separate CUDA stream
    poll()            called between steps; never blocks; activates a new scene and retires the oldest

A retired scene gets no new episodes. Its memory is freed when the last env has left it.
"""

import queue
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.core.launch import cpu_threads
from shoal.core.store import full_device
from shoal.scene.files import check_textures
from shoal.scene.memory import SceneMemory
from shoal.scene.pack import PackedScene
from shoal.scene.prefetch import ScenePrefetcher
from shoal.scene.sources import expand

STAGING_BYTES = 4 * 2**20
"""Bytes of one pinned staging buffer; scenes are copied to the device in chunks of this size."""

SPARE_ROWS = 6
"""Rows beyond the resident scenes: one for an upload, the others for retired scenes that still hold envs."""


class _Uploader:
    """A thread that copies scenes into device memory in chunks, without blocking the program."""

    def __init__(self, memory: SceneMemory):
        self._memory = memory
        self._jobs: queue.Queue[tuple[int, PackedScene] | None] = queue.Queue()
        self.finished: queue.Queue[int] = queue.Queue()
        self.error: Exception | None = None
        self._cuda = memory.device.type == "cuda"
        self._stream = torch.cuda.Stream(memory.device) if self._cuda else None
        # Allocated once: pinning memory later would synchronize the device.
        self._staging = [torch.empty(STAGING_BYTES // 16, 4, pin_memory=True) for _ in range(2)] if self._cuda else []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def upload(self, row: int, scene: PackedScene) -> None:
        """Copy a scene into the reserved slot of its row; the row appears in `finished` once the copy is complete."""
        self._jobs.put((row, scene))

    def close(self) -> None:
        """End the thread once its queued uploads are complete."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            row, scene = job
            try:
                if self._stream is None:
                    self._memory.slot(row).copy_(scene.words)
                else:
                    with torch.cuda.stream(self._stream):
                        self._copy(self._memory.slot(row), scene.words)
                self.finished.put(row)
            except Exception as error:  # raised by the next poll
                self.error = error

    def _copy(self, slot: torch.Tensor, words: torch.Tensor) -> None:
        # Double buffering: one staging buffer is filled while the other is copied.
        copied = [torch.cuda.Event() for _ in self._staging]
        for k, start in enumerate(range(0, len(words), len(self._staging[0]))):
            chunk = words[start : start + len(self._staging[0])]
            staging, event = self._staging[k % 2][: len(chunk)], copied[k % 2]
            event.synchronize()
            staging.copy_(chunk)
            slot[start : start + len(chunk)].copy_(staging, non_blocking=True)
            event.record()
        for event in copied:
            event.synchronize()


class ScenePool:
    """`resident` of many scenes on a device, shared by `envs` envs and swapped in the background.

    `row` [envs] int32 is the scene of each env, as a row of `memory`. Call `move` when episodes end and `poll` between
    steps.

    Args:
        sources: Scenes as in `expand`: `house:train`, `house:7`, a mesh file or a folder.
        envs: Number of envs.
        resident: Number of scenes on the device that take new episodes.
        limit: Bytes of device memory for scenes; by default enough for the first scenes and spare rows.
        swap_interval: Minimum number of polls between two scene swaps; 0 never swaps.
        seed: Decides the order of scenes.
        up, scale, strict: As in `load_scene`.
        workers: Number of processes that prepare scenes.

    Raises:
        ShoalError: If one of the first scenes cannot be loaded or they exceed `limit`.
    """

    def __init__(
        self,
        sources: str | Sequence[str],
        envs: int,
        resident: int = 16,
        *,
        device: str | torch.device = "cpu",
        limit: int | None = None,
        swap_interval: int = 1,
        seed: int = 0,
        up: str = "auto",
        scale: float = 1.0,
        strict: bool = False,
        workers: int | None = None,
    ):
        self.sources = expand(sources)
        if envs < 1 or resident < 1:
            raise ShoalError(f"A scene pool needs at least one env and one resident scene, not {envs} and {resident}.")
        if workers is not None and workers < 1:
            raise ShoalError(f"A scene pool needs at least one worker, not {workers}.")
        self.resident = min(resident, len(self.sources))
        self.swap_interval = swap_interval if len(self.sources) > self.resident else 0
        self.device = full_device(device)
        self._strict = strict
        workers = workers or max(1, min(12, cpu_threads() - 1, self.resident))
        self._prefetcher = ScenePrefetcher(scene_order(self.sources, seed), up, scale, workers)
        try:
            self._load_initial(limit)
        except BaseException:
            self._prefetcher.close()
            raise
        self._uploader = _Uploader(self.memory)
        self.row = torch.arange(envs, dtype=torch.int32, device=self.device) % self.resident
        """int32 [envs]: the row of each env's scene."""
        self.before_use: Callable[[int], None] = lambda row: None
        """Called with the row of an uploaded scene before episodes start in it; a ShoalError rejects the scene."""
        self.before_upload: Callable[[PackedScene], None] = lambda scene: None
        """Called with a scene before its upload; a ShoalError rejects the scene."""
        self.loaded, self.swaps = self.resident, 0
        self._polls = 0
        self._pending: PackedScene | None = None
        self._uploading = False
        self._retiring: list[int] = []
        self._rows = torch.arange(self.memory.rows, dtype=torch.int32, device=self.device)
        self._occupancy: tuple[list[int], torch.Tensor, torch.cuda.Event | None] | None = None
        self._reported: set[str] = set()
        self._rejected: set[tuple[str, str]] = set()
        """Names and keys of scenes that are not loaded again."""
        # Also runs when the pool is garbage collected and at interpreter exit.
        self._finalizer = weakref.finalize(self, _close_threads, self._prefetcher, self._uploader)
        if not self.swap_interval:
            self.close()

    def __enter__(self) -> "ScenePool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _load_initial(self, limit: int | None) -> None:
        """Load the first `resident` scenes; a scene that cannot be loaded is an error."""
        first: list[PackedScene] = []
        while len(first) < self.resident:
            outcome = self._prefetcher.get(wait=True)
            if not isinstance(outcome, PackedScene):
                raise ShoalError(outcome or "The preparation of scenes was stopped.")
            check_textures(outcome.name, outcome.missing, self._strict)
            first.append(outcome)
        need, spare = sum(scene.nbytes for scene in first), SPARE_ROWS if self.swap_interval else 0
        if limit is None:
            # Space for the spare rows and for gaps between scenes.
            limit = int(1.25 * (need + spare * max(scene.nbytes for scene in first))) if spare else need
        if need > limit:
            raise ShoalError(
                f"{self.resident} scenes need {need / 1e6:.0f} MB, more than the limit of {limit / 1e6:.0f} MB; "
                "raise --memory-limit or lower --scenes-in-memory (of a ScenePool: `limit`, `resident`)."
            )
        self.memory = SceneMemory(limit, self.resident + spare, self.device)
        for row, scene in enumerate(first):
            self.memory.put(row, scene)
        self.active = list(range(self.resident))
        """Rows that take new episodes, the oldest first."""
        self.active_rows = torch.zeros(self.memory.rows, dtype=torch.int32, device=self.device)
        """int32 [rows]: the active rows; only the first `num_active` entries are valid."""
        self.num_active = torch.zeros(1, dtype=torch.int32, device=self.device)
        """int32 [1]: number of active rows."""
        self._write_active()

    def _write_active(self) -> None:
        """Copy the list of active rows to the device."""
        rows = torch.tensor([len(self.active), *self.active], dtype=torch.int32)
        if self.device.type == "cuda":
            rows = rows.pin_memory()
        self.num_active.copy_(rows[:1], non_blocking=True)
        self.active_rows[: len(self.active)].copy_(rows[1:], non_blocking=True)

    def move(self, ended: torch.Tensor) -> None:
        """Assign envs whose episode has `ended` (bool [envs]) to scenes drawn uniformly from the active ones."""
        drawn = (torch.rand(len(self.row), device=self.device) * self.num_active).long()
        self.row.copy_(torch.where(ended, self.active_rows[drawn], self.row))

    def poll(self) -> None:
        """Activate uploaded scenes, retire old ones and start the next upload; never blocks. Call it between steps."""
        if not self.swap_interval:
            return
        if self._uploader.error:
            raise self._uploader.error
        self._polls += 1
        self._free_retired()
        self._finish_upload()
        if len(self.active) > self.resident:
            self._retire_oldest()
        if self._pending is None and self._polls >= self.swap_interval and self._empty_row() is not None:
            self._pending = self._fetch()
        if self._pending is not None and not self._uploading:
            self._start_upload(self._pending)

    def _fetch(self) -> PackedScene | None:
        """The next prepared scene; None if it is not ready or was rejected."""
        outcome = self._prefetcher.get()
        if isinstance(outcome, str):
            self._reject(outcome)
            return None
        if outcome is None or (outcome.name, outcome.key) in self._rejected:
            return None
        try:
            check_textures(outcome.name, outcome.missing, self._strict)
            if outcome.nbytes > self.memory.limit:
                need, limit = outcome.nbytes / 1e6, self.memory.limit / 1e6
                raise ShoalError(
                    f"{outcome.name} needs {need:.0f} MB, more than the limit of {limit:.0f} MB; raise --memory-limit "
                    "(of a ScenePool: `limit`)."
                )
            self.before_upload(outcome)
        except ShoalError as error:
            self._reject(str(error), outcome)
            return None
        return outcome

    def _reject(self, reason: str, scene: PackedScene | None = None) -> None:
        """Skip a bad scene during training, with one warning per reason."""
        if reason not in self._reported:
            warnings.warn(f"A scene is skipped: {reason}", stacklevel=4)
        self._reported.add(reason)
        if scene is not None:
            self._rejected.add((scene.name, scene.key))

    def _start_upload(self, scene: PackedScene) -> None:
        """Start the upload if there is a free row and enough memory; otherwise compact or retire the oldest scene."""
        if self.memory.find_gap(scene) is None:
            if self.memory.limit - self.memory.used >= scene.nbytes:
                self.memory.compact()
            elif not self._retiring and len(self.active) > 1:
                self._retire_oldest()
                return
            elif not self._retiring:
                self._reject(f"{scene.name} does not fit beside one other scene; give a larger limit.", scene)
                self._pending = None
                return
            else:
                return
        row = self._empty_row()
        if row is None:
            return
        self.memory.reserve(row, scene)
        self._uploading = True
        self._uploader.upload(row, scene)

    def _empty_row(self) -> int | None:
        return next((row for row in range(self.memory.rows) if self.memory.scene(row) is None), None)

    def _finish_upload(self) -> None:
        """Activate a scene whose upload is complete."""
        try:
            row = self._uploader.finished.get_nowait()
        except queue.Empty:
            return
        scene, self._pending, self._uploading, self._polls = self._pending, None, False, 0
        self.memory.publish(row)
        try:
            self.before_use(row)
        except ShoalError as error:
            self.memory.remove(row)
            self._reject(str(error), scene)
            return
        self.active.append(row)
        self.loaded += 1
        self._write_active()

    def _retire_oldest(self) -> None:
        self._retiring.append(self.active.pop(0))
        self._write_active()

    def _free_retired(self) -> None:
        """Free retired rows without envs. Their occupancy is copied asynchronously and read once it has arrived."""
        if not self._retiring:
            return
        if self._occupancy is None:
            occupied = (self.row.reshape(-1, 1) == self._rows).any(0)
            rows = list(self._retiring)
            if self.device.type == "cuda":
                pinned = torch.empty(occupied.shape, dtype=torch.bool, pin_memory=True)
                pinned.copy_(occupied, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                self._occupancy = (rows, pinned, event)
            else:
                self._occupancy = (rows, occupied, None)
        rows, occupied, event = self._occupancy
        if event is None or event.query():
            self._occupancy = None
            for row in rows:
                if not occupied[row]:  # no synchronization: the copy is complete
                    self.memory.remove(row)
                    self._retiring.remove(row)
                    self.swaps += 1

    def close(self) -> None:
        """End the worker processes and the upload thread; the resident scenes stay."""
        self._finalizer()
        self.swap_interval = 0


def scene_order(sources: Sequence[str], seed: int) -> Iterator[str]:
    """An endless sequence of scenes: one seeded permutation of all sources after another."""
    rng = np.random.default_rng(seed)
    while True:
        yield from (sources[int(i)] for i in rng.permutation(len(sources)))


def _close_threads(prefetcher: ScenePrefetcher, uploader: _Uploader) -> None:
    prefetcher.close()
    uploader.close()
