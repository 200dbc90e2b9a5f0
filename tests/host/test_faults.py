import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from shoal.cli import main
from shoal.core.errors import ShoalError
from shoal.core.world_loading import world_class
from shoal.host.memory import STEP
from shoal.runs.jobs import make_job
from shoal.training.trainer import Trainer

HERE = Path(__file__).parent / "envs.py"


def trainer(marker, hang=False, env_schedule="lockstep", name="Trouble", **settings):
    kwargs = dict(marker=str(marker), hang=hang)
    host = dict(
        vec_backend="processes",
        num_workers=2,
        env_schedule=env_schedule,
        desync_steps=0,
        worker_timeout=3.0 if hang else 60.0,
        env_kwargs=kwargs,
    )
    host.update(settings)
    sizes = dict(num_envs=8, rollout_steps=12, total_steps=10_000, num_minibatches=2, epochs=1, device="cpu")
    return Trainer(make_job(f"{HERE}:{name}", world_config=host, **sizes))


def check_dropped(rollout, lost):
    """In lost envs, rows are alive only if their episode ended before the fault."""
    alive, over = rollout.alive[:-1, :, 0], rollout.terminated | rollout.truncated
    for env in range(8):
        dropped = (~alive[:, env]).nonzero().flatten().tolist()
        assert bool(dropped) == (env in lost), (env, dropped)
        if dropped:
            first, last = dropped[0], dropped[-1]
            assert dropped == list(range(first, last + 1))
            assert first == 0 or bool(over[first - 1, env])
            assert bool(over[last, env])
            assert not bool(over[first:last, env].any())


@pytest.mark.parametrize("env_schedule", ["lockstep", "alternating", "first-come"])
def test_training_continues_when_a_worker_is_killed(env_schedule, tmp_path, capfd):
    found = trainer(tmp_path / "marker", env_schedule=env_schedule)
    with closing(found.world):
        found.iterate()
        engine = found.world.vector_env.runner
        victim = engine.workers[1].process
        envs, recv = found.world.vector_env, found.world.vector_env.recv

        def recv_and_kill(*args):  # in the middle of a rollout
            if victim.poll() is None and int(envs.episodes.length[0]) > 2:
                os.kill(victim.pid, signal.SIGKILL)
            return recv(*args)

        found.world.vector_env.recv = recv_and_kill
        found.collect()
        assert victim.poll() is not None
        lost = {row for rows in engine._shares[1] for row in range(rows.start, rows.stop)}
        check_dropped(found.collector.rollouts["agent"], lost)
        found.update()
        for _ in range(3):
            found.iterate()
        assert torch.isfinite(torch.cat([p.flatten() for p in found.policies["agent"].parameters()])).all()
        assert bool(found.collector.rollouts["agent"].alive.all())
    message = capfd.readouterr().err
    assert "killed by SIGKILL" in message
    assert "2 restart(s) left" in message


@pytest.mark.parametrize("hang", [False, True])
def test_an_env_that_raises_or_hangs_is_named_and_replaced(hang, tmp_path, capfd):
    marker = tmp_path / "marker"
    found = trainer(marker, hang)
    with closing(found.world):
        found.iterate()
        marker.touch()
        start = time.monotonic()
        found.iterate()
        assert time.monotonic() - start < 60
        assert not marker.exists()
        found.iterate()
        dead = int((~found.collector.rollouts["agent"].alive).sum())
        assert dead == 0
    message = capfd.readouterr().err
    if hang:
        assert "did not answer for 3 s and was killed" in message
    else:
        assert "RuntimeError: the ground gave way in env" in message
        assert "(seed" in message
        assert f"{HERE}:" in message
        assert "in step" in message


@pytest.fixture
def forks(tmp_path):
    """Kills the processes that Forked has started."""
    yield
    for file in tmp_path.glob("fork_*"):
        os.kill(int(file.name.removeprefix("fork_")), signal.SIGKILL)


