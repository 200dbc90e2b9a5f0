"""Settings of host worlds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from shoal.core.errors import ShoalError
from shoal.core.settings import MAX_THREADS, Bounds, check_settings

own_flag = tyro.conf.arg(prefix_name=False)
"""Marks a setting whose flag has no prefix `world.`"""

MAX_ENV_SLICES = 254
"""A request to a worker is one byte, the index of an env slice; 254 and 255 have other meanings."""

Schedule = Literal["auto", "lockstep", "alternating", "first-come"]


@dataclass(frozen=True)
class HostConfig:
    """Settings that every host world has."""

    env_kwargs: Annotated[str, own_flag] = "{}"
    """Keyword arguments of the env's constructor, as JSON: '{"gravity": -5.0}'."""
    num_workers: Annotated[int, own_flag, Bounds(ge=0, le=MAX_THREADS)] = 0
    """Worker processes that step the envs, or threads of a native batch (0: one per core)."""
    vec_backend: Annotated[Literal["auto", "native", "processes", "serial"], own_flag] = "auto"
    """What steps the envs: a native batch, worker processes, or this process (auto: native if there is one)."""
    env_schedule: Annotated[Schedule, own_flag] = "auto"
    """Policies act for all envs at once (lockstep), for one part while the others step (alternating), or for those that
    are ready first (first-come). auto times all three at the start."""
    num_env_slices: Annotated[int, own_flag, Bounds(ge=2, le=MAX_ENV_SLICES)] = 2
    """Slices that the envs of each worker, or of a native batch, are split into, unless they are in lockstep."""
    desync_steps: Annotated[int, own_flag, Bounds(ge=0)] = 64
    """Maximum number of random steps of each env before training, so that episodes do not end together."""
    worker_timeout: Annotated[float, own_flag, Bounds(gt=0)] = 30.0
    """Seconds without an answer after which a worker is killed and restarted."""
    max_worker_restarts: Annotated[int, own_flag, Bounds(ge=0)] = 3
    """Restarts of workers that raise, die or hang before the run stops."""
    pin_threads: Annotated[bool, own_flag] = False
    """Pin each worker, or each thread of a native batch, to one core."""
    env_truncates: Annotated[bool, own_flag] = False
    """Gymnasium envs may truncate episodes themselves, before the time limit of the registry."""
    render: Annotated[bool, tyro.conf.Suppress] = False
    """Make envs with `render_mode="rgb_array"`; set for recordings."""

    def __post_init__(self):
        if isinstance(self.env_kwargs, Mapping):  # from Python
            try:
                object.__setattr__(self, "env_kwargs", json.dumps(dict(self.env_kwargs), allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise ShoalError(f"env_kwargs must hold JSON values only: {error}.") from None
        check_settings(self)
        try:
            parsed = json.loads(self.env_kwargs, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ShoalError(f"--env-kwargs must be JSON, got {self.env_kwargs[:200]!r}: {error}.") from None
        if not isinstance(parsed, dict):
            raise ShoalError(f"--env-kwargs must be a JSON object like '{{\"gravity\": -5.0}}', got {self.env_kwargs}.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
