"""Preempted rollouts: their steps are learned from, and episodes continue in the next rollout."""

from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
import torch.distributed as dist

from shoal.core.errors import ShoalError
from shoal.host.world import HostWorld
from shoal.runs.jobs import make_job
from shoal.training.memory_estimate import estimate
from shoal.training.processes import Communicator, Preemption
from shoal.training.trainer import Trainer
from tests.host.envs import Walk

HERE = Path(__file__).parent / "envs.py"
ENVS, STEPS, LEAST = 6, 20, 5
gymnasium.register("Strider-v0", Walk, max_episode_steps=30)
SCHEDULES = ("lockstep", "alternating", "first-come")


class ScriptedPreemption:
    """Requests preemption the n-th time it is asked in a rollout; `asks` has n for each rollout, or None for never."""

    def __init__(self, *asks: int | None):
        self.asks, self.count, self.rollout = asks, 0, 0

    def requested(self) -> bool:
        self.count += 1
        at = self.asks[self.rollout % len(self.asks)]
        return at is not None and self.count >= at

    def finish(self) -> None:
        self.count, self.rollout = 0, self.rollout + 1


def trainer(
    preemption=None, env_schedule="lockstep", name="Walk", kwargs=None, backend="serial", **settings
) -> Trainer:
    host = dict(vec_backend=backend, num_workers=2, env_schedule=env_schedule, desync_steps=5, env_kwargs=kwargs or {})
    default = dict(num_envs=ENVS, rollout_steps=STEPS, total_steps=10_000, num_minibatches=1, epochs=1, device="cpu")
    if settings.get("algo", "ppo") != "ppo":
        del default["num_minibatches"], default["epochs"]
    default["sync_frac"] = 0.5
    made = Trainer(make_job(name if ":" in name else f"{HERE}:{name}", world_config=host, **default | settings))
    collector: Any = made.collector
    collector.preemption, run = preemption or collector.preemption, collector._run_schedule

    def spied(*args):
        collector.steps_made = run(*args)
        return collector.steps_made

    collector._run_schedule = spied
    return made


def rows(tensor: torch.Tensor | None, start: int, count: int, envs) -> torch.Tensor:
    """Some rows of some envs; empty if the tensor is None."""
    return torch.zeros(0) if tensor is None else tensor[start : start + count, envs].clone()


def ends(made: Any) -> list[tuple[slice, int]]:
    """Rows and steps of each env slice in the last rollout."""
    return list(zip(made.world.vector_env.env_slices, made.collector.steps_made, strict=True))


KINDS = {
    "plain": dict(kwargs={"longest": 40}),
    "truncated": dict(kwargs={"truncate": True, "longest": 8}, time_limit=7),
    "stacked": dict(kwargs={"truncate": True}, frame_stack=3, time_limit=12, normalize_obs=True),
    "recurrent": dict(rnn="lstm", rnn_size=8, kwargs={"truncate": True}),
    "groups": dict(name="Hunt"),
    "no alive flags": dict(kwargs={"longest": 40}),
}


