"""Native batches: vector environments that step many envs in C++ or NumPy at once, behind the interface of engines."""

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shoal.core.errors import ShoalError
from shoal.core.user_code import UserCode
from shoal.host.engines import Engine
from shoal.host.envs import SINGLE, close_envs, own_class
from shoal.host.memory import HOLD, RESET, STEP, SharedArrays

Made = TypeVar("Made")

SAME_STEP, NEXT_STEP, DISABLED = "SameStep", "NextStep", "Disabled"
"""When a vector env begins a new episode: in the step that ended one, in the step after it, or when told to."""


class VectorBatch:
    """A Gymnasium VectorEnv (Gymnasium's own, ale-py's, EnvPool's) on a range of rows of the arrays.

    Of those that restart in the step after the end, that step is no transition: the agent is not `alive` in it.
    """

    def __init__(self, vector: Any, rows: slice, arrays: SharedArrays, remake: Callable[[int], Any] | None = None):
        """`remake` makes it anew from a seed, for libraries that take one only then."""
        self.vector, self.rows, self.remake = vector, rows, remake
        self.sends = hasattr(vector, "ale")  # ale-py begins a step without waiting for its end
        mode = vector.metadata.get("autoreset_mode", NEXT_STEP)
        self.mode = str(getattr(mode, "value", mode))
        if self.mode not in (SAME_STEP, NEXT_STEP, DISABLED):
            raise ShoalError(f"The autoreset mode {self.mode!r} of {type(vector).__name__} is not known.")
        own = {name: arrays[name][rows] for name in arrays.layout}
        self.order, self.seed, self.skipped = own["order"], own["seed"], own["skipped"]
        self.terminated, self.truncated = own["terminated"], own["truncated"]
        self.action, self.observation, self.final, self.reward, self.alive = (
            own[f"{SINGLE}.{name}"][:, 0] for name in ("action", "observation", "final_observation", "reward", "alive")
        )
        self._answer: Any = None

    def send(self) -> None:
        """Begin a step."""
        if self.order.any():
            self._follow_orders()
        elif self.sends:
            self.vector.send(self.action)
        else:
            self._answer = self.vector.step(self.action)

    def receive(self) -> None:
        """Wait for what was begun and write it down."""
        if self.order.any():
            return
        answer = self.vector.recv() if self.sends else self._answer
        observation, reward, terminated, truncated, info = answer
        skipped = ~self.alive if self.mode == NEXT_STEP else None
        self.observation[...] = observation
        self.reward[...] = reward
        self.terminated[...] = terminated
        self.truncated[...] = truncated
        if skipped is not None and skipped.any():
            self.reward[skipped] = 0.0
            self.terminated[skipped] = self.truncated[skipped] = False
        ended = self.terminated | self.truncated
        if self.mode == NEXT_STEP:
            self.skipped[...] = skipped
            self.alive[...] = ~ended
        if not ended.any():
            return
        if self.mode == SAME_STEP:
            final = info["final_obs"]
            for env in ended.nonzero()[0]:
                self.final[env] = final[env]
            return
        self.final[ended] = observation[ended]
        if self.mode == DISABLED:
            first, _ = self.vector.reset(options={"reset_mask": ended})
            self.observation[ended] = first[ended]

    def _follow_orders(self) -> None:
        """Begin episodes; a native batch cannot step some envs and not others."""
        begins = self.order > HOLD
        if (self.order == STEP).any():
            raise ShoalError("A native batch steps all its envs or none; use --batch processes to hold some of them.")
        if begins.all():
            self.observation[...] = self._reset_all((self.order == RESET).all())
        elif begins.any():
            if self.mode == NEXT_STEP:
                raise ShoalError("This native batch restarts all its envs or none; use --batch processes.")
            observation, _ = self.vector.reset(options={"reset_mask": begins})
            self.observation[begins] = observation[begins]
        self.alive[begins] = True
        self.terminated[...] = self.truncated[...] = self.skipped[...] = False

    def _reset_all(self, seeded: bool) -> np.ndarray:
        if not seeded:
            return self.vector.reset()[0]
        if self.remake is not None:
            self.vector.close()
            self.vector = self.remake(int(self.seed[0]))
            return self.vector.reset()[0]
        # Gymnasium's own take one seed for all; ale-py takes one for each env.
        return self.vector.reset(seed=self.seed if self.sends else int(self.seed[0]))[0]

    def run(self) -> None:
        """A step from beginning to end."""
        self.send()
        self.receive()


class Native(Engine):
    """One native batch per bunch, each with threads of its own."""

    def __init__(self, batches: list[VectorBatch], threads: int):
        super().__init__()
        self.batches, self.threads = batches, threads
        self.bunches = [batch.rows for batch in batches]
        self._pool = ThreadPoolExecutor(len(batches)) if len(batches) > 1 else None
        self._running: dict[int, Future] = {}
        """Bunches that a thread of the pool waits for."""
        own = own_class(batches[0].vector)
        self._code = UserCode(f"The native batch {own.__name__} failed", own, (ShoalError,), exit_code=1)

    def describe(self) -> str:
        many = f"{len(self.batches)} native batches" if len(self.batches) > 1 else "a native batch"
        return f"in {many} ({type(self.batches[0].vector).__name__}, {self.threads} thread(s))"

    def send(self, bunches: Sequence[int]) -> None:
        with self._code:
            for bunch in bunches:
                batch = self.batches[bunch]
                if batch.sends or self._pool is None:
                    batch.send()
                else:
                    self._running[bunch] = self._pool.submit(batch.run)

    def wait(self, wanted: Collection[int], enough: int) -> list[int]:
        with self._code:
            return self._wait(wanted, enough)

    def _wait(self, wanted: Collection[int], enough: int) -> list[int]:
        found = []
        if enough >= len(wanted):  # all of them: no need for anybody else to wait
            for bunch in wanted:
                if bunch in self._running:
                    self._running.pop(bunch).result()
                else:
                    self.batches[bunch].receive()
                found.append(bunch)
            return sorted(found)
        assert self._pool is not None
        for bunch in wanted:
            if bunch not in self._running:
                self._running[bunch] = self._pool.submit(self.batches[bunch].receive)
        while len(found) < enough:
            wait_for([self._running[bunch] for bunch in wanted if bunch not in found], return_when=FIRST_COMPLETED)
            found = [bunch for bunch in wanted if self._running[bunch].done()]
        for bunch in found:
            self._running.pop(bunch).result()
        return sorted(found)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        close_envs(batch.vector for batch in self.batches)


def pack_seeds(seed: int, first_env: int, count: int) -> np.ndarray:
    """A seed for every env that depends on the run's seed and the env's number alone."""
    return (np.int64(seed) * 1_000_003 + np.arange(first_env, first_env + count)) % 2**31


def keep_on_cores(make: Callable[[], Made], first: int) -> Made:
    """What `make` makes; the threads that it starts stay on a core each, from `first` on, where the system allows that.

    Threads of several batches that run at the same time would gather on some cores while others have nothing to do.
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
    """Those of this process, by the numbers that the system gave them (elsewhere than on Linux: none)."""
    tasks = Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.exists() else set()


def giving_way(make: Callable[[], Made]) -> Made:
    """What `make` makes; the threads that it starts give way to all others, where the system allows that.

    Whoever serves threads that keep all cores busy wakes up for tenths of a millisecond at a time. Among equals it gets
    a core when somebody's time slice is over, milliseconds later: about a step of all envs.
    """

    def run() -> Made:
        if hasattr(os, "SCHED_IDLE"):
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # this thread, and those that it starts
        return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
