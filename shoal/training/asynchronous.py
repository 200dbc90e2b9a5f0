"""Asynchronous training: one thread collects rollouts, another learns from them.

The acting thread has copies of the policies. It refreshes their weights when a rollout begins and, in host worlds, also
during it. Finished rollouts wait in a bounded queue, labeled with the number of updates before their first step. A
rollout begins only while at most `max_policy_lag` rollouts wait to be learned from, which bounds the policy lag. With
`max_policy_lag` 0 the threads alternate, and the numbers equal a synchronous `Trainer`'s bit for bit.

On a GPU each thread has its stream, and they wait for each other on the device, not on the host. Acting and learning
may use different devices.
"""

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from shoal.config.job import Job
from shoal.core.launch import wait_for_stream
from shoal.learn.rollout import Rollout
from shoal.policy import Policy
from shoal.training.host_collector import HostCollector
from shoal.training.processes import Communicator
from shoal.training.trainer import Trainer, lag_metrics


class TensorMailbox:
    """Tensors that one thread writes and another reads. On a GPU their streams wait for each other, not the host."""

    def __init__(self, like: list[torch.Tensor], device: torch.device):
        self.memory = [torch.zeros_like(tensor, device=device) for tensor in like]
        self.fresh = False
        """Whether the tensors were written since the last read."""
        self._written, self._read = _StreamEvent(), _StreamEvent()
        self._lock = threading.Lock()

    def put(self, tensors: list[torch.Tensor]) -> None:
        """Copy tensors into the mailbox."""
        with self._lock:
            self._read.wait()
            _copy(tensors, self.memory)
            self._written.set(tensors[0].device)
            self.fresh = True

    def take(self, into: list[torch.Tensor]) -> None:
        """Copy the mailbox's tensors to `into`."""
        with self._lock:
            self._written.wait()
            _copy(self.memory, into)
            self._read.set(into[0].device)
            self.fresh = False


