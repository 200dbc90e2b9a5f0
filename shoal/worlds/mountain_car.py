"""MountainCar."""

from dataclasses import dataclass
from typing import no_type_check

import warp as wp

from shoal.core import Box, Discrete, Field, Group, KernelWorld, Random, sincos, uniform
from shoal.core.settings import Positive


@wp.func
@no_type_check
def roll(position: float, speed: float, push: float):
    """One step in the valley: the next position and speed. The left wall stops the car."""
    _sine, cosine = sincos(3.0 * position)
    v = wp.clamp(speed + push - 0.0025 * cosine, -0.07, 0.07)
    p = wp.clamp(position + v, -1.2, 0.6)
    v = wp.where(p <= -1.2 and v < 0.0, 0.0, v)
    return p, v


@wp.func
@no_type_check
def drive(
    env: int,
    goal_speed: float,
    action: wp.array[int],
    position: wp.array[float],
    speed: wp.array[float],
    reward: wp.array[float],
    terminated: wp.array[wp.bool],
):
    p, v = roll(position[env], speed[env], 0.001 * float(action[env] - 1))
    position[env] = p
    speed[env] = v
    reward[env] = -1.0
    terminated[env] = p >= 0.5 and v >= goal_speed


@wp.func
@no_type_check
def park(env: int, rng: Random, position: wp.array[float], speed: wp.array[float]):
    position[env] = uniform(rng, 0, -0.6, -0.4)
    speed[env] = 0.0


@wp.func
@no_type_check
def look(env: int, position: wp.array[float], speed: wp.array[float], observation: wp.array[wp.vec2]):
    observation[env] = wp.vec2(position[env], speed[env])


def draw_valley(canvas, position: float, goal: float) -> None:
    """Draw the hill, the flag and the car."""

    def height(x: float) -> float:
        return 0.45 * canvas.sin(3.0 * x) + 0.55

    canvas.view(-1.3, 0.7, -0.1, 1.25)
    canvas.line([(x / 50.0, height(x / 50.0)) for x in range(-60, 31)], "gray", 0.015)
    canvas.line([(goal, height(goal)), (goal, height(goal) + 0.2)], "ink", 0.012)
    canvas.polygon(
        [(goal, height(goal) + 0.2), (goal + 0.1, height(goal) + 0.16), (goal, height(goal) + 0.12)], "green"
    )
    canvas.disc((position, height(position) + 0.05), 0.05, "orange")


class MountainCar(KernelWorld):
    """Rock a weak car out of a valley (Gymnasium's MountainCar-v0).

    | | |
    |---|---|
    | observation | position and speed |
    | action | 0 push left, 1 coast, 2 push right |
    | reward | -1 per step |
    | end | terminated at position 0.5, truncated after `max_steps` |
    """

    @dataclass(frozen=True)
    class Config:
        max_steps: Positive = 200
        """Steps before an episode is truncated."""
        goal_speed: float = 0.0
        """Minimum speed at the flag for the episode to end [1/step]."""

    name = "mountain-car"
    state = dict(position=Field(float), speed=Field(float, unit="1/step"))
    groups = (Group("car", observation=Box(2), action=Discrete(3)),)
    step, reset, observe = drive, park, look
    settings = dict(
        # Without repeated actions almost no early episode reaches the flag.
        common=dict(action_repeat=4, lr=2.5e-3, ent_coef=0.01, normalize_obs=True, normalize_reward=True),
        cpu=dict(total_steps=1_000_000, num_envs=256, rollout_steps=32),
        gpu=dict(total_steps=16_000_000, num_envs=4096, rollout_steps=32),
        # Q-values start at 0, above any possible return: this optimism drives exploration.
        dqn=dict(
            action_repeat=1,
            rollout_steps=4,
            lr=1e-3,
            lr_schedule="linear",
            n_step=5,
            double_q=True,
            huber_delta=None,
            target_update_interval=100,
            exploration_initial_eps=0.1,
            exploration_final_eps=0.0,
            exploration_fraction=0.9,
        ),
        dqn_cpu=dict(total_steps=800_000, num_envs=32, learning_starts=5_000, buffer_size=800_000),
    )

    def picture(self, canvas, env):
        draw_valley(canvas, float(self.store.position[env]), 0.5)
