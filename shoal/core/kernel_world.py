"""KernelWorld: a world in one short file, written as Warp functions or with torch operations.

A step is the ordered list of stages in `_stages`: begin, the author's step, settle (time limit, statistics), and for
envs that have ended: the final observation, the books, the author's reset; then the observation. The functions that
Shoal puts around the author's are in `core/stages.py`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import warp as wp

from shoal.core import kernels, stages
from shoal.core.errors import ShoalError, excerpt, unknown
from shoal.core.kernel_cache import load_kernel
from shoal.core.kernels import Broadcast, Call, Program
from shoal.core.launch import Plan, init_warp, torch_stream
from shoal.core.random import draw_kernel
from shoal.core.settings import check_settings
from shoal.core.spaces import Box, Mixed
from shoal.core.store import Field, Store, full_device
from shoal.core.user_code import UserCode
from shoal.core.world import EpisodeStatistics, Group, GroupOutputs, LastEpisode, Outputs, World

NO_LIMIT = 2**31 - 1

DRAW_BLOCK = 256
"""Threads per block of the kernel that draws random numbers for torch."""

CARRIED = ("alive", "action_mask", "is_decision_step")
"""Outputs that a step also reads: they live in the store, and a row of a rollout gets a copy."""


@dataclass(frozen=True)
class ForGroup:
    """`ForGroup("runner", fn)` runs a per-agent function (one with an `agent` parameter) for one of several groups.

    Its parameters may name that group's arrays and settings without the group: `x` stands for `runner_x`. `first` is
    where the group begins in an array over all agents of an env.
    """

    group: str
    function: Any


class KernelWorld(World):
    """Base of the worlds written as kernels. A subclass declares:

    - `Config`: a frozen dataclass of settings; a field `max_steps` is the time limit;
    - `state`: name -> Field, what one env holds;
    - `groups`: who acts;
    - `tables` (if any): name -> array that all envs read and nobody writes;
    - `step`, `reset`, `observe`: Warp functions (or lists of them), or methods with torch operations;
    - `layout` (a 2-D world) or a method `picture`, to be recordable.

    `state`, `groups` and `tables` may also be static methods of the config, where sizes depend on settings.
    """

    @dataclass(frozen=True)
    class Config:
        """Settings of the world."""

    state: Any = {}
    groups: Any = ()
    tables: Any = {}
    reports: ClassVar[tuple[str, ...]] = ()
    """Float arrays of the state, one number per env, whose value at the end of an episode is reported as a mean."""
    settings: ClassVar[dict[str, dict[str, Any]]] = {}
    """Tuned settings for training, under the command line's names with underscores, in sections: `common`, then by kind
    of device (`cpu`, `gpu`), by learner (`ppo`, `a2c`) and by both (`a2c_cpu`). The entry `world` sets the config's."""

    # The author's stages. Subclasses give Warp functions or torch methods under the plain names `step`, `reset` and
    # `observe`; __init_subclass__ moves them here, since those names are the world's own methods.
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
            self._placed = self.layout.find(self.store.tensors, self.groups)
        name = type(self).__name__
        with UserCode(f"The stages of {name} cannot be read", type(self)):
            calls = [*self._stages(holding=True), *self._restart_stages()]
        for call in calls:
            if isinstance(call, Call):
                with UserCode(f"{name} cannot use {call.function}", call.function):
                    kernels.check_call(call, self._provided(), name)
        self.outputs = self._own_outputs()

    @classmethod
    def groups_of(cls, config: Any) -> tuple[Group, ...]:
        """Who acts, under these settings."""
        groups = tuple(_declared(cls.groups, config))
        if not groups:
            raise ShoalError(f"{cls.__name__} declares no groups; add groups = (Group(...),).")
        return groups

    # --- what an author may call ---------------------------------------------------------------------------------

    def uniform(self, low: float, high: float, shape: tuple[int, ...] = (), stream: int = 0) -> torch.Tensor:
        """For worlds written with torch: numbers in [low, high), [num_envs, *shape], keyed like a kernel's `rng`."""
        return self._draw(shape, stream, False, low, high)

    def normal(self, shape: tuple[int, ...] = (), stream: int = 0) -> torch.Tensor:
        """For worlds written with torch: standard normal numbers, [num_envs, *shape]."""
        return self._draw(shape, stream, True)

    # --- the World contract --------------------------------------------------------------------------------------

    def reset(self, seed: int = 0, first_env: int = 0) -> Outputs:
        store = self.store
        for tensor in store.tensors.values():
            tensor.zero_()
        store.seed.fill_(seed)
        torch.arange(first_env, first_env + self.num_envs, out=store.env_id)
        store.episode.fill_(-1)
        self._started = True
        self.outputs = self._own_outputs()
        self.restart(torch.ones(self.num_envs, dtype=torch.bool, device=self.device))
        return self.outputs

    def step(
        self,
        actions: torch.Tensor | Mapping[str, torch.Tensor],
        into: Outputs | None = None,
        hold: torch.Tensor | None = None,
    ) -> Outputs:
        self._require_started()
        actions = self.by_group(actions)
        if into is None:
            # The plan is bound to the world's own arrays: a caller's actions, new tensors each time, are copied there.
            self.check_actions(actions, self.checked)
            for group, tensor in actions.items():
                self.store[self._names[group, "action"]].copy_(tensor)
        if hold is not None:
            self.store.active.copy_(~hold)
        self._step_plan(actions, into, hold is not None)()
        if into is not None:
            self._copy_carried(into)
        self.outputs = into or self._own_outputs()
        return self.outputs

    def play(self, actions: Mapping[str, torch.Tensor]) -> Plan:
        """A plan that takes actions [steps, env, agent, ...] one after the other, whatever happens: no policy.

        Since nobody looks in between, CPU threads run through all steps of their envs without waiting for others.
        """
        self._require_started()
        out = self._own_outputs()
        rows = [dict(zip(actions, row, strict=True)) for row in zip(*actions.values(), strict=True)]
        return Plan.joined([self._step_plan(row, out, False) for row in rows])

    def _step_plan(self, actions: Mapping[str, torch.Tensor], into: Outputs | None, holding: bool) -> Plan:
        routes: dict[str, torch.Tensor] = {}
        if into is not None:
            self.check_groups(actions)
            routes = self._routes(into)
            routes.update({self._names[g, "action"]: tensor for g, tensor in actions.items()})
        key = (holding, *((name, t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in routes.items()))
        if key not in self._plans:
            self.check_actions(actions, values=False)
            self._plans[key] = self._plan(self._stages(holding), routes)
        return self._plans[key]

    def _routes(self, out: Outputs) -> dict[str, torch.Tensor]:
        """Which arrays a plan writes to instead of the store's own."""
        carried = {qualified for (_, name), qualified in self._names.items() if name in CARRIED}
        return {name: tensor for name, tensor in out.tensors(self._names).items() if name not in carried}

    def _copy_carried(self, into: Outputs) -> None:
        """Show what the world carries from step to step, and so keeps in its own arrays, in a caller's row too."""
        for name, group in into.groups.items():
            for item in CARRIED:
                if (name, item) in self._names:
                    getattr(group, item).copy_(self.store[self._names[name, item]])

    def _require_started(self) -> None:
        if not self._started:
            raise ShoalError(f"{self.name}: step() before reset() or after close(); call reset(seed) first.")

    def restart(self, mask: torch.Tensor) -> None:
        self._require_started()
        self.store.ended.copy_(mask)
        routes = self._routes(self.outputs)
        key = ("restart", *((name, t.data_ptr()) for name, t in routes.items()))
        if key not in self._plans:
            self._plans[key] = self._plan(self._restart_stages(), routes)
        self._plans[key]()
        if self.outputs.terminated is not self.store.terminated:
            self._copy_carried(self.outputs)

    def close(self) -> None:
        """Refuse further steps and drop the recorded launches."""
        self._started = False
        self._plans.clear()

    def statistics(self) -> EpisodeStatistics:
        sums = {g.name: self.store[self._names[g.name, "return_sum"]] for g in self.groups}
        reports = {name: self.store[f"{name}_sum"] for name in self.reports}
        return EpisodeStatistics(self.store.finished, sums, self.store.length_sum, reports)

    def last_episode(self) -> LastEpisode:
        returns = {g.name: self.store[self._names[g.name, "last_return"]] for g in self.groups}
        reports = {name: self.store[f"last_{name}"] for name in self.reports}
        return LastEpisode(returns, self.store.last_length, reports)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.store.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.store.load_state_dict(state)
        self.outputs = self._own_outputs()
        self._started = True

    @property
    def time_limit(self) -> int | None:
        author = [*_functions(self._author_step), *_functions(self._author_reset)]
        own = any(self._truncates(function) for function in author)
        return None if own or self._is_torch("step") else self._settings["max_steps"]

    def _truncates(self, function: Any) -> bool:
        """Whether a function of the author's may truncate an env twice within the time limit."""
        return "truncated" in parameters_of(function)

    @property
    def bytes_per_env(self) -> int:
        return self.store.bytes_per_env

    def picture(self, canvas, env: int) -> None:
        """A world with `layout` is drawn from them; any other has a picture of its own, or none."""
        if self.layout is None:
            return super().picture(canvas, env)
        crowds = {}
        for g in self.groups:
            views = dict(self._placed[g.name])
            if g.can_leave:
                views["alive"] = self.store[self._names[g.name, "alive"]]
            crowds[g.name] = {what: view[env].cpu().numpy() for what, view in views.items()}
        canvas.agents(self.layout.side(self.config), crowds, int(self.store.step_count[env]))

    @property
    def drawable(self) -> bool:
        return self.layout is not None or type(self).picture is not KernelWorld.picture

    # --- construction ------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Every array: the random key and the books, the standard fields per group, the author's state."""
        add = self.store.add
        add("seed", Field(wp.uint64, doc="key of the random numbers"))
        add("env_id", Field(int, doc="global number of the env"))
        add("episode", Field(int, doc="episodes begun, from 0"))
        add("step_count", Field(int, unit="steps", doc="steps since the episode began"))
        add("terminated", Field(bool))
        add("truncated", Field(bool))
        add("ended", Field(bool, doc="either of the two; the env restarts in this step"))
        add("active", Field(bool, doc="not held back by a wrapper"))
        add("finished", Field(int, doc="episodes finished"))
        add("length_sum", Field(wp.int64, unit="steps", doc="sum over finished episodes"))
        add("last_length", Field(int, unit="steps", doc="length of the last finished episode"))
        self._names: dict[tuple[str, str], str] = {}
        for g in self.groups:
            for name, item in _group_fields(g).items():
                qualified = name if len(self.groups) == 1 else f"{g.name}_{name}"
                self._names[g.name, name] = qualified
                add(qualified, item)
        for name, item in self.state.items():
            add(name, item)
        for name in self.reports:
            if self.state.get(name) is None or self.state[name].torch_type != torch.float32 or self.state[name].shape:
                raise ShoalError(f"{type(self).__name__} reports {name!r}, which is no state of one float per env.")
            add(f"{name}_sum", Field(float, doc="sum over finished episodes"))
            add(f"last_{name}", Field(float, doc="of the last finished episode"))
        self._tables: dict[str, Broadcast] = {}
        for name, values in _declared(type(self).tables, self.config).items():
            if name in self.store:
                raise ShoalError(f"{type(self).__name__}: {name!r} is both a table and an array of the store.")
            self._tables[name] = Broadcast(torch.as_tensor(values).to(self.device).contiguous())

    def _config_values(self) -> dict[str, Any]:
        if not is_dataclass(self.config) or isinstance(self.config, type):
            raise ShoalError(f"{type(self).__name__}.Config must be a dataclass.")
        check_settings(self.config, "world.")
        values = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        for name, value in values.items():
            if isinstance(value, int) and not -(2**31) <= value < 2**31:
                raise ShoalError(f"{self.name}: {name} must fit in 32 bits, got {value}.")
        values.setdefault("max_steps", NO_LIMIT)
        values.update({f"{g.name}_every": g.action_interval for g in self.groups if g.action_interval > 1})
        for index, g in enumerate(self.groups):  # where a group begins in an array over all agents of an env
            values[f"{g.name}_first"] = sum(other.agents for other in self.groups[:index])
        if values["max_steps"] < 1:
            raise ShoalError(f"{self.name}: max_steps must be at least 1, got {values['max_steps']}.")
        clash = set(values) & {*self.store.fields, *self._tables}
        if clash:
            raise ShoalError(f"{type(self).__name__}: {', '.join(sorted(clash))} is both a setting and an array.")
        return values

    def _provided(self) -> dict[str, Any]:
        """What a parameter may name: arrays of the store, tables and settings."""
        return {**self.store.tensors, **self._tables, **self._settings}

    def _own_outputs(self) -> Outputs:
        store = self.store
        groups = {}
        for g in self.groups:
            names = [f.name for f in fields(GroupOutputs)]
            arrays = {n: store[self._names[g.name, n]] for n in names if (g.name, n) in self._names}
            groups[g.name] = GroupOutputs(**arrays)
        return Outputs(store.terminated, store.truncated, groups)

    def _is_torch(self, stage: str) -> bool:
        author = getattr(type(self), f"_author_{stage}")
        if author is None:
            raise ShoalError(f"{type(self).__name__} has no `{stage}`; give it Warp functions or a torch method.")
        plain = callable(author) and not isinstance(author, (wp.Function, list, tuple))
        if plain and next(iter(inspect.signature(author).parameters), "") == "env":
            raise ShoalError(f"{type(self).__name__}: {author.__name__} takes `env` but has no @wp.func above it.")
        return plain

    # --- stages ----------------------------------------------------------------------------------------------------

    def _stages(self, holding: bool) -> list["Call | Callable"]:
        """One step, in order. Entries are calls of Warp functions, or torch functions of the arrays' namespace."""
        when = "active" if holding else ""
        leaving = [g for g in self.groups if g.can_leave]
        pausing = [g for g in self.groups if g.action_interval > 1]
        run: list[Call | Callable] = [Call(stages.clear_ended)] if holding else []
        if holding and self._is_torch("step"):
            run.append(self._save_held)
        run.append(Call(stages.begin, when=when))
        run += self._per_group(stages.begin_one, stages.begin_agent, when)
        run += [self._standard(g, stages.remember_alive, when, "begin") for g in leaving]
        run += [self._standard(g, self._hold_of(g), when, "begin") for g in pausing]
        run += self._author("step", when)
        if holding and self._is_torch("step"):
            run.append(self._restore_held)
        run += [self._standard(g, stages.zero_dead_rewards, when, "mute") for g in leaving]
        run += self._per_group(stages.settle_one, stages.settle_agent, when)
        run.append(Call(stages.settle, when=when))
        renames = {self._names[g.name, "observation"]: self._names[g.name, "final_observation"] for g in self.groups}
        run += self._author("observe", "ended", renames)
        run += [self._standard(g, stages.keep_alive, "ended", "observe") for g in leaving]
        run += self._begin_episode()
        run += self._author("observe", "")
        run += [self._acting(g, "") for g in pausing]
        return run

    def _restart_stages(self) -> list["Call | Callable"]:
        pausing = [self._acting(g, "ended") for g in self.groups if g.action_interval > 1]
        return [*self._begin_episode(), *self._author("observe", "ended"), *pausing]

    def _begin_episode(self) -> list["Call | Callable"]:
        run: list[Call | Callable] = []
        for name in self.reports:
            names = {"value": name, "value_sum": f"{name}_sum", "last_value": f"last_{name}"}
            run.append(Call(stages.report, when="ended", names=names))
        for g in self.groups:
            run.append(self._standard(g, stages.finish_one if g.agents == 1 else stages.finish_many, "ended"))
        run.append(Call(stages.finish, when="ended"))
        for g in self.groups:
            if g.agents > 1:
                run.append(self._standard(g, stages.forget_return, "ended", "fresh"))
            if g.can_leave:
                run.append(self._standard(g, stages.all_alive, "ended", "fresh"))
        return [*run, *self._author("reset", "ended")]

    def _per_group(self, one: Any, each: Any, when: str) -> list["Call | Callable"]:
        """`one` for a group of a single agent, in the loop over envs; `each` per agent for a larger one."""
        return [self._standard(g, one if g.agents == 1 else each, when, each.key) for g in self.groups]

    def _standard(self, g: Group, function: Any, when: str, together: str = "") -> Call:
        """A function of core/stages.py for one group, bound to that group's arrays."""
        parameters = parameters_of(function)
        names = {n: self._names[g.name, n] for n in parameters if (g.name, n) in self._names}
        return Call(function, g.agents if "agent" in parameters else 0, when, names, together)

    def _hold_of(self, g: Group) -> Any:
        flat = len(g.action.shape) == 0
        if isinstance(g.action, (Box, Mixed)):
            return stages.hold_numbers
        return stages.hold_choice if flat else stages.hold_choices

    def _acting(self, g: Group, when: str) -> Call:
        names = {"every": f"{g.name}_every", "is_decision_step": self._names[g.name, "is_decision_step"]}
        return Call(stages.next_acting, g.agents, when, names)

    def _author(self, stage: str, when: str, renames: dict[str, str] | None = None) -> list["Call | Callable"]:
        if self._is_torch(stage):
            method = getattr(self, f"_author_{stage}")
            code = UserCode(f"{type(self).__name__}.{stage} failed", method)

            def run(arrays: SimpleNamespace) -> None:
                with code:
                    self._run_torch(stage, method, arrays, when, renames or {})

            return [run]
        calls: list[Call | Callable] = []
        only = self.groups[0]
        for item in _functions(getattr(type(self), f"_author_{stage}")):
            group = self.group(item.group) if isinstance(item, ForGroup) else only
            function = item.function if isinstance(item, ForGroup) else item
            per_agent = "agent" in parameters_of(function)
            if per_agent and len(self.groups) > 1 and not isinstance(item, ForGroup):
                raise ShoalError(
                    f"{type(self).__name__}.{function.key} runs per agent: say for which group with ForGroup."
                )
            renamed = {**(renames or {}), **self._held_actions()}
            names: dict[str, str] = {}
            for name in parameters_of(function):
                own = f"{group.name}_{name}"
                own = own if isinstance(item, ForGroup) and (own in self.store or own in self._settings) else name
                names[name] = renamed.get(own, own)
            # Functions that write what one agent sees touch nothing of one another's.
            together = "observe" if any(n.endswith("observation") for n in parameters_of(function)) else ""
            calls.append(Call(function, group.agents if per_agent else 0, when, names, together))
        return calls

    def _held_actions(self) -> dict[str, str]:
        """Where an author's function finds the action of a group that does not choose at every step."""
        return {
            self._names[g.name, "action"]: self._names[g.name, "held"] for g in self.groups if g.action_interval > 1
        }

    def _run_torch(self, stage: str, method: Callable, arrays: SimpleNamespace, when: str, renames: dict) -> None:
        """Run a torch stage on all envs; `reset` and `observe` return new values, kept where `when` is set."""
        result = method(arrays)
        if stage == "step":
            return
        if stage == "observe" and isinstance(result, torch.Tensor):
            result = {self._names[self.groups[0].name, "observation"]: result}
        if not isinstance(result, Mapping):
            raise ShoalError(f"`{stage}` must return a dict of new values by array, got {excerpt(result)}.")
        flags = self.store[when] if when else None
        for name, value in result.items():
            target = getattr(arrays, renames.get(name, name), None)
            if not isinstance(target, torch.Tensor):
                raise unknown(f"array that `{stage}` returns:", name, self.store.tensors)
            value = value.to(target.dtype).reshape(target.shape)
            if flags is None:
                target.copy_(value)
            else:
                mask = flags.view(-1, *[1] * (target.ndim - 1))
                torch.where(mask, value, target, out=target)

    def _save_held(self, arrays: SimpleNamespace) -> None:
        self._held = {name: tensor.clone() for name, tensor in self._mutable(arrays).items()}

    def _restore_held(self, arrays: SimpleNamespace) -> None:
        active = self.store.active
        for name, tensor in self._mutable(arrays).items():
            mask = active.view(-1, *[1] * (tensor.ndim - 1))
            torch.where(mask, tensor, self._held[name], out=tensor)

    def _mutable(self, arrays: SimpleNamespace) -> dict[str, torch.Tensor]:
        """What a torch `step` may write: the author's state, rewards and end flags."""
        names = [*self.state, "terminated", "truncated"]
        names += [qualified for (_, name), qualified in self._names.items() if name in ("reward", *CARRIED)]
        return {name: getattr(arrays, name) for name in names}

    # --- plans -----------------------------------------------------------------------------------------------------

    def _plan(self, stages: list["Call | Callable"], routes: dict[str, torch.Tensor]) -> Plan:
        arrays = {**self.store.tensors, **routes}
        tables = {name: table.tensor for name, table in self._tables.items()}
        held = {name: arrays[instead] for name, instead in self._held_actions().items()}
        namespace = SimpleNamespace(**{**arrays, **held}, **tables, config=self.config)
        plan = Plan(self.device, self.num_envs)
        for run in _fused(stages):
            if isinstance(run, list):
                program = self._program(run, self.device.type == "cpu")
                plan.add_program(program, {**arrays, **self._tables, **self._settings})
            else:
                plan.add_function(lambda run=run: run(namespace))
        return plan

    def _program(self, calls: list[Call], on_cpu: bool) -> Program:
        return kernels.build(self.name.replace("-", "_"), calls, on_cpu)

    def gpu_programs(self) -> dict[str, Program]:
        """The kernels of a step, of a step that holds envs, and of a restart, in the form for GPUs.

        They are generated only. Nothing is compiled, launched or read, so the world may be on the meta device.
        """
        stages = {"step": self._stages(False), "hold": self._stages(True), "restart": self._restart_stages()}
        runs = {name: [run for run in _fused(listed) if isinstance(run, list)] for name, listed in stages.items()}
        return {f"{name}.{i}": self._program(run, False) for name in runs for i, run in enumerate(runs[name], 1)}

    def _draw(
        self, shape: tuple[int, ...], stream: int, gaussian: bool, low: float = 0.0, high: float = 1.0
    ) -> torch.Tensor:
        out = torch.empty(self.num_envs, *shape, device=self.device)
        flat = out.view(self.num_envs, -1)
        s = self.store
        stream_of = torch_stream(self.device) if self.device.type == "cuda" else None
        sources = [wp.from_torch(s[n], dtype=wp.uint64 if n == "seed" else wp.int32) for n in kernels.RNG_SOURCES]
        inputs = [*sources, stream, gaussian, low, high, wp.from_torch(flat)]
        _load_draw_kernel(str(self.device))
        wp.launch(draw_kernel, flat.shape, inputs, device=str(self.device), stream=stream_of, block_dim=DRAW_BLOCK)
        return out


@cache
def _load_draw_kernel(device: str) -> None:
    load_kernel(draw_kernel, device, DRAW_BLOCK)


def _group_fields(g: Group) -> dict[str, Field]:
    """The standard fields of a group."""
    observation = _field_of(g.observation, g.agents)
    found = {
        "action": Field(float if isinstance(g.action, (Box, Mixed)) else int, (g.agents, *g.action.shape)),
        "observation": observation,
        "final_observation": observation,
        "reward": Field(float, (g.agents,)),
        "episode_return": Field(float, (g.agents,), doc="reward since the episode began"),
        "return_sum": Field(float, doc="sum over finished episodes"),
        "last_return": Field(float, doc="return of the last finished episode"),
    }
    if g.can_leave:
        found["alive"] = Field(bool, (g.agents,))
        found["was_alive"] = Field(bool, (g.agents,), doc="in the game when the step began")
        found["final_alive"] = Field(bool, (g.agents,))
    if g.masked:
        found["action_mask"] = Field(bool, (g.agents, g.choices))
    if g.action_interval > 1:
        found["is_decision_step"] = Field(bool, (g.agents,))
        found["held"] = replace(found["action"], doc="the action that stands")
    return found


def _fused(stages: "list[Call | Callable]") -> "list[list[Call] | Callable]":
    """Lists of neighboring calls, one kernel each, with the torch functions between them."""
    runs: list[list[Call] | Callable] = []
    for stage in stages:
        if not isinstance(stage, Call):
            runs.append(stage)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return runs


def _declared(value: Any, config: Any) -> Any:
    """What a class declares, outright or as a function of its settings."""
    return value(config) if callable(value) else value


def _field_of(space: Box, agents: int) -> Field:
    types = {torch.float32: float, torch.uint8: wp.uint8, torch.float16: wp.float16}
    if space.dtype not in types:
        raise ShoalError(f"An observation cannot be {space.dtype}; use float32, float16 or uint8.")
    return Field(types[space.dtype], (agents, *space.shape))


def _functions(author: Any) -> list[Any]:
    return list(author) if isinstance(author, (list, tuple)) else [author]


def parameters_of(function: Any) -> Mapping[str, Any]:
    """Parameter name -> Warp type of an author's function; nothing of one that is no Warp function."""
    function = function.function if isinstance(function, ForGroup) else function
    return function.input_types if isinstance(function, wp.Function) else {}
