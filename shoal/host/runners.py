"""Vector runners step the envs of a host world; this module has the interface and the runner in this process.

A runner splits the envs into env slices, contiguous ranges of rows of the shared arrays. `send` starts a step of some
slices with the commands and actions in their rows; `wait` returns those that have finished. Schedules need no more.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from itertools import pairwise

from shoal.core.errors import ShoalError
from shoal.host.envs import EnvFault, make_rows
from shoal.host.memory import SharedArrays
from shoal.host.sources import Source


class WorkerFailed(ShoalError):
    """An env raised in this process, or workers failed more often than `max_worker_restarts`."""

    exit_code = 1


class VectorRunner(ABC):
    """Steps the envs of a host world. Methods take env slices by their index in `env_slices`."""

    env_slices: list[slice]
    """Rows of each env slice."""
    has_reset_only_step: bool = False
    """NEXT_STEP autoreset: the step after an episode's end only resets and is not a transition."""
    can_hold: bool = True
    """Whether some envs of a slice can take a step while others keep their state."""

    def __init__(self):
        self.lost: set[int] = set()
        """Env slices that were restarted since they were last sent; the result of their last step is unknown."""

    @abstractmethod
    def send(self, slices: Sequence[int]) -> None:
        """Start a step of these env slices."""

    @abstractmethod
    def wait(self, slices: Collection[int], min_count: int) -> list[int]:
        """Wait until at least `min_count` of these env slices have finished their step; return all that have."""

    def reset_fault_count(self) -> None:
        """Called before all envs are reset: `max_worker_restarts` counts from here."""

    def close(self) -> None:
        """End every process and thread."""

    def describe(self) -> str:
        """Where the envs are stepped, for a message."""
        return "in this process"


class SerialRunner(VectorRunner):
    """Steps all envs in this process, one after the other: slow, but a debugger sees everything."""

    def __init__(self, source: Source, arrays: SharedArrays, env_slices: list[slice], limit: int | None, repeat: int):
        super().__init__()
        self.env_slices, self.source = env_slices, source
        count = max(rows.stop for rows in env_slices)
        self.envs = make_rows(source.make, range(count), arrays, limit, repeat)

    def send(self, slices: Sequence[int]) -> None:
        for index in slices:
            rows = self.env_slices[index]
            try:
                self.envs.run(rows.start, rows.stop)
            except EnvFault as fault:
                raise WorkerFailed(f"{self.source} raised {fault}.") from fault.__cause__

    def wait(self, slices: Collection[int], min_count: int) -> list[int]:
        return list(slices)

    def close(self) -> None:
        self.envs.close()


def split_rows(count: int, parts: int) -> list[slice]:
    """Split `count` rows into contiguous parts whose sizes differ by at most one."""
    edges = [round(count * part / parts) for part in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def assign_rows(count: int, workers: int, slices_per_worker: int) -> list[list[slice]]:
    """Rows of each worker's env slices.

    The k-th slices of all workers are neighbors, so that together they are one range. Neither the workers nor these
    ranges differ much in size.
    """
    sizes = [
        [rows.stop - rows.start for rows in split_rows(part.stop - part.start, slices_per_worker)]
        for part in split_rows(count, workers)
    ]
    for number, own in enumerate(sizes):
        if number % 2:  # every second worker has its larger slices last, to balance the ranges
            own.reverse()
    shares: list[list[slice]] = [[] for _ in range(workers)]
    start = 0
    for k in range(slices_per_worker):
        for own, share in zip(sizes, shares, strict=True):
            share.append(slice(start, start + own[k]))
            start += own[k]
    return shares
