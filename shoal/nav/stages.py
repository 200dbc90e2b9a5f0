"""Building blocks of tasks: functions that move agents, begin episodes and write observations."""

from typing import no_type_check

import warp as wp

from shoal.core.random import Random, integer, uniform
from shoal.core.stages import agents_mean
from shoal.nav.geodesic import distance_at
from shoal.nav.walk import Ground, cell_center, walk
from shoal.render.movers import CAPSULE, NONE

STOP, FORWARD, LEFT, RIGHT = 0, 1, 2, 3

NUM_PREVIOUS = 5
"""Values of the previous action: four actions, or none yet."""

MAX_TRIES = wp.constant(64)
"""Candidates for the start of an episode; if none meets all rules, the best one is used."""

STREAMS = wp.constant(3 * MAX_TRIES + 2)
"""Random streams reserved for the start of one agent."""

MIN_START_DISTANCE = wp.constant(0.5)
"""Minimum distance between the starts of two agents, in meters."""


@wp.func
@no_type_check
def move(
    env: int,
    num_agents: int,
    first_action: int,
    action: wp.array2d(dtype=int),
    present: wp.array2d(dtype=wp.bool),
    row: wp.array2d(dtype=int),
    place: wp.array2d(dtype=wp.vec3),
    yaw: wp.array2d(dtype=float),
    previous: wp.array2d(dtype=int),
    walked: wp.array2d(dtype=float),
    bumps: wp.array2d(dtype=float),
    path_length: wp.array(dtype=float),
    collisions: wp.array(dtype=float),
    step_count: wp.array(dtype=int),
    head_start: wp.array(dtype=int),
    truncated: wp.array(dtype=wp.bool),
    max_steps: int,
    ground: Ground,
    forward_step_size: float,
    turn_angle: float,
    allow_sliding: bool,
    agent_radius: float,
):
    """Move or turn the agents of an env in order; an agent stops before another one."""
    for k in range(num_agents):
        a = action[env, k] + first_action
        if present[env, k]:
            if a == FORWARD:
                here = place[env, k]
                along = wp.vec2(wp.cos(yaw[env, k]), wp.sin(yaw[env, k])) * forward_step_size
                done = walk(ground, row[env, k], here, along, allow_sliding)
                free = bool(True)
                for j in range(num_agents):
                    if j != k and present[env, j]:
                        gap = wp.length(place[env, j] - done.point)
                        if gap < 2.0 * agent_radius and gap < wp.length(place[env, j] - here):
                            free = False
                if free:
                    walked[env, k] = walked[env, k] + wp.length(done.point - here)
                    place[env, k] = done.point
                if done.blocked or not free:
                    bumps[env, k] = bumps[env, k] + 1.0
            elif a == LEFT:
                yaw[env, k] = yaw[env, k] + turn_angle
            elif a == RIGHT:
                yaw[env, k] = yaw[env, k] - turn_angle
            previous[env, k] = a + 1
    path_length[env] = agents_mean(env, walked)
    collisions[env] = agents_mean(env, bumps)
    truncated[env] = step_count[env] + head_start[env] >= max_steps


@wp.func
@no_type_check
def enter_scene(
    env: int,
    num_agents: int,
    evaluating: bool,
    rng: Random,
    env_id: wp.array(dtype=int),
    row: wp.array2d(dtype=int),
    present: wp.array2d(dtype=wp.bool),
    previous: wp.array2d(dtype=int),
    walked: wp.array2d(dtype=float),
    bumps: wp.array2d(dtype=float),
    path_length: wp.array(dtype=float),
    collisions: wp.array(dtype=float),
    active_rows: wp.array(dtype=int),
    num_active: wp.array(dtype=int),
):
    """Choose a scene in memory, at random or, in evaluations, by env number; reset the path."""
    c = integer(rng, 0, num_active[0])
    if evaluating:
        c = env_id[env] % num_active[0]
    for k in range(num_agents):
        row[env, k] = active_rows[c]
        present[env, k] = True
        previous[env, k] = 0
        walked[env, k] = 0.0
        bumps[env, k] = 0.0
    path_length[env] = 0.0
    collisions[env] = 0.0


