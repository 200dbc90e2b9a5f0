"""Settings of host worlds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from shoal.core.errors import ShoalError
from shoal.core.settings import MOST_THREADS, check_settings

own_flag = tyro.conf.arg(prefix_name=False)
"""For settings that people look for without the prefix `world.`"""

MOST_TURNS = 254
"""Workers are told in one byte which part to step, and have two words of their own."""

Schedule = Literal["auto", "lockstep", "alternating", "first-come"]


@dataclass(frozen=True)
class HostConfig:
    """Settings that every host world has."""

    env_kwargs: Annotated[str, own_flag] = "{}"
    """Arguments that envs are made with, as JSON: '{"gravity": -5.0}'."""
    workers: Annotated[int, own_flag] = 0
    """Processes that step the envs, or threads of a native batch (0: one for each core)."""
    batch: Annotated[Literal["auto", "native", "processes", "serial"], own_flag] = "auto"
    """How envs are stepped: in a native batch, in worker processes, or in this process, for debugging
    (auto: native where the library has one, else processes)."""
    schedule: Annotated[Schedule, own_flag] = "auto"
    """Who waits for whom: everybody (lockstep), one part acts while the others step (alternating), or those that are
    done first are served first (first-come). auto measures and says what it chose."""
    turns: Annotated[int, own_flag] = 2
    """Parts that envs are split into, unless they are in lockstep: while the policy acts for one, the others step."""
    phase: Annotated[int, own_flag] = 64
    """Envs take up to so many random steps before training, so that their episodes do not end together."""
    patience: Annotated[float, own_flag] = 30.0
    """Seconds after which a worker that does not answer is killed and started anew."""
    restarts: Annotated[int, own_flag] = 3
    """How many times workers that raise, die or hang are started anew before the run stops."""
    pin: Annotated[bool, own_flag] = False
    """Keep every worker, or thread of a native batch, on a core of its own."""
    own_truncation: Annotated[bool, own_flag] = False
    """Envs of Gymnasium's registry truncate episodes by rules of their own too, not only at the registered limit."""
    render: Annotated[bool, tyro.conf.Suppress] = False
    """Make envs that can be looked at; recordings do."""

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
        for name in ("workers", "phase", "restarts"):
            if getattr(self, name) < 0:
                raise ShoalError(f"--{name} must not be negative, got {getattr(self, name)}.")
        for name, most in (("workers", MOST_THREADS), ("turns", MOST_TURNS)):
            if getattr(self, name) > most:
                raise ShoalError(f"--{name} must be at most {most}, got {getattr(self, name)}.")
        if self.turns < 2:
            raise ShoalError(f"--turns must be at least 2, got {self.turns}; without turns it is --schedule lockstep.")
        if self.patience <= 0:
            raise ShoalError(f"--patience must be above 0, got {self.patience}.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
