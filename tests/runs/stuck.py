"""A world and an env that never end a step from some time on, and say so by a file."""

import ctypes
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from shoal.core import Box, Discrete, Field, Group, KernelWorld


class Stuck(KernelWorld):
    """Never ends its 20th step; `native`: in code that looks at no signals."""

    @dataclass(frozen=True)
    class Config:
        native: bool = False

    state = dict(clock=Field(float))
    groups = (Group("agent", observation=Box(1), action=Discrete(2)),)

    def step(self, s):
        s.clock += 1.0
        s.reward[:, 0] = 1.0
        if float(s.clock[0]) == 20.0:
            Path("stuck").touch()
            mutex = ctypes.create_string_buffer(64)
            while True:  # the second turn waits for the first one
                ctypes.CDLL(None).pthread_mutex_lock(mutex) if self.config.native else time.sleep(0.01)

    def reset(self, s):
        return dict(clock=torch.zeros_like(s.clock))

    def observe(self, s):
        return s.clock.unsqueeze(-1) / 100.0


class StuckEnv(gym.Env):
    """Never ends its 100th step."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        while self.steps == 100:
            Path("stuck").touch()
            time.sleep(0.01)
        return np.zeros(1, np.float32), 1.0, False, self.steps % 10 == 0, {}
