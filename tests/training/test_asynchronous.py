"""Acting and learning at the same time: without lag as in turns, never more lag than allowed, faults, saving."""

import json
import statistics
import threading
import time
from contextlib import closing

import pytest
import torch

import shoal
from shoal.cli import main
from shoal.core.errors import ShoalError
from shoal.runs.jobs import make_job
from shoal.runs.run import load_run
from shoal.training.a3c import SharedTrainer
from shoal.training.asynchronous import AsyncTrainer, TensorMailbox
from shoal.training.memory_estimate import estimate
from shoal.training.trainer import Trainer
from tests.states import assert_equal_states, last_state

SMALL = dict(num_envs=8, rollout_steps=4, eval_episodes=4, quiet=True, device="cpu", log_every_seconds=0.0)
STEPS = 8 * 4
Q = dict(batch_size=32, buffer_size=800, learning_starts=100, replay_ratio=1.7)
KINDS = {
    "ppo": dict(algo="ppo", normalize_obs=True, normalize_reward=True),
    "appo with a core": dict(algo="appo", rnn="gru", rnn_size=8),
    "impala": dict(algo="impala"),
    "dqn": dict(algo="dqn", prioritized=True, **Q),
}


@pytest.mark.parametrize("kind", KINDS)
def test_without_lag_it_is_the_same_as_in_turns(kind, tmp_path):
    settings = {**SMALL, **KINDS[kind], "total_steps": 30 * STEPS}
    turns = shoal.train("cartpole", run_dir=tmp_path / "turns", **{**settings, "asynchronous": False})
    both = shoal.train("cartpole", run_dir=tmp_path / "both", **{**settings, "asynchronous": True, "max_policy_lag": 0})
    assert_equal_states(last_state(turns.path), last_state(both.path))


def test_a_run_without_lag_resumes_bit_for_bit(tmp_path):
    settings = dict(**SMALL, algo="appo", lr_schedule="none", max_policy_lag=0)
    whole = shoal.train("cartpole", total_steps=30 * STEPS, run_dir=tmp_path / "whole", **settings)
    shoal.train("cartpole", total_steps=13 * STEPS, run_dir=tmp_path / "cut", **settings)
    assert_equal_states(last_state(whole.path), last_state(shoal.resume(tmp_path / "cut", total_steps=30 * STEPS).path))


class Observed(threading.Condition):
    """Records the iteration after which the actor last asked to continue."""

    asked = -1

    def __init__(self, trainer):
        super().__init__()
        self.trainer = trainer

    def wait_for(self, predicate, timeout=None):
        def ask():
            if threading.current_thread().name == "actor":
                self.asked = self.trainer.iteration
            return predicate()

        return super().wait_for(ask, timeout)


@pytest.mark.parametrize("kind", KINDS)
def test_without_lag_nothing_waits_at_a_checkpoint_and_resuming_is_exact(kind):
    """Four cuts, each made only after the actor has had its chance to begin another rollout."""
    settings = {**SMALL, "max_policy_lag": 0, "total_steps": 20 * STEPS, **KINDS[kind], "asynchronous": True}
    job = make_job("cartpole", **settings)
    saved = {}
    with closing(AsyncTrainer(job)) as whole:
        whole._changed = Observed(whole)
        for iteration in range(1, 21):
            whole.iterate()
            if iteration % 4 == 0:
                deadline = time.monotonic() + 30
                while whole._changed.asked < iteration and iteration < 20:
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
                with whole.paused():
                    assert int(whole.collector.counter) == whole.iteration == iteration
                    assert not whole._finished
                    saved[iteration] = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    for iteration in (4, 8, 12, 16):
        with closing(AsyncTrainer(job)) as resumed:
            resumed.load_state_dict(saved[iteration], iteration)
            while not resumed.done:
                resumed.iterate()
            with resumed.paused():
                assert_equal_states(saved[20], resumed.state_dict())


