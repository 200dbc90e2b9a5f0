"""Whole runs of recurrent Q-learning: a task of memory, resuming bit for bit, groups, memory, defaults, refusals."""

import pytest
import torch

import shoal
from shoal.cli import main
from shoal.learn.replay import Replay
from shoal.runs.evaluation import evaluate
from shoal.runs.jobs import make_job, parse_job
from shoal.runs.run import load_run
from shoal.training.memory_estimate import estimate
from shoal.training.trainer import Trainer
from tests.learn.test_recurrent import RECALL
from tests.states import assert_equal_states, last_state

SMALL = dict(
    num_envs=8,
    rollout_steps=4,
    eval_episodes=4,
    quiet=True,
    device="cpu",
    log_every_seconds=0.0,
    hidden=(8,),
    rnn_size=6,
)
SMALL_Q = dict(batch_size=32, buffer_size=1600, learning_starts=100, replay_ratio=1.7, burn_in=4, sequence_length=8)
STEPS = 8 * 4


@pytest.mark.parametrize(("core", "seed"), [("lstm", 1), ("gru", 2)])
def test_who_remembers_can_answer(core, seed):
    """The cue is shown in the first of five steps; without a core one can but guess, which pays 1/3."""
    settings = dict(
        num_envs=128, rollout_steps=10, total_steps=20 * 1280, hidden=(16,), rnn=core, rnn_size=24, n_step=2
    )
    settings.update(
        burn_in=10, sequence_length=10, batch_size=960, buffer_size=20_000, learning_starts=2000, replay_ratio=6.0
    )
    job = make_job(
        RECALL, algo="r2d2", device="cpu", seed=seed, lr=1e-2, target_update_interval=15, gamma=0.9, **settings
    )
    trainer = Trainer(job)
    while not trainer.done:
        trainer.iterate()
    assert evaluate(job, trainer.policies, episodes=300)["pupil"].mean >= 0.97


@pytest.mark.parametrize(
    "options",
    [
        dict(algo="r2d2", n_step=3, frame_stack=2),
        dict(algo="dqn", rnn="gru", rnn_layers=2, normalize_obs=True, burn_in=0),
        dict(algo="rainbow", rnn="lstm", atoms=11, v_max=100.0, exploration_initial_eps=0.3, exploration_final_eps=0.3),
    ],
    ids=["r2d2", "dqn", "rainbow"],
)
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, options):
    """Cut after 20 of 41 iterations; nothing depends on the length of the run."""
    settings = {
        **SMALL,
        **SMALL_Q,
        "lr_schedule": "none",
        "priority_beta": 1.0,
        "exploration_initial_eps": 0.4,
        "exploration_final_eps": 0.4,
        "time_limit": 9,
        **options,
    }
    whole = shoal.train("cartpole", total_steps=41 * STEPS, run_dir=tmp_path / "whole", **settings)
    shoal.train("cartpole", total_steps=20 * STEPS, run_dir=tmp_path / "cut", **settings)
    resumed = shoal.resume(tmp_path / "cut", total_steps=41 * STEPS)
    state = last_state(whole.path)
    assert_equal_states(state, last_state(resumed.path))
    assert state["learner.cart.replay.state"].abs().sum() > 0
    assert int(state["learner.cart.updates"]) > 30
    assert load_run(whole.path, "last").evaluate(episodes=6) == whole.evaluate(episodes=6)


def test_the_replay_ratio_stays_exact():
    trainer = Trainer(make_job("cartpole", algo="r2d2", total_steps=1e6, **SMALL, **SMALL_Q))
    (learner,) = trainer.learners.values()
    assert learner.start >= (4 + 8 + 5 + 4) * 8
    for _ in range(60):
        trainer.iterate()
    assert int(learner.updates) == int(1.7 * (60 * STEPS - learner.start) / 32)
    assert learner.read_metrics()["replay_ratio"] == pytest.approx(1.7, rel=0.02)
    assert learner.optimizer.bad_steps == 0


def test_one_group_of_two_may_remember():
    settings = {**SMALL, **SMALL_Q, "group_settings": ("runner.rnn=lstm", "runner.burn_in=8")}
    trainer = Trainer(make_job("tag-grid", algo="dqn", one_policy=False, total_steps=1e6, **settings))
    before = {name: learner.optimizer.flat.clone() for name, learner in trainer.learners.items()}
    for _ in range(12):
        trainer.iterate()
    learners = trainer.learners
    assert {name: (made.burn_in, made.sequence_length) for name, made in learners.items()} == dict(
        tagger=(0, 0), runner=(8, 8)
    )
    for name, learner in learners.items():
        assert not torch.equal(before[name], learner.optimizer.flat)
        assert int(learner.optimizer.bad_steps) == 0


