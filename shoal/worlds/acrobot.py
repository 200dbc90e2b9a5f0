"""Acrobot."""

from dataclasses import dataclass
from typing import no_type_check

import warp as wp

from shoal.core import Box, Discrete, Field, Group, KernelWorld, Random, sincos, uniform4, wrap_angle
from shoal.core.settings import Positive


@wp.func
@no_type_check
def derivative(s: wp.vec4, torque: float):
    """Time derivative of (angle 1, angle 2, spin 1, spin 2): two links of 1 kg and 1 m, center of mass half-way."""
    sin2, cos2 = sincos(s[1])
    sin1, _c = sincos(s[0])
    _s, cos12 = sincos(s[0] + s[1] - 1.5707964)
    d1 = 0.25 + 1.25 + cos2 + 2.0
    d2 = 0.25 + 0.5 * cos2 + 1.0
    phi2 = 0.5 * 9.8 * cos12
    phi1 = -0.5 * s[3] * s[3] * sin2 - s[3] * s[2] * sin2 + 1.5 * 9.8 * sin1 + phi2
    a2 = (torque + d2 / d1 * phi1 - 0.5 * s[2] * s[2] * sin2 - phi2) / (1.25 - d2 * d2 / d1)
    a1 = -(d2 * a2 + phi1) / d1
    return wp.vec4(s[2], s[3], a1, a2)


@wp.func
@no_type_check
def swing(
    env: int,
    action: wp.array[int],
    links: wp.array[wp.vec4],
    reward: wp.array[float],
    terminated: wp.array[wp.bool],
):
    """One Runge-Kutta step of 0.2 s, as in Gymnasium (`book_or_nips="book"`, no noise)."""
    torque = float(action[env] - 1)
    s = links[env]
    k1 = derivative(s, torque)
    k2 = derivative(s + 0.1 * k1, torque)
    k3 = derivative(s + 0.1 * k2, torque)
    k4 = derivative(s + 0.2 * k3, torque)
    s = s + (0.2 / 6.0) * (k1 + 2.0 * k2 + 2.0 * k3 + k4)
    spin1 = wp.clamp(s[2], -12.566371, 12.566371)
    spin2 = wp.clamp(s[3], -28.274334, 28.274334)
    angle1 = wrap_angle(s[0])
    angle2 = wrap_angle(s[1])
    links[env] = wp.vec4(angle1, angle2, spin1, spin2)
    _s1, cos1 = sincos(angle1)
    _s12, cos12 = sincos(angle1 + angle2)
    up = -cos1 - cos12 > 1.0
    reward[env] = wp.where(up, 0.0, -1.0)
    terminated[env] = up


@wp.func
@no_type_check
def hang(env: int, rng: Random, links: wp.array[wp.vec4]):
    links[env] = uniform4(rng, 0, -0.1, 0.1)


@wp.func
@no_type_check
def look(env: int, links: wp.array[wp.vec4], observation: wp.array2d[float]):
    s = links[env]
    sin1, cos1 = sincos(s[0])
    sin2, cos2 = sincos(s[1])
    observation[env, 0] = cos1
    observation[env, 1] = sin1
    observation[env, 2] = cos2
    observation[env, 3] = sin2
    observation[env, 4] = s[2]
    observation[env, 5] = s[3]


class Acrobot(KernelWorld):
    """Swing the foot of a two-link arm above the bar by driving its middle joint (Gymnasium's Acrobot-v1).

    | | |
    |---|---|
    | observation | cosine and sine of both angles, both spins [rad/s] |
    | action | torque -1, 0 or 1 [N m] on the middle joint |
    | reward | -1 per step, 0 on the last |
    | end | terminated when the foot is 1 m above the bar, truncated after `max_steps` |
    """

    @dataclass(frozen=True)
    class Config:
        max_steps: Positive = 500
        """Steps before an episode is truncated."""

    state = dict(links=Field(wp.vec4, unit="rad, rad, rad/s, rad/s"))
    groups = (Group("arm", observation=Box(6), action=Discrete(3)),)
    step, reset, observe = swing, hang, look
    settings = dict(
        common=dict(rollout_steps=64, lr=2.5e-3, normalize_obs=True, normalize_reward=True),
        cpu=dict(total_steps=1_000_000, num_envs=128),
        gpu=dict(total_steps=16_000_000, num_envs=2048),
        dqn=dict(
            rollout_steps=4,
            lr=1e-3,
            lr_schedule="linear",
            n_step=3,
            double_q=True,
            huber_delta=None,
            target_update_interval=50,
        ),
        dqn_cpu=dict(total_steps=200_000, num_envs=64, learning_starts=10_000, buffer_size=200_000),
        rainbow=dict(
            rollout_steps=4,
            lr=1e-3,
            lr_schedule="linear",
            v_min=-100.0,
            v_max=0.0,
            target_update_interval=50,
            replay_ratio=4.0,
            noisy=False,
            exploration_final_eps=0.05,
            exploration_fraction=0.3,
        ),
        rainbow_cpu=dict(total_steps=200_000, num_envs=64, learning_starts=10_000, buffer_size=200_000),
    )

    def picture(self, canvas, env):
        a, b = (float(v) for v in self.store.links[env, :2])
        canvas.view(-2.9, 2.9, -2.1, 2.1)
        canvas.line([(-2.2, 1.0), (2.2, 1.0)], "gray", 0.02)
        elbow = (canvas.sin(a), -canvas.cos(a))
        foot = (elbow[0] + canvas.sin(a + b), elbow[1] - canvas.cos(a + b))
        canvas.line([(0.0, 0.0), elbow, foot], "orange", 0.14)
        for joint in ((0.0, 0.0), elbow):
            canvas.disc(joint, 0.09, "ink")
