"""MountainCarContinuous."""

from dataclasses import dataclass
from typing import no_type_check

import warp as wp

from shoal.core import Box, Field, Group, KernelWorld
from shoal.core.settings import Positive
from shoal.worlds.mountain_car import draw_valley, look, park, roll


@wp.func
@no_type_check
def drive(
    env: int,
    goal_speed: float,
    action: wp.array2d[float],
    position: wp.array[float],
    speed: wp.array[float],
    reward: wp.array[float],
    terminated: wp.array[wp.bool],
):
    force = wp.clamp(action[env, 0], -1.0, 1.0)
    p, v = roll(position[env], speed[env], 0.0015 * force)
    position[env] = p
    speed[env] = v
    arrived = p >= 0.45 and v >= goal_speed
    reward[env] = wp.where(arrived, 100.0, 0.0) - 0.1 * action[env, 0] * action[env, 0]
    terminated[env] = arrived


class MountainCarContinuous(KernelWorld):
    """Rock a weak car out of a valley, sparing fuel (Gymnasium's MountainCarContinuous-v0).

    | | |
    |---|---|
    | observation | position and speed |
    | action | force from -1 to 1 |
    | reward | 100 at the flag, less 0.1 force^2 per step |
    | end | terminated at position 0.45, truncated after `max_steps` |
    """

    @dataclass(frozen=True)
    class Config:
        max_steps: Positive = 999
        """Steps before an episode is truncated."""
        goal_speed: float = 0.0
        """Minimum speed at the flag for the episode to end [1/step]."""

    name = "mountain-car-continuous"
    state = dict(position=Field(float), speed=Field(float, unit="1/step"))
    groups = (Group("car", observation=Box(2), action=Box(1, -1.0, 1.0)),)
    step, reset, observe = drive, park, look
    settings = dict(
        # Without repeated actions and a large initial deviation almost no early episode reaches the flag.
        common=dict(
            action_repeat=4, log_std_init=0.5, lr=2.5e-3, gamma=0.999, normalize_obs=True, normalize_reward=True
        ),
        cpu=dict(total_steps=500_000, num_envs=256, rollout_steps=32),
        gpu=dict(total_steps=8_000_000, num_envs=4096, rollout_steps=32),
    )

    def picture(self, canvas, env):
        draw_valley(canvas, float(self.store.position[env]), 0.45)
