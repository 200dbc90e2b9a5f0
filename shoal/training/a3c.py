"""A3C (Mnih et al. 2016): several actor-learner threads update one set of parameters without waiting for each other.

Each actor-learner is a `Trainer` with its share of the envs and its copy of the policy. It computes a gradient with the
parameters of its last step. Under a lock, that gradient updates the shared parameters with shared Adam moments, and the
actor-learner copies the result.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from shoal.algos.policy_gradient import PolicyGradient
from shoal.config.job import Job
from shoal.learn.optim import Adam
from shoal.policy.normalize import RunningMoments, share_buffers
from shoal.training.processes import Communicator
from shoal.training.trainer import ProgressMixin, Trainer, lag_metrics


class SharedTrainer(ProgressMixin):
    """Several trainers with shared parameters, behind the interface of one.

    One iteration is as many rollouts as there are trainers; a fast one may collect several of them.
    """

    def __init__(self, job: Job, processes: Communicator | None = None):
        self.job, self.processes = job, processes or Communicator()
        actors = job.learn.actors
        single = replace(job, learn=replace(job.learn, actors=1))
        self.parts = [Trainer(single, _as_process(i, actors)) for i in range(actors)]
        first = self.parts[0]
        self.world, self.collector, self.learners = first.world, first.collector, first.learners
        self.policies = self.acting_policies = {name: copy.deepcopy(policy) for name, policy in first.policies.items()}
        """Policies with the shared parameters."""
        self._lock = threading.Lock()
        """Held while the shared parameters change."""
        self.optimizers = {
            name: learner.config.make_optimizer(self.policies[name], False) for name, learner in self.learners.items()
        }
        for part in self.parts:
            part.processes = Communicator()
            self._join(part)
        self._changed = threading.Condition()
        self._running = 0
        """Parts inside an iteration."""
        self._paused = False
        self.iteration = self._done = self._begun = 0
        """Iterations summed over the parts: finished, and started."""
        self._error: BaseException | None = None
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._lags: list[int] = []
        """Optimizer steps of other parts between two steps of a part."""
        self._steps = 0

    def _join(self, part: Trainer) -> None:
        """Redirect a part's optimizer steps and running moments to the shared ones."""
        for name, policy in self.policies.items():
            share_buffers(part.policies[name], policy)
            for module in part.policies[name].modules():
                if isinstance(module, RunningMoments):
                    module.merge = _synchronized(module.merge, self._lock)
        for name, learner in part.learners.items():
            learner.optimizer.step = _SharedStep(self, self.optimizers[name], learner.optimizer)
            first = self.learners[name]
            assert isinstance(learner, PolicyGradient)
            assert isinstance(first, PolicyGradient)
            shared = first.reward_moments
            if learner.reward_moments is not shared:
                share_buffers(learner.reward_moments, shared)
            learner.reward_moments.merge = _synchronized(learner.reward_moments.merge, self._lock)

    # --- one thread per part ----------------------------------------------------------------------------------------

    def _work(self, index: int) -> None:
        part = self.parts[index]
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or not self._paused)
                    if self._closing or self._begun >= self.job.run.iterations * len(self.parts):
                        return
                    self._begun += 1
                    self._running += 1
                    part.iteration = self.iteration
                part.iterate()
                with self._changed:
                    self._running -= 1
                    self._done += 1
                    self.iteration = self._done // len(self.parts)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._running -= 1
                self._error = error
                self._changed.notify_all()

    def iterate(self) -> None:
        """Wait until the parts have finished as many iterations as there are parts."""
        if not self._threads:
            self._start()
        with self._changed:
            goal = self._done + len(self.parts)
            goal -= goal % len(self.parts)
            goal = min(goal, self.job.run.iterations * len(self.parts))  # parts run ahead of the caller
            self._changed.wait_for(lambda: self._done >= goal or self._error is not None)
            if self._error is not None:
                raise self._error

    def _start(self) -> None:
        for part in self.parts:
            for name, policy in part.policies.items():
                policy.load_state_dict(self.policies[name].state_dict())
        for i in range(len(self.parts)):
            self._threads.append(threading.Thread(target=self._work, args=(i,), name="actor", daemon=True))
            self._threads[-1].start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which all parts wait between two iterations."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._running)
        try:
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def close(self) -> None:
        """End the threads and close the worlds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for part in self.parts:
            part.close()

    # --- metrics and state ------------------------------------------------------------------------------------------

    def read_metrics(self) -> dict[str, float]:
        """Means over the parts since the last call; episode metrics are weighted by each part's finished episodes."""
        with self.paused():
            before = [part.episodes_read for part in self.parts]
            each = [part.read_metrics() for part in self.parts]
            lags, self._lags = self._lags, []
        ended = [metrics["rollout/episodes"] - count for metrics, count in zip(each, before, strict=True)]
        found = {}
        for name in dict.fromkeys(name for metrics in each for name in metrics):
            weights = ended if name.startswith("rollout/") else [1.0] * len(each)
            values = [(metrics[name], w) for metrics, w in zip(each, weights, strict=True) if name in metrics]
            found[name] = sum(value * w for value, w in values) / max(1.0, sum(w for _, w in values))
        found["rollout/episodes"] = sum(metrics["rollout/episodes"] for metrics in each)
        return {**found, **lag_metrics(lags)}

    def check_finite(self) -> None:
        """Raise InvalidDataError if an optimizer skipped a non-finite gradient; the message names the source."""
        for part in self.parts:
            part.check_masks()
        if any(int(optimizer.bad_steps) for optimizer in self.optimizers.values()):
            # Parts whose newest rollout holds the non-finite value come first: they can name the env.
            for part in sorted(self.parts, key=lambda part: part.is_finite):
                part.check_finite()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors that the next iteration reads: concatenated along env axes, shared ones once."""
        states, axes = [part.state_dict() for part in self.parts], self.parts[0].env_axes()
        found = {}
        for name, tensor in states[0].items():
            found[name] = torch.cat([s[name] for s in states], axes[name]) if name in axes else tensor
        # The counter keys the noise: the largest one keeps all parts from repeating noise after a resume.
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
        """Empty: the state already holds the envs of all parts."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor], iteration: int) -> None:
        """Load a state and its iteration, saved with any number of parts."""
        axes = self.parts[0].env_axes()
        for i, part in enumerate(self.parts):
            own = {k: v.chunk(len(self.parts), axes[k])[i] if k in axes else v for k, v in state.items()}
            part.load_state_dict(own, iteration)
        for name, tensor in self._shared_state().items():
            tensor.copy_(state[name])
        self.iteration, self._done = iteration, iteration * len(self.parts)
        self._begun = self._done


class _SharedStep:
    """Replaces an optimizer's step: applies the gradient to the shared parameters and copies them to the part."""

    def __init__(self, trainer: SharedTrainer, shared: Adam, own: Adam):
        self.trainer, self.shared, self.own = trainer, shared, own
        self.last = 0
        """Number of shared steps after this part's last one."""

    def __call__(self, gradient: torch.Tensor, go: torch.Tensor) -> torch.Tensor:
        shared, own = self.shared, self.own
        with self.trainer._lock:
            shared.lr.copy_(own.lr)
            norm = shared.step(gradient, go)
            own.flat.copy_(shared.flat)
            own.bad_steps.copy_(shared.bad_steps)
            self.trainer._lags.append(self.trainer._steps - self.last)
            self.trainer._steps += 1
            self.last = self.trainer._steps
        return norm


def _synchronized(function: Callable[..., None], lock: threading.Lock) -> Callable[..., None]:
    def call(*args: Any) -> None:
        with lock:
            function(*args)

    return call


def _as_process(rank: int, size: int) -> Communicator:
    """Rank and size that give a trainer its share of the envs, without communication."""
    processes = Communicator()
    processes.rank, processes.size = rank, size
    return processes
