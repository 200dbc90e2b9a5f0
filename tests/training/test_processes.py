"""Several processes train what one would: the same experience, the same parameters, one folder; deaths and resumes."""

import ast
import contextlib
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing

import shoal
from shoal.algos import policy_gradient
from shoal.core.errors import ShoalError
from shoal.core.launch_info import find_launch_info, first_host
from shoal.runs import launching
from shoal.runs.checkpoint import load_checkpoint
from shoal.runs.folder import RunFolder
from shoal.runs.jobs import make_job
from shoal.runs.launching import LOOPBACK, PEER_LOST, RESTARTS
from shoal.training.processes import Communicator, join_processes
from shoal.training.trainer import Trainer

ENVS, ROLLOUT = 16, 8
STEPS = ENVS * ROLLOUT
SMALL = dict(
    num_envs=ENVS,
    rollout_steps=ROLLOUT,
    eval_episodes=2,
    quiet=True,
    device="cpu",
    log_every_seconds=0.0,
    hidden=(16, 16),
)

# --- two processes that are kept for all tests ------------------------------------------------------------------


def _serve(rank: int, port: int, tasks, answers) -> None:
    """A process that runs the functions it is sent, together with the other one."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    with join_processes(make_job("cartpole", **SMALL)) as (_, processes):
        while (task := tasks.get()) is not None:
            function, given = task
            try:
                answers.put((rank, function(processes, *given)))
            except Exception as error:
                answers.put((rank, error))


class Pair:
    """Two processes that run the same function."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.tasks, self.answers = [context.Queue() for _ in range(2)], context.Queue()
        self.made = [context.Process(target=_serve, args=(r, port, self.tasks[r], self.answers)) for r in range(2)]
        for process in self.made:
            process.start()

    def run(self, function, *given) -> list:
        """What both return, in order."""
        for tasks in self.tasks:
            tasks.put((function, given))
        found = dict(self.answers.get(timeout=60) for _ in range(2))
        for answer in found.values():
            if isinstance(answer, Exception):
                raise answer
        return [found[0], found[1]]

    def close(self) -> None:
        for tasks in self.tasks:
            tasks.put(None)
        for process in self.made:
            process.join(10)


@pytest.fixture(scope="module")
def pair():
    made = Pair()
    yield made
    made.close()


def plain(state) -> dict:
    """A state that can be sent to another process."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in state.items()}


def trained(processes: Communicator, world: str, settings: dict, iterations: int, start: tuple | None = None) -> tuple:
    """The whole state after some iterations, the parameters here, and metrics; `start` is (state, iteration)."""
    trainer = Trainer(make_job(world, **settings), processes)
    if start is not None:
        whole = {name: torch.from_numpy(array) for name, array in start[0].items()}
        state = processes.scatter(whole, trainer.state_dict(), trainer.env_axes())
        trainer.load_state_dict(state, start[1])
    for _ in range(iterations):
        trainer.iterate()
    metrics = trainer.read_metrics()
    state = processes.gather(trainer.state_dict(), trainer.env_axes())
    own = [
        optimizer.flat.numpy().copy() for made in trainer.learners.values() for optimizer in made.optimizers.values()
    ]
    trainer.world.close()
    return plain(state), own, metrics


def passes(processes: Communicator) -> int:
    """Samples per pass of a heavy network, where the second process has twice as many cores as the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_gradient, "cpu_threads", lambda: 1 + processes.rank)
        settings = SMALL | dict(hidden=(2048, 2048), normalize_obs=True, num_minibatches=2, epochs=1, compile="off")
        trainer = Trainer(make_job("cartpole", **settings, total_steps=10 * STEPS), processes)
        trainer.iterate()
        trainer.close()
        return trainer.learners["cart"].micro_batch_size


def test_processes_with_unequal_cores_work_in_equal_passes(pair):
    one, two = pair.run(passes)
    assert one == two == STEPS // 2 // 2 // 2  # of a process's half of a mini-batch, half for each of two cores


