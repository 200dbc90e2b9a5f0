"""Worker processes that read inputs, watched: a worker that dies or does not answer has crashed or hangs."""

import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.fuzz.readers import make_base
from tests.fuzz.worker import FINE, REFUSED, TRACEBACK

HANG, CRASH = "hang", "crash"
FAILURES = (TRACEBACK, HANG, CRASH)
DEADLINE = 120
"""Seconds for one input."""
MEMORY = 10 * 2**30
"""Bytes of address space of a worker."""
WORN = 3 * 2**30, 5 * 2**30
"""Bytes in memory and of address space beyond which a worker is replaced: the next input has the rest of the limit."""

Counts = dict[str, Counter]


class Worker:
    """One process, started again after it died or was killed."""

    def __init__(self, seed: int, base: Path, folder: Path, environment: dict[str, str]):
        self._words = [sys.executable, "-m", "tests.fuzz.worker", str(seed), str(base), str(folder)]
        self._environment = environment
        self._said = folder.with_suffix(".log")
        self._process: subprocess.Popen | None = None

    def read(self, reader: str, number: int) -> dict[str, Any]:
        """The verdict on one input."""
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{reader} {number}\n".encode())
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], DEADLINE)
        line = process.stdout.readline() if ready else b""
        if line:
            if any(size > limit for size, limit in zip(_sizes(process.pid), WORN, strict=True)):
                self.close()
            return json.loads(line)
        verdict, detail = (CRASH, f"exit code {process.wait()}") if ready else (HANG, f"no answer in {DEADLINE} s")
        self.close()
        detail += f"\n{self._said.read_text(errors='replace')[-2000:]}"
        return dict(verdict=verdict, detail=detail, label="", intact=False)

    def _start(self) -> None:
        words = ["prlimit", f"--as={MEMORY}", *self._words]
        with self._said.open("w") as log:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def close(self) -> None:
        """End the process and all that it has started."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None


def _sizes(pid: int) -> tuple[int, int]:
    """Bytes of a process in memory, and of its address space."""
    space, memory = Path(f"/proc/{pid}/statm").read_text().split()[:2]
    return int(memory) * os.sysconf("SC_PAGESIZE"), int(space) * os.sysconf("SC_PAGESIZE")


def fuzz(
    wanted: list[tuple[str, int]], seed: int, workers: int, show: bool = False
) -> tuple[Counts, list[dict[str, Any]], list[str]]:
    """Read the wanted inputs: counts for each reader, failures, and temporary files that were left behind."""
    waiting: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    for entry in wanted:
        waiting.put(entry)
    counts: Counts = defaultdict(Counter)
    failures: list[dict[str, Any]] = []
    lock = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as box:
        places = {name: Path(box) / name for name in ("base", "state", "cache", "tmp")}
        for place in places.values():
            place.mkdir()
        environment = os.environ | dict(
            XDG_STATE_HOME=str(places["state"]), SHOAL_CACHE=str(places["cache"]), TMPDIR=str(places["tmp"])
        )
        make_base(places["base"])

        def serve(number: int) -> None:
            worker = Worker(seed, places["base"], Path(box) / f"input{number}", environment)
            while not waiting.empty():
                try:
                    reader, entry = waiting.get_nowait()
                except queue.Empty:
                    break
                row = worker.read(reader, entry)
                with lock:
                    counts[reader]["tried"] += 1
                    counts[reader][row["verdict"]] += 1
                    counts[reader]["intact"] += row["intact"]
                    if row["verdict"] in FAILURES:
                        failures.append(dict(row, reader=reader, number=entry))
                    if show:
                        done = sum(each["tried"] for each in counts.values())
                        print(f"\r{done} of {len(wanted)}, {len(failures)} failures", end="", file=sys.stderr)
            worker.close()

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        leftovers = sorted(path.name for path in places["tmp"].iterdir() if path.name.startswith("shoal-"))
    return counts, failures, leftovers


def table(counts: Counts) -> str:
    """Counts as text: a line for each reader, then all."""
    columns = ("tried", "intact", REFUSED, FINE, TRACEBACK, HANG, CRASH)
    rows = [("reader", *columns)]
    total: Counter = Counter()
    for reader, each in counts.items():
        rows.append((reader, *(str(each[column]) for column in columns)))
        total.update(each)
    rows.append(("all", *(str(total[column]) for column in columns)))
    return "\n".join(f"{row[0]:20}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows)
