"""Classes of worlds for environments on the CPU."""

from typing import Any

from shoal.host.atari import AtariWorld
from shoal.host.envpool import EnvPoolWorld
from shoal.host.sources import gym_spec
from shoal.host.tuned import settings_of
from shoal.host.world import GymWorld, HostWorld


def host_world(kind: str, env_name: str) -> type[HostWorld]:
    """The class of worlds of one environment."""
    base: type[HostWorld] = HostWorld
    if kind == "gym":
        gym_spec(env_name)
        base = GymWorld
    elif kind == "ale":
        base = AtariWorld
    elif kind == "envpool":
        base = EnvPoolWorld
    name = f"{kind}:{env_name}"
    attributes = dict(kind=kind, env_name=env_name, name=name, settings=settings_of(kind, env_name))
    made: Any = type(f"Host_{env_name}", (base,), {**attributes, "__doc__": base.__doc__})
    return made