def assert_close(one: dict, other: dict, tolerance: float = 2e-5) -> None:
    """Two states are the same but for rounding."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        a, b = torch.as_tensor(array), torch.as_tensor(other[name])
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


NORMALIZED = dict(normalize_obs=True, normalize_reward=True)
Q = dict(batch_size=32, buffer_size=2048, learning_starts=256, replay_ratio=2.0, target_update_interval=5)

CASES = {
    "a2c": ("pendulum", dict(SMALL, algo="a2c", **NORMALIZED)),
    "a2c, agents that leave": ("tag-grid", dict(SMALL, algo="a2c", world_config=dict(max_steps=20))),
    "ppo": ("cartpole", dict(SMALL, num_minibatches=1, epochs=3, target_kl=0.5, **NORMALIZED)),
    "ppo, agents that leave, in passes": ("tag-grid", dict(SMALL, num_minibatches=1, epochs=2, micro_batch_size=37)),
    "ppo, a core": ("cartpole", dict(SMALL, num_minibatches=1, epochs=2, rnn="gru", rnn_size=8)),
    "dqn": ("cartpole", dict(SMALL, algo="dqn", n_step=2, apex_alpha=3.0, normalize_obs=True, **Q)),
    "dqn, agents that leave": ("tag-grid", dict(SMALL, algo="dqn", **{**Q, "buffer_size": 20_000})),
    "sac": (
        "pendulum",
        dict(SMALL, algo="sac", batch_size=32, buffer_size=2048, learning_starts=256, replay_ratio=2.0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_learn_the_same_as_one(pair, case):
    world, settings = CASES[case]
    settings = dict(settings, total_steps=20 * STEPS)
    one, _, alone = trained(Communicator(), world, settings, 6)
    (two, first, metrics), (_, second, _) = pair.run(trained, world, settings, 6)
    assert all((a == b).all() for a, b in zip(first, second, strict=True)), "the processes have drifted apart"
    assert_close(one, two)
    for name, value in alone.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("case", ["ppo", "dqn", "rainbow"])
def test_a_state_can_be_scattered_and_gathered(pair, case):
    """From one process to two and back, against one that has never stopped. By priority each process draws its own."""
    if case == "rainbow":
        world, settings = "cartpole", dict(SMALL, algo="rainbow", atoms=11, **Q)
    else:
        world, settings = CASES[case]
    settings = dict(settings, total_steps=20 * STEPS, lr_schedule="none")
    before = trained(Communicator(), world, settings, 4)[0]
    between = pair.run(trained, world, settings, 3, (before, 4))[0][0]
    after = trained(Communicator(), world, settings, 2, (between, 7))[0]
    whole = trained(Communicator(), world, settings, 9)[0]
    assert after.keys() == whole.keys()
    assert all(after[name].shape == whole[name].shape for name in whole)
    if case != "rainbow":
        assert_close(after, whole)


def shuffled(processes: Communicator) -> list:
    trainer = Trainer(make_job("cartpole", **SMALL, num_minibatches=4, total_steps=STEPS), processes)
    trainer.iterate()
    return trainer.learners["cart"].order.tolist()


def test_each_process_shuffles_its_own_samples(pair):
    orders = pair.run(shuffled)
    assert orders[0] != orders[1]
    assert all(sorted(order) == list(range(STEPS // 2)) for order in orders)


def toured(processes: Communicator) -> tuple:
    """Navigation: the scenes of this process, the parameters here, and metrics."""
    settings = dict(num_envs=8, rollout_steps=8, num_minibatches=2, total_steps=640, device="cpu", compile="off")
    config = dict(scenes="cabin:0-39", scenes_in_memory=2, scene_swap_interval=0, desync_episodes=False, max_steps=6)
    trainer = Trainer(make_job("pointnav", world_config=config, **settings), processes)
    for _ in range(3):
        trainer.iterate()
    metrics = trainer.read_metrics()
    scenes = set(trainer.world.scenes_of_envs())
    flat = torch.cat([optimizer.flat for optimizer in trainer.learners["agent"].optimizers.values()])
    trainer.close()
    return scenes, flat.numpy().copy(), metrics


def test_processes_learn_together_from_separate_scenes(pair):
    (scenes, first, metrics), (others, second, other_metrics) = pair.run(toured)
    assert scenes
    assert others
    assert not scenes & others
    assert (first == second).all()
    assert metrics["rollout/episodes"] >= 8 * (3 * 8 // 6)  # those of both
    assert metrics["rollout/path_length"] == other_metrics["rollout/path_length"]


SLOW = f"{Path(__file__).parents[1] / 'host' / 'envs.py'}:Slow"


def raced(processes: Communicator, share: float, settings: dict) -> tuple:
    """The share of each rollout that this process has made, all processes' share, and the parameters here."""
    trainer = Trainer(make_job(SLOW, sync_frac=share, **settings), processes)
    made = []
    for _ in range(4):
        trainer.iterate()
        made.append(float(trainer.collector.rollouts["agent"].alive[:-1].float().mean()))
    fraction = trainer.read_metrics().get("time/collected_fraction")
    flat = torch.cat([optimizer.flat for optimizer in trainer.learners["agent"].optimizers.values()])
    trainer.close()
    return made, fraction, flat.numpy().copy()


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_stragglers_are_preempted(pair, algo):
    """The second process is slow: its rollouts end when the first has finished, and both learn from all there is."""
    settings = dict(num_envs=8, rollout_steps=32, device="cpu", hidden=(16,), total_steps=1024, algo=algo)
    settings |= dict(Q) if algo == "dqn" else dict(num_minibatches=2, epochs=2)
    settings["world_config"] = dict(vec_backend="serial", desync_steps=0, env_schedule="lockstep")
    (all_made, fraction, first), (some_made, other_fraction, second) = pair.run(raced, 0.5, settings)
    assert all(max(both) == 1.0 for both in zip(all_made, some_made, strict=True))
    assert min(some_made) < 1.0 <= max(all_made)
    assert min(all_made + some_made) >= 0.25
    assert fraction == other_fraction == pytest.approx(sum(all_made + some_made) / 8)
    assert (first == second).all()
    for made, fraction, _ in pair.run(raced, 0.0, settings):
        assert made == [1.0] * 4
        assert fraction is None


