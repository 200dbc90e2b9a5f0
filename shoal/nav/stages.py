"""What tasks are made of: functions that move agents, begin episodes and write what is seen."""

import warp as wp

from shoal.core.random import Random, integer, uniform
from shoal.core.stages import agents_mean
from shoal.nav.geodesic import distance_at
from shoal.nav.walk import Ground, cell_middle, walk
from shoal.render.movers import CAPSULE, NONE

STOP, FORWARD, LEFT, RIGHT = 0, 1, 2, 3

PREVIOUS = 5
"""What the last action can have been: one of four, or none yet."""

TRIES = wp.constant(64)
"""Layout2D that are tried for the start of an episode before a less good one is taken."""

STREAMS = wp.constant(3 * TRIES + 2)
"""Streams of random numbers that the start of one agent takes."""

APART = wp.constant(0.5)
"""Meters between the starts of two agents at least."""


@wp.func
def move(
    env: int,
    agents: int,
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
    forward: float,
    turn: float,
    slide: bool,
    radius: float,
):
    """Walk or turn, one agent after the other; nobody walks into somebody."""
    for k in range(agents):
        a = action[env, k] + first_action
        if present[env, k]:
            if a == FORWARD:
                here = place[env, k]
                along = wp.vec2(wp.cos(yaw[env, k]), wp.sin(yaw[env, k])) * forward
                done = walk(ground, row[env, k], here, along, slide)
                free = bool(True)
                for j in range(agents):
                    if j != k and present[env, j]:
                        gap = wp.length(place[env, j] - done.place)
                        if gap < 2.0 * radius and gap < wp.length(place[env, j] - here):
                            free = False
                if free:
                    walked[env, k] = walked[env, k] + wp.length(done.place - here)
                    place[env, k] = done.place
                if done.blocked or not free:
                    bumps[env, k] = bumps[env, k] + 1.0
            elif a == LEFT:
                yaw[env, k] = yaw[env, k] + turn
            elif a == RIGHT:
                yaw[env, k] = yaw[env, k] - turn
            previous[env, k] = a + 1
    path_length[env] = agents_mean(env, walked)
    collisions[env] = agents_mean(env, bumps)
    truncated[env] = step_count[env] + head_start[env] >= max_steps


@wp.func
def enter_scene(
    env: int,
    agents: int,
    playing: bool,
    rng: Random,
    env_id: wp.array(dtype=int),
    row: wp.array2d(dtype=int),
    present: wp.array2d(dtype=wp.bool),
    previous: wp.array2d(dtype=int),
    walked: wp.array2d(dtype=float),
    bumps: wp.array2d(dtype=float),
    path_length: wp.array(dtype=float),
    collisions: wp.array(dtype=float),
    choice: wp.array(dtype=int),
    choices: wp.array(dtype=int),
):
    """One of the resident scenes: any; in an evaluation each in turn."""
    c = integer(rng, 0, choices[0])
    if playing:
        c = env_id[env] % choices[0]
    for k in range(agents):
        row[env, k] = choice[c]
        present[env, k] = True
        previous[env, k] = 0
        walked[env, k] = 0.0
        bumps[env, k] = 0.0
    path_length[env] = 0.0
    collisions[env] = 0.0


@wp.func
def begin_whole(env: int, head_start: wp.array(dtype=int)):
    """An episode lasts as long as the time limit, unless it is the first of its env."""
    head_start[env] = 0


@wp.func
def is_apart(env: int, k: int, place: wp.array2d(dtype=wp.vec3), here: wp.vec3) -> bool:
    """Whether no agent before the k-th starts near here."""
    apart = bool(True)
    for j in range(k):
        if wp.length(place[env, j] - here) < APART:
            apart = False
    return apart


@wp.func
def episode_slot(
    env: int,
    k: int,
    playing: bool,
    rng: Random,
    env_id: wp.array(dtype=int),
    choices: wp.array(dtype=int),
    count: int,
) -> int:
    """Which of the episodes of its scene the k-th agent plays: any; in an evaluation each in turn. No two the same."""
    first = integer(rng, 1, count)
    if playing:
        first = env_id[env] // choices[0]
    return (first + k) % count


