"""Start the processes of a run on this machine, and restart them when one dies.

    shoal train ... --gpus 4          starts four processes on this machine; rendezvous by a private file
    torchrun / srun ... shoal train   rendezvous by the launcher's environment variables

When a process dies, the launcher ends the others and starts all of them again from the last checkpoint.
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
from shoal.core.environment import program_defaults
from shoal.core.errors import describe_exit
from shoal.core.launch_info import STORE
from shoal.core.temporary import TemporaryFolder
from shoal.runs.checkpoint import latest_steps
from shoal.runs.folder import RunFolder
from shoal.runs.interrupts import end_signals
from shoal.runs.progress import Progress

RESTARTS = 3
"""Maximum number of restarts after a process died."""

SAVE_TIMEOUT = 60
"""Seconds that processes have to save and exit after a signal."""

EXIT_TIMEOUT = 30
"""Seconds that processes have to exit after SIGTERM."""

PEER_LOST = 3
"""Exit code of a process whose connection to another one broke; the other one is the cause."""

PEER_LOST_GRACE = 5
"""Seconds to wait for the cause to exit, after a process exited with PEER_LOST."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""The loopback interface."""

STOPPED = "stopped before the processes could save; the last checkpoint is kept."

TRUST = "--trust"
"""Argument of a process: allow code of other runs."""


@dataclass(frozen=True)
class Outcome:
    """Result of processes that did not reach the end of training."""

    exit_code: int
    message: str
    saved: bool = False
    """Whether a signal stopped them and they saved."""


def launch(folder: RunFolder, count: int, trust: bool = False) -> Outcome | None:
    """Train the run of a folder with `count` processes on this machine, and wait for them.

    Args:
        trust: As in `continue_run`.

    Returns:
        None at the end of training, otherwise the outcome.
    """
    name = uuid.uuid4().hex
    with TemporaryFolder("launch") as temporary, _caught_signals() as caught:
        file = temporary / "outcome.json"
        command = python_command("shoal.runs.process_main", str(folder.path), str(file), *[TRUST] * trust)
        for restarts in itertools.count():
            shared = dict(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, TORCHELASTIC_RUN_ID=name)
            shared |= {"TORCHELASTIC_RESTART_COUNT": restarts, STORE: temporary / f"store-{restarts}"}
            shared |= dict(GLOO_SOCKET_IFNAME=LOOPBACK, NCCL_SOCKET_IFNAME=f"={LOOPBACK}")  # "=": this name alone
            places = [dict(shared, RANK=rank, LOCAL_RANK=rank) for rank in range(count)]
            failure = _run_processes(command, places, caught)
            outcome = _read(file)
            if failure is None or outcome is not None:
                return outcome
            if caught:
                return Outcome(128 + caught[0], STOPPED)
            steps = latest_steps(folder.checkpoints) if folder.holds_checkpoints else None
            if restarts == RESTARTS:
                return Outcome(1, f"{failure} after {RESTARTS} restarts; {_remedy(folder, steps)}")
            start = "the beginning" if steps is None else f"the checkpoint at {steps} env steps"
            Progress(1, quiet=True).warn(f"{failure}; restarting all {count} from {start}.")


def _remedy(folder: RunFolder, steps: int | None) -> str:
    """The remedy for processes that keep dying, with a checkpoint at `steps` or without one."""
    if steps is None:
        return "no checkpoint was saved: fix the cause and start the run again."
    return f"fix the cause and continue from {steps} env steps with `shoal resume {folder.path}`."


def _run_processes(command: list[str], places: Sequence[Mapping[str, Any]], caught: list[int]) -> str | None:
    """Start a process per place, with its environment variables, and wait for all.

    Signals in `caught` are passed on. Returns which process failed first and how; None if none failed.
    """
    processes: list[subprocess.Popen] = []
    try:
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, end_signals()
        )  # children inherit the mask and unblock it once ready
        try:
            for place in places:
                env = program_defaults() | os.environ | {name: str(value) for name, value in place.items()}
                processes.append(subprocess.Popen(command, env=env, start_new_session=True))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return _wait(processes, caught)
    finally:
        _end(processes)


def _wait(processes: Sequence[subprocess.Popen], caught: list[int]) -> str | None:
    """Wait until all processes exit or one fails; returns which one failed and how, or None."""
    passed_on, deadline = 0, math.inf
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
        if any(code not in (None, 0, PEER_LOST) for code in codes):
            break
        if PEER_LOST in codes:
            deadline = min(deadline, time.monotonic() + PEER_LOST_GRACE)
        if passed_on < len(caught):
            deadline = min(deadline, time.monotonic() + SAVE_TIMEOUT)
            for process in processes:
                process.send_signal(caught[passed_on])
            passed_on += 1
        time.sleep(0.1)
    if not any(codes) and None not in codes:
        return None
    cause = min(codes, key=_cause_order)
    if cause is None:
        how = "did not exit"
    else:
        how = "lost the connection to another process" if cause == PEER_LOST else describe_exit(cause)
    return f"Process {codes.index(cause)} of {len(codes)} {how}"


def _cause_order(code: int | None) -> int:
    """Sort key of exit codes, most likely cause first: signals, errors, PEER_LOST, running, finished."""
    if code in (PEER_LOST, None, 0):
        return (PEER_LOST, None, 0).index(code) + 2
    return int(code > 0)


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """Terminate the remaining processes; kill the process groups of those that do not exit."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + EXIT_TIMEOUT
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Replace the handlers of stop signals; yields the list that received signals are appended to."""
    caught: list[int] = []
    before = {}
    with contextlib.suppress(ValueError):  # only the main thread can set handlers
        for number in end_signals():
            before[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(file: Path) -> Outcome | None:
    return Outcome(**json.loads(file.read_text())) if file.exists() else None
