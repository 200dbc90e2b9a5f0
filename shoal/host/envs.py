"""Envs of one process, stepped one after the other on rows of shared arrays. Workers import this: no torch."""

import contextlib
import re
import signal
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from shoal.core.errors import ShoalError
from shoal.core.user_code import UserCode, UserCodeError, is_fault, location_of, text_of
from shoal.host.memory import RESET, RESTART, STEP, Layout, SharedArrays
from shoal.host.packing import PackedAction, PackedObservation, pack_action, pack_observation

SINGLE = "agent"
"""Name of the group in a world with one agent."""

CLOSE_SECONDS = 10.0
"""Timeout for closing the envs of a process."""


class HostGroup:
    """Agents of an env with the same observation space and the same action space."""

    def __init__(self, name: str, agents: Sequence[str], observation: PackedObservation, action: PackedAction):
        self.name, self.agents, self.observation, self.action = name, tuple(agents), observation, action


def host_groups_of(env: Any) -> list[HostGroup]:
    """The groups of an env: one agent, or the agents of PettingZoo whose names differ only in the number at the end."""
    wanted = ("reset", "step", "observation_space", "action_space")
    if absent := [name for name in wanted if not hasattr(env, name)]:
        raise ShoalError(
            f"An object of type {type(env).__name__} is neither a Gymnasium environment nor a parallel one of "
            f"PettingZoo: it has no {' and no '.join(absent)}."
        )
    if not is_parallel(env):
        space = env.action_space
        return [HostGroup(SINGLE, [SINGLE], pack_observation(env.observation_space), pack_action(space))]
    found: dict[str, list[str]] = {}
    for agent in env.possible_agents:
        found.setdefault(re.sub(r"[_-]?\d+$", "", agent) or SINGLE, []).append(agent)
    groups = []
    for name, agents in found.items():
        spaces = [(env.observation_space(agent), env.action_space(agent)) for agent in agents]
        if any(pair != spaces[0] for pair in spaces):
            # Agents with different spaces cannot share a group.
            groups += [
                HostGroup(agent, [agent], pack_observation(observation), pack_action(action))
                for agent, (observation, action) in zip(agents, spaces, strict=True)
            ]
        else:
            groups.append(HostGroup(name, agents, pack_observation(spaces[0][0]), pack_action(spaces[0][1])))
    return groups


def is_parallel(env: Any) -> bool:
    """Whether this is a PettingZoo parallel environment."""
    return hasattr(env, "possible_agents")


def layout_of(groups: list[HostGroup], num_envs: int) -> Layout:
    """The shared arrays of a world: [env] for flags, commands and seeds, [env, agent, ...] for each group."""
    layout: Layout = {
        "terminated": ("bool", (num_envs,)),
        "truncated": ("bool", (num_envs,)),
        "command": ("uint8", (num_envs,)),
        "seed": ("int64", (num_envs,)),
    }
    for group in groups:
        batch = (num_envs, len(group.agents))
        observation = (group.observation.dtype, (*batch, *group.observation.shape))
        layout[f"{group.name}.observation"] = layout[f"{group.name}.final_observation"] = observation
        layout[f"{group.name}.action"] = (group.action.dtype, (*batch, *group.action.shape))
        layout[f"{group.name}.reward"] = ("float32", batch)
        layout[f"{group.name}.alive"] = layout[f"{group.name}.final_alive"] = ("bool", batch)
    return layout


class EnvFault(Exception):
    """An env raised an exception, which is the cause; the message names the env, its seed and the code's location."""

    def __init__(self, env: int, seed: int, error: BaseException, function: Any):
        location = location_of(error, function)
        super().__init__(f"{text_of(error)} in env {env} (seed {seed})" + (f", {location}" if location else ""))


def env_class(env: Any) -> type:
    """The class of an env without its wrappers."""
    return type(getattr(env, "unwrapped", env))


