from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.runs.jobs import make_job
from shoal.training.trainer import Trainer

HERE = Path(__file__).parent / "envs.py"


def trainer(name="Walk", kwargs=None, **settings):
    host = dict(vec_backend="processes", num_workers=settings.pop("num_workers", 2), desync_steps=5)
    host["env_schedule"] = settings.pop("env_schedule", "lockstep")
    host["num_env_slices"] = settings.pop("num_env_slices", 2)
    host["env_kwargs"] = kwargs or {}
    settings = (
        dict(num_envs=6, rollout_steps=20, total_steps=10_000, num_minibatches=2, epochs=1, device="cpu") | settings
    )
    return Trainer(make_job(f"{HERE}:{name}", world_config=host, **settings))


def experience(env_schedule, updates=3, **settings):
    made = []
    found = trainer(env_schedule=env_schedule, **settings)
    with closing(found.world):
        for _ in range(updates):
            found.collect()
            for r in found.collector.rollouts.values():
                made += [v.clone() for v in vars(r).values() if isinstance(v, torch.Tensor)]
            found.update()
        made.append(found.world.statistics().episodes.clone())
    return made


@pytest.mark.parametrize("env_schedule", ["alternating", "first-come"])
@pytest.mark.parametrize(
    "settings",
    [
        dict(kwargs={"truncate": True}, time_limit=11),
        dict(kwargs={"truncate": True}, frame_stack=3, time_limit=12),
        dict(name="Hunt"),
        dict(rnn="lstm", rnn_size=8, kwargs={"truncate": True}),
    ],
    ids=["truncated", "stacked", "groups", "recurrent"],
)
def test_all_schedules_make_the_same_experience(env_schedule, settings):
    for a, b in zip(experience("lockstep", **settings), experience(env_schedule, **settings), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        dict(time_limit=11),
        dict(frame_stack=3, time_limit=12),
        dict(frame_stack=2, obs_dtype="bfloat16"),
        dict(rnn="lstm", rnn_size=8),
        dict(name="Push"),
        dict(num_envs=8, num_workers=3),
        dict(num_envs=8, num_workers=7),
    ],
    ids=["truncated", "stacked", "short floats", "recurrent", "continuous", "two slices each", "uneven"],
)
def test_envs_at_different_steps_act_together(settings):
    settings = dict(num_workers=6, kwargs=dict(truncate=True, delay=2e-3)) | settings
    for a, b in zip(experience("lockstep", **settings), experience("first-come", **settings), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("env_schedule", ["alternating", "first-come"])
def test_there_can_be_three_env_slices_per_worker(env_schedule):
    settings = dict(kwargs={"truncate": True}, time_limit=11)
    in_three = experience(env_schedule, num_env_slices=3, **settings)
    for a, b in zip(experience("lockstep", **settings), in_three, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(ShoalError, match="--num-env-slices must be between 2 and 254"):
        trainer(env_schedule=env_schedule, num_env_slices=1)
    with pytest.raises(ShoalError, match="--num-workers must be between 0 and 4096"):
        trainer(env_schedule=env_schedule, num_workers=10**6)


@pytest.mark.parametrize("env_schedule", ["lockstep", "alternating", "first-come"])
def test_there_can_be_a_worker_for_every_env(env_schedule):
    found = trainer(env_schedule=env_schedule, num_workers=6)
    with closing(found.world):
        assert len(found.world.vector_env.runner.workers) == len(found.world.vector_env.env_slices) == 6
        found.collect()


def test_state_is_cleared_at_reset_only_steps():
    """Gymnasium's native CartPole uses NEXT_STEP autoreset: the step after an episode's end only resets."""
    settings = dict(
        num_envs=8, rollout_steps=64, num_minibatches=2, epochs=1, total_steps=4096, device="cpu", compile="off"
    )
    world = dict(vec_backend="native", desync_steps=0)
    stacked_up = Trainer(make_job("gym:CartPole-v1", frame_stack=3, world_config=world, **settings))
    core = Trainer(make_job("gym:CartPole-v1", rnn="gru", rnn_size=8, world_config=world, **settings))
    with closing(stacked_up.world), closing(core.world):
        stacked_up.collect()
        rollout = stacked_up.collector.rollouts["agent"]
        begins = (rollout.alive[1:-1] & ~rollout.alive[:-2])[:, :, 0]
        assert begins.sum() > 8
        assert (rollout.age[1:-1][begins] == 0).all()
        core.collect()
        rollout = core.collector.rollouts["agent"]
        sat = ~rollout.alive[:-1, :, 0]
        assert sat.sum() > 8
        assert rollout.terminated[sat].all()
        # The learner's pass over the rows gives the log-probabilities that the policy acted with.
        policy, ended = core.policies["agent"], rollout.terminated | rollout.truncated
        parameters, _ = policy.sequence(
            rollout.observation[:-1].flatten(0, 2), rollout.rnn_state[0].flatten(0, 1), ended
        )
        found, _ = policy.head.log_prob_and_entropy(parameters, rollout.action.flatten(0, 2))
        alive = ~sat.flatten()
        torch.testing.assert_close(found[alive], rollout.log_prob.flatten()[alive], atol=1e-5, rtol=0)


def test_a_rollout_holds_what_the_envs_did():
    found = trainer(env_schedule="alternating", kwargs={"truncate": True}, time_limit=9)
    with closing(found.world):
        for _ in range(3):
            found.collect()
            r = found.collector.rollouts["agent"]
            seen, act, reward = r.observation[:, :, 0].numpy(), r.action[:, :, 0].numpy(), r.reward[:, :, 0].numpy()
            over = (r.terminated | r.truncated).numpy()
            slots = np.zeros(6, int)
            for t in range(20):
                moved = seen[t, :, 0] + np.where(act[t] == 1, 1.0, -1.0)
                np.testing.assert_allclose(reward[t], moved, rtol=1e-5, atol=1e-5)
                for env in range(6):
                    if over[t, env]:
                        assert seen[t + 1, env, 1] == 0
                        final = r.final_observation[slots[env], env, 0].numpy()
                        np.testing.assert_allclose(final[:2], [moved[env], seen[t, env, 1] + 1], rtol=1e-5, atol=1e-5)
                        slots[env] += 1
                    else:
                        np.testing.assert_allclose(seen[t + 1, env, 0], moved[env], rtol=1e-5, atol=1e-5)
            assert slots.sum() > 4


def test_auto_times_the_schedules_and_reports_them():
    found = trainer(env_schedule="auto")
    with closing(found.world):
        assert found.collector.schedule in ("lockstep", "alternating", "first-come")
        line = found.collector.describe_stepping()[0]
        assert "2 worker process(es) with 3 envs each" in line
        assert "ms" in line
        found.iterate()


def test_an_env_that_truncates_more_often_than_its_limit_is_named():
    import gymnasium

    from tests.host.envs import Walk

    gymnasium.register("Walk-v0", Walk, max_episode_steps=30)
    settings = dict(num_envs=4, rollout_steps=20, device="cpu", num_minibatches=2)
    host = dict(vec_backend="serial", env_kwargs={"truncate": True, "longest": 3}, desync_steps=0)
    with pytest.raises(ShoalError, match="--env-truncates"):
        Trainer(make_job("gym:Walk-v0", world_config=host, **settings)).collect()
    Trainer(make_job("gym:Walk-v0", world_config=host | dict(env_truncates=True), **settings)).collect()
