"""Whole runs of Q-learning: learning, resuming bit for bit, groups, memory estimates, refusals."""

import json

import pytest
import torch

import shoal
from shoal.cli import main
from shoal.core.errors import ShoalError
from shoal.runs.jobs import make_job
from shoal.runs.run import load_run
from shoal.training.memory_estimate import estimate
from shoal.training.trainer import Trainer
from tests.states import assert_equal_states, last_state

SMALL = dict(num_envs=8, rollout_steps=4, eval_episodes=4, quiet=True, device="cpu", log_every_seconds=0.0)
SMALL_Q = dict(batch_size=32, buffer_size=800, learning_starts=100, replay_ratio=1.7)
STEPS = 8 * 4
EVERYTHING = dict(double_q=True, dueling=True, prioritized=True, atoms=11, v_min=0.0, v_max=100.0, noisy=True, n_step=3)


def test_dqn_balances_the_pole(tmp_path):
    run = shoal.train(
        "cartpole", algo="dqn", seed=1, total_steps=60_000, run_dir=tmp_path / "run", quiet=True, device="cpu"
    )
    assert run.evaluate(episodes=50)["cart"].mean >= 300


def test_sac_swings_the_pendulum_up(tmp_path):
    """Without learning it gets about -1,200."""
    run = shoal.train(
        "pendulum", algo="sac", seed=1, total_steps=12_000, run_dir=tmp_path / "run", quiet=True, device="cpu"
    )
    assert run.evaluate(episodes=50)["pendulum"].mean >= -450


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("world", "algo", "score"),
    [("cartpole", "dqn", 475), ("acrobot", "rainbow", -100), ("mountain-car", "dqn", -110), ("pendulum", "sac", -200)],
)
def test_tuned_settings_solve(world, algo, score, seed, tmp_path):
    run = shoal.train(world, algo=algo, seed=seed, run_dir=tmp_path / "run", quiet=True, device="cpu")
    (result,) = run.evaluate(episodes=100).values()
    assert result.mean >= score


@pytest.mark.parametrize(
    "options",
    [dict(algo="dqn", normalize_obs=True), dict(algo="rainbow", **EVERYTHING), dict(algo="dqn", quantiles=5)],
    ids=["dqn", "rainbow", "quantiles"],
)
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, options):
    """Cut after 20 of 41 iterations, past the end of the replay; nothing depends on the length of the run."""
    fixed = dict(
        exploration_initial_eps=0.3,
        exploration_final_eps=0.3,
        priority_beta=1.0,
        lr_schedule="none",
        frame_stack=2,
        time_limit=9,
    )
    settings = {**SMALL, **SMALL_Q, **fixed, **options}
    whole = shoal.train("cartpole", total_steps=41 * STEPS, run_dir=tmp_path / "whole", **settings)
    shoal.train("cartpole", total_steps=20 * STEPS, run_dir=tmp_path / "cut", **settings)
    resumed = shoal.resume(tmp_path / "cut", total_steps=41 * STEPS)
    assert_equal_states(last_state(whole.path), last_state(resumed.path))
    assert load_run(whole.path, "last").evaluate(episodes=6) == whole.evaluate(episodes=6)


@pytest.mark.parametrize("options", [dict(algo="td3"), dict(algo="sac", prioritized=True, normalize_obs=True)])
def test_resumed_run_of_real_actions_equals_an_uninterrupted_one(tmp_path, options):
    settings = {**SMALL, **SMALL_Q, "priority_beta": 1.0, "time_limit": 9, "hidden": (16,), **options}
    whole = shoal.train("pendulum", total_steps=41 * STEPS, run_dir=tmp_path / "whole", **settings)
    shoal.train("pendulum", total_steps=20 * STEPS, run_dir=tmp_path / "cut", **settings)
    resumed = shoal.resume(tmp_path / "cut", total_steps=41 * STEPS)
    assert_equal_states(last_state(whole.path), last_state(resumed.path))
    assert load_run(whole.path, "last").evaluate(episodes=6) == whole.evaluate(episodes=6)


def test_the_replay_ratio_is_kept_and_printed(tmp_path):
    settings = {**SMALL, **SMALL_Q, "learning_starts": 320}
    run = shoal.train("cartpole", algo="dqn", total_steps=200 * STEPS, run_dir=tmp_path / "run", **settings)
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "train/replay_ratio" in row][-1]
    made = 200 * STEPS - 320
    assert last["train/replay_ratio"] == pytest.approx(int(1.7 * made / 32) * 32 / made)
    assert int(last_state(run.path)["learner.cart.updates"]) == int(1.7 * made / 32)
    assert {"train/loss", "train/q_value", "train/td_error", "train/epsilon"} <= last.keys()


