"""A world of two groups in one file: sharks hunt a school of fish. `shoal train examples/shark.py:Shark`."""

from dataclasses import dataclass

import warp as wp

from shoal.core import Box, Discrete, Field, ForGroup, Group, KernelWorld, Layout2D, Random, sincos, uniform4

Floats = wp.array2d[float]  # [env, agent]
TURN = 0.15  # turn per step at a speed of 1 m per step [rad]
REACH = 0.5  # maximum distance of a bite [m]
NEAREST = 2  # agents of each group in an observation


@wp.func
def swim(
    env: int, agent: int, size: float, action: wp.array2d[int], speed: Floats, x: Floats, y: Floats, heading: Floats
):
    """Turn left (0), go straight (1) or turn right (2), then move, but not past the shore. Fast animals turn less."""
    v = speed[env, agent]
    angle = heading[env, agent] + float(1 - action[env, agent]) * TURN / wp.max(v, 0.1)
    sine, cosine = sincos(angle)
    heading[env, agent] = angle
    x[env, agent] = wp.clamp(x[env, agent] + v * cosine, 0.0, size)
    y[env, agent] = wp.clamp(y[env, agent] + v * sine, 0.0, size)


@wp.func
def bite(
    env: int,
    fish_x: Floats,
    fish_y: Floats,
    fish_speed: Floats,
    fish_alive: wp.array2d[wp.bool],
    fish_reward: Floats,
    shark_x: Floats,
    shark_y: Floats,
    shark_reward: Floats,
    eaten: wp.array[float],
    terminated: wp.array[wp.bool],
):
    """A fish within reach of a shark is eaten and stops; the episode ends with the last fish."""
    for fish in range(fish_x.shape[1]):
        for shark in range(shark_x.shape[1]):
            away = wp.vec2(shark_x[env, shark] - fish_x[env, fish], shark_y[env, shark] - fish_y[env, fish])
            if fish_alive[env, fish] and wp.length(away) < REACH:
                fish_alive[env, fish] = False
                fish_speed[env, fish] = 0.0
                fish_reward[env, fish] = -1.0
                shark_reward[env, shark] = shark_reward[env, shark] + 1.0
                eaten[env] = eaten[env] + 1.0
    terminated[env] = int(eaten[env]) == fish_x.shape[1]


@wp.func
def observe_nearest(env: int, me: wp.vec4, xs: Floats, ys: Floats, speeds: Floats, out: wp.array[float]):
    """Observe the nearest living agents of a group: ahead (1 to -1), left (1 to -1) and nearness (0 to 1)."""
    last = float(0.0)  # excludes the agent itself
    for i in range(NEAREST):
        nearest, ahead, left = float(1000.0), float(0.0), float(0.0)
        for other in range(xs.shape[1]):
            dx, dy = xs[env, other] - me[0], ys[env, other] - me[1]
            distance = wp.sqrt(dx * dx + dy * dy)
            if speeds[env, other] > 0.0 and distance > last and distance < nearest:
                nearest = distance
                ahead = (me[2] * dx + me[3] * dy) / distance
                left = (me[2] * dy - me[3] * dx) / distance
        last = nearest
        out[3 * i] = ahead
        out[3 * i + 1] = left
        out[3 * i + 2] = 1.0 / (1.0 + nearest)


@wp.func
def look(
    env: int,
    agent: int,
    size: float,
    x: Floats,
    y: Floats,
    heading: Floats,
    fish_x: Floats,
    fish_y: Floats,
    fish_speed: Floats,
    shark_x: Floats,
    shark_y: Floats,
    shark_speed: Floats,
    observation: wp.array3d[float],
):
    """Observe the nearest fish, the nearest sharks, and the agent's own position and heading."""
    sine, cosine = sincos(heading[env, agent])
    me = wp.vec4(x[env, agent], y[env, agent], cosine, sine)
    row = observation[env, agent]
    observe_nearest(env, me, fish_x, fish_y, fish_speed, row)
    observe_nearest(env, me, shark_x, shark_y, shark_speed, row[3 * NEAREST : 6 * NEAREST])
    row[6 * NEAREST] = 2.0 * me[0] / size - 1.0
    row[6 * NEAREST + 1] = 2.0 * me[1] / size - 1.0
    row[6 * NEAREST + 2] = cosine
    row[6 * NEAREST + 3] = sine


@wp.func
def start_fish(env: int, agent: int, rng: Random, size: float, x: Floats, y: Floats, heading: Floats, speed: Floats):
    """Start at a random position, with a random heading and speed."""
    draw = uniform4(rng, agent, 0.0, 1.0)
    x[env, agent] = size * draw[0]
    y[env, agent] = size * draw[1]
    heading[env, agent] = 6.2831853 * draw[2]
    speed[env, agent] = 0.2 + 0.1 * draw[3]


@wp.func
def start_sharks(env: int, agent: int, rng: Random, size: float, x: Floats, y: Floats, heading: Floats, speed: Floats):
    """Start at a random position, with random numbers that no fish has."""
    draw = uniform4(rng, 100_000 + agent, 0.0, 1.0)
    x[env, agent] = size * draw[0]
    y[env, agent] = size * draw[1]
    heading[env, agent] = 6.2831853 * draw[2]
    speed[env, agent] = 0.36


@wp.func
def start_count(env: int, eaten: wp.array[float]):
    """Reset the number of eaten fish."""
    eaten[env] = 0.0


class Shark(KernelWorld):
    """Sharks hunt a school of fish in a square sea.

    | | |
    |---|---|
    | observation | the two nearest fish, the two nearest sharks (ahead, left, nearness), own position and heading |
    | action | 0 turn left, 1 go straight, 2 turn right |
    | reward | shark: 1 for each fish it eats; fish: -1 when eaten |
    | end | terminated when all fish are eaten, truncated after `max_steps` |
    """

    @dataclass(frozen=True)
    class Config:
        """Settings; each is a flag of `shoal train`: --world.sharks 3."""

        max_steps: int = 200
        """Steps before an episode is truncated."""
        fish: int = 20
        """Number of fish at the start."""
        sharks: int = 2
        """Number of sharks."""
        size: float = 20.0
        """Side of the sea [m]."""

    @staticmethod
    def state(config):
        """Per agent: position [m], heading [rad], speed [m per step]; per env: number of eaten fish."""
        sizes = dict(fish=config.fish, shark=config.sharks)
        names = ("x", "y", "heading", "speed")
        return dict(eaten=Field(float), **{f"{g}_{n}": Field(float, (k,)) for g, k in sizes.items() for n in names})

    @staticmethod
    def groups(config):
        spaces = dict(observation=Box(6 * NEAREST + 4), action=Discrete(3))
        fish = Group("fish", agents=config.fish, can_leave=True, **spaces)
        sharks = Group("shark", agents=config.sharks, **spaces)
        return fish, sharks

    step = [ForGroup("fish", swim), ForGroup("shark", swim), bite]
    reset = [ForGroup("fish", start_fish), ForGroup("shark", start_sharks), start_count]
    observe = [ForGroup("fish", look), ForGroup("shark", look)]
    reports = ("eaten",)
    layout = Layout2D(size="size", heading="{group}_heading")
    settings = dict(common=dict(total_steps=100_000, num_envs=64, rollout_steps=32, lr=1e-3))
