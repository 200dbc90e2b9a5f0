"""Gymnasium's CartPole-v1 with steps that sleep for 2 to 8 ms, as if they waited for another program."""

import time

import gymnasium as gym
import numpy as np

MIN_SECONDS, MAX_SECONDS = 2e-3, 8e-3
"""Range of the time of a step."""


class Slow(gym.Wrapper):
    """An env whose steps sleep for a random time."""

    def __init__(self, env):
        super().__init__(env)
        self.random = np.random.default_rng(0)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        time.sleep(self.random.uniform(MIN_SECONDS, MAX_SECONDS))
        return super().step(action)


def make():
    """Make one env."""
    return Slow(gym.make("CartPole-v1"))
