"""Makes envs from their names: `gym:ID`, `zoo:MODULE` and `FILE.py:NAME`. Workers import this: no torch."""

import copy
import importlib
import inspect
import json
from dataclasses import dataclass
from typing import Any

import gymnasium

from shoal.core.errors import ShoalError, excerpt, unknown
from shoal.core.extras import import_extra, needs_extras
from shoal.core.user_code import MAX_EXCERPT, UserCode
from shoal.core.user_files import load_object


@dataclass(frozen=True)
class Source:
    """The name of an environment and its constructor's arguments."""

    kind: str
    """gym, zoo, ale, envpool, or own: a class or function of the user's."""
    name: str
    kwargs: str = "{}"
    """Keyword arguments, as JSON."""
    render: bool = False
    """Make envs with `render_mode="rgb_array"`."""

    def make(self) -> Any:
        """Make one env, without wrappers for time limits and checks."""
        kwargs = json.loads(self.kwargs)
        if self.render:
            kwargs["render_mode"] = "rgb_array"
        wanted = f" with {excerpt(self.kwargs)}" if self.kwargs != "{}" else ""
        if self.kind != "own":
            with UserCode(f"{self} cannot be built{wanted}", self.name), needs_extras(str(self)):
                return _make_gym(self.name, kwargs) if self.kind == "gym" else _make_zoo(self.name, kwargs)
        maker = load_object(self.name, "environment")
        with UserCode(f"{self} cannot be built{wanted}", maker):
            parameters = inspect.signature(maker).parameters
            if "render_mode" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                kwargs.pop("render_mode", None)
            return maker(**kwargs)

    def __str__(self) -> str:
        return self.name if self.kind == "own" else f"{self.kind}:{self.name}"

    @property
    def max_steps(self) -> int | None:
        """Time limit of Gymnasium's registry, which the runner applies."""
        return gym_spec(self.name).max_episode_steps if self.kind == "gym" else None


def gym_spec(name: str) -> Any:
    """The entry of a Gymnasium id in the registry."""
    if name.startswith("ALE/"):
        import_extra("ale_py")
    module, colon, rest = name.partition(":")
    if colon:  # MODULE:ID imports the module first, as in gymnasium.make
        with needs_extras(f"gym:{name}"):
            importlib.import_module(module)
    try:
        return gymnasium.spec(rest if colon else name)
    except gymnasium.error.Error as error:
        known = list(gymnasium.envs.registry)
        if (rest or name) in known:
            raise ShoalError(f"gym:{name}: {_first_line(error)}") from None
        raise unknown("Gymnasium environment", rest or name, known) from None


def _make_gym(name: str, kwargs: dict[str, Any]) -> Any:
    """An env without the registry's checks and time limit; the runner counts steps."""
    spec = copy.deepcopy(gym_spec(name))
    spec.max_episode_steps = None
    spec.order_enforce = False
    return gymnasium.make(spec, disable_env_checker=True, **kwargs)


def _make_zoo(name: str, kwargs: dict[str, Any]) -> Any:
    return _zoo_module(name).parallel_env(**kwargs)


def _zoo_module(name: str) -> Any:
    """Import a PettingZoo module by its short name (`sisl.pursuit_v5`) or its full one."""
    import_extra("pettingzoo")
    for full in (f"pettingzoo.{name}", name):
        try:
            module = importlib.import_module(full)
        except ModuleNotFoundError as error:
            if error.name and not f"{full}.".startswith(f"{error.name}."):
                raise
            continue
        except ImportError as error:
            raise ShoalError(f"zoo:{name}: {_first_line(error)}") from None
        if not hasattr(module, "parallel_env"):
            raise ShoalError(f"zoo:{name} has no parallel_env; only PettingZoo's parallel environments can be used.")
        return module
    raise ShoalError(f"There is no PettingZoo module {name!r}; write it like sisl.pursuit_v5.")


def _first_line(error: BaseException) -> str:
    return excerpt((str(error).strip().splitlines() or [type(error).__name__])[0], MAX_EXCERPT)
