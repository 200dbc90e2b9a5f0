"""Run folders that hold anything, cannot be written, or disappear: one sentence or a finished run, and nothing lost."""

import contextlib
import errno
import itertools
import json
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

import shoal
from shoal.cli import main
from shoal.core.errors import ShoalError
from shoal.runs import checkpoint
from shoal.runs.checkpoint import POLICY, load_checkpoint, load_latest
from shoal.runs.config_file import load_job
from shoal.runs.folder import RunFolder
from shoal.runs.metrics import EventFile
from shoal.training.trainer import Trainer
from tests.damage import DAMAGES, replace_by

FLAGS = "--num-envs 8 --rollout-steps 8 --device cpu --quiet"
TRAIN = f"train cartpole --total-steps 192 --checkpoint-every 64 --eval-episodes 1 {FLAGS}"

COMMANDS = {
    "eval": "eval RUN --episodes 1 --device cpu",
    "eval of the last": "eval RUN --episodes 1 --checkpoint last --device cpu",
    "record": "record RUN --envs 1 --steps 1 --out NEW.png --device cpu",
    "plot": "plot RUN",
    "resume": "resume RUN --total-steps 256 --quiet",
    "load": f"train cartpole --load-policy cart=RUN --run-dir NEW --total-steps 64 --eval-episodes 0 {FLAGS}",
    "train": f"train cartpole --run-dir RUN --total-steps 64 --eval-episodes 0 {FLAGS}",
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A run with everything in it."""
    path = tmp_path_factory.mktemp("good") / "run"
    assert shell(TRAIN, "--run-dir", str(path)) == 0
    assert shell("plot", str(path)) == 0
    assert shell("record", str(path), "--envs 1 --steps 1 --out", f"{path}/videos/ppo.png") == 0
    (path / "maps").mkdir()
    return path


def shell(*words: str) -> int:
    """Run a command; texts with blanks are several words."""
    return main([part for word in words for part in word.split()])


def entries(path: Path) -> list[str]:
    """Everything in a folder, by name: a file, a link, or a folder."""
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def one_sentence(text: str) -> bool:
    """Whether a refusal is one line beside warnings."""
    lines = [line for line in text.splitlines() if not line.startswith("warning: ")]
    return len(lines) == 1 and lines[0].startswith("shoal: ")


# --- anything in place of anything ------------------------------------------------------------------------------------

LINKS = {
    "a link to a file": replace_by(lambda path: path.symlink_to(outside(path) / "file")),
    "a link to a folder": replace_by(lambda path: path.symlink_to(outside(path))),
    "a link up": replace_by(lambda path: path.symlink_to("..")),
}


def outside(path: Path) -> Path:
    """A folder beside the run, with a file."""
    folder = next(parent for parent in path.parents if parent.name == "run").parent / "outside"
    folder.mkdir(exist_ok=True)
    (folder / "file").write_text("precious")
    return folder


@contextlib.contextmanager
def damaged(good: Path, place: Path, name: str, damage):
    """A copy of a run with one damaged entry; files outside of the copy must not change."""
    shutil.copytree(good, place / "run", symlinks=True)
    with contextlib.suppress(IsADirectoryError, IndexError):  # a damage for files that are not empty
        damage(place / "run" / name)
    yield place / "run"
    if (place / "outside").exists():
        assert entries(place / "outside") == ["file"]
        assert (place / "outside" / "file").read_text() == "precious"
    for entry in place.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def walk(good: Path):
    names = [name for name in entries(good) if "000064" not in name]  # the last two checkpoints are whole
    return list(itertools.product(names, (DAMAGES | LINKS).items()))


READERS = {
    "settings": load_job,
    "best checkpoint": lambda path: load_checkpoint(RunFolder.open(path).pick("best"), "cpu", (POLICY,)),
    "newest checkpoint": lambda path: load_latest(RunFolder.open(path).checkpoints, "cpu", lambda text: None),
    "metrics": lambda path: RunFolder.open(path).metrics(),
    "scores": lambda path: RunFolder.open(path).scores(),
    "lock": lambda path: RunFolder.open(path).lock(),
    "trim": lambda path: RunFolder.open(path).trim(128),
    "launch": lambda path: RunFolder.open(path).launch,
    "board": lambda path: EventFile(path / "tb").write(1, {"a": 2.0}),
    "subfolder": lambda path: RunFolder.open(path).subfolder("videos"),
}


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_reader_refuses_or_works_on_every_damaged_entry(good, tmp_path):
    tried, refusals = 0, []
    for name, (_, damage) in walk(good)[::3]:
        with damaged(good, tmp_path, name, damage) as run:
            for reader in READERS.values():
                tried += 1
                try:
                    reader(run)
                except ShoalError as error:
                    refusals.append(str(error))
    assert tried > 900
    assert len(refusals) > 30
    assert all("\n" not in text and str(tmp_path / "run") in text for text in refusals)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_or_works_on_every_damaged_entry(good, tmp_path, capsys, command):
    for name, (_, damage) in walk(good):
        with damaged(good, tmp_path, name, damage) as run:
            capsys.readouterr()
            code = shell(COMMANDS[command].replace("RUN", str(run)).replace("NEW", str(tmp_path / "new")))
            assert code == 0 or (code == 2 and one_sentence(capsys.readouterr().err))


@pytest.mark.parametrize("name", ["step_foo", "step_", "step_1", "step_-00000000001", "step_" + "9" * 30, "step_²"])
def test_names_like_checkpoints_are_left_alone(good, tmp_path, name):
    shutil.copytree(good, tmp_path / "run", symlinks=True)
    strange = tmp_path / "run" / "checkpoints" / name
    strange.mkdir()
    with pytest.warns(UserWarning, match="no checkpoint, left alone"):
        shoal.load_run(tmp_path / "run", "last")
    assert shell(COMMANDS["resume"].replace("RUN", str(tmp_path / "run"))) == 0
    assert strange.is_dir()


@pytest.mark.parametrize("target", ["checkpoints/../../outside", "/tmp", "checkpoints", "checkpoints/step_1", "."])
@pytest.mark.parametrize("name", ["best", "last"])
def test_links_of_a_run_lead_to_its_checkpoints_alone(good, tmp_path, name, target):
    run = tmp_path / "run"
    shutil.copytree(good, run, symlinks=True)
    (run / name).unlink()
    (run / name).symlink_to(target)
    with pytest.raises(ShoalError, match=f"{name} is not a link to a checkpoint of this run; choose one of: 64, "):
        shoal.load_run(run, name)
    shoal.load_run(run, "192")
    assert shell(COMMANDS["resume"].replace("RUN", str(run))) == 0
    assert load_checkpoint(RunFolder(run).pick("last"), "cpu").steps == 256


# --- folders that cannot be written -----------------------------------------------------------------------------------


class Disk:
    """Lets operations that write to a folder fail, from the first of `bad` to the last."""

    def __init__(self, monkeypatch, folder: Path, bad: range, number: int):
        self.folder, self.bad, self.error = str(folder), bad, OSError(number, os.strerror(number))
        self.count = 0
        for name in ("mkdir", "replace", "rename", "symlink", "unlink", "rmdir", "open"):
            monkeypatch.setattr(os, name, self.failing(getattr(os, name), name))
        monkeypatch.setattr(checkpoint, "save_file", self.failing(checkpoint.save_file, "save_file"))

    def failing(self, function, name):
        def call(*args, **kwargs):
            paths = [str(arg) for arg in args if isinstance(arg, (str, Path))]
            writes = name != "open" or args[1] & (os.O_WRONLY | os.O_RDWR)
            if writes and any(path.startswith(self.folder) for path in paths):
                self.count += 1
                if self.count - 1 in self.bad:
                    raise checkpoint.SafetensorError("disk full") if name == "save_file" else self.error
            return function(*args, **kwargs)

        return call


@pytest.mark.parametrize(
    ("number", "lasts"), [(errno.EROFS, True), (errno.ENOSPC, False)], ids=["read-only for ever", "full once"]
)
def test_a_folder_that_cannot_be_written_from_some_moment_on(monkeypatch, tmp_path, capsys, number, lasts):
    """At the start it is refused; later a save is tried again, and the exit code says whether the last one worked."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def train(path: Path, bad: range) -> tuple[int, int]:
        with monkeypatch.context() as patch:
            disk = Disk(patch, path, bad, number)
            return shell(TRAIN.replace("192", "128"), "--run-dir", str(path)), disk.count

    code, total = train(tmp_path / "good", range(0))
    assert code == 0
    codes = []
    for first in range(0, total, 5):
        path = tmp_path / f"from_{first}"
        capsys.readouterr()
        code, _ = train(path, range(first, 10**9 if lasts else first + 1))
        said = capsys.readouterr().err
        if code == 0:
            assert load_checkpoint(RunFolder(path).pick("last"), "cpu").steps == 128
        else:
            assert one_sentence(said)
            assert code == (1 if "final checkpoint" in said else 2)
        codes.append(code)
    assert codes[0] == 2
    assert codes.count(1) > 2 if lasts else codes.count(0) > 4


# --- folders that disappear -------------------------------------------------------------------------------------------


def interrupt(monkeypatch, action) -> None:
    """Do something to the folder in the second iteration."""
    iterate = Trainer.iterate

    def both(self):
        iterate(self)
        if self.iteration == 2:
            action()

    monkeypatch.setattr(Trainer, "iterate", both)


def replaced_by_another(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "config.json").write_text("of another run")


LOSSES = {
    "removed": shutil.rmtree,
    "removed with its parent": lambda path: shutil.rmtree(path.parent),
    "moved": lambda path: path.rename(path.with_name("elsewhere")),
    "replaced": replaced_by_another,
    "without its config": lambda path: (path / "config.json").unlink(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_a_run_whose_folder_disappears_is_saved_beside_it(monkeypatch, tmp_path, capsys, loss):
    path = tmp_path / "runs" / "mine"
    interrupt(monkeypatch, lambda: loss(path))
    code = shell(TRAIN, "--run-dir", str(path))
    said = capsys.readouterr().err
    new = path.with_name("mine-2")
    assert code == 1
    assert said.splitlines()[-1] == (
        f"shoal: {path} disappeared during training; the run is saved in {new}: continue it with `shoal resume {new}`."
    )
    assert load_checkpoint(RunFolder(new).pick("last"), "cpu").steps == 192
    assert RunFolder(new).metrics()
    monkeypatch.undo()
    assert shell("resume", str(new), "--total-steps 256 --quiet") == 0
    if (path / "config.json").exists():
        assert (path / "config.json").read_text() == "of another run"


def test_a_run_whose_folder_disappears_for_good_says_so(monkeypatch, tmp_path, capsys):
    path = tmp_path / "parent" / "run"

    def remove():
        shutil.rmtree(path.parent)
        path.parent.write_text("a file in place of the folder")

    interrupt(monkeypatch, remove)
    assert shell(TRAIN, "--run-dir", str(path)) == 1
    assert f"The final checkpoint of {path} could not be saved" in capsys.readouterr().err


# --- names and modes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("path", [os.fsdecode(b"bad\xff"), "x" * 300], ids=["not UTF-8", "long"])
def test_paths_that_cannot_be_are_refused(tmp_path, monkeypatch, capsys, command, path):
    monkeypatch.chdir(tmp_path)
    words = COMMANDS[command].replace("NEW", "new").split()
    assert main([word.replace("RUN", path) for word in words]) == 2
    assert one_sentence(capsys.readouterr().err)


def test_a_null_character_in_a_path_is_refused():
    with pytest.raises(ShoalError, match="must be valid UTF-8"):
        shoal.train("cartpole", run_dir="a\0b", quiet=True, device="cpu")


def test_files_have_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        assert shell(TRAIN, "--run-dir", str(tmp_path / "run")) == 0
        assert shell("plot", str(tmp_path / "run")) == 0
    finally:
        os.umask(before)
    for entry in (tmp_path / "run").rglob("*"):
        if not entry.is_symlink():
            assert stat.S_IMODE(entry.stat().st_mode) == (0o750 if entry.is_dir() else 0o640), entry


def test_metrics_are_in_tensorboard_as_in_the_file(good):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(good / "tb"))
    board.Reload()
    rows = [json.loads(line) for line in (good / "metrics.jsonl").read_text().splitlines()]
    assert set(board.Tags()["scalars"]) == {name for row in rows for name in row} - {"steps"}
    for name in ("time/fps", "eval/mean_reward"):
        shown = [(event.step, event.value) for event in board.Scalars(name)]
        assert shown == [(row["steps"], pytest.approx(row[name])) for row in rows if name in row]
