"""Tests and benchmarks that need a GPU: tests/gpu, bench/workloads.py and bench/nav.py.

    python bench/gpu_check.py           all parts, one after the other
    python bench/gpu_check.py 2         one part: at most nine minutes
    python bench/gpu_check.py --list    the parts

Every row runs in a separate process. The JSON lines are written to build/gpu_check_PART.jsonl, for bench/results/; the
printed table compares them with an NVIDIA H200. The exit code is 1 if tests or rows fail, 2 without a GPU; it does not
depend on speeds.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 530
"""Maximum duration of a part."""
TEST_WORKERS = 6

PARTS: dict[int, tuple[str, list[str]]] = {
    1: ("tests", ["tests/gpu"]),
    2: (
        "workloads",
        [
            "cartpole_ppo_4096",
            "cartpole_ppo_16384",
            "tag_grid_5x2000",
            "tag_grid_1000x2000",
            "tag_continuous_110x100",
        ],
    ),
    3: (
        "workloads",
        [
            "cartpole_a2c_10000",
            "cartpole_stepping_1048576",
            "tag_grid_5x2000_ppo",
            "tag_grid_5x20000",
            "tag_grid_5x20000_ppo",
            "tag_grid_1000x2000_ppo",
            "tag_continuous_110x100_ppo",
        ],
    ),
    4: ("nav", ["depth_1024", "depth_1024_ours", "rgb_1024"]),
    5: ("nav", ["depth_2048", "depth_4096", "rgbd_1024", "blind_1024"]),
}
"""Number -> program in bench/ and its rows."""

H200 = {
    "cartpole_ppo_4096": 28.2e6,
    "cartpole_ppo_16384": 68.0e6,
    "tag_grid_5x2000": 65.0e6,
    "tag_grid_1000x2000": 1.585e6,
    "tag_continuous_110x100": 574e3,
    "depth_1024": 239.5e3,
    "depth_1024_ours": 155e3,
}
"""Env steps or frames per second of an NVIDIA H200."""


def run(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Exit code and output of a command; None as the code if it and its children were killed after `seconds`."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(max(1.0, seconds))
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return code, log.read()


def run_tests(deadline: float) -> tuple[bool, str]:
    """Run tests/gpu; returns whether they pass, and pytest's last line."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-n", str(TEST_WORKERS), "-m", "not slow"]
    code, output = run(command, deadline - time.monotonic())
    lines = output.strip().splitlines() or ["no output"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    last = lines[-1] if code is not None else f"not finished in {SECONDS} s"
    return code == 0 and bool(re.search(r"\d+ passed", last)), "\n".join([*failed, last])


def run_row(program: str, name: str, deadline: float) -> tuple[dict[str, Any] | None, str]:
    """Measure one row; returns its JSON, or None and the reason."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.jsonl"
        command = [sys.executable, str(ROOT / "bench" / f"{program}.py"), name, "--device", "cuda", "--out", str(out)]
        left = deadline - time.monotonic()
        if left < 1:
            return None, "not started: the part has no time left"
        code, output = run(command, left)
        if code is None:
            return None, "not finished: the part has no time left"
        if code or not out.is_file():
            return None, (output.strip().splitlines() or [f"exit code {code}"])[-1]
        return json.loads(out.read_text().splitlines()[-1]), ""


def line_of(name: str, row: dict[str, Any]) -> str:
    """A row of the table: speed, the H200's, and the ratio."""
    speed = row.get("frames_per_second", row.get("steps_per_second"))
    expected = H200.get(name)
    ratio = f"{expected:,.0f} | {speed / expected:.3f}" if expected else "- | -"
    return f"| {name} | {speed:,.0f} | {ratio} | {row['device']} |"


def run_part(part: int) -> bool:
    """Run and print one part; returns whether nothing failed."""
    program, names = PARTS[part]
    deadline = time.monotonic() + SECONDS
    print(f"Part {part}: {program}", flush=True)
    if program == "tests":
        good, report = run_tests(deadline)
        print(report, flush=True)
        return good
    print("| row | per second | H200 | ratio | device |\n|---|---|---|---|---|", flush=True)
    rows, good = [], True
    for name in names:
        row, reason = run_row(program, name, deadline)
        if row is None:
            good = False
            print(f"| {name} | {reason} | | | |", flush=True)
        else:
            rows.append(row)
            print(line_of(name, row), flush=True)
    file = ROOT / "build" / f"gpu_check_{part}.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{len(rows)} JSON lines are in {file}.", flush=True)
    return good


def main() -> int:
    """Run parts; returns 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", type=int, choices=PARTS, help="numbers of parts (default: all)")
    parser.add_argument("--list", action="store_true", help="list the parts")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{part}  {program}: {' '.join(names)}" for part, (program, names) in PARTS.items()))
        return 0
    import torch

    if not torch.cuda.is_available():
        print(
            "gpu-check: this machine has no CUDA GPU; make gpu-build checks the kernels without one.", file=sys.stderr
        )
        return 2
    return 0 if all([run_part(part) for part in options.parts or PARTS]) else 1


if __name__ == "__main__":
    sys.exit(main())
