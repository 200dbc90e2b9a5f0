"""Find the class of a world by its name."""

import importlib
from dataclasses import is_dataclass
from functools import cache
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.registry import WORLDS, kind_of_world
from shoal.core.user_files import full_path, load_object
from shoal.core.world import World


@cache
def world_class(name: str) -> Any:
    """The class of a bundled world, of another library's environments, or of the user's `my_world.py:Chase`."""
    kind = kind_of_world(name)
    if kind == "bundled":
        module, attribute, _ = WORLDS[name]
        return getattr(importlib.import_module(module), attribute)
    if kind == "file":
        return _user_world(full_path(name))
    return _host_world(kind, name.partition(":")[2])


def _user_world(path: str) -> Any:
    """The user's World, or a world of copies of the user's Gymnasium or PettingZoo environment."""
    found = load_object(path, "world")
    if isinstance(found, type) and issubclass(found, World):
        config = getattr(found, "Config", None)
        if not (isinstance(config, type) and is_dataclass(config)):
            raise ShoalError(f"{path}.Config must be a dataclass with the world's settings.")
        return found
    if not callable(found):
        raise ShoalError(
            f"{path} is of type {type(found).__name__}; name a World, an environment or a function that returns one."
        )
    return _host_world("own", path)


def _host_world(kind: str, env_name: str) -> Any:
    """The class of worlds with copies of one environment on the CPU."""
    return importlib.import_module("shoal.host.factory").host_world(kind, env_name)
