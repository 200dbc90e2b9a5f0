"""The author's `step`, `reset` and `observe`, as calls of Warp functions or as torch functions of a world's arrays."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import warp as wp

from shoal.core.errors import ShoalError, excerpt, unknown
from shoal.core.kernels import Call
from shoal.core.standard_arrays import CARRIED, GroupArrays
from shoal.core.store import Field
from shoal.core.user_code import UserCode
from shoal.core.world import Group

TorchStage = Callable[[SimpleNamespace], None]
"""A torch function of the namespace of all arrays."""

Stage = Call | TorchStage


@dataclass(frozen=True)
class ForGroup:
    """`ForGroup("runner", fn)` runs a per-agent function (one with an `agent` parameter) for one of several groups.

    Its parameters can omit the group's name: `x` is `runner_x`. `first` is the index of the group's first agent in an
    array over all agents of an env.
    """

    group: str
    function: Any


def parameters_of(function: Any) -> Mapping[str, Any]:
    """Warp types of the parameters of an author's function, by name; empty if it is not a Warp function."""
    function = function.function if isinstance(function, ForGroup) else function
    return function.input_types if isinstance(function, wp.Function) else {}


def listed(author: Any) -> list[Any]:
    """An author's stage as a list of functions."""
    return list(author) if isinstance(author, (list, tuple)) else [author]


class AuthorStages:
    """Turns the stages of one world into calls. The world's class has them as `_author_step` and so on.

    It keeps no reference to the world: a cycle would keep the world's memory until the next garbage collection.
    """

    def __init__(self, cls: type, arrays: GroupArrays, state: Mapping[str, Field], settings: Mapping[str, Any]):
        self._class, self._arrays, self._state, self._settings = cls, arrays, state, settings
        self._held: dict[str, torch.Tensor] = {}
        self._observations = {
            array for (_, field), array in arrays.names.items() if field in ("observation", "final_observation")
        }

    def is_torch(self, stage: str) -> bool:
        """Whether a stage is a torch method."""
        author = getattr(self._class, f"_author_{stage}")
        if author is None:
            raise ShoalError(f"{self._class.__name__} has no `{stage}`; give it Warp functions or a torch method.")
        if not callable(author) or isinstance(author, wp.Function):
            return False
        if next(iter(inspect.signature(author).parameters), "") == "env":
            name = getattr(author, "__name__", stage)
            raise ShoalError(f"{self._class.__name__}: {name} takes `env` but has no @wp.func above it.")
        return True

    def calls(self, world: Any, stage: str, when: str, renames: Mapping[str, str]) -> list[Stage]:
        """The calls of one stage, for all envs or for those whose flag `when` is set; torch methods of `world`.

        `renames` redirects arrays: {"observation": "final_observation"}.
        """
        if self.is_torch(stage):
            return [self._torch_stage(getattr(world, f"_author_{stage}"), stage, when, renames)]
        return [self._call(item, when, renames) for item in listed(getattr(self._class, f"_author_{stage}"))]

    def _call(self, item: Any, when: str, renames: Mapping[str, str]) -> Call:
        groups = self._arrays.groups
        group = self._group(item.group) if isinstance(item, ForGroup) else groups[0]
        function = item.function if isinstance(item, ForGroup) else item
        parameters = parameters_of(function)
        if "agent" in parameters and len(groups) > 1 and not isinstance(item, ForGroup):
            raise ShoalError(
                f"{self._class.__name__}.{function.key} runs per agent: say for which group with ForGroup."
            )
        renamed = {**renames, **self._arrays.held_actions()}
        names: dict[str, str] = {}
        for name in parameters:
            own = f"{group.name}_{name}"
            own = own if isinstance(item, ForGroup) and (own in self._arrays.store or own in self._settings) else name
            names[name] = renamed.get(own, own)
        # Functions that write observations access only their own agent's row: no barrier between them.
        no_barrier_group = "observe" if self._observations.intersection(names.values()) else ""
        return Call(function, group.agents if "agent" in parameters else 0, when, names, no_barrier_group)

    def _group(self, name: str) -> Group:
        groups = {g.name: g for g in self._arrays.groups}
        if name not in groups:
            raise unknown(f"group of {self._class.__name__} named", name, groups)
        return groups[name]

    # --- torch methods ---------------------------------------------------------------------------------------------

    def _torch_stage(self, method: Callable, stage: str, when: str, renames: Mapping[str, str]) -> TorchStage:
        code = UserCode(f"{self._class.__name__}.{stage} failed", method)

        def run(arrays: SimpleNamespace) -> None:
            with code:
                self._run(stage, method, arrays, when, renames)

        return run

    def _run(
        self, stage: str, method: Callable, arrays: SimpleNamespace, when: str, renames: Mapping[str, str]
    ) -> None:
        """Run a torch stage on all envs; new values of `reset` and `observe` are written where `when` is set."""
        result = method(arrays)
        if stage == "step":
            return
        if stage == "observe" and isinstance(result, torch.Tensor):
            result = {self._arrays.names[self._arrays.groups[0].name, "observation"]: result}
        if not isinstance(result, Mapping):
            raise ShoalError(f"`{stage}` must return a dict of new values by array, got {excerpt(result)}.")
        store = self._arrays.store
        flags = store[when] if when else None
        for name, value in result.items():
            target = getattr(arrays, renames.get(name, name), None)
            if not isinstance(target, torch.Tensor):
                raise unknown(f"array that `{stage}` returns:", name, store.tensors)
            value = value.to(target.dtype).reshape(target.shape)
            if flags is None:
                target.copy_(value)
            else:
                torch.where(_like(flags, target), value, target, out=target)

    def save_held(self, arrays: SimpleNamespace) -> None:
        """Copy what a torch `step` may write, before it runs."""
        self._held = {name: tensor.clone() for name, tensor in self._writable(arrays).items()}

    def restore_held(self, arrays: SimpleNamespace) -> None:
        """Undo the writes of a torch `step` in envs that are held."""
        active = self._arrays.store.active
        for name, tensor in self._writable(arrays).items():
            torch.where(_like(active, tensor), tensor, self._held[name], out=tensor)

    def _writable(self, arrays: SimpleNamespace) -> dict[str, torch.Tensor]:
        """What a torch `step` may write: the author's state, rewards and end flags."""
        names = [*self._state, "terminated", "truncated"]
        names += [qualified for (_, name), qualified in self._arrays.names.items() if name in ("reward", *CARRIED)]
        return {name: getattr(arrays, name) for name in names}


def _like(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Flags [env], shaped to broadcast over a tensor [env, ...]."""
    return flags.view(-1, *[1] * (tensor.ndim - 1))
