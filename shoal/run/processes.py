"""Several processes that train one run: starting them, finding one another, sharing out envs, agreeing.

    shoal train ... --gpus 4          starts four processes on this machine, which find one another by a private file
    torchrun / srun ... shoal train   each process finds the others by what the launcher put into its environment

Process 0 leads: it alone writes to the run folder. One that dies takes the others with it; the launcher starts all of
them again, and they go on from the last checkpoint.

Nothing that comes over the network is unpickled: processes exchange tensors, and JSON as tensors of bytes.
"""

import contextlib
import gc
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shoal.core.reduce import ALONE, GroupReducer, Reducer
from shoal.errors import ShoalError, how_it_ended, plain_warnings, shortage
from shoal.run.checkpoint import latest_steps
from shoal.run.config import AUTO, Job, TrainConfig
from shoal.run.folder import RunFolder
from shoal.run.interrupts import end_signals
from shoal.run.progress import Progress
from shoal.streams import standard_streams
from shoal.temporary import TemporaryFolder
from shoal.user_code import UserCode

RESTARTS = 3
"""How often the processes of a machine are started again after one of them died."""

MEETING = timedelta(minutes=10)
"""How long processes wait for one another at the start."""

PATIENCE = timedelta(hours=24)
"""How long they wait for the leader, who saves and evaluates. A death is noticed at once whatever this is."""

ENDING = 60
"""Seconds that processes have to save and end after a signal."""

GRACE = 30
"""Seconds that processes have to end after another one has died."""

LOST = 3
"""Exit code of a process that has lost another one: the other one is the cause."""

LOST_BEFORE = 5
"""Seconds in which the cause is expected to end, after a process that has lost it."""

STORE = "SHOAL_STORE"
"""Environment variable: the file by which processes that Shoal has started find one another."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""The network interface that no other machine reaches."""

STOPPED = "stopped before the processes could save; what was saved before stands."

TRUST = "--trust"
"""Tells processes on the command line that code of other runs may be executed."""

PIECE = 2**28
"""Bytes that are sent at a time."""

FIRST_PORT, PORTS = 15_000, 20_000
"""Where the processes of a SLURM job meet, by the job's number."""

T = TypeVar("T")


# --- where this process stands ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Which process this is, as the launcher says."""

    rank: int
    size: int
    local_rank: int
    """Which one of this machine."""
    local_size: int
    launch: str
    """What names this launch: the same after a restart."""
    restarts: int
    """How often all processes have been started again."""
    bound: bool
    """Whether the launcher has seen to which cores are whose."""
    store: str | None = None
    """The file by which the processes find one another, where Shoal has started them."""

    def export(self) -> None:
        """Put what torch wants to know into the environment, where the launcher has not done so."""
        known = dict(RANK=self.rank, WORLD_SIZE=self.size, LOCAL_RANK=self.local_rank, LOCAL_WORLD_SIZE=self.local_size)
        for name, value in known.items():
            os.environ[name] = str(value)
        if "MASTER_ADDR" not in os.environ:
            os.environ["MASTER_ADDR"] = first_host(os.environ.get("SLURM_STEP_NODELIST", "localhost"))
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(FIRST_PORT + int(os.environ.get("SLURM_JOB_ID", "0")) % PORTS)


def find_place() -> Place | None:
    """Where torchrun or SLURM has put this process; None if neither has started it."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        if not (
            env["RANK"].isdecimal() and env["WORLD_SIZE"].isdecimal() and int(env["RANK"]) < int(env["WORLD_SIZE"])
        ):
            raise ShoalError(
                f"RANK must be a number below WORLD_SIZE, got {env['RANK']!r} and {env['WORLD_SIZE']!r}; unset both to "
                "train alone."
            )
        rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
        launch = env.get("TORCHELASTIC_RUN_ID", "none")
        if launch == "none":  # torchrun's default; its process stays the same through restarts
            launch = f"{socket.gethostname()}:{os.getppid()}"
        restarts = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        local = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
        return Place(rank, size, *local, launch, restarts, "TORCHELASTIC_RUN_ID" not in env, env.get(STORE))
    # Set by srun for its tasks, and not by sbatch or salloc for a single command.
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in env:
        tasks = env.get("SLURM_STEP_TASKS_PER_NODE", "1")
        local = int(env.get("SLURM_LOCALID", "0")), int(re.match(r"\d+", tasks)[0])  # type: ignore[index]
        launch = f"slurm:{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
        restarts = int(env.get("SLURM_RESTART_COUNT", "0"))
        return Place(int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), *local, launch, restarts, True)
    return None


def first_host(nodes: str) -> str:
    """The first name of a list as SLURM writes it: gpu[003-006,9] begins with gpu003."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return "localhost" if found is None else found[1] + (found[2] or "")


