"""Kill trainings at random moments, resume them, and compare with one that was left alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file

from shoal.runs.checkpoint import latest_steps
from tests.soak.cells import Cell

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What kills: mostly without warning."""

ATTEMPTS = 4
"""How often a training is begun, if it ends before all of its kills."""

PATIENCE = 600
"""Seconds for one process."""


@dataclass
class Outcome:
    """What became of one training after its kills."""

    problems: list[str]
    kills: int = 0
    before_checkpoint: int = 0
    """Kills before there was a checkpoint; such a run begins again."""
    equal: bool | None = None
    """Whether all tensors are those of the uninterrupted run; None if that is not promised."""


def shoal_command(*words: str) -> list[str]:
    """The command line of this installation."""
    return [sys.executable, "-m", "shoal", *words]


def last_tensors(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run's last checkpoint."""
    folder = run / "last"
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def train_whole(cell: Cell, run: Path) -> float:
    """Train without a break; the seconds that it took."""
    start = time.monotonic()
    words = shoal_command("train", *cell.words(), "--run-dir", str(run), "--quiet")
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-500:]}")
    return time.monotonic() - start


def kill_and_resume(cell: Cell, whole: Path, seconds: float, run: Path, kills: int, rng: Random) -> Outcome:
    """Train with kills at random moments of the `seconds` that a run takes, resume until the end, and compare.

    A training that ends before all of its kills starts again, with earlier ones.
    """
    found = Outcome([])
    for attempt in range(ATTEMPTS):
        shutil.rmtree(run, ignore_errors=True)
        if _train_with_kills(cell, seconds / 2**attempt, run, kills, rng, found):
            _compare(cell, whole, run, found)
        if found.problems or found.kills >= kills:
            break
    return found


def _train_with_kills(cell: Cell, seconds: float, run: Path, kills: int, rng: Random, found: Outcome) -> bool:
    """Train to the end, with the kills that are left; whether it came to the end."""
    while True:
        began = any((run / "checkpoints").glob("step_*"))
        command = ["resume", str(run)] if began else ["train", *cell.words(), "--run-dir", str(run)]
        number = rng.choice(SIGNALS) if found.kills < kills else None
        code, said = _run(shoal_command(*command, "--quiet"), number, rng.uniform(0.1, 1.0) * seconds)
        if "Traceback" in said:
            found.problems.append(f"traceback after {command[0]}: {said[-1500:]}")
        if code == 0:
            return True
        if number is None or code not in (-number, 128 + number):
            found.problems.append(f"exit code {code} of {command[0]} after signal {number}: {said[-500:]}")
            return False
        found.kills += 1
        if not any((run / "checkpoints").glob("step_*")):
            found.before_checkpoint += 1
            _refuses_to_resume(run, found)
        elif latest_steps(run / "checkpoints") >= cell.steps:  # killed after its last checkpoint
            return True


def _run(command: list[str], number: int | None, delay: float) -> tuple[int, str]:
    """Run a command in a process group, which gets a signal after a delay: exit code, and what was said."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(PATIENCE if number is None else delay)
        except subprocess.TimeoutExpired:
            if number is None:
                os.killpg(process.pid, signal.SIGKILL)
            elif number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 1, f"did not end within {PATIENCE} s of signal {number}"
        output.seek(0)
        return code, output.read()


def _refuses_to_resume(run: Path, found: Outcome) -> None:
    """A run that has no checkpoint is refused in one sentence."""
    code, said = _run(shoal_command("resume", str(run)), None, 0)
    if code != 2 or len(said.strip().splitlines()) != 1:
        found.problems.append(f"resume without a checkpoint: exit code {code}: {said[-500:]}")


def _compare(cell: Cell, whole: Path, run: Path, found: Outcome) -> None:
    """The end of a resumed run and of one that was left alone; metrics without gaps or repeats."""
    theirs, ours = last_tensors(whole), last_tensors(run)
    if theirs.keys() != ours.keys():
        found.problems.append(f"tensors differ in name: {sorted(theirs.keys() ^ ours.keys())[:5]}")
    different = [name for name in sorted(theirs.keys() & ours.keys()) if not _same(theirs[name], ours[name])]
    if cell.equal:
        found.equal = not different
        if different:
            found.problems.append(f"{len(different)} of {len(theirs)} tensors differ: {', '.join(different[:5])}")
    steps = [json.loads(line)["steps"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    if steps != sorted(steps):
        found.problems.append(f"metrics go back: {steps}")
    if steps[-1] < cell.steps:
        found.problems.append(f"the last metrics are of {steps[-1]} of {cell.steps} steps")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