def close_envs(envs: Iterable[Any]) -> None:
    """Close envs; warn if close() raises or hangs, since no result is lost."""
    end = time.monotonic() + CLOSE_SECONDS
    for env in envs:
        close = getattr(env, "close", None)
        if close is None:
            continue
        own = env_class(env)
        try:
            with UserCode(f"{own.__name__}.close failed", getattr(own, "close", own)), _timeout(end - time.monotonic()):
                close()
        except UserCodeError as problem:
            warnings.warn(str(problem), stacklevel=2)


@contextlib.contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in code that takes longer; without effect outside the main thread, which gets the signal."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise TimeoutError(f"it had not returned after {CLOSE_SECONDS:g} s")

    try:
        before = signal.signal(signal.SIGALRM, stop)
    except ValueError:  # another thread
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


class EnvRows(ABC):
    """Envs of this process, each on its row of the shared arrays."""

    def __init__(
        self, make: Callable[[], Any], rows: Sequence[int], arrays: SharedArrays, limit: int | None, repeat: int
    ):
        self.arrays, self.limit, self.repeat = arrays, limit or 0, repeat
        self.envs = {row: make() for row in rows}
        self.length = dict.fromkeys(rows, 0)
        self.host_groups = host_groups_of(next(iter(self.envs.values())))
        self.command, self.seed = arrays["command"], arrays["seed"]
        self.terminated, self.truncated = arrays["terminated"], arrays["truncated"]

    def run(self, start: int, stop: int) -> None:
        """Run the commands of the envs in rows `start` to `stop`."""
        commands = self.command[start:stop]
        if not commands.any():
            self.step(start, stop)
            return
        for row, command in zip(range(start, stop), commands.tolist(), strict=True):
            if command == STEP:
                self.step(row, row + 1)
                continue
            self.terminated[row] = self.truncated[row] = False
            if command in (RESTART, RESET):
                self._reset_or_fault(row, int(self.seed[row]) if command == RESET else None)

    @abstractmethod
    def step(self, start: int, stop: int) -> None:
        """Step the envs in rows `start` to `stop` with the actions in their rows; envs whose episode ends are reset."""

    def _reset_or_fault(self, row: int, seed: int | None) -> None:
        try:
            self._reset(row, seed)
        except BaseException as error:
            self._raise_fault(row, "reset", error)

    def _raise_fault(self, row: int, function: str, error: BaseException) -> NoReturn:
        """Raise an EnvFault for an exception in an env's function, SystemExit included; KeyboardInterrupt passes."""
        if isinstance(error, EnvFault) or not is_fault(error):
            raise error
        own = getattr(env_class(self.envs[row]), function, None)
        raise EnvFault(row, int(self.seed[row]), error, own) from error

    @abstractmethod
    def _reset(self, row: int, seed: int | None) -> None:
        """Start an episode and write its first observation."""

    def close(self) -> None:
        close_envs(self.envs.values())


