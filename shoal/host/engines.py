"""Engines step the envs of a host world: in this process, in worker processes, or in native batches.

Envs come in **bunches**, ranges of rows of the shared arrays. `send` sets a bunch going with the actions and orders in
its rows, `wait` says which are done. Schedules are made of nothing else.
"""

import contextlib
import json
import os
import select
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from shoal.core.children import python_command
from shoal.core.errors import ShoalError, how_it_ended
from shoal.core.launch import cpu_threads
from shoal.core.streams import tell
from shoal.host.envs import EnvFault, make_rows
from shoal.host.memory import RESET, SharedArrays
from shoal.host.sources import Source
from shoal.host.worker import ENDING, FAILED, READY, Assignment

START_SECONDS = 120.0
"""How long a worker may take to import its libraries and make its envs."""


class WorkerFailed(ShoalError):
    """A worker raised, died or hung once too often."""

    exit_code = 1


class WorkerTraceback(Exception):
    """The traceback of an exception in a worker: the cause of a WorkerFailed."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Engine(ABC):
    """What a host world needs of whoever steps its envs."""

    bunches: list[slice]
    """Rows of each bunch."""

    def __init__(self):
        self.lost: set[int] = set()
        """Bunches whose envs had to be started anew since they were last sent: what they did is not known."""

    @abstractmethod
    def send(self, bunches: Sequence[int]) -> None:
        """Set these going."""

    @abstractmethod
    def wait(self, wanted: Collection[int], enough: int) -> list[int]:
        """Bunches out of `wanted` that are done, as soon as there are `enough` of them."""

    def renew(self) -> None:
        """Called before all envs are reset: faults are counted from here."""

    def close(self) -> None:
        """End every process and thread."""

    def describe(self) -> str:
        """Who steps the envs, for people."""
        return "in this process"


class Serial(Engine):
    """All envs in this process, one after the other: slow, but a debugger can look inside."""

    def __init__(self, source: Source, arrays: SharedArrays, bunches: list[slice], limit: int | None, repeat: int):
        super().__init__()
        self.bunches, self.source = bunches, source
        count = max(rows.stop for rows in bunches)
        self.envs = make_rows(source.make, range(count), arrays, limit, repeat)

    def send(self, bunches: Sequence[int]) -> None:
        for bunch in bunches:
            rows = self.bunches[bunch]
            try:
                self.envs.run(rows.start, rows.stop)
            except EnvFault as fault:
                raise WorkerFailed(f"{self.source} raised {fault}.") from fault.__cause__

    def wait(self, wanted: Collection[int], enough: int) -> list[int]:
        return list(wanted)

    def close(self) -> None:
        self.envs.close()


class _Worker:
    """The world's end of one worker process."""

    def __init__(self, job: Assignment, arrays: SharedArrays):
        self.number = job.number
        inner_in, self.commands = os.pipe()
        self.answers, inner_out = os.pipe()
        job = replace(job, memory=arrays.descriptor, commands=inner_in, answers=inner_out)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            python_command("shoal.host.worker", job.to_json()),
            pass_fds=(arrays.descriptor, inner_in, inner_out),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # signals of a terminal or to a group are for the world, which decides when to end
        )
        os.close(inner_in)
        os.close(inner_out)
        os.set_blocking(self.answers, False)
        self.ended = _pidfd(self.process.pid)
        """Readable when the process has ended, even if its forks hold the pipes (-1: not on this system)."""
        self.ready = False
        self.running: set[int] = set()
        self.since = time.monotonic()
        """When it last gave a sign of life, or was given something to do."""

    @property
    def descriptors(self) -> list[int]:
        """What is readable when there is something to hear of it."""
        return [self.answers] if self.ended < 0 else [self.answers, self.ended]

    def send(self, bunches: list[int]) -> None:
        if not self.running:
            self.since = time.monotonic()
        self.running.update(bunches)
        with contextlib.suppress(BrokenPipeError):  # its death is noticed where answers are awaited
            os.write(self.commands, bytes(bunches))

    def stop(self, seconds: float = 0.0) -> None:
        """Hang up; it is killed if it has not ended after so many seconds."""
        for descriptor in (self.commands, self.answers, self.ended):
            if descriptor >= 0:
                os.close(descriptor)
        self.commands = self.answers = self.ended = -1
        try:
            self.process.wait(seconds) if seconds else self.process.kill()
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()


