"""The run folder: config, metrics, checkpoints, videos; one process writes to it at a time."""

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from shoal.errors import ShoalError
from shoal.run.checkpoint import save_checkpoint, strip_checkpoint, write_whole
from shoal.run.config import Job

WHOLE_CHECKPOINTS = 2
"""So many of the newest can be gone on from: the last, and one more in case it is damaged."""

KEPT_CHECKPOINTS = 12
"""So many of the newest, and the best, can be played."""

LAUNCH = "launch: "
"""Begins the line of env.txt that names the launch of several processes."""


class RunFolder:
    """`runs/<world>__<algo>__s<seed>__<time>/` and everything in it."""

    def __init__(self, path: Path):
        self.path = path
        self._lock: TextIO | None = None

    @classmethod
    def create(cls, job: Job) -> "RunFolder":
        """A new folder for a job, locked; refuses one that already holds a run."""
        path = job.train.run_dir
        if path is None:
            world = re.sub(r"[^\w.-]+", "-", job.world.rpartition(":")[2].lower())
            stamp = time.strftime("%Y%m%d-%H%M%S")
            path = Path("runs") / f"{world}__{job.train.algo}__s{job.train.seed}__{stamp}"
            number = 1
            while path.exists():
                number += 1
                path = path.with_name(f"{world}__{job.train.algo}__s{job.train.seed}__{stamp}-{number}")
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ShoalError(f"The run folder {path} cannot be made: {error.strerror}.") from None
        folder.lock()
        if (path / "config.json").exists() and folder.holds_checkpoints:
            folder.unlock()
            raise ShoalError(f"{path} already holds a run; continue it with `shoal resume {path}` or choose another.")
        for old in ("metrics.jsonl", "eval.jsonl"):  # of a run that ended before its first checkpoint
            (path / old).unlink(missing_ok=True)
        (path / "config.json").write_text(job.to_json())
        (path / "env.txt").write_text(_environment())
        return folder

    @classmethod
    def open(cls, path: Path | str) -> "RunFolder":
        """An existing run, not locked: good for reading."""
        path = Path(path)
        if not path.is_dir():
            raise ShoalError(f"There is no run folder {path}; `ls runs` shows those there are.")
        return cls(path)

    def lock(self) -> None:
        """Become the one process that writes here, or refuse."""
        lock = (self.path / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ShoalError(f"Another process is writing to {self.path}; wait for it or choose another.") from None
        self._lock = lock

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def discard(self) -> None:
        """Take back a folder whose run never began."""
        self.unlock()
        for name in ("config.json", "env.txt", "lock"):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something of the user's is in it
            self.path.rmdir()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def holds_checkpoints(self) -> bool:
        """Whether there is anything to go on from."""
        return any(self.checkpoints.glob("step_*"))

    @property
    def launch(self) -> str | None:
        """What names the launch of several processes that made this folder, if one did."""
        file = self.path / "env.txt"
        for line in file.read_text().splitlines() if file.is_file() else ():
            if line.startswith(LAUNCH):
                return line.removeprefix(LAUNCH)
        return None

    def save(self, state: dict[str, torch.Tensor], iteration: int, steps: int) -> Path:
        """A checkpoint; `last` points to it. Of old ones the policies are kept, and in the end only the best."""
        path = save_checkpoint(self.checkpoints, state, iteration, steps)
        self._point("last", path)
        found = list(self._kept().values())
        for old in found[:-WHOLE_CHECKPOINTS]:
            with contextlib.suppress(OSError):  # this one is saved
                strip_checkpoint(old)
        for old in found[:-KEPT_CHECKPOINTS]:
            if old.name != self._target("best"):
                shutil.rmtree(old, ignore_errors=True)
        return path

    def record_score(self, steps: int, scores: Any, checkpoint: Path | None) -> bool:
        """Append to eval.jsonl; returns whether it is the best so far, which `best` then points to."""
        earlier = self.scores()
        row = dict(steps=steps, mean=scores.mean, groups={name: vars(s) for name, s in scores.items()})
        row["reports"] = {name: score.mean for name, score in scores.reports.items()}
        with (self.path / "eval.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        best = best_of([*earlier, row]) is row
        if best and checkpoint is not None:
            self._point("best", checkpoint)
        return best

    def scores(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "eval.jsonl")

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "metrics.jsonl")

    def trim(self, steps: int) -> None:
        """Forget what came after a checkpoint that is resumed from: later ones, which are damaged, are put aside."""
        for later, path in self._kept().items():
            if later > steps:
                aside = path.with_name(f"damaged_{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
        for name in ("metrics.jsonl", "eval.jsonl"):
            rows = [row for row in read_lines(self.path / name) if row["steps"] <= steps]
            if (self.path / name).exists():
                write_whole(self.path / name, "".join(json.dumps(row) + "\n" for row in rows))
        kept = self._kept()
        if steps in kept:
            self._point("last", kept[steps])
        scored = [row for row in self.scores() if row["steps"] in kept]
        if scored:
            self._point("best", kept[best_of(scored)["steps"]])
        else:
            (self.path / "best").unlink(missing_ok=True)

    def _kept(self) -> dict[int, Path]:
        """Env steps of the checkpoints that there are, in order, and where they are."""
        return {int(path.name.removeprefix("step_")): path for path in sorted(self.checkpoints.glob("step_*"))}

    def pick(self, which: str) -> Path:
        """The checkpoint that `best`, `last` or a step number names."""
        if which in ("best", "last"):
            name = self._target(which) or self._target("last")
            if name is None:
                raise ShoalError(f"{self.path} holds no checkpoint yet.")
            return self.checkpoints / name
        kept = self._kept()
        if which.isdecimal() and int(which) in kept:
            return kept[int(which)]
        known = ", ".join(map(str, kept))
        raise ShoalError(f"{self.path} has no checkpoint {which!r}; choose best, last or one of: {known}.")

    def _point(self, name: str, path: Path) -> None:
        temporary = self.path / f".{name}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(Path("checkpoints") / path.name)
        os.replace(temporary, self.path / name)

    def _target(self, name: str) -> str | None:
        link = self.path / name
        return Path(os.readlink(link)).name if link.is_symlink() and link.exists() else None


def best_of(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """The row with the highest mean; where several groups play, whose returns depend on one another, the newest."""
    return scores[-1] if len(scores[-1]["groups"]) > 1 else max(scores, key=lambda row: row["mean"])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line cut off by a crash is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _environment() -> str:
    import warp

    from shoal.run.bench import commit
    from shoal.run.processes import find_place

    place = find_place()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return (
        f"command: {' '.join(sys.argv)}\npython: {sys.version.split()[0]}\nplatform: {platform.platform()}\n"
        f"torch: {torch.__version__}\nwarp: {warp.__version__}\ngpu: {gpu}\ncommit: {commit()}\n"
        f"{'' if place is None else f'{LAUNCH}{place.launch}' + chr(10)}"
    )