def seams(trainer) -> list[int]:
    """Rows of the replay that no end of an episode, and no physics, leads on from."""
    replay = trainer.learners["cart"].replay
    filled = int(replay.filled)
    seen, ended = replay.frames[:filled, :, 0], (replay.terminated | replay.truncated)[: filled - 1]
    x, speed = seen[..., 0], seen[..., 1]
    wrong = (x[1:] - (x[:-1] + 0.02 * speed[:-1])).abs() > 1e-4
    return (wrong & ~ended).any(1).nonzero().flatten().tolist()


def lagging(**settings) -> AsyncTrainer:
    """A trainer that learns slowly: rollouts wait."""
    settings = {**SMALL, "total_steps": 60 * STEPS, "max_policy_lag": 2, "asynchronous": True, **settings}
    trainer = AsyncTrainer(make_job("cartpole", **settings))
    update = trainer.update
    trainer.update = lambda: (update(), time.sleep(0.03))
    return trainer


def test_a_resumed_replay_is_cut_after_lost_rollouts():
    with closing(lagging(algo="dqn", **Q)) as trainer, closing(lagging(algo="dqn", **Q)) as resumed:
        for _ in range(10):
            trainer.iterate()
        time.sleep(0.2)
        with trainer.paused():
            assert int(trainer.collector.counter) > trainer.iteration
            state = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        resumed.load_state_dict(state, 10)
        for _ in range(3):
            resumed.iterate()
        assert seams(trainer) == seams(resumed) == []


def test_metrics_after_a_resume_cover_new_episodes_only():
    with closing(lagging(algo="appo")) as trainer, closing(lagging(algo="appo")) as resumed:
        for _ in range(20):
            trainer.iterate()
        with trainer.paused():
            state = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        resumed.load_state_dict(state, 20)
        episodes, steps = resumed.episode_sums()[:2].tolist()
        assert episodes > 0
        for _ in range(20):
            resumed.iterate()
        with resumed.paused():
            later, more = resumed._sums[:2].tolist()
            assert resumed.read_metrics()["rollout/ep_len_mean"] == pytest.approx((more - steps) / (later - episodes))


@pytest.mark.parametrize("max_policy_lag", [1, 3])
def test_lag_is_reported_and_within_its_limit(max_policy_lag):
    """Learning is made slow: the queue fills, and policies are as old as they may be."""
    settings = {**SMALL, "total_steps": 40 * STEPS, "max_policy_lag": max_policy_lag}
    trainer = AsyncTrainer(make_job("cartpole", algo="appo", **settings))
    update = trainer.update

    def slow():
        update()
        time.sleep(0.1)

    trainer.update = slow
    try:
        for _ in range(12):
            trainer.iterate()
            read = trainer.learners["cart"].rollout
            assert int(trainer.learners["cart"].updates) == trainer.iteration == int(read.version)
        found = trainer.read_metrics()
        assert found["train/lag_max"] == max_policy_lag
        assert 0.5 * max_policy_lag < found["train/lag_mean"] <= max_policy_lag
        assert found["time/actor_waits"] > 0.0
        with trainer.paused():
            made = trainer.collector.counter.clone()
            for name, player in trainer.acting_policies.items():
                assert_equal_states(player.state_dict(), trainer.policies[name].state_dict())
            time.sleep(0.1)
            assert torch.equal(made, trainer.collector.counter)
        assert int(made) <= trainer.iteration + max_policy_lag + 1
    finally:
        trainer.close()