@wp.func
@no_type_check
def reset_head_start(env: int, head_start: wp.array(dtype=int)):
    """Give the new episode the full time limit; only an env's first episode may be shorter."""
    head_start[env] = 0


@wp.func
@no_type_check
def is_apart(env: int, k: int, place: wp.array2d(dtype=wp.vec3), here: wp.vec3) -> bool:
    """Whether no agent before the k-th starts within `MIN_START_DISTANCE`."""
    apart = bool(True)
    for j in range(k):
        if wp.length(place[env, j] - here) < MIN_START_DISTANCE:
            apart = False
    return apart


@wp.func
@no_type_check
def episode_slot(
    env: int,
    k: int,
    evaluating: bool,
    rng: Random,
    env_id: wp.array(dtype=int),
    num_active: wp.array(dtype=int),
    count: int,
) -> int:
    """Episode of the k-th agent: random or, in evaluations, by env number; different for each agent of an env."""
    first = integer(rng, 1, count)
    if evaluating:
        first = env_id[env] // num_active[0]
    return (first + k) % count


@wp.func
@no_type_check
def sample_start_and_goal(
    env: int,
    num_agents: int,
    evaluating: bool,
    rng: Random,
    env_id: wp.array(dtype=int),
    row: wp.array2d(dtype=int),
    place: wp.array2d(dtype=wp.vec3),
    yaw: wp.array2d(dtype=float),
    goal_slot: wp.array2d(dtype=int),
    distance: wp.array2d(dtype=float),
    ground: Ground,
    field: wp.array3d(dtype=wp.uint16),
    goal_positions: wp.array2d(dtype=wp.vec3),
    start_cells: wp.array2d(dtype=int),
    goal_starts: wp.array2d(dtype=wp.vec2i),
    episode_count: wp.array(dtype=int),
    episode_start: wp.array2d(dtype=wp.vec4),
    num_active: wp.array(dtype=int),
    min_distance: float,
    max_distance: float,
):
    """Sample a start and goal by Habitat's rules (distance, height, few straight paths), or choose an episode."""
    for k in range(num_agents):
        r = row[env, k]
        first = 1 + k * STREAMS
        slot = int(0)
        from_ = wp.vec3()
        far = float(0.0)
        facing = uniform(rng, first + STREAMS - 1, -3.1415927, 3.1415927)
        if episode_count[r] > 0:
            slot = episode_slot(env, k, evaluating, rng, env_id, num_active, episode_count[r])
            given = episode_start[r, slot]
            from_ = wp.vec3(given[0], given[1], given[2])
            facing = given[3]
            far = distance_at(ground, r, field, slot, goal_positions[r, slot], from_)
        else:
            best = float(0.0)
            from_ = goal_positions[r, slot]
            for t in range(MAX_TRIES):
                if best < 2.0:
                    s = integer(rng, first + 3 * t, goal_positions.shape[1])
                    starts = goal_starts[r, s]
                    i = start_cells[r, starts[0] + integer(rng, first + 3 * t + 1, starts[1])]
                    here = cell_center(ground, r, i)
                    target = goal_positions[r, s]
                    d = distance_at(ground, r, field, s, target, here)
                    straight = wp.length(target - here)
                    fits = d >= min_distance and d <= max_distance and wp.abs(target[2] - here[2]) <= 0.5
                    ratio = d / wp.max(straight, 0.01)
                    keep = 20.0 * (ratio - 0.98) * (ratio - 0.98)
                    good = float(0.0)
                    if fits and is_apart(env, k, place, here):
                        good = 1.0
                        if ratio >= 1.1 or uniform(rng, first + 3 * t + 2, 0.0, 1.0) < keep:
                            good = 2.0
                    elif d < 1.0e6:
                        good = 0.5
                    if good > best:
                        best = good
                        slot = s
                        from_ = here
                        far = d
        goal_slot[env, k] = slot
        place[env, k] = from_
        yaw[env, k] = facing
        distance[env, k] = far


