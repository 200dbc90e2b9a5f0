"""PointNav: walk to a point given relative to the agent, and say when it is reached."""

from dataclasses import dataclass

import warp as wp

from shoal.nav.geodesic import distance_at
from shoal.nav.walk import Ground
from shoal.nav.world import STOP, NavConfig, NavWorld, begin_episode, move, show_previous


@dataclass(frozen=True)
class PointNavConfig(NavConfig):
    """Settings of PointNav."""

    reach: float = 0.2
    """Metres from the goal, along the floor, within which STOP succeeds."""
    slack: float = 0.01
    """Reward that each step costs."""
    bonus: float = 2.5
    """Reward for STOP, times SPL."""


@wp.func
def pursue(
    env: int,
    action: wp.array(dtype=int),
    row: wp.array(dtype=int),
    place: wp.array(dtype=wp.vec3),
    goal_slot: wp.array(dtype=int),
    goal: wp.array(dtype=wp.vec3),
    start_distance: wp.array(dtype=float),
    distance: wp.array(dtype=float),
    walked: wp.array(dtype=float),
    success: wp.array(dtype=float),
    spl: wp.array(dtype=float),
    soft_spl: wp.array(dtype=float),
    reward: wp.array(dtype=float),
    terminated: wp.array(dtype=wp.bool),
    ground: Ground,
    field: wp.array3d(dtype=wp.uint16),
    reach: float,
    slack: float,
    bonus: float,
):
    """Reward is the way gained, less a little for each step, and for STOP at the goal the SPL."""
    before = distance[env]
    now = distance_at(ground, row[env], field, goal_slot[env], goal[env], place[env])
    if now > 1.0e6:
        now = before
    distance[env] = now
    gain = before - now - slack
    best = wp.max(start_distance[env], walked[env])
    share = start_distance[env] / wp.max(best, 1.0e-6)
    soft_spl[env] = wp.max(0.0, 1.0 - now / wp.max(start_distance[env], 1.0e-6)) * share
    if action[env] == STOP:
        terminated[env] = True
        if now < reach:
            success[env] = 1.0
            spl[env] = share
            gain += bonus * share
    reward[env] = gain


@wp.func
def show_goal(
    env: int,
    place: wp.array(dtype=wp.vec3),
    yaw: wp.array(dtype=float),
    goal: wp.array(dtype=wp.vec3),
    first_extra: int,
    observation: wp.array2d(dtype=wp.float16),
):
    """Where the goal is from here: distance, cosine and sine of the direction."""
    away = goal[env] - place[env]
    angle = wp.atan2(away[1], away[0]) - yaw[env]
    observation[env, first_extra + 5] = wp.float16(wp.sqrt(away[0] * away[0] + away[1] * away[1]))
    observation[env, first_extra + 6] = wp.float16(wp.cos(angle))
    observation[env, first_extra + 7] = wp.float16(wp.sin(angle))


class PointNav(NavWorld):
    """Walk to a point in a house.

    | | |
    |---|---|
    | observation | depth (or RGB) image; the last action; the goal's distance and direction |
    | action | stop, forward 0.25 m, turn left 10 degrees, turn right 10 degrees |
    | reward | metres gained along the floor, -0.01 per step, 2.5 x SPL for stopping at the goal |
    | end | stop; truncated after 500 steps |
    | success | stop within 0.2 m of the goal, along the floor |
    """

    Config = PointNavConfig
    extras = (("previous", 5), ("goal", 3))
    reports = ("success", "spl", "soft_spl", "walked", "collisions")
    step = [move, pursue]
    reset = [begin_episode]
    observe = [show_previous, show_goal]
    settings = dict(
        common=dict(rollout=32, epochs=1, minibatches=2, gamma=0.99, clip_norm=1.0, eval_sample=True),
        cpu=dict(
            total_steps=500_000,
            num_envs=32,
            lr=1e-3,
            epochs=2,
            policy="se-resnet9-small",
            core="gru",
            core_size=128,
            world=dict(size=32, resident=4, goals=32, detail=0.0),
        ),
        gpu=dict(
            total_steps=60_000_000,
            num_envs=2048,
            lr=5e-4,
            optimiser="lamb",
            lr_scale="sqrt",
            lr_warmup=0.01,
            anneal="cosine",
            lr_end=0.01,
            entropy=0.01,
            normalise_advantage=False,
            policy="se-resnet9",
            core="lstm",
            core_size=512,
            core_layers=2,
        ),
    )
