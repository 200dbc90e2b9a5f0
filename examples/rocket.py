"""A custom world in one file: land a rocket softly. `shoal train examples/rocket.py:Rocket`."""

from dataclasses import dataclass

import warp as wp

from shoal.core import Box, Discrete, Field, Group, KernelWorld, Random, uniform


@wp.func
def fly(
    env: int,
    thrust: float,
    action: wp.array[int],
    height: wp.array[float],
    speed: wp.array[float],
    reward: wp.array[float],
    terminated: wp.array[wp.bool],
):
    """Fly for 0.1 s: gravity and, with action 1, the engine accelerate the rocket."""
    push = wp.where(action[env] == 1, thrust, 0.0)
    speed[env] = speed[env] + 0.1 * (push - 9.8)
    height[env] = height[env] + 0.1 * speed[env]
    landed = height[env] <= 0.0
    lost = height[env] > 200.0
    reward[env] = wp.where(landed, 10.0 - wp.abs(speed[env]), wp.where(lost, -50.0, -0.02 * push / thrust))
    terminated[env] = landed or lost


@wp.func
def launch(env: int, rng: Random, height: wp.array[float], speed: wp.array[float]):
    """Start at a random height, falling."""
    height[env] = uniform(rng, 0, 50.0, 100.0)
    speed[env] = uniform(rng, 1, -10.0, 0.0)


@wp.func
def look(env: int, height: wp.array[float], speed: wp.array[float], observation: wp.array[wp.vec2]):
    """Observe height and speed, scaled to about 1."""
    observation[env] = wp.vec2(0.01 * height[env], 0.05 * speed[env])


class Rocket(KernelWorld):
    """Land a rocket softly and without wasting fuel.

    | | |
    |---|---|
    | observation | height / 100 m, speed / 20 m/s |
    | action | 0 engine off, 1 engine on |
    | reward | -0.02 per burn; on landing 10 minus the impact speed [m/s]; -50 when lost in space |
    | end | terminated on the ground or above 200 m, truncated after `max_steps` |
    """

    @dataclass(frozen=True)
    class Config:
        """Settings; each is a flag of `shoal train`: --world.thrust 25."""

        max_steps: int = 300
        """Steps before an episode is truncated."""
        thrust: float = 20.0
        """Acceleration by the engine [m/s^2]."""

    state = dict(height=Field(float, unit="m"), speed=Field(float, unit="m/s"))
    groups = (Group("rocket", observation=Box(2), action=Discrete(2)),)
    step, reset, observe = fly, launch, look
    settings = dict(common=dict(total_steps=500_000, num_envs=128, rollout_steps=64, lr=2e-3, normalize_reward=True))

    def picture(self, canvas, env):
        """Draw one env for a recording; arrays of the store are torch tensors."""
        canvas.view(-60.0, 60.0, -5.0, 120.0)
        canvas.line([(-50.0, 0.0), (50.0, 0.0)], "gray", 1.0)
        canvas.box((0.0, float(self.store.height[env]) + 3.0), 3.0, 6.0, "orange")
