"""Choice and construction of the vector runner of a host world."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.launch import cpu_threads
from shoal.host.config import HostConfig
from shoal.host.memory import SharedArrays
from shoal.host.native import NativeLibrary, NativeRunner, VectorBatch
from shoal.host.process_runner import ProcessRunner, WorkerLimits
from shoal.host.runners import SerialRunner, VectorRunner, assign_rows, split_rows
from shoal.host.sources import Source
from shoal.host.threads import with_idle_threads, with_pinned_threads


@dataclass(frozen=True)
class RunnerSpec:
    """The envs that a runner steps, and how."""

    source: Source
    config: HostConfig
    native: NativeLibrary | None
    num_envs: int
    on_gpu: bool
    """Whether the policy acts on a GPU."""
    limit: int | None
    """Steps after which episodes are truncated."""
    repeat: int
    """Times that each action is repeated."""

    @property
    def uses_native(self) -> bool:
        """Whether a native batch steps the envs."""
        backend = self.config.vec_backend
        if backend in ("auto", "native"):
            if self.native is None and backend == "native":
                raise ShoalError(f"{self.source} has no native batch; use --vec-backend processes.")
            return self.native is not None
        if self.native is not None and self.native.only_backend:
            raise ShoalError(f"{self.source} has a native batch only, so --vec-backend {backend} is not possible.")
        return False

    @property
    def slices_per_worker(self) -> int:
        """Env slices of each worker, or of all envs if there are no workers."""
        if self.config.env_schedule == "lockstep":
            return 1
        if self.native is not None and self.native.in_python and self.uses_native:
            return 1
        return min(self.config.num_env_slices, self.num_envs)


def make_runner(spec: RunnerSpec, arrays: SharedArrays) -> VectorRunner:
    """Make the runner that the settings ask for, and with it all envs."""
    config, num_envs = spec.config, spec.num_envs
    if spec.uses_native:
        return _native_runner(spec, arrays)
    slices = spec.slices_per_worker
    if config.vec_backend == "serial":
        return SerialRunner(spec.source, arrays, split_rows(num_envs, slices), spec.limit, spec.repeat)
    workers = min(config.num_workers or cpu_threads(), num_envs)
    if num_envs < workers * slices:
        slices = 1
    limits = WorkerLimits(config.worker_timeout, config.max_worker_restarts, config.pin_threads)
    return ProcessRunner(spec.source, arrays, assign_rows(num_envs, workers, slices), spec.limit, spec.repeat, limits)


def _native_runner(spec: RunnerSpec, arrays: SharedArrays) -> NativeRunner:
    library, config = spec.native, spec.config
    assert library is not None
    threads = config.num_workers or cpu_threads()
    if spec.repeat > 1:
        raise ShoalError("--action-repeat does not work with a native batch; use --vec-backend processes.")
    parts = split_rows(spec.num_envs, spec.slices_per_worker)
    # While the policy acts for one slice, the others keep all cores busy. A policy on the CPU needs the cores itself.
    idle_priority = len(parts) > 1 and spec.on_gpu

    def make(rows: slice, number: int, *seed: int) -> Any:
        """Make a vector env, with the threads it starts on their cores and at their priority."""
        start: Callable[[], Any] = partial(library.make, rows.stop - rows.start, threads, *seed)
        if config.pin_threads:
            start = partial(with_pinned_threads, start, number * threads)
        return with_idle_threads(start) if idle_priority else start()

    def batch(rows: slice, number: int) -> VectorBatch:
        if library.seeds_on_creation:
            return VectorBatch(make(rows, number, 0), rows, arrays, partial(make, rows, number))
        return VectorBatch(make(rows, number), rows, arrays)

    return NativeRunner([batch(rows, number) for number, rows in enumerate(parts)], threads)
