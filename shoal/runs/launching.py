"""Start the processes of a run on this machine, and start them again after one of them died.

    shoal train ... --gpus 4          starts four processes on this machine, which find one another by a private file
    torchrun / srun ... shoal train   each process finds the others by what the launcher put into its environment

One that dies takes the others with it; the launcher starts all of them again, and they continue from the last
checkpoint.
"""

import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.children import python_command
from shoal.core.errors import how_it_ended
from shoal.core.launch_info import STORE
from shoal.core.temporary import TemporaryFolder
from shoal.runs.checkpoint import latest_steps
from shoal.runs.folder import RunFolder
from shoal.runs.interrupts import end_signals
from shoal.runs.progress import Progress

RESTARTS = 3
"""How often the processes of a machine are started again after one of them died."""

ENDING = 60
"""Seconds that processes have to save and end after a signal."""

GRACE = 30
"""Seconds that processes have to end after another one has died."""

LOST = 3
"""Exit code of a process that has lost another one: the other one is the cause."""

LOST_BEFORE = 5
"""Seconds in which the cause is expected to end, after a process that has lost it."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""The network interface that no other machine reaches."""

STOPPED = "stopped before the processes could save; what was saved before stands."

TRUST = "--trust"
"""Tells processes on the command line that code of other runs may be executed."""


@dataclass(frozen=True)
class Outcome:
    """How processes ended that did not reach the end of training."""

    exit_code: int
    message: str
    saved: bool = False
    """Whether a signal ended them, and they have saved."""


def launch(folder: RunFolder, count: int, trust: bool = False) -> Outcome | None:
    """Train the run of a folder with `count` processes on this machine; returns when they have ended.

    None: they have reached the end of training. `trust` as in `continue_run`.
    """
    name = uuid.uuid4().hex
    with TemporaryFolder("launch") as box, _caught_signals() as caught:
        note = box / "outcome.json"
        command = python_command("shoal.runs.process_main", str(folder.path), str(note), *[TRUST] * trust)
        for restarts in itertools.count():
            shared = dict(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, TORCHELASTIC_RUN_ID=name)
            shared |= {"TORCHELASTIC_RESTART_COUNT": restarts, STORE: box / f"store-{restarts}"}
            shared |= dict(GLOO_SOCKET_IFNAME=LOOPBACK, NCCL_SOCKET_IFNAME=f"={LOOPBACK}")  # "=": this name alone
            places = [dict(shared, RANK=rank, LOCAL_RANK=rank) for rank in range(count)]
            failure = _run_together(command, places, caught)
            outcome = _read(note)
            if failure is None or outcome is not None:
                return outcome
            if caught:
                return Outcome(128 + caught[0], STOPPED)
            steps = latest_steps(folder.checkpoints) if folder.holds_checkpoints else None
            if restarts == RESTARTS:
                return Outcome(1, f"{failure} after {RESTARTS} restarts; {_remedy(folder, steps)}")
            start = "the beginning" if steps is None else f"the checkpoint at {steps} env steps"
            Progress(1, quiet=True).warn(f"{failure}; all {count} start again from {start}.")


def _remedy(folder: RunFolder, steps: int | None) -> str:
    """What the user can do about processes that keep dying, with a checkpoint at `steps` or with none."""
    if steps is None:
        return "no checkpoint was saved: remove the cause and start the run again."
    return f"remove the cause and continue from {steps} env steps with `shoal resume {folder.path}`."


def _run_together(command: list[str], places: Sequence[Mapping[str, Any]], caught: list[int]) -> str | None:
    """Start a process for each place, with what its environment says more, and wait until they have ended.

    Signals that are caught are passed on. Returns which process failed first and how; None if none has.
    """
    processes: list[subprocess.Popen] = []
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, end_signals())  # of the processes, until they can answer
        try:
            for place in places:
                env = os.environ | {name: str(value) for name, value in place.items()}
                processes.append(subprocess.Popen(command, env=env, start_new_session=True))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return _wait(processes, caught)
    finally:
        _end(processes)


def _wait(processes: Sequence[subprocess.Popen], caught: list[int]) -> str | None:
    """Wait until all processes have ended or one has failed; returns which one and how, None if none has."""
    passed_on, deadline = 0, math.inf
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
        if any(code not in (None, 0, LOST) for code in codes):
            break
        if LOST in codes:
            deadline = min(deadline, time.monotonic() + LOST_BEFORE)
        if passed_on < len(caught):
            deadline = min(deadline, time.monotonic() + ENDING)
            for process in processes:
                process.send_signal(caught[passed_on])
            passed_on += 1
        time.sleep(0.1)
    if not any(codes) and None not in codes:
        return None
    cause = min(codes, key=_cause_first)
    how = {LOST: "has lost another process", None: "did not end"}.get(cause) or how_it_ended(cause)
    return f"Process {codes.index(cause)} of {len(codes)} {how}"


def _cause_first(code: int | None) -> int:
    """Sorts exit codes: signals, errors, processes that have lost another one, those that run, those that are done."""
    if code in (LOST, None, 0):
        return (LOST, None, 0).index(code) + 2
    return int(code > 0)


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """End the processes that are left; those that do not listen are killed, with all that they have started."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """The numbers of the signals that come in the meantime, whose handlers are replaced."""
    caught: list[int] = []
    before = {}
    with contextlib.suppress(ValueError):  # not the main thread, which sees to signals
        for number in end_signals():
            before[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(note: Path) -> Outcome | None:
    return Outcome(**json.loads(note.read_text())) if note.exists() else None
