"""Stepping the envs of one process, one after the other, on rows of shared arrays. No torch here."""

import contextlib
import re
import signal
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from shoal.core.errors import ShoalError
from shoal.core.user_code import UserCode, UserCodeError, is_fault, place_of, text_of
from shoal.host.memory import RESET, RESTART, STEP, Layout, SharedArrays
from shoal.host.packing import PackedAction, PackedObservation, pack_action, pack_observation

SINGLE = "agent"
"""Name of the group of a world with one agent."""

CLOSE_SECONDS = 10.0
"""How long envs may take to close."""


class Team:
    """Agents of an env that share spaces."""

    def __init__(self, name: str, agents: Sequence[str], observation: PackedObservation, action: PackedAction):
        self.name, self.agents, self.observation, self.action = name, tuple(agents), observation, action


def teams_of(env: Any) -> list[Team]:
    """The teams of an env: one agent, or PettingZoo's agents by their names up to the number."""
    wanted = ("reset", "step", "observation_space", "action_space")
    if absent := [name for name in wanted if not hasattr(env, name)]:
        raise ShoalError(
            f"An object of type {type(env).__name__} is neither a Gymnasium environment nor a parallel one of "
            f"PettingZoo: it has no {' and no '.join(absent)}."
        )
    if not is_parallel(env):
        space = env.action_space
        return [Team(SINGLE, [SINGLE], pack_observation(env.observation_space), pack_action(space))]
    found: dict[str, list[str]] = {}
    for agent in env.possible_agents:
        found.setdefault(re.sub(r"[_-]?\d+$", "", agent) or SINGLE, []).append(agent)
    teams = []
    for name, agents in found.items():
        spaces = [(env.observation_space(agent), env.action_space(agent)) for agent in agents]
        if any(pair != spaces[0] for pair in spaces):
            # Agents of one name that differ are teams of their own.
            teams += [
                Team(agent, [agent], pack_observation(see), pack_action(act))
                for agent, (see, act) in zip(agents, spaces, strict=True)
            ]
        else:
            teams.append(Team(name, agents, pack_observation(spaces[0][0]), pack_action(spaces[0][1])))
    return teams


def is_parallel(env: Any) -> bool:
    """Whether this is a PettingZoo parallel environment."""
    return hasattr(env, "possible_agents")


def layout_of(teams: list[Team], num_envs: int) -> Layout:
    """The arrays that envs and their world exchange; [env, agent, ...] per team."""
    layout: Layout = {
        "terminated": ("bool", (num_envs,)),
        "truncated": ("bool", (num_envs,)),
        "order": ("uint8", (num_envs,)),
        "seed": ("int64", (num_envs,)),
    }
    for team in teams:
        batch = (num_envs, len(team.agents))
        seen = (team.observation.dtype, (*batch, *team.observation.shape))
        layout[f"{team.name}.observation"] = layout[f"{team.name}.final_observation"] = seen
        layout[f"{team.name}.action"] = (team.action.dtype, (*batch, *team.action.shape))
        layout[f"{team.name}.reward"] = ("float32", batch)
        layout[f"{team.name}.alive"] = layout[f"{team.name}.final_alive"] = ("bool", batch)
    return layout


class EnvFault(Exception):
    """An env raised: what, which env, with what seed and where; its exception is the cause."""

    def __init__(self, env: int, seed: int, error: BaseException, function: Any):
        place = place_of(error, function)
        super().__init__(f"{text_of(error)} in env {env} (seed {seed})" + (f", {place}" if place else ""))


def own_class(env: Any) -> type:
    """The class of an env inside its wrappers."""
    return type(getattr(env, "unwrapped", env))


