"""Signals, numbers that are not finite, a kernel cache that cannot be written."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch

import shoal
from shoal.core import Box, Discrete, Field, Group, KernelWorld
from shoal.core.errors import ShoalError
from shoal.runs.checkpoint import load_checkpoint
from shoal.runs.folder import RunFolder

FLAGS = [
    "--num-envs",
    "32",
    "--rollout-steps",
    "8",
    "--eval-episodes",
    "2",
    "--device",
    "cpu",
    "--lr-schedule",
    "none",
    "--compile",
    "off",
]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_run_is_saved_and_continues_exactly(tmp_path, number, code):
    """Stop a long run with a signal, resume it for two iterations, and compare with a run that was never stopped."""
    path = tmp_path / "run"
    command = [sys.executable, "-m", "shoal", "train", "cartpole", "--run-dir", str(path), "--total-steps", "1e8"]
    process = subprocess.Popen([*command, *FLAGS], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (path / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert "shoal resume" in errors
    stopped = load_checkpoint(RunFolder(path).pick("last"), "cpu").steps
    total = str(stopped + 2 * 32 * 8)
    # In separate processes: sums depend on the number of torch's threads, which tests change.
    shoal = [sys.executable, "-m", "shoal"]
    subprocess.run([*shoal, "resume", str(path), "--total-steps", total, "--quiet"], check=True)
    whole = tmp_path / "whole"
    subprocess.run([*shoal, "train", "cartpole", "--run-dir", str(whole), "--total-steps", total, *FLAGS], check=True)
    a = load_checkpoint(RunFolder(path).pick("last"), "cpu").state
    b = load_checkpoint(RunFolder(whole).pick("last"), "cpu").state
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


class Poisoned(KernelWorld):
    """Env 5 gives a reward that is not a number in its 20th step."""

    @dataclass(frozen=True)
    class Config:
        max_steps: int = 100

    state = dict(clock=Field(float))
    groups = (Group("agent", observation=Box(1), action=Discrete(2)),)

    def step(self, s):
        s.clock += 1.0
        bad = (s.clock == 20.0) & (s.env_id == 5)
        s.reward[:, 0] = torch.where(bad, float("nan"), 1.0)

    def reset(self, s):
        return dict(clock=torch.zeros_like(s.clock))

    def observe(self, s):
        return s.clock.unsqueeze(-1) / 100.0


NAN_RUN = dict(num_envs=16, rollout_steps=8, total_steps=16 * 8 * 10, device="cpu", quiet=True, checkpoint_every=16 * 8)


@pytest.mark.parametrize(
    "settings",
    [dict(log_every_seconds=0.0), dict(log_every_seconds=0.0, target_kl=0.02), dict(log_every_seconds=1e9)],
    ids=str,
)
def test_nan_is_caught_with_env_field_and_state(tmp_path, settings):
    """Also with a KL stop, which a number that is not one must not set off, and between two log lines."""
    with pytest.raises(ShoalError, match=r"Env 5, agent 0 of .* gave a non-finite reward") as error:
        shoal.train(f"{__file__}:Poisoned", run_dir=tmp_path / "run", **NAN_RUN, **settings)
    assert "last checkpoint is kept" in str(error.value)
    assert json.loads((tmp_path / "run" / "bad_env.json").read_text())["env_id"] == 5
    good = load_checkpoint(RunFolder(tmp_path / "run").pick("last"), "cpu")
    assert good.steps == 2 * 16 * 8
    assert all(torch.isfinite(t.float()).all() for t in good.state.values())


class NoChoice(Poisoned):
    """In env 5 no action is allowed after the 20th step."""

    groups = (Group("agent", observation=Box(1), action=Discrete(2), masked=True),)

    def step(self, s):
        s.clock += 1.0

    def observe(self, s):
        stuck = (s.clock == 20.0) & (s.env_id == 5)
        return dict(observation=s.clock.unsqueeze(-1) / 100.0, action_mask=~stuck[:, None, None].expand(-1, 1, 2))


@pytest.mark.parametrize("settings", [dict(), dict(algo="a3c", actors=2), dict(algo="appo")], ids=str)
def test_an_empty_action_mask_stops_training_with_env_and_step(tmp_path, settings):
    message = r"action mask of env 5, group 'agent', agent 0 of .* allows no action at step 20 of this env;"
    with pytest.raises(ShoalError, match=message):
        shoal.train(f"{__file__}:NoChoice", run_dir=tmp_path / "run", **NAN_RUN, **settings)


class Endless(Poisoned):
    """No episode ever ends."""

    @dataclass(frozen=True)
    class Config:
        pass

    def step(self, s):
        s.reward[:, 0] = 1.0


def test_world_without_an_end_trains_with_a_warning_instead_of_a_score(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shoal.runs.evaluation.MAX_EVAL_STEPS", 100)
    run = shoal.train(f"{__file__}:Endless", run_dir=tmp_path / "run", **dict(NAN_RUN, total_steps=256))
    assert "No evaluation" in capsys.readouterr().err
    assert run.folder.scores() == []
    assert load_checkpoint(run.folder.pick("last"), "cpu").steps == 256


def test_a_run_that_never_began_leaves_no_folder(tmp_path):
    with pytest.raises(ShoalError, match="no encoder"):
        shoal.train("cartpole", encoder="resnet", run_dir=tmp_path / "run", quiet=True, device="cpu")
    assert not (tmp_path / "run").exists()


def test_kernel_cache_that_cannot_be_written_is_put_elsewhere(tmp_path):
    code = "from shoal.worlds.cartpole import CartPole; CartPole(2).reset(1); print('fine')"
    environment = {**os.environ, "WARP_CACHE_PATH": "/proc/nowhere", "TMPDIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stdout.strip() == "fine"
    assert "kernel cache cannot be written" in result.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is left at the end"
