"""The envs of a host world once they are made: a runner, the arrays it shares with its workers, episode records."""

import weakref
from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
import torch

from shoal.core.world import Outputs
from shoal.host.device_bridge import DeviceBridge, RewardTransform
from shoal.host.envs import HostGroup, layout_of
from shoal.host.episodes import EpisodeRecorder, Rows
from shoal.host.make_runner import RunnerSpec, make_runner
from shoal.host.memory import HOLD, RESET, RESTART, STEP, SharedArrays
from shoal.host.runners import VectorRunner


class HostVectorEnv:
    """Envs that can be stepped slice by slice; `env_slices` are numbered as in the runner."""

    def __init__(
        self,
        spec: RunnerSpec,
        host_groups: Sequence[HostGroup],
        device: torch.device,
        transform_reward: RewardTransform | None = None,
    ):
        n = spec.num_envs
        self.num_envs, self.host_groups = n, list(host_groups)
        self.arrays = SharedArrays({**layout_of(self.host_groups, n), "reset_only": ("bool", (n,))})
        for group in self.host_groups:
            self.arrays[f"{group.name}.alive"][...] = True
            self.arrays[f"{group.name}.final_alive"][...] = True
        self.episodes = EpisodeRecorder(self.arrays, {group.name: len(group.agents) for group in self.host_groups}, n)
        self.bridge = DeviceBridge(self.arrays, [group.name for group in self.host_groups], device, transform_reward)
        self.lost = np.zeros(n, dtype=bool)
        """[N]: whether the env was restarted after a fault in its last step, whose result is unknown."""
        self.runner = make_runner(spec, self.arrays)
        self._finalizer = weakref.finalize(self, _close, self.runner, self.bridge, self.arrays)

    @property
    def env_slices(self) -> list[slice]:
        """Rows of each env slice."""
        return self.runner.env_slices

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        self._finalizer()

    def send(self, slices: Sequence[int]) -> None:
        """Start a step of some env slices with the actions and commands in their rows."""
        self.runner.send(slices)

    def recv(self, slices: Collection[int], min_count: int) -> list[int]:
        """Wait until `min_count` of these env slices have finished; record their episodes and return which they are."""
        done = self.runner.wait(slices, min_count)
        rows = _rows([self.env_slices[index] for index in done])
        self.lost[rows] = False
        self._mark_lost(done)
        self.episodes.record_episodes(rows, self.lost)
        return done

    def collect_lost(self, slices: Collection[int]) -> None:
        """Mark env slices as lost whose worker failed after they were received and before they were written."""
        if self.runner.lost:
            self._mark_lost(slices)
            self.episodes.discard(self.lost)

    def _mark_lost(self, slices: Collection[int]) -> None:
        for index in self.runner.lost.intersection(slices):
            self.runner.lost.discard(index)
            self.lost[self.env_slices[index]] = True

    def write_final(self, rows: Rows, into: Outputs) -> None:
        """Write final observations to the device if any of the rows has ended an episode."""
        if self.episodes.ended[rows].any():
            self.bridge.write_final(rows, into)

    def truncated(self, rows: Rows) -> np.ndarray:
        """Mask of those rows whose last step truncated an episode."""
        return self.arrays["truncated"][rows] & ~(self.arrays["terminated"][rows] | self.lost[rows])

    def reset(self, seeds: np.ndarray) -> None:
        """Start an episode in all envs from their seeds [N]."""
        self.runner.reset_fault_count()
        self.arrays["seed"][:] = seeds
        self.arrays["command"][:] = RESET
        self._run()
        self.lost[:] = False
        self.episodes.discard(slice(None))

    def restart(self, mask: np.ndarray) -> None:
        """Start a new episode in the envs of `mask` [N]; the others keep their state."""
        self.arrays["command"][:] = np.where(mask, RESTART, HOLD)
        self._run()
        self.episodes.discard(mask)

    def hold(self, mask: np.ndarray) -> None:
        """In the next step, leave the envs of `mask` [N] as they are."""
        self.arrays["command"][:] = np.where(mask, HOLD, STEP)

    def release(self) -> None:
        """End `hold`."""
        self.arrays["command"][:] = STEP

    def desync(self, seed: int, first_env: int, max_steps: int) -> None:
        """Take 0 to `max_steps` random steps in each env, drawn from its own generator.

        Args:
            seed: Seed of the run.
            first_env: Global index of env 0.
            max_steps: Maximum number of steps.
        """
        generators = [np.random.default_rng((seed, first_env + env, 1)) for env in range(self.num_envs)]
        steps = np.array([g.integers(0, max_steps + 1) for g in generators])
        drawn = {
            t.name: np.stack([t.action.draw(g, len(t.agents) * max_steps) for g in generators])
            for t in self.host_groups
        }
        can_hold = self.runner.can_hold
        for t in range(max_steps):
            for group in self.host_groups:
                rows = slice(t * len(group.agents), (t + 1) * len(group.agents))
                self.arrays[f"{group.name}.action"][...] = drawn[group.name][:, rows]
            # A native batch cannot hold envs: all of them move, and each restarts before the first of its drawn steps.
            self.arrays["command"][:] = np.where(steps > t, STEP, HOLD) if can_hold else STEP
            self._run()
            starts = steps == max_steps - t - 1
            if not can_hold and not self.runner.has_reset_only_step and starts.any():
                self.restart(starts)

    def forget_ends(self) -> None:
        """Drop all finished episodes and end flags, so that training starts without any."""
        self.episodes.clear()
        self.arrays["terminated"][:] = self.arrays["truncated"][:] = False

    def _run(self) -> None:
        """Run the commands of all envs."""
        everything = range(len(self.env_slices))
        self.send(everything)
        self.recv(everything, len(everything))
        self.arrays["command"][:] = STEP


def env_seeds(seed: int, first_env: int, count: int) -> np.ndarray:
    """A seed for every env [count] that depends on the run's seed and the env's global index alone."""
    return (np.int64(seed) * 1_000_003 + np.arange(first_env, first_env + count)) % 2**31


def _rows(ranges: Sequence[slice]) -> Rows:
    """Ranges in ascending order as one slice if they are contiguous, else as indices."""
    if all(a.stop == b.start for a, b in pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return np.concatenate([np.arange(rows.start, rows.stop) for rows in ranges])


def _close(runner: VectorRunner, bridge: DeviceBridge, arrays: SharedArrays) -> None:
    runner.close()
    bridge.close()
    arrays.close()