def spoilt(processes: Communicator) -> str:
    """A number of the second process is bad."""
    trainer = Trainer(make_job("cartpole", **SMALL, total_steps=4 * STEPS), processes)
    trainer.collect()
    if processes.rank == 1:
        trainer.collector.rollouts["cart"].reward[3, 2] = torch.nan
    trainer.update()
    with pytest.raises(ShoalError) as problem:
        trainer.check_finite()
    return str(problem.value)


def test_all_processes_blame_the_same_env(pair):
    messages = pair.run(spoilt)
    assert messages[0] == messages[1]
    assert "Env 10, agent 0" in messages[0]
    assert "non-finite reward" in messages[0]


# --- messages between processes ---------------------------------------------------------------------------------

VALUES = [None, True, 3, float("inf"), "ä\udcff" * 1000, [1, [2.5, None]], {"state": {"x": [0.1, -1e300]}}]


def exchanged(processes: Communicator) -> tuple:
    """What comes of values and errors, where unpickling is an error."""

    def refuse(*given):
        raise AssertionError("unpickled what came over the network")

    def bad():
        raise ShoalError("The leader cannot.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.distributed_c10d, "_unpickler", refuse)
        own = VALUES[processes.rank :: 2]  # of unequal length
        with pytest.raises(ShoalError, match="The leader cannot"):
            processes.on_leader(bad)
        return processes.collect(own), processes.on_leader(lambda: own)


def test_messages_are_json_and_never_unpickled(pair):
    expected = [VALUES[::2], VALUES[1::2]], VALUES[::2]
    assert pair.run(exchanged) == [expected, expected]


def names_in(source: Path) -> set[str]:
    """All names that a module imports or reads."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {part for alias in node.names for part in alias.name.split(".")}
            found |= set((getattr(node, "module", None) or "").split("."))
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def test_no_module_unpickles():
    unsafe = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing", "rpc"}
    unsafe |= {name for name in dir(torch.distributed) if "object" in name}
    assert {"broadcast_object_list", "all_gather_object"} < unsafe
    sources = sorted(Path(shoal.__file__).parent.rglob("*.py"))
    assert sources
    assert {source.name: found for source in sources if (found := names_in(source) & unsafe)} == {}


# --- rank and size of a process -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("0", "two"), ("-1", "2")])
def test_an_impossible_rank_is_refused(monkeypatch, rank, size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ShoalError, match="RANK must be a number below WORLD_SIZE"):
        find_launch_info()


def test_launch_info_of_a_slurm_job(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert find_launch_info() is None
    variables = dict(PROCID=5, STEP_NUM_TASKS=8, LOCALID=1, STEP_TASKS_PER_NODE="4(x2)", JOB_ID=77, STEP_ID=0)
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    info = find_launch_info()
    assert info is not None
    assert (info.rank, info.size, info.local_rank, info.local_size) == (5, 8, 1, 4)
    assert info.launch == "slurm:77.0"
    assert [first_host(x) for x in ("gpu[003-006,9],x1", "a1,b2", "node7")] == ["gpu003", "a1", "node7"]


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        (dict(processes=3), "multiple of 3"),
        (dict(processes=0), "processes must be between 1 and 4096"),
        (dict(processes=2, num_envs=2, rollout_steps=3, num_minibatches=2), "Each of 2 processes has 3 samples"),
        (dict(processes=2, algo="dqn", batch_size=33), "batch-size that is a multiple of 2"),
        (dict(gpus=2), "torch sees 0 GPU"),
        (dict(processes=2, num_envs="auto"), "supports one process"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
def test_jobs_that_cannot_be_sharded_are_refused(settings, answer):
    with pytest.raises(ShoalError, match=answer):
        make_job("cartpole", **{**SMALL, **settings})


# --- whole runs ---------------------------------------------------------------------------------------------------

RUN = dict(SMALL, num_minibatches=1, epochs=2, lr_schedule="none", checkpoint_every=2 * STEPS)


def flags(settings: dict) -> list[str]:
    found = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        found += [flag] if value is True else [flag, *map(str, value if isinstance(value, tuple) else (value,))]
    return found


def start(path: Path, **settings) -> subprocess.Popen:
    command = [sys.executable, "-m", "shoal", "train", "cartpole", "--run-dir", str(path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *flags({**RUN, "processes": 2, **settings})], stderr=subprocess.PIPE, text=True, env=env
    )


def last(path: Path) -> dict:
    return load_checkpoint(RunFolder(path).pick("last"), "cpu").state


def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def workers_of(launcher: int) -> list[int]:
    """The processes that a launcher has started, by rank."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        settings = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        for entry in settings:
            if entry.startswith(b"RANK="):
                found[int(entry[5:])] = int(child)
    return [found[rank] for rank in sorted(found)]


def sockets_of(process: int) -> set[str]:
    """The inodes of the sockets that a process and all that it has started have open."""
    found = set()
    for descriptor in Path(f"/proc/{process}/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed in the meantime
            target = os.readlink(descriptor)
            if target.startswith("socket:"):
                found.add(target[len("socket:[") : -1])
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                found |= sockets_of(int(child))
    return found


def addresses(process: int) -> set[str]:
    """Where a process and all that it has started can be reached: TCP sockets that listen, and all of UDP."""
    own, found = sockets_of(process), set()
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[i] for i in (1, 3, 9))
            if inode in own and (protocol.startswith("udp") or state == "0A"):
                words = [local[i : i + 8] for i in range(0, local.index(":"), 8)]  # as this machine keeps them
                found.add(b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words))
    return {str(ipaddress.ip_address(address)) for address in found}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_of_one_machine_listen_on_loopback_alone(tmp_path):
    assert LOOPBACK in [name for _, name in socket.if_nameindex()]
    with socket.socket() as server, socket.socket() as inner:
        server.bind(("0.0.0.0", 0))
        inner.bind(("127.0.0.1", 0))
        server.listen()
        inner.listen()
        assert addresses(os.getpid()) >= {"0.0.0.0", "127.0.0.1"}
    launcher = start(tmp_path / "run", total_steps=4000 * STEPS)
    seen = set()

    def trains() -> bool:
        seen.update(addresses(launcher.pid))
        return RunFolder(tmp_path / "run").holds_checkpoints

    until(trains)
    launcher.terminate()
    assert "Traceback" not in launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 143
    assert seen == {"127.0.0.1"}


