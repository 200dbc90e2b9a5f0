"""The run folder: config, metrics, checkpoints, videos. A lock admits one writing process."""

import contextlib
import fcntl
import itertools
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import warp

from shoal.config.job import Job
from shoal.core.errors import FileError, ShoalError, excerpt, make_folder, require_utf8, writing
from shoal.core.launch_info import find_launch_info
from shoal.core.machine import commit
from shoal.runs import files
from shoal.runs.checkpoint import find_checkpoints, save_checkpoint, strip_checkpoint
from shoal.runs.config_file import CONFIG, job_to_json
from shoal.runs.metrics import append_row, is_metrics, is_score, read_rows, trim_rows

LOCK, METRICS, SCORES = "lock", "metrics.jsonl", "eval.jsonl"

ROWS = {METRICS: is_metrics, SCORES: is_score}
"""Files of JSON lines -> the check of a row."""

RESUMABLE_CHECKPOINTS = 2
"""Number of newest checkpoints with full state: the last, and one more in case it is damaged."""

KEPT_CHECKPOINTS = 12
"""Number of newest checkpoints whose policies are kept, beside the best."""

LAUNCH = "launch: "
"""Prefix of the line of env.txt that identifies a launch of several processes."""


class RunFolder:
    """`runs/<world>__<algo>__s<seed>__<time>/` and its files."""

    def __init__(self, path: Path):
        self.path = path
        self._held: tuple[int, int] | None = None
        """Descriptors of the folder and of its lock, while it is locked."""

    @classmethod
    def create(cls, job: Job) -> "RunFolder":
        """Create and lock the folder of a job; refuses a folder with checkpoints."""
        path = job.run.run_dir
        if path is None:
            world = re.sub(r"[^\w.-]+", "-", job.world.rpartition(":")[2].lower())
            stamp = time.strftime("%Y%m%d-%H%M%S")
            path = _unused(Path("runs") / f"{world}__{job.run.algo}__s{job.run.seed}__{stamp}")
        require_utf8(path, "a run folder")
        folder = cls(path)
        make_folder(path)
        folder.lock()
        fresh = not os.path.lexists(path / CONFIG)
        try:
            if not fresh and folder.holds_checkpoints:
                raise ShoalError(
                    f"{path} already holds a run; continue it with `shoal resume {path}` or choose another."
                )
            for name in ROWS:  # of a run that ended before its first checkpoint
                with writing(path / name):
                    (path / name).unlink(missing_ok=True)
            folder.write_config(job)
            files.write_text(path / "env.txt", _environment())
        except BaseException:
            folder.discard() if fresh else folder.unlock()
            raise
        return folder

    @classmethod
    def open(cls, path: Path | str) -> "RunFolder":
        """Open an existing run for reading, without the lock."""
        require_utf8(path, "a run folder")
        if not os.path.isdir(path):
            raise ShoalError(f"There is no run folder {path}; `ls runs` lists runs.")
        return cls(Path(path))

    def write_config(self, job: Job) -> None:
        files.write_text(self.path / CONFIG, job_to_json(job))

    def move(self, job: Job) -> None:
        """Switch to a new folder beside this one, whose path has disappeared."""
        with writing(self.path):
            path = _unused(Path(os.path.abspath(self.path)), start=2)
        new = RunFolder.create(job.change(run_dir=path))
        self.unlock()
        self.path, self._held = new.path, new._held

    @property
    def is_intact(self) -> bool:
        """Whether the path still leads to the locked folder and its config."""
        assert self._held is not None
        try:
            same = os.path.samestat(os.stat(self.path), os.fstat(self._held[0]))
        except OSError:
            return False
        return same and os.path.lexists(self.path / CONFIG)

    def subfolder(self, name: str) -> Path:
        """Create a subfolder unless it exists."""
        return files.make_folder(self.path / name)

    def lock(self) -> None:
        """Lock the folder for writing; raises ShoalError if another process has the lock."""
        path = self.path / LOCK
        handle = files.open_lock(path)
        try:
            with writing(path):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY), handle
        except FileError as error:
            os.close(handle)
            if not isinstance(error.__context__, BlockingIOError):
                raise
            raise ShoalError(f"Another process is writing to {self.path}; wait for it or choose another.") from None

    def unlock(self) -> None:
        for handle in self._held or ():
            os.close(handle)
        self._held = None

    def discard(self) -> None:
        """Remove the folder of a run that never started; user files in it stay."""
        self.unlock()
        for name in (CONFIG, "env.txt", LOCK):
            files.remove(self.path / name)
        with contextlib.suppress(OSError):  # it holds user files
            self.path.rmdir()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def holds_checkpoints(self) -> bool:
        """Whether any checkpoint exists."""
        return bool(find_checkpoints(self.checkpoints))

    @property
    def launch(self) -> str | None:
        """Identifier of the launch of several processes that created this folder; None for one process."""
        try:
            text = files.read_bytes(self.path / "env.txt").decode(errors="replace")
        except FileError:
            return None
        return next((line.removeprefix(LAUNCH) for line in text.splitlines() if line.startswith(LAUNCH)), None)

    def save(self, state: dict[str, torch.Tensor], iteration: int, steps: int) -> Path:
        """Write a checkpoint and point `last` to it; strip and remove old checkpoints."""
        path = save_checkpoint(self.checkpoints, state, iteration, steps)
        self._point("last", path)
        kept = find_checkpoints(self.checkpoints)
        found = list(kept.values())
        for old in found[:-RESUMABLE_CHECKPOINTS]:
            strip_checkpoint(old)
        for old in found[:-KEPT_CHECKPOINTS]:
            if old != self._target("best", kept):
                files.remove(old)
        return path

    def record_score(self, steps: int, scores: Any, checkpoint: Path | None) -> bool:
        """Append to eval.jsonl; the best score so far returns True and moves the link `best`."""
        earlier = self.scores()
        row = dict(steps=steps, mean=scores.mean, groups={name: vars(s) for name, s in scores.items()})
        row["reports"] = {name: score.mean for name, score in scores.reports.items()}
        append_row(self.path / SCORES, row)
        best = best_of([*earlier, row]) is row
        if best and checkpoint is not None:
            self._point("best", checkpoint)
        return best

    def scores(self) -> list[dict[str, Any]]:
        return read_rows(self.path / SCORES, is_score)

    def metrics(self) -> list[dict[str, Any]]:
        return read_rows(self.path / METRICS, is_metrics)

    def trim(self, steps: int) -> None:
        """Prepare to resume at a step: drop later rows, rename later checkpoints, which are damaged."""
        kept = find_checkpoints(self.checkpoints)
        for later in [later for later in kept if later > steps]:
            path = kept.pop(later)
            aside = path.with_name(f"damaged_{path.name}")
            with writing(aside):
                files.remove(aside)
                path.rename(aside)
        for name, is_good in ROWS.items():
            trim_rows(self.path / name, is_good, steps)
        if steps in kept:
            self._point("last", kept[steps])
        scored = [row for row in self.scores() if row["steps"] in kept]
        if scored:
            self._point("best", kept[best_of(scored)["steps"]])
        elif (self.path / "best").is_symlink():
            files.remove(self.path / "best")

    def pick(self, which: str) -> Path:
        """The checkpoint named by `best`, `last` or a step number."""
        kept = find_checkpoints(self.checkpoints)
        if not kept:
            raise ShoalError(f"{self.path} holds no checkpoint yet.")
        by_steps = {str(steps): path for steps, path in kept.items()}
        known = ", ".join(by_steps)
        if which not in ("best", "last"):
            if which not in by_steps:
                raise ShoalError(
                    f"{self.path} has no checkpoint {excerpt(which)!r}; choose best, last or one of: {known}."
                )
            return by_steps[which]
        for name in dict.fromkeys((which, "last")):
            if os.path.lexists(self.path / name):
                target = self._target(name, kept)
                if target is None:
                    raise ShoalError(
                        f"{self.path / name} is not a link to a checkpoint of this run; choose one of: {known}."
                    )
                return target
        return kept[max(kept)]

    def _point(self, name: str, path: Path) -> None:
        """Create or replace a link to a checkpoint."""
        link, temporary = self.path / name, self.path / f".{name}"
        with writing(link):
            files.remove(temporary)
            temporary.symlink_to(_link_to(path))
            os.replace(temporary, link)

    def _target(self, name: str, kept: dict[int, Path]) -> Path | None:
        """The checkpoint that a link points to; None if it points elsewhere."""
        try:
            target = os.readlink(self.path / name)
        except OSError:
            return None
        return next((path for path in kept.values() if target == _link_to(path)), None)


def _link_to(checkpoint: Path) -> str:
    return f"checkpoints/{checkpoint.name}"


def _unused(path: Path, start: int = 1) -> Path:
    """The first path that does not exist among PATH (number 1), PATH-2, PATH-3 and so on, from `start` on."""
    names = (path.name if number == 1 else f"{path.name}-{number}" for number in itertools.count(start))
    return next(found for name in names if not os.path.lexists(found := path.with_name(name)))


def best_of(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """The row with the highest mean; with several groups the newest, since their returns depend on each other."""
    return scores[-1] if len(scores[-1]["groups"]) > 1 else max(scores, key=lambda row: row["mean"])


def _environment() -> str:
    info = find_launch_info()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return (
        f"command: {' '.join(sys.argv)}\npython: {sys.version.split()[0]}\nplatform: {platform.platform()}\n"
        f"torch: {torch.__version__}\nwarp: {warp.__version__}\ngpu: {gpu}\ncommit: {commit()}\n"
        f"{'' if info is None else f'{LAUNCH}{info.launch}' + chr(10)}"
    )
