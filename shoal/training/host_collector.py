"""Collecting from host worlds: policies act on the device while envs step on CPU cores.

Envs come in env slices (see shoal/host/runners.py). In *lockstep* all act and step together; *alternating*, policies
act for one part of the slices while the others step; *first-come*, for the slices that finish first.
"""

import time
from collections.abc import Callable
from typing import get_args

import numpy as np
import torch

from shoal.core.graph import WARM_UP_CALLS
from shoal.host.config import Schedule
from shoal.training.host_schedules import FirstComeSchedule, HostSchedule, TurnSchedule
from shoal.training.processes import Preemption
from shoal.training.row_collector import RowCollector

TRIAL_SECONDS = 0.4
"""How long each schedule is timed before one is chosen."""

TRIAL_STEPS = 8

TRIAL_SEED = 500_009
"""Added to the seed while schedules are timed, so that an env that fails there does not fail again in training."""

MIN_SPEEDUP = 1.03
"""Speedup over lockstep, the simplest schedule, that another one must have."""

MIN_FRACTION = 4
"""A preempted rollout has at least 1/4 of its steps."""


def _never(steps: int) -> bool:
    return False


class HostCollector(RowCollector):
    """Fills rollouts from a host world by the schedule of its settings."""

    def __init__(self, *args, preemption: Preemption | None = None, **kwargs):
        """With `preemption`, rollouts end early once enough other processes have finished theirs."""
        super().__init__(*args, preemptible=preemption is not None, **kwargs)
        self.preemption = preemption
        self._completed: list[float] = []
        """Fraction of its steps that each rollout since the last reading has."""
        self.schedule: Schedule = self.world.config.env_schedule
        self._measured = ""
        self._schedules: dict[str, HostSchedule] = {}

    def start(self, seed: int, first_env: int = 0) -> None:
        if self.schedule == "auto":
            self._choose_schedule(seed, first_env)
        super().start(seed, first_env)

    def describe_stepping(self) -> list[str]:
        runner = self.world.vector_env.runner
        return [f"envs are stepped {runner.describe()}; schedule: {self.schedule}{self._measured}"]

    def collect(self) -> None:
        self._begin()
        self._num_final[:] = 0
        if self.preemption is None:
            self._run_schedule(self.schedule, self.steps)
        else:
            self._collect_preemptible(self.preemption)
        self.counter.add_(1)

    # --- preemption -------------------------------------------------------------------------------------------------

    def _collect_preemptible(self, preemption: Preemption) -> None:
        """Collect a rollout, and end it early if enough other processes have finished theirs."""
        least = -(-self.steps // MIN_FRACTION)
        made = self._run_schedule(
            self.schedule, self.steps, lambda t: least <= t <= self._latest_stop and preemption.requested()
        )
        preemption.finish()
        steps_of_envs = np.repeat(made, [rows.stop - rows.start for rows in self.world.vector_env.env_slices])
        self._completed.append(float(steps_of_envs.mean()) / self.steps)
        for steps in {*made} - {self.steps}:
            self._preempt_envs(steps, (steps_of_envs == steps).nonzero()[0])

    def _preempt_envs(self, steps: int, envs: np.ndarray) -> None:
        """End the rollout of some envs after `steps` steps; unfinished episodes are stored as if truncated there."""
        flags, where = next(iter(self.rollouts.values())), torch.from_numpy(envs).to(self.world.device)
        ended = (flags.terminated[steps - 1, where] | flags.truncated[steps - 1, where]).cpu().numpy()
        unfinished = envs[~ended]
        for name, r in self.rollouts.items():
            assert r.alive is not None
            self._final[name][where] = r.observation[steps + r.stack - 1, where]
            self._final_alive[name][where] = r.alive[steps, where]
            if len(unfinished):
                self._store_final(name, np.full(len(unfinished), steps - 1), unfinished)
            r.preempt(steps, where, torch.from_numpy(unfinished).to(where))

    @property
    def _latest_stop(self) -> int:
        """The largest number of steps after which a rollout can be preempted."""
        return min(r.max_preempt_step for r in self.rollouts.values())

    def read_completed(self) -> float:
        """Mean fraction of its steps that each rollout since the last reading has."""
        completed, self._completed = self._completed, []
        return sum(completed) / max(1, len(completed))

    # --- schedules --------------------------------------------------------------------------------------------------

    def _run_schedule(self, schedule: Schedule, steps: int, should_stop: Callable[[int], bool] = _never) -> list[int]:
        """Step all envs by a schedule; return the steps made by each env slice."""
        if schedule not in self._schedules:
            self._schedules[schedule] = self._make_schedule(schedule)
        return self._schedules[schedule].run(steps, should_stop)

    def _make_schedule(self, schedule: Schedule) -> HostSchedule:
        if schedule == "first-come":
            return FirstComeSchedule(self, self._latest_stop)
        return TurnSchedule(self, self.world.config.num_env_slices if schedule == "alternating" else 1)

    def _choose_schedule(self, seed: int, first_env: int) -> None:
        """Time each schedule and choose one; the run then starts from the same seed, whatever the choice."""
        world = self.world
        times: dict[Schedule, float] = {}
        for number, schedule in enumerate(get_args(Schedule)[1:] if len(world.vector_env.env_slices) > 1 else ()):
            world.reset(seed + TRIAL_SEED + number, first_env, desync_steps=0)
            self.show_current()
            self._begin()
            steps = min(TRIAL_STEPS, self.steps)
            for _ in range(WARM_UP_CALLS + 1 if self.use_graphs else 1):  # compiles, and records graphs
                self._time(schedule, steps)
            calls, spent = 0, 0.0
            while spent < TRIAL_SECONDS:
                spent += self._time(schedule, steps)
                calls += 1
            times[schedule] = spent / (calls * steps)
        best: Schedule = "lockstep"
        for schedule, seconds in times.items():
            if seconds * MIN_SPEEDUP < times[best]:
                best = schedule
        self.schedule = best
        world.set_schedule(best)
        self._graphs.clear()
        self._schedules.clear()
        measured = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())
        self._measured = f" (a step of all envs: {measured})" if measured else ""

    def _time(self, schedule: Schedule, steps: int) -> float:
        """Seconds that `steps` steps of all envs take."""
        self._num_final[:] = 0
        start = time.perf_counter()
        self._run_schedule(schedule, steps)
        self.world.wait_for_actions()
        return time.perf_counter() - start