@pytest.mark.parametrize("schedule", ["lockstep", "alternating", "first-come"])
def test_players_get_newer_weights_in_the_middle_of_a_rollout(schedule):
    """The first rollout is learned from while the second is half made, whose later steps then know of it."""
    host = dict(env_schedule=schedule, vec_backend="processes", num_workers=3, desync_steps=0)
    settings = {
        **SMALL,
        "rollout_steps": 20,
        "total_steps": 40 * 8 * 20,
        "max_policy_lag": 1,
        "lr": 0.05,
        "compile": "off",
    }
    trainer = AsyncTrainer(make_job("gym:CartPole-v1", algo="appo", world_config=host, **settings))
    update, send, half = trainer.update, trainer.world.vector_env.send, threading.Event()
    trainer.world.reset(0)
    env_slices = trainer.world.vector_env.env_slices
    sent = [0] * len(env_slices)

    def send_and_see(which):
        send(which)
        if not half.is_set():
            for index in which:
                sent[index] += 1
            if sum(sent) >= 1.5 * 20 * len(env_slices):
                half.set()
                with trainer._changed:
                    assert trainer._changed.wait_for(lambda: trainer.iteration == 1, 30)

    def update_late():
        assert half.wait(30)
        update()

    def log_probs(weights):
        """Of what was done in the rollout that was learned from last, by a policy with these weights."""
        policy.load_state_dict(weights)
        seen, action = (rows.flatten(0, 2) for rows in (rollout.observation[:20], rollout.action))
        with torch.no_grad():
            found, _ = policy.head.log_prob_and_entropy(policy.distribution(seen), action)
        return found.view(20, 8)

    trainer.world.vector_env.send, trainer.update = send_and_see, update_late
    policy, rollout = trainer.policies["agent"], trainer.learners["agent"].rollout
    first = {name: value.clone() for name, value in policy.state_dict().items()}
    try:
        trainer.iterate()
        then = {name: value.clone() for name, value in policy.state_dict().items()}
        trainer.iterate()
        assert trainer.read_metrics()["train/lag_max"] == 1  # as many as its first step was behind
    finally:
        trainer.close()
    made, old, new = rollout.log_prob[..., 0], log_probs(first), log_probs(then)
    assert (old - new).abs().mean() > 0.01
    for rows, steps in zip(env_slices, sent, strict=True):
        half_way = steps - 20  # in the second rollout; the step under way may have come just before the weights
        torch.testing.assert_close(made[:half_way, rows], old[:half_way, rows])
        torch.testing.assert_close(made[half_way + 1 :, rows], new[half_way + 1 :, rows])


def test_acting_policies_have_the_loaded_weights(tmp_path):
    run = shoal.train("cartpole", algo="appo", run_dir=tmp_path / "run", **{**SMALL, "total_steps": 20 * STEPS})
    trainer = AsyncTrainer(run.job)
    trainer.load_state_dict(last_state(run.path), 20)
    with trainer.paused():
        assert_equal_states(trainer.acting_policies["cart"].state_dict(), run.policies["cart"].state_dict())
    trainer.close()


@pytest.mark.parametrize("max_policy_lag", [0, 3])
def test_memory_estimate_includes_queued_rollouts(max_policy_lag):
    settings = {**SMALL, "num_envs": 64, "total_steps": 40 * STEPS}
    plain = make_job("tag-grid", algo="ppo", freeze_groups=("runner",), one_policy=False, **settings)
    both = make_job(
        "tag-grid",
        algo="ppo",
        asynchronous=True,
        max_policy_lag=max_policy_lag,
        freeze_groups=("runner",),
        one_policy=False,
        **settings,
    )
    trainer = AsyncTrainer(both)
    waiting = [trainer._free.get() for _ in range(max_policy_lag + 1)]
    held = sum(t.nbytes for slot in waiting for t in slot.memory)
    held += sum(learner.rollout.nbytes for learner in trainer.learners.values())
    trainer.close()
    more = estimate(both).rollout - estimate(plain).rollout
    assert held / 64 == pytest.approx(more, rel=0.01)


def test_it_learns_with_much_lag(tmp_path):
    run = shoal.train(
        "cartpole",
        algo="appo",
        max_policy_lag=8,
        total_steps=250_000,
        run_dir=tmp_path / "run",
        quiet=True,
        device="cpu",
    )
    assert run.evaluate(episodes=50)["cart"].mean >= 300
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    lags = [row["train/lag_max"] for row in rows if "train/lag_max" in row]
    assert 1 <= max(lags) <= 8


