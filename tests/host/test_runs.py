"""Host worlds in whole runs: trained, evaluated, recorded, resumed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import shoal
from shoal.cli import main
from shoal.runs.jobs import make_job, parse_job
from shoal.training.memory_estimate import estimate
from shoal.training.trainer import Trainer
from shoal.view.video import record

HERE = Path(__file__).parent / "envs.py"
SHORT = dict(
    num_envs=8,
    rollout_steps=16,
    num_minibatches=2,
    epochs=1,
    total_steps=512,
    eval_episodes=4,
    device="cpu",
    quiet=True,
)


@pytest.mark.parametrize(
    ("backend", "steps"), [("native", 60_000), pytest.param("processes", 120_000, marks=pytest.mark.slow)]
)
def test_cartpole_is_learned(backend, steps, tmp_path):
    host = dict(vec_backend=backend, env_schedule="lockstep")
    run = shoal.train(
        "gym:CartPole-v1",
        total_steps=steps,
        eval_episodes=0,
        run_dir=tmp_path / "run",
        quiet=True,
        device="cpu",
        world_config=host,
    )
    assert run.evaluate(episodes=32).mean >= 400


def episodes(run):
    return max(row.get("rollout/episodes", 0) for row in run.folder.metrics())


def test_a_resumed_run_continues_its_episode_totals(tmp_path):
    host = dict(vec_backend="processes", num_workers=2, env_schedule="alternating", desync_steps=3)
    run = shoal.train(f"{HERE}:Walk", run_dir=tmp_path / "run", world_config=host, **SHORT)
    weights = torch.cat([p.flatten() for p in run.policies["agent"].parameters()]).clone()
    done = episodes(run)
    more = shoal.resume(tmp_path / "run", total_steps=1024, quiet=True)
    assert episodes(more) > done
    assert not torch.equal(weights, torch.cat([p.flatten() for p in more.policies["agent"].parameters()]))
    assert [row["steps"] for row in more.folder.scores()][-1] == 1024


def test_resumed_envs_do_not_repeat_their_first_episodes():
    job = make_job(f"{HERE}:Walk", world_config=dict(vec_backend="serial", desync_steps=0), **SHORT)
    first = Trainer(job)
    shown = first.world.outputs.groups["agent"].observation.clone()
    again = Trainer(job)
    again.load_state_dict(first.state_dict(), 0)
    assert not torch.equal(again.world.outputs.groups["agent"].observation, shown)
    carried = again.collector.rollouts["agent"].observation[-1]
    assert torch.equal(carried, again.world.outputs.groups["agent"].observation)


def test_pictures_come_from_the_env_s_render(tmp_path):
    run = shoal.train(f"{HERE}:Walk", run_dir=tmp_path / "run", world_config=dict(vec_backend="serial"), **SHORT)
    path = record(run, tmp_path / "walk.png", envs=4, steps=3)
    picture = np.asarray(Image.open(path))
    assert picture.shape[0] > 400
    assert {0, 200} <= set(np.unique(picture).tolist())


def test_two_groups_train_together(tmp_path):
    run = shoal.train(f"{HERE}:Hunt", run_dir=tmp_path / "run", world_config=dict(vec_backend="serial"), **SHORT)
    assert set(run.policies) == {"hunter", "deer"}
    assert set(run.evaluate(episodes=3)) == {"hunter", "deer"}


def test_flags_of_host_worlds_need_no_prefix():
    flags = [
        "--env-kwargs",
        '{"g": 5.0}',
        "--num-workers",
        "3",
        "--env-schedule",
        "first-come",
        "--vec-backend",
        "processes",
    ]
    job = parse_job("gym:Pendulum-v1", [*flags, "--desync-steps", "7", "--no-pin-threads"])
    config = job.world_config
    assert (config.env_kwargs, config.num_workers, config.env_schedule, config.desync_steps) == (
        '{"g": 5.0}',
        3,
        "first-come",
        7,
    )


def test_memory_is_estimated_without_starting_a_process():
    estimated = estimate(make_job("gym:CartPole-v1", num_envs=32, device="cpu"))
    assert estimated.num_envs == 32
    assert estimated.rollout > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "gym:CartPole-v7"], "CartPole"),
        (["train", "gym:CartPole-v1", "--env-kwargs", "oops"], "JSON"),
        (["train", "gym:CartPole-v1", "--encoder", "nature", "--eval-episodes", "0"], "image"),
        (["train", "gym:CartPole-v1", "--num-envs", "auto"], "--num-envs auto"),
        (["train", f"{HERE}:Nothing"], "Nothing"),
        (["train", f"{HERE}:Broken"], "no such luck"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("shoal:")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())
