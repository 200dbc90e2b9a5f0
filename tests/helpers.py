"""Tiny worlds for tests, and their slow references in plain Python."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import warp as wp

from shoal.core import Box, Discrete, Field, Group, KernelWorld, World
from shoal.learn.rollout import Rollout, allocate

# --- Counting: a world whose numbers are known in advance ----------------------------------------------------------


@wp.func
def count(
    env: int,
    env_id: wp.array[int],
    episode: wp.array[int],
    action: wp.array[int],
    clock: wp.array[int],
    reward: wp.array[float],
    terminated: wp.array[wp.bool],
):
    clock[env] = clock[env] + 1
    reward[env] = float(clock[env] + 10 * action[env])
    terminated[env] = clock[env] == 1 + (3 * env_id[env] + 5 * episode[env]) % 7


@wp.func
def count_from_zero(env: int, clock: wp.array[int]):
    clock[env] = 0


@wp.func
def show_count(
    env: int,
    env_id: wp.array[int],
    episode: wp.array[int],
    clock: wp.array[int],
    observation: wp.array2d[float],
):
    observation[env, 0] = float(clock[env])
    observation[env, 1] = float(1000 * env_id[env] + episode[env])


class Counting(KernelWorld):
    """Observation: step, 1000 env + episode. Reward: step + 10 action. Ends after 1 to 7 steps, by env and episode."""

    @dataclass(frozen=True)
    class Config:
        max_steps: int = 5

    state = dict(clock=Field(int, unit="steps"))
    groups = (Group("counter", observation=Box(2), action=Discrete(3)),)
    step, reset, observe = count, count_from_zero, show_count


class CountingReference:
    """One env of Counting, in plain Python."""

    def __init__(self, env_id: int, max_steps: int = 5):
        self.env_id, self.max_steps = env_id, max_steps
        self.episode, self.clock = -1, 0

    def see(self) -> np.ndarray:
        return np.array([self.clock, 1000 * self.env_id + self.episode], np.float32)

    def reset(self) -> np.ndarray:
        self.episode, self.clock = self.episode + 1, 0
        return self.see()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool]:
        self.clock += 1
        terminated = self.clock == 1 + (3 * self.env_id + 5 * self.episode) % 7
        return self.see(), self.clock + 10.0 * action, terminated, self.clock >= self.max_steps


# --- playing worlds and references ----------------------------------------------------------------------------------


@dataclass
class Record:
    """A played rollout: first observation [N, ...], then per step [T, N, ...]; final observations only at ends."""

    first: np.ndarray
    observation: np.ndarray
    final: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


def play_references(envs: list[Any], actions: np.ndarray) -> Record:
    """Step single-env references one by one; an env that ends restarts in the same step."""
    first = [env.reset() for env in envs]
    rows = []
    for row in actions:
        cells = []
        for env, action in zip(envs, row, strict=True):
            seen, reward, terminated, truncated = env.step(int(action))
            final = np.full_like(seen, np.nan)
            if terminated or truncated:
                final, seen = seen, env.reset()
            cells.append((seen, final, reward, terminated, truncated))
        rows.append([np.stack(parts) for parts in zip(*cells, strict=True)])
    return Record(np.stack(first), *(np.stack(parts) for parts in zip(*rows, strict=True)))


def play_world(world: World, actions: np.ndarray, seed: int | None = 0) -> Record:
    """Step a world of one group with one agent; with `seed` None, continue from its state."""
    name = world.groups[0].name
    outputs = world.outputs if seed is None else world.reset(seed)
    first = outputs.groups[name].observation[:, 0].numpy().copy()
    rows = []
    for row in actions:
        out = world.step(torch.as_tensor(row)[:, None])
        group = out.groups[name]
        final = group.final_observation[:, 0].numpy().astype(np.float32)
        ended = (out.terminated | out.truncated).numpy()
        final[~ended] = np.nan
        parts = (group.observation[:, 0], final, group.reward[:, 0], out.terminated, out.truncated)
        rows.append([np.asarray(part).copy() for part in parts])
    return Record(first, *(np.stack(parts) for parts in zip(*rows, strict=True)))


def assert_same(one: Record, other: Record, steps_only: bool = False) -> None:
    """Fail unless both records have exactly the same numbers (`steps_only`: except the first observation)."""
    for name in list(vars(one))[steps_only:]:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def random_actions(steps: int, envs: int, choices: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, choices, (steps, envs), dtype=np.int32)


def saved(thing: Any) -> dict[str, torch.Tensor]:
    """A copy of a state_dict."""
    return {name: tensor.clone() for name, tensor in thing.state_dict().items()}


def kernel_results(function: Any, make: Callable[[int], Any], *inputs: np.ndarray) -> np.ndarray:
    """Launch a kernel `(inputs..., out)` over the rows of its inputs on the CPU; `make(n)` allocates its output."""
    arrays = [wp.array(a, device="cpu") for a in inputs]
    out = make(len(inputs[0]))
    wp.launch(function, len(inputs[0]), [*arrays, out], device="cpu")
    return out.numpy()


# --- rollouts -------------------------------------------------------------------------------------------------------


def random_rollout(
    steps: int,
    envs: int,
    agents: int,
    leaves: bool,
    seed: int,
    terminates: float = 0.2,
    truncates: float = 0.2,
    group: Group | None = None,
    waits: bool = False,
) -> Rollout:
    """Random rewards and ends; agents leave until the next episode; if they wait, not all rows are decision steps."""
    rng = np.random.default_rng(seed)
    if group is None:
        every = 3 if waits else 1
        group = Group(
            "g", observation=Box(1), action=Discrete(2), agents=agents, can_leave=leaves, action_interval=every
        )
    rollout = allocate([group], steps, envs, steps, torch.device("cpu"))
    rollout.reward.copy_(torch.as_tensor(rng.normal(size=(steps, envs, agents))))
    rollout.terminated.copy_(torch.as_tensor(rng.random((steps, envs)) < terminates))
    rollout.truncated.copy_(torch.as_tensor(rng.random((steps, envs)) < truncates))
    if leaves:
        alive = rng.random((steps + 1, envs, agents)) < 0.7
        for t in range(steps):
            going_on = ~(rollout.terminated[t] | rollout.truncated[t]).numpy()[:, None]
            alive[t + 1] &= alive[t] | ~going_on
        rollout.alive.copy_(torch.as_tensor(alive))
        rollout.final_alive.copy_(torch.as_tensor(rng.random((steps, envs, agents)) < 0.7))
    if rollout.is_decision_step is not None:
        rollout.is_decision_step.copy_(torch.as_tensor(rng.random((steps + 1, envs, agents)) < 0.4))
    return rollout


def advantage_reference(
    rollout: Rollout, value, final_value, gamma, gae_lambda, scale=1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Each advantage as a sum over the errors of the choices that follow in the same life, one agent at a time."""
    reward = scale * rollout.reward.numpy().astype(np.float64)
    terminated, truncated = rollout.terminated.numpy(), rollout.truncated.numpy()
    steps, envs, agents = reward.shape

    def flags(tensor, rows: int) -> np.ndarray:
        return np.ones((rows, envs, agents), bool) if tensor is None else tensor.numpy()

    alive, is_decision_step = flags(rollout.alive, steps + 1), flags(rollout.is_decision_step, steps + 1)
    final_alive = flags(rollout.final_alive, steps)
    advantage = np.zeros_like(reward)
    for n in range(envs):
        only_truncated = truncated[:, n] & ~terminated[:, n]
        for a in range(agents):
            for first in np.flatnonzero(alive[:-1, n, a] & is_decision_step[:-1, n, a]):
                t, weight, over = first, 1.0, False
                while not over:
                    gain, discount, u, tail = 0.0, 1.0, t, None
                    while tail is None:  # up to the next decision, or the end
                        gain += discount * reward[u, n, a]
                        discount *= gamma
                        ended = terminated[u, n] or truncated[u, n]
                        if only_truncated[u]:
                            slot = only_truncated[:u].sum()
                            tail, over = final_value[slot, n, a] * final_alive[slot, n, a], True
                        elif ended or not alive[u + 1, n, a]:
                            tail, over = 0.0, True
                        elif u + 1 == steps:
                            tail, over = value[steps, n, a], True
                        elif is_decision_step[u + 1, n, a]:
                            tail = value[u + 1, n, a]
                        u += 1
                    advantage[first, n, a] += weight * (gain + discount * tail - value[t, n, a])
                    weight *= discount * gae_lambda
                    t = u
    return advantage, advantage + value[:-1]
