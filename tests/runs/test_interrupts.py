"""Signals: the first asks a run to save and end, a second one ends it at once, whatever it does."""

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from shoal.runs import interrupts
from shoal.runs.checkpoint import load_checkpoint
from shoal.runs.folder import RunFolder
from tests.commands import start, wait_until

STUCK = Path(__file__).parent / "stuck.py"
FLAGS = ["--num-envs", "4", "--rollout-steps", "8", "--device", "cpu", "--compile", "off"]
FLAGS += ["--eval-episodes", "0", "--total-steps", "1e7", "--run-dir", "run"]

HANGS = {
    "in Python": ["Stuck"],
    "in native code": ["Stuck", "--world.native"],
    "asynchronous": ["Stuck", "--asynchronous"],
    "A3C": ["Stuck", "--algo", "a3c", "--actors", "2"],
    "in an env of this process": ["StuckEnv", "--vec-backend", "serial", "--env-schedule", "lockstep"],
    "in a worker process": [
        "StuckEnv",
        "--vec-backend",
        "processes",
        "--num-workers",
        "2",
        "--env-schedule",
        "lockstep",
    ],
    "in several processes": ["Stuck", "--processes", "2"],
}


def descendants(pid):
    """The processes that one has started, and those that they have."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            found += [int(word) for word in task.read_text().split()]
    return found[1:]


def temporary_files(folder):
    folder.mkdir()
    os.environ["TMPDIR"] = str(folder)


def lives(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("how", HANGS)
def test_a_second_signal_ends_a_run_that_hangs(how, tmp_path):
    number = signal.SIGTERM if how in ("in native code", "in a worker process") else signal.SIGINT
    name, *flags = HANGS[how]
    process = start(
        ["train", f"{STUCK}:{name}", *FLAGS, *flags], tmp_path, before=partial(temporary_files, tmp_path / "tmp")
    )
    wait_until((tmp_path / "stuck").exists)
    others = descendants(process.pid)
    os.kill(process.pid, number)
    wait_until(lambda: "a second signal stops at once" in (tmp_path / "err").read_text())
    os.kill(process.pid, number)  # a terminal and a parent may both send the first one
    while process.exitcode is None:
        process.join(0.2)
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
    output = (tmp_path / "err").read_text()
    assert process.exitcode == 128 + number, output
    assert output.count("a second signal") == 1
    assert f"stopped at once by {number.name}" in output
    assert "Traceback" not in output
    wait_until(lambda: not [pid for pid in others if lives(pid)])
    assert os.listdir(tmp_path / "tmp") == []


def test_a_worker_that_hangs_ends_with_its_world(tmp_path):
    name, *flags = HANGS["in a worker process"]
    process = start(["train", f"{STUCK}:{name}", *FLAGS, *flags], tmp_path)
    wait_until((tmp_path / "stuck").exists)
    workers = descendants(process.pid)
    assert len(workers) == 2
    process.kill()
    wait_until(lambda: not [pid for pid in workers if lives(pid)])


def test_signals_at_the_same_time_are_one_request(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    requests = interrupts.StopRequests()
    assert not requests.add(signal.SIGINT, "")
    assert not requests.add(signal.SIGTERM, "")
    now[0] += 1.1
    assert requests.add(signal.SIGINT, "")


def test_a_hangup_saves(tmp_path):
    process = start(["train", "cartpole", *FLAGS, "--log-every-seconds", "0"], tmp_path)
    wait_until((tmp_path / "run/metrics.jsonl").exists)
    os.kill(process.pid, signal.SIGHUP)
    process.join(60)
    assert process.exitcode == 129
    run = RunFolder(tmp_path / "run")
    assert load_checkpoint(run.pick("last"), "cpu").steps == run.metrics()[-1]["steps"]


def ignore_hangup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.parametrize("flags", [[], pytest.param(["--processes", "2"], marks=pytest.mark.slow)], ids=str)
def test_an_ignored_hangup_stays_ignored(flags, tmp_path):
    process = start(["train", "cartpole", *FLAGS, "--log-every-seconds", "0", *flags], tmp_path, before=ignore_hangup)
    wait_until((tmp_path / "run/metrics.jsonl").exists)
    os.kill(process.pid, signal.SIGHUP)
    steps = RunFolder(tmp_path / "run").metrics()[-1]["steps"]
    wait_until(lambda: RunFolder(tmp_path / "run").metrics()[-1]["steps"] > steps)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 143
