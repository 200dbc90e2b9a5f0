"""Standard streams that are closed, full or without a reader: every command does its work and ends rightly."""

import errno
import io
import sys

import pytest

from shoal.cli import COMMANDS, RUN_COMMANDS
from shoal.runs.folder import RunFolder
from shoal.runs.progress import Progress
from tests.commands import ENDS, run

TRAIN = ["train", "cartpole", "--num-envs", "8", "--rollout-steps", "4", "--num-minibatches", "2", "--epochs", "1"]
TRAIN += ["--device", "cpu", "--compile", "off", "--log-every-seconds", "0", "--eval-episodes", "1", "--total-steps"]

WORDS = {
    "train": [*TRAIN, "256", "--run-dir", "run"],
    "resume": ["resume", "run", "--total-steps", "512"],
    "eval": ["eval", "run", "--episodes", "1", "--device", "cpu", "--out", "made.json"],
    "record": ["record", "run", "--out", "made.png", "--envs", "1", "--steps", "1", "--device", "cpu"],
    "plot": ["plot", "run", "--out", "made-curve.png"],
    "bench": ["bench", "render", "--help"],
    "scene": ["scene", "info", "cabin:0"],
    "check": ["check", "--help"],
    "list": ["list"],
    "--help": ["--help"],
    "": [],
}
MADE = ["run/last", "made.json", "made.png", "made-curve.png"]
"""What they leave behind."""


def test_all_commands_are_tried():
    assert set(WORDS) == {*COMMANDS, "--help", ""}


@pytest.mark.parametrize("end", ENDS)
def test_commands_do_their_work_whatever_their_output(end, tmp_path):
    """Only results that are lost for want of space are a failure, which stderr names."""
    codes = run(list(WORDS.values()), tmp_path, ends=dict.fromkeys((0, 1) if end == "closed" else (1,), end))
    output = (tmp_path / "err").read_text()
    fails = [int(end == "full" and name not in RUN_COMMANDS) for name in WORDS]
    assert dict(zip(WORDS, codes, strict=True)) == dict(zip(WORDS, fails, strict=True)), output
    assert output.count("the output could not be written: No space left on device.") == sum(fails)
    assert "Traceback" not in output
    assert [name for name in MADE if not (tmp_path / name).exists()] == []


@pytest.mark.parametrize("end", ENDS)
def test_training_reaches_its_end_when_progress_cannot_be_written(end, tmp_path):
    """Files that are opened later take no place of a closed descriptor."""
    assert run([WORDS["train"]], tmp_path, ends=dict.fromkeys(range(end != "closed", 3), end)) == [0]
    folder = RunFolder(tmp_path / "run")
    assert folder.metrics()[-1]["steps"] == 256
    assert folder.holds_checkpoints


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_of_a_program_is_dropped_if_it_cannot_be_written(terminal, monkeypatch):
    """Where `shoal.train` is called from Python, also with a live line."""

    class Full(io.StringIO):
        def isatty(self):
            return terminal

        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    for stream in (Full(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        progress = Progress(100)
        progress.say("a line")
        progress.warn("a warning")
        progress.update(50, {"time/fps": 1.0, "time/agent_fps": 1.0, "time/left": 0.0})
        progress.close()
