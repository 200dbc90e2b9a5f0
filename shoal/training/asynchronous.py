"""Acting and learning at the same time: one thread makes rollouts, another learns from them.

The thread that acts has policies of its own, with the newest weights when a rollout begins; in host worlds, whose steps
take long, also in the middle of it. Finished rollouts wait in a bounded queue, with the number of updates that their
policy had seen at first. A rollout may begin while at most `max_policy_lag` others are not yet learned from: this bounds the
updates between acting and learning. Without lag the two take turns, and the numbers are those of a plain `Trainer`, bit
for bit.

On a GPU each thread has a stream; they wait for one another there, not on the host. Acting may also have a device of
its own.
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
from shoal.core.launch import rest_until_done
from shoal.learn.rollout import Rollout
from shoal.policy import Policy
from shoal.training.host_collector import HostCollector
from shoal.training.processes import Processes
from shoal.training.trainer import Trainer, lags_told


class Handover:
    """Memory that one thread fills and another reads. Streams of a GPU wait for one another, not the host."""

    def __init__(self, like: list[torch.Tensor], device: torch.device):
        self.memory = [torch.zeros_like(tensor, device=device) for tensor in like]
        self.fresh = False
        """Whether it was filled since it was read."""
        self._written, self._read = _Mark(), _Mark()
        self._lock = threading.Lock()

    def put(self, tensors: list[torch.Tensor]) -> None:
        """Fill it."""
        with self._lock:
            self._read.wait()
            _copy(tensors, self.memory)
            self._written.set(tensors[0].device)
            self.fresh = True

    def take(self, into: list[torch.Tensor]) -> None:
        """Copy what is in it."""
        with self._lock:
            self._written.wait()
            _copy(self.memory, into)
            self._read.set(into[0].device)
            self.fresh = False


class _Mark:
    """A place on a stream of a GPU, for other streams to wait for; nothing at all on a CPU."""

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
    """A rollout that waits to be learned from."""

    slot: Handover
    version: int
    """How many rollouts had been learned from when it began; its later steps may have been made with newer weights."""


class AsyncTrainer(Trainer):
    """A trainer whose `iterate` learns from the next rollout while others are being made."""

    def __init__(self, job: Job, processes: Processes | None = None):
        self.max_policy_lag = job.schedule.max_policy_lag
        self._learn_device = torch.device(job.schedule.learner_device or job.hardware.device)
        super().__init__(job, processes)
        self._weights = {
            name: Handover(_weights(self.policies[name], learner.rollout), self._learn_device)
            for name, learner in self.learners.items()
        }
        self._sums = self.episode_sums().to(self._learn_device)
        self._free: SimpleQueue[Handover] = SimpleQueue()
        for _ in range(self.max_policy_lag + 1):
            self._free.put(Handover(self._made(), self._learn_device))
        self._finished: list[Finished] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._acting = self._paused = self._closing = False
        self._awaited = False
        """Whether the learner waits for a rollout."""
        self._begun = 0
        """Rollouts begun so far; those learned from are counted by `iteration`."""
        self._fault: BaseException | None = None
        self._lags: list[int] = []
        self._waited = {"learner": 0.0, "actor": 0.0}
        """Seconds since the last reading of metrics."""
        self._read_at = time.monotonic()
        if isinstance(self.collector, HostCollector):
            self.collector.refresh_weights = self._refresh_weights

    def _actors(self) -> dict[str, Policy]:
        self.players = {name: copy.deepcopy(policy) for name, policy in self.policies.items()}
        self.policies = {name: policy.to(self._learn_device) for name, policy in self.policies.items()}
        return self.players

    def _experience(self, name: str) -> Rollout:
        made = copy.copy(self.collector.rollouts[name])
        for field, value in vars(made).items():
            if isinstance(value, torch.Tensor):
                setattr(made, field, torch.zeros_like(value, device=self._learn_device))
        return made

    # --- learning: the thread of the caller -------------------------------------------------------------------------

    def iterate(self) -> None:
        """Learn from the next rollout, as soon as there is one."""
        if self._thread is None:
            self._start()
        finished = self._next()
        read = [rows for learner in self.learners.values() for rows in _contents(learner.rollout)]
        finished.slot.take([*read, self._sums])
        self._free.put(finished.slot)
        self._lags.append(self.iteration - finished.version)
        self.learn()
        if self._learn_device.type == "cuda":
            # sync: lag and waiting are told as they are, and players never wait for weights that are still learned
            rest_until_done(self._learn_device)
        self._publish()
        with self._changed:
            self.iteration += 1
            self._changed.notify_all()

    def _next(self) -> Finished:
        start = time.monotonic()
        with self._changed:
            self._awaited = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._finished or self._fault is not None)
            self._awaited = False
            self._waited["learner"] += time.monotonic() - start
            if self._fault is not None:
                raise self._fault
            return self._finished.pop(0)

    def _publish(self) -> None:
        """Let players have the weights of now."""
        for name, learner in self.learners.items():
            self._weights[name].put(_weights(self.policies[name], learner.rollout))

    def _fill_players(self) -> None:
        """Before anybody acts: what has been loaded, also for those that do not learn."""
        for name, player in self.players.items():
            player.load_state_dict(self.policies[name].state_dict())
        self._publish()

    def _start(self) -> None:
        self._fill_players()
        self._begun = self.iteration
        self._thread = threading.Thread(target=self._act, name="actor", daemon=True)
        self._thread.start()

    @contextmanager
    def still(self) -> Iterator[None]:
        """No rollout is being made, and players are as good as the policies.

        Rollouts that wait in the queue stay there; a run that is resumed from what is saved now will not see them.
        Without lag the queue is empty.
        """
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._acting)
        try:
            if self._thread is None:
                self._fill_players()
            self._wait_for_device()  # a rollout that is being made there
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

    # --- is_decision_step: a thread of its own --------------------------------------------------------------------------------

    def _act(self) -> None:
        device = self.world.device
        stream: Any = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
        try:
            with stream:
                while (version := self._may_begin()) is not None:
                    self._make_rollout(version)
        except BaseException as error:
            with self._changed:
                self._fault, self._acting = error, False
                self._changed.notify_all()

    def _may_begin(self) -> int | None:
        """Wait until another rollout may begin; returns how many have been learned from, or None at the end."""
        start = time.monotonic()

        def ready() -> bool:
            if self._closing:
                return True
            more = self._begun < self.job.run.iterations and not self._paused
            if not self.max_policy_lag:
                # Only on demand: a rollout between an update and the checkpoint after it would be lost on resuming.
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
        """Whether nothing is left to compile or to record: while one thread does so, the other must rest."""
        parts = (self._collect, self._store, *self._updates.values())
        warms_up = (
            self.job.hardware.compile == "on" or self._learn_device.type == "cuda" or self.world.device.type == "cuda"
        )
        return not warms_up or all(part.warm for part in parts)

    def _make_rollout(self, version: int) -> None:
        """One rollout with the newest weights, and into the queue with it."""
        self._refresh_weights()
        self.world.between_rollouts()
        self.collect()
        slot = self._free.get()
        slot.put(self._made())
        with self._changed:
            self._finished.append(Finished(slot, version))
            self._acting = False
            self._changed.notify_all()

    def _refresh_weights(self) -> None:
        """Give the players the newest weights, if they have not got them."""
        for name, weights in self._weights.items():
            if weights.fresh:
                weights.take(_weights(self.players[name], self.collector.rollouts[name]))

    def _made(self) -> list[torch.Tensor]:
        """What a rollout has brought, where the world is."""
        rows = [rows for name in self.learners for rows in _contents(self.collector.rollouts[name])]
        return [*rows, self.episode_sums()]

    # --- between updates --------------------------------------------------------------------------------------------

    def load_state_dict(self, state: dict[str, torch.Tensor], iteration: int) -> None:
        super().load_state_dict(state, iteration)
        for name, learner in self.learners.items():
            learner.rollout.version.copy_(self.collector.rollouts[name].version)
        if int(self.collector.counter) != iteration:
            # Envs stand behind rollouts that waited to be learned from, and are lost: what they do next is no sequel.
            for name, learner in self.learners.items():
                learner.mark_discontinuity()
                carried = self.collector.rollouts[name].carried()
                if "age" in carried:
                    carried["age"].zero_()
        self._sums.copy_(self.episode_sums())
        self._read = self._episode_totals()

    def read_metrics(self) -> dict[str, float]:
        found = super().read_metrics()
        found.update(lags_told(self._lags))
        now = time.monotonic()
        spent = max(1e-9, now - self._read_at)
        with self._changed:
            for who, seconds in self._waited.items():
                found[f"time/{who}_waits"] = seconds / spent
                self._waited[who] = 0.0
        self._lags, self._read_at = [], now
        return found

    def _newest_sums(self) -> torch.Tensor:
        return self._sums


def _copy(tensors: list[torch.Tensor], into: list[torch.Tensor]) -> None:
    torch._foreach_copy_(into, tensors, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]


def _weights(policy: Policy, rollout: Rollout) -> list[torch.Tensor]:
    """What acting depends on: parameters, running moments, how often to act at random; and their version."""
    found = [*policy.state_dict().values(), rollout.version]
    return found if rollout.epsilon is None else [*found, rollout.epsilon]


def _contents(rollout: Rollout) -> list[torch.Tensor]:
    """What a learner reads of a rollout."""
    own = (rollout.version, rollout.epsilon)
    return [t for t in vars(rollout).values() if isinstance(t, torch.Tensor) and not any(t is other for other in own)]
