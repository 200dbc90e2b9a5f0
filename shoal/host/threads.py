"""Cores and priorities of the threads that native libraries start; without effect where the system lacks the calls."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def with_pinned_threads(make: Callable[[], T], first: int) -> T:
    """Call `make`, and pin each thread that it starts to one core, counting from core `first`.

    The threads of several batches that run at the same time would otherwise crowd on some cores while others are idle.
    """
    before = _threads()
    made = make()
    started = sorted(_threads() - before)
    cores = sorted(os.sched_getaffinity(0)) if started else []
    for i, thread in enumerate(started):
        with suppress(OSError):
            os.sched_setaffinity(thread, {cores[(first + i) % len(cores)]})
    return made


def _threads() -> set[int]:
    """Thread ids of this process (empty where there is no /proc)."""
    tasks = Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.exists() else set()


def with_idle_threads(make: Callable[[], T]) -> T:
    """Call `make`; the threads that it starts run at idle priority (Linux).

    The serving thread needs a core for about 0.1 ms. At equal priority it would wait a scheduler slice, several
    milliseconds, which is about a step of all envs.
    """

    def run() -> T:
        if hasattr(os, "SCHED_IDLE"):
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # this thread and those that it starts
        return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