class GymRows(EnvRows):
    """Gymnasium envs, with one agent each; env i uses row i of the batch arrays."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        group = self.host_groups[0]
        self.write, self.read_all = group.observation.write, group.action.read_all
        self.action = self.arrays[f"{SINGLE}.action"][:, 0]
        self.observation = self.arrays[f"{SINGLE}.observation"][:, 0]
        self.final = self.arrays[f"{SINGLE}.final_observation"][:, 0]
        self.reward = self.arrays[f"{SINGLE}.reward"][:, 0]

    def step(self, start: int, stop: int) -> None:
        write, length, limit, repeat, envs = self.write, self.length, self.limit, self.repeat, self.envs
        actions = self.read_all(self.action[start:stop])
        rewards, terminations, truncations = [], [], []
        row = start
        try:
            for row, action in zip(range(start, stop), actions, strict=True):
                observation, reward, terminated, truncated, _ = envs[row].step(action)
                repeats = 1
                while repeats < repeat and not (terminated or truncated):
                    observation, more, terminated, truncated, _ = envs[row].step(action)
                    reward = reward + more
                    repeats += 1
                length[row] += 1
                if length[row] == limit:
                    truncated = True
                if terminated or truncated:
                    write(observation, self.final[row])
                    self._reset_or_fault(row, None)
                else:
                    write(observation, self.observation[row])
                rewards.append(reward)
                terminations.append(terminated)
                truncations.append(truncated)
        except BaseException as error:
            self._raise_fault(row, "step", error)
        try:
            self.reward[start:stop] = rewards
            self.terminated[start:stop] = terminations
            self.truncated[start:stop] = truncations
        except (TypeError, ValueError):
            self._write_each(start, rewards, terminations, truncations)

    def _write_each(self, start: int, *columns: list[Any]) -> None:
        """Write rewards and end flags env by env, to name the env whose values cannot be written."""
        for row, values in enumerate(zip(*columns, strict=True), start):
            try:
                self.reward[row], self.terminated[row], self.truncated[row] = values
            except (TypeError, ValueError) as error:
                self._raise_fault(row, "step", error)

    def _reset(self, row: int, seed: int | None) -> None:
        env = self.envs[row]
        observation, _ = env.reset() if seed is None else env.reset(seed=seed)
        self.write(observation, self.observation[row])
        self.length[row] = 0


class ZooRows(EnvRows):
    """PettingZoo parallel envs: agents may leave, and an episode ends when none is left. Env i uses row i."""

    def step(self, start: int, stop: int) -> None:
        for row in range(start, stop):
            try:
                self._step(row)
            except BaseException as error:
                self._raise_fault(row, "step", error)

    def _step(self, row: int) -> None:
        env, arrays = self.envs[row], self.arrays
        agents_before = set(env.agents)
        actions = {}
        for group in self.host_groups:
            rows = arrays[f"{group.name}.action"][row]
            for index, agent in enumerate(group.agents):
                if agent in agents_before:
                    actions[agent] = group.action.read(rows[index])
        observations, rewards, terminations, truncations, _ = env.step(actions)
        total = dict(rewards)
        repeats = 1
        while repeats < self.repeat and env.agents:
            observations, rewards, terminations, truncations, _ = env.step({a: actions[a] for a in env.agents})
            for agent, reward in rewards.items():
                total[agent] = total.get(agent, 0.0) + reward
            repeats += 1
        self.length[row] += 1
        truncated = self.length[row] == self.limit
        ended = truncated or not env.agents
        for group in self.host_groups:
            reward, alive = arrays[f"{group.name}.reward"][row], arrays[f"{group.name}.alive"][row]
            observation = arrays[f"{group.name}.observation"][row]
            for index, agent in enumerate(group.agents):
                reward[index] = total.get(agent, 0.0)
                if agent in observations:
                    group.observation.write(observations[agent], observation[index])
                alive[index] = agent in env.agents
            if ended:
                arrays[f"{group.name}.final_observation"][row] = observation
                final_alive = arrays[f"{group.name}.final_alive"][row]
                for index, agent in enumerate(group.agents):
                    final_alive[index] = agent in agents_before and not terminations.get(agent, False)
        # An episode whose last agents leave is truncated if it was truncated for one of them.
        truncated = truncated or (
            ended and any(truncations.get(a, False) and not terminations.get(a, False) for a in agents_before)
        )
        self.terminated[row], self.truncated[row] = ended and not truncated, truncated
        if ended:
            self._reset_or_fault(row, None)

    def _reset(self, row: int, seed: int | None) -> None:
        env = self.envs[row]
        observations, _ = env.reset() if seed is None else env.reset(seed=seed)
        if not env.agents:
            raise ShoalError("there are no agents after reset()")
        for group in self.host_groups:
            alive, observation = self.arrays[f"{group.name}.alive"][row], self.arrays[f"{group.name}.observation"][row]
            for index, agent in enumerate(group.agents):
                alive[index] = agent in env.agents
                if agent in observations:
                    group.observation.write(observations[agent], observation[index])
                else:
                    observation[index] = 0
        self.length[row] = 0


def make_rows(
    make: Callable[[], Any], rows: Sequence[int], arrays: SharedArrays, limit: int | None, repeat: int
) -> EnvRows:
    """Make the envs of these rows, GymRows or ZooRows by the shape of their actions."""
    several = f"{SINGLE}.action" not in arrays or arrays[f"{SINGLE}.action"].shape[1] > 1
    return (ZooRows if several else GymRows)(make, rows, arrays, limit, repeat)
