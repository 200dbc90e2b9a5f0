"""The processes of one run: they find one another, share out envs and agree.

Process 0 leads: it alone writes to the run folder. Nothing that comes over the network is unpickled: processes exchange
tensors, and JSON as tensors of bytes.
"""

import contextlib
import gc
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shoal.config.job import Job
from shoal.core.errors import ShoalError
from shoal.core.launch_info import LaunchInfo, find_launch_info
from shoal.core.reduce import ALONE, GroupReducer, Reducer

MEETING = timedelta(minutes=10)
"""How long processes wait for one another at the start."""

PATIENCE = timedelta(hours=24)
"""How long they wait for the leader, who saves and evaluates. A death is noticed at once whatever this is."""

PIECE = 2**28
"""Bytes that are sent at a time."""

T = TypeVar("T")


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
        self._preemptions = 0

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

    def preemption(self, fraction: float) -> "Preemption | None":
        """Ends rollouts once this fraction of the processes has finished theirs; None if the fraction is 0."""
        if not fraction:
            return None
        self._preemptions += 1
        return Preemption(self._store, f"finished/{self._preemptions}", fraction, self.size)

    def share(self, job: Job) -> Job:
        """The job as this process alone would have it: its envs, and its part of a replay."""
        if self.size == 1:
            return job
        learn = job.learn
        for name in ("buffer_size", "batch_size"):
            if hasattr(learn, name):
                learn = replace(learn, **{name: max(1, getattr(learn, name) // self.size)})
        return replace(job, train=replace(job.train, num_envs=job.run.num_envs // self.size), learn=learn)

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


class Preemption:
    """Tells a process during its rollout whether enough others have finished theirs (DD-PPO's preemption).

    The store of the processes holds the number of finished rollouts, and a mark once enough processes have finished the
    current one. Processes wait for one another between rollouts, so a count beyond whole rounds belongs to this round.
    Looking for the mark writes nothing: a store in a file grows with rollouts, not with steps.
    """

    def __init__(self, store: Any, key: str, fraction: float, size: int):
        self._store, self._key, self._size = store, key, size
        self._round = 0
        """Rollouts that each process has finished."""
        self.enough = min(math.ceil(round(fraction * size, 6)), size - 1)
        """Number of processes that must have finished: their fraction, and at most all others."""

    def requested(self) -> bool:
        """Whether enough processes have finished."""
        return self._store is not None and self._store.check([self._mark(self._round)])

    def finish(self) -> None:
        """Count this process's rollout as finished."""
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
    place = find_launch_info()
    if place is None or place.size == 1:
        yield job, Processes()
        return
    ours = not dist.is_initialized()
    with _losses_named(place), _own_cores(place):
        device = _own_device(job.hardware.device, place)
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
        yield job.change(device=device), Processes(reducer, talk, store)
        # Graphs that hold sums of NCCL go first. After an error the process ends, and everything with it.
        gc.collect()
        dist.barrier(talk)
        if ours:
            dist.destroy_process_group()


@contextlib.contextmanager
def _losses_named(place: LaunchInfo) -> Iterator[None]:
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


def _meeting_place(place: LaunchInfo) -> Any:
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


def _own_device(device: str, place: LaunchInfo) -> str:
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
def _own_cores(place: LaunchInfo) -> Iterator[None]:
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


def _is_lost(error: RuntimeError) -> bool:
    """Whether this is what gloo, NCCL or the store say when another process is gone."""
    text = str(error)
    return isinstance(error, dist.DistNetworkError) or any(
        word in text for word in ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
    )
