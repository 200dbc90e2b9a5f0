"""Gymnasium's CartPole-v1 that takes its time: steps wait for 2 to 8 ms, as if for another program."""

import time

import gymnasium as gym
import numpy as np

LEAST, MOST = 2e-3, 8e-3
"""Seconds that a step takes."""


class Slow(gym.Wrapper):
    """An env whose steps take long, and not equally long."""

    def __init__(self, env):
        super().__init__(env)
        self.random = np.random.default_rng(0)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        time.sleep(self.random.uniform(LEAST, MOST))
        return super().step(action)


def make():
    """One env."""
    return Slow(gym.make("CartPole-v1"))