def _pidfd(process: int) -> int:
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return -1


class Fault(NamedTuple):
    """Why a worker had to be replaced."""

    text: str
    traceback: str = ""


class Processes(Engine):
    """Worker processes, each with envs of every bunch of its own, so that all cores are busy whichever is sent."""

    def __init__(
        self,
        source: Source,
        arrays: SharedArrays,
        shares: list[list[slice]],
        limit: int | None,
        repeat: int,
        patience: float,
        restarts: int,
        pin: bool,
    ):
        """`shares[w]` are the rows of worker w, one range per turn; the bunches are numbered turn by turn."""
        super().__init__()
        self.arrays, self.patience, self.restarts = arrays, patience, restarts
        self.restarts_left = restarts
        self._source, self._limit, self._repeat = source, limit, repeat
        turns, count = len(shares[0]), len(shares)
        self.bunches = [shares[w][turn] for turn in range(turns) for w in range(count)]
        self._shares, self._count = shares, count
        self._cores = sorted(os.sched_getaffinity(0)) if pin and hasattr(os, "sched_getaffinity") else []
        self._poll = select.poll()
        self._done: set[int] = set()
        self._heard = 0.0
        """A time since when all workers that have something to do have given a sign of life, or a time before it."""
        self.workers: list[_Worker] = []
        self._by_descriptor: dict[int, _Worker] = {}
        try:
            for number in range(count):
                self.workers.append(self._start(number))
            self._await_ready(self.workers)
        except BaseException:
            self.close()
            raise

    def describe(self) -> str:
        sizes = [sum(rows.stop - rows.start for rows in share) for share in self._shares]
        many = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
        return f"in {len(sizes)} worker process(es) with {many} envs each"

    def renew(self) -> None:
        self.restarts_left = self.restarts

    def _start(self, number: int) -> _Worker:
        worker = _Worker(
            Assignment(
                number=number,
                source=self._source,
                layout=self.arrays.layout,
                bunches=[(rows.start, rows.stop) for rows in self._shares[number]],
                limit=self._limit,
                repeat=self._repeat,
                core=self._cores[number % len(self._cores)] if self._cores else None,
                alert=len(self._shares) <= cpu_threads(),  # otherwise they would keep one another from work
                memory=-1,
                commands=-1,
                answers=-1,
            ),
            self.arrays,
        )
        for descriptor in worker.descriptors:
            self._poll.register(descriptor, select.POLLIN)
            self._by_descriptor[descriptor] = worker
        return worker

    def send(self, bunches: Sequence[int]) -> None:
        if self.lost:
            # A bunch that was started anew shows its first observations instead of taking a step.
            self._done.update(self.lost.intersection(bunches))
            bunches = [b for b in bunches if b not in self.lost]
        by_worker: dict[int, list[int]] = {}
        for bunch in bunches:
            by_worker.setdefault(bunch % self._count, []).append(bunch // self._count)
        for number, turns in by_worker.items():
            self.workers[number].send(turns)

    def wait(self, wanted: Collection[int], enough: int) -> list[int]:
        wanted = set(wanted)
        while len(found := self._done & wanted) < enough:
            self._listen(self.patience)
        self._done -= found
        return sorted(found)

    def _listen(self, patience: float) -> None:
        """Take the answers that are there; wait for one at most until somebody must be given up."""
        left = self._heard + patience - time.monotonic()
        for descriptor, _ in self._poll.poll(max(0.0, left) * 1e3 + 1.0):
            # While one worker was replaced, others were listened to: what poll saw may have been taken since.
            worker = self._by_descriptor.get(descriptor)
            if worker is None:
                continue
            try:
                answers = os.read(worker.answers, 64)
            except BlockingIOError:
                if worker.process.poll() is None:
                    continue
                answers = b""
            if not answers:
                self._replace(worker, self._how_it_died(worker))
            elif FAILED in answers:
                self._replace(worker, self._what_it_said(worker, answers))
            else:
                worker.since = time.monotonic()
                for answer in answers:
                    if answer == READY:
                        worker.ready = True
                    else:
                        worker.running.discard(answer)
                        self._done.add(answer * self._count + worker.number)
        now = time.monotonic()
        if now < self._heard + patience:
            return
        for worker in list(self.workers):
            if (worker.running or not worker.ready) and now > worker.since + patience:
                self._replace(worker, Fault(f"did not answer for {patience:g} s and was killed"))
        self._heard = min((w.since for w in self.workers if w.running or not w.ready), default=now)

    def _await_ready(self, workers: list[_Worker]) -> None:
        while not all(w.ready for w in workers):
            self._listen(START_SECONDS)

    def _replace(self, worker: _Worker, fault: Fault) -> None:
        """Start a worker anew with fresh seeds; the envs it had are lost. Too many times is an error."""
        rows = self._shares[worker.number]
        envs = f"{rows[0].start} to {rows[-1].stop - 1}" if len(rows) == 1 else _ranges(rows)
        text = f"Worker {worker.number} (envs {envs}) {fault.text}."
        self._drop(worker)
        first_start = not worker.ready
        if first_start or self.restarts_left < 1:
            why = "" if first_start else " No restart is left (--restarts)."
            raise WorkerFailed(text + why) from (WorkerTraceback(fault.traceback) if fault.traceback else None)
        self.restarts_left -= 1
        tell(
            f"shoal: {text} It is started again with fresh seeds, the unfinished episodes of its envs are dropped; "
            f"{self.restarts_left} restart(s) left."
        )
        fresh = self._start(worker.number)
        self.workers[worker.number] = fresh
        self._await_ready([fresh])
        turns = range(len(rows))
        for part in rows:
            # A seed that made an env fail is not tried again.
            self.arrays["seed"][part] = (self.arrays["seed"][part] + 7_919_000_003) % 2**31
        orders = [self.arrays["order"][part].copy() for part in rows]
        for part in rows:
            self.arrays["order"][part] = RESET
        numbers = {turn * self._count + worker.number for turn in turns}
        waiting = numbers & self._done
        fresh.send(list(turns))
        while not numbers <= self._done | self.lost:
            self._listen(self.patience)
        for part, order in zip(rows, orders, strict=True):
            self.arrays["order"][part] = order
        # Those under way are done, in a way; the rest is not asked for yet.
        running = {turn * self._count + worker.number for turn in worker.running}
        self._done -= numbers - running - waiting
        self.lost |= numbers

    def _drop(self, worker: _Worker) -> None:
        for descriptor in worker.descriptors:
            self._poll.unregister(descriptor)
            del self._by_descriptor[descriptor]
        worker.stop()

    def _how_it_died(self, worker: _Worker) -> Fault:
        try:
            return Fault(how_it_ended(worker.process.wait(ENDING)))
        except subprocess.TimeoutExpired:
            return Fault("closed its pipe and was killed")

    def _what_it_said(self, worker: _Worker, answers: bytes) -> Fault:
        text = answers[answers.index(FAILED) + 1 :]
        heard = select.poll()
        for descriptor in worker.descriptors:
            heard.register(descriptor, select.POLLIN)
        while not text.endswith(b"\n"):
            heard.poll(self.patience * 1e3)
            try:
                more = os.read(worker.answers, 65536)
            except BlockingIOError:
                more = b""
            if not more:
                return self._how_it_died(worker)
            text += more
        return Fault(**json.loads(text))

    def close(self) -> None:
        for worker in self.workers:
            if worker.commands >= 0:
                os.close(worker.commands)
                worker.commands = -1
        for worker in self.workers:
            worker.stop(ENDING)
        self.workers.clear()


def _ranges(rows: list[slice]) -> str:
    return " and ".join(f"{part.start} to {part.stop - 1}" for part in rows)


def split(count: int, parts: int) -> list[slice]:
    """So many rows in parts of nearly the same size."""
    edges = [round(count * part / parts) for part in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def share_out(count: int, workers: int, turns: int) -> list[list[slice]]:
    """Rows of each worker, a range per turn; all of one turn are neighbors, and nobody has much more than others."""
    sizes = [
        [rows.stop - rows.start for rows in split(part.stop - part.start, turns)] for part in split(count, workers)
    ]
    for number, own in enumerate(sizes):
        if number % 2:  # what does not divide evenly goes to the first turn of one and to the last of the next
            own.reverse()
    shares: list[list[slice]] = [[] for _ in range(workers)]
    start = 0
    for turn in range(turns):
        for own, share in zip(sizes, shares, strict=True):
            share.append(slice(start, start + own[turn]))
            start += own[turn]
    return shares
