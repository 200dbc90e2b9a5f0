"""Kill trainings at random moments and resume them; train for an hour and look for leaks.

make soak                                        about an hour and a half on two cores
python -m tests.soak --cells ppo dqn --kills 5   some cells
python -m tests.soak --minutes 0                 kills alone
"""

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from tests.soak.cells import CELLS
from tests.soak.kills import Outcome, kill_and_resume, train_whole
from tests.soak.leaks import watch

WATCHED = ["ppo", "dqn", "appo-lag-2", "host-alternating", "pointnav", "ppo-2-processes"]
"""Cells that are watched for leaks."""


def killed(name: str, kills: int, seed: int, box: Path) -> Outcome:
    """Train a cell whole, then with kills."""
    cell = CELLS[name]
    (box / name).mkdir()
    try:
        seconds = train_whole(cell, box / name / "whole")
    except RuntimeError as error:
        return Outcome([str(error)])
    return kill_and_resume(cell, box / name / "whole", seconds, box / name / "run", kills, Random(f"{seed}/{name}"))


def main() -> int:
    """Print a line for each cell; 0 if every run resumes, equal where promised, and nothing grows."""
    parser = argparse.ArgumentParser(
        "python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    parser.add_argument("--kills", type=int, default=3, help="kills of each training (default: 3)")
    parser.add_argument("--minutes", type=float, default=60, help="minutes of training in all, watched (default: 60)")
    parser.add_argument("--watched", nargs="+", choices=CELLS, default=WATCHED, metavar="CELL")
    parser.add_argument("--seed", type=int, default=1, help="which moments (default: 1)")
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time (default: 2)")
    options = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="soak-") as box, ThreadPoolExecutor(options.workers) as pool:
        if options.kills:
            outcomes = pool.map(lambda name: killed(name, options.kills, options.seed, Path(box)), options.cells)
            total = 0
            for name, found in zip(options.cells, outcomes, strict=True):
                bad += bool(found.problems)
                total += found.kills
                ends = {None: "resumed", True: "resumed, equal", False: "resumed, DIFFERENT"}[found.equal]
                early = f" ({found.before_checkpoint} before a checkpoint)" if found.before_checkpoint else ""
                print(f"{name:20}{found.kills} kills{early}, {'FAILED' if found.problems else ends}", flush=True)
                for problem in found.problems:
                    print(f"    {problem}", flush=True)
            print(f"{total} kills of {len(options.cells)} trainings, {bad} failed", flush=True)
        if options.minutes:
            share = options.minutes / len(options.watched)
            watched = pool.map(lambda name: watch(CELLS[name], share), options.watched)
            for name, (problems, line) in zip(options.watched, watched, strict=True):
                bad += bool(problems)
                print(f"{name:20}{share:.3g} min, {line}{''.join(f'; {problem}' for problem in problems)}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
