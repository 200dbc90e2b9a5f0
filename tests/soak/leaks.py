"""Train for long and watch memory, descriptors, threads and processes: they must not grow."""

import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

from tests.soak.cells import Cell
from tests.soak.kills import shoal_command

INTERVAL = 2.0
"""Seconds between two looks."""

GROWTH, FLOOR = 0.01, 8 * 2**20
"""How much larger the last third of the looks may be than the second one: a fraction, or bytes."""

STEPS = 10**12
CHECKPOINTS = 200_000
"""Env steps between two checkpoints, each with an evaluation."""


@dataclass
class Look:
    """A process and its children at one time."""

    memory: int
    """Bytes that are theirs alone, and their part of what they share."""
    descriptors: int
    threads: int
    processes: int


def look_at(pid: int) -> Look:
    """Sums over a process and all below it; those that end meanwhile are left out."""
    found = Look(0, 0, 0, 0)
    waiting = [pid]
    while waiting:
        place = Path(f"/proc/{waiting.pop()}")
        try:
            memory = int(
                next(s for s in (place / "smaps_rollup").read_text().splitlines() if s[:4] == "Pss:").split()[1]
            )
            descriptors, threads = len(os.listdir(place / "fd")), os.listdir(place / "task")
            children = [child for task in threads for child in (place / "task" / task / "children").read_text().split()]
        except (OSError, StopIteration):
            continue
        found.memory += memory * 1024
        found.descriptors += descriptors
        found.threads += len(threads)
        found.processes += 1
        waiting += map(int, children)
    return found


def watch(cell: Cell, minutes: float) -> tuple[list[str], str]:
    """Train for some minutes: what grew, and a line of figures."""
    with tempfile.TemporaryDirectory(prefix="soak-") as box:
        words = cell.words(STEPS)
        words[words.index("--checkpoint-every") + 1] = str(CHECKPOINTS)
        run, log = Path(box) / "run", Path(box) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                shoal_command("train", *words, "--run-dir", str(run), "--quiet"), stdout=output, stderr=output
            )
        looks = []
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end and process.poll() is None:
            time.sleep(INTERVAL)
            if (run / "metrics.jsonl").exists():
                looks.append(look_at(process.pid))
        if process.poll() is not None:
            return [f"ended with {process.returncode}: {log.read_text()[-500:]}"], ""
        process.terminate()
        code = process.wait(120)
        steps = (run / "last").resolve().name
        problems = [] if code == 143 else [f"exit code {code} after SIGTERM: {log.read_text()[-500:]}"]
    return problems + growth(looks), f"{steps}, {len(looks)} looks: {summary(looks)}"


def thirds(looks: list[Look], name: str) -> tuple[float, float]:
    """Medians of the second and of the last third."""
    values = [getattr(each, name) for each in looks]
    third = len(values) // 3
    return statistics.median(values[third : 2 * third]), statistics.median(values[2 * third :])


def growth(looks: list[Look]) -> list[str]:
    """What grew from the second to the last third."""
    if len(looks) < 9:
        return [f"only {len(looks)} looks"]
    problems = []
    for item in fields(Look):
        before, after = thirds(looks, item.name)
        limit = before + max(before * GROWTH, FLOOR) if item.name == "memory" else before
        if after > limit:
            problems.append(f"{item.name} grew from {before:,.0f} to {after:,.0f}")
    return problems


def summary(looks: list[Look]) -> str:
    """Medians of the second and last thirds, for people."""
    if len(looks) < 9:
        return "too few"
    parts = []
    for item in fields(Look):
        before, after = thirds(looks, item.name)
        shown = (
            f"{before / 2**20:.1f} -> {after / 2**20:.1f} MiB"
            if item.name == "memory"
            else f"{before:.0f} -> {after:.0f}"
        )
        parts.append(f"{item.name} {shown}")
    return ", ".join(parts)
