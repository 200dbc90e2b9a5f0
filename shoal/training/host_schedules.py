"""Schedules of a host world: the order in which env slices step on the CPU and policies act for them on the device.

What an env does depends on its own observations and noise alone, so all schedules produce the same experience.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from shoal.host.runners import split_rows
from shoal.training.gathered_acting import GatheredActing
from shoal.training.row_collector import RowCollector

READY_FRACTION, BATCH_FRACTION = 4, 2
"""First-come, policies act once 1/4 of the active env slices are ready, for at most 1/2 of all slices at once."""


class HostSchedule(ABC):
    """Fills a rollout in some order. `collector` acts and writes rows."""

    def __init__(self, collector: RowCollector):
        self.collector, self.world = collector, collector.world

    @abstractmethod
    def run(self, steps: int, should_stop: Callable[[int], bool]) -> list[int]:
        """Step all envs.

        Args:
            steps: Maximum number of steps.
            should_stop: Asked with the number of steps made; True ends the rollout early.

        Returns:
            Steps made by each env slice.
        """


class TurnSchedule(HostSchedule):
    """Policies act for one part of the envs after the other; a part steps while others act. Lockstep is one part."""

    def __init__(self, collector: RowCollector, num_parts: int):
        super().__init__(collector)
        count = len(self.world.started().env_slices)
        self._count = count
        self._parts = [range(part.start, part.stop) for part in split_rows(count, min(num_parts, count))]

    def run(self, steps: int, should_stop: Callable[[int], bool]) -> list[int]:
        envs = self.world.started()
        t, last = -1, False
        while not last:
            t += 1
            last = t == steps or should_stop(t)
            if not last:
                self.collector.refresh_weights()
            for part in self._parts:
                if t:
                    envs.recv(part, len(part))
                self.collector.act_in_range(part, t, last)
                if not last:
                    self.world.wait_for_actions()
                    envs.send(part)
        return [t] * self._count


class FirstComeSchedule(HostSchedule):
    """Policies act as soon as enough env slices are ready; every slice makes the same number of steps, unless stopped.

    When stopped, each slice ends after the step it is taking. The result of a step is written to the rollout when its
    slice acts next, and at the end for all slices at once.
    """

    def __init__(self, collector: RowCollector, latest_stop: int):
        """`latest_stop` is the largest number of steps after which a rollout can be stopped."""
        super().__init__(collector)
        self._latest_stop = latest_stop
        self._gathered: GatheredActing | None = None

    def run(self, steps: int, should_stop: Callable[[int], bool]) -> list[int]:
        envs, collector = self.world.started(), self.collector
        count = len(envs.env_slices)
        at, ends, asked = np.zeros(count, dtype=np.int64), np.full(count, steps), 0
        most = -(-count // BATCH_FRACTION)
        ready, running = list(range(count)), set()
        while ready or running:
            enough = -(-(len(ready) + len(running)) // READY_FRACTION)
            if len(ready) >= enough:
                batch, ready = sorted(ready[:most]), ready[most:]
                self._act(batch, at[batch])
                running.update(batch)
                continue
            done = envs.recv(running, enough - len(ready))
            running.difference_update(done)
            at[done] += 1
            if at.sum() // count > asked:  # once per step of all
                asked = int(at.sum()) // count
                if should_stop(asked):
                    begun = np.array([max(1, t + (index in running)) for index, t in enumerate(at)])
                    ends = np.where(begun <= self._latest_stop, begun, steps)
            ready = [index for index in (*ready, *done) if at[index] < ends[index]]
        envs.collect_lost(range(count))
        if (at == steps).all():
            collector.act_in_range(range(count), steps, last=True)
        else:
            before = np.repeat(at - 1, [rows.stop - rows.start for rows in envs.env_slices])
            collector.write_steps(before, collector.all_envs, collector.record_ends(before, collector.all_envs))
        return at.tolist()

    def _act(self, slices: list[int], at: np.ndarray) -> None:
        """Act for these env slices, each at its step, and send them."""
        envs = self.world.started()
        envs.collect_lost(slices)
        self.collector.refresh_weights()
        if len(envs.env_slices) <= BATCH_FRACTION:  # one at a time, so it is a range at one step
            self.collector.act_in_range(range(slices[0], slices[0] + 1), int(at[0]), last=False)
            self.world.wait_for_actions()
        else:
            if self._gathered is None:
                self._gathered = GatheredActing(self.collector, -(-len(envs.env_slices) // BATCH_FRACTION))
            self._gathered(slices, at)
        envs.send(slices)
