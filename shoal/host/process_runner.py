"""The runner that steps envs in worker processes, and restarts those that fail."""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.core.children import python_command
from shoal.core.errors import describe_exit
from shoal.core.launch import cpu_threads
from shoal.core.streams import print_error
from shoal.host.memory import RESET, SharedArrays
from shoal.host.runners import VectorRunner, WorkerFailed
from shoal.host.sources import Source
from shoal.host.worker import EXIT_SECONDS, FAILED, READY, Assignment

START_SECONDS = 120.0
"""Timeout for a worker to import its libraries and make its envs."""


class WorkerTraceback(Exception):
    """The traceback of an exception in a worker: the cause of a WorkerFailed."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Fault(NamedTuple):
    """Why a worker has to be restarted."""

    text: str
    traceback: str = ""


@dataclass(frozen=True)
class WorkerLimits:
    """When workers are restarted, and whether they are pinned to cores."""

    timeout: float
    """Seconds without an answer after which a worker is killed."""
    max_restarts: int
    pin: bool


class _Worker:
    """One worker process, seen from the world's process."""

    def __init__(self, assignment: Assignment, arrays: SharedArrays):
        self.number = assignment.number
        request_read, self.request_fd = os.pipe()
        self.answer_fd, answer_write = os.pipe()
        assignment = replace(assignment, memory_fd=arrays.descriptor, request_fd=request_read, answer_fd=answer_write)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            python_command("shoal.host.worker", assignment.to_json()),
            pass_fds=(arrays.descriptor, request_read, answer_write),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # signals from a terminal reach only the world's process, which ends its workers
        )
        os.close(request_read)
        os.close(answer_write)
        os.set_blocking(self.answer_fd, False)
        self.exit_fd = _pidfd(self.process.pid)
        """Readable once the process has ended, even if a fork of it holds the pipes (-1: not on this system)."""
        self.ready = False
        """Whether its envs are made."""
        self.running: set[int] = set()
        """Its env slices, 0 to slices per worker - 1, that are taking a step."""
        self.since = time.monotonic()
        """Time of its last answer, or of the first request after it."""

    @property
    def descriptors(self) -> list[int]:
        """File descriptors that become readable when it answers or ends."""
        return [self.answer_fd] if self.exit_fd < 0 else [self.answer_fd, self.exit_fd]

    def send(self, slices: list[int]) -> None:
        if not self.running:
            self.since = time.monotonic()
        self.running.update(slices)
        with contextlib.suppress(BrokenPipeError):  # wait() notices that it has ended
            os.write(self.request_fd, bytes(slices))

    def stop(self, seconds: float = 0.0) -> None:
        """Close the pipes and wait up to `seconds` for the process to end, then kill it."""
        for descriptor in (self.request_fd, self.answer_fd, self.exit_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.request_fd = self.answer_fd = self.exit_fd = -1
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


class ProcessRunner(VectorRunner):
    """Steps envs in worker processes. All workers have the same number of env slices.

    Env slice `k * num_workers + w` is the k-th slice of worker w, so any num_workers consecutive slices use all cores.
    """

    def __init__(
        self,
        source: Source,
        arrays: SharedArrays,
        shares: list[list[slice]],
        limit: int | None,
        repeat: int,
        limits: WorkerLimits,
    ):
        """`shares[w]` are the rows of worker w's env slices."""
        super().__init__()
        self.arrays, self.limits = arrays, limits
        self.restarts_left = limits.max_restarts
        self._source, self._limit, self._repeat = source, limit, repeat
        self._shares, self._count = shares, len(shares)
        self.env_slices = [share[k] for k in range(len(shares[0])) for share in shares]
        self._cores = sorted(os.sched_getaffinity(0)) if limits.pin and hasattr(os, "sched_getaffinity") else []
        self._poll = select.poll()
        self._done: set[int] = set()
        """Env slices that have finished a step and were not yet returned by `wait`."""
        self._all_heard_since = 0.0
        """A lower bound of the `since` of all workers that are busy: no timeout can have passed before it does here."""
        self.workers: list[_Worker] = []
        self._by_descriptor: dict[int, _Worker] = {}
        try:
            for number in range(self._count):
                self.workers.append(self._start(number))
            self._await_ready(self.workers)
        except BaseException:
            self.close()
            raise

    def describe(self) -> str:
        sizes = [sum(rows.stop - rows.start for rows in share) for share in self._shares]
        many = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
        return f"in {len(sizes)} worker process(es) with {many} envs each"

    def reset_fault_count(self) -> None:
        self.restarts_left = self.limits.max_restarts

    def _start(self, number: int) -> _Worker:
        worker = _Worker(
            Assignment(
                number=number,
                source=self._source,
                layout=self.arrays.layout,
                env_slices=[(rows.start, rows.stop) for rows in self._shares[number]],
                limit=self._limit,
                repeat=self._repeat,
                core=self._cores[number % len(self._cores)] if self._cores else None,
                spin=len(self._shares) <= cpu_threads(),  # more workers than cores would slow one another down
                memory_fd=-1,
                request_fd=-1,
                answer_fd=-1,
            ),
            self.arrays,
        )
        for descriptor in worker.descriptors:
            self._poll.register(descriptor, select.POLLIN)
            self._by_descriptor[descriptor] = worker
        return worker

    def send(self, slices: Sequence[int]) -> None:
        if self.lost:
            # A restarted slice returns its first observations instead of taking a step.
            self._done.update(self.lost.intersection(slices))
            slices = [index for index in slices if index not in self.lost]
        by_worker: dict[int, list[int]] = {}
        for index in slices:
            by_worker.setdefault(index % self._count, []).append(index // self._count)
        for number, own in by_worker.items():
            self.workers[number].send(own)

    def wait(self, slices: Collection[int], min_count: int) -> list[int]:
        wanted = set(slices)
        while len(found := self._done & wanted) < min_count:
            self._read_answers(self.limits.timeout)
        self._done -= found
        return sorted(found)

    def _read_answers(self, timeout: float) -> None:
        """Wait for answers, at most until the next worker times out; read them, and restart workers that failed."""
        left = self._all_heard_since + timeout - time.monotonic()
        for descriptor, _ in self._poll.poll(max(0.0, left) * 1e3 + 1.0):
            # Restarting a worker reads the answers of others too, so this one may have been read or replaced.
            worker = self._by_descriptor.get(descriptor)
            if worker is None:
                continue
            try:
                answers = os.read(worker.answer_fd, 64)
            except BlockingIOError:
                if worker.process.poll() is None:
                    continue
                answers = b""
            if not answers:
                self._restart(worker, self._fault_of_ended(worker))
            elif FAILED in answers:
                self._restart(worker, self._read_fault(worker, answers))
            else:
                worker.since = time.monotonic()
                for answer in answers:
                    if answer == READY:
                        worker.ready = True
                    else:
                        worker.running.discard(answer)
                        self._done.add(answer * self._count + worker.number)
        now = time.monotonic()
        if now < self._all_heard_since + timeout:
            return
        for worker in list(self.workers):
            if (worker.running or not worker.ready) and now > worker.since + timeout:
                self._restart(worker, Fault(f"did not answer for {timeout:g} s and was killed"))
        self._all_heard_since = min((w.since for w in self.workers if w.running or not w.ready), default=now)

    def _await_ready(self, workers: list[_Worker]) -> None:
        while not all(worker.ready for worker in workers):
            self._read_answers(START_SECONDS)

    def _restart(self, worker: _Worker, fault: Fault) -> None:
        """Replace a worker and reset its envs with new seeds; its env slices are lost.

        Raises:
            WorkerFailed: It has never been ready, or no restart is left.
        """
        rows = self._shares[worker.number]
        envs = f"{rows[0].start} to {rows[-1].stop - 1}" if len(rows) == 1 else _ranges(rows)
        text = f"Worker {worker.number} (envs {envs}) {fault.text}."
        self._drop(worker)
        first_start = not worker.ready
        if first_start or self.restarts_left < 1:
            why = "" if first_start else " No restart is left (--max-worker-restarts)."
            raise WorkerFailed(text + why) from (WorkerTraceback(fault.traceback) if fault.traceback else None)
        self.restarts_left -= 1
        print_error(
            f"shoal: {text} It is restarted with new seeds, the unfinished episodes of its envs are dropped; "
            f"{self.restarts_left} restart(s) left."
        )
        fresh = self._start(worker.number)
        self.workers[worker.number] = fresh
        self._await_ready([fresh])
        for part in rows:
            # The old seed may be the cause of the fault.
            self.arrays["seed"][part] = (self.arrays["seed"][part] + 7_919_000_003) % 2**31
        commands = [self.arrays["command"][part].copy() for part in rows]
        for part in rows:
            self.arrays["command"][part] = RESET
        slices = {k * self._count + worker.number for k in range(len(rows))}
        done_before = slices & self._done
        # The commands must stay until the new worker has answered for every slice, also for those that were done.
        self._done -= slices
        self.lost -= slices
        fresh.send(list(range(len(rows))))
        while not slices <= self._done | self.lost:
            self._read_answers(self.limits.timeout)
        for part, command in zip(rows, commands, strict=True):
            self.arrays["command"][part] = command
        # Slices whose step was interrupted count as done; those that were idle have not been sent.
        running = {k * self._count + worker.number for k in worker.running}
        self._done -= slices - running - done_before
        self.lost |= slices

    def _drop(self, worker: _Worker) -> None:
        for descriptor in worker.descriptors:
            self._poll.unregister(descriptor)
            del self._by_descriptor[descriptor]
        worker.stop()

    def _fault_of_ended(self, worker: _Worker) -> Fault:
        try:
            return Fault(describe_exit(worker.process.wait(EXIT_SECONDS)))
        except subprocess.TimeoutExpired:
            return Fault("closed its pipe and was killed")

    def _read_fault(self, worker: _Worker, answers: bytes) -> Fault:
        """Read the rest of the JSON line that follows FAILED."""
        text = answers[answers.index(FAILED) + 1 :]
        poll = select.poll()
        for descriptor in worker.descriptors:
            poll.register(descriptor, select.POLLIN)
        while not text.endswith(b"\n"):
            poll.poll(self.limits.timeout * 1e3)
            try:
                more = os.read(worker.answer_fd, 65536)
            except BlockingIOError:
                more = b""
            if not more:
                return self._fault_of_ended(worker)
            text += more
        return Fault(**json.loads(text))

    def close(self) -> None:
        for worker in self.workers:
            if worker.request_fd >= 0:
                os.close(worker.request_fd)
                worker.request_fd = -1
        for worker in self.workers:
            worker.stop(EXIT_SECONDS)
        self.workers.clear()


def _ranges(rows: list[slice]) -> str:
    return " and ".join(f"{part.start} to {part.stop - 1}" for part in rows)
