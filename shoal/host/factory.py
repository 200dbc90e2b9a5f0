"""Makes the world class of a host environment."""

from typing import Any

from shoal.host.atari import AtariWorld
from shoal.host.envpool import EnvPoolWorld
from shoal.host.gym_world import GymWorld
from shoal.host.presets import presets_of
from shoal.host.sources import gym_spec
from shoal.host.world import HostWorld


def host_world(kind: str, env_name: str) -> type[HostWorld]:
    """The world class of one environment; `kind` is gym, ale, envpool, zoo or own."""
    base: type[HostWorld] = HostWorld
    if kind == "gym":
        gym_spec(env_name)
        base = GymWorld
    elif kind == "ale":
        base = AtariWorld
    elif kind == "envpool":
        base = EnvPoolWorld
    name = f"{kind}:{env_name}"
    attributes = dict(kind=kind, env_name=env_name, name=name, settings=presets_of(kind, env_name))
    world_class: Any = type(f"Host_{env_name}", (base,), {**attributes, "__doc__": base.__doc__})
    return world_class
