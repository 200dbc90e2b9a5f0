"""Native batches: vector environments that step many envs at once in C++ or NumPy, as env slices of a runner."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.errors import ShoalError
from shoal.core.user_code import UserCode
from shoal.host.envs import SINGLE, close_envs, env_class
from shoal.host.memory import HOLD, RESET, STEP, SharedArrays
from shoal.host.runners import VectorRunner

SAME_STEP, NEXT_STEP, DISABLED = "SameStep", "NextStep", "Disabled"
"""Gymnasium's autoreset modes: reset in the step that ends an episode, in the next step, or on request."""


@dataclass(frozen=True)
class NativeLibrary:
    """How a library makes native batches of an environment."""

    make: Callable[..., Any]
    """Makes a vector env from the number of envs and of threads, and a seed if `seeds_on_creation`."""
    seeds_on_creation: bool = False
    """The library takes a seed only when it makes a vector env, so `reset(seed)` makes a new one."""
    in_python: bool = False
    """Steps hold Python's lock, so the policy cannot act meanwhile: more than one env slice would not help."""
    only_backend: bool = False
    """The environment cannot be stepped in worker processes."""


class VectorBatch:
    """A Gymnasium VectorEnv (Gymnasium's own, ale-py's, EnvPool's) on a range of rows of the shared arrays.

    With NEXT_STEP autoreset the reset-only step is no transition, so the agent is not `alive` in it.
    """

    def __init__(self, vector: Any, rows: slice, arrays: SharedArrays, remake: Callable[[int], Any] | None = None):
        """`remake` makes a new vector env from a seed, for libraries that seed on creation."""
        self.vector, self.rows, self.remake = vector, rows, remake
        self.is_async = hasattr(vector, "ale")  # ale-py has send and recv
        mode = vector.metadata.get("autoreset_mode", NEXT_STEP)
        self.mode = str(getattr(mode, "value", mode))
        if self.mode not in (SAME_STEP, NEXT_STEP, DISABLED):
            raise ShoalError(f"The autoreset mode {self.mode!r} of {type(vector).__name__} is not known.")
        own = {name: arrays[name][rows] for name in arrays.layout}
        self.command, self.seed, self.reset_only = own["command"], own["seed"], own["reset_only"]
        self.terminated, self.truncated = own["terminated"], own["truncated"]
        self.action, self.observation, self.final, self.reward, self.alive = (
            own[f"{SINGLE}.{name}"][:, 0] for name in ("action", "observation", "final_observation", "reward", "alive")
        )
        self._result: Any = None

    def send(self) -> None:
        """Start a step; libraries without an asynchronous one finish it here."""
        if self.command.any():
            self._run_commands()
        elif self.is_async:
            self.vector.send(self.action)
        else:
            self._result = self.vector.step(self.action)

    def recv(self) -> None:
        """Wait for the step that was sent, and write its results to the rows."""
        if self.command.any():
            return
        result = self.vector.recv() if self.is_async else self._result
        observation, reward, terminated, truncated, info = result
        reset_only = ~self.alive if self.mode == NEXT_STEP else None
        self.observation[...] = observation
        self.reward[...] = reward
        self.terminated[...] = terminated
        self.truncated[...] = truncated
        if reset_only is not None and reset_only.any():
            self.reward[reset_only] = 0.0
            self.terminated[reset_only] = self.truncated[reset_only] = False
        ended = self.terminated | self.truncated
        if reset_only is not None:
            self.reset_only[...] = reset_only
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

    def _run_commands(self) -> None:
        """Start new episodes; the envs of a native batch cannot be stepped one by one."""
        starts = self.command > HOLD
        if (self.command == STEP).any():
            raise ShoalError(
                "A native batch steps all its envs or none; use --vec-backend processes to hold some of them."
            )
        if starts.all():
            self.observation[...] = self._reset_all((self.command == RESET).all())
        elif starts.any():
            if self.mode == NEXT_STEP:
                raise ShoalError("This native batch restarts all its envs or none; use --vec-backend processes.")
            observation, _ = self.vector.reset(options={"reset_mask": starts})
            self.observation[starts] = observation[starts]
        self.alive[starts] = True
        self.terminated[...] = self.truncated[...] = self.reset_only[...] = False

    def _reset_all(self, seeded: bool) -> np.ndarray:
        if not seeded:
            return self.vector.reset()[0]
        if self.remake is not None:
            self.vector.close()
            self.vector = self.remake(int(self.seed[0]))
            return self.vector.reset()[0]
        # Gymnasium's own batches take one seed for all envs; ale-py takes one per env.
        return self.vector.reset(seed=self.seed if self.is_async else int(self.seed[0]))[0]

    def run(self) -> None:
        """Take a whole step."""
        self.send()
        self.recv()


class NativeRunner(VectorRunner):
    """One native batch per env slice, each with its own threads."""

    can_hold = False

    def __init__(self, batches: list[VectorBatch], threads: int):
        super().__init__()
        self.batches, self.threads = batches, threads
        self.env_slices = [batch.rows for batch in batches]
        self.has_reset_only_step = batches[0].mode == NEXT_STEP
        self._pool = ThreadPoolExecutor(len(batches)) if len(batches) > 1 else None
        self._running: dict[int, Future] = {}
        """Env slices that a thread of the pool steps or waits for."""
        own = env_class(batches[0].vector)
        self._user_code = UserCode(f"The native batch {own.__name__} failed", own, (ShoalError,), exit_code=1)

    def describe(self) -> str:
        many = f"{len(self.batches)} native batches" if len(self.batches) > 1 else "a native batch"
        return f"in {many} ({type(self.batches[0].vector).__name__}, {self.threads} thread(s))"

    def send(self, slices: Sequence[int]) -> None:
        with self._user_code:
            for index in slices:
                batch = self.batches[index]
                if batch.is_async or self._pool is None:
                    batch.send()
                else:
                    self._running[index] = self._pool.submit(batch.run)

    def wait(self, slices: Collection[int], min_count: int) -> list[int]:
        with self._user_code:
            return self._wait(slices, min_count)

    def _wait(self, slices: Collection[int], min_count: int) -> list[int]:
        found = []
        if min_count >= len(slices):  # all of them: this thread can wait itself
            for index in slices:
                if index in self._running:
                    self._running.pop(index).result()
                else:
                    self.batches[index].recv()
                found.append(index)
            return sorted(found)
        assert self._pool is not None
        for index in slices:
            if index not in self._running:
                self._running[index] = self._pool.submit(self.batches[index].recv)
        while len(found) < min_count:
            wait_for([self._running[index] for index in slices if index not in found], return_when=FIRST_COMPLETED)
            found = [index for index in slices if self._running[index].done()]
        for index in found:
            self._running.pop(index).result()
        return sorted(found)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        close_envs(batch.vector for batch in self.batches)