def test_each_group_has_a_replay():
    made = make_job("tag-grid", algo="dqn", one_policy=False, total_steps=1e6, **{**SMALL, **SMALL_Q})
    trainer = Trainer(made)
    before = {name: learner.optimizer.flat.clone() for name, learner in trainer.learners.items()}
    for _ in range(8):
        trainer.iterate()
    assert list(trainer.learners) == ["tagger", "runner"]
    for name, learner in trainer.learners.items():
        assert not torch.equal(before[name], learner.optimizer.flat)
        made = 8 * learner.rollout.samples - learner.start
        assert int(learner.updates) == max(0, int(1.7 * made / 32))


def test_agents_explore_with_the_epsilon_of_their_env():
    """At 0 and 1 by env: those of the first half repeat the best choice, the others choose anything."""
    settings = {**SMALL, **SMALL_Q, "num_envs": 400, "buffer_size": 8000}
    trainer = Trainer(make_job("cartpole", algo="dqn", total_steps=1e6, **settings))
    rollout, policy = trainer.collector.rollouts["cart"], trainer.policies["cart"]
    rollout.epsilon[:200] = 0.0
    rollout.epsilon[200:] = 1.0
    trainer.collect()
    best = policy.head.mode(policy.distribution(rollout.observation[:-1].flatten(0, 2))).view_as(rollout.action)
    same = (best == rollout.action).float()
    assert bool(same[:, :200].all())
    assert float(same[:, 200:].mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("options", [{}, dict(prioritized=True, frame_stack=3)])
def test_memory_estimate_is_printed_first(options):
    made = make_job("cartpole", algo="dqn", total_steps=1e6, **{**SMALL, **SMALL_Q, "buffer_size": 64_000, **options})
    costs, trainer = estimate(made), Trainer(made)
    assert costs.rollout == pytest.approx(trainer.collector.nbytes / 8, rel=0.02)
    assert costs.replay == pytest.approx(trainer.learners["cart"].replay.nbytes, rel=0.05)
    assert "of replay" in str(costs)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            ["pendulum", "--algo", "dqn"],
            "but group 'pendulum' uses Box; use --algo a2c, a3c, appo, ddpg, impala, ppo, sac or td3.",
        ),
        (["pendulum", "--algo", "dqn", "--num-envs", "auto"], "uses Box; use --algo a2c,"),
        (["pandemic", "--algo", "dqn"], "is 90; use --algo a2c, a3c, appo, impala or ppo."),
        (
            ["cartpole", "--algo", "sac"],
            "'cart' uses Discrete; use --algo a2c, a3c, appo, dqn, impala, ppo, r2d2 or rainbow.",
        ),
        (["pendulum", "--algo", "td3", "--rnn", "gru"], "do not support an RNN"),
        (["cartpole", "--algo", "dqn", "--buffer-size", "200", "--n-step", "9"], "is too short"),
        (["cartpole", "--algo", "rainbow", "--quantiles", "20"], "not both"),
        (["cartpole", "--algo", "dqm"], "did you mean 'dqn'"),
    ],
)
def test_invalid_combinations_exit_2_with_one_sentence(words, answer, tmp_path, capsys):
    assert main(["train", *words, "--run-dir", str(tmp_path / "run")]) == 2
    assert answer in capsys.readouterr().err


def test_a_policy_of_another_kind_is_not_loaded(tmp_path):
    shoal.train("cartpole", algo="ppo", total_steps=512, run_dir=tmp_path / "a", **{**SMALL, "num_envs": 16})
    with pytest.raises(ShoalError, match="trained with ppo"):
        make_job("cartpole", algo="dqn", load_policy=f"cart={tmp_path / 'a'}", **SMALL)
    run = shoal.train("cartpole", algo="rainbow", total_steps=512, run_dir=tmp_path / "b", **SMALL, **SMALL_Q)
    made = make_job("cartpole", algo="dqn", load_policy=f"cart={run.path}", **SMALL)
    assert made.for_policy("cart").learn.atoms == 51
    settings = {**SMALL, **SMALL_Q, "learning_starts": 10**6}
    again = shoal.train(
        "cartpole", algo="dqn", total_steps=64, load_policy=f"cart={run.path}", run_dir=tmp_path / "c", **settings
    )
    state, first = last_state(again.path), load_run(run.path).policies["cart"]
    weight = first.head.linear.weight.detach().flatten()
    assert torch.equal(state["policy.cart.head.linear.weight"].flatten(), weight)
    own = state["learner.cart.target"]  # rows of the vector that are the head's weights: somewhere in a row
    assert any(torch.equal(own[i : i + len(weight)], weight) for i in range(0, len(own) - len(weight) + 1, 4))
