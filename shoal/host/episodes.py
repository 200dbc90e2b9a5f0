"""Lengths and returns of the episodes of a host world, recorded per env with NumPy."""

from collections.abc import Mapping

import numpy as np
import torch

from shoal.core.world import EpisodeStatistics, LastEpisode
from shoal.host.memory import STEP, SharedArrays

Rows = slice | np.ndarray
"""Some envs: a range, or their indices."""


class EpisodeRecorder:
    """Adds up steps and rewards of the current episode of each env, and totals over finished episodes."""

    def __init__(self, arrays: SharedArrays, agents: Mapping[str, int], num_envs: int):
        """`agents` is the number of agents of each group."""
        self._arrays = arrays
        self._env_ids = np.arange(num_envs)
        self.ended = np.zeros(num_envs, dtype=bool)
        """[N]: whether the last step ended an episode."""
        self.length = np.zeros(num_envs, dtype=np.int64)
        """[N]: steps of the current episode."""
        self._episodes, self._length_sum, self._last_length = (np.zeros(num_envs, dtype=np.int64) for _ in range(3))
        self._return = {name: np.zeros((num_envs, count)) for name, count in agents.items()}
        self._return_sum = {name: np.zeros(num_envs) for name in agents}
        self._last_return = {name: np.zeros(num_envs) for name in agents}

    def record_episodes(self, rows: Rows, lost: np.ndarray) -> None:
        """Record the last step of some rows; `lost` [N] marks envs that were restarted after a fault."""
        arrays = self._arrays
        ended = arrays["terminated"][rows] | arrays["truncated"][rows]
        if any(np.count_nonzero(flags) for flags in (arrays["command"], arrays["reset_only"], lost)):
            ended &= self._add_transitions(rows, lost)
        else:
            self.length[rows] += 1
            for name, total in self._return.items():
                total[rows] += arrays[f"{name}.reward"][rows]
        self.ended[rows] = ended
        if not np.count_nonzero(ended):
            return
        envs = self._env_ids[rows][ended]
        self._episodes[envs] += 1
        self._length_sum[envs] += self.length[envs]
        self._last_length[envs] = self.length[envs]
        for name, total in self._return.items():
            self._last_return[name][envs] = total[envs].mean(axis=1)
            self._return_sum[name][envs] += self._last_return[name][envs]
        self.discard(envs)

    def _add_transitions(self, rows: Rows, lost: np.ndarray) -> np.ndarray:
        """Add the step of those envs that made a transition: not held, restarted, lost or reset only. Return which."""
        arrays = self._arrays
        moved = ~((arrays["command"][rows] != STEP) | arrays["reset_only"][rows] | lost[rows])
        self.length[rows] += moved
        for name, total in self._return.items():
            total[rows] += np.where(moved[:, None], arrays[f"{name}.reward"][rows], 0.0)
        self.discard(lost)
        return moved

    def discard(self, envs: Rows) -> None:
        """Forget the current episode of some envs, which did not end."""
        self.length[envs] = 0
        for total in self._return.values():
            total[envs] = 0.0

    def clear(self) -> None:
        """Forget all finished episodes."""
        for array in (self._episodes, self._length_sum, self._last_length):
            array[:] = 0
        for array in (*self._return_sum.values(), *self._last_return.values()):
            array[:] = 0.0
        self.ended[:] = False

    def statistics(self) -> EpisodeStatistics:
        """Totals over finished episodes [N], which share memory with the recorder's."""
        return EpisodeStatistics(
            torch.from_numpy(self._episodes),
            {name: torch.from_numpy(total) for name, total in self._return_sum.items()},
            torch.from_numpy(self._length_sum),
            {},
        )

    def last_episode(self, device: torch.device) -> LastEpisode:
        """Return and length of the last finished episode of each env [N]."""
        returns = {name: torch.from_numpy(last).float().to(device) for name, last in self._last_return.items()}
        return LastEpisode(returns, torch.from_numpy(self._last_length).to(device), {})
