"""The trainer: collect, learn, count. It knows nothing of files or terminals."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoal.core.graph import Graphed
from shoal.errors import ShoalError
from shoal.host.world import HostWorld
from shoal.learn import LEARNERS, Learner
from shoal.run.build import make_policies, make_world
from shoal.run.collect import Collector
from shoal.run.config import Job
from shoal.run.schedule import HostCollector


class Trainer:
    """Everything that a run moves from one iteration to the next."""

    def __init__(self, job: Job):
        config = job.train
        _set_precision(config.deterministic)
        self.job = job
        compiled, bf16 = config.compile == "on", config.precision == "bf16"
        self.world = make_world(job)
        self.policies = make_policies(job, self.world)
        teams = {name: [self.world.group(g.name) for g in groups] for name, groups in job.teams().items()}
        collector, more = Collector, {}
        if isinstance(self.world, HostWorld):
            collector, more = HostCollector, dict(graph=config.graph)
        self.collector = collector(
            self.world, self.policies, config.rollout, config.seed, teams, compiled=compiled, bf16=bf16, **more
        )
        learner = LEARNERS[config.algo][1]
        self.learners: dict[str, Learner] = {
            name: learner(
                policy, self.collector.rollouts[name], job.for_policy(name).learn, config.seed, compiled, bf16
            )
            for name, policy in self.policies.items()
            if name not in config.freeze
        }
        self.iteration = 0
        device = self.world.device
        self._collect = Graphed(self.collector.collect, device, config.graph and self.world.on_device)
        keeps = any(type(made).store is not Learner.store for made in self.learners.values())
        self._store = Graphed(self._store_all, device, config.graph and keeps)
        pool = torch.cuda.graph_pool_handle() if config.graph and device.type == "cuda" else None
        self._updates = {name: Graphed(made.update, device, config.graph, pool) for name, made in self.learners.items()}
        self._episodes_read = 0.0
        self._returns_read: dict[str, float] = {g.name: 0.0 for g in self.world.groups}
        self._reports_read: dict[str, float] = {}
        self._lengths_read = 0.0
        self.collector.start(config.seed)

    @property
    def steps(self) -> int:
        """Env steps so far."""
        return self.iteration * self.job.train.steps_per_iteration

    @property
    def agent_steps(self) -> int:
        """Agent steps so far."""
        return self.steps * sum(g.agents for g in self.world.groups)

    @property
    def done(self) -> bool:
        return self.iteration >= self.job.train.iterations

    def collect(self) -> None:
        """One rollout."""
        with _torch_threads(self.job.train.threads):
            self._collect()

    def learn(self) -> None:
        """Learn from the rollout, by as many updates as it calls for."""
        progress = min(1.0, self.iteration / self.job.train.iterations)
        for learner in self.learners.values():
            learner.set_progress(progress)
        with _torch_threads(self.job.train.threads):
            self._store()
            for name, learner in self.learners.items():
                for _ in range(learner.due((self.iteration + 1) * learner.rollout.samples)):
                    self._updates[name]()

    def iterate(self) -> None:
        """One rollout, and learning from it."""
        self.world.tend()
        self.collect()
        self.learn()
        self.iteration += 1

    def _store_all(self) -> None:
        for learner in self.learners.values():
            learner.store()

    def read_metrics(self) -> dict[str, float]:
        """Means since the last reading, under the names people know. Waits for the device."""
        stats = self.world.statistics()
        episodes = float(stats.episodes.sum())  # sync: once per log interval
        lengths = float(stats.length_sum.sum())
        found: dict[str, float] = {}
        new = episodes - self._episodes_read
        many = len(self.world.groups) > 1
        for name, sums in stats.return_sum.items():
            total = float(sums.double().sum())
            if new > 0:
                key = f"rollout/{name}/ep_rew_mean" if many else "rollout/ep_rew_mean"
                found[key] = (total - self._returns_read[name]) / new
            self._returns_read[name] = total
        for name, sums in stats.report_sum.items():
            total = float(sums.double().sum())
            if new > 0:
                found[f"rollout/{name}"] = (total - self._reports_read.get(name, 0.0)) / new
            self._reports_read[name] = total
        if new > 0:
            found["rollout/ep_len_mean"] = (lengths - self._lengths_read) / new
        found["rollout/episodes"] = episodes
        self._episodes_read, self._lengths_read = episodes, lengths
        for name, learner in self.learners.items():
            prefix = f"train/{name}/" if len(self.policies) > 1 else "train/"
            found.update({prefix + key: value for key, value in learner.read_metrics().items()})
            found[f"{prefix}learning_rate"] = float(learner.optimiser.lr)
        self.check_finite()
        return found

    def check_finite(self) -> None:
        """Stop if steps were refused for a gradient that is not finite; say where it came from."""
        for name, learner in self.learners.items():
            bad = sum(optimiser.bad_steps for optimiser in learner.optimisers.values())
            if int(bad):  # sync: with a log line or a checkpoint
                self._blame(name)

    def _blame(self, name: str) -> None:
        rollout = self.collector.rollouts[name]
        for field in ("observation", "reward", "final_observation"):
            tensor = getattr(rollout, field)
            if field == "observation":  # not those from before the rollout
                tensor = tensor[rollout.stack - 1 :]
            bad = ~torch.isfinite(tensor.float())
            if bool(bad.any()):
                t, env, agent = (int(i) for i in bad.nonzero()[0][:3])
                raise BadNumbers(
                    f"Env {env}, agent {agent} of {self.job.world} gave a {field} that is not finite "
                    f"({tensor[t, env, agent].tolist()}) at row {t} of the rollout after {self.steps} env steps.",
                    self._env_state(env),
                )
        raise BadNumbers(
            f"A gradient of {name} was not finite before {self.steps} env steps, although the newest rollout is: "
            f"look for a passing fault in the world, or lower --lr (now {self.learners[name].config.lr}). "
            "No step was taken.",
            {},
        )

    def _env_state(self, env: int) -> dict[str, Any]:
        state = self.world.state_dict()
        return {k: v[env].tolist() for k, v in state.items() if v.ndim and v.shape[0] == self.world.num_envs}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors that the next iteration depends on."""
        state = {f"world.{k}": v for k, v in self.world.state_dict().items()}
        state["collector.counter"] = self.collector.counter
        for name, rollout in self.collector.rollouts.items():
            state[f"collector.{name}.version"] = rollout.version
            state.update({f"collector.{name}.{item}": rows for item, rows in rollout.carried().items()})
        for name, policy in self.policies.items():
            state.update({f"policy.{name}.{k}": v for k, v in policy.state_dict().items()})
        for name, learner in self.learners.items():
            state.update({f"learner.{name}.{k}": v for k, v in learner.state_dict().items()})
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor], iteration: int) -> None:
        """Continue where a saved state stood; the caller has compared names and shapes."""
        self.world.load_state_dict(part_of(state, "world."))
        for name, policy in self.policies.items():
            policy.load_state_dict(part_of(state, f"policy.{name}."))
        for name, learner in self.learners.items():
            learner.load_state_dict(part_of(state, f"learner.{name}."))
        own = self.state_dict()
        for key, tensor in own.items():
            if key.startswith("collector."):
                tensor.copy_(state[key])
        if not self.world.resumable:
            self.collector.show_current()
            for learner in self.learners.values():
                learner.cut()
        self.iteration = iteration
        stats = self.world.statistics()
        self._episodes_read = float(stats.episodes.sum())
        self._lengths_read = float(stats.length_sum.sum())
        self._returns_read = {name: float(sums.double().sum()) for name, sums in stats.return_sum.items()}
        self._reports_read = {name: float(sums.double().sum()) for name, sums in stats.report_sum.items()}


class BadNumbers(ShoalError):
    """NaN or infinity where there must be none, with the state of the env that made it."""

    def __init__(self, message: str, env_state: dict[str, Any]):
        super().__init__(message)
        self.env_state = env_state


def part_of(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The entries under a prefix, without it."""
    return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}


@contextmanager
def _torch_threads(count: int | None) -> Iterator[None]:
    """So many threads for operations of torch (None: as many as before)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _set_precision(deterministic: bool) -> None:
    torch.set_float32_matmul_precision("high")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch asks for before it promises anything
        torch.use_deterministic_algorithms(True)
