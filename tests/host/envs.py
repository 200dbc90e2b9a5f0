"""Small environments for the tests, deterministic given their seed and actions."""

import os
import random
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Walk(gym.Env):
    """A number that goes up or down; the episode is terminated or truncated at a length drawn from the seed.

    A step sleeps for up to `delay` seconds, drawn from an unseeded generator.
    """

    def __init__(self, longest: int = 12, truncate: bool = False, delay: float = 0.0):
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,))
        self.action_space = spaces.Discrete(2)
        self.longest, self.truncate, self.delay = longest, truncate, delay

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = float(self.np_random.normal()), 0
        self.end = int(self.np_random.integers(3, self.longest + 1))
        return self._look(), {}

    def _look(self):
        return np.array([self.place, self.time, self.end], dtype=np.float32)

    def render(self):
        picture = np.zeros((40, 60, 3), np.uint8)
        picture[:, self.time :] = 200
        return picture

    def move(self, action):
        self.place += 1.0 if action else -1.0

    def step(self, action):
        assert self.action_space.contains(action)
        if self.delay:
            time.sleep(random.uniform(0.0, self.delay))
        self.move(action)
        self.time += 1
        over = self.time >= self.end
        return self._look(), self.place, over and not self.truncate, over and self.truncate, {}


class SlowReset(Walk):
    """Walk whose reset takes a while."""

    def reset(self, **options):
        time.sleep(0.1)
        return super().reset(**options)


class Push(Walk):
    """Walk by a continuous action."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.action_space = spaces.Box(-2.0, 3.0, (1,))

    def move(self, action):
        self.place += float(action[0])


class Trouble(Walk):
    """Walk that raises or hangs in the first env that finds the file `marker`, which it removes."""

    def __init__(self, marker: str = "", hang: bool = False, always: bool = False, **kwargs):
        super().__init__(**kwargs)
        self.marker, self.hang, self.always = Path(marker), hang, always

    def step(self, action):
        if self.always:
            raise RuntimeError("the ground gave way")
        if self.marker.exists():
            try:
                self.marker.unlink()
            except FileNotFoundError:
                return super().step(action)
            if self.hang:
                time.sleep(3600)
            raise RuntimeError("the ground gave way")
        return super().step(action)


class Forked(Trouble):
    """Trouble with a forked process that holds the worker's open files; its pid is in the name of a file `fork_PID`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        child = os.fork()
        if not child:
            time.sleep(3600)
            os._exit(0)
        self.marker.with_name(f"fork_{child}").touch()


class BadSeed(Walk):
    """Walk that writes its seeds to a file, and raises in step 3 if the seed is `bad`."""

    def __init__(self, seeds: str = "", bad: int = 1_000_003, **kwargs):
        super().__init__(**kwargs)
        self.seeds, self.bad, self.seed = Path(seeds), bad, None

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.seed = seed
            with self.seeds.open("a") as file:
                file.write(f"{seed}\n")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        found = super().step(action)
        if self.seed == self.bad and self.time == 3:
            raise ValueError("no such luck")
        return found


class Closing(Walk):
    """Walk whose close() raises, or hangs."""

    def __init__(self, hang: bool = False, **kwargs):
        super().__init__(**kwargs)
        self.hang = hang

    def close(self):
        if self.hang:
            time.sleep(3600)
        raise RuntimeError("the door is stuck")


class Picnic(gym.Env):
    """Dict observations and actions with a part of each kind of space."""

    def __init__(self):
        self.observation_space = spaces.Dict(
            place=spaces.Box(-1.0, 1.0, (2,)),
            bag=spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))),
            kind=spaces.MultiDiscrete([2, 3]),
        )
        self.action_space = spaces.Dict(
            go=spaces.Box(np.array([0.0, -5.0]), np.array([1.0, 5.0]), dtype=np.float32),
            eat=spaces.Discrete(3, start=1),
            mix=spaces.MultiDiscrete([2, 4]),
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.time += 1
        return self.observation_space.sample(), float(action["eat"]), self.time == 9, False, {}


class Broken(gym.Env):
    """Raises in its constructor."""

    def __init__(self):
        raise ValueError("no such luck")


class Hunt:
    """A PettingZoo parallel environment: two hunters and a deer, which leave at different steps."""

    metadata = {"name": "hunt"}
    possible_agents = ("hunter_0", "hunter_1", "deer")

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (3 if agent == "deer" else 2,))

    def action_space(self, agent):
        return spaces.Discrete(4 if agent == "deer" else 2)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.time = 0
        self.leaves = {agent: int(self.random.integers(2, 9)) for agent in self.agents}
        self.limit = 6
        return self._look(self.agents), {agent: {} for agent in self.agents}

    def _look(self, agents):
        return {
            a: np.full(self.observation_space(a).shape, self.time + 0.1 * self.leaves[a], np.float32) for a in agents
        }

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.time += 1
        before = list(self.agents)
        ends = {a: self.time >= self.leaves[a] for a in before}
        cuts = {a: self.time >= self.limit and not ends[a] for a in before}
        rewards = {a: float(actions[a]) + self.time for a in before}
        self.agents = [a for a in before if not ends[a] and not cuts[a]]
        return self._look(before), rewards, ends, cuts, {a: {} for a in before}

    def close(self):
        pass


class Slow(Walk):
    """Walk whose steps sleep in process 1 of a distributed run."""

    def __init__(self, seconds: float = 0.002, **kwargs):
        super().__init__(**kwargs)
        self.seconds = seconds if os.environ.get("RANK") == "1" else 0.0

    def step(self, action):
        time.sleep(self.seconds)
        return super().step(action)