def test_a_run_whose_process_was_killed_ends_like_any_other(pair, tmp_path, capsys):
    path = tmp_path / "killed"
    launcher = start(path, total_steps=40 * STEPS)
    until(lambda: RunFolder(path).holds_checkpoints)
    victim = workers_of(launcher.pid)[1]
    os.kill(victim, signal.SIGKILL)
    output = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 0, output
    assert "Traceback" not in output
    saved = r"Process 1 of 2 was killed by SIGKILL; restarting all 2 from the checkpoint at \d+ env steps\."
    assert len(re.findall(saved, output)) == 1
    assert "lost" not in output
    ours = plain(last(path))
    theirs = pair.run(trained, "cartpole", dict(RUN, total_steps=40 * STEPS), 40)[0][0]
    assert not [name for name in theirs if not (ours[name] == theirs[name]).all()]
    # One folder, as a single process would have written it.
    rows = RunFolder(path).metrics()
    assert len({json.dumps(row) for row in rows}) == len(rows)
    logged = [row["steps"] for row in rows if "time/fps" in row]
    assert logged == sorted(set(logged))
    assert logged[-1] == 40 * STEPS
    from shoal.cli import main

    assert main(["eval", str(path), "--episodes", "3", "--device", "cpu"]) == 0
    assert "episodes 3" in capsys.readouterr().out