@pytest.mark.parametrize("killed", [True, False])
def test_the_end_of_a_forked_worker_is_noticed_at_once(killed, tmp_path, capfd, forks):
    cls = world_class(f"{HERE}:Forked")
    settings = dict(
        env_kwargs=dict(marker=str(tmp_path / "m")),
        vec_backend="processes",
        num_workers=2,
        desync_steps=0,
        worker_timeout=20.0,
    )
    with closing(cls(4, "cpu", cls.Config(**settings, env_schedule="lockstep"))) as world:
        world.reset(0)
        if killed:
            os.kill(world.vector_env.runner.workers[0].process.pid, signal.SIGKILL)
        else:
            (tmp_path / "m").touch()
        world.step(torch.ones(4, 1, dtype=torch.int32))
        assert int(world.vector_env.lost.sum()) == 2
    assert ("killed by SIGKILL" if killed else "the ground gave way") in capfd.readouterr().err


@pytest.mark.parametrize("env_schedule", ["lockstep", "auto"])
def test_a_bad_seed_is_tried_once_and_timing_schedules_uses_no_restart(env_schedule, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("shoal.training.host_collector.TRIAL_SECONDS", 0.01)
    seeds = tmp_path / "seeds"
    found = trainer(
        "", name="BadSeed", env_schedule=env_schedule, max_worker_restarts=1, env_kwargs=dict(seeds=str(seeds))
    )
    with closing(found.world):
        found.collect()
        rollout = found.collector.rollouts["agent"]
        check_dropped(rollout, {0, 1, 2, 3} if env_schedule == "lockstep" else {0, 1, 4, 5})
        assert rollout.alive[3:, 0].all()
    tried = seeds.read_text().split()
    assert len(set(tried)) == len(tried)
    message = capfd.readouterr().err
    assert message.count("restarted with new seeds") == 1
    assert "no such luck in env 0 (seed 1000003)" in message


def test_an_env_that_fails_with_every_seed_while_schedules_are_timed_ends_the_run(tmp_path):
    kwargs = dict(marker=str(tmp_path), always=True)
    with pytest.raises(ShoalError, match=r"the ground gave way.*No restart is left"):
        trainer(tmp_path, env_schedule="auto", env_kwargs=kwargs)


@pytest.mark.parametrize("hang", [False, True])
def test_a_close_that_raises_or_hangs_is_a_warning(hang, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("shoal.host.envs.CLOSE_SECONDS", 0.05)
    kwargs = json.dumps(dict(hang=hang))
    sizes = [
        "--num-envs",
        "4",
        "--rollout-steps",
        "8",
        "--num-minibatches",
        "2",
        "--total-steps",
        "64",
        "--device",
        "cpu",
    ]
    words = ["train", f"{HERE}:Closing", "--env-kwargs", kwargs, "--vec-backend", "serial", *sizes]
    with pytest.warns(UserWarning, match="Closing.close failed") as message:
        assert main([*words, "--eval-episodes", "0", "--quiet", "--run-dir", str(tmp_path / "run")]) == 0
    says = "TimeoutError: it had not returned after 0.05 s" if hang else "RuntimeError: the door is stuck"
    for warning in message:
        assert re.fullmatch(rf"Closing.close failed: {says} \({HERE}:\d+ in close\)\.", str(warning.message))


def test_too_many_restarts_are_an_error_caused_by_the_traceback(tmp_path):
    marker = tmp_path / "marker"
    found = trainer(marker, max_worker_restarts=0)
    with closing(found.world):
        found.iterate()
        marker.touch()
        with pytest.raises(ShoalError, match="the ground gave way") as caught:
            found.iterate()
        assert f"{HERE}:" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "in step" in str(caught.value.__cause__)  # the worker's own traceback
        assert caught.value.exit_code == 1


def test_a_lost_episode_is_not_recorded_in_plain_steps(tmp_path):
    cls = world_class(f"{HERE}:Trouble")
    settings = dict(
        env_kwargs=dict(marker=str(tmp_path / "m")),
        vec_backend="processes",
        num_workers=2,
        desync_steps=0,
        worker_timeout=60.0,
    )
    with closing(cls(4, "cpu", cls.Config(**settings, env_schedule="lockstep"))) as world:
        world.reset(0)
        action = torch.ones(4, 1, dtype=torch.int32)
        world.step(action)
        os.kill(world.vector_env.runner.workers[0].process.pid, signal.SIGKILL)
        time.sleep(0.2)
        out = world.step(action)
        assert world.vector_env.lost.tolist() == [True, True, False, False]
        assert not bool((out.terminated | out.truncated)[:2].any())
        assert out.groups["agent"].observation[:2, 0, 1].tolist() == [0.0, 0.0]
        world.step(action)
        assert not world.vector_env.lost.any()


def test_a_death_and_an_answer_that_arrive_together_are_both_read(tmp_path):
    cls = world_class(f"{HERE}:Trouble")
    settings = dict(
        env_kwargs=dict(marker=str(tmp_path / "m")),
        vec_backend="processes",
        num_workers=3,
        desync_steps=0,
        worker_timeout=60.0,
    )
    with closing(cls(6, "cpu", cls.Config(**settings, env_schedule="lockstep"))) as world:
        world.reset(0)
        for victim in (0, 2):
            os.kill(world.vector_env.runner.workers[victim].process.pid, signal.SIGKILL)
            world.vector_env.send(range(3))
            time.sleep(0.3)  # until all answers have arrived
            assert world.vector_env.recv(range(3), 3) == [0, 1, 2]
            assert world.vector_env.lost.nonzero()[0].tolist() == [2 * victim, 2 * victim + 1]


def test_idle_envs_are_lost_with_their_worker(tmp_path):
    cls = world_class(f"{HERE}:Trouble")
    settings = dict(
        env_kwargs=dict(marker=str(tmp_path / "m")),
        vec_backend="processes",
        num_workers=2,
        desync_steps=0,
        worker_timeout=60.0,
    )
    with closing(cls(4, "cpu", cls.Config(**settings, env_schedule="first-come"))) as world:
        world.reset(0)
        world.vector_env.send([0])
        assert world.vector_env.recv([0], 1) == [0]
        os.kill(world.vector_env.runner.workers[0].process.pid, signal.SIGKILL)
        time.sleep(0.2)
        world.vector_env.send([2])
        assert world.vector_env.recv([2], 1) == [2]
        assert world.vector_env.lost.tolist() == [False, False, True, False]
        world.vector_env.collect_lost([0, 1])
        assert world.vector_env.lost.tolist() == [True, False, True, False]
        assert world.vector_env.episodes.length.tolist() == [0, 0, 0, 0]
        world.vector_env.send([0])
        assert world.vector_env.recv([0], 1) == [0]
        assert world.vector_env.lost.tolist() == [False, False, True, False]
        assert world.vector_env.episodes.length.tolist() == [1, 0, 0, 0]


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def shared_memory():
    """Names in /dev/shm, without the scenes of other tests."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("shoal-scenes-")}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_and_no_shared_memory_outlives_a_run(number, tmp_path):
    before = shared_memory()
    command = [
        sys.executable,
        "-m",
        "shoal",
        "train",
        f"{HERE}:Walk",
        "--vec-backend",
        "processes",
        "--num-workers",
        "2",
    ]
    flags = ["--num-envs", "4", "--total-steps", "1e8", "--eval-episodes", "0", "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "steps/s" in line:
            break
    workers = children(process.pid)
    assert len(workers) == 2, "".join(lines)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in workers)
    assert shared_memory() <= before


def test_a_restarted_worker_resets_slices_that_had_finished_their_step():
    """One env slice has an unread answer when the worker of both is killed: its reset is awaited all the same."""
    cls = world_class(f"{HERE}:SlowReset")
    settings = dict(vec_backend="processes", num_workers=1, desync_steps=0, worker_timeout=60.0)
    with closing(cls(8, "cpu", cls.Config(**settings, env_schedule="alternating"))) as world:
        world.reset(0)
        runner = world.vector_env.runner
        world.vector_env.arrays["command"][:] = STEP
        runner.send([0, 1])
        while 1 not in runner._done:
            runner._read_answers(10.0)
        assert world.vector_env.recv([0], 1) == [0]
        runner.send([0])
        os.kill(runner.workers[0].process.pid, signal.SIGKILL)
        assert world.vector_env.recv([0], 1) == [0]
        assert not runner.workers[0].running, "its commands were restored before it had read them"
        assert world.vector_env.recv([1], 1) == [1]
        assert world.vector_env.lost.all()
        for _ in range(2):
            runner.send([0, 1])
            assert world.vector_env.recv([0, 1], 2) == [0, 1]
        assert runner.restarts_left == world.config.max_worker_restarts - 1
        assert not world.vector_env.lost.any()
