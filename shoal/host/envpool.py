"""EnvPool's environments as host worlds."""

import json
from functools import cache, partial
from typing import Any

from shoal.core.errors import ShoalError, unknown
from shoal.core.extras import import_extra
from shoal.core.user_code import text_of
from shoal.host.config import HostConfig
from shoal.host.envs import SINGLE, Team
from shoal.host.native import VectorBatch
from shoal.host.packing import pack_action, pack_observation
from shoal.host.world import HostWorld


class EnvPoolWorld(HostWorld):
    """Environments of EnvPool, in its native batch alone."""

    handles_settings = ("time_limit", "frame_stack", "obs_dtype")

    @classmethod
    def teams_of(cls, config: HostConfig) -> list[Team]:
        return _probe_envpool(cls.env_name, config.env_kwargs)

    @classmethod
    def has_native(cls, config: HostConfig) -> bool:
        return True

    @classmethod
    def batches_natively(cls, config: HostConfig) -> bool:
        if config.batch not in ("auto", "native"):
            raise ShoalError(f"EnvPool has a native batch only, so --batch {config.batch} is not possible.")
        return True

    def _limit(self, asked: int | None) -> int | None:
        return asked

    def make_vector(self, count: int, threads: int, seed: int = 0) -> Any:
        kwargs = json.loads(self.config.env_kwargs)
        if self.limit is not None:
            kwargs["max_episode_steps"] = self.limit
        return make_envpool(self.env_name, num_envs=count, num_threads=min(threads, count), seed=seed, **kwargs)

    def _make_batch(self, rows: slice, threads: int) -> VectorBatch:
        count = rows.stop - rows.start
        remake = partial(self.make_vector, count, threads)
        return VectorBatch(remake(0), rows, self._arrays, remake)


def make_envpool(name: str, **settings: Any) -> Any:
    """A vector env of EnvPool."""
    envpool = import_extra("envpool")
    if name not in (known := envpool.list_all_envs()):
        raise unknown("EnvPool environment", name, known)
    try:
        return envpool.make_gymnasium(name, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ShoalError(f"envpool:{name} cannot be made: {text_of(error)}.") from None


@cache
def _probe_envpool(name: str, kwargs: str) -> list[Team]:
    vector = make_envpool(name, num_envs=1, **json.loads(kwargs))
    see, act = vector.single_observation_space, vector.single_action_space
    vector.close()
    return [Team(SINGLE, [SINGLE], pack_observation(see), pack_action(act))]
