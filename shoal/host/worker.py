"""A worker process: steps its share of the envs when told to, and says when it is done.

    shoal.host.worker ASSIGNMENT

It talks to its world through two pipes. A byte b in: run bunch b; the same byte out: done. When its envs are made it
says READY; if one of them raises, FAILED and what happened, a line of JSON. It ends when the world closes the pipe, so
no worker outlives its world.
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

AWAKE = 1e-3
"""Seconds that a worker asks again and again for what to do, before it sleeps until it is told."""

ENDING = 2.0
"""Seconds that a worker has to end once its world has hung up."""


@dataclass(frozen=True)
class Assignment:
    """What a worker is to do, and the file descriptors it inherits for it."""

    number: int
    source: Source
    layout: Layout
    bunches: list[tuple[int, int]]
    """First row and end of the envs of each bunch."""
    limit: int | None
    """Steps after which episodes are truncated."""
    repeat: int
    """Times that each action is taken."""
    core: int | None
    """CPU core to stay on."""
    alert: bool
    """Whether to stay awake for a while when there is nothing to do."""
    memory: int
    commands: int
    answers: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Assignment":
        parts = json.loads(text)
        return cls(**{**parts, "source": Source(**parts["source"])})


def work(job: Assignment) -> None:
    """Make the envs, then serve until the world hangs up."""
    if job.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {job.core})
    try:
        arrays = SharedArrays({name: (kind, tuple(shape)) for name, (kind, shape) in job.layout.items()}, job.memory)
        rows = [row for start, stop in job.bunches for row in range(start, stop)]
        envs = make_rows(job.source.make, rows, arrays, job.limit, job.repeat)
        os.write(job.answers, bytes([READY]))
        listen = select.poll()
        listen.register(job.commands, select.POLLIN)
        while commands := _next(job.commands, listen, job.alert):
            for bunch in commands:
                envs.run(*job.bunches[bunch])
                os.write(job.answers, bytes([bunch]))
    except EnvFault as fault:
        _report(job, f"raised {fault}", fault.__cause__ or fault)
    except Exception as error:
        _report(job, f"failed: {describe(error)}", error)


def _next(descriptor: int, listen: select.poll, alert: bool) -> bytes:
    """What the world says next. A core that goes to sleep in between takes long to wake up, so stay awake a little."""
    end = time.perf_counter() + AWAKE
    while alert and not listen.poll(0) and time.perf_counter() < end:
        os.sched_yield()  # to whoever has something to do
    return os.read(descriptor, 64)


def _report(job: Assignment, text: str, error: BaseException) -> None:
    told = dict(text=text, traceback="".join(traceback.format_tb(error.__traceback__)) + text_of(error))
    os.write(job.answers, bytes([FAILED]) + json.dumps(told).encode() + b"\n")


def _end_with_world(descriptor: int) -> None:
    """End this process some time after the world has hung up, even if an env never ends its step."""
    hung_up = select.poll()
    hung_up.register(descriptor, 0)
    hung_up.poll()
    time.sleep(ENDING)
    os._exit(1)


def main() -> None:
    """Entry of the process."""
    job = Assignment.from_json(sys.argv[1])
    threading.Thread(target=_end_with_world, args=(job.commands,), daemon=True).start()
    with standard_streams(), suppress(BrokenPipeError):  # the world has hung up
        work(job)


if __name__ == "__main__":
    main()
