"""Acting for some envs of a host world at some steps of a rollout, and writing the results of their steps to it."""

from collections.abc import Callable

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.core.graph import Graphed
from shoal.host.world import HostWorld
from shoal.learn.rollout import stacked
from shoal.training.collector import Collector

StepsOfEnvs = tuple[np.ndarray, np.ndarray]
"""Pairs of a step of the rollout and an env, as two arrays of the same length."""


def _nothing() -> None:
    pass


class RowCollector(Collector):
    """Fills rollouts row by row: a schedule decides for which envs, and when. Base of HostCollector."""

    world: HostWorld

    def __init__(self, *args, graph: bool = True, **kwargs):
        super().__init__(*args, **kwargs)
        self.refresh_weights: Callable[[], None] = _nothing
        """Called before the policies act, so that they may get newer weights in the middle of a rollout."""
        envs = self.world.vector_env
        self.use_graphs = graph and len(envs.env_slices) > 0 and envs.bridge.can_record
        device = self.world.device
        self.pool = torch.cuda.graph_pool_handle() if self.use_graphs and device.type == "cuda" else None
        """Memory of the graphs, of which one runs at a time."""
        self._graphs: dict[tuple[int, int, int, bool], Graphed] = {}
        """(first env, end, step, last) -> what the device does for them."""
        self._all_rows = self._row(slice(None))
        self.all_envs = np.arange(self.world.num_envs)
        self._num_final = np.zeros(self.world.num_envs, dtype=np.int64)
        """[N]: final observations that each env has stored in this rollout."""

    def _plan_finals(self) -> list:
        """Nothing: the host knows which episodes were truncated, and stores their final observations alone."""
        return []

    def act_in_range(self, part: range, t: int, last: bool) -> None:
        """Write step t - 1 of a range of env slices; unless t is the `last`, choose their actions at step t.

        The device's work is the same for step t of every rollout, and recorded as a graph.
        """
        slices = self.world.started().env_slices
        rows = slice(slices[part[0]].start, slices[part[-1]].stop)
        lost = self.record_ends(t - 1, rows) if t else None
        key = (rows.start, rows.stop, t, last)
        if key not in self._graphs:
            self._graphs[key] = Graphed(
                lambda: self._write_and_act(t, rows, last), self.world.device, self.use_graphs, self.pool
            )
        if lost is None:
            self._graphs[key]()
        else:
            self._write_and_act(t, rows, last, lost)

    def _write_and_act(self, t: int, rows: slice, last: bool, lost: StepsOfEnvs | None = None) -> None:
        if t:
            self._write(t - 1, rows, lost)
        if not last:
            for name in self.policies:
                with torch.no_grad():
                    self._act(self.policies[name], *self.views(name, t, rows))
            self.world.started().bridge.put_actions(self._actions(t, rows), rows)

    def act_gathered(self, name: str, memory: list[torch.Tensor | None]) -> None:
        """Let a policy act on tensors shaped like those of `views`."""
        with torch.no_grad():
            self._act(self.policies[name], *memory)

    def views(self, name: str, t: int, rows: slice) -> tuple[torch.Tensor | None, ...]:
        """What a policy reads and writes at step t of some envs: views of its rollout."""
        r = self.rollouts[name]
        frames, age = r.window(t)
        world_action = self._world_action.get(name)
        return (
            frames[:, rows],
            None if age is None else age[:, rows],
            None if r.rnn_state is None else r.rnn_state[-1][rows],
            None if r.action_mask is None else r.action_mask[t][rows],
            self.noise_by_env(name)[t, rows].flatten(0, 1),
            r.action[t][rows],
            r.log_prob[t][rows],
            r.value[t][rows] if r.has_values else None,
            None if world_action is None else world_action[rows],
        )

    def noise_by_env(self, name: str) -> torch.Tensor:
        """[T, N, A, width]"""
        return self._noise[name].unflatten(1, (self.world.num_envs, -1))

    def agents_by_group(self, name: str) -> dict[str, slice]:
        """The agents of each group along the agent axis of a policy's rollout."""
        return self._slots[name]

    def _actions(self, t: int, rows: slice) -> dict[str, torch.Tensor]:
        """Actions of some envs at step t, by group."""
        actions = {}
        for name, slots in self._slots.items():
            chosen = self._world_action.get(name)
            chosen = self.rollouts[name].action[t] if chosen is None else chosen
            actions.update({group: chosen[rows, agents] for group, agents in slots.items()})
        return actions

    def record_ends(self, t: int | np.ndarray, rows: slice | np.ndarray) -> StepsOfEnvs | None:
        """Store the final observations of episodes that step t of these envs truncated; return envs lost in it."""
        envs = self.world.started()
        truncated, lost = envs.truncated(rows), envs.lost[rows]
        if np.count_nonzero(truncated):
            steps, ended = self._select(t, rows, truncated)
            envs.write_final(ended, self._all_rows)
            for name in self.rollouts:
                self._store_final(name, steps, ended)
            self._num_final[ended] += 1
        return self._select(t, rows, lost) if np.count_nonzero(lost) else None

    def _select(self, t: int | np.ndarray, rows: slice | np.ndarray, mask: np.ndarray) -> StepsOfEnvs:
        """Steps and envs of the rows in a mask."""
        envs = self.all_envs[rows]
        return np.broadcast_to(t, envs.shape)[mask], envs[mask]

    def write_steps(self, steps: np.ndarray, envs: np.ndarray, lost: StepsOfEnvs | None) -> None:
        """Write the results of the last step of some envs, each at its own step of the rollout."""
        t, rows = torch.from_numpy(np.stack([steps, envs])).to(self.world.device)
        self._write(t, rows, lost)

    def write_gathered(self, t: torch.Tensor, envs: torch.Tensor) -> None:
        """The same for tensors on the device, if no env was lost; a graph can record it."""
        self._write(t, envs)

    def _write(self, t: int | torch.Tensor, rows: slice | torch.Tensor, lost: StepsOfEnvs | None = None) -> None:
        envs = self.world.started()
        if isinstance(t, torch.Tensor):
            envs.bridge.write_rollout(rows, self._all_rows, t)
        else:
            envs.bridge.write_rollout(rows, self._rows[t])
        if lost is not None:
            self._drop(*lost)
        for rollout in self.rollouts.values():
            rollout.update_ages(t, rows, envs.runner.has_reset_only_step)

    def _store_final(self, name: str, steps: np.ndarray, envs: np.ndarray) -> None:
        """Put final observations into the next free slot of each env that was truncated in its step."""
        rollout, slots = self.rollouts[name], self._num_final[envs]
        if slots.max() >= rollout.final_observation.shape[0]:
            raise ShoalError(
                f"{self.world.name}: env {envs[slots.argmax()]} was truncated {slots.max() + 1} times within "
                f"{self.steps} steps, more often than its time limit of {self.world.time_limit} steps allows; "
                "if the env truncates episodes itself, use --env-truncates."
            )
        t, where, slot = torch.from_numpy(np.stack([steps, envs, slots])).to(self.world.device)
        place = slot, where
        stack, final = rollout.stack, self._final[name][where].unsqueeze(0)
        age = None
        if rollout.age is not None:
            age = (rollout.age[t, where] + 1).clamp(max=stack - 1).unsqueeze(0)
            before = t + torch.arange(1, stack, device=t.device).unsqueeze(1)
            final = torch.cat([rollout.observation[before, where], final])
        stored = rollout.final_observation
        stored[place] = stacked(final, age).view(len(envs), *stored.shape[2:])
        if rollout.final_alive is not None:
            rollout.final_alive[place] = self._final_alive[name][where]
        if rollout.rnn_state is not None and rollout.final_state is not None:
            rollout.final_state[place] = rollout.rnn_state[-1][where]

    def _drop(self, steps: np.ndarray, envs: np.ndarray) -> None:
        """Exclude the last episode of envs that were lost in these steps from losses, statistics and normalizers."""
        for rollout in self.rollouts.values():
            for t, env in zip(steps.tolist(), envs.tolist(), strict=True):
                ends = (rollout.terminated[:t, env] | rollout.truncated[:t, env]).cpu().numpy()
                first = int(ends.nonzero()[0][-1]) + 1 if ends.any() else 0
                if rollout.alive is not None:
                    rollout.alive[first : t + 1, env] = False
                rollout.terminated[t, env] = True
                rollout.truncated[t, env] = False
                rollout.reward[t, env] = 0.0