def test_several_groups_learn_and_frozen_ones_stay(tmp_path):
    settings = {**SMALL, "total_steps": 20 * STEPS, "one_policy": False, "freeze_groups": ("runner",)}
    run = shoal.train("tag-grid", algo="impala", run_dir=tmp_path / "run", **settings)
    fresh = Trainer(make_job("tag-grid", algo="a2c", **settings))
    state = last_state(run.path)
    for name, same in (("runner", True), ("tagger", False)):
        first = fresh.policies[name].head.linear.weight
        assert torch.equal(state[f"policy.{name}.head.linear.weight"], first) == same


def test_a_fault_of_the_world_ends_the_run(tmp_path):
    job = make_job("cartpole", algo="appo", total_steps=40 * STEPS, **SMALL)
    trainer = AsyncTrainer(job)
    collect, made = trainer.collector.collect, []

    def fails():
        made.append(1)
        if len(made) == 5:
            raise ShoalError("The pole broke.")
        collect()

    trainer._collect.function = fails

    def run():
        for _ in range(40):
            trainer.iterate()

    with pytest.raises(ShoalError, match="The pole broke"):
        run()
    trainer.close()
    assert len(made) == 5
    assert not [t for t in threading.enumerate() if t.name == "actor"]


def test_a_mailbox_delivers_what_was_put():
    """Whole, and in order, however fast they are."""
    slot, got = TensorMailbox([torch.zeros(1000), torch.zeros(1)], torch.device("cpu")), []

    def write():
        for i in range(1, 300):
            slot.put([torch.full((1000,), float(i)), torch.tensor([float(i)])])

    writer = threading.Thread(target=write)
    writer.start()
    into = [torch.zeros(1000), torch.zeros(1)]
    while writer.is_alive():
        slot.take(into)
        assert bool((into[0] == into[1]).all())
        got.append(float(into[1]))
    writer.join()
    assert got == sorted(got)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--max-policy-lag", "-1"], "--max-policy-lag must be at least 0"),
        (["--learner-device", "cpu"], "--learner-device is for training with --asynchronous"),
        (["--algo", "appo", "--rho-clip", "0"], "--rho-clip must be above 0"),
        (["--algo", "appo", "--learner-device", "cuda:9"], "--learner-device cuda:9"),
    ],
)
def test_invalid_combinations_exit_2_with_one_sentence(words, answer, tmp_path, capsys):
    assert main(["train", "cartpole", *words, "--run-dir", str(tmp_path / "run")]) == 2
    assert answer in capsys.readouterr().err


# --- A3C --------------------------------------------------------------------------------------------------------------


def test_one_actor_learner_is_a2c(tmp_path):
    settings = dict(**SMALL, total_steps=30 * STEPS, normalize_obs=True)
    plain = shoal.train("cartpole", algo="a2c", run_dir=tmp_path / "plain", **settings)
    alone = shoal.train("cartpole", algo="a3c", actors=1, run_dir=tmp_path / "alone", **settings)
    assert_equal_states(last_state(plain.path), last_state(alone.path))


def test_actor_learners_have_separate_envs_and_shared_parameters(tmp_path):
    settings = dict(**SMALL, total_steps=30 * STEPS)
    run = shoal.train("cartpole", algo="a3c", actors=4, run_dir=tmp_path / "run", **settings)
    state = last_state(run.path)
    assert state["world.x"].unique().numel() == 8
    assert int(state["learner.cart.optimizer.steps"]) == 4 * 30
    evaluated = run.evaluate(episodes=6)
    assert evaluated == load_run(run.path, "last").evaluate(episodes=6)
    again = shoal.resume(run.path, total_steps=40 * STEPS)
    assert int(last_state(again.path)["learner.cart.optimizer.steps"]) == 4 * 40
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("train/lag_max", 0.0) for row in rows) >= 1