def test_a_policy_that_remembers_is_loaded_with_its_core(tmp_path):
    run = shoal.train("cartpole", algo="r2d2", total_steps=512, run_dir=tmp_path / "a", **SMALL, **SMALL_Q)
    settings = {**SMALL, **SMALL_Q, "learning_starts": 10**6}
    again = shoal.train(
        "cartpole", algo="dqn", load_policy=f"cart={run.path}", total_steps=64, run_dir=tmp_path / "b", **settings
    )
    own = load_run(again.path).policies["cart"]
    for name, tensor in load_run(run.path).policies["cart"].state_dict().items():
        assert torch.equal(own.state_dict()[name], tensor)
    assert own.rnn.kind == "lstm"
    assert own.head.dueling


@pytest.mark.parametrize("options", [{}, dict(prioritized=False, frame_stack=3, rnn="gru")])
def test_memory_estimate_is_printed_first(options):
    settings = {**SMALL, **SMALL_Q, "buffer_size": 64_000, **options}
    made = make_job("cartpole", algo="r2d2", total_steps=1e6, **settings)
    costs, trainer = estimate(made), Trainer(made)
    (learner,) = trainer.learners.values()
    assert costs.rollout == pytest.approx(trainer.collector.nbytes / 8, rel=0.02)
    assert costs.replay == pytest.approx(learner.replay.nbytes, rel=0.05)
    without = Replay.bytes_per_step(learner.rollout, learner.config.prioritized, sequences=False)
    assert costs.replay != pytest.approx(without * 8000, rel=0.05)


def test_all_ends_of_a_sequence_have_their_final_observations():
    """Where a time limit is known, a sequence comes with as many of them as it can have."""
    settings = {**SMALL, **SMALL_Q, "time_limit": 3, "prioritized": False}
    trainer = Trainer(make_job("cartpole", algo="r2d2", total_steps=1e6, **settings))
    for _ in range(20):
        trainer.iterate()
    sample = trainer.learners["cart"]._draw()
    assert int((sample.truncated & ~sample.terminated).sum(0).max()) >= 5
    assert bool(sample.valid.all())


def test_defaults_of_the_learner_stand_between_the_world_s():
    """Above what a world says for all learners, below what it says for this one, and the user has the last word."""
    made = make_job("cartpole", algo="r2d2", device="cpu")
    assert (made.policy.rnn, made.run.rollout_steps) == ("lstm", 40)
    assert (made.learn.burn_in, made.learn.sequence_length, made.learn.n_step, made.learn.gamma) == (40, 80, 5, 0.997)
    assert made.learn.batch_size % 80 == 0
    assert made.learn.rescale
    assert make_job("cartpole", device="cpu").policy.rnn == "none"
    parsed = parse_job("cartpole", ["--algo", "r2d2", "--device", "cpu", "--rnn", "gru", "--rollout-steps", "20"])
    assert (parsed.policy.rnn, parsed.run.rollout_steps) == ("gru", 20)
    make_job("cartpole", algo="dqn", rnn="lstm", device="cpu")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--algo", "r2d2", "--rnn", "none"], "R2D2 needs an RNN"),
        (["--algo", "r2d2", "--rollout-steps", "32"], "use --burn-in 32 --sequence-length 64"),
        (["--algo", "r2d2", "--batch-size", "300"], "use --batch-size 320"),
        (["--algo", "r2d2", "--atoms", "51"], "--rescale needs scalar Q-values"),
        (["--algo", "r2d2", "--buffer-size", "8000"], "sequences of 120 rows"),
        (["--algo", "dqn", "--rnn", "lstm", "--rollout-steps", "24"], "use --burn-in 24 --sequence-length 72"),
    ],
)
def test_invalid_combinations_exit_2_with_one_sentence(words, answer, tmp_path, capsys):
    assert main(["train", "cartpole", "--device", "cpu", *words, "--run-dir", str(tmp_path / "run")]) == 2
    output = capsys.readouterr().err
    assert answer in output
    assert len(output.strip().splitlines()) == 1
