"""Wrappers around any world. They run torch operations on the device, so a wrapped rollout is still one CUDA graph."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from shoal.core.errors import ShoalError
from shoal.core.spaces import Box
from shoal.core.world import EpisodeStatistics, Group, GroupOutputs, LastEpisode, Outputs, TrajectoryRecorder, World


class Wrapper(World):
    """Passes everything through. Subclasses override `_emit` (the outputs of a step) or `step`."""

    def __init__(self, world: World):
        self.world = world
        self.name = world.name
        self.num_envs = world.num_envs
        self.device = world.device
        self.layout = world.layout
        self.picture_size, self.picture_rate = world.picture_size, world.picture_rate
        self.handles_settings, self.resumable, self.on_device = world.handles_settings, world.resumable, world.on_device
        self.reuse_eval_world, self.unsharded_state = world.reuse_eval_world, world.unsharded_state
        self.groups = tuple(self._group(g) for g in world.groups)
        self._own: Outputs | None = None
        self._depth: int = world._depth + 1 if isinstance(world, Wrapper) else 1

    def _group(self, group: Group) -> Group:
        """The group after wrapping; overridden where its spaces change."""
        return group

    def _emit(self, inner: Outputs, out: Outputs, started: torch.Tensor, held: torch.Tensor | None) -> None:
        """Write the wrapper's outputs. `started` [env]: a new episode has begun; `held` [env]: the env did not step."""
        _copy(inner, out)

    def prepare(self, seed: int) -> None:
        self.world.prepare(seed)

    def reset(self, seed: int = 0, first_env: int = 0) -> Outputs:
        inner = self.world.reset(seed, first_env)
        self._allocate(inner)
        self.outputs = self._own_outputs
        self._emit(inner, self.outputs, torch.ones_like(inner.terminated), None)
        return self.outputs

    def step(
        self,
        actions: torch.Tensor | Mapping[str, torch.Tensor],
        into: Outputs | None = None,
        hold: torch.Tensor | None = None,
    ) -> Outputs:
        inner = self.world.step(actions, hold=hold)
        started = inner.terminated | inner.truncated
        if hold is not None:
            started = started & ~hold
        self.outputs = into or self._own_outputs
        self._emit(inner, self.outputs, started, hold)
        return self.outputs

    def restart(self, mask: torch.Tensor) -> None:
        kept = [(tensor, tensor.clone()) for tensor in _results(self.outputs)]
        self.world.restart(mask)
        self._emit(self.world.outputs, self.outputs, mask, ~mask)
        for tensor, before in kept:  # a restart leaves the results of the last step
            tensor.copy_(before)

    def between_rollouts(self) -> None:
        self.world.between_rollouts()

    def close(self) -> None:
        self.world.close()

    @property
    def _own_outputs(self) -> Outputs:
        if self._own is None:
            raise ShoalError(f"{self.name}: step() before reset(); call reset(seed) first.")
        return self._own

    def _allocate(self, inner: Outputs) -> None:
        if self._own is not None:
            return
        groups = {}
        for g in self.groups:
            source = inner.groups[g.name]
            shape = (self.num_envs, g.agents, *g.observation.shape)
            observation = torch.zeros(shape, dtype=g.observation.dtype, device=self.device)
            others = {k: v.clone() for k, v in vars(source).items() if v is not None and "observation" not in k}
            groups[g.name] = GroupOutputs(observation=observation, final_observation=observation.clone(), **others)
        self._own = Outputs(inner.terminated.clone(), inner.truncated.clone(), groups)

    def statistics(self) -> EpisodeStatistics:
        return self.world.statistics()

    def last_episode(self) -> LastEpisode:
        return self.world.last_episode()

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The wrapper's state between steps."""
        return {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {**self.world.state_dict(), **self._own_state()}

    def _own_state(self) -> dict[str, torch.Tensor]:
        """The wrapper's state and outputs, under names that are unique among nested wrappers."""
        prefix = f"{type(self).__name__}{self._depth}"
        state = {f"{prefix}.{name}": tensor for name, tensor in self._buffers().items()}
        for name, out in self.outputs.groups.items():
            tensors = {k: v for k, v in vars(out).items() if v is not None}
            state.update({f"{prefix}.{name}.{k}": v for k, v in tensors.items()})
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.world.load_state_dict(state)
        inner = self.world.outputs
        self._allocate(inner)
        self.outputs = self._own_outputs
        if self.resumable:
            for name, tensor in self._own_state().items():
                tensor.copy_(state[name])
            return
        for tensor in self._buffers().values():  # the inner world has begun new episodes
            tensor.zero_()
        self._emit(inner, self.outputs, torch.ones_like(inner.terminated), None)

    @property
    def time_limit(self) -> int | None:
        return self.world.time_limit

    @property
    def bytes_per_env(self) -> int:
        own = sum(t.nbytes for t in self._buffers().values())
        for group in self._own.groups.values() if self._own else ():
            own += sum(t.nbytes for t in vars(group).values() if t is not None)
        return self.world.bytes_per_env + own // self.num_envs

    def picture(self, canvas, env: int) -> None:
        self.world.picture(canvas, env)

    def record_frame(self, memory: dict[str, Any], env: int) -> None:
        self.world.record_frame(memory, env)

    def scenes_of_envs(self) -> list[str] | None:
        return self.world.scenes_of_envs()

    def duplicate_episodes(self) -> torch.Tensor | None:
        return self.world.duplicate_episodes()

    def trajectory_recorder(self, envs: int) -> TrajectoryRecorder:
        return self.world.trajectory_recorder(envs)

    @property
    def drawable(self) -> bool:
        return self.world.drawable


class TransformReward(Wrapper):
    """Applies a function to the reward tensor: `TransformReward(world, torch.sign)`. Statistics do not change."""

    def __init__(self, world: World, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(world)
        self.function = function

    def _emit(self, inner, out, started, held):
        _copy(inner, out)
        for name, group in out.groups.items():
            group.reward.copy_(self.function(inner.groups[name].reward))


class TransformObservation(Wrapper):
    """Applies a function to the observation tensor [env, agent, ...]; give `space` if the shape or type changes."""

    def __init__(self, world: World, function: Callable[[torch.Tensor], torch.Tensor], space: Box | None = None):
        self.function = function
        self.space = space
        super().__init__(world)

    def _group(self, group: Group) -> Group:
        return group if self.space is None else replace(group, observation=self.space)

    def _emit(self, inner, out, started, held):
        _copy(inner, out, leave=OBSERVATIONS)
        for name, group in out.groups.items():
            group.observation.copy_(self.function(inner.groups[name].observation))
            if group.final_observation is not None:
                final = inner.groups[name].final_observation
                assert final is not None
                group.final_observation.copy_(self.function(final))


class CastObservation(Wrapper):
    """Casts float32 observations to float16 or bfloat16: half the memory of a rollout, relative error 2^-11 or 2^-8."""

    def __init__(self, world: World, dtype: torch.dtype):
        self.dtype = dtype
        super().__init__(world)

    def _group(self, group: Group) -> Group:
        if group.observation.dtype != torch.float32:
            return group
        return replace(group, observation=replace(group.observation, dtype=self.dtype))


class Apply(Wrapper):
    """`Apply(world, fn)`: `fn(outputs)` changes the outputs of a step in place, with torch operations."""

    def __init__(self, world: World, function: Callable[[Outputs], None]):
        super().__init__(world)
        self.function = function

    def _emit(self, inner, out, started, held):
        _copy(inner, out)
        self.function(out)


class FrameStack(Wrapper):
    """Gives policies the last `frames` observations (`Group.stack`), multiplied by the stack of the inner world.

    Policies and learners join the observations. The world outputs each one once, so steps pass through unchanged.
    """

    def __init__(self, world: World, frames: int):
        if frames < 1:
            raise ShoalError(f"FrameStack needs at least one frame, got {frames}.")
        self.frames = frames
        super().__init__(world)

    def _group(self, group: Group) -> Group:
        return replace(group, stack=group.stack * self.frames)

    def reset(self, seed: int = 0, first_env: int = 0) -> Outputs:
        self.outputs = self.world.reset(seed, first_env)
        return self.outputs

    def step(self, actions, into=None, hold=None):
        self.outputs = self.world.step(actions, into, hold)
        return self.outputs

    def restart(self, mask: torch.Tensor) -> None:
        self.world.restart(mask)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.world.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.world.load_state_dict(state)
        self.outputs = self.world.outputs


class ActionRepeat(Wrapper):
    """Repeats each action `times` times, or until the episode ends, and sums the rewards."""

    def __init__(self, world: World, times: int):
        if times < 1:
            raise ShoalError(f"ActionRepeat needs at least one repetition, got {times}.")
        for g in world.groups:
            if g.action_interval > 1 and g.action_interval % times:
                raise ShoalError(
                    f"Group {g.name!r} acts every {g.action_interval} steps, no multiple of {times} repetitions."
                )
        super().__init__(world)
        self.times = times

    @property
    def time_limit(self) -> int | None:
        limit = self.world.time_limit
        return None if limit is None else -(-limit // self.times)

    def step(self, actions, into=None, hold=None):
        self.outputs = out = into or self._own_outputs
        waits = torch.zeros_like(out.terminated) if hold is None else hold.clone()
        rewards: dict[str, Any] = {g.name: 0.0 for g in self.groups}
        terminated = truncated = torch.zeros_like(waits)
        for i in range(self.times):
            inner = self.world.step(actions, hold=waits if i or hold is not None else None)
            for name in rewards:
                reward = inner.groups[name].reward
                rewards[name] = rewards[name] + torch.where(_like(waits, reward), 0.0, reward)
            terminated = terminated | (inner.terminated & ~waits)
            truncated = truncated | (inner.truncated & ~waits)
            waits = waits | terminated | truncated
        _copy(self.world.outputs, out)
        out.terminated.copy_(terminated)
        out.truncated.copy_(truncated)
        for name, reward in rewards.items():
            out.groups[name].reward.copy_(reward)
        return out


class TimeLimit(Wrapper):
    """Truncates an episode after `steps` steps; the final observation is that of the last step."""

    def __init__(self, world: World, steps: int):
        if steps < 1:
            raise ShoalError(f"TimeLimit needs at least one step, got {steps}.")
        super().__init__(world)
        self.steps = steps
        self.count = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {"count": self.count}

    @property
    def time_limit(self) -> int | None:
        own = self.world.time_limit
        return None if own is None else min(own, self.steps)

    def reset(self, seed: int = 0, first_env: int = 0) -> Outputs:
        self.count.zero_()
        return super().reset(seed, first_env)

    def restart(self, mask: torch.Tensor) -> None:
        super().restart(mask)
        self.count.masked_fill_(mask, 0)

    def step(self, actions, into=None, hold=None):
        self.outputs = out = into or self._own_outputs
        inner = self.world.step(actions, hold=hold)
        moved = torch.ones_like(inner.terminated) if hold is None else ~hold
        self.count += moved
        ended = (inner.terminated | inner.truncated) & moved
        expired = (self.count >= self.steps) & moved
        only_expired = expired & ~ended
        for name, group in out.groups.items():
            source = inner.groups[name]
            for item in FINALS:
                target, now = getattr(group, item), getattr(source, item.removeprefix("final_"))
                if target is not None:
                    final = torch.where(_like(only_expired, now), now, getattr(source, item))
                    _copy_moved(final, target, hold)
        truncated = inner.truncated | expired
        self.world.restart(only_expired)
        _copy(self.world.outputs, out, leave=FINALS)
        out.truncated.copy_(truncated)
        self.count.masked_fill_(ended | expired, 0)
        return out


def _like(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Flags [env], shaped to broadcast over a tensor [env, ...]."""
    return flags.view(-1, *[1] * (tensor.ndim - 1))


def _results(out: Outputs) -> list[torch.Tensor]:
    """Outputs that describe the last step and not the current state: end flags, rewards, final observations."""
    groups = [t for g in out.groups.values() for t in (g.reward, g.final_observation, g.final_alive) if t is not None]
    return [out.terminated, out.truncated, *groups]


def _copy_moved(source: torch.Tensor, target: torch.Tensor, held: torch.Tensor | None) -> None:
    """Copy the rows of envs that are not held."""
    target.copy_(source if held is None else torch.where(_like(held, target), target, source))


OBSERVATIONS = ("observation", "final_observation")
FINALS = ("final_observation", "final_alive")


def _copy(inner: Outputs, out: Outputs, leave: tuple[str, ...] = ()) -> None:
    """Copy the outputs of the inner world, except the fields in `leave`."""
    out.terminated.copy_(inner.terminated)
    out.truncated.copy_(inner.truncated)
    for name, group in out.groups.items():
        for item, tensor in vars(group).items():
            if tensor is not None and item not in leave:
                tensor.copy_(getattr(inner.groups[name], item))
