"""The processes of one run: rendezvous, sharding of envs and states, collective decisions.

Process 0 is the leader, the only one that writes to the run folder. Nothing received over the network is unpickled:
processes exchange tensors, and JSON as tensors of bytes.
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

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""Time in which all processes must have started."""

CONTROL_TIMEOUT = timedelta(hours=24)
"""Time to wait for the leader, which saves and evaluates. A broken connection is noticed at once."""

CHUNK = 2**28
"""Bytes per message of a gathered or scattered tensor."""

T = TypeVar("T")


class LeaderError(ShoalError):
    """Raised on followers when the leader's call fails; only the leader prints it."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class PeerLost(ShoalError):
    """The connection to another process is lost."""

    exit_code = 1


class Communicator:
    """Rank, size and collective calls of a run's processes; the default is a run of one process.

    Every process must make the same calls in the same order.
    """

    def __init__(self, reducer: Reducer = ALONE, control: dist.ProcessGroup | None = None, store: Any = None):
        """Join a run's processes.

        Args:
            reducer: Sums tensors over the processes.
            control: Process group for CPU tensors: messages and states.
            store: Key-value store of all processes, for preemption.
        """
        self.reducer, self._control, self._store = reducer, control, store
        self.rank, self.size = reducer.rank, reducer.size
        self._preemptions = 0

    @property
    def is_leader(self) -> bool:
        """Whether this process writes to the run folder."""
        return self.rank == 0

    def on_leader(self, function: Callable[[], T]) -> T:
        """Call `function` on the leader; every process returns its JSON value.

        Raises:
            ShoalError: The call failed; on followers as LeaderError.
        """
        if self.size == 1:
            return function()
        reply = error = None
        if self.is_leader:
            try:
                reply = (function(), None, 0)
            except ShoalError as problem:
                error, reply = problem, (None, str(problem), problem.exit_code)
        found, message, code = self.collect(reply)[0]
        if error is not None:
            raise error
        if message is not None:
            raise LeaderError(message, code)
        return found

    def collect(self, value: Any) -> list[Any]:
        """The JSON values of all processes by rank, on every process."""
        return [value] if self.size == 1 else _all_gather_json(value, self.size, self._control)

    def decide(self, *values: int) -> tuple[int, ...]:
        """The maximum of each value over all processes."""
        if self.size == 1:
            return values
        agreed = torch.tensor(values)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, self._control)
        return tuple(agreed.tolist())

    def preemption(self, fraction: float) -> "Preemption | None":
        """Ends rollouts once this fraction of the processes has finished theirs; None if the fraction is 0."""
        if not fraction:
            return None
        self._preemptions += 1
        return Preemption(self._store, f"finished/{self._preemptions}", fraction, self.size)

    def share(self, job: Job) -> Job:
        """The job of this process: its envs, and its share of the replay and its batch."""
        if self.size == 1:
            return job
        learn = job.learn
        for name in ("buffer_size", "batch_size"):
            if hasattr(learn, name):
                learn = replace(learn, **{name: max(1, getattr(learn, name) // self.size)})
        return replace(job.change(num_envs=job.run.num_envs // self.size), learn=learn)

    # --- states ------------------------------------------------------------------------------------------------------

    def unsharded(self, state: Mapping[str, torch.Tensor], axes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Meta tensors shaped like a process's state with the envs of all processes along its `axes`."""
        found = {}
        for name, tensor in state.items():
            shape = list(tensor.shape)
            if name in axes:
                shape[axes[name]] *= self.size
            found[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return found

    def gather(self, state: Mapping[str, torch.Tensor], axes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The states of all processes, concatenated along `axes`, on the leader; {} on followers."""
        if self.size == 1:
            return dict(state)
        found = {}
        for name in sorted(state):
            tensor = state[name].detach()
            if name not in axes:
                found[name] = tensor
                continue
            own = tensor.movedim(axes[name], 0)
            parts = self._gather_tensor(own.cpu().contiguous())
            if parts:
                found[name] = torch.cat(parts).movedim(0, axes[name])
        return found if self.is_leader else {}

    def scatter(
        self, state: Mapping[str, torch.Tensor] | None, own: Mapping[str, torch.Tensor], axes: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """This process's shard of the leader's state, shaped like its `own`."""
        if self.size == 1:
            return dict(state or {})
        found = {}
        for name in sorted(own):
            like = own[name].movedim(axes[name], 0) if name in axes else own[name]
            parts = None
            if state is not None and self.is_leader:
                tensor = state[name].detach().cpu()
                parts = [tensor] * self.size
                if name in axes:
                    parts = [part.contiguous() for part in tensor.movedim(axes[name], 0).chunk(self.size)]
            part = self._scatter_tensor(parts, torch.empty(like.shape, dtype=like.dtype))
            found[name] = (part.movedim(0, axes[name]) if name in axes else part).to(own[name].device)
        return found

    def _gather_tensor(self, part: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all processes on the leader, sent in chunks; [] on followers."""
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.is_leader else []
        chunks = [_bytes(each).split(CHUNK) for each in parts]
        for i, chunk in enumerate(_bytes(part).split(CHUNK)):
            dist.gather(chunk, [each[i] for each in chunks] or None, 0, self._control)
        return parts

    def _scatter_tensor(self, parts: list[torch.Tensor] | None, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with this process's part of the leader's, sent in chunks."""
        chunks = [_bytes(each.contiguous()).split(CHUNK) for each in parts or ()]
        for i, chunk in enumerate(_bytes(out).split(CHUNK)):
            dist.scatter(chunk, [each[i] for each in chunks] or None, 0, self._control)
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
    """A uint8 [bytes] view of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def _all_gather_json(value: Any, size: int, group: dist.ProcessGroup | None) -> list[Any]:
    """The JSON values of all processes of a group; torch's all_gather_object would unpickle them."""
    text = json.dumps(value).encode()
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)]), group)
    longest = max(int(length) for length in lengths)
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(texts, torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8), group)
    return [json.loads(each.numpy().tobytes()) for each in texts]


