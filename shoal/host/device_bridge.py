"""Copies between the shared arrays of a host world and tensors on the device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shoal.core.graph import records
from shoal.core.world import Outputs
from shoal.host.episodes import Rows
from shoal.host.memory import SharedArrays

RewardTransform = Callable[[torch.Tensor], None]
"""Changes rewards in place."""


class DeviceBridge:
    """Copies actions of some rows to the shared arrays, and outputs back. The copies can be part of a CUDA graph."""

    def __init__(
        self,
        arrays: SharedArrays,
        groups: Sequence[str],
        device: torch.device,
        transform_reward: RewardTransform | None = None,
    ):
        """`transform_reward` changes the rewards that learners see."""
        self._arrays, self._groups, self._device = arrays, tuple(groups), device
        self._transform_reward = transform_reward
        self._tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.layout}
        """Views of the shared arrays."""
        self.uses_numpy = not records(device)
        """Whether NumPy copies rows. On a CPU torch would wake up its threads, which take cores from the envs."""
        self._registered = device.type == "cuda" and _register(arrays.buffer)
        """Whether the shared arrays are pinned memory."""
        self.can_record = self._registered or (device.type == "cpu" and records(device))
        """Whether graphs may contain the copies: from and to pinned memory alone."""

    def put_actions(self, actions: Mapping[str, torch.Tensor], rows: Rows) -> None:
        """Write actions [env, agent, ...] by group to rows of the shared arrays; from a GPU, to a range of rows."""
        for name, action in actions.items():
            if action.device.type == "cpu" and (self.uses_numpy or not isinstance(rows, slice)):
                self._arrays[f"{name}.action"][rows] = action.numpy()
            else:
                self._tensors[f"{name}.action"][rows].copy_(action, non_blocking=True)

    def write_rollout(self, rows: slice | torch.Tensor, into: Outputs, t: torch.Tensor | None = None) -> None:
        """Write the results of the last step of some rows: end flags, observations, rewards, alive flags.

        Args:
            rows: Range of envs, or their indices.
            into: Tensors [env, ...], or [step, env, ...] if `t` is given.
            t: Step of each of the rows.
        """
        source, target = self._indices(rows, t)
        self._copy(into.terminated, target, "terminated", source)
        self._copy(into.truncated, target, "truncated", source)
        self._copy_groups(("observation", "reward", "alive"), source, into, target)
        if self._transform_reward is None:
            return
        for out in into.groups.values():
            reward = out.reward[target]
            self._transform_reward(reward)
            if t is not None:
                out.reward[target] = reward

    def write_final(self, rows: Rows, into: Outputs) -> None:
        """Write the final observations and alive flags of some rows."""
        indices = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self._device)
        source, target = self._indices(indices)
        self._copy_groups(("final_observation", "final_alive"), source, into, target)

    def _indices(self, rows: slice | torch.Tensor, t: torch.Tensor | None = None) -> tuple[Any, Any]:
        """Indices into the shared arrays and into the outputs, as NumPy arrays if NumPy copies."""
        if isinstance(rows, slice):
            return rows, rows
        if self.uses_numpy:
            return rows.numpy(), rows.numpy() if t is None else (t.numpy(), rows.numpy())
        return rows, rows if t is None else (t, rows)

    def _copy_groups(self, names: tuple[str, ...], source: Any, into: Outputs, target: Any) -> None:
        for group in self._groups:
            for name in names:
                tensor = getattr(into.groups[group], name)
                if tensor is not None:
                    self._copy(tensor, target, f"{group}.{name}", source)

    def _copy(self, tensor: torch.Tensor, target: Any, name: str, source: Any) -> None:
        if self.uses_numpy and tensor.dtype != torch.bfloat16:
            tensor.numpy()[target] = self._arrays[name][source]
        elif isinstance(source, slice):
            tensor[target].copy_(self._tensors[name][source], non_blocking=True)
        else:
            # One copy of the whole array; rows of envs that are taking a step are not used.
            uploaded = self._tensors[name].to(self._device, non_blocking=True)
            tensor[target] = uploaded[source].to(tensor.dtype)

    def close(self) -> None:
        """Unpin the shared arrays."""
        if self._registered:
            self._registered = False
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._arrays.buffer.ctypes.data)


def _register(buffer: np.ndarray) -> bool:
    """Pin memory, so that the GPU copies from and to it without the host."""
    runtime: Any = torch.cuda.cudart()
    return int(runtime.cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0)) == 0
