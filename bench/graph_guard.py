"""Check on a CPU that a GPU can record all CUDA graphs: see bench/guard.py.

    python bench/graph_guard.py                     all cells of the ratchet, one line each; exit code 1 for a finding
    python bench/graph_guard.py --cells ppo dqn     some of them
    python bench/graph_guard.py --replay            replay recordings and compare numbers with unguarded training

A cell is a short training with a final evaluation, through the command line, in this process.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.guard import Guard
from bench.ratchet import CELLS, Cell, tensors_of

ITERATIONS = 6
EPISODES = 2
"""Episodes of the final evaluation."""
RANKS = "--processes"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
MINUTES = 10
"""Maximum duration of a cell with several processes."""


@dataclass
class Result:
    """Findings and counts of one cell."""

    graphs: int = 0
    """Number of functions that were recorded and called again."""
    operations: int = 0
    """Number of torch operations and Warp launches in their recordings."""
    findings: list[str] = field(default_factory=list)

    def line(self) -> str:
        verdict = "ok" if not self.findings and self.graphs else "FAILED"
        return f"{self.graphs} graphs, {self.operations} ops guarded, {verdict}"


def words_of(cell: Cell, run: Path, iterations: int, episodes: int) -> list[str]:
    """The command line of a cell, with an evaluation and for a single process."""
    words = cell.words(iterations, "cpu", run)
    words[words.index("--eval-episodes") + 1] = str(episodes)
    if RANKS in words:  # the environment of a launcher gives their number
        place = words.index(RANKS)
        del words[place : place + 2]
    return words


def guard_cell(
    cell: Cell, folder: Path, iterations: int = ITERATIONS, episodes: int = EPISODES, mode: str = "guard"
) -> Result:
    """Train a cell; `mode`: "guard", "replay" (guarded, with recordings replayed) or "plain" (unguarded)."""
    count = int(cell.flags.split(f"{RANKS} ")[1].split()[0]) if RANKS in cell.flags else 1
    if count > 1 and "RANK" not in os.environ:
        return _in_ranks(cell, folder, mode, count)
    guard = Guard(replay=mode == "replay")
    with contextlib.nullcontext() if mode == "plain" else guard:
        _train(words_of(cell, folder / "run", iterations, episodes))
    return Result(len(guard.recorded), guard.operations, [str(finding) for finding in guard.findings])


def replay_cell(cell: Cell, folder: Path, iterations: int = ITERATIONS, episodes: int = EPISODES) -> Result:
    """Train a cell with and without replays, and compare all numbers."""
    result = guard_cell(cell, folder / "replay", iterations, episodes, "replay")
    guard_cell(cell, folder / "plain", iterations, episodes, "plain")
    replayed, plain = (_numbers(folder / name / "run", cell) for name in ("replay", "plain"))
    wrong = [name for name in {**plain, **replayed} if replayed.get(name) != plain.get(name)]
    result.findings += [f"{name} differs from a training without graphs" for name in wrong]
    return result


def _numbers(run: Path, cell: Cell) -> dict[str, Any]:
    """Numbers of a finished run: hashes of its tensors, and metrics and scores without times."""
    files = sorted((run / "last").glob("*.safetensors"))
    found: dict[str, Any] = {f"tensor {name}": digest for file in files for name, digest in tensors_of(file)}
    for file in ("metrics.jsonl", "eval.jsonl") if cell.metrics else ():
        for number, line in enumerate((run / file).read_text().splitlines()):
            row = {name: value for name, value in json.loads(line).items() if "time" not in name}
            found.update({f"{name} in row {number} of {file}": json.dumps(value) for name, value in row.items()})
    return found


def _train(words: list[str]) -> None:
    from shoal.cli import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), warnings.catch_warnings():
        code = main(words)
    if code:
        raise RuntimeError("\n".join(output.getvalue().strip().splitlines()[-3:]) or f"exit code {code}")


def _in_ranks(cell: Cell, folder: Path, mode: str, count: int) -> Result:
    """The same in several processes of this program, with one guard each."""
    name = next(name for name, other in CELLS.items() if other is cell)
    folder.mkdir(parents=True)
    shared = dict(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, SHOAL_STORE=folder / "store", GLOO_SOCKET_IFNAME=LOOPBACK)
    command = [sys.executable, __file__, "--rank", name, str(folder), mode]
    processes = []
    try:
        for rank in range(count):
            environment = {key: str(value) for key, value in dict(shared, RANK=rank, LOCAL_RANK=rank).items()}
            processes.append(subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate(timeout=60 * MINUTES)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"processes ended with exit codes {[process.returncode for process in processes]}")
    results = [Result(**json.loads(output.splitlines()[-1])) for output in outputs]
    findings = list(dict.fromkeys(finding for result in results for finding in result.findings))
    return Result(sum(r.graphs for r in results), sum(r.operations for r in results), findings)


def guard_cells(names: list[str], folder: Path, replay: bool) -> Iterator[tuple[str, Result]]:
    """Guard cells one after the other; yields names and results."""
    for name in names:
        try:
            cell = CELLS[name]
            yield name, replay_cell(cell, folder / name) if replay else guard_cell(cell, folder / name)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            yield name, Result(findings=[f"the training failed: {error}"])


def main() -> int:
    """Guard the cells; returns 0 if there is no finding."""
    if sys.argv[1:2] == ["--rank"]:
        name, folder, mode = sys.argv[2:]
        result = guard_cell(CELLS[name], Path(folder), mode=mode)
        print(json.dumps(vars(result)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    parser.add_argument(
        "--replay", action="store_true", help="replay recordings and compare with an unguarded training"
    )
    options = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory(prefix="graph-guard-") as folder:
        for name, result in guard_cells(options.cells, Path(folder), options.replay):
            print(f"{name:{max(map(len, CELLS))}}  {result.line()}", flush=True)
            for finding in result.findings:
                print(f"    {finding}")
            good = good and result.line().endswith("ok")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
