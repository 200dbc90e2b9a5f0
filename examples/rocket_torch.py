"""The same rocket written with torch operations. `shoal train examples/rocket_torch.py:Rocket`."""

from dataclasses import dataclass

import torch

from shoal.core import Box, Discrete, Field, Group, KernelWorld


class Rocket(KernelWorld):
    """Land a rocket softly (see rocket.py). Every tensor has one row per env."""

    @dataclass(frozen=True)
    class Config:
        """Settings; each is a flag of `shoal train`: --world.thrust 25."""

        max_steps: int = 300
        """Steps before an episode is truncated."""
        thrust: float = 20.0
        """Acceleration by the engine [m/s^2]."""

    state = dict(height=Field(float, unit="m"), speed=Field(float, unit="m/s"))
    groups = (Group("rocket", observation=Box(2), action=Discrete(2)),)
    settings = dict(common=dict(total_steps=500_000, num_envs=128, rollout_steps=64, lr=2e-3, normalize_reward=True))

    def step(self, s):
        """Change the arrays in place."""
        push = s.config.thrust * (s.action[:, 0] == 1)
        s.speed += 0.1 * (push - 9.8)
        s.height += 0.1 * s.speed
        landed, lost = s.height <= 0.0, s.height > 200.0
        flying = torch.where(lost, -50.0, -0.02 * push / s.config.thrust)
        s.reward[:, 0] = torch.where(landed, 10.0 - s.speed.abs(), flying)
        s.terminated.copy_(landed | lost)

    def reset(self, s):
        """New values for all envs; those that start an episode take them."""
        return dict(height=self.uniform(50.0, 100.0, stream=0), speed=self.uniform(-10.0, 0.0, stream=1))

    def observe(self, s):
        """The observation [env, 2]."""
        return torch.stack([0.01 * s.height, 0.05 * s.speed], dim=-1)
