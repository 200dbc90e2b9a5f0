"""Acting together for envs at different steps of a rollout: inputs are gathered by index, outputs scattered."""

from typing import Any

import numpy as np
import torch

from shoal.core.graph import Graphed, records
from shoal.training.row_collector import RowCollector


class GatheredActing:
    """Acts for env slices at different steps at once.

    One graph serves every choice of slices, so the number of rows is fixed. Missing rows repeat the last one, which
    writes the same values again.
    """

    def __init__(self, collector: RowCollector, most: int):
        """`most` is the maximum number of env slices at once."""
        self.collector = collector
        device, slices = collector.world.device, collector.world.started().env_slices
        self._rows = [np.arange(rows.start, rows.stop) for rows in slices]
        self._sizes = np.array([rows.stop - rows.start for rows in slices])
        size = int(np.sort(self._sizes)[-most:].sum())
        self._wanted = torch.zeros(2, size, dtype=torch.int64, pin_memory=device.type == "cuda")
        """[2, size] on the host: steps and envs."""
        self._indices = self._wanted.to(device)
        """[2, size]: the same on the device; on a CPU the same tensor."""
        self._buffers = [PolicyBuffers(collector, name, size) for name in collector.policies]
        self._graph = Graphed(self._write_and_act, device, collector.use_graphs, collector.pool)

    def __call__(self, slices: list[int], at: np.ndarray) -> None:
        """Write the last step of these env slices, and choose their actions at steps `at`."""
        collector, wanted = self.collector, self._wanted.numpy()
        steps, envs = np.repeat(at, self._sizes[slices]), np.concatenate([self._rows[index] for index in slices])
        count = len(envs)
        wanted[0, :count], wanted[1, :count] = steps, envs
        if count < wanted.shape[1]:
            wanted[:, count:] = wanted[:, count - 1 : count]
        begun = steps > 0
        before, stepped = (steps - 1, envs) if begun.all() else ((steps - 1)[begun], envs[begun])
        lost = collector.record_ends(before, stepped)
        if lost is None and stepped is envs:
            self._graph()
        else:
            self._upload()
            if len(stepped):
                collector.write_steps(before, stepped, lost)
            self._act()
        collector.world.wait_for_actions()
        bridge = collector.world.started().bridge
        for buffers in self._buffers:
            bridge.put_actions({group: action[:count] for group, action in buffers.actions.items()}, envs)

    def _write_and_act(self) -> None:
        self._upload()
        t, envs = self._indices
        self.collector.write_gathered(t - 1, envs)
        self._act()

    def _upload(self) -> None:
        self._indices.copy_(self._wanted, non_blocking=True)

    def _act(self) -> None:
        t, envs = _array(self._indices)
        for buffers in self._buffers:
            buffers.act(t, envs)


class PolicyBuffers:
    """Inputs and outputs of one policy for `size` envs, and copies from and to its rollout."""

    def __init__(self, collector: RowCollector, name: str, size: int):
        self.collector, self.name = collector, name
        r = collector.rollouts[name]
        self.memory = [
            None if view is None else torch.zeros_like(view) for view in collector.views(name, 0, slice(0, size))
        ]
        frames, age, state, mask, noise, action, log_prob, value, world_action = self.memory
        noise = None if noise is None else noise.unflatten(0, (size, -1))
        rnn_state = None if r.rnn_state is None else r.rnn_state[-1]
        self.frame_offsets = _array(torch.arange(r.stack, device=r.observation.device).unsqueeze(1))
        self.frames = _pairs((frames, r.observation))
        self.inputs = _pairs((age, r.age), (mask, r.action_mask), (noise, collector.noise_by_env(name)))
        self.outputs = _pairs((action, r.action), (log_prob, r.log_prob), (value, r.value))
        self.state = _pairs((state, rnn_state))
        chosen = action if world_action is None else world_action
        assert chosen is not None
        self.chosen = chosen
        self.host = torch.zeros_like(chosen, device="cpu", pin_memory=True) if chosen.is_cuda else chosen
        self.actions = {group: self.host[:, agents] for group, agents in collector.agents_by_group(name).items()}
        """Actions for the world on the host, by group."""

    def act(self, t: Any, envs: Any) -> None:
        """Gather the policy's inputs at steps t of these envs, let it act, and scatter its outputs."""
        for own, rows in self.frames:
            own[...] = rows[t + self.frame_offsets, envs]
        for own, rows in self.inputs:
            own[...] = rows[t, envs]
        for own, rows in self.state:
            own[...] = rows[envs]
        self.collector.act_gathered(self.name, self.memory)
        for own, rows in self.outputs:
            rows[t, envs] = own
        for own, rows in self.state:
            rows[envs] = own
        self.host.copy_(self.chosen, non_blocking=True)


def _pairs(*pairs: tuple[torch.Tensor | None, torch.Tensor | None]) -> list[tuple[Any, Any]]:
    """The pairs without None, as what `_array` gives."""
    return [(_array(own), _array(rows)) for own, rows in pairs if own is not None and rows is not None]


def _array(tensor: torch.Tensor) -> Any:
    """A tensor to index; on a CPU as a NumPy array, which is faster and uses no other threads."""
    if records(tensor.device):
        return tensor
    # NumPy has no bfloat16; its bits are copied as int16.
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