class _StreamEvent:
    """A CUDA event that other streams wait for; a no-op on a CPU."""

    def __init__(self):
        self.event: torch.cuda.Event | None = None

    def set(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self.event is not None:
            self.event.wait()


class Finished(NamedTuple):
    """A collected rollout in the queue."""

    slot: TensorMailbox
    version: int
    """Rollouts learned from before its first step; in host worlds, later steps may use newer weights."""


class AsyncTrainer(Trainer):
    """A trainer whose `iterate` learns from the next rollout while a thread collects others."""

    def __init__(self, job: Job, processes: Communicator | None = None):
        self.max_policy_lag = job.schedule.max_policy_lag
        self._learn_device = torch.device(job.schedule.learner_device or job.hardware.device)
        super().__init__(job, processes)
        self._weights = {
            name: TensorMailbox(_weights(self.policies[name], learner.rollout), self._learn_device)
            for name, learner in self.learners.items()
        }
        self._sums = self.episode_sums().to(self._learn_device)
        self._free: SimpleQueue[TensorMailbox] = SimpleQueue()
        for _ in range(self.max_policy_lag + 1):
            self._free.put(TensorMailbox(self._rollout_tensors(), self._learn_device))
        self._finished: list[Finished] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._acting = self._paused = self._closing = False
        self._awaited = False
        """Whether the learner waits for a rollout to finish."""
        self._begun = 0
        """Rollouts started so far; `iteration` counts those learned from."""
        self._error: BaseException | None = None
        self._lags: list[int] = []
        self._waited = {"learner": 0.0, "actor": 0.0}
        """Seconds each thread waited since the last `read_metrics`."""
        self._read_at = time.monotonic()
        if isinstance(self.collector, HostCollector):
            self.collector.refresh_weights = self._refresh_weights

    def _make_acting_policies(self) -> dict[str, Policy]:
        self.acting_policies = {name: copy.deepcopy(policy) for name, policy in self.policies.items()}
        self.policies = {name: policy.to(self._learn_device) for name, policy in self.policies.items()}
        return self.acting_policies

    def _learner_rollout(self, name: str) -> Rollout:
        rollout = copy.copy(self.collector.rollouts[name])
        for field, value in vars(rollout).items():
            if isinstance(value, torch.Tensor):
                setattr(rollout, field, torch.zeros_like(value, device=self._learn_device))
        return rollout

    # --- learning: the thread of the caller -------------------------------------------------------------------------

    def iterate(self) -> None:
        """Wait for the next rollout and learn from it."""
        if self._thread is None:
            self._start()
        finished = self._next()
        read = [rows for learner in self.learners.values() for rows in _contents(learner.rollout)]
        finished.slot.take([*read, self._sums])
        self._free.put(finished.slot)
        self._lags.append(self.iteration - finished.version)
        self.update()
        if self._learn_device.type == "cuda":
            # sync: metrics then show true lag and waiting, and acting never waits for an unfinished update
            wait_for_stream(self._learn_device)
        self._publish()
        with self._changed:
            self.iteration += 1
            self._changed.notify_all()

    def _next(self) -> Finished:
        start = time.monotonic()
        with self._changed:
            self._awaited = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._finished or self._error is not None)
            self._awaited = False
            self._waited["learner"] += time.monotonic() - start
            if self._error is not None:
                raise self._error
            return self._finished.pop(0)

    def _publish(self) -> None:
        """Offer the current weights to the acting thread."""
        for name, learner in self.learners.items():
            self._weights[name].put(_weights(self.policies[name], learner.rollout))

    def _load_acting_policies(self) -> None:
        """Copy all weights, also of frozen policies, before the first rollout."""
        for name, policy in self.acting_policies.items():
            policy.load_state_dict(self.policies[name].state_dict())
        self._publish()

    def _start(self) -> None:
        self._load_acting_policies()
        self._begun = self.iteration
        self._thread = threading.Thread(target=self._act, name="actor", daemon=True)
        self._thread.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which no rollout is collected and the acting policies have the newest weights.

        The queue keeps its rollouts, but a checkpoint does not contain them. With `max_policy_lag` 0 it is empty.
        """
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._acting)
        try:
            if self._thread is None:
                self._load_acting_policies()
            self._wait_for_device()  # for the rollout it still computes
            self._refresh_weights()
            self._wait_for_device()
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def _wait_for_device(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)  # sync: at a checkpoint, where all streams meet

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        super().close()

    # --- the acting thread -------------------------------------------------------------------------------------------

    def _act(self) -> None:
        device = self.world.device
        stream: Any = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
        try:
            with stream:
                while (version := self._may_begin()) is not None:
                    self._collect_and_queue(version)
        except BaseException as error:
            with self._changed:
                self._error, self._acting = error, False
                self._changed.notify_all()

    def _may_begin(self) -> int | None:
        """Wait until the next rollout may begin; returns its version, or None when the trainer closes."""
        start = time.monotonic()

        def ready() -> bool:
            if self._closing:
                return True
            more = self._begun < self.job.run.iterations and not self._paused
            if not self.max_policy_lag:
                # Only on demand: a checkpoint would lose a rollout collected between an update and the checkpoint.
                more = more and self._awaited
            return more and self._begun - self.iteration <= (self.max_policy_lag if self._warm else 0)

        with self._changed:
            self._changed.wait_for(ready)
            self._waited["actor"] += time.monotonic() - start
            if self._closing:
                return None
            self._begun += 1
            self._acting = True
            return self.iteration

    @property
    def _warm(self) -> bool:
        """Whether compiling and graph recording are done; they allow no work in the other thread."""
        parts = (self._collect, self._store, *self._updates.values())
        warms_up = (
            self.job.hardware.compile == "on" or self._learn_device.type == "cuda" or self.world.device.type == "cuda"
        )
        return not warms_up or all(part.warm for part in parts)

    def _collect_and_queue(self, version: int) -> None:
        """Collect one rollout with the newest weights and queue it."""
        self._refresh_weights()
        self.world.between_rollouts()
        self.collect()
        slot = self._free.get()
        slot.put(self._rollout_tensors())
        with self._changed:
            self._finished.append(Finished(slot, version))
            self._acting = False
            self._changed.notify_all()

    def _refresh_weights(self) -> None:
        """Copy newly published weights to the acting policies."""
        for name, weights in self._weights.items():
            if weights.fresh:
                weights.take(_weights(self.acting_policies[name], self.collector.rollouts[name]))

    def _rollout_tensors(self) -> list[torch.Tensor]:
        """The tensors of the newest rollout and the episode sums, on the world's device."""
        rows = [rows for name in self.learners for rows in _contents(self.collector.rollouts[name])]
        return [*rows, self.episode_sums()]

    # --- between updates --------------------------------------------------------------------------------------------

    def load_state_dict(self, state: dict[str, torch.Tensor], iteration: int) -> None:
        super().load_state_dict(state, iteration)
        for name, learner in self.learners.items():
            learner.rollout.version.copy_(self.collector.rollouts[name].version)
        if int(self.collector.counter) != iteration:
            # The envs are ahead of the lost rollouts of the queue: the next transitions do not continue the replay's.
            for name, learner in self.learners.items():
                learner.mark_discontinuity()
                carried = self.collector.rollouts[name].carry_state()
                if "age" in carried:
                    carried["age"].zero_()
        self._sums.copy_(self.episode_sums())
        self._read = self._episode_totals()

    def read_metrics(self) -> dict[str, float]:
        found = super().read_metrics()
        found.update(lag_metrics(self._lags))
        now = time.monotonic()
        spent = max(1e-9, now - self._read_at)
        with self._changed:
            for thread, seconds in self._waited.items():
                found[f"time/{thread}_waits"] = seconds / spent
                self._waited[thread] = 0.0
        self._lags, self._read_at = [], now
        return found

    def _current_sums(self) -> torch.Tensor:
        return self._sums


def _copy(tensors: list[torch.Tensor], into: list[torch.Tensor]) -> None:
    torch._foreach_copy_(into, tensors, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]


def _weights(policy: Policy, rollout: Rollout) -> list[torch.Tensor]:
    """The tensors that acting reads: parameters, running moments, version and epsilon."""
    found = [*policy.state_dict().values(), rollout.version]
    return found if rollout.epsilon is None else [*found, rollout.epsilon]


def _contents(rollout: Rollout) -> list[torch.Tensor]:
    """The tensors of a rollout that a learner reads."""
    excluded = (rollout.version, rollout.epsilon)
    return [t for t in vars(rollout).values() if isinstance(t, torch.Tensor) and all(t is not e for e in excluded)]
