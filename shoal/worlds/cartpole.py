"""CartPole."""

from dataclasses import dataclass
from typing import no_type_check

import warp as wp

from shoal.core import Box, Discrete, Field, Group, KernelWorld, Random, sincos_small, uniform4
from shoal.core.settings import Positive


@wp.func
@no_type_check
def push(
    env: int,
    force: float,
    action: wp.array[int],
    x: wp.array[float],
    speed: wp.array[float],
    angle: wp.array[float],
    spin: wp.array[float],
    reward: wp.array[float],
    terminated: wp.array[wp.bool],
):
    """Euler's method with Gymnasium's constants: cart 1 kg, pole 0.1 kg and half a meter to its center, 20 ms."""
    f = wp.where(action[env] == 1, force, -force)
    sine, cosine = sincos_small(angle[env])  # episodes end at 12 degrees
    temp = (f + 0.05 * spin[env] * spin[env] * sine) * 0.9090909
    spin_change = (9.8 * sine - cosine * temp) / (0.6666667 - 0.045454547 * cosine * cosine)
    speed_change = temp - 0.045454547 * spin_change * cosine
    x[env] = x[env] + 0.02 * speed[env]
    speed[env] = speed[env] + 0.02 * speed_change
    angle[env] = angle[env] + 0.02 * spin[env]
    spin[env] = spin[env] + 0.02 * spin_change
    reward[env] = 1.0
    terminated[env] = wp.abs(x[env]) > 2.4 or wp.abs(angle[env]) > 0.20943951


@wp.func
@no_type_check
def stand_up(
    env: int,
    rng: Random,
    x: wp.array[float],
    speed: wp.array[float],
    angle: wp.array[float],
    spin: wp.array[float],
):
    start = uniform4(rng, 0, -0.05, 0.05)
    x[env] = start[0]
    speed[env] = start[1]
    angle[env] = start[2]
    spin[env] = start[3]


@wp.func
@no_type_check
def look(
    env: int,
    x: wp.array[float],
    speed: wp.array[float],
    angle: wp.array[float],
    spin: wp.array[float],
    observation: wp.array[wp.vec4],
):
    observation[env] = wp.vec4(x[env], speed[env], angle[env], spin[env])


class CartPole(KernelWorld):
    """Balance a pole on a cart that can be pushed left and right (Gymnasium's CartPole-v1).

    | | |
    |---|---|
    | observation | cart position [m] and speed [m/s], pole angle [rad] and spin [rad/s] |
    | action | 0 push left, 1 push right |
    | reward | 1 per step |
    | end | terminated beyond 2.4 m or 12 degrees, truncated after `max_steps` |
    """

    @dataclass(frozen=True)
    class Config:
        max_steps: Positive = 500
        """Steps before an episode is truncated."""
        force: float = 10.0
        """Force of a push [N]."""

    state = dict(
        x=Field(float, unit="m"),
        speed=Field(float, unit="m/s"),
        angle=Field(float, unit="rad"),
        spin=Field(float, unit="rad/s"),
    )
    groups = (Group("cart", observation=Box(4), action=Discrete(2)),)
    step, reset, observe = push, stand_up, look
    settings = dict(
        common=dict(rollout_steps=32, lr=2.5e-3, epochs=4, num_minibatches=4),
        cpu=dict(total_steps=1_000_000, num_envs=256),
        gpu=dict(total_steps=20_000_000, num_envs=4096),
        ppo=dict(normalize_reward=True),
        dqn=dict(
            rollout_steps=4,
            lr=1e-3,
            lr_schedule="linear",
            normalize_obs=True,
            n_step=3,
            double_q=True,
            huber_delta=None,
            target_update_interval=25,
            learning_starts=10_000,
            buffer_size=200_000,
            exploration_fraction=0.3,
        ),
        dqn_cpu=dict(total_steps=200_000, num_envs=64),
        dqn_gpu=dict(lr=2e-3, batch_size=4096, learning_starts=100_000, buffer_size=2_000_000),
        a2c_cpu=dict(total_steps=500_000, num_envs=32, rollout_steps=16, lr=4e-3, normalize_advantage=False),
    )

    def picture(self, canvas, env):
        x, angle = float(self.store.x[env]), float(self.store.angle[env])
        canvas.view(-3.0, 3.0, -0.8, 1.6)
        canvas.line([(-2.4, 0.0), (2.4, 0.0)], "gray", 0.02)
        canvas.box((x, 0.0), 0.5, 0.3, "ink")
        tip = (x + canvas.sin(angle), canvas.cos(angle))
        canvas.line([(x, 0.0), tip], "orange", 0.1)
        canvas.disc((x, 0.0), 0.06, "gray")