def close_envs(envs: Iterable[Any]) -> None:
    """Close envs; a close() that raises or hangs is a warning, since nothing that was computed is lost."""
    end = time.monotonic() + CLOSE_SECONDS
    for env in envs:
        close = getattr(env, "close", None)
        if close is None:
            continue
        own = own_class(env)
        try:
            with UserCode(f"{own.__name__}.close failed", getattr(own, "close", own)), _limited(end - time.monotonic()):
                close()
        except UserCodeError as problem:
            warnings.warn(str(problem), stacklevel=2)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in code that takes longer; only the main thread can be interrupted."""

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
    """Envs of this process, each on its row of the arrays. Base of GymRows and ZooRows."""

    def __init__(
        self, make: Callable[[], Any], rows: Sequence[int], arrays: SharedArrays, limit: int | None, repeat: int
    ):
        self.arrays, self.limit, self.repeat = arrays, limit or 0, repeat
        self.envs = {row: make() for row in rows}
        self.length = dict.fromkeys(rows, 0)
        self.teams = teams_of(next(iter(self.envs.values())))
        self.order, self.seed = arrays["order"], arrays["seed"]
        self.terminated, self.truncated = arrays["terminated"], arrays["truncated"]

    def run(self, start: int, stop: int) -> None:
        """Let the envs of these rows do what their orders say."""
        orders = self.order[start:stop]
        if not orders.any():
            self.step(start, stop)
            return
        for row, order in zip(range(start, stop), orders.tolist(), strict=True):
            if order == STEP:
                self.step(row, row + 1)
                continue
            self.terminated[row] = self.truncated[row] = False
            if order in (RESTART, RESET):
                self._begin(row, int(self.seed[row]) if order == RESET else None)

    @abstractmethod
    def step(self, start: int, stop: int) -> None:
        """One step of each of these envs, with the actions in its row; those that end begin a new episode."""

    def _begin(self, row: int, seed: int | None) -> None:
        try:
            self._reset(row, seed)
        except BaseException as error:
            self._blame(row, "reset", error)

    def _blame(self, row: int, function: str, error: BaseException) -> NoReturn:
        """Raise an EnvFault for what a function of an env raised, also by sys.exit; Ctrl-C passes."""
        if isinstance(error, EnvFault) or not is_fault(error):
            raise error
        own = getattr(own_class(self.envs[row]), function, None)
        raise EnvFault(row, int(self.seed[row]), error, own) from error

    @abstractmethod
    def _reset(self, row: int, seed: int | None) -> None:
        """Begin an episode and write its first observation."""

    def close(self) -> None:
        close_envs(self.envs.values())


class GymRows(EnvRows):
    """Envs with one agent each."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        team = self.teams[0]
        self.write, self.read_all = team.observation.write, team.action.read_all
        self.action = self.arrays[f"{SINGLE}.action"][:, 0]
        self.observation = self.arrays[f"{SINGLE}.observation"][:, 0]
        self.final = self.arrays[f"{SINGLE}.final_observation"][:, 0]
        self.reward = self.arrays[f"{SINGLE}.reward"][:, 0]

    def step(self, start: int, stop: int) -> None:
        write, length, limit, repeat, envs = self.write, self.length, self.limit, self.repeat, self.envs
        actions = self.read_all(self.action[start:stop])
        rewards, ends, cuts = [], [], []
        row = start
        try:
            for row, action in zip(range(start, stop), actions, strict=True):
                observation, reward, terminated, truncated, _ = envs[row].step(action)
                turn = 1
                while turn < repeat and not (terminated or truncated):
                    observation, more, terminated, truncated, _ = envs[row].step(action)
                    reward = reward + more
                    turn += 1
                length[row] += 1
                if length[row] == limit:
                    truncated = True
                if terminated or truncated:
                    write(observation, self.final[row])
                    self._begin(row, None)
                else:
                    write(observation, self.observation[row])
                rewards.append(reward)
                ends.append(terminated)
                cuts.append(truncated)
        except BaseException as error:
            self._blame(row, "step", error)
        try:
            self.reward[start:stop] = rewards
            self.terminated[start:stop] = ends
            self.truncated[start:stop] = cuts
        except (TypeError, ValueError):
            self._write_each(start, rewards, ends, cuts)

    def _write_each(self, start: int, *columns: list[Any]) -> None:
        """Rewards and ends of single envs, to find the one whose cannot be written."""
        for row, values in enumerate(zip(*columns, strict=True), start):
            try:
                self.reward[row], self.terminated[row], self.truncated[row] = values
            except (TypeError, ValueError) as error:
                self._blame(row, "step", error)

    def _reset(self, row: int, seed: int | None) -> None:
        env = self.envs[row]
        observation, _ = env.reset() if seed is None else env.reset(seed=seed)
        self.write(observation, self.observation[row])
        self.length[row] = 0


class ZooRows(EnvRows):
    """Envs with several agents (PettingZoo, parallel): agents may leave, and an episode ends when nobody is left."""

    def step(self, start: int, stop: int) -> None:
        for row in range(start, stop):
            try:
                self._step(row)
            except BaseException as error:
                self._blame(row, "step", error)

    def _step(self, row: int) -> None:
        env, arrays = self.envs[row], self.arrays
        playing = set(env.agents)
        actions = {}
        for team in self.teams:
            rows = arrays[f"{team.name}.action"][row]
            for place, agent in enumerate(team.agents):
                if agent in playing:
                    actions[agent] = team.action.read(rows[place])
        seen, rewards, ends, cuts, _ = env.step(actions)
        total = dict(rewards)
        turn = 1
        while turn < self.repeat and env.agents:
            seen, rewards, ends, cuts, _ = env.step({agent: actions[agent] for agent in env.agents})
            for agent, reward in rewards.items():
                total[agent] = total.get(agent, 0.0) + reward
            turn += 1
        self.length[row] += 1
        cut = self.length[row] == self.limit
        # An agent that is gone has terminated, unless the episode was cut off for it.
        over = cut or not env.agents
        for team in self.teams:
            reward, alive = arrays[f"{team.name}.reward"][row], arrays[f"{team.name}.alive"][row]
            observation = arrays[f"{team.name}.observation"][row]
            for place, agent in enumerate(team.agents):
                reward[place] = total.get(agent, 0.0)
                if agent in seen:
                    team.observation.write(seen[agent], observation[place])
                alive[place] = agent in env.agents
            if over:
                arrays[f"{team.name}.final_observation"][row] = observation
                final = arrays[f"{team.name}.final_alive"][row]
                for place, agent in enumerate(team.agents):
                    final[place] = agent in playing and not ends.get(agent, False)
        cut = cut or (over and any(cuts.get(agent, False) and not ends.get(agent, False) for agent in playing))
        self.terminated[row], self.truncated[row] = over and not cut, cut
        if over:
            self._begin(row, None)

    def _reset(self, row: int, seed: int | None) -> None:
        env = self.envs[row]
        seen, _ = env.reset() if seed is None else env.reset(seed=seed)
        if not env.agents:
            raise ShoalError("nobody is in the game after reset()")
        for team in self.teams:
            alive, observation = self.arrays[f"{team.name}.alive"][row], self.arrays[f"{team.name}.observation"][row]
            for place, agent in enumerate(team.agents):
                alive[place] = agent in env.agents
                if agent in seen:
                    team.observation.write(seen[agent], observation[place])
                else:
                    observation[place] = 0
        self.length[row] = 0


def make_rows(
    make: Callable[[], Any], rows: Sequence[int], arrays: SharedArrays, limit: int | None, repeat: int
) -> EnvRows:
    """The envs of these rows, of whichever kind they are."""
    several = f"{SINGLE}.action" not in arrays or arrays[f"{SINGLE}.action"].shape[1] > 1
    return (ZooRows if several else GymRows)(make, rows, arrays, limit, repeat)
