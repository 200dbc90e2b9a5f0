"""Gymnasium's environments as host worlds."""

import json
from functools import partial
from typing import Any

import gymnasium

from shoal.core.user_code import UserCode
from shoal.host.native import NativeLibrary
from shoal.host.sources import gym_spec
from shoal.host.world import HostWorld


class GymWorld(HostWorld):
    """Gymnasium environments, by the vector env that the registry names, or in processes."""

    def native_library(self) -> NativeLibrary | None:
        if gym_spec(self.env_name).vector_entry_point is None:
            return None
        kwargs = json.loads(self.config.env_kwargs)
        if self.limit is not None:
            kwargs["max_episode_steps"] = self.limit
        return NativeLibrary(partial(_make_vector, self.env_name, kwargs), in_python=True)


def _make_vector(env_name: str, kwargs: dict[str, Any], count: int, threads: int) -> Any:
    with UserCode(f"The native batch of gym:{env_name} cannot be built", env_name):
        return gymnasium.make_vec(env_name, count, vectorization_mode="vector_entry_point", **kwargs)