def follows() -> bool:
    """Whether this process leaves talking to another one."""
    place = find_place()
    return place is not None and place.rank > 0


def settled(config: TrainConfig) -> TrainConfig:
    """The number of processes that is meant, checked: those that a launcher has started, or those to start."""
    place = find_place()
    count = config.processes
    if place is not None:
        count = place.size
    elif config.gpus is not None:
        there = torch.cuda.device_count()
        if count not in (1, config.gpus):
            raise ShoalError(f"Give --gpus {config.gpus} or --processes {count}, not both: a GPU has one process.")
        if not config.device.startswith("cuda") or there < config.gpus:
            raise ShoalError(
                f"--gpus {config.gpus}: torch sees {there} GPU(s) here, and the device is {config.device}; use "
                "--processes to share one, or CPU cores."
            )
        count = config.gpus
    if config.num_envs == AUTO:
        if count > 1:
            raise ShoalError(f"--num-envs auto is for a single process; give a number of envs for all {count} of them.")
    elif config.num_envs % count:
        raise ShoalError(
            f"{config.num_envs} envs cannot be shared out evenly to {count} processes; have a multiple of {count} "
            f"envs, or a number of processes that divides {config.num_envs}."
        )
    return replace(config, processes=count)


# --- together ----------------------------------------------------------------------------------------------------


