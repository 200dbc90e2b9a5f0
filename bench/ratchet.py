"""Prove that a refactoring changed no number: train small cells at a base revision and here, and compare every tensor.

    python bench/ratchet.py BASE                    all cells on the CPU: one line each, exit code 1 if any differs
    python bench/ratchet.py BASE --cells ppo dqn    some of them
    python bench/ratchet.py BASE --device cuda      also kernels per iteration and peak memory
    python bench/ratchet.py BASE --workloads        only the workloads of bench/workloads.py, base and here alternately
    python bench/ratchet.py --list                  list the cells

A cell is a short training (world x algorithm x option) through the command line, in a separate process and run folder.
It compares the SHA-256 of every tensor of the last checkpoint and all metrics except times. BASE is a revision, copied
from git to a temporary folder, or the folder of one; kernels share Warp's cache. bench/ratchet_names.json lists names
that changed since BASE: flags (new name: old name), tensors and metrics (pattern of the old name, replacement).
"""

import argparse
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAMES = Path(__file__).with_name("ratchet_names.json")
ITERATIONS = 6
WORKLOADS = (
    "cartpole_ppo_4096",
    "cartpole_ppo_16384",
    "tag_grid_5x2000",
    "tag_grid_1000x2000",
    "tag_continuous_110x100",
)
REPEATS = 3
"""Measurements of each workload at the base and here, alternately; the fastest counts."""
SLOWER = 0.97
"""Smallest ratio of speeds that passes."""
MINUTES = 10
"""Maximum duration of one cell at one revision."""


@dataclass(frozen=True)
class Cell:
    """One short training, with flags of this revision; `steps` are env steps of one iteration."""

    world: str
    flags: str
    num_envs: int = 64
    rollout_steps: int = 16
    metrics: bool = True
    """False: the number of rows depends on threads."""

    def words(self, iterations: int, device: str, run_dir: Path) -> list[str]:
        steps = self.num_envs * self.rollout_steps * iterations
        sizes = f"--num-envs {self.num_envs} --rollout-steps {self.rollout_steps} --total-steps {steps}"
        rest = f"--checkpoint-every {steps} --eval-episodes 0 --log-every-seconds 0 --compile off --threads 1"
        return [
            "train",
            self.world,
            *f"{self.flags} {sizes} {rest} --device {device}".split(),
            "--run-dir",
            str(run_dir),
        ]


Q = "--batch-size 128 --learning-starts 1024 --buffer-size 20000"

CELLS = {
    "ppo": Cell("cartpole", "--algo ppo"),
    "ppo-normalized": Cell("pendulum", "--algo ppo --normalize-obs --normalize-reward"),
    "a2c": Cell("acrobot", "--algo a2c"),
    "dqn": Cell("cartpole", f"--algo dqn {Q}"),
    "rainbow": Cell("mountain-car", f"--algo rainbow {Q}"),
    "r2d2": Cell("cartpole", "--algo r2d2 --burn-in 16 --sequence-length 16 --batch-size 64 --learning-starts 2048"),
    "sac": Cell("pendulum", f"--algo sac {Q}"),
    "td3": Cell("mountain-car-continuous", f"--algo td3 {Q}"),
    "appo": Cell("cartpole", "--algo appo --max-policy-lag 0"),
    "impala": Cell("cartpole", "--algo impala --max-policy-lag 0"),
    "a3c": Cell("cartpole", "--algo a3c --actors 1", metrics=False),
    "groups": Cell("tag-continuous", "--algo ppo", num_envs=16),
    "one-policy": Cell("tag-grid", "--algo a2c --one-policy", num_envs=32),
    "mixed": Cell("pandemic", "--algo ppo", num_envs=8),
    "recurrent": Cell("cartpole", "--algo ppo --rnn lstm --rnn-size 32"),
    "stacked": Cell("cartpole", "--algo ppo --frame-stack 4 --action-repeat 2 --time-limit 100"),
    "host": Cell("gym:CartPole-v1", "--algo ppo --vec-backend processes --env-schedule alternating", num_envs=16),
    "host-q": Cell("gym:CartPole-v1", f"--algo dqn {Q} --env-schedule lockstep", num_envs=16),
    "pointnav": Cell("pointnav", "--algo ppo", num_envs=16),
    "processes": Cell("cartpole", "--algo ppo --processes 2"),
}