@wp.func
def draw_route(
    env: int,
    agents: int,
    playing: bool,
    rng: Random,
    env_id: wp.array(dtype=int),
    row: wp.array2d(dtype=int),
    place: wp.array2d(dtype=wp.vec3),
    yaw: wp.array2d(dtype=float),
    goal_slot: wp.array2d(dtype=int),
    distance: wp.array2d(dtype=float),
    ground: Ground,
    field: wp.array3d(dtype=wp.uint16),
    goal_places: wp.array2d(dtype=wp.vec3),
    standing: wp.array2d(dtype=int),
    goal_starts: wp.array2d(dtype=wp.vec2i),
    episode_count: wp.array(dtype=int),
    episode_start: wp.array2d(dtype=wp.vec4),
    choices: wp.array(dtype=int),
    min_distance: float,
    max_distance: float,
):
    """A goal and a start that Habitat's rules allow: not too near, not too far, and rarely straight ahead.

    If the scene came with episodes, one of them.
    """
    for k in range(agents):
        r = row[env, k]
        first = 1 + k * STREAMS
        slot = int(0)
        from_ = wp.vec3()
        far = float(0.0)
        facing = uniform(rng, first + STREAMS - 1, -3.1415927, 3.1415927)
        if episode_count[r] > 0:
            slot = episode_slot(env, k, playing, rng, env_id, choices, episode_count[r])
            given = episode_start[r, slot]
            from_ = wp.vec3(given[0], given[1], given[2])
            facing = given[3]
            far = distance_at(ground, r, field, slot, goal_places[r, slot], from_)
        else:
            best = float(0.0)
            from_ = goal_places[r, slot]
            for t in range(TRIES):
                if best < 2.0:
                    s = integer(rng, first + 3 * t, goal_places.shape[1])
                    starts = goal_starts[r, s]
                    i = standing[r, starts[0] + integer(rng, first + 3 * t + 1, starts[1])]
                    here = cell_middle(ground, r, i)
                    target = goal_places[r, s]
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
def draw_start(
    env: int,
    agents: int,
    playing: bool,
    rng: Random,
    env_id: wp.array(dtype=int),
    row: wp.array2d(dtype=int),
    place: wp.array2d(dtype=wp.vec3),
    yaw: wp.array2d(dtype=float),
    goal_slot: wp.array2d(dtype=int),
    distance: wp.array2d(dtype=float),
    goal_places: wp.array2d(dtype=wp.vec3),
    episode_count: wp.array(dtype=int),
    episode_start: wp.array2d(dtype=wp.vec4),
    choices: wp.array(dtype=int),
):
    """For tasks without a goal: begin at a place that has a field of distances, which then are those from the start.

    If the scene came with episodes, where one of them begins.
    """
    for k in range(agents):
        r = row[env, k]
        first = 1 + k * STREAMS
        slot = int(0)
        facing = uniform(rng, first + STREAMS - 1, -3.1415927, 3.1415927)
        if episode_count[r] > 0:
            slot = episode_slot(env, k, playing, rng, env_id, choices, episode_count[r])
            facing = episode_start[r, slot][3]
        else:
            found = bool(False)
            for t in range(TRIES):
                if not found:
                    slot = integer(rng, first + t, goal_places.shape[1])
                    found = is_apart(env, k, place, goal_places[r, slot])
        goal_slot[env, k] = slot
        place[env, k] = goal_places[r, slot]
        yaw[env, k] = facing
        distance[env, k] = 0.0


@wp.func
def keep_start(
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
    goal_places: wp.array2d(dtype=wp.vec3),
):
    """Remember how the episode begins, once that has been drawn."""
    start[env, agent] = place[env, agent]
    start_yaw[env, agent] = yaw[env, agent]
    goal[env, agent] = goal_places[row[env, agent], goal_slot[env, agent]]
    start_distance[env, agent] = distance[env, agent]


@wp.func
def show_previous(
    env: int,
    agent: int,
    previous: wp.array2d(dtype=int),
    first_extra: int,
    observation: wp.array3d(dtype=wp.float16),
):
    """The last action, one of five."""
    for k in range(PREVIOUS):
        now = previous[env, agent] == k
        observation[env, agent, first_extra + k] = wp.where(now, wp.float16(1.0), wp.float16(0.0))


@wp.func
def aim(
    env: int,
    agent: int,
    eye: float,
    height: float,
    place: wp.array2d(dtype=wp.vec3),
    yaw: wp.array2d(dtype=float),
    present: wp.array2d(dtype=wp.bool),
    eye_place: wp.array2d(dtype=wp.vec3),
    eye_turn: wp.array2d(dtype=wp.quat),
    body_kind: wp.array2d(dtype=int),
    body_place: wp.array2d(dtype=wp.vec3),
):
    """Where the camera is and looks to, and what others see of the agent."""
    half = 0.5 * yaw[env, agent]
    here = place[env, agent]
    eye_place[env, agent] = wp.vec3(here[0], here[1], here[2] + eye)
    eye_turn[env, agent] = wp.quat(0.0, 0.0, wp.sin(half), wp.cos(half))
    body_kind[env, agent] = wp.where(present[env, agent], CAPSULE, NONE)
    body_place[env, agent] = wp.vec3(here[0], here[1], here[2] + 0.5 * height)


@wp.func
def show_alive(env: int, agent: int, present: wp.array2d(dtype=wp.bool), alive: wp.array2d(dtype=wp.bool)):
    """Who has stopped has left the game."""
    alive[env, agent] = present[env, agent]