class Told(ShoalError):
    """What the leader could not do, told to all others: nobody says it twice."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class Lost(ShoalError):
    """Another process has died."""

    exit_code = 1


class Processes:
    """The processes of a run, as one of them sees them. Alone, there is nobody to ask.

    Every process must make the same calls in the same order.
    """

    def __init__(self, reducer: Reducer = ALONE, talk: Any = None, store: Any = None):
        """`talk` is torch's group for what the hosts tell one another, `store` where they leave notes meanwhile."""
        self.reducer, self._talk, self._store = reducer, talk, store
        self.rank, self.size = reducer.rank, reducer.size
        self._lines = 0

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def lead(self, function: Callable[[], T]) -> T:
        """The JSON value that the leader's call returns, or the ShoalError it raises, in every process."""
        if self.size == 1:
            return function()
        answer = error = None
        if self.leads:
            try:
                answer = (function(), None, 0)
            except ShoalError as problem:
                error, answer = problem, (None, str(problem), problem.exit_code)
        found, message, code = self.collect(answer)[0]
        if error is not None:
            raise error
        if message is not None:
            raise Told(message, code)
        return found

    def collect(self, value: Any) -> list[Any]:
        """The JSON values that all processes have, in every one of them."""
        return [value] if self.size == 1 else _exchange(value, self.size, self._talk)

    def decide(self, *wishes: int) -> tuple[int, ...]:
        """The largest of each wish over all processes: so they take the same turns."""
        if self.size == 1:
            return wishes
        agreed = torch.tensor(wishes)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, self._talk)
        return tuple(agreed.tolist())

    def finish_line(self, share: float) -> "FinishLine | None":
        """What ends rollouts when a share of the processes has finished theirs; None if nothing is to (0)."""
        if not share:
            return None
        self._lines += 1
        return FinishLine(self._store, f"finished/{self._lines}", share, self.size)

    def share(self, job: Job) -> Job:
        """The job as this process alone would have it: its envs, and its part of a replay."""
        if self.size == 1:
            return job
        learn = job.learn
        for name in ("replay_size", "batch_size"):
            if hasattr(learn, name):
                learn = replace(learn, **{name: max(1, getattr(learn, name) // self.size)})
        return replace(job, train=replace(job.train, num_envs=job.train.num_envs // self.size), learn=learn)

    # --- states ------------------------------------------------------------------------------------------------------

    def whole(self, state: Mapping[str, torch.Tensor], axes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Stand-ins, without memory, for a state with the envs of all processes along its `axes`."""
        found = {}
        for name, tensor in state.items():
            shape = list(tensor.shape)
            if name in axes:
                shape[axes[name]] *= self.size
            found[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return found

    def gather(self, state: Mapping[str, torch.Tensor], axes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The state of all processes together, in the leader; others get nothing."""
        if self.size == 1:
            return dict(state)
        found = {}
        for name in sorted(state):
            tensor = state[name].detach()
            if name not in axes:
                found[name] = tensor
                continue
            own = tensor.movedim(axes[name], 0)
            parts = self._send_in(own.cpu().contiguous())
            if parts:
                found[name] = torch.cat(parts).movedim(0, axes[name])
        return found if self.leads else {}

    def scatter(
        self, whole: Mapping[str, torch.Tensor] | None, own: Mapping[str, torch.Tensor], axes: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """Every process's part of a state that the leader has, shaped like its `own`."""
        if self.size == 1:
            return dict(whole or {})
        found = {}
        for name in sorted(own):
            like = own[name].movedim(axes[name], 0) if name in axes else own[name]
            parts = None
            if whole is not None and self.leads:
                tensor = whole[name].detach().cpu()
                parts = [tensor] * self.size
                if name in axes:
                    parts = [part.contiguous() for part in tensor.movedim(axes[name], 0).chunk(self.size)]
            part = self._send_out(parts, torch.empty(like.shape, dtype=like.dtype))
            found[name] = (part.movedim(0, axes[name]) if name in axes else part).to(own[name].device)
        return found

    def _send_in(self, part: torch.Tensor) -> list[torch.Tensor]:
        """The leader gets the parts of all; piece by piece, since they may be large."""
        made = [torch.empty_like(part) for _ in range(self.size)] if self.leads else []
        pieces = [_bytes(each).split(PIECE) for each in made]
        for i, piece in enumerate(_bytes(part).split(PIECE)):
            dist.gather(piece, [each[i] for each in pieces] or None, 0, self._talk)
        return made

    def _send_out(self, parts: list[torch.Tensor] | None, out: torch.Tensor) -> torch.Tensor:
        """Every process gets its part of what the leader has."""
        pieces = [_bytes(each.contiguous()).split(PIECE) for each in parts or ()]
        for i, piece in enumerate(_bytes(out).split(PIECE)):
            dist.scatter(piece, [each[i] for each in pieces] or None, 0, self._talk)
        return out


class FinishLine:
    """Tells a process in the midst of a rollout whether enough others have finished theirs.

    The store of the processes holds a count of all rollouts, and a mark once enough have finished the current one.
    Before they make the next one, all wait for one another to learn from the last; so a count beyond whole rounds was
    made in this one. To look for the mark writes nothing: a store that is a file grows with rollouts, not with steps.
    """

    def __init__(self, store: Any, key: str, share: float, size: int):
        self._store, self._key, self._size = store, key, size
        self._round = 0
        """Rollouts that each process has finished."""
        self.enough = min(math.ceil(round(share * size, 6)), size - 1)
        """How many processes: the share of them, and at most all others."""

    def passed(self) -> bool:
        """Whether enough processes have finished."""
        return self._store is not None and self._store.check([self._mark(self._round)])

    def cross(self) -> None:
        """This process has finished too, or will make no more."""
        if self._store is not None:
            if self._store.add(self._key, 1) == self._round * self._size + self.enough:
                self._store.set(self._mark(self._round), "")
                self._store.delete_key(self._mark(self._round - 1))
            self._round += 1

    def _mark(self, number: int) -> str:
        return f"{self._key}/{number}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one row of bytes, over the same memory."""
    return tensor.view(-1).view(torch.uint8)


def _exchange(value: Any, size: int, group: Any) -> list[Any]:
    """The JSON values of all processes of a group: torch's own functions for objects would unpickle them."""
    text = json.dumps(value).encode()
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)]), group)
    longest = max(int(length) for length in lengths)
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(texts, torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8), group)
    return [json.loads(each.numpy().tobytes()) for each in texts]


@contextlib.contextmanager
def joined(job: Job) -> Iterator[tuple[Job, Processes]]:
    """Meet the other processes, if a launcher has started any; the job comes back with this process's device."""
    place = find_place()
    if place is None or place.size == 1:
        yield job, Processes()
        return
    ours = not dist.is_initialized()
    with _losses_named(place), _own_cores(place):
        device = _own_device(job.train.device, place)
        if ours:
            place.export()
            store = _meeting_place(place)
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=MEETING)
        talk = dist.new_group(backend="gloo", timeout=PATIENCE)
        cards = _exchange(_card(device), place.size, talk)
        # Where each has a GPU of its own NCCL sums, and graphs can record it; processes that share one go by the host.
        apart = None not in cards and len(set(cards)) == place.size
        group = dist.new_group(backend="nccl") if apart else talk
        through_host = device.startswith("cuda") and not apart
        reducer = GroupReducer(group, place.rank, place.size, through_host)
        store = dist.distributed_c10d._get_default_store()
        yield replace(job, train=replace(job.train, device=device)), Processes(reducer, talk, store)
        # Graphs that hold sums of NCCL go first. After an error the process ends, and everything with it.
        gc.collect()
        dist.barrier(talk)
        if ours:
            dist.destroy_process_group()


@contextlib.contextmanager
def _losses_named(place: Place) -> Iterator[None]:
    """Raise `Lost` for what torch says when another process is gone."""
    try:
        yield
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        raise Lost(
            f"Process {place.rank} of {place.size} has lost another process; start all of them again to continue from "
            "the last checkpoint."
        ) from error


def _meeting_place(place: Place) -> Any:
    """The store through which processes find one another: a file that is new for every start, or torchrun's.

    torchrun's store outlives its processes: without a name that is new for every start, those that it starts again
    would look for the dead.
    """
    stores: Any = dist
    if place.store is not None:
        store = stores.FileStore(place.store, place.size)
        store.set_timeout(MEETING)
        return store
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    store = stores.TCPStore(host, port, place.size, serves, MEETING)
    if place.rank:
        own = uuid.uuid4().hex
        store.set(f"shoal/asks/{place.rank}", own)
        name = store.get(f"shoal/answer/{own}").decode()
        store.set(f"shoal/here/{name}/{place.rank}", "")
        return stores.PrefixStore(name, store)
    name, missing = uuid.uuid4().hex, set(range(1, place.size))
    end = time.monotonic() + MEETING.total_seconds()
    while missing:
        for rank in sorted(missing):
            if store.check([f"shoal/asks/{rank}"]):  # perhaps of one that is dead: then it will be another soon
                store.set(f"shoal/answer/{store.get(f'shoal/asks/{rank}').decode()}", name)
            if store.check([f"shoal/here/{name}/{rank}"]):
                missing.discard(rank)
        if time.monotonic() > end:
            raise Told(f"{len(missing)} of {place.size} processes have not come: {sorted(missing)}.", 1)
        time.sleep(0.02)
    return stores.PrefixStore(name, store)


def _own_device(device: str, place: Place) -> str:
    """This process's device: of the GPUs that it sees, those of a machine take one each in turn."""
    if device == "cuda":
        device = f"cuda:{place.local_rank % torch.cuda.device_count()}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    return device


def _card(device: str) -> str | None:
    """What tells a GPU from all others; None for CPUs."""
    if not device.startswith("cuda"):
        return None
    return f"{socket.gethostname()} {getattr(torch.cuda.get_device_properties(device), 'uuid', device)}"


@contextlib.contextmanager
def _own_cores(place: Place) -> Iterator[None]:
    """Share out the cores of the machine, unless the launcher has done so."""
    if place.bound or place.local_size == 1 or not hasattr(os, "sched_getaffinity"):
        yield
        return
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    each = len(before) // place.local_size
    if each:
        os.sched_setaffinity(0, sorted(before)[place.local_rank * each : (place.local_rank + 1) * each])
    torch.set_num_threads(max(1, min(threads, each)))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


# --- starting them on this machine ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How processes ended that did not reach the end of training."""

    exit_code: int
    message: str
    saved: bool = False
    """Whether a signal ended them, and they have saved."""


def launch(folder: RunFolder, count: int, trust: bool = False) -> Outcome | None:
    """Train the run of a folder with `count` processes on this machine; returns when they have ended.

    None: they have reached the end of training. `trust` as in `continue_run`.
    """
    name = uuid.uuid4().hex
    with TemporaryFolder("launch") as box, _caught_signals() as caught:
        note = box / "outcome.json"
        command = [sys.executable, "-m", "shoal.run.processes", str(folder.path), str(note), *[TRUST] * trust]
        for restarts in itertools.count():
            shared = dict(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, TORCHELASTIC_RUN_ID=name)
            shared |= {"TORCHELASTIC_RESTART_COUNT": restarts, STORE: box / f"store-{restarts}"}
            shared |= dict(GLOO_SOCKET_IFNAME=LOOPBACK, NCCL_SOCKET_IFNAME=f"={LOOPBACK}")  # "=": this name alone
            places = [dict(shared, RANK=rank, LOCAL_RANK=rank) for rank in range(count)]
            failure = _run_together(command, places, caught)
            outcome = _read(note)
            if failure is None or outcome is not None:
                return outcome
            if caught:
                return Outcome(128 + caught[0], STOPPED)
            steps = latest_steps(folder.checkpoints) if folder.holds_checkpoints else None
            if restarts == RESTARTS:
                return Outcome(1, f"{failure} after {RESTARTS} restarts; {_remedy(folder, steps)}")
            start = "the beginning" if steps is None else f"the checkpoint at {steps} env steps"
            Progress(1, quiet=True).warn(f"{failure}; all {count} start again from {start}.")


def _remedy(folder: RunFolder, steps: int | None) -> str:
    """What the user can do about processes that keep dying, with a checkpoint at `steps` or with none."""
    if steps is None:
        return "no checkpoint was saved: remove the cause and start the run again."
    return f"remove the cause and continue from {steps} env steps with `shoal resume {folder.path}`."


def _run_together(command: list[str], places: Sequence[Mapping[str, Any]], caught: list[int]) -> str | None:
    """Start a process for each place, with what its environment says more, and wait until they have ended.

    Signals that are caught are passed on. Returns which process failed first and how; None if none has.
    """
    processes: list[subprocess.Popen] = []
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, end_signals())  # of the processes, until they can answer
        try:
            for place in places:
                env = os.environ | {name: str(value) for name, value in place.items()}
                processes.append(subprocess.Popen(command, env=env, start_new_session=True))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return _wait(processes, caught)
    finally:
        _end(processes)


