"""Pendulum."""

from dataclasses import dataclass
from typing import no_type_check

import warp as wp

from shoal.core import Box, Field, Group, KernelWorld, Random, sincos, uniform4, wrap_angle
from shoal.core.settings import Positive


@wp.func
@no_type_check
def swing(
    env: int,
    gravity: float,
    action: wp.array2d[float],
    angle: wp.array[float],
    spin: wp.array[float],
    reward: wp.array[float],
):
    """Semi-implicit Euler with Gymnasium's constants: 1 kg, 1 m, 50 ms, |torque| <= 2 N m, |spin| <= 8 rad/s."""
    torque = wp.clamp(action[env, 0], -2.0, 2.0)
    upright = wrap_angle(angle[env])
    reward[env] = -(upright * upright + 0.1 * spin[env] * spin[env] + 0.001 * torque * torque)
    sine, _cosine = sincos(angle[env])
    spin[env] = wp.clamp(spin[env] + (1.5 * gravity * sine + 3.0 * torque) * 0.05, -8.0, 8.0)
    angle[env] = angle[env] + spin[env] * 0.05


@wp.func
@no_type_check
def hang(env: int, rng: Random, angle: wp.array[float], spin: wp.array[float]):
    start = uniform4(rng, 0, -1.0, 1.0)
    angle[env] = 3.1415927 * start[0]
    spin[env] = start[1]


@wp.func
@no_type_check
def look(env: int, angle: wp.array[float], spin: wp.array[float], observation: wp.array[wp.vec3]):
    sine, cosine = sincos(angle[env])
    observation[env] = wp.vec3(cosine, sine, spin[env])


class Pendulum(KernelWorld):
    """Swing a pendulum up and hold it there with a weak motor (Gymnasium's Pendulum-v1).

    | | |
    |---|---|
    | observation | cosine and sine of the angle (0 is upright), spin [rad/s] |
    | action | torque from -2 to 2 [N m] |
    | reward | -(angle^2 + 0.1 spin^2 + 0.001 torque^2) |
    | end | truncated after `max_steps` |
    """

    @dataclass(frozen=True)
    class Config:
        max_steps: Positive = 200
        """Steps before an episode is truncated."""
        gravity: float = 10.0
        """Acceleration of gravity [m/s^2]."""

    state = dict(angle=Field(float, unit="rad"), spin=Field(float, unit="rad/s"))
    groups = (Group("pendulum", observation=Box(3), action=Box(1, -2.0, 2.0)),)
    step, reset, observe = swing, hang, look
    settings = dict(
        common=dict(rollout_steps=64, lr=2e-3, gamma=0.95, epochs=10, num_minibatches=4, normalize_reward=True),
        cpu=dict(total_steps=600_000, num_envs=64),
        gpu=dict(total_steps=10_000_000, num_envs=1024),
        ddpg=dict(rollout_steps=4, lr=1e-3, gamma=0.98, hidden=(128, 128), activation="relu"),
        ddpg_cpu=dict(total_steps=60_000, num_envs=16, learning_starts=2_000, buffer_size=60_000, threads=1),
        ddpg_gpu=dict(total_steps=2_000_000, num_envs=1024, batch_size=4096, lr_scaling="sqrt"),
    )

    def picture(self, canvas, env):
        angle = float(self.store.angle[env])
        canvas.view(-1.8, 1.8, -1.3, 1.3)
        canvas.line([(0.0, 0.0), (-canvas.sin(angle), canvas.cos(angle))], "orange", 0.16)
        canvas.disc((0.0, 0.0), 0.07, "ink")
