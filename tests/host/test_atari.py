import os
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.core.launch import cpu_threads
from shoal.core.world_loading import world_class
from shoal.host.threads import with_idle_threads
from shoal.host.vector_env import env_seeds
from shoal.host.world import HostWorld
from shoal.runs.jobs import make_job
from shoal.training.build import make_world
from shoal.training.trainer import Trainer

vector_env = pytest.importorskip("ale_py.vector_env")


def make(game, num_envs, **settings):
    cls = world_class(f"ale:{game}")
    return cls(
        num_envs, "cpu", cls.Config(**{"desync_steps": 0, "env_schedule": "lockstep", "num_workers": 2, **settings})
    )


def test_frames_and_rewards_equal_those_of_ale_py():
    world = make("pong", 3, terminal_on_life_loss=False, noop_max=5)
    reference = vector_env.AtariVectorEnv(
        "pong", 3, stack_num=1, noop_max=5, autoreset_mode="SameStep", reward_clipping=False, num_threads=1
    )
    seen, _ = reference.reset(seed=env_seeds(2, 0, 3))
    np.testing.assert_array_equal(world.reset(2).groups["agent"].observation[:, 0], seen)
    random = np.random.default_rng(0)
    for _ in range(150):
        actions = random.integers(0, 6, 3).astype(np.int32)
        out = world.step(torch.from_numpy(actions)[:, None])
        seen, reward, terminated, _, _ = reference.step(actions)
        np.testing.assert_array_equal(out.groups["agent"].observation[:, 0], seen)
        np.testing.assert_array_equal(out.groups["agent"].reward[:, 0], np.clip(reward, -1, 1))
        np.testing.assert_array_equal(out.terminated, terminated)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed on Linux")
@pytest.mark.skipif(cpu_threads() < 2, reason="there is one core")
@pytest.mark.parametrize("workers", [1, 2])
def test_threads_are_pinned_to_different_cores(workers):
    def threads():
        """Thread -> the cores it may use."""
        found = (int(task.name) for task in Path("/proc/self/task").iterdir())
        return {thread: os.sched_getaffinity(thread) for thread in found}

    before, cores = threads(), os.sched_getaffinity(0)
    world = make("pong", 4, pin_threads=True, num_workers=workers, env_schedule="alternating")
    world.reset(0)
    pinned = [allowed for thread, allowed in threads().items() if thread not in before and len(allowed) == 1]
    assert len(pinned) == 2 * workers
    assert len(set.union(*pinned)) == min(2 * workers, len(cores))
    assert os.sched_getaffinity(0) == cores
    world.close()


def test_rewards_are_clipped_but_statistics_are_not():
    world = make("breakout", 4, terminal_on_life_loss=True, desync_steps=0)
    world.reset(0)
    shown = torch.zeros(4)
    for t in range(400):
        out = world.step(torch.full((4, 1), 1 + (t // 7) % 3, dtype=torch.int32))
        shown = torch.maximum(shown, out.groups["agent"].reward[:, 0])
    assert set(shown.tolist()) <= {0.0, 1.0}
    stats = world.statistics()
    assert int(stats.episodes.sum()) > 4  # a life is an episode
    assert world.for_evaluation(world.config).terminal_on_life_loss is False


def test_final_frame_is_kept_and_the_observation_starts_the_next_game():
    cls = world_class("ale:pong")
    world = cls(2, "cpu", cls.Config(desync_steps=0, env_schedule="lockstep", noop_max=0), time_limit=20)
    first = world.reset(1).groups["agent"].observation.clone()
    for t in range(20):
        before = world.outputs.groups["agent"].observation.clone()
        out = world.step(torch.zeros(2, 1, dtype=torch.int32))
        assert bool(out.truncated.all()) == (t == 19)
    group = out.groups["agent"]
    assert not torch.equal(group.final_observation, group.observation)
    assert (group.final_observation.float() - before.float()).abs().mean() < 5.0
    assert (group.observation.float() - first.float()).abs().mean() < 5.0


def test_games_start_desynchronized():
    world = make("pong", 8, desync_steps=12, noop_max=0)
    shown = world.reset(3).groups["agent"].observation
    assert len({bytes(frame.numpy().tobytes()) for frame in shown}) > 3


def test_a_policy_sees_four_frames_that_are_stored_once():
    settings = dict(num_envs=4, rollout_steps=8, num_minibatches=2, epochs=1, device="cpu", total_steps=1000)
    trainer = Trainer(make_job("ale:pong", world_config=dict(desync_steps=6, env_schedule="alternating"), **settings))
    trainer.iterate()
    trainer.collect()
    rollout = trainer.collector.rollouts["agent"]
    assert rollout.observation.shape == (3 + 8 + 1, 4, 1, 1, 84, 84)
    assert trainer.policies["agent"].group.policy_observation.shape == (4, 84, 84)
    trainer.world.close()


def test_settings_that_the_native_batch_refuses_or_ignores():
    """Native batches cannot repeat actions; frames stay uint8."""
    with pytest.raises(ShoalError, match="use --frame-skip"):
        make_world(make_job("ale:pong", action_repeat=2, device="cpu"), 2)
    assert isinstance(make_world(make_job("ale:pong", obs_dtype="float16", device="cpu"), 2), HostWorld)


def test_bad_settings_are_refused():
    config = world_class("ale:pong").Config
    for bad, message in (
        (dict(repeat_action_probability=2.0), "--repeat-action-probability must be between 0 and 1, got 2"),
        (dict(frame_skip=0), "--frame-skip"),
        (dict(vec_backend="processes"), "native batch only"),
    ):
        with pytest.raises(ShoalError, match=message):
            config(**bad)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="SCHED_IDLE exists on Linux only")
def test_threads_of_games_run_at_idle_priority_and_this_one_does_not():
    before = set(os.listdir("/proc/self/task"))
    vector = with_idle_threads(lambda: vector_env.AtariVectorEnv("pong", 2, num_threads=2))
    started = set(os.listdir("/proc/self/task")) - before
    assert len(started) >= 2
    assert {os.sched_getscheduler(int(thread)) for thread in started} == {os.SCHED_IDLE}
    assert os.sched_getscheduler(0) != os.SCHED_IDLE
    vector.close()
