"""KernelWorld: a world in one short file, written as Warp functions or with torch operations.

A step is a list of stages (`core/stage_lists.py`): begin, the author's step, time limit and statistics; for envs that
have ended the final observation and the author's reset; then the observation. Consecutive Warp functions are fused into
one kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from shoal.core import kernels
from shoal.core.author_stages import AuthorStages, Stage, TorchStage, listed, parameters_of
from shoal.core.errors import ShoalError
from shoal.core.kernels import Broadcast, Call, Program
from shoal.core.launch import Plan, init_warp
from shoal.core.settings import check_settings
from shoal.core.stage_lists import StageLists
from shoal.core.standard_arrays import ENV_FIELDS, GroupArrays
from shoal.core.store import Field, Store, full_device
from shoal.core.torch_random import draw
from shoal.core.user_code import UserCode
from shoal.core.world import EpisodeStatistics, Group, LastEpisode, Outputs, World

NO_LIMIT = 2**31 - 1
"""`max_steps` of a world without a time limit."""


class KernelWorld(World):
    """Base of the worlds written as kernels. A subclass declares:

    - `Config`: a frozen dataclass of settings; a field `max_steps` is the time limit;
    - `state`: name -> Field, the arrays of an env;
    - `groups`: the agents;
    - `tables` (optional): name -> constant array that all envs read;
    - `step`, `reset`, `observe`: Warp functions (or lists of them), or methods with torch operations;
    - `layout` (a 2-D world) or a method `picture`, for recordings.

    `state`, `groups` and `tables` can also be static methods of the config, where sizes depend on settings.
    """

    @dataclass(frozen=True)
    class Config:
        """Settings of the world."""

    state: Any = {}
    groups: Any = ()
    tables: Any = {}
    reports: ClassVar[tuple[str, ...]] = ()
    """Float arrays [env] of the state whose value at an episode's end is reported, as a mean over episodes."""
    settings: ClassVar[dict[str, dict[str, Any]]] = {}
    """Tuned settings for training, named as on the command line with underscores, in sections: `common`, by kind of
    device (`cpu`, `gpu`), by algorithm (`ppo`, `a2c`) and by both (`a2c_cpu`). The key `world` has the world's own."""

    # __init_subclass__ moves `step`, `reset` and `observe` of a subclass to these names: the plain names are methods.
    _author_step: Any = None
    _author_reset: Any = None
    _author_observe: Any = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for stage in ("step", "reset", "observe"):
            if stage in cls.__dict__:
                setattr(cls, f"_author_{stage}", cls.__dict__[stage])
                delattr(cls, stage)

    def __init__(self, num_envs: int, device: str | torch.device = "cpu", config: Any = None):
        if num_envs < 1:
            raise ShoalError(f"A world needs at least one env, got num_envs={num_envs}.")
        init_warp()
        self.name = getattr(self, "name", None) or type(self).__name__.lower()
        self.num_envs = num_envs
        self.device = full_device(device)
        self.config = self.Config() if config is None else config
        if not is_dataclass(self.config) or isinstance(self.config, type):
            raise ShoalError(f"{type(self).__name__}.Config must be a dataclass.")
        check_settings(self.config, "world.")
        self.groups = self.groups_of(self.config)
        self.state = _declared(type(self).state, self.config)
        self.store = Store(num_envs, self.device)
        self.checked = self.device.type == "cpu"
        """Whether `step` also checks the range of actions, which reads them on the host."""
        self._started = False
        self._plans: dict[tuple, Plan] = {}
        self._allocate()
        self._settings = self._config_values()
        if self.layout is not None:
            self.layout.side(self.config)
            self._positions = self.layout.find(self.store.tensors, self.groups)
        self._author_stages = AuthorStages(type(self), self._arrays, self.state, self._settings)
        self._stages = StageLists(self._arrays, self.reports, self._author_stages)
        name = type(self).__name__
        with UserCode(f"The stages of {name} cannot be read", type(self)):
            stages = [*self._stages.step(self._author, holding=True), *self._stages.restart(self._author)]
        provided = {**self.store.tensors, **self._tables, **self._settings}
        for stage in stages:
            if isinstance(stage, Call):
                with UserCode(f"{name} cannot use {stage.function}", stage.function):
                    kernels.check_call(stage, provided, name)
        self.outputs = self._arrays.outputs()

    @classmethod
    def groups_of(cls, config: Any) -> tuple[Group, ...]:
        """The groups under these settings."""
        groups = tuple(_declared(cls.groups, config))
        if not groups:
            raise ShoalError(f"{cls.__name__} declares no groups; add groups = (Group(...),).")
        return groups

    # --- for authors who use torch ---------------------------------------------------------------------------------

    def uniform(self, low: float, high: float, shape: tuple[int, ...] = (), stream: int = 0) -> torch.Tensor:
        """Uniform numbers in [low, high), float32 [num_envs, *shape]: those that a kernel's `rng` draws."""
        return draw(self.store, shape, stream, False, low, high)

    def normal(self, shape: tuple[int, ...] = (), stream: int = 0) -> torch.Tensor:
        """Standard normal numbers, float32 [num_envs, *shape]: those that a kernel's `rng` draws."""
        return draw(self.store, shape, stream, True)

    # --- the World contract ----------------------------------------------------------------------------------------

    def _reset_envs(self, seed: int = 0, first_env: int = 0) -> Outputs:
        store = self.store
        for tensor in store.tensors.values():
            tensor.zero_()
        store.seed.fill_(seed)
        torch.arange(first_env, first_env + self.num_envs, out=store.env_id)
        store.episode.fill_(-1)
        self._started = True
        self.outputs = self._arrays.outputs()
        self.restart(torch.ones(self.num_envs, dtype=torch.bool, device=self.device))
        return self.outputs

    def _step_envs(
        self,
        actions: torch.Tensor | Mapping[str, torch.Tensor],
        into: Outputs | None = None,
        hold: torch.Tensor | None = None,
    ) -> Outputs:
        _require_started(self._started, self.name)
        actions = self.by_group(actions)
        if into is None:
            # The plan is bound to the store's arrays, and each call may bring new tensors: copy them.
            self.check_actions(actions, self.checked)
            for group, tensor in actions.items():
                self._arrays.get(group, "action").copy_(tensor)
        if hold is not None:
            self.store.active.copy_(~hold)
        self._step_plan(actions, into, hold is not None)()
        if into is not None:
            self._arrays.copy_carried(into)
        self.outputs = into or self._arrays.outputs()
        return self.outputs

    # In a subclass these names hold Warp functions or torch methods, so their declared type is Any.
    reset: Any = _reset_envs
    step: Any = _step_envs

    def play(self, actions: Mapping[str, torch.Tensor]) -> Plan:
        """A plan of several steps with given actions [steps, env, agent, ...] by group, without a policy.

        CPU threads run all steps of their envs without waiting for one another.
        """
        _require_started(self._started, self.name)
        out = self._arrays.outputs()
        rows = [dict(zip(actions, row, strict=True)) for row in zip(*actions.values(), strict=True)]
        return Plan.joined([self._step_plan(row, out, False) for row in rows])

    def _step_plan(self, actions: Mapping[str, torch.Tensor], into: Outputs | None, holding: bool) -> Plan:
        routes: dict[str, torch.Tensor] = {}
        if into is not None:
            self.check_groups(actions)
            routes = self._arrays.routes(into, actions)
        key = (holding, *((name, t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in routes.items()))
        if key not in self._plans:
            self.check_actions(actions, values=False)
            self._plans[key] = self._plan(self._stages.step(self._author, holding), routes)
        return self._plans[key]

    def restart(self, mask: torch.Tensor) -> None:
        _require_started(self._started, self.name)
        self.store.ended.copy_(mask)
        routes = self._arrays.routes(self.outputs)
        key = ("restart", *((name, t.data_ptr()) for name, t in routes.items()))
        if key not in self._plans:
            self._plans[key] = self._plan(self._stages.restart(self._author), routes)
        self._plans[key]()
        if self.outputs.terminated is not self.store.terminated:
            self._arrays.copy_carried(self.outputs)

    def close(self) -> None:
        """Refuse further steps and drop the recorded launches."""
        self._started = False
        self._plans.clear()

    def statistics(self) -> EpisodeStatistics:
        reports = {name: self.store[f"{name}_sum"] for name in self.reports}
        return EpisodeStatistics(
            self.store.finished, self._arrays.by_group("return_sum"), self.store.length_sum, reports
        )

    def last_episode(self) -> LastEpisode:
        reports = {name: self.store[f"last_{name}"] for name in self.reports}
        return LastEpisode(self._arrays.by_group("last_return"), self.store.last_length, reports)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.store.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.store.load_state_dict(state)
        self.outputs = self._arrays.outputs()
        self._started = True

    @property
    def time_limit(self) -> int | None:
        author = [*listed(self._author_step), *listed(self._author_reset)]
        own = any(self._truncates(function) for function in author)
        return None if own or self._author_stages.is_torch("step") else self._settings["max_steps"]

    def _truncates(self, function: Any) -> bool:
        """Whether a function of the author's may truncate an env twice within the time limit."""
        return "truncated" in parameters_of(function)

    @property
    def bytes_per_env(self) -> int:
        return self.store.bytes_per_env

    def picture(self, canvas, env: int) -> None:
        """Draw a world with `layout`; a world without them overrides this, or has no picture."""
        if self.layout is None:
            return super().picture(canvas, env)
        agents = {}
        for g in self.groups:
            views = dict(self._positions[g.name])
            if g.can_leave:
                views["alive"] = self._arrays.get(g.name, "alive")
            agents[g.name] = {name: view[env].cpu().numpy() for name, view in views.items()}
        canvas.agents(self.layout.side(self.config), agents, int(self.store.step_count[env]))

    @property
    def drawable(self) -> bool:
        return self.layout is not None or type(self).picture is not KernelWorld.picture

    # --- construction ----------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Allocate the standard arrays, the author's state and the tables."""
        for name, item in ENV_FIELDS.items():
            self.store.add(name, item)
        self._arrays = GroupArrays(self.store, self.groups)
        for name, item in self.state.items():
            self.store.add(name, item)
        for name in self.reports:
            if self.state.get(name) is None or self.state[name].torch_type != torch.float32 or self.state[name].shape:
                raise ShoalError(f"{type(self).__name__} reports {name!r}, which is no state of one float per env.")
            self.store.add(f"{name}_sum", Field(float, doc="sum over finished episodes"))
            self.store.add(f"last_{name}", Field(float, doc="of the last finished episode"))
        self._tables: dict[str, Broadcast] = {}
        for name, values in _declared(type(self).tables, self.config).items():
            if name in self.store:
                raise ShoalError(f"{type(self).__name__}: {name!r} is both a table and an array of the store.")
            self._tables[name] = Broadcast(torch.as_tensor(values).to(self.device).contiguous())

    def _config_values(self) -> dict[str, Any]:
        """The settings that parameters can name, with those that Shoal adds for each group."""
        values = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        for name, value in values.items():
            if isinstance(value, int) and not -(2**31) <= value < 2**31:
                raise ShoalError(f"{self.name}: {name} must fit in 32 bits, got {value}.")
        values.setdefault("max_steps", NO_LIMIT)
        values.update({f"{g.name}_action_interval": g.action_interval for g in self.groups if g.action_interval > 1})
        for index, g in enumerate(self.groups):  # the group's first agent in an array over all agents of an env
            values[f"{g.name}_first"] = sum(other.agents for other in self.groups[:index])
        if values["max_steps"] < 1:
            raise ShoalError(f"{self.name}: max_steps must be at least 1, got {values['max_steps']}.")
        clash = set(values) & {*self.store.fields, *self._tables}
        if clash:
            raise ShoalError(f"{type(self).__name__}: {', '.join(sorted(clash))} is both a setting and an array.")
        return values

    def _author(self, stage: str, when: str, renames: Mapping[str, str] | None = None) -> list[Stage]:
        """The author's calls of a stage (see AuthorStages.calls); base classes of tasks add theirs here."""
        return self._author_stages.calls(self, stage, when, renames or {})

    def _plan(self, stages: list[Stage], routes: dict[str, torch.Tensor]) -> Plan:
        """Compile stages into launches. `routes` replaces arrays of the store, by name."""
        arrays = {**self.store.tensors, **routes}
        tables = {name: table.tensor for name, table in self._tables.items()}
        held = {name: arrays[instead] for name, instead in self._arrays.held_actions().items()}
        namespace = SimpleNamespace(**{**arrays, **held}, **tables, config=self.config)
        plan = Plan(self.device, self.num_envs)
        for run in _fused(stages):
            if isinstance(run, list):
                program = kernels.build(_identifier(self.name), run, self.device.type == "cpu")
                plan.add_program(program, {**arrays, **self._tables, **self._settings})
            else:
                plan.add_function(partial(run, namespace))
        return plan

    def gpu_programs(self) -> dict[str, Program]:
        """The kernels of a step, of a step that holds envs, and of a restart, in the form for GPUs.

        They are generated only. Nothing is compiled, launched or read, so the world may be on the meta device.
        """
        stages = {
            "step": self._stages.step(self._author, holding=False),
            "hold": self._stages.step(self._author, holding=True),
            "restart": self._stages.restart(self._author),
        }
        runs = {name: [run for run in _fused(stages[name]) if isinstance(run, list)] for name in stages}
        return {
            f"{name}.{i}": kernels.build(_identifier(self.name), run, on_cpu=False)
            for name in runs
            for i, run in enumerate(runs[name], 1)
        }


def _require_started(started: bool, name: str) -> None:
    if not started:
        raise ShoalError(f"{name}: step() before reset() or after close(); call reset(seed) first.")


def _identifier(name: str) -> str:
    """A world's name as an identifier in generated code."""
    return name.replace("-", "_")


def _fused(stages: list[Stage]) -> list[list[Call] | TorchStage]:
    """Stages with consecutive calls joined into lists, one kernel each."""
    runs: list[list[Call] | TorchStage] = []
    for stage in stages:
        if not isinstance(stage, Call):
            runs.append(stage)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return runs


def _declared(value: Any, config: Any) -> Any:
    """A declaration of the class: a constant, or a function of the settings."""
    return value(config) if callable(value) else value