@wp.func
@no_type_check
def sample_start(
    env: int,
    num_agents: int,
    evaluating: bool,
    rng: Random,
    env_id: wp.array(dtype=int),
    row: wp.array2d(dtype=int),
    place: wp.array2d(dtype=wp.vec3),
    yaw: wp.array2d(dtype=float),
    goal_slot: wp.array2d(dtype=int),
    distance: wp.array2d(dtype=float),
    goal_positions: wp.array2d(dtype=wp.vec3),
    episode_count: wp.array(dtype=int),
    episode_start: wp.array2d(dtype=wp.vec4),
    num_active: wp.array(dtype=int),
):
    """Sample a start for tasks without a goal, or choose that of a given episode.

    The start is a point with a distance field, so `distance` is the distance from the start.
    """
    for k in range(num_agents):
        r = row[env, k]
        first = 1 + k * STREAMS
        slot = int(0)
        facing = uniform(rng, first + STREAMS - 1, -3.1415927, 3.1415927)
        if episode_count[r] > 0:
            slot = episode_slot(env, k, evaluating, rng, env_id, num_active, episode_count[r])
            facing = episode_start[r, slot][3]
        else:
            found = bool(False)
            for t in range(MAX_TRIES):
                if not found:
                    slot = integer(rng, first + t, goal_positions.shape[1])
                    found = is_apart(env, k, place, goal_positions[r, slot])
        goal_slot[env, k] = slot
        place[env, k] = goal_positions[r, slot]
        yaw[env, k] = facing
        distance[env, k] = 0.0


@wp.func
@no_type_check
def store_start(
    env: int,
    agent: int,
    row: wp.array2d(dtype=int),
    place: wp.array2d(dtype=wp.vec3),
    yaw: wp.array2d(dtype=float),
    goal_slot: wp.array2d(dtype=int),
    distance: wp.array2d(dtype=float),
    start: wp.array2d(dtype=wp.vec3),
    start_yaw: wp.array2d(dtype=float),
    goal: wp.array2d(dtype=wp.vec3),
    start_distance: wp.array2d(dtype=float),
    goal_positions: wp.array2d(dtype=wp.vec3),
):
    """Store the sampled start and goal."""
    start[env, agent] = place[env, agent]
    start_yaw[env, agent] = yaw[env, agent]
    goal[env, agent] = goal_positions[row[env, agent], goal_slot[env, agent]]
    start_distance[env, agent] = distance[env, agent]


@wp.func
@no_type_check
def observe_previous_action(
    env: int,
    agent: int,
    previous: wp.array2d(dtype=int),
    first_extra: int,
    observation: wp.array3d(dtype=wp.float16),
):
    """Write the previous action, one-hot."""
    for k in range(NUM_PREVIOUS):
        now = previous[env, agent] == k
        observation[env, agent, first_extra + k] = wp.where(now, wp.float16(1.0), wp.float16(0.0))


@wp.func
@no_type_check
def update_cameras(
    env: int,
    agent: int,
    camera_height: float,
    agent_height: float,
    place: wp.array2d(dtype=wp.vec3),
    yaw: wp.array2d(dtype=float),
    present: wp.array2d(dtype=wp.bool),
    eye_place: wp.array2d(dtype=wp.vec3),
    eye_turn: wp.array2d(dtype=wp.quat),
    body_kind: wp.array2d(dtype=int),
    body_place: wp.array2d(dtype=wp.vec3),
):
    """Write the pose of the camera, and the body that other agents see."""
    half = 0.5 * yaw[env, agent]
    here = place[env, agent]
    eye_place[env, agent] = wp.vec3(here[0], here[1], here[2] + camera_height)
    eye_turn[env, agent] = wp.quat(0.0, 0.0, wp.sin(half), wp.cos(half))
    body_kind[env, agent] = wp.where(present[env, agent], CAPSULE, NONE)
    body_place[env, agent] = wp.vec3(here[0], here[1], here[2] + 0.5 * agent_height)


@wp.func
@no_type_check
def update_alive(env: int, agent: int, present: wp.array2d(dtype=wp.bool), alive: wp.array2d(dtype=wp.bool)):
    """Mark agents that have stopped as no longer alive."""
    alive[env, agent] = present[env, agent]
