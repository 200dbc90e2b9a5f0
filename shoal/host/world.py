"""Host worlds: any batch of Gymnasium or PettingZoo environments as a World, stepped on CPU cores by an engine."""

import json
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.core.extras import needs_extras
from shoal.core.graph import records
from shoal.core.launch import cpu_threads, rest_until_done
from shoal.core.store import full_device
from shoal.core.user_code import UserCode
from shoal.core.world import EpisodeStatistics, Group, GroupOutputs, LastEpisode, Outputs, World
from shoal.host.config import HostConfig, Schedule
from shoal.host.engines import Engine, Processes, Serial, share_out, split
from shoal.host.envs import Team, close_envs, layout_of, own_class, teams_of
from shoal.host.memory import HOLD, RESET, RESTART, STEP, SharedArrays
from shoal.host.native import NEXT_STEP, Made, Native, VectorBatch, giving_way, keep_on_cores, pack_seeds
from shoal.host.sources import Source, gym_spec
from shoal.host.spaces import action_space, observation_space

Rows = slice | np.ndarray
"""Some envs: a range, or their numbers."""


class HostWorld(World):
    """Envs that live on the host. Subclasses, made by `host_world`, say where they come from.

    | | |
    |---|---|
    | observation | the env's; Discrete parts as one-hot vectors, a Dict or Tuple as one flat vector with named parts |
    | action | the env's; a Box whose bounds differ is scaled from -1 to 1 |
    | reward, end | the env's; time limits of Gymnasium's registry are truncations |

    An env's state cannot be saved: a resumed run begins new episodes.
    """

    Config: ClassVar[type[HostConfig]] = HostConfig
    settings: ClassVar[dict[str, dict[str, Any]]] = {}
    kind: ClassVar[str] = ""
    env_name: ClassVar[str] = ""
    handles_settings = ("time_limit", "action_repeat", "frame_stack", "obs_dtype")
    resumable = on_device = False
    unsharded_state = ("resumes",)

    def __init__(
        self,
        num_envs: int,
        device: str | torch.device = "cpu",
        config: HostConfig | None = None,
        time_limit: int | None = None,
        action_repeat: int = 1,
        frame_stack: int = 1,
        obs_dtype: str = "float32",
    ):
        self.num_envs = num_envs
        self.device = full_device(device)
        self.by_numpy = not records(self.device)
        """Whether NumPy copies rows. On a CPU torch's threads would wake up and take their cores from the envs."""
        self.config = config or self.Config()
        self.repeat = action_repeat
        self.limit = self._limit(time_limit)
        self.teams = self.teams_of(self.config)
        self.groups = tuple(_kept_as(g, frame_stack, obs_dtype) for g in self.groups_of(self.config))
        self.outputs = self._own_outputs = self._allocate()
        self.engine: Engine | None = None
        self.lost = np.zeros(num_envs, dtype=bool)
        """Envs that were started anew in the last step, after a fault: what they did since is not known."""
        self.pinned = False
        """Whether the GPU copies from and to the shared arrays by itself."""
        self._resumes = 0

    # --- what there is ---------------------------------------------------------------------------------------------

    @classmethod
    def source(cls, config: HostConfig) -> Source:
        """Where the envs come from."""
        return Source(cls.kind, cls.env_name, config.env_kwargs, config.render)

    @classmethod
    def teams_of(cls, config: HostConfig) -> list[Team]:
        """Who plays, found by making one env."""
        return _probe(cls.source(config))

    @classmethod
    def groups_of(cls, config: HostConfig) -> tuple[Group, ...]:
        """The teams as groups. Envs in processes may be lost, and what is lost is nobody's experience."""
        return tuple(
            Group(
                team.name,
                observation_space(team.observation),
                action_space(team.action),
                agents=len(team.agents),
                can_leave=cls._loses(config),
            )
            for team in cls.teams_of(config)
        )

    @classmethod
    def _loses(cls, config: HostConfig) -> bool:
        """Whether `alive` is needed: for agents that leave, envs that are lost, steps that are none."""
        return True

    @classmethod
    def for_evaluation(cls, config: HostConfig) -> HostConfig:
        """The settings for evaluation: whole episodes from their beginning."""
        return replace(config, phase=0, schedule="lockstep")

    @classmethod
    def for_recording(cls, config: HostConfig) -> HostConfig:
        """The settings for pictures: envs that can be looked at, in this process."""
        return replace(cls.for_evaluation(config), batch="serial", render=True)

    @property
    def time_limit(self) -> int | None:
        """The limit of Gymnasium's registry; who knows what others do."""
        return None if self.kind != "gym" or self.config.own_truncation else self.limit

    def _limit(self, asked: int | None) -> int | None:
        """The shorter of what is asked for and what the registry says, in steps of this world."""
        own = self.source(self.config).max_steps
        limits = [asked, None if own is None else -(-own // self.repeat)]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def bytes_per_env(self) -> int:
        found = self.outputs.tensors({(g.name, f.name): f"{g.name}.{f.name}" for g in self.groups for f in _FIELDS})
        return sum(t.nbytes for t in found.values()) // self.num_envs

    # --- start and end ---------------------------------------------------------------------------------------------

    def reset(self, seed: int = 0, first_env: int = 0, phase: int | None = None) -> Outputs:
        """Start all envs; `phase` in place of the setting."""
        engine = self._start()
        engine.renew()
        self._seed, self._first_env = seed, first_env
        self._arrays["seed"][:] = pack_seeds(seed + 7919 * self._resumes, first_env, self.num_envs)
        self._arrays["order"][:] = RESET
        self._run(range(len(engine.bunches)))
        self.lost[:] = False
        self._forget(slice(None))
        phase = self.config.phase if phase is None else phase
        if phase:
            self._put_out_of_phase(seed, first_env, phase)
        # Episodes that ended meanwhile are nobody's.
        for array in (self._episodes, self._length_sum, self._last_length):
            array[:] = 0
        for array in (*self._return_sum.values(), *self._last_return.values()):
            array[:] = 0.0
        for flags in (self._arrays["terminated"], self._arrays["truncated"], self._ended):
            flags[:] = False
        self.outputs = self._own_outputs
        self.show(slice(0, self.num_envs), self.outputs)
        return self.outputs

    def _start(self) -> Engine:
        """Arrays and engine, when they are first needed: looking at a world's groups starts no process."""
        if self.engine is not None:
            return self.engine
        n = self.num_envs
        self._arrays = SharedArrays({**layout_of(self.teams, n), "skipped": ("bool", (n,))})
        for team in self.teams:
            self._arrays[f"{team.name}.alive"][...] = True
            self._arrays[f"{team.name}.final_alive"][...] = True
        self._host = {name: torch.from_numpy(self._arrays[name]) for name in self._arrays.layout}
        self._numbers = np.arange(n)
        self._ended = np.zeros(n, dtype=bool)
        self._length = np.zeros(n, dtype=np.int64)
        self._episodes, self._length_sum, self._last_length = (np.zeros(n, dtype=np.int64) for _ in range(3))
        self._return = {t.name: np.zeros((n, len(t.agents))) for t in self.teams}
        self._return_sum = {t.name: np.zeros(n) for t in self.teams}
        self._last_return = {t.name: np.zeros(n) for t in self.teams}
        pinned = self.device.type == "cuda" and _pin(self._arrays.whole)
        self.pinned = pinned or (self.device.type == "cpu" and records(self.device))
        self.engine = self._make_engine()
        self._closes = weakref.finalize(self, _close, self.engine, self._arrays, pinned)
        return self.engine

    def use(self, schedule: Schedule) -> None:
        """The schedule that was chosen. One native batch is faster than two if they are always stepped together."""
        self.config = replace(self.config, schedule=schedule)
        if isinstance(self.engine, Native) and len(self.engine.bunches) != self._turns:
            self.close()
            self.engine = None

    def close(self) -> None:
        if self.engine is not None:
            self._closes()

    def _make_engine(self) -> Engine:
        config, source = self.config, self.source(self.config)
        if self.batches_natively(config):
            return self._native_engine()
        turns = self._turns
        if config.batch == "serial":
            return Serial(source, self._arrays, split(self.num_envs, turns), self.limit, self.repeat)
        workers = min(config.workers or cpu_threads(), self.num_envs)
        if self.num_envs < workers * turns:
            turns = 1
        return Processes(
            source,
            self._arrays,
            share_out(self.num_envs, workers, turns),
            self.limit,
            self.repeat,
            config.patience,
            config.restarts,
            config.pin,
        )

    @property
    def _turns(self) -> int:
        """Bunches per worker, if it has as many envs: what alternates, and what is served first-come."""
        return 1 if self.config.schedule == "lockstep" else min(self.config.turns, self.num_envs)

    @classmethod
    def batches_natively(cls, config: HostConfig) -> bool:
        """Whether a native batch steps the envs."""
        has_one = cls.has_native(config)
        if config.batch == "native" and not has_one:
            raise ShoalError(f"{cls.kind}:{cls.env_name} has no native batch; use --batch processes.")
        return has_one and config.batch in ("auto", "native")

    @classmethod
    def has_native(cls, config: HostConfig) -> bool:
        return False

    def _native_engine(self) -> Engine:
        threads = self.config.workers or cpu_threads()
        if self.repeat > 1:
            raise ShoalError("--action-repeat does not work with a native batch; use --batch processes.")
        parts = split(self.num_envs, self._turns)

        # While one part acts, the others keep all cores busy. Not where acting itself needs the cores.
        gives_way = len(parts) > 1 and self.device.type == "cuda"

        def apart(make: Callable[[], Made], number: int) -> Made:
            """What belongs to a batch, with threads as they should be."""
            if self.config.pin:
                make = partial(keep_on_cores, make, number * threads)
            return giving_way(make) if gives_way else make()

        def one(rows: slice, number: int) -> VectorBatch:
            batch = apart(partial(self._make_batch, rows, threads), number)
            if (remake := batch.remake) is not None:
                batch.remake = lambda seed: apart(partial(remake, seed), number)
            return batch

        return Native([one(rows, number) for number, rows in enumerate(parts)], threads)

    def _make_batch(self, rows: slice, threads: int) -> VectorBatch:
        return VectorBatch(self.make_vector(rows.stop - rows.start, threads), rows, self._arrays)

    def make_vector(self, count: int, threads: int) -> Any:
        """A native vector env of so many envs."""
        raise ShoalError(f"{self.kind}:{self.env_name} has no native batch; use --batch processes.")

    def _put_out_of_phase(self, seed: int, first_env: int, phase: int) -> None:
        """Env i takes a number of random steps of its own, up to the limit; episodes that end meanwhile begin anew."""
        engine, n = self._start(), self.num_envs
        generators = [np.random.default_rng((seed, first_env + env, 1)) for env in range(n)]
        steps = np.array([g.integers(0, phase + 1) for g in generators])
        drawn = {t.name: np.stack([t.action.draw(g, len(t.agents) * phase) for g in generators]) for t in self.teams}
        native = isinstance(engine, Native)
        for turn in range(phase):
            for team in self.teams:
                rows = slice(turn * len(team.agents), (turn + 1) * len(team.agents))
                self._arrays[f"{team.name}.action"][...] = drawn[team.name][:, rows]
            # A native batch cannot hold envs: there, all move, and an env begins anew when its steps are to begin.
            order = STEP if native else np.where(steps > turn, STEP, HOLD)
            self._arrays["order"][:] = order
            self._run(range(len(engine.bunches)))
            if native and (begins := steps == phase - turn - 1).any() and not self.sits_out:
                self._arrays["order"][:] = np.where(begins, RESTART, HOLD)
                self._run(range(len(engine.bunches)))
                self._forget(begins)

    @property
    def sits_out(self) -> bool:
        """Whether envs sit out a step between two episodes: a native batch that begins them anew with that step."""
        return isinstance(self.engine, Native) and self.engine.batches[0].mode == NEXT_STEP

    def _forget(self, envs: np.ndarray | slice) -> None:
        """These envs have begun a new episode without ending the last one."""
        self._length[envs] = 0
        for total in self._return.values():
            total[envs] = 0.0

    def restart(self, mask: torch.Tensor) -> None:
        engine = self._started()
        envs = mask.cpu().numpy()  # sync: restarts come from outside a rollout
        self._arrays["order"][:] = np.where(envs, RESTART, HOLD)
        flags = self.outputs.terminated.clone(), self.outputs.truncated.clone()
        rewards = {name: group.reward.clone() for name, group in self.outputs.groups.items()}
        self._run(range(len(engine.bunches)))
        self._forget(envs)
        self.show(slice(0, self.num_envs), self.outputs)
        # A restart begins an episode; what the last step brought stays.
        self.outputs.terminated.copy_(flags[0])
        self.outputs.truncated.copy_(flags[1])
        for name, reward in rewards.items():
            self.outputs.groups[name].reward.copy_(reward)

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(
        self,
        actions: torch.Tensor | Mapping[str, torch.Tensor],
        into: Outputs | None = None,
        hold: torch.Tensor | None = None,
    ) -> Outputs:
        engine = self._started()
        actions = self.by_group(actions)
        self.check_actions(actions, values=False)
        if hold is not None:
            self._arrays["order"][:] = np.where(hold.cpu().numpy(), HOLD, STEP)
        everybody = range(len(engine.bunches))
        self.give(actions, slice(0, self.num_envs))
        self.wait_for_actions()
        engine.send(everybody)
        self.outputs = into or self.outputs
        self.take(everybody, len(everybody))
        if hold is not None:
            self._arrays["order"][:] = STEP
        self.show(slice(0, self.num_envs), self.outputs)
        self.show_final(slice(0, self.num_envs), self.outputs)
        return self.outputs

    def describe(self) -> str:
        """Who steps the envs, for people."""
        return self._start().describe()

    @property
    def bunches(self) -> list[slice]:
        """Rows of the envs that are sent and awaited together."""
        return self._start().bunches

    def give(self, actions: Mapping[str, torch.Tensor], rows: Rows) -> None:
        """Put actions [env, agent, ...] of some rows where the engine reads them: from the device, those of a range."""
        for name, action in actions.items():
            if action.device.type == "cpu" and (self.by_numpy or not isinstance(rows, slice)):
                self._arrays[f"{name}.action"][rows] = action.numpy()
            else:
                self._host[f"{name}.action"][rows].copy_(action, non_blocking=True)

    def wait_for_actions(self) -> None:
        """Until the device has brought what was given; asleep where other envs step meanwhile and need the core."""
        if self.device.type != "cuda":
            return
        if self.config.schedule == "lockstep":
            torch.cuda.current_stream(self.device).synchronize()  # sync: the host steps with these
        else:
            rest_until_done(self.device)  # sync: the same

    def send(self, bunches: Sequence[int]) -> None:
        """Set bunches going with the actions that were given."""
        self._started().send(bunches)

    def cut(self, rows: Rows) -> np.ndarray:
        """Which of these rows were truncated in their last step, as a mask."""
        return self._arrays["truncated"][rows] & ~(self._arrays["terminated"][rows] | self.lost[rows])

    def take(self, bunches: Collection[int], enough: int) -> list[int]:
        """Wait until enough of these bunches are done; keeps the books of their envs and says which they are."""
        engine = self._started()
        done = engine.wait(bunches, enough)
        rows = _rows([engine.bunches[bunch] for bunch in done])
        self.lost[rows] = False
        self._mark_lost(done)
        self._book(rows)
        return done

    def look_for_lost(self, bunches: Collection[int]) -> None:
        """Bunches that were taken but not yet shown may be lost since, with a worker that others kept busy."""
        if self._started().lost:
            self._mark_lost(bunches)
            self._forget(self.lost)

    def _mark_lost(self, bunches: Collection[int]) -> None:
        engine = self._started()
        for bunch in engine.lost.intersection(bunches):
            engine.lost.discard(bunch)
            self.lost[engine.bunches[bunch]] = True

    def _run(self, bunches: Sequence[int]) -> None:
        engine = self._start()
        engine.send(bunches)
        self.take(bunches, len(bunches))
        self._arrays["order"][:] = STEP

    def _book(self, rows: Rows) -> None:
        """Lengths and returns of the episodes of some rows, after a step."""
        arrays = self._arrays
        ended = arrays["terminated"][rows] | arrays["truncated"][rows]
        if any(np.count_nonzero(flags) for flags in (arrays["order"], arrays["skipped"], self.lost)):
            ended &= self._book_some(rows)
        else:
            self._length[rows] += 1
            for name, total in self._return.items():
                total[rows] += arrays[f"{name}.reward"][rows]
        self._ended[rows] = ended
        if not np.count_nonzero(ended):
            return
        envs = self._numbers[rows][ended]
        self._episodes[envs] += 1
        self._length_sum[envs] += self._length[envs]
        self._last_length[envs] = self._length[envs]
        for name, total in self._return.items():
            self._last_return[name][envs] = total[envs].mean(axis=1)
            self._return_sum[name][envs] += self._last_return[name][envs]
        self._forget(envs)

    def _book_some(self, rows: Rows) -> np.ndarray:
        """The same where some envs did not take a step: held, begun anew, lost, or sitting one out. Who did?"""
        arrays = self._arrays
        moved = ~((arrays["order"][rows] != STEP) | arrays["skipped"][rows] | self.lost[rows])
        self._length[rows] += moved
        for name, total in self._return.items():
            total[rows] += np.where(moved[:, None], arrays[f"{name}.reward"][rows], 0.0)
        self._forget(self.lost)
        return moved

    def show(self, rows: slice | torch.Tensor, into: Outputs, t: torch.Tensor | None = None) -> None:
        """Copy what a step of some rows brought to the device; it can be recorded in a graph.

        With `t`, which gives each of the rows its step, all are tensors of numbers, and `into` is [step, env, ...].
        """
        from_rows, to_rows = self._ways(rows, t)
        self._copy(into.terminated, to_rows, "terminated", from_rows)
        self._copy(into.truncated, to_rows, "truncated", from_rows)
        self._show(("observation", "reward", "alive"), from_rows, into, to_rows)
        if type(self).shape_reward is HostWorld.shape_reward:
            return
        for out in into.groups.values():
            reward = out.reward[to_rows]
            self.shape_reward(reward)
            if t is not None:
                out.reward[to_rows] = reward

    def show_final(self, rows: Rows, into: Outputs) -> None:
        """The same for what was seen last in episodes that have just ended, if any has."""
        if self._ended[rows].any():
            from_rows, to_rows = self._ways(rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self.device))
            self._show(("final_observation", "final_alive"), from_rows, into, to_rows)

    def _ways(self, rows: slice | torch.Tensor, t: torch.Tensor | None = None) -> tuple[Any, Any]:
        """Indices to take rows from the shared arrays and to put them where they are shown; of NumPy on a CPU."""
        if isinstance(rows, slice):
            return rows, rows
        if self.by_numpy:
            return rows.numpy(), rows.numpy() if t is None else (t.numpy(), rows.numpy())
        return rows, rows if t is None else (t, rows)

    def _show(self, names: tuple[str, ...], from_rows: Any, into: Outputs, to_rows: Any) -> None:
        for group in self.groups:
            for name in names:
                target = getattr(into.groups[group.name], name)
                if target is not None:
                    self._copy(target, to_rows, f"{group.name}.{name}", from_rows)

    def _copy(self, target: torch.Tensor, to_rows: Any, name: str, from_rows: Any) -> None:
        if self.by_numpy and target.dtype != torch.bfloat16:
            target.numpy()[to_rows] = self._arrays[name][from_rows]
        elif isinstance(from_rows, slice):
            target[to_rows].copy_(self._host[name][from_rows], non_blocking=True)
        else:
            # One copy, whichever envs they are; what is there of envs under way is left.
            brought = self._host[name].to(self.device, non_blocking=True)
            target[to_rows] = brought[from_rows].to(target.dtype)

    def shape_reward(self, reward: torch.Tensor) -> None:
        """Change what learners see of the reward, in place; statistics are of the reward itself."""

    def _started(self) -> Engine:
        if self.engine is None:
            raise ShoalError(f"{self.name}: step() before reset(); call reset(seed) first.")
        if not self._closes.alive:
            raise ShoalError(f"{self.name}: step() after close().")
        return self.engine

    # --- books -----------------------------------------------------------------------------------------------------

    def statistics(self) -> EpisodeStatistics:
        return EpisodeStatistics(
            torch.from_numpy(self._episodes),
            {name: torch.from_numpy(total) for name, total in self._return_sum.items()},
            torch.from_numpy(self._length_sum),
            {},
        )

    def last_episode(self) -> LastEpisode:
        returns = {n: torch.from_numpy(r).float().to(self.device) for n, r in self._last_return.items()}
        return LastEpisode(returns, torch.from_numpy(self._last_length).to(self.device), {})

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The books alone: the state of an arbitrary env cannot be saved."""
        state = dict(resumes=torch.tensor([self._resumes]))
        state["episodes"], state["length_sum"] = torch.from_numpy(self._episodes), torch.from_numpy(self._length_sum)
        state.update({f"return_sum.{n}": torch.from_numpy(r) for n, r in self._return_sum.items()})
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over the books, and begin new episodes with seeds that were not used before."""
        self._start()
        self._resumes = int(state["resumes"]) + 1
        self.reset(getattr(self, "_seed", 0), getattr(self, "_first_env", 0))
        for name, tensor in self.state_dict().items():
            if name != "resumes":
                tensor.copy_(state[name])

    def picture(self, canvas, env: int) -> None:
        if not isinstance(self.engine, Serial):
            raise ShoalError(f"{self.name}: only envs in this process can be looked at (--batch serial).")
        try:
            with needs_extras(f"A picture of {self.kind}:{self.env_name}"):
                image = self.engine.envs.envs[env].render()
        except NotImplementedError:
            raise ShoalError(f"{self.kind}:{self.env_name} gives no picture: it has no render().") from None
        if image is None:
            raise ShoalError(f"{self.kind}:{self.env_name} gives no picture: its render() returned nothing.")
        with UserCode(f"{self.kind}:{self.env_name} gives no picture", own_class(self.engine.envs.envs[env]).render):
            canvas.paste(np.asarray(image))

    def _allocate(self) -> Outputs:
        n, device = self.num_envs, self.device
        groups = {}
        for g in self.groups:
            observation = torch.zeros(n, g.agents, *g.observation.shape, dtype=g.observation.dtype, device=device)
            alive = torch.ones(n, g.agents, dtype=torch.bool, device=device) if g.can_leave else None
            groups[g.name] = GroupOutputs(
                observation=observation,
                reward=torch.zeros(n, g.agents, device=device),
                final_observation=torch.zeros_like(observation),
                alive=alive,
                final_alive=None if alive is None else torch.ones_like(alive),
            )
        flags = [torch.zeros(n, dtype=torch.bool, device=device) for _ in range(2)]
        return Outputs(*flags, groups)


_FIELDS = fields(GroupOutputs)


class GymWorld(HostWorld):
    """Gymnasium environments, by the native version that the registry names, or in processes."""

    @property
    def _turns(self) -> int:
        """One: a batch in NumPy keeps Python busy, so nobody could act meanwhile."""
        return 1 if self.batches_natively(self.config) else super()._turns

    @classmethod
    def has_native(cls, config: HostConfig) -> bool:
        return cls.kind == "gym" and gym_spec(cls.env_name).vector_entry_point is not None

    def make_vector(self, count: int, threads: int) -> Any:
        kwargs = json.loads(self.config.env_kwargs)
        if self.limit is not None:
            kwargs["max_episode_steps"] = self.limit
        with UserCode(f"The native batch of {self.name} cannot be made", self.env_name):
            return gymnasium.make_vec(self.env_name, count, vectorization_mode="vector_entry_point", **kwargs)


def _kept_as(group: Group, frame_stack: int, obs_dtype: str) -> Group:
    """A group as it is shown on the device: so many observations at once, floats in a shorter type."""
    seen = group.observation
    if seen.dtype == torch.float32:
        seen = replace(seen, dtype=getattr(torch, obs_dtype))
    return replace(group, observation=seen, stack=group.stack * frame_stack)


@cache
def _probe(source: Source) -> list[Team]:
    env = source.make()
    try:
        with UserCode(f"The spaces of {source} cannot be used", own_class(env)):
            teams = teams_of(env)
            for team in teams:
                observation_space(team.observation)
                action_space(team.action)
            return teams
    finally:
        close_envs([env])


def _rows(ranges: Sequence[slice]) -> Rows:
    """Ranges in ascending order as one, or if they are no neighbors, the numbers in them."""
    if all(a.stop == b.start for a, b in pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return np.concatenate([np.arange(rows.start, rows.stop) for rows in ranges])


def _pin(whole: np.ndarray) -> bool:
    """Let the GPU copy from and to this memory by itself."""
    runtime: Any = torch.cuda.cudart()
    return int(runtime.cudaHostRegister(whole.ctypes.data, whole.nbytes, 0)) == 0


def _close(engine: Engine, arrays: SharedArrays, pinned: bool) -> None:
    engine.close()
    if pinned:
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(arrays.whole.ctypes.data)
    arrays.close()
