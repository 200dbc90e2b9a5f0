"""EnvPool's environments as host worlds."""

import json
from functools import cache, partial
from typing import Any

from shoal.core.errors import ShoalError, unknown
from shoal.core.extras import import_extra
from shoal.core.user_code import text_of
from shoal.host.config import HostConfig
from shoal.host.envs import SINGLE, HostGroup
from shoal.host.native import NativeLibrary
from shoal.host.packing import pack_action, pack_observation
from shoal.host.world import HostWorld


class EnvPoolWorld(HostWorld):
    """Environments of EnvPool, in native batches only."""

    handles_settings = ("time_limit", "frame_stack", "obs_dtype")

    @classmethod
    def host_groups_of(cls, config: HostConfig) -> list[HostGroup]:
        return _probe_envpool(cls.env_name, config.env_kwargs)

    def _limit(self, time_limit: int | None) -> int | None:
        return time_limit

    def native_library(self) -> NativeLibrary:
        kwargs = json.loads(self.config.env_kwargs)
        if self.limit is not None:
            kwargs["max_episode_steps"] = self.limit
        make = partial(_make_vector, self.env_name, kwargs)
        return NativeLibrary(make, seeds_on_creation=True, only_backend=True)


def _make_vector(name: str, kwargs: dict[str, Any], count: int, threads: int, seed: int) -> Any:
    return make_envpool(name, num_envs=count, num_threads=min(threads, count), seed=seed, **kwargs)


def make_envpool(name: str, **settings: Any) -> Any:
    """A vector env of EnvPool."""
    envpool = import_extra("envpool")
    if name not in (known := envpool.list_all_envs()):
        raise unknown("EnvPool environment", name, known)
    try:
        return envpool.make_gymnasium(name, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ShoalError(f"envpool:{name} cannot be built: {text_of(error)}.") from None


@cache
def _probe_envpool(name: str, kwargs: str) -> list[HostGroup]:
    vector = make_envpool(name, num_envs=1, **json.loads(kwargs))
    observation, action = vector.single_observation_space, vector.single_action_space
    vector.close()
    return [HostGroup(SINGLE, [SINGLE], pack_observation(observation), pack_action(action))]