def _wait(processes: Sequence[subprocess.Popen], caught: list[int]) -> str | None:
    """Wait until all processes have ended or one has failed; returns which one and how, None if none has."""
    passed_on, deadline = 0, math.inf
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
        if any(code not in (None, 0, LOST) for code in codes):
            break
        if LOST in codes:
            deadline = min(deadline, time.monotonic() + LOST_BEFORE)
        if passed_on < len(caught):
            deadline = min(deadline, time.monotonic() + ENDING)
            for process in processes:
                process.send_signal(caught[passed_on])
            passed_on += 1
        time.sleep(0.1)
    if not any(codes) and None not in codes:
        return None
    cause = min(codes, key=_cause_first)
    how = {LOST: "has lost another process", None: "did not end"}.get(cause) or how_it_ended(cause)
    return f"Process {codes.index(cause)} of {len(codes)} {how}"


def _cause_first(code: int | None) -> int:
    """Sorts exit codes: signals, errors, processes that have lost another one, those that run, those that are done."""
    if code in (LOST, None, 0):
        return (LOST, None, 0).index(code) + 2
    return int(code > 0)


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """End the processes that are left; those that do not listen are killed, with all that they have started."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """The numbers of the signals that come in the meantime, whose handlers are replaced."""
    caught: list[int] = []
    before = {}
    with contextlib.suppress(ValueError):  # not the main thread, which sees to signals
        for number in end_signals():
            before[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(note: Path) -> Outcome | None:
    return Outcome(**json.loads(note.read_text())) if note.exists() else None


def work(path: str, outcome: str, *flags: str) -> int:
    """One of the processes that `launch` starts. Bad input is noted and exits with 0: to start again would not help."""
    from shoal.run.train import Stopped, continue_run

    plain_warnings()
    file = Path(outcome)
    threading.Thread(target=_watch, args=(file, os.getppid()), daemon=True).start()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, end_signals())
        with UserCode("Training failed"):
            continue_run(path, TRUST in flags)
    except Told:
        return 0
    except Lost:
        return 0 if file.exists() else LOST
    except (ShoalError, Stopped) as end:
        if follows():  # the leader may have more to say
            _until(file.exists, 3.0)
        _note(file, Outcome(end.exit_code, str(end), isinstance(end, Stopped)))
    except KeyboardInterrupt:
        _note(file, Outcome(130, STOPPED))
    except Exception as error:
        problem = shortage(error)
        if problem is None:
            raise
        _note(file, Outcome(1, problem))
    return 0


def _note(file: Path, outcome: Outcome) -> None:
    """Write down how it ended, unless another process has."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as whole:
        json.dump(vars(outcome), whole)
    with contextlib.suppress(FileExistsError):
        os.link(whole.name, file)


def _is_lost(error: RuntimeError) -> bool:
    """Whether this is what gloo, NCCL or the store say when another process is gone."""
    text = str(error)
    return isinstance(error, dist.DistNetworkError) or any(
        word in text for word in ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
    )


def _watch(outcome: Path, parent: int) -> None:
    """End this process if another one has noted the end while this one waits for it, or if the launcher is gone."""
    while os.getppid() == parent:
        if outcome.exists():
            time.sleep(5.0)
            os._exit(0)
        time.sleep(0.25)
    os._exit(1)


def _until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.05)


if __name__ == "__main__":
    from shoal.run.processes import work as work_as_imported  # errors must be of the classes that others know

    with standard_streams():
        code = work_as_imported(*sys.argv[1:])
    sys.exit(code)
