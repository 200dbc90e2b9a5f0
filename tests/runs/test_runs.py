"""Whole runs, small: the folder, resuming bit for bit, repeating bit for bit, evaluation."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

import shoal
from shoal.algos.registry import LEARNERS
from shoal.core.errors import ShoalError
from shoal.core.world_loading import world_class
from shoal.runs.jobs import make_job
from shoal.runs.run import load_run
from shoal.training.build import make_world
from shoal.training.trainer import Trainer
from tests.states import assert_equal_states, last_state

ROOT = Path(__file__).parents[2]
SMALL = dict(num_envs=32, rollout_steps=8, eval_episodes=4, quiet=True, device="cpu", log_every_seconds=0.0)
STEPS = 32 * 8


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return shoal.train("cartpole", total_steps=10 * STEPS, run_dir=tmp_path_factory.mktemp("runs") / "a", **SMALL)


def test_run_folder_has_all_files(run):
    names = {p.name for p in run.path.iterdir()}
    assert {"config.json", "env.txt", "metrics.jsonl", "tb", "checkpoints", "best", "last", "eval.jsonl"} <= names
    assert json.loads((run.path / "config.json").read_text())["world"] == "cartpole"


def test_metrics_carry_the_usual_names(run):
    rows = run.folder.metrics()
    keys = {key for row in rows for key in row}
    for name in ("policy_gradient_loss", "value_loss", "entropy_loss", "approx_kl", "clip_fraction"):
        assert f"train/{name}" in keys
    assert {"rollout/ep_rew_mean", "rollout/ep_len_mean", "time/fps", "eval/mean_reward"} <= keys
    assert "train/explained_variance" in keys
    assert rows[-1]["steps"] == 10 * STEPS


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, algo):
    """Cut after 4 of 9 iterations by a smaller total; the schedule of the learning rate is the same in both."""
    settings = dict(SMALL, algo=algo, normalize_obs=True, normalize_reward=True, lr_schedule="none")
    whole = shoal.train("pendulum", total_steps=9 * STEPS, run_dir=tmp_path / "whole", **settings)
    shoal.train("pendulum", total_steps=4 * STEPS, run_dir=tmp_path / "cut", **settings)
    resumed = shoal.resume(tmp_path / "cut", total_steps=9 * STEPS)
    assert_equal_states(last_state(whole.path), last_state(resumed.path))


def test_resume_with_wrappers_is_exact(tmp_path):
    settings = dict(SMALL, action_repeat=2, frame_stack=3, time_limit=11, lr_schedule="none")
    whole = shoal.train("cartpole", total_steps=6 * STEPS, run_dir=tmp_path / "whole", **settings)
    shoal.train("cartpole", total_steps=3 * STEPS, run_dir=tmp_path / "cut", **settings)
    resumed = shoal.resume(tmp_path / "cut", total_steps=6 * STEPS)
    assert_equal_states(last_state(whole.path), last_state(resumed.path))


def test_two_processes_make_the_same_numbers(tmp_path):
    for name in ("a", "b"):
        flags = (
            f"--total-steps {3 * STEPS} --num-envs 32 --rollout-steps 8 --eval-episodes 2 --quiet --device cpu".split()
        )
        command = [sys.executable, "-m", "shoal", "train", "cartpole", "--run-dir", str(tmp_path / name), *flags]
        subprocess.run(command, check=True, capture_output=True)
    assert_equal_states(last_state(tmp_path / "a"), last_state(tmp_path / "b"))


def test_seed_changes_the_numbers():
    weights = []
    for seed in (1, 2):
        trainer = Trainer(make_job("cartpole", seed=seed, total_steps=STEPS, **SMALL))
        trainer.iterate()
        weights.append(trainer.learners["cart"].optimizer.flat.clone())
    assert not torch.equal(*weights)


def test_an_env_does_not_depend_on_the_batch():
    """The same weights, 8 and 64 envs: the first 8 columns of the rollout are the same experience."""
    rows = []
    for envs in (8, 64):
        trainer = Trainer(make_job("cartpole", **dict(SMALL, num_envs=envs, total_steps=envs * 8)))
        trainer.collect()
        rollout = trainer.collector.rollouts["cart"]
        rows.append((rollout.action[:, :8], rollout.observation[:, :8], rollout.terminated[:, :8]))
    for small, large in zip(*rows, strict=True):
        torch.testing.assert_close(small, large)


def test_evaluation_repeats_and_counts_whole_episodes(run):
    first = run.evaluate(episodes=6)["cart"]
    assert first == run.evaluate(episodes=6)["cart"]
    assert first.episodes == 6
    assert first.mean == first.length  # cart-pole pays one per step


def test_loaded_run_scores_like_the_live_one(run):
    assert load_run(run.path, "last").evaluate(episodes=6) == run.evaluate(episodes=6)


def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(ShoalError, match="did you mean 'total_steps'"):
        make_job("cartpole", total_step=3)
    with pytest.raises(ShoalError, match=r"max_steps is a setting of the world: give it as world_config=dict"):
        make_job("cartpole", max_steps=3)
    with pytest.raises(ShoalError, match="did you mean 'max_steps'"):
        make_job("cartpole", world_config=dict(max_step=3))


@pytest.mark.parametrize(("total_steps", "warns"), [(127, True), (128, False)])
def test_a_run_of_more_than_twice_its_steps_is_warned_of(total_steps, warns, tmp_path, capsys):
    """An iteration has 32 envs x 8 steps."""
    shoal.train("cartpole", total_steps=total_steps, run_dir=tmp_path / "run", **{**SMALL, "eval_episodes": 0})
    warning = f"This run makes 256 env steps instead of {total_steps}"
    assert (warning in capsys.readouterr().err) == warns


def test_large_numbers_may_be_written_with_an_exponent():
    assert make_job("cartpole", total_steps="1e8").run.total_steps == 100_000_000
    assert make_job("cartpole", total_steps=1e6).run.total_steps == 1_000_000


@pytest.mark.parametrize(
    ("name", "config"), [("pendulum", {}), ("gym:Pendulum-v1", dict(vec_backend="serial", desync_steps=0))]
)
def test_a_time_limit_counts_policy_decisions(name, config):
    """20 choices of 4 steps each, whether a wrapper repeats them or the world itself."""
    world = make_world(make_job(name, num_envs=1, device="cpu", time_limit=20, action_repeat=4, world_config=config))
    world.reset(0)
    ends = [bool(world.step(torch.zeros(1, 1, 1)).truncated) for _ in range(20)]
    world.close()
    assert ends == [False] * 19 + [True]


def test_time_limit_reserves_room_for_every_truncation():
    """Episodes cut every 3 steps in a rollout of 8: three final observations per env, each kept."""
    trainer = Trainer(make_job("pendulum", **dict(SMALL, time_limit=3, total_steps=STEPS)))
    trainer.collect()
    rollout = trainer.collector.rollouts["pendulum"]
    assert rollout.final_observation.shape[0] == 3
    cuts = rollout.truncated.nonzero()[:, 0].unique()
    assert cuts.tolist() == [2, 5]
    # The final observation differs from what the next episode starts with, and is a point on the unit circle.
    kept = rollout.final_observation[:2, :, 0]
    assert not torch.allclose(kept[0], rollout.observation[3, :, 0])
    torch.testing.assert_close(kept[..., :2].square().sum(-1), torch.ones(2, 32))


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        (dict(total_steps="inf"), "whole number"),
        (dict(total_steps="x"), "not a number"),
        (dict(hidden=64), "list of values"),
        (dict(gamma="0.9"), "finite number"),
        (dict(lr=float("inf")), "finite number"),
        (dict(log_std_init=-1e31), "--log-std-init must be within 1e\\+30"),
        (dict(log_std_init=float("nan")), "finite number"),
        (dict(seed=2**31), "seed must be between"),
        (dict(seed=2**63), "seed must be within"),
        (dict(target_kl=-1.0), "target-kl must be above 0"),
        (dict(checkpoint_every=-5), "checkpoint-every must be at least 1"),
        (dict(epochs=2.5), "whole number"),
        (dict(algo="a3c", actors=10**6), "--actors must be between 1 and 4096"),
        (dict(activation="foo"), "There is no choice for --activation"),
        (dict(compile="maybe"), "There is no choice for --compile"),
        (dict(world_config=dict(force="strong")), "finite number"),
        (dict(world_config=dict(max_steps=2**32 + 1)), "32 bits"),
    ],
    ids=str,
)
def test_bad_settings_from_python_are_named(settings, answer, tmp_path):
    with pytest.raises(ShoalError, match=answer):
        shoal.train("cartpole", **{**SMALL, "total_steps": STEPS, **settings}, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


SMALLEST = dict(num_envs=8, rollout_steps=8, total_steps=256, hidden=(8,), device="cpu", asynchronous=False)
REPLAY = dict(buffer_size=512, batch_size=16, learning_starts=32, replay_ratio=0.5)
EDGES = {float: (1e308, 1e30, 1e-320, -1e30), int: (2**31, 2**62)}
ENDLESS = ("replay_ratio",)
"""Nothing overflows, but a rollout has updates without end."""


@pytest.mark.parametrize("algo", ["ppo", "impala", "rainbow", "sac"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_numbers_of_a_learner_at_the_edge_are_refused_or_overflow_nowhere(algo):
    world = "pendulum" if algo == "sac" else "cartpole"
    given = SMALLEST | (REPLAY if algo in ("rainbow", "sac") else {})
    refused = tried = 0
    for name, hint in get_type_hints(LEARNERS[algo][0]).items():
        for kind, values in EDGES.items():
            for value in values if hint in (kind, kind | None) and name not in ENDLESS else ():
                tried += 1
                try:
                    trainer = Trainer(make_job(world, algo=algo, **(given | {name: value})))
                except ShoalError:
                    refused += 1
                    continue
                for _ in range(2):
                    trainer.iterate()
    assert refused > tried // 3


def test_whole_numbers_are_not_rounded():
    assert make_job("cartpole", total_steps="9007199254740993").run.total_steps == 9007199254740993


def test_own_world_is_loaded_once_and_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text((ROOT / "examples" / "rocket.py").read_text())
    monkeypatch.chdir(tmp_path)
    run = shoal.train("own.py:Rocket", total_steps=STEPS, run_dir=tmp_path / "run", **SMALL)
    assert world_class(f"{tmp_path}/own.py:Rocket") is world_class("own.py:Rocket")
    monkeypatch.chdir("/")
    assert load_run(run.path, "last").evaluate(episodes=2) == run.evaluate(episodes=2)


def test_caller_keeps_its_own_choice_of_determinism():
    torch.use_deterministic_algorithms(True)
    try:
        Trainer(make_job("cartpole", total_steps=STEPS, **SMALL)).iterate()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
