"""A world of two groups in one file: sharks hunt a school of fish. `shoal train examples/shark.py:Shark`."""

from dataclasses import dataclass

import warp as wp

from shoal.core import Box, Discrete, Field, ForGroup, Group, KernelWorld, Layout2D, Random, sincos, uniform4

Floats = wp.array2d[float]  # [env, agent]
GRIP = 0.15  # turn per step of an animal that makes 1 m per step [rad]
REACH = 0.5  # how near a shark must be to bite [m]
SEEN = 2  # how many of each group an agent sees


@wp.func
def swim(
    env: int, agent: int, size: float, action: wp.array2d[int], speed: Floats, x: Floats, y: Floats, course: Floats
):
    """Turn left (0), not at all (1) or right (2), the faster the wider; then go ahead as far as the shore allows."""
    v = speed[env, agent]
    to = course[env, agent] + float(1 - action[env, agent]) * GRIP / wp.max(v, 0.1)
    sine, cosine = sincos(to)
    course[env, agent] = to
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
    """A fish within reach of a shark is eaten and swims no more; the game ends with the last one."""
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
def look_for(env: int, me: wp.vec4, xs: Floats, ys: Floats, speeds: Floats, seen: wp.array[float]):
    """The nearest of a group that still swim: ahead or behind (1 to -1), left or right (1 to -1), how near (to 1)."""
    last = float(0.0)  # an agent is no neighbor of its own
    for i in range(SEEN):
        nearest, ahead, left = float(1000.0), float(0.0), float(0.0)
        for other in range(xs.shape[1]):
            dx, dy = xs[env, other] - me[0], ys[env, other] - me[1]
            far = wp.sqrt(dx * dx + dy * dy)
            if speeds[env, other] > 0.0 and far > last and far < nearest:
                nearest = far
                ahead = (me[2] * dx + me[3] * dy) / far
                left = (me[2] * dy - me[3] * dx) / far
        last = nearest
        seen[3 * i] = ahead
        seen[3 * i + 1] = left
        seen[3 * i + 2] = 1.0 / (1.0 + nearest)


@wp.func
def look(
    env: int,
    agent: int,
    size: float,
    x: Floats,
    y: Floats,
    course: Floats,
    fish_x: Floats,
    fish_y: Floats,
    fish_speed: Floats,
    shark_x: Floats,
    shark_y: Floats,
    shark_speed: Floats,
    observation: wp.array3d[float],
):
    """The nearest fish, the nearest sharks, where one is and points to."""
    sine, cosine = sincos(course[env, agent])
    me = wp.vec4(x[env, agent], y[env, agent], cosine, sine)
    seen = observation[env, agent]
    look_for(env, me, fish_x, fish_y, fish_speed, seen)
    look_for(env, me, shark_x, shark_y, shark_speed, seen[3 * SEEN : 6 * SEEN])
    seen[6 * SEEN] = 2.0 * me[0] / size - 1.0
    seen[6 * SEEN + 1] = 2.0 * me[1] / size - 1.0
    seen[6 * SEEN + 2] = cosine
    seen[6 * SEEN + 3] = sine


@wp.func
def start_fish(env: int, agent: int, rng: Random, size: float, x: Floats, y: Floats, course: Floats, speed: Floats):
    """Anywhere; some swim faster than others."""
    draw = uniform4(rng, agent, 0.0, 1.0)
    x[env, agent] = size * draw[0]
    y[env, agent] = size * draw[1]
    course[env, agent] = 6.2831853 * draw[2]
    speed[env, agent] = 0.2 + 0.1 * draw[3]


@wp.func
def start_sharks(env: int, agent: int, rng: Random, size: float, x: Floats, y: Floats, course: Floats, speed: Floats):
    """Anywhere else: other random numbers than any fish has."""
    draw = uniform4(rng, 100_000 + agent, 0.0, 1.0)
    x[env, agent] = size * draw[0]
    y[env, agent] = size * draw[1]
    course[env, agent] = 6.2831853 * draw[2]
    speed[env, agent] = 0.36


@wp.func
def start_count(env: int, eaten: wp.array[float]):
    """Nobody is eaten yet."""
    eaten[env] = 0.0


class Shark(KernelWorld):
    """Sharks hunt a school of fish in a square sea.

    | | |
    |---|---|
    | observation | the two nearest fish, the two nearest sharks (ahead, left, nearness), own place and course |
    | action | 0 turn left, 1 go straight on, 2 turn right |
    | reward | shark: 1 for each fish it eats; fish: -1 when eaten |
    | end | terminated when all fish are eaten, truncated after `max_steps` |
    """

    @dataclass(frozen=True)
    class Config:
        """Settings; each is a flag of `shoal train`: --world.sharks 3."""

        max_steps: int = 200
        """Steps before an episode is truncated."""
        fish: int = 20
        """Fish at the start."""
        sharks: int = 2
        """Sharks."""
        size: float = 20.0
        """Side of the sea [m]."""

    @staticmethod
    def state(config):
        """Per group and agent: place [m], course [rad], speed [m per step]; per env: how many were eaten."""
        sizes = dict(fish=config.fish, shark=config.sharks)
        names = ("x", "y", "course", "speed")
        return dict(eaten=Field(float), **{f"{g}_{n}": Field(float, (k,)) for g, k in sizes.items() for n in names})

    @staticmethod
    def groups(config):
        spaces = dict(observation=Box(6 * SEEN + 4), action=Discrete(3))
        return Group("fish", agents=config.fish, can_leave=True, **spaces), Group(
            "shark", agents=config.sharks, **spaces
        )

    step = [ForGroup("fish", swim), ForGroup("shark", swim), bite]
    reset = [ForGroup("fish", start_fish), ForGroup("shark", start_sharks), start_count]
    observe = [ForGroup("fish", look), ForGroup("shark", look)]
    reports = ("eaten",)
    layout = Layout2D(size="size", heading="{group}_course")
    settings = dict(common=dict(total_steps=100_000, num_envs=64, rollout_steps=32, lr=1e-3))