def test_processes_that_keep_dying_name_the_remedy(tmp_path, monkeypatch, capsys):
    """Before the first checkpoint and after it: what the message says to do works."""
    path, killed = tmp_path / "run", "Process 1 of 2 was killed by SIGKILL"
    settings = dict(RUN, run_dir=path, total_steps=4 * STEPS)

    def dies(*given) -> str:
        return killed

    with monkeypatch.context() as patch:
        patch.setattr(launching, "_run_processes", dies)
        with pytest.raises(ShoalError) as problem:
            shoal.train("cartpole", **settings, processes=2)
    said = f"{killed} after 3 restarts; no checkpoint was saved: fix the cause and start the run again."
    assert (str(problem.value), problem.value.exit_code) == (said, 1)
    assert capsys.readouterr().err.count(f"{killed}; restarting all 2 from the beginning.") == RESTARTS
    shoal.train("cartpole", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(launching, "_run_processes", dies)
        with pytest.raises(ShoalError) as problem:
            shoal.resume(path, total_steps=6 * STEPS, processes=2)
    said = f"{killed} after 3 restarts; fix the cause and continue from 512 env steps with `shoal resume {path}`."
    assert str(problem.value) == said
    assert capsys.readouterr().err.count("; restarting all 2 from the checkpoint at 512 env steps.") == RESTARTS
    shoal.resume(path, processes=1)
    assert RunFolder(path).metrics()[-1]["steps"] == 6 * STEPS


KILLS_ITSELF = "import os; os.kill(os.getpid(), 9)"
WAITS = "import signal; signal.pthread_sigmask(signal.SIG_SETMASK, ()); signal.pause()"


@pytest.mark.parametrize(
    ("programs", "signals", "found"),
    [
        (["pass", "pass"], [], None),
        ([f"raise SystemExit({PEER_LOST})", KILLS_ITSELF], [], "Process 1 of 2 was killed by SIGKILL"),
        ([WAITS, "raise SystemExit(4)"], [], "Process 1 of 2 exited with code 4"),
        ([f"raise SystemExit({PEER_LOST})", "pass"], [], "Process 0 of 2 lost the connection to another process"),
        ([WAITS], [signal.SIGTERM, signal.SIGINT], "Process 0 of 1 was killed by SIGTERM"),
    ],
)
def test_the_process_that_failed_first_is_named(programs, signals, found):
    command = [sys.executable, "-c", "import os; exec(os.environ['PROGRAM'])"]
    assert launching._run_processes(command, [dict(PROGRAM=program) for program in programs], signals) == found
    causes = [-9, 1, PEER_LOST, None, 0]
    assert sorted(reversed(causes), key=launching._cause_order) == causes


def test_a_run_resumes_with_another_number_of_processes(tmp_path):
    shoal.train("cartpole", **RUN, total_steps=4 * STEPS, run_dir=tmp_path / "cut")
    shutil.copytree(tmp_path / "cut", tmp_path / "copy", symlinks=True)
    alone = shoal.resume(tmp_path / "copy", total_steps=8 * STEPS)
    both = shoal.resume(tmp_path / "cut", total_steps=8 * STEPS, processes=2)
    assert_close(last(alone.path), last(both.path))
    assert json.loads((both.path / "config.json").read_text())["hardware"]["processes"] == 2
    with pytest.raises(ShoalError, match="give a larger --total-steps"):
        shoal.resume(tmp_path / "cut")
    again = shoal.resume(tmp_path / "cut", total_steps=10 * STEPS, processes=1)
    shoal.resume(tmp_path / "copy", total_steps=10 * STEPS)
    assert_close(last(alone.path), last(again.path))


def test_ctrl_c_ends_all_processes_and_saves(tmp_path):
    path = tmp_path / "stopped"
    launcher = start(path, total_steps=4000 * STEPS)
    until(lambda: RunFolder(path).holds_checkpoints)
    workers = workers_of(launcher.pid)
    launcher.send_signal(signal.SIGINT)
    output = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 130
    assert output.count("shoal resume") == 1
    assert "Traceback" not in output
    saved = load_checkpoint(RunFolder(path).pick("last"), "cpu")
    assert saved.steps == RunFolder(path).metrics()[-1]["steps"]
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]


BROKEN = """
import os

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.layer = nn.Linear(shape[0], 8)
        self.seen = 0

    def forward(self, x):
        self.seen += torch.is_grad_enabled()
        return self.layer(x) * (torch.nan if self.seen > 3 and os.environ["RANK"] == "1" else 1.0)
"""


def test_an_error_in_one_process_is_printed_once_without_a_restart(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    launcher = start(tmp_path / "run", total_steps=10 * STEPS, encoder=f"{tmp_path / 'broken.py'}:Net")
    output = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 2
    assert output.count("A gradient of cart was not finite") == 1
    assert "Traceback" not in output


@pytest.mark.slow
def test_torchrun_restarts_and_the_run_continues_in_its_folder(tmp_path):
    """Without --run-dir: the folder's name holds the time, and is found again by the launch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "-m", "shoal", "train", "cartpole", *flags({**RUN, "total_steps": 400 * STEPS})]
    launcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: any(tmp_path.glob("runs/*/checkpoints/step_*")))
    os.kill(workers_of(launcher.pid)[1], signal.SIGKILL)
    out, output = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    assert out.count("results:") == 1
    assert len(list(tmp_path.glob("runs/*"))) == 1
