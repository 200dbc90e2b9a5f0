"""The trainer: collect, learn, count. It knows nothing of files or terminals."""

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from shoal.algos.registry import LEARNERS
from shoal.config.job import Job
from shoal.core.errors import ShoalError, excerpt
from shoal.core.graph import Graphed
from shoal.core.user_code import LONGEST
from shoal.core.world import World
from shoal.host.world import HostWorld
from shoal.learn.learner import Learner, part_of
from shoal.learn.rollout import Rollout
from shoal.policy import Policy
from shoal.training.build import make_policies, make_world
from shoal.training.collector import Collector
from shoal.training.host_collector import HostCollector
from shoal.training.processes import Processes


class Counted:
    """How far a job has come, by its iterations."""

    job: Job
    world: World
    iteration: int

    @property
    def steps(self) -> int:
        """Env steps so far, those of rollouts that were cut short included."""
        return self.iteration * self.job.run.steps_per_iteration

    @property
    def agent_steps(self) -> int:
        """Agent steps so far."""
        return self.steps * sum(g.agents for g in self.world.groups)

    @property
    def done(self) -> bool:
        return self.iteration >= self.job.run.iterations


class Trainer(Counted):
    """Everything that a run moves from one iteration to the next, or one process's part of it."""

    def __init__(self, job: Job, processes: Processes | None = None):
        config = job.train
        _set_precision(config.torch_deterministic)
        # Told whenever torch compiles the losses for a GPU, and of no use to anybody here.
        warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly", UserWarning)
        self.job = job
        self.processes = processes = processes or Processes()
        compiled, bf16 = config.compile == "on", config.precision == "bf16"
        envs = config.num_envs // processes.size
        self.first_env = processes.rank * envs
        """Global number of this process's first env."""
        self.world = make_world(job, envs)
        self.policies = make_policies(job, self.world)
        teams = {name: [self.world.group(g.name) for g in groups] for name, groups in job.policy_groups().items()}
        collector, more = Collector, {}
        if isinstance(self.world, HostWorld):
            collector, more = (
                HostCollector,
                dict(graph=config.cuda_graphs, preemption=processes.preemption(config.sync_frac)),
            )
        self.collector = collector(
            self.world,
            self._actors(),
            config.rollout_steps,
            config.seed,
            teams,
            self.first_env,
            compiled=compiled,
            bf16=bf16,
            **more,
        )
        for rollout in self.collector.rollouts.values():
            rollout.reducer = processes.reducer
        learner = LEARNERS[config.algo][1]
        self.learners: dict[str, Learner] = {
            name: learner(policy, self._experience(name), job.for_policy(name).learn, config.seed, compiled, bf16)
            for name, policy in self.policies.items()
            if name not in config.freeze
        }
        self.iteration = 0
        self._collect = Graphed(self.collector.collect, self.world.device, config.cuda_graphs and self.world.on_device)
        device = next(iter(self.learners.values())).device
        keeps = any(type(made).store is not Learner.store for made in self.learners.values())
        recorded = config.cuda_graphs and processes.reducer.recordable
        self._store = Graphed(self._store_all, device, recorded and keeps)
        pool = torch.cuda.graph_pool_handle() if recorded and device.type == "cuda" else None
        self._updates = {name: Graphed(made.update, device, recorded, pool) for name, made in self.learners.items()}
        self._read = EpisodeTotals(0.0, 0.0, {}, {})
        """What the last reading of the statistics found."""
        self.collector.start(config.seed, self.first_env)

    def _actors(self) -> dict[str, Policy]:
        """The policies that act."""
        self.players = self.policies
        return self.players

    def _experience(self, name: str) -> Rollout:
        """What a policy learns from."""
        return self.collector.rollouts[name]

    def collect(self) -> None:
        """One rollout."""
        with _torch_threads(self.job.hardware.threads):
            self._collect()

    def learn(self) -> None:
        """Learn from the rollout, by as many updates as it calls for."""
        progress = min(1.0, self.iteration / self.job.run.iterations)
        for learner in self.learners.values():
            learner.set_progress(progress)
        with _torch_threads(self.job.hardware.threads):
            self._store()
            for name, learner in self.learners.items():
                for _ in range(learner.updates_due((self.iteration + 1) * learner.samples)):
                    self._updates[name]()

    def iterate(self) -> None:
        """One rollout, and learning from it."""
        self.world.between_rollouts()
        self.collect()
        self.learn()
        self.iteration += 1

    def still(self) -> AbstractContextManager[None]:
        """While it lasts, nothing moves but what the caller moves."""
        return nullcontext()

    def close(self) -> None:
        """Let go of the world."""
        self.world.close()

    def _store_all(self) -> None:
        for learner in self.learners.values():
            learner.store()

    def read_metrics(self) -> dict[str, float]:
        """Means since the last reading, under the names people know. Waits for the device."""
        books, read = self._episode_totals(), self._read
        found: dict[str, float] = {}
        new = books.episodes - read.episodes
        many = len(self.world.groups) > 1
        if new > 0:
            for name, total in books.returns.items():
                key = f"rollout/{name}/ep_rew_mean" if many else "rollout/ep_rew_mean"
                found[key] = (total - read.returns.get(name, 0.0)) / new
            for name, total in books.reports.items():
                found[f"rollout/{name}"] = (total - read.reports.get(name, 0.0)) / new
            found["rollout/ep_len_mean"] = (books.lengths - read.lengths) / new
        found["rollout/episodes"] = books.episodes
        self._read = books
        for name, learner in self.learners.items():
            prefix = f"train/{name}/" if len(self.policies) > 1 else "train/"
            found.update({prefix + key: value for key, value in learner.read_metrics().items()})
            found[f"{prefix}learning_rate"] = float(learner.optimizer.lr)
        if isinstance(self.collector, HostCollector) and self.collector.preemption is not None:
            completed = torch.tensor(self.collector.read_completed(), device=self.world.device)
            self.processes.reducer.average(completed)
            found["time/made"] = float(completed)
        self.check_finite()
        return found

    @property
    def episodes_read(self) -> float:
        """Episodes that had finished when metrics were last read."""
        return self._read.episodes

    def _episode_totals(self) -> "EpisodeTotals":
        """Finished episodes of all processes, since the start of training."""
        stats = self.world.statistics()
        names = [*stats.return_sum, *stats.report_sum]
        totals = self._newest_sums().clone()
        self.processes.reducer.add(totals)
        episodes, lengths, *rest = totals.tolist()  # sync: once per log interval
        count = len(stats.return_sum)
        returns = dict(zip(names[:count], rest[:count], strict=True))
        reports = dict(zip(names[count:], rest[count:], strict=True))
        return EpisodeTotals(episodes, lengths, returns, reports)

    def episode_sums(self) -> torch.Tensor:
        """Finished episodes of this process: how many, their steps, returns of all groups, reports."""
        stats = self.world.statistics()
        sums = [stats.episodes, stats.length_sum, *stats.return_sum.values(), *stats.report_sum.values()]
        return torch.stack([each.double().sum() for each in sums]).to(self.world.device)

    def _newest_sums(self) -> torch.Tensor:
        """Those that what has been learned so far belongs to."""
        return self.episode_sums()

    def check_masks(self) -> None:
        """Stop if an action mask allowed nothing; say whose."""
        if not self.collector.masked:
            return
        for stuck in self.processes.collect(self._first_stuck()):
            if stuck is not None:
                raise BadNumbers(stuck, {})

    def _first_stuck(self) -> str | None:
        stuck = self.collector.first_stuck()
        if stuck is None:
            return None
        step, env, group, agent = stuck
        return (
            f"The action mask of env {self.first_env + env}, group {group!r}, agent {agent} of {self.job.world} allows "
            f"no action at step {step} of this env; allow one, or let the agent leave the game."
        )

    def check_finite(self) -> None:
        """Stop if steps were refused for a gradient that is not finite; say where it came from."""
        self.check_masks()
        for name, learner in self.learners.items():
            bad = sum(optimizer.bad_steps for optimizer in learner.optimizers.values())
            if int(bad):  # sync: with a log line or a checkpoint
                # A gradient is the same in all processes, but what spoilt it is in one.
                found = self.processes.collect(self._blame(name))
                message, state = next((blame for blame in found if blame is not None), (None, {}))
                raise BadNumbers(
                    message
                    or f"A gradient of {name} was not finite before {self.steps} env steps, although the newest "
                    f"rollout is: look for a passing fault in the world, or lower --lr (now {learner.config.lr}). No "
                    "step was taken.",
                    state,
                )

    @property
    def is_finite(self) -> bool:
        """Whether the newest rollout is as it should be."""
        return all(self._blame(name) is None for name in self.learners)

    def _blame(self, name: str) -> tuple[str, dict[str, Any]] | None:
        """Which env gave what is not finite, and its state; None if the newest rollout is as it should be."""
        rollout = self.learners[name].rollout
        for field in ("observation", "reward", "final_observation"):
            tensor = getattr(rollout, field)
            if field == "observation":  # not those from before the rollout
                tensor = tensor[rollout.stack - 1 :]
            bad = ~torch.isfinite(tensor.float())
            if bool(bad.any()):
                t, env, agent = (int(i) for i in bad.nonzero()[0][:3])
                values = excerpt(tensor[t, env, agent].tolist(), LONGEST)
                return (
                    f"Env {self.first_env + env}, agent {agent} of {self.job.world} gave a {field} that is not finite "
                    f"({values}) at row {t} of the rollout after {self.steps} env steps.",
                    self._env_state(env),
                )
        return None

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

    def env_axes(self) -> dict[str, int]:
        """Names of the state that have the envs along an axis, and which: the rest is the same in all processes."""
        axes = {f"world.{name}": 0 for name in self.world.state_dict() if name not in self.world.unsharded_state}
        for name, rollout in self.collector.rollouts.items():
            axes.update({f"collector.{name}.{item}": int(item == "history") for item in rollout.carried()})
        for name, learner in self.learners.items():
            axes.update({f"learner.{name}.{item}": axis for item, axis in learner.env_axes().items()})
        return axes

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
                learner.mark_discontinuity()
        self.iteration = iteration
        self._read = self._episode_totals()


class EpisodeTotals(NamedTuple):
    """Sums over finished episodes."""

    episodes: float
    lengths: float
    returns: dict[str, float]
    """By group."""
    reports: dict[str, float]


def lags_told(lags: list[int]) -> dict[str, float]:
    """Metrics of how much older policies were when they acted than when it was learned from."""
    return {"train/lag_mean": sum(lags) / max(1, len(lags)), "train/lag_max": float(max(lags, default=0))}


class BadNumbers(ShoalError):
    """NaN, infinity or an empty action mask where there must be none, with the state of the env that made it."""

    def __init__(self, message: str, env_state: dict[str, Any]):
        super().__init__(message)
        self.env_state = env_state


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
