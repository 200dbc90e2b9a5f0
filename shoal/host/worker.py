"""A worker process: steps the envs of its slices on request.

    shoal.host.worker ASSIGNMENT

Two pipes connect it to the world. A byte k in requests a step of its k-th env slice; the same byte out says that it is
finished. READY says that the envs are made. FAILED and a line of JSON say that an env raised. The process ends when the
world closes the request pipe, so no worker outlives its world.
"""

import json
import os
import select
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass

from shoal.core.streams import standard_streams
from shoal.core.user_code import describe, text_of
from shoal.host.envs import EnvFault, make_rows
from shoal.host.memory import Layout, SharedArrays
from shoal.host.sources import Source

READY, FAILED = 254, 255

SPIN_SECONDS = 1e-3
"""How long an idle worker polls for requests before it sleeps: waking up a sleeping core takes long."""

EXIT_SECONDS = 2.0
"""How long a worker may take to end once its world has closed the request pipe."""


@dataclass(frozen=True)
class Assignment:
    """The envs of a worker, and the file descriptors it inherits."""

    number: int
    source: Source
    layout: Layout
    env_slices: list[tuple[int, int]]
    """First row and end of each env slice."""
    limit: int | None
    """Steps after which episodes are truncated."""
    repeat: int
    """Times that each action is repeated."""
    core: int | None
    """CPU core to pin the process to."""
    spin: bool
    """Whether to poll for SPIN_SECONDS when idle."""
    memory_fd: int
    request_fd: int
    answer_fd: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Assignment":
        parts = json.loads(text)
        return cls(**{**parts, "source": Source(**parts["source"])})


def work(job: Assignment) -> None:
    """Make the envs, then step them on request until the world closes the pipe."""
    if job.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {job.core})
    try:
        layout = {name: (dtype, tuple(shape)) for name, (dtype, shape) in job.layout.items()}
        arrays = SharedArrays(layout, job.memory_fd)
        rows = [row for start, stop in job.env_slices for row in range(start, stop)]
        envs = make_rows(job.source.make, rows, arrays, job.limit, job.repeat)
        os.write(job.answer_fd, bytes([READY]))
        poll = select.poll()
        poll.register(job.request_fd, select.POLLIN)
        while requests := _read_requests(job.request_fd, poll, job.spin):
            for index in requests:
                envs.run(*job.env_slices[index])
                os.write(job.answer_fd, bytes([index]))
    except EnvFault as fault:
        _report(job, f"raised {fault}", fault.__cause__ or fault)
    except Exception as error:
        _report(job, f"failed: {describe(error)}", error)


def _read_requests(descriptor: int, poll: select.poll, spin: bool) -> bytes:
    """The next requests; empty when the world has closed the pipe."""
    end = time.perf_counter() + SPIN_SECONDS
    while spin and not poll.poll(0) and time.perf_counter() < end:
        os.sched_yield()
    return os.read(descriptor, 64)


def _report(job: Assignment, text: str, error: BaseException) -> None:
    fault = dict(text=text, traceback="".join(traceback.format_tb(error.__traceback__)) + text_of(error))
    os.write(job.answer_fd, bytes([FAILED]) + json.dumps(fault).encode() + b"\n")


def _exit_after_hang_up(descriptor: int) -> None:
    """End this process EXIT_SECONDS after the world has closed the pipe, even if a step of an env never returns."""
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()
    time.sleep(EXIT_SECONDS)
    os._exit(1)


def main() -> None:
    """Entry point of the process."""
    job = Assignment.from_json(sys.argv[1])
    threading.Thread(target=_exit_after_hang_up, args=(job.request_fd,), daemon=True).start()
    with standard_streams(), suppress(BrokenPipeError):  # the world has closed the pipes
        work(job)


if __name__ == "__main__":
    main()