@pytest.mark.parametrize("env_schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_rollout_is_the_beginning_of_a_whole_one(env_schedule, kind, monkeypatch):
    """To a learner it equals a shorter rollout; the next rollout continues where it stopped."""
    if kind == "no alive flags":
        monkeypatch.setattr(HostWorld, "writes_alive", False)
    close = dict(rtol=1e-4, atol=1e-5) if env_schedule == "first-come" else dict(rtol=0, atol=0)
    preempted, whole = (
        trainer(ScriptedPreemption(4), env_schedule, **KINDS[kind]),
        trainer(ScriptedPreemption(None), env_schedule, **KINDS[kind]),
    )
    with closing(preempted), closing(whole):
        preempted.collect()
        whole.collect()
        made = ends(preempted)
        assert all(k == STEPS for _, k in ends(whole))
        short = {}
        for envs, k in made:
            assert k == LEAST + 3 or (env_schedule == "first-come" and LEAST <= k < STEPS)
            if k not in short:
                short[k] = trainer(ScriptedPreemption(None), "lockstep", **KINDS[kind] | dict(rollout_steps=k))
                short[k].collect()
            for name, a in preempted.collector.rollouts.items():
                b, c = whole.collector.rollouts[name], short[k].collector.rollouts[name]
                for field in ("action", "log_prob", "reward", "terminated", "alive", "age"):
                    torch.testing.assert_close(
                        rows(getattr(a, field), 0, k, envs), rows(getattr(b, field), 0, k, envs), **close
                    )
                seen = k + a.stack - 1
                torch.testing.assert_close(rows(a.observation, 0, seen, envs), rows(b.observation, 0, seen, envs))
                assert (a.terminated | a.truncated)[k - 1, envs].all()
                assert not (a.terminated | a.truncated)[k:, envs].any()
                assert not a.alive[k:STEPS, envs].any()
                # Carried-over rows equal the whole rollout's at that step, and those of a shorter rollout.
                for other, row in ((b, k), (c, k)):
                    torch.testing.assert_close(
                        rows(a.observation, STEPS, a.stack, envs), rows(other.observation, row, a.stack, envs)
                    )
                    for field in ("age", "alive"):
                        assert torch.equal(
                            rows(getattr(a, field), STEPS, 1, envs), rows(getattr(other, field), row, 1, envs)
                        )
                torch.testing.assert_close(
                    rows(a.rnn_state, 1, 1, envs), rows(c.rnn_state, 1, 1, envs), rtol=1e-4, atol=1e-5
                )
        for each in (preempted, *short.values()):
            for learner in each.learners.values():
                learner._prepare()
        for envs, k in made:
            for name, learner in preempted.learners.items():
                for field in ("advantage", "target"):
                    ours, theirs = getattr(learner, field), getattr(short[k].learners[name], field)
                    torch.testing.assert_close(ours[:k, envs], theirs[:k, envs], rtol=1e-3, atol=1e-4)
        for each in short.values():
            each.close()
        before = {name: r.observation[STEPS:].clone() for name, r in preempted.collector.rollouts.items()}
        preempted.collector.preemption = ScriptedPreemption(None)
        preempted.collect()
        for name, r in preempted.collector.rollouts.items():
            assert torch.equal(r.observation[: r.stack], before[name])
            assert not r.preempted.any()
            assert r.alive.all() or kind == "groups"
        assert all(k == STEPS for _, k in ends(preempted))


@pytest.mark.parametrize("env_schedule", SCHEDULES)
def test_episodes_continue_through_preempted_rollouts(env_schedule):
    """Preemption changes neither the envs' transitions nor statistics nor running returns."""
    preemption = ScriptedPreemption(1, None, 9, 2)
    backend = "processes" if env_schedule == "first-come" else "serial"
    found = trainer(preemption, env_schedule, kwargs={"longest": 30}, backend=backend, normalize_reward=True, gamma=0.9)
    with closing(found):
        seen, rewards, over = ([[] for _ in range(ENVS)] for _ in range(3))
        for _ in range(8):
            found.collect()
            r = found.collector.rollouts["agent"]
            for env in range(ENVS):
                k = int(r.alive[:-1, env, 0].sum())
                seen[env] += r.observation[:k, env, 0].tolist()
                rewards[env] += r.reward[:k, env, 0].tolist()
                over[env] += (r.terminated | r.truncated)[:k, env].tolist()
                if r.preempted[env]:
                    over[env][-1] = False
            found.update()
        episodes, lengths = found.world.statistics().episodes, found.world.statistics().length_sum
        for env in range(ENVS):
            running, begun = 0.0, seen[env][0][1]
            for t, (reward, ended) in enumerate(zip(rewards[env], over[env], strict=True)):
                running = reward + 0.9 * running
                if ended:
                    running = 0.0
                if t + 1 < len(over[env]):
                    place, at, end = seen[env][t + 1]
                    assert at == (0.0 if ended else seen[env][t][1] + 1)
                    assert ended == (seen[env][t][1] + 1 == seen[env][t][2])
                    if not ended:
                        assert place == pytest.approx(reward)
                        assert end == seen[env][t][2]
            assert int(episodes[env]) - sum(over[env]) in (0, 1, 2)  # some ended before the first rollout
            assert float(found.learners["agent"].reward_carry[env, 0]) == pytest.approx(running, rel=1e-4, abs=1e-4)
            assert begun >= 0
        assert int(lengths.sum()) >= sum(len(each) for each in over) - 30 * ENVS
        made = sum(len(each) for each in over)
        assert found.read_metrics()["time/collected_fraction"] == pytest.approx(made / (8 * STEPS * ENVS))
        assert made < 8 * STEPS * ENVS


@pytest.mark.parametrize(
    ("env_schedule", "name", "prioritized"),
    [
        ("alternating", "Walk", False),
        ("first-come", "Walk", True),
        ("alternating", "gym:Strider-v0", False),
        ("lockstep", "gym:Strider-v0", True),
    ],
)
def test_a_replay_bootstraps_where_rollouts_were_preempted(env_schedule, name, prioritized):
    """n-step windows end there with the next observation, stacks reach back over the gap, and no row in it is drawn."""
    n, gamma = 3, 0.9
    blocks = 6
    settings = dict(algo="dqn", n_step=n, gamma=gamma, prioritized=prioritized, frame_stack=2)
    settings |= dict(buffer_size=blocks * STEPS * ENVS)
    backend = "processes" if env_schedule == "first-come" else "serial"
    settings |= dict(backend=backend, learning_starts=10_000)
    found = trainer(ScriptedPreemption(2, 8), env_schedule, name, kwargs={"longest": 30}, **settings)
    with closing(found):
        made, preempted = (
            torch.zeros(blocks, STEPS, ENVS, dtype=torch.bool),
            torch.zeros(blocks, ENVS, dtype=torch.bool),
        )
        for i in range(2 * blocks + 2):
            found.collect()
            r = found.collector.rollouts["agent"]
            made[i % blocks], preempted[i % blocks] = r.alive[:-1, :, 0], r.preempted
            found._store()
        replay = found.learners["agent"].replay
        crossed = 0
        for _ in range(20):
            sample = replay.sample(64)
            row, env = sample.index // ENVS, sample.index % ENVS
            lives = made[row // STEPS, row % STEPS, env]
            assert torch.equal(sample.weight > 0, lives)
            assert lives.all() or not prioritized
            seen, later = sample.observation.view(-1, 2, 3)[lives], sample.next_observation.view(-1, 2, 3)[lives]
            for frames in (seen, later):  # two frames of one episode, one step apart
                torch.testing.assert_close(frames[:, 0, 1], (frames[:, 1, 1] - 1).clamp(min=0))
                assert torch.equal(frames[:, 0, 2], frames[:, 1, 2])
            on = sample.discount[lives] > 0
            went = later[:, 1, 1] - seen[:, 1, 1]
            torch.testing.assert_close(sample.discount[lives][on], gamma ** went[on])
            assert torch.equal(later[on, 1, 2], seen[on, 1, 2])
            for i, e, steps in zip(row[lives][on].tolist(), env[lives][on].tolist(), went[on].tolist(), strict=True):
                left = int(made[i // STEPS, i % STEPS :, e].sum()) if preempted[i // STEPS, e] else STEPS
                assert steps == min(n, left)
                crossed += left < n
        assert crossed > 10


def test_memory_of_preemptible_rollouts_is_estimated():
    found = []
    for share in (0.0, 0.5):
        made = trainer(name="gym:Strider-v0", sync_frac=share)
        with closing(made):
            held = made.collector.nbytes + sum(learner.nbytes for learner in made.learners.values())
            found.append((estimate(made.job).rollout, held // ENVS))
    assert found[1][0] - found[0][0] == found[1][1] - found[0][1] > 0


def test_one_process_is_never_preempted():
    made = trainer()
    with closing(made):
        made.iterate()
        assert made.read_metrics()["time/collected_fraction"] == 1.0


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_preemption_is_requested_once_enough_processes_have_finished(kind, tmp_path):
    file = tmp_path / "store"
    stores: Any = [dist.FileStore(str(file), 5) for _ in range(5)] if kind == "file" else [dist.HashStore()] * 5
    preemptions = [Preemption(store, "key", 0.6, 5) for store in stores]
    for _ in range(3):
        for i, preemption in enumerate(preemptions):
            assert preemption.requested() == (i >= 3)
            preemption.finish()
        size = file.stat().st_size if kind == "file" else 0
        assert not any(preemption.requested() for preemption in preemptions)
        assert kind == "memory" or file.stat().st_size == size, "requested() writes nothing"
    assert [Preemption(None, "", fraction, size).enough for fraction, size in ((0.7, 10), (0.6, 2), (0.1, 4))] == [
        7,
        1,
        1,
    ]
    assert Communicator().preemption(0.0) is None


@pytest.mark.parametrize(
    ("world", "settings", "message"),
    [
        ("cartpole", dict(sync_frac=0.6), "for envs on the CPU"),
        ("gym:CartPole-v1", dict(sync_frac=1.0), "below 1"),
        ("gym:CartPole-v1", dict(sync_frac=0.6, asynchronous=True), "--asynchronous"),
        ("gym:CartPole-v1", dict(sync_frac=0.6, algo="r2d2"), "sequences"),
    ],
)
def test_preemption_is_refused_where_it_cannot_work(world, settings, message):
    with pytest.raises(ShoalError, match=message):
        make_job(world, device="cpu", **settings)


@pytest.mark.parametrize("env_schedule", SCHEDULES)
def test_a_rollout_as_long_as_the_frame_stack_cannot_be_preempted(env_schedule):
    found = trainer(ScriptedPreemption(1), env_schedule, frame_stack=8, rollout_steps=8)
    with closing(found):
        found.collect()
        assert {k for _, k in ends(found)} == {8}
