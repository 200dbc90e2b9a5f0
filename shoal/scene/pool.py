"""The scene pool: N envs share K resident scenes, which are replaced by others in the background, one at a time.

    worker processes  prepare scenes (parse, build the tree) and hand them over as files
    one thread        reads the files and copies them to the device, in pieces, on a stream of its own
    poll()            called by the program between steps; never waits: lets a new scene in, sends the oldest away

A scene that is sent away gets no new episodes. When the last env has left it, its memory is free for the next.
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
from shoal.scene.pack import Packed
from shoal.scene.sources import expand
from shoal.scene.workshop import Workshop

PIECE = 4 * 2**20
"""Bytes that are copied to the device at a time, through memory that it can read by itself."""

SPARE_ROWS = 6
"""Beside the resident scenes: one that comes, and others that are being left."""


class _Uploader:
    """A thread that copies scenes into the device's memory, in pieces, without holding up anybody."""

    def __init__(self, memory: SceneMemory):
        self._memory = memory
        self._orders: queue.Queue[tuple[int, Packed] | None] = queue.Queue()
        self.landed: queue.Queue[int] = queue.Queue()
        self.error: Exception | None = None
        self._cuda = memory.device.type == "cuda"
        self._stream = torch.cuda.Stream(memory.device) if self._cuda else None
        # Allocated here, once: asking for such memory later would hold up the device.
        self._pieces = [torch.empty(PIECE // 16, 4, pin_memory=True) for _ in range(2)] if self._cuda else []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, row: int, scene: Packed) -> None:
        """Copy a scene into the room that its row was given; the row appears in `landed` when all of it is there."""
        self._orders.put((row, scene))

    def close(self) -> None:
        """End the thread, after what it has been given."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            row, scene = order
            try:
                if self._stream is None:
                    self._memory.room(row).copy_(scene.words)
                else:
                    with torch.cuda.stream(self._stream):
                        self._copy(self._memory.room(row), scene.words)
                self.landed.put(row)
            except Exception as error:  # told by the next poll
                self.error = error

    def _copy(self, room: torch.Tensor, words: torch.Tensor) -> None:
        # Two pieces in turn: one is filled while the other travels.
        traveling = [torch.cuda.Event() for _ in self._pieces]
        for k, start in enumerate(range(0, len(words), len(self._pieces[0]))):
            part = words[start : start + len(self._pieces[0])]
            piece, event = self._pieces[k % 2][: len(part)], traveling[k % 2]
            event.synchronize()
            piece.copy_(part)
            room[start : start + len(part)].copy_(piece, non_blocking=True)
            event.record()
        for event in traveling:
            event.synchronize()


class ScenePool:
    """`resident` of many scenes on a device, shared by `envs` envs and renewed in the background.

    `row` [envs] int32 is the scene of each env, as a row of `memory`. Call `move` where episodes end and `poll` between
    steps. `period` is the least number of polls between two new scenes; 0 keeps the first ones for ever.
    """

    def __init__(
        self,
        sources: str | Sequence[str],
        envs: int,
        resident: int = 16,
        *,
        device: str | torch.device = "cpu",
        limit: int | None = None,
        period: int = 1,
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
        self.period = period if len(self.sources) > self.resident else 0
        self.device = full_device(device)
        self._strict = strict
        workers = workers or max(1, min(12, cpu_threads() - 1, self.resident))
        self._workshop = Workshop(course(self.sources, seed), up, scale, workers)
        try:
            self._furnish(limit)
        except BaseException:
            self._workshop.close()
            raise
        self._uploader = _Uploader(self.memory)
        self.row = torch.arange(envs, dtype=torch.int32, device=self.device) % self.resident
        """int32 [envs]: where each env is."""
        self.before_use: Callable[[int], None] = lambda row: None
        """Called for a row that has come, before episodes may begin in it; it may refuse it with a ShoalError."""
        self.before_room: Callable[[Packed], None] = lambda scene: None
        """Called for a scene before room is made for it; likewise."""
        self.loaded, self.swaps = self.resident, 0
        self._polls = 0
        self._coming: Packed | None = None
        self._traveling = False
        self._leaving: list[int] = []
        self._rows = torch.arange(self.memory.rows, dtype=torch.int32, device=self.device)
        self._census: tuple[list[int], torch.Tensor, torch.cuda.Event | None] | None = None
        self._refused: set[str] = set()
        self._left_out: set[tuple[str, str]] = set()
        """Names and keys of scenes that are not to be tried again."""
        # Also when the pool is forgotten, and at the end of the program.
        self._end = weakref.finalize(self, _shut, self._workshop, self._uploader)
        if not self.period:
            self.close()

    def __enter__(self) -> "ScenePool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _furnish(self, limit: int | None) -> None:
        """Load the first scenes, all that were asked for; what cannot be loaded is an error now."""
        first: list[Packed] = []
        while len(first) < self.resident:
            outcome = self._workshop.take(wait=True)
            if not isinstance(outcome, Packed):
                raise ShoalError(outcome or "The preparation of scenes was stopped.")
            check_textures(outcome.name, outcome.missing, self._strict)
            first.append(outcome)
        need, spare = sum(scene.nbytes for scene in first), SPARE_ROWS if self.period else 0
        if limit is None:
            # Room for some more, and for gaps, where any come.
            limit = int(1.25 * (need + spare * max(scene.nbytes for scene in first))) if spare else need
        if need > limit:
            raise ShoalError(
                f"{self.resident} scenes need {need / 1e6:.0f} MB, more than the limit of {limit / 1e6:.0f} MB; "
                "give a larger limit or fewer resident scenes."
            )
        self.memory = SceneMemory(limit, self.resident + spare, self.device)
        for row, scene in enumerate(first):
            self.memory.put(row, scene)
        self.active = list(range(self.resident))
        """Rows that new episodes may begin in, the oldest first."""
        self.choice = torch.zeros(self.memory.rows, dtype=torch.int32, device=self.device)
        """int32 [rows]: the active rows, as many as `choices` says."""
        self.choices = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._offer()

    def _offer(self) -> None:
        """Tell the device which rows new episodes may begin in."""
        rows = torch.tensor([len(self.active), *self.active], dtype=torch.int32)
        if self.device.type == "cuda":
            rows = rows.pin_memory()
        self.choices.copy_(rows[:1], non_blocking=True)
        self.choice[: len(self.active)].copy_(rows[1:], non_blocking=True)

    def move(self, ended: torch.Tensor) -> None:
        """Send the envs whose episode has `ended` (bool [envs]) to scenes drawn from the active ones."""
        drawn = (torch.rand(len(self.row), device=self.device) * self.choices).long()
        self.row.copy_(torch.where(ended, self.choice[drawn], self.row))

    def poll(self) -> None:
        """Let scenes come and go. Call it between steps; it waits for nothing."""
        if not self.period:
            return
        if self._uploader.error:
            raise self._uploader.error
        self._polls += 1
        self._count_leaving()
        self._land()
        if len(self.active) > self.resident:
            self._send_away()
        if self._coming is None and self._polls >= self.period and self._empty_row() is not None:
            self._coming = self._fetch()
        if self._coming is not None and not self._traveling:
            self._board(self._coming)

    def _fetch(self) -> Packed | None:
        """The next scene that the workshop has ready, if there is one."""
        outcome = self._workshop.take()
        if isinstance(outcome, str):
            self._refuse(outcome)
            return None
        if outcome is None or (outcome.name, outcome.key) in self._left_out:
            return None
        try:
            check_textures(outcome.name, outcome.missing, self._strict)
            if outcome.nbytes > self.memory.limit:
                need, limit = outcome.nbytes / 1e6, self.memory.limit / 1e6
                raise ShoalError(f"{outcome.name} needs {need:.0f} MB, more than the limit of {limit:.0f} MB.")
            self.before_room(outcome)
        except ShoalError as error:
            self._refuse(str(error), outcome)
            return None
        return outcome

    def _refuse(self, reason: str, scene: Packed | None = None) -> None:
        """In the middle of a training one bad scene is left out, with one warning; the resident ones go on."""
        if reason not in self._refused:
            warnings.warn(f"A scene is left out: {reason}", stacklevel=4)
        self._refused.add(reason)
        if scene is not None:
            self._left_out.add((scene.name, scene.key))

    def _board(self, scene: Packed) -> None:
        """Give the scene that comes a row and room, if there is any; else make some by sending the oldest away."""
        if self.memory.find_room(scene) is None:
            if self.memory.limit - self.memory.used >= scene.nbytes:
                self.memory.close_gaps()
            elif not self._leaving and len(self.active) > 1:
                self._send_away()
                return
            elif not self._leaving:
                self._refuse(f"{scene.name} does not fit beside one other scene; give a larger limit.", scene)
                self._coming = None
                return
            else:
                return
        row = self._empty_row()
        if row is None:
            return
        self.memory.reserve(row, scene)
        self._traveling = True
        self._uploader.send(row, scene)

    def _empty_row(self) -> int | None:
        return next((row for row in range(self.memory.rows) if self.memory.scene(row) is None), None)

    def _land(self) -> None:
        """Open a scene that has been copied to new episodes."""
        try:
            row = self._uploader.landed.get_nowait()
        except queue.Empty:
            return
        scene, self._coming, self._traveling, self._polls = self._coming, None, False, 0
        self.memory.publish(row)
        try:
            self.before_use(row)
        except ShoalError as error:
            self.memory.remove(row)
            self._refuse(str(error), scene)
            return
        self.active.append(row)
        self.loaded += 1
        self._offer()

    def _send_away(self) -> None:
        self._leaving.append(self.active.pop(0))
        self._offer()

    def _count_leaving(self) -> None:
        """Free the rows that nobody is in any more. The count is read when it has arrived, not awaited."""
        if not self._leaving:
            return
        if self._census is None:
            there = (self.row.reshape(-1, 1) == self._rows).any(0)
            asked = list(self._leaving)
            if self.device.type == "cuda":
                told = torch.empty(there.shape, dtype=torch.bool, pin_memory=True)
                told.copy_(there, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                self._census = (asked, told, event)
            else:
                self._census = (asked, there, None)
        asked, told, event = self._census
        if event is None or event.query():
            self._census = None
            for row in asked:
                if not told[row]:  # it has arrived: nothing is waited for
                    self.memory.remove(row)
                    self._leaving.remove(row)
                    self.swaps += 1

    def close(self) -> None:
        """End the workers and the thread; the resident scenes stay."""
        self._end()
        self.period = 0


def course(sources: Sequence[str], seed: int) -> Iterator[str]:
    """Scenes without end: all of them in a drawn order, then all again in another."""
    rng = np.random.default_rng(seed)
    while True:
        yield from (sources[int(i)] for i in rng.permutation(len(sources)))


def _shut(workshop: Workshop, uploader: _Uploader) -> None:
    workshop.close()
    uploader.close()