@dataclass
class Names:
    """Names that changed since the base."""

    flags: dict[str, str] = field(default_factory=dict)
    """New name of a flag -> old name."""
    tensors: list[list[str]] = field(default_factory=list)
    metrics: list[list[str]] = field(default_factory=list)
    """Patterns of old names, and replacements."""

    def old_words(self, words: list[str]) -> list[str]:
        return [self.flags.get(word, word) for word in words]


@dataclass
class Outcome:
    """Results of one training."""

    tensors: dict[str, str]
    """SHA-256 by name."""
    metrics: list[dict[str, float]]
    device: dict[str, float]
    """On a GPU: kernels and host launches per iteration, and peak memory [bytes]."""


def checkout(revision: str, folder: Path) -> None:
    """Copy the tracked files of a revision to a folder."""
    archive = subprocess.run(["git", "archive", "--format=tar", revision], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        sys.exit(f"ratchet: git has no revision {revision!r}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")


def _environment(tree: Path) -> dict[str, str]:
    """Environment variables with which Python imports from a tree first."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])}


def train(tree: Path, words: list[str], log: Path, report: Path | None = None) -> None:
    """Run the command line of a tree in a separate process."""
    program = ["-m", "shoal"] if report is None else [str(Path(__file__).resolve()), "--profile", str(report), "--"]
    environment = {**_environment(tree), "PYTHONHASHSEED": "0"}
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, *program, *words],
            cwd=log.parent,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=60 * MINUTES,
            check=False,
        )
    if done.returncode:
        raise RuntimeError("\n".join(log.read_text().strip().splitlines()[-3:]) or f"exit code {done.returncode}")


def tensors_of(file: Path) -> Iterator[tuple[str, str]]:
    """Name and SHA-256 (of type, shape and bytes) of every tensor in a safetensors file."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        digest = hashlib.sha256(f"{entry['dtype']}{entry['shape']}".encode())
        digest.update(data[8 + length + start : 8 + length + stop])
        yield name, digest.hexdigest()


def run_cell(cell: Cell, tree: Path, device: str, folder: Path, old: Names | None) -> Outcome:
    """Train a cell in a tree; `old` renames new flags to the tree's."""

    def words(iterations: int, run: Path) -> list[str]:
        asked = cell.words(iterations, device, run)
        return asked if old is None else old.old_words(asked)

    folder.mkdir(parents=True)
    run = folder / "run"
    train(tree, words(ITERATIONS, run), folder / "train.log")
    tensors = dict(pair for file in sorted((run / "last").glob("*.safetensors")) for pair in tensors_of(file))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]
    if not tensors or (cell.metrics and len(metrics) < ITERATIONS):
        raise RuntimeError(f"the run left {len(tensors)} tensors and {len(metrics)} rows of metrics")
    metrics = metrics if cell.metrics else []
    costs: dict[str, float] = {}
    if device.startswith("cuda") and "--processes" not in cell.flags:
        counts = []
        for iterations in (ITERATIONS, 2 * ITERATIONS):
            report = folder / f"{iterations}.json"
            train(tree, words(iterations, folder / f"run{iterations}"), folder / f"{iterations}.log", report)
            counts.append(json.loads(report.read_text()))
        costs = {name: (counts[1][name] - counts[0][name]) / ITERATIONS for name in ("kernels", "launches")}
        costs["peak_memory"] = counts[0]["peak_memory"]
    return Outcome(tensors, metrics, costs)