@contextlib.contextmanager
def join_processes(job: Job) -> Iterator[tuple[Job, Communicator]]:
    """Join the other processes of a launch, if any; yields the job with this process's device."""
    info = find_launch_info()
    if info is None or info.size == 1:
        yield job, Communicator()
        return
    initializes = not dist.is_initialized()
    with _raising_peer_lost(info), _bound_to_cores(info):
        device = _local_device(job.hardware.device, info)
        if initializes:
            info.export()
            store = _rendezvous_store(info)
            dist.init_process_group(
                "gloo", store=store, rank=info.rank, world_size=info.size, timeout=RENDEZVOUS_TIMEOUT
            )
        control = _new_group("gloo", CONTROL_TIMEOUT)
        gpus = _all_gather_json(_gpu_id(device), info.size, control)
        # NCCL needs one GPU per process, and CUDA graphs can record it; processes that share a GPU sum on the host.
        one_gpu_each = None not in gpus and len(set(gpus)) == info.size
        group = _new_group("nccl") if one_gpu_each else control
        through_host = device.startswith("cuda") and not one_gpu_each
        reducer = GroupReducer(group, info.rank, info.size, through_host)
        store = dist.distributed_c10d._get_default_store()
        yield job.change(device=device), Communicator(reducer, control, store)
        # CUDA graphs with NCCL calls must go before the process group. After an error the process ends anyway.
        gc.collect()
        dist.barrier(control)
        if initializes:
            dist.destroy_process_group()


def _new_group(backend: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A process group of all processes."""
    group = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # its type has an int, for processes outside of the group
    return group


@contextlib.contextmanager
def _raising_peer_lost(info: LaunchInfo) -> Iterator[None]:
    """Raise PeerLost in place of torch's errors for a lost process."""
    try:
        yield
    except RuntimeError as error:
        if not _is_peer_loss(error):
            raise
        raise PeerLost(
            f"Process {info.rank} of {info.size} lost the connection to another process; restart all of them to "
            "continue from the last checkpoint."
        ) from error


def _rendezvous_store(info: LaunchInfo) -> Any:
    """The store for the rendezvous: a new file for every start, or the launcher's TCP store.

    torchrun's store outlives its processes, so every start uses a new prefix: without it, restarted processes would
    read the keys of dead ones. Followers ask for the prefix under a random key; the leader answers until all have it.
    """
    stores: Any = dist
    if info.store is not None:
        store = stores.FileStore(info.store, info.size)
        store.set_timeout(RENDEZVOUS_TIMEOUT)
        return store
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    store = stores.TCPStore(host, port, info.size, serves, RENDEZVOUS_TIMEOUT)
    if info.rank:
        request = uuid.uuid4().hex
        store.set(f"shoal/asks/{info.rank}", request)
        name = store.get(f"shoal/answer/{request}").decode()
        store.set(f"shoal/here/{name}/{info.rank}", "")
        return stores.PrefixStore(name, store)
    name, missing = uuid.uuid4().hex, set(range(1, info.size))
    end = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
    while missing:
        for rank in sorted(missing):
            if store.check([f"shoal/asks/{rank}"]):  # a dead process may have written it; its successor overwrites it
                store.set(f"shoal/answer/{store.get(f'shoal/asks/{rank}').decode()}", name)
            if store.check([f"shoal/here/{name}/{rank}"]):
                missing.discard(rank)
        if time.monotonic() > end:
            raise LeaderError(f"{len(missing)} of {info.size} processes did not start: ranks {sorted(missing)}.", 1)
        time.sleep(0.02)
    return stores.PrefixStore(name, store)


def _local_device(device: str, info: LaunchInfo) -> str:
    """This process's device; `cuda` becomes the GPU with the local rank, modulo the number of visible GPUs."""
    if device == "cuda":
        device = f"cuda:{info.local_rank % torch.cuda.device_count()}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    return device


def _gpu_id(device: str) -> str | None:
    """Host name and UUID of a GPU; None for a CPU."""
    if not device.startswith("cuda"):
        return None
    return f"{socket.gethostname()} {getattr(torch.cuda.get_device_properties(device), 'uuid', device)}"


@contextlib.contextmanager
def _bound_to_cores(info: LaunchInfo) -> Iterator[None]:
    """Bind this process to its share of the machine's cores, unless the launcher has."""
    if info.bound or info.local_size == 1 or not hasattr(os, "sched_getaffinity"):
        yield
        return
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    each = len(before) // info.local_size
    if each:
        os.sched_setaffinity(0, sorted(before)[info.local_rank * each : (info.local_rank + 1) * each])
    torch.set_num_threads(max(1, min(threads, each)))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def _is_peer_loss(error: RuntimeError) -> bool:
    """Whether gloo, NCCL or the store raise this error when another process is gone."""
    text = str(error)
    return isinstance(error, dist.DistNetworkError) or any(
        word in text for word in ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
    )
