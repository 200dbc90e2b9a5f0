"""The trainer: collect, learn, count steps. It does no file or terminal output."""

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
from shoal.core.user_code import MAX_EXCERPT
from shoal.core.world import World
from shoal.host.world import HostWorld
from shoal.learn.learner import Learner, part_of
from shoal.learn.rollout import Rollout
from shoal.policy import Policy
from shoal.training.build import make_policies, make_world
from shoal.training.collector import Collector
from shoal.training.host_collector import HostCollector
from shoal.training.processes import Communicator


class ProgressMixin:
    """Step counts of a training, derived from its iterations."""

    job: Job
    world: World
    iteration: int

    @property
    def steps(self) -> int:
        """Env steps so far; preempted rollouts count in full."""
        return self.iteration * self.job.run.steps_per_iteration

    @property
    def agent_steps(self) -> int:
        """Agent steps so far."""
        return self.steps * sum(g.agents for g in self.world.groups)

    @property
    def done(self) -> bool:
        return self.iteration >= self.job.run.iterations


class Trainer(ProgressMixin):
    """The state that a training carries from one iteration to the next: world, policies, rollouts, learners.

    With several processes, each has a trainer with its share of the envs.
    """

    def __init__(self, job: Job, processes: Communicator | None = None):
        _set_precision(job.hardware.torch_deterministic)
        # torch emits it for every loss that it compiles for a GPU; the user cannot act on it.
        warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly", UserWarning)
        self.job = job
        self.processes = processes = processes or Communicator()
        compiled, bf16 = job.hardware.compile == "on", job.hardware.precision == "bf16"
        envs = job.run.num_envs // processes.size
        self.first_env = processes.rank * envs
        """Index, in the whole run, of this process's first env."""
        self.world = make_world(job, envs)
        self.policies = make_policies(job, self.world)
        policy_groups = {
            name: [self.world.group(g.name) for g in groups] for name, groups in job.policy_groups().items()
        }
        collector: type[Collector] = Collector
        more: dict[str, Any] = {}
        if isinstance(self.world, HostWorld):
            collector, more = (
                HostCollector,
                dict(graph=job.hardware.cuda_graphs, preemption=processes.preemption(job.schedule.sync_frac)),
            )
        self.collector = collector(
            self.world,
            self._make_acting_policies(),
            job.run.rollout_steps,
            job.run.seed,
            policy_groups,
            self.first_env,
            compiled=compiled,
            bf16=bf16,
            **more,
        )
        for rollout in self.collector.rollouts.values():
            rollout.reducer = processes.reducer
        learner = LEARNERS[job.run.algo][1]
        self.learners: dict[str, Learner] = {
            name: learner(policy, self._learner_rollout(name), job.for_policy(name).learn, job.run.seed, compiled, bf16)
            for name, policy in self.policies.items()
            if name not in job.multi_agent.freeze_groups
        }
        self.iteration = 0
        self._collect = Graphed(
            self.collector.collect, self.world.device, job.hardware.cuda_graphs and self.world.on_device
        )
        device = next(iter(self.learners.values())).device
        has_replay = any(type(learner).store is not Learner.store for learner in self.learners.values())
        recorded = job.hardware.cuda_graphs and processes.reducer.recordable
        self._store = Graphed(self._store_all, device, recorded and has_replay)
        pool = torch.cuda.graph_pool_handle() if recorded and device.type == "cuda" else None
        self._updates = {
            name: Graphed(learner.update, device, recorded, pool) for name, learner in self.learners.items()
        }
        self._read = EpisodeTotals(0.0, 0.0, {}, {})
        """Totals at the last call of `read_metrics`."""
        self.collector.start(job.run.seed, self.first_env)

    def _make_acting_policies(self) -> dict[str, Policy]:
        """The policies that choose actions, by name; sets `acting_policies`."""
        self.acting_policies = self.policies
        return self.acting_policies

    def _learner_rollout(self, name: str) -> Rollout:
        """The rollout that a policy's learner reads."""
        return self.collector.rollouts[name]

    def collect(self) -> None:
        """Collect one rollout."""
        with _torch_threads(self.job.hardware.threads):
            self._collect()

    def update(self) -> None:
        """Store the current rollout in the replay, if there is one, and run the optimizer updates that are due."""
        progress = min(1.0, self.iteration / self.job.run.iterations)
        for learner in self.learners.values():
            learner.set_progress(progress)
        with _torch_threads(self.job.hardware.threads):
            self._store()
            for name, learner in self.learners.items():
                for _ in range(learner.updates_due((self.iteration + 1) * learner.samples)):
                    self._updates[name]()

    def iterate(self) -> None:
        """Collect one rollout and update the policies."""
        self.world.between_rollouts()
        self.collect()
        self.update()
        self.iteration += 1

    def paused(self) -> AbstractContextManager[None]:
        """A context in which no other thread acts or learns."""
        return nullcontext()

    def close(self) -> None:
        """Close the world."""
        self.world.close()

    def _store_all(self) -> None:
        for learner in self.learners.values():
            learner.store()

    def read_metrics(self) -> dict[str, float]:
        """Means since the last call, under Stable-Baselines3's names. Waits for the device."""
        totals, read = self._episode_totals(), self._read
        found: dict[str, float] = {}
        new = totals.episodes - read.episodes
        many = len(self.world.groups) > 1
        if new > 0:
            for name, total in totals.returns.items():
                key = f"rollout/{name}/ep_rew_mean" if many else "rollout/ep_rew_mean"
                found[key] = (total - read.returns.get(name, 0.0)) / new
            for name, total in totals.reports.items():
                found[f"rollout/{name}"] = (total - read.reports.get(name, 0.0)) / new
            found["rollout/ep_len_mean"] = (totals.lengths - read.lengths) / new
        found["rollout/episodes"] = totals.episodes
        self._read = totals
        for name, learner in self.learners.items():
            prefix = f"train/{name}/" if len(self.policies) > 1 else "train/"
            found.update({prefix + key: value for key, value in learner.read_metrics().items()})
            found[f"{prefix}learning_rate"] = float(learner.optimizer.lr)
        if isinstance(self.collector, HostCollector) and self.collector.preemption is not None:
            completed = torch.tensor(self.collector.read_completed(), device=self.world.device)
            self.processes.reducer.average(completed)
            found["time/collected_fraction"] = float(completed)
        self.check_finite()
        return found

    @property
    def episodes_read(self) -> float:
        """Episodes that had finished when metrics were last read."""
        return self._read.episodes

    def _episode_totals(self) -> "EpisodeTotals":
        """Totals over finished episodes of all processes since the start of training."""
        stats = self.world.statistics()
        names = [*stats.return_sum, *stats.report_sum]
        totals = self._current_sums().clone()
        self.processes.reducer.add(totals)
        episodes, lengths, *rest = totals.tolist()  # sync: once per log interval
        count = len(stats.return_sum)
        returns = dict(zip(names[:count], rest[:count], strict=True))
        reports = dict(zip(names[count:], rest[count:], strict=True))
        return EpisodeTotals(episodes, lengths, returns, reports)

    def episode_sums(self) -> torch.Tensor:
        """float64 [2 + groups + reports]: count, steps, returns and reports of this process's finished episodes."""
        stats = self.world.statistics()
        sums = [stats.episodes, stats.length_sum, *stats.return_sum.values(), *stats.report_sum.values()]
        return torch.stack([each.double().sum() for each in sums]).to(self.world.device)

    def _current_sums(self) -> torch.Tensor:
        """Episode sums at the end of the newest rollout that was learned from."""
        return self.episode_sums()

    def check_masks(self) -> None:
        """Raise InvalidDataError if an action mask allowed no action; the message names env, group and agent."""
        if not self.collector.masked:
            return
        for message in self.processes.collect(self._first_empty_mask()):
            if message is not None:
                raise InvalidDataError(message, {})

    def _first_empty_mask(self) -> str | None:
        found = self.collector.first_empty_mask()
        if found is None:
            return None
        step, env, group, agent = found
        return (
            f"The action mask of env {self.first_env + env}, group {group!r}, agent {agent} of {self.job.world} allows "
            f"no action at step {step} of this env; allow one, or let the agent leave."
        )

    def check_finite(self) -> None:
        """Raise InvalidDataError if an optimizer skipped a non-finite gradient; the message names the source."""
        self.check_masks()
        for name, learner in self.learners.items():
            bad = sum(optimizer.bad_steps for optimizer in learner.optimizers.values())
            if int(bad):  # sync: with a log line or a checkpoint
                # Averaging spreads a non-finite gradient to all processes; its source is in one of them.
                found = self.processes.collect(self._find_invalid_data(name))
                message, state = next((source for source in found if source is not None), (None, {}))
                raise InvalidDataError(
                    message
                    or f"A gradient of {name} was not finite before {self.steps} env steps, but the newest rollout is: "
                    f"check the world for occasional non-finite values, or lower --lr (now {learner.config.lr}). The "
                    "optimizer step was skipped.",
                    state,
                )

    @property
    def is_finite(self) -> bool:
        """Whether the newest rollouts of all learners hold finite numbers."""
        return all(self._find_invalid_data(name) is None for name in self.learners)

    def _find_invalid_data(self, name: str) -> tuple[str, dict[str, Any]] | None:
        """Message and env state for the first non-finite value of the newest rollout; None: all are finite."""
        rollout = self.learners[name].rollout
        for field in ("observation", "reward", "final_observation"):
            tensor = getattr(rollout, field)
            if field == "observation":  # skip the frames before the rollout
                tensor = tensor[rollout.stack - 1 :]
            bad = ~torch.isfinite(tensor.float())
            if bool(bad.any()):
                t, env, agent = (int(i) for i in bad.nonzero()[0][:3])
                values = excerpt(tensor[t, env, agent].tolist(), MAX_EXCERPT)
                return (
                    f"Env {self.first_env + env}, agent {agent} of {self.job.world} gave a non-finite {field} "
                    f"({values}) at row {t} of the rollout after {self.steps} env steps.",
                    self._env_state(env),
                )
        return None

    def _env_state(self, env: int) -> dict[str, Any]:
        state = self.world.state_dict()
        return {k: v[env].tolist() for k, v in state.items() if v.ndim and v.shape[0] == self.world.num_envs}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors that the next iteration reads."""
        state = {f"world.{k}": v for k, v in self.world.state_dict().items()}
        state["collector.counter"] = self.collector.counter
        for name, rollout in self.collector.rollouts.items():
            state[f"collector.{name}.version"] = rollout.version
            state.update({f"collector.{name}.{item}": rows for item, rows in rollout.carry_state().items()})
        for name, policy in self.policies.items():
            state.update({f"policy.{name}.{k}": v for k, v in policy.state_dict().items()})
        for name, learner in self.learners.items():
            state.update({f"learner.{name}.{k}": v for k, v in learner.state_dict().items()})
        return state

    def env_axes(self) -> dict[str, int]:
        """Axis of the envs in each state tensor, by name; tensors not listed are equal in all processes."""
        axes = {f"world.{name}": 0 for name in self.world.state_dict() if name not in self.world.unsharded_state}
        for name, rollout in self.collector.rollouts.items():
            axes.update({f"collector.{name}.{item}": int(item == "history") for item in rollout.carry_state()})
        for name, learner in self.learners.items():
            axes.update({f"learner.{name}.{item}": axis for item, axis in learner.env_axes().items()})
        return axes

    def load_state_dict(self, state: dict[str, torch.Tensor], iteration: int) -> None:
        """Load a state and its iteration; the caller has compared names and shapes."""
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
    """Sums over finished episodes: count, lengths [steps], returns by group, reports by name."""

    episodes: float
    lengths: float
    returns: dict[str, float]
    """By group."""
    reports: dict[str, float]


def lag_metrics(lags: list[int]) -> dict[str, float]:
    """Mean and maximum policy lag: updates between acting and learning."""
    return {"train/lag_mean": sum(lags) / max(1, len(lags)), "train/lag_max": float(max(lags, default=0))}


class InvalidDataError(ShoalError):
    """A world or network gave NaN, infinity or an action mask that allows nothing.

    Attributes:
        env_state: State of the env by array, empty if unknown.
    """

    def __init__(self, message: str, env_state: dict[str, Any]):
        super().__init__(message)
        self.env_state = env_state


@contextmanager
def _torch_threads(count: int | None) -> Iterator[None]:
    """Set the number of torch's CPU threads inside the context (None: leave it)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _set_precision(deterministic: bool) -> None:
    torch.set_float32_matmul_precision("high")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it for determinism
        torch.use_deterministic_algorithms(True)