@pytest.mark.slow
def test_actor_learners_balance_the_pole(tmp_path):
    run = shoal.train("cartpole", algo="a3c", total_steps=250_000, run_dir=tmp_path / "run", quiet=True, device="cpu")
    assert run.evaluate(episodes=50)["cart"].mean >= 150


def shared_trainer(**settings) -> SharedTrainer:
    return SharedTrainer(make_job("cartpole", algo="a3c", actors=4, **{**SMALL, "total_steps": 10**6, **settings}))


def test_episodes_of_all_actors_count_alike():
    """Ten of return 10 by one actor, one of 500 by another."""
    with closing(shared_trainer()) as trainer:
        for part, count, each in zip(trainer.parts, (10, 1), (10.0, 500.0), strict=False):
            store = part.world.store
            store.finished[0], store.return_sum[0], store.length_sum[0] = count, count * each, int(count * each)
        metrics = trainer.read_metrics()
    assert metrics["rollout/ep_rew_mean"] == metrics["rollout/ep_len_mean"] == pytest.approx(600 / 11)
    assert metrics["rollout/episodes"] == 11


def test_actor_learners_that_finish_early_do_not_block():
    """The last rollouts may be done between two looks at whether all is done."""
    with closing(shared_trainer(total_steps=4 * SMALL["num_envs"] * SMALL["rollout_steps"])) as trainer:
        trainer.iterate()
        for thread in trainer._threads:
            thread.join()
        assert trainer.done
        late = threading.Thread(target=trainer.iterate, daemon=True)
        late.start()
        late.join(20)
        assert not late.is_alive()


def test_actor_learners_stand_still_at_once():
    """A part that is between two rollouts does not begin another while all are asked to wait."""
    with closing(shared_trainer()) as trainer:
        for _ in range(3):
            trainer.iterate()
        more = []
        for _ in range(21):
            before = trainer._begun
            with trainer.paused():
                begun = trainer._begun
                more.append(begun - before)
                time.sleep(0.002)
                assert trainer._begun == begun
        # On a busy machine this thread may wait for a core before it asks.
        assert statistics.median(more) <= len(trainer.parts)


def test_actor_learners_scale_rewards_alike_and_never_draw_noise_twice():
    settings = dict(normalize_reward=True)
    with closing(shared_trainer(**settings)) as trainer, closing(shared_trainer(**settings)) as resumed:
        for _ in range(20):
            trainer.iterate()
        with trainer.paused():
            moments = [part.learners["cart"].reward_moments for part in trainer.parts]
            assert len({float(each.count) for each in moments}) == 1
            assert float(moments[0].count) == trainer._done * STEPS / 4
            made = max(int(part.collector.counter) for part in trainer.parts)
            resumed.load_state_dict({k: v.clone() for k, v in trainer.state_dict().items()}, trainer.iteration)
        assert [int(part.collector.counter) for part in resumed.parts] == [made] * 4


def test_of_actor_learners_the_one_with_the_bad_env_is_blamed():
    with closing(shared_trainer()) as trainer:
        trainer.iterate()
        with trainer.paused():
            guilty, collect = trainer.parts[3], trainer.parts[3].collector.collect

            def spoilt():
                collect()
                guilty.collector.rollouts["cart"].reward[2, 0, 0] = float("nan")

            guilty._collect.function = spoilt
        for _ in range(8):
            trainer.iterate()
        with trainer.paused(), pytest.raises(ShoalError, match="Env 6, agent 0 of cartpole gave a non-finite reward"):
            trainer.check_finite()


def test_actor_learners_must_share_the_envs_evenly():
    with pytest.raises(ShoalError, match="cannot be split evenly between 3 actors"):
        make_job("cartpole", algo="a3c", actors=3, **SMALL)