def profile(report: Path, words: list[str]) -> int:
    """Train in this process; count kernels and launches on the GPU."""
    import torch
    from torch.profiler import ProfilerActivity

    from shoal.cli import main as shoal

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        code = shoal(words)
        torch.cuda.synchronize()
    events = [event.name() for event in profiler.profiler.kineto_results.events()]  # type: ignore[union-attr]
    launches = sum(name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch")) for name in events)
    skipped = ("cuda", "cu", "Mem", "Context", "Activity", "Lazy", "Instrumentation", "Resource", "Iteration")
    kernels = sum(not name.startswith(skipped) for name in events)
    peak = torch.cuda.max_memory_allocated()
    report.write_text(json.dumps(dict(kernels=kernels, launches=launches, peak_memory=peak)))
    return code


def rename(name: str, rules: list[list[str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def differences(base: Outcome, here: Outcome, names: Names) -> list[str]:
    """One line for each difference."""
    before = {rename(name, names.tensors): value for name, value in base.tensors.items()}
    found = [f"tensor {name}: only at the base" for name in sorted(before.keys() - here.tensors.keys())]
    found += [f"tensor {name}: only here" for name in sorted(here.tensors.keys() - before.keys())]
    found += [
        f"tensor {name}: another value"
        for name in sorted(before.keys() & here.tensors.keys())
        if before[name] != here.tensors[name]
    ]
    rows = [{rename(name, names.metrics): value for name, value in row.items()} for row in base.metrics]
    if len(rows) != len(here.metrics):
        found.append(f"metrics: {len(rows)} rows at the base, {len(here.metrics)} here")
    for row, (then, now) in enumerate(zip(rows, here.metrics, strict=False)):
        wrong = [name for name in sorted(then.keys() | now.keys()) if not _same(then.get(name), now.get(name))]
        found += [f"metric {name} in row {row}: {then.get(name)} at the base, {now.get(name)} here" for name in wrong]
    for name, value in base.device.items():
        if here.device[name] > value:
            found.append(f"{name}: {value:g} at the base, {here.device[name]:g} here")
    return found


def _same(a: Any, b: Any) -> bool:
    return a == b or (a != a and b != b and a is not None and b is not None)


def compare_cells(cells: list[str], base: Path, device: str, names: Names, folder: Path) -> bool:
    """Print one line for each cell; returns whether all are equal."""
    equal = True
    width = max(map(len, cells))
    for name in cells:
        try:
            # In parallel: each has one thread, and speed is not compared.
            with ThreadPoolExecutor(2) as pool:
                there = pool.submit(run_cell, CELLS[name], base, device, folder / name / "base", names)
                now = run_cell(CELLS[name], ROOT, device, folder / name / "here", None)
                then = there.result()
        except (RuntimeError, subprocess.TimeoutExpired, OSError) as error:
            equal = False
            print(f"{name:{width}}  FAILED     {error}", flush=True)
            continue
        found = differences(then, now, names)
        costs = "".join(f", {what} {value:g}" for what, value in now.device.items())
        verdict = "DIFFERENT" if found else "equal    "
        print(f"{name:{width}}  {verdict}  {len(now.tensors)} tensors, {len(now.metrics)} rows{costs}", flush=True)
        for line in found[:12]:
            print(f"{'':{width}}    {line}")
        if len(found) > 12:
            print(f"{'':{width}}    and {len(found) - 12} more")
        equal = equal and not found
    return equal


def compare_workloads(base: Path, device: str, folder: Path) -> bool:
    """Compare speeds of the workloads at the base and here; returns whether none is slower by more than 3 %."""
    good = True
    for name in WORKLOADS:
        best: dict[str, float] = {}
        for turn in range(REPEATS):
            for where, tree in (("base", base), ("here", ROOT)):
                out = folder / f"{name}.{where}.{turn}.jsonl"
                command = [
                    sys.executable,
                    str(tree / "bench" / "workloads.py"),
                    name,
                    "--device",
                    device,
                    "--out",
                    str(out),
                ]
                done = subprocess.run(command, env=_environment(tree), capture_output=True, text=True, check=False)
                if done.returncode:
                    print(f"{name}: FAILED at the {where}: {done.stderr.strip().splitlines()[-1:]}")
                    return False
                row = json.loads(out.read_text().splitlines()[-1])
                best[where] = max(best.get(where, 0.0), row["steps_per_second"])
        ratio = best["here"] / best["base"]
        good = good and ratio >= SLOWER
        print(f"{name:24}  base {best['base']:.4g}  here {best['here']:.4g} env steps/s  ratio {ratio:.3f}", flush=True)
    return good


def main() -> int:
    """Compare; returns 0 if nothing differs."""
    if sys.argv[1:2] == ["--profile"]:
        return profile(Path(sys.argv[2]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", metavar="BASE", help="revision, or folder of a revision")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workloads", action="store_true", help="compare speeds instead of numbers")
    parser.add_argument("--list", action="store_true", help="list the cells")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep run folders and logs here")
    options = parser.parse_args()
    if options.list:
        for name, cell in CELLS.items():
            print(f"{name:16} {cell.world} {cell.flags}")
        return 0
    if options.base is None:
        parser.error("BASE is missing: make ratchet BASE=REVISION")
    names = Names(**json.loads(NAMES.read_text()))
    with tempfile.TemporaryDirectory(prefix="ratchet-") as box:
        base = Path(options.base).resolve()
        if not base.is_dir():
            base = Path(box) / "base"
            checkout(options.base, base)
        folder = (options.keep or Path(box) / "runs").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if options.workloads:
            return 0 if compare_workloads(base, options.device, folder) else 1
        return 0 if compare_cells(options.cells, base, options.device, names, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
