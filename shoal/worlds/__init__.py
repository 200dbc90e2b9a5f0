"""The bundled worlds. Only names and one line each live here, so that listing them needs neither torch nor Warp."""

import hashlib
import importlib
import importlib.util
import sys
from dataclasses import is_dataclass
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FunctionType
from typing import Any

from shoal.errors import ShoalError, excerpt, unknown
from shoal.user_code import UserCode

WORLDS: dict[str, tuple[str, str, str]] = {
    "acrobot": ("shoal.worlds.acrobot", "Acrobot", "Swing the foot of a two-link arm above the bar."),
    "cartpole": ("shoal.worlds.cartpole", "CartPole", "Balance a pole on a cart."),
    "explore": ("shoal.nav.explore", "Explore", "Walk through as much of a house as possible, by sight."),
    "flee": ("shoal.nav.flee", "Flee", "Get as far away from the start as possible in a house, by sight."),
    "mountain-car": ("shoal.worlds.mountain_car", "MountainCar", "Rock a weak car out of a valley."),
    "mountain-car-continuous": (
        "shoal.worlds.mountain_car_continuous",
        "MountainCarContinuous",
        "Rock a weak car out of a valley, sparing fuel.",
    ),
    "pandemic": ("shoal.worlds.pandemic", "Pandemic", "51 governors and a planner trade lives against livelihoods."),
    "pendulum": ("shoal.worlds.pendulum", "Pendulum", "Swing a pendulum up and hold it there."),
    "pointnav": ("shoal.nav.pointnav", "PointNav", "Walk to a point in a house, by sight."),
    "tag-continuous": ("shoal.worlds.tag_continuous", "TagContinuous", "Taggers hunt runners in a square."),
    "tag-grid": ("shoal.worlds.tag_grid", "TagGrid", "Taggers hunt a runner on a grid."),
}
"""Name -> module, class, one line."""

KERNEL_WORLDS = sorted(name for name, (module, _, _) in WORLDS.items() if module.startswith("shoal.worlds."))
"""Those of them that need no scenes."""


HOST_KINDS = {
    "gym": "any environment of Gymnasium: gym:LunarLander-v3",
    "ale": "Atari games: ale:breakout",
    "zoo": "parallel environments of PettingZoo: zoo:sisl.pursuit_v5",
    "envpool": "EnvPool's environments: envpool:Pong-v5",
}
"""What stands before the colon of environments that live on the host."""


def kind_of_world(name: str) -> str:
    """What a world's name means, found without importing anything: bundled, file, or one of HOST_KINDS."""
    kind, colon, _ = name.partition(":")
    if colon and kind in HOST_KINDS:
        return kind
    if name.rpartition(":")[0].endswith(".py"):
        return "file"
    if name.endswith(".py"):
        raise ShoalError(f"{excerpt(name)} may hold many things; say which one is the world: FILE.py:NAME.")
    if name in WORLDS:
        return "bundled"
    if colon:
        kinds = ", ".join(f"{kind}:" for kind in HOST_KINDS)
        raise ShoalError(f"There is no world {excerpt(name)!r}; use one of {kinds} or FILE.py:NAME.")
    raise unknown("world", name, WORLDS)


@cache
def world_class(name: str) -> Any:
    """The class behind a name: a bundled world, one of another library, or the user's own as `my_world.py:Chase`."""
    kind = kind_of_world(name)
    if kind == "bundled":
        module, attribute, _ = WORLDS[name]
        return getattr(importlib.import_module(module), attribute)
    if kind == "file":
        return _own(full_path(name))
    from shoal.host.world import host_world

    return host_world(kind, name.partition(":")[2])


def _own(path: str) -> Any:
    """The user's World; or, of an environment for Gymnasium or PettingZoo, a world of many of them."""
    from shoal.core.world import World

    found = load_object(path, "world")
    if isinstance(found, type) and issubclass(found, World):
        config = getattr(found, "Config", None)
        if not (isinstance(config, type) and is_dataclass(config)):
            raise ShoalError(f"{path}.Config must be a dataclass with the world's settings.")
        return found
    if not callable(found):
        raise ShoalError(
            f"{path} is of type {type(found).__name__}; name a World, an environment or a function that makes one."
        )
    from shoal.host.world import host_world

    return host_world("own", path)


def full_path(name: str) -> str:
    """`FILE.py:NAME` with the whole path of the file, so that a run finds it from anywhere; other names as they are."""
    place, colon, attribute = name.rpartition(":")
    return f"{Path(place).resolve()}{colon}{attribute}" if place.endswith(".py") else name


class _UserFile(SourceFileLoader):
    """Executes the source that is there, never a compiled copy beside it, and keeps its SHA-256."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        _EXECUTED[Path(path)] = hashlib.sha256(source).hexdigest()
        return self.source_to_code(source, path)


_EXECUTED: dict[Path, str] = {}
"""SHA-256 of the user's files that this process has executed."""


def source_sha256(file: Path) -> str:
    """SHA-256 of a file of the user's: as it was executed, or as it would be."""
    return _EXECUTED.get(file) or hashlib.sha256(file.read_bytes()).hexdigest()


@cache
def load_object(path: str, kind: str) -> Any:
    """What `FILE.py:NAME` names; a file is executed once."""
    place, _, attribute = path.rpartition(":")
    if not place.endswith(".py"):
        raise ShoalError(f"The {kind} {path!r} cannot be loaded: write it as FILE.py:NAME.")
    file = Path(place).resolve()
    if not file.is_file():
        raise ShoalError(f"There is no file {place!r} to load the {kind} {attribute!r} from.")
    name = f"shoal_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file, loader=_UserFile(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Warp looks a function's module up there
    with UserCode(f"{excerpt(place)} cannot be imported", str(file)):
        spec.loader.exec_module(module)
    if not hasattr(module, attribute):
        kinds = (type, FunctionType)
        own = [n for n, v in vars(module).items() if isinstance(v, kinds) and v.__module__ == name and n[0] != "_"]
        raise unknown(f"{kind} in {place} named", attribute, own)
    return getattr(module, attribute)
