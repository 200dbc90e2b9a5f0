"""A3C: several actor-learners, each with envs, a policy and a pace of its own, step down one set of parameters.

Each is a whole `Trainer` in a thread, with its share of the envs. It learns from its rollout by the parameters it has
had since its last step; then, one at a time, its gradient moves the shared ones, with the shared moments of Adam, and
it goes on with what they are now (Mnih et al. 2016). Nobody waits for anybody else's rollout.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from shoal.config.job import Job
from shoal.learn.optim import Adam
from shoal.policy.normalize import RunningMoments, share_buffers
from shoal.training.processes import Processes
from shoal.training.trainer import Counted, Trainer, lags_told


class SharedTrainer(Counted):
    """Trainers that share parameters, as one trainer. An iteration is one rollout of as many as there are."""

    def __init__(self, job: Job, processes: Processes | None = None):
        self.job, self.processes = job, processes or Processes()
        actors = job.learn.actors
        alone = replace(job, learn=replace(job.learn, actors=1))
        self.parts = [Trainer(alone, _share(i, actors)) for i in range(actors)]
        first = self.parts[0]
        self.world, self.collector, self.learners = first.world, first.collector, first.learners
        self.policies = self.players = {name: copy.deepcopy(policy) for name, policy in first.policies.items()}
        """With the shared parameters."""
        self._turn = threading.Lock()
        """Held while the shared parameters move."""
        self.optimizers = {
            name: learner.config.optimize(self.policies[name], False) for name, learner in self.learners.items()
        }
        for part in self.parts:
            part.processes = Processes()
            self._join(part)
        self._changed = threading.Condition()
        self._at_work = 0
        """Parts in the middle of an iteration."""
        self._paused = False
        self.iteration = self._done = self._begun = 0
        """Iterations of all parts together."""
        self._fault: BaseException | None = None
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._lags: list[int] = []
        """Steps that others made between a part's last step and its next one."""
        self._steps = 0

    def _join(self, part: Trainer) -> None:
        """Let the steps of a part move what is shared, and its moments be everybody's."""
        for name, policy in self.policies.items():
            share_buffers(part.policies[name], policy)
            for module in part.policies[name].modules():
                if isinstance(module, RunningMoments):
                    module.merge = _one_at_a_time(module.merge, self._turn)
        for name, learner in part.learners.items():
            learner.optimizer.step = _Step(self, self.optimizers[name], learner.optimizer)
            shared = self.learners[name].reward_moments
            if learner.reward_moments is not shared:
                share_buffers(learner.reward_moments, shared)
            learner.reward_moments.merge = _one_at_a_time(learner.reward_moments.merge, self._turn)

    # --- work: a thread for each part -------------------------------------------------------------------------------

    def _work(self, index: int) -> None:
        part = self.parts[index]
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or not self._paused)
                    if self._closing or self._begun >= self.job.run.iterations * len(self.parts):
                        return
                    self._begun += 1
                    self._at_work += 1
                    part.iteration = self.iteration
                part.iterate()
                with self._changed:
                    self._at_work -= 1
                    self._done += 1
                    self.iteration = self._done // len(self.parts)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._at_work -= 1
                self._fault = error
                self._changed.notify_all()

    def iterate(self) -> None:
        """Wait until as many rollouts as there are parts have been made and learned from."""
        if not self._threads:
            self._start()
        with self._changed:
            goal = self._done + len(self.parts)
            goal -= goal % len(self.parts)
            goal = min(goal, self.job.run.iterations * len(self.parts))  # parts go on while nobody waits for them
            self._changed.wait_for(lambda: self._done >= goal or self._fault is not None)
            if self._fault is not None:
                raise self._fault

    def _start(self) -> None:
        for part in self.parts:
            for name, policy in part.policies.items():
                policy.load_state_dict(self.policies[name].state_dict())
        for i in range(len(self.parts)):
            self._threads.append(threading.Thread(target=self._work, args=(i,), name="actor", daemon=True))
            self._threads[-1].start()

    @contextmanager
    def still(self) -> Iterator[None]:
        """All parts wait between two of their iterations."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._at_work)
        try:
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def close(self) -> None:
        """End the threads and let go of the worlds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for part in self.parts:
            part.close()

    # --- what a trainer tells ---------------------------------------------------------------------------------------

    def read_metrics(self) -> dict[str, float]:
        """Means over the parts since the last reading; of episodes, over those of all parts."""
        with self.still():
            before = [part.episodes_read for part in self.parts]
            each = [part.read_metrics() for part in self.parts]
            lags, self._lags = self._lags, []
        ended = [metrics["rollout/episodes"] - count for metrics, count in zip(each, before, strict=True)]
        found = {}
        for name in dict.fromkeys(name for metrics in each for name in metrics):
            weights = ended if name.startswith("rollout/") else [1.0] * len(each)
            told = [(metrics[name], w) for metrics, w in zip(each, weights, strict=True) if name in metrics]
            found[name] = sum(value * w for value, w in told) / max(1.0, sum(w for _, w in told))
        found["rollout/episodes"] = sum(metrics["rollout/episodes"] for metrics in each)
        return {**found, **lags_told(lags)}

    def check_finite(self) -> None:
        """Stop if steps were refused for a gradient that is not finite; say where it came from."""
        for part in self.parts:
            part.check_masks()
        if any(int(optimizer.bad_steps) for optimizer in self.optimizers.values()):
            # Whose newest rollout shows what was wrong speaks first.
            for part in sorted(self.parts, key=lambda part: part.is_finite):
                part.check_finite()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors that the next iteration depends on: envs of all parts along their axes, shared ones once."""
        states, axes = [part.state_dict() for part in self.parts], self.parts[0].env_axes()
        found = {}
        for name, tensor in states[0].items():
            found[name] = torch.cat([s[name] for s in states], axes[name]) if name in axes else tensor
        # Noise is drawn by env and rollout: nobody is to draw again what somebody with more rollouts has drawn.
        found["collector.counter"] = torch.stack([s["collector.counter"] for s in states]).amax(0)
        return {**found, **self._shared_state()}

    def _shared_state(self) -> dict[str, torch.Tensor]:
        state = {}
        for name, policy in self.policies.items():
            state.update({f"policy.{name}.{k}": v for k, v in policy.state_dict().items()})
        for name, optimizer in self.optimizers.items():
            state.update({f"learner.{name}.optimizer.{k}": v for k, v in optimizer.state_dict().items()})
        return state

    def env_axes(self) -> dict[str, int]:
        """Names of the state that have the envs along an axis: here they are complete."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor], iteration: int) -> None:
        """Continue where a saved state stood, with any number of parts."""
        axes = self.parts[0].env_axes()
        for i, part in enumerate(self.parts):
            own = {k: v.chunk(len(self.parts), axes[k])[i] if k in axes else v for k, v in state.items()}
            part.load_state_dict(own, iteration)
        for name, tensor in self._shared_state().items():
            tensor.copy_(state[name])
        self.iteration, self._done = iteration, iteration * len(self.parts)
        self._begun = self._done


class _Step:
    """In place of an optimizer's step: the gradient moves what is shared, and the part takes what there is then."""

    def __init__(self, trainer: SharedTrainer, shared: Adam, own: Adam):
        self.trainer, self.shared, self.own = trainer, shared, own
        self.seen = 0

    def __call__(self, gradient: torch.Tensor, go: torch.Tensor) -> torch.Tensor:
        shared, own = self.shared, self.own
        with self.trainer._turn:
            shared.lr.copy_(own.lr)
            norm = shared.step(gradient, go)
            own.flat.copy_(shared.flat)
            own.bad_steps.copy_(shared.bad_steps)
            self.trainer._lags.append(self.trainer._steps - self.seen)
            self.trainer._steps += 1
            self.seen = self.trainer._steps
        return norm


def _one_at_a_time(function: Callable[..., None], lock: threading.Lock) -> Callable[..., None]:
    def call(*given: Any) -> None:
        with lock:
            function(*given)

    return call


def _share(rank: int, size: int) -> Processes:
    """Which part of the envs a trainer has; it learns alone."""
    processes = Processes()
    processes.rank, processes.size = rank, size
    return processes
