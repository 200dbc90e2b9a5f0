"""The kernels of a replay: numbering, priorities, draws, and what followed on a step within its episode."""

import warp as wp

from shoal.core.random import below, philox, vec4u
from shoal.learn.sum_tree import descend

wp.set_module_options({"enable_backward": False, "fuse_fp": False, "optimization_level": 3})

DRAW_STREAM = wp.constant(wp.uint32(1 << 31))
"""Stream of the random numbers of draws, above those of worlds and of actions."""


@wp.struct
class Ring:
    """What kernels see of a replay; `Replay` says what the arrays hold."""

    rows: int
    envs: int
    agents: int
    stack: int
    kept: int
    leaves: bool
    waits: bool
    head: wp.array(dtype=int)
    filled: wp.array(dtype=int)
    age: wp.array2d(dtype=int)
    reward: wp.array3d(dtype=float)
    terminated: wp.array2d(dtype=wp.bool)
    truncated: wp.array2d(dtype=wp.bool)
    alive: wp.array3d(dtype=wp.bool)
    is_decision_step: wp.array3d(dtype=wp.bool)
    serial: wp.array2d(dtype=int)
    final_count: wp.array(dtype=int)
    final_alive: wp.array3d(dtype=wp.bool)


@wp.kernel
def number_finals(first: int, ring: Ring, steps: int, slots: int, taken: wp.array(dtype=int)):
    """Number the final observations of an env in the rows from the head on, in the order in which slots hold them."""
    env = first + wp.tid()
    found = int(0)
    for t in range(steps):
        row = (ring.head[0] + t) % ring.rows
        number = int(-1)
        if ring.truncated[row, env] and not ring.terminated[row, env] and found < slots:
            number = ring.final_count[env] + found
            found += 1
        ring.serial[row, env] = number
    taken[env] = found
    ring.final_count[env] = ring.final_count[env] + found


@wp.func
def chooses(ring: Ring, row: int, env: int, agent: int) -> bool:
    """Whether an agent was in the game then, and the action its choice."""
    found = bool(True)
    if ring.leaves:
        found = ring.alive[row, env, agent]
    if ring.waits:
        found = found and ring.is_decision_step[row, env, agent]
    return found


@wp.func
def ever_chooses(ring: Ring, row: int, span: int, env: int, agent: int) -> bool:
    """Whether there is anything to learn in so many rows."""
    found = bool(False)
    for t in range(span):
        if not found:
            found = chooses(ring, (row + t) % ring.rows, env, agent)
    return found


@wp.kernel
def set_leaves(
    first: int,
    ring: Ring,
    farthest: int,
    stride: int,
    span: int,
    window: int,
    top: wp.array(dtype=float),
    nodes: wp.array(dtype=float),
):
    """Of rows that have got their future the top priority; 0 for those without, and for those without a history."""
    i = first + wp.tid()
    cells = ring.envs * ring.agents
    behind = (farthest - i // cells) * stride  # rows behind the head; from 0 down they are the oldest ones
    row = (ring.head[0] - behind + ring.rows) % ring.rows
    env = (i % cells) // ring.agents
    agent = i % ring.agents
    priority = float(0.0)
    if behind >= window and behind <= ring.filled[0] - ring.stack + 1:
        if ever_chooses(ring, row, span, env, agent):
            priority = top[0]
    nodes[row // stride * cells + i % cells] = priority


@wp.func
def draw_words(i: int, seed: int, counter: wp.array(dtype=int)):
    """Four random words for the i-th place of a draw."""
    return philox(vec4u(wp.uint32(i), wp.uint32(counter[0]), wp.uint32(0), DRAW_STREAM), wp.uint64(seed))


@wp.kernel
def draw_uniform(
    first: int,
    ring: Ring,
    batch: int,
    process: int,
    processes: int,
    seed: int,
    counter: wp.array(dtype=int),
    stride: int,
    span: int,
    window: int,
    place: wp.array(dtype=wp.int64),
    priority: wp.array(dtype=float),
):
    """Any of the rows that have both history and future; the priority is 1, or 0 where there is nothing to learn.

    The batch divides the envs and agents, those of all processes, into equal parts; one is drawn from each. So a
    process draws from its own ones, and whatever the number of processes, together they draw the same.
    """
    i = first + wp.tid()
    number = process * batch + i
    words = draw_words(number, seed, counter)
    cells = ring.envs * ring.agents
    nearest = (window + stride - 1) // stride
    choices = wp.max((ring.filled[0] - ring.stack + 1) // stride - nearest + 1, 1)
    behind = (nearest + below(words[0], choices)) * stride
    row = (ring.head[0] - behind + ring.rows) % ring.rows
    share = (wp.float64(number) + wp.float64(words[1]) * wp.float64(2.3283064365386963e-10)) / wp.float64(
        processes * batch
    )
    among_all = wp.int64(share * wp.float64(processes) * wp.float64(cells))
    cell = wp.clamp(int(among_all - wp.int64(process) * wp.int64(cells)), 0, cells - 1)
    place[i] = wp.int64(row // stride) * wp.int64(cells) + wp.int64(cell)
    known = ever_chooses(ring, row, span, cell // ring.agents, cell % ring.agents)
    priority[i] = wp.where(known, 1.0, 0.0)


@wp.kernel
def draw_by_priority(
    first: int,
    batch: int,
    process: int,
    seed: int,
    counter: wp.array(dtype=int),
    levels: int,
    starts: wp.array(dtype=int),
    nodes: wp.array(dtype=float),
    place: wp.array(dtype=wp.int64),
    priority: wp.array(dtype=float),
):
    """The batch divides the sum of all priorities into equal parts; one place is drawn from each."""
    i = first + wp.tid()
    words = draw_words(process * batch + i, seed, counter)
    share = (wp.float64(i) + wp.float64(words[0]) * wp.float64(2.3283064365386963e-10)) / wp.float64(batch)
    leaf = descend(share * wp.float64(nodes[starts[levels - 1]]), levels, starts, nodes)
    place[i] = wp.int64(leaf)
    priority[i] = nodes[leaf]


@wp.struct
class Window:
    """What an agent went on to get, and from where to bootstrap."""

    reward: float
    discount: float
    ahead: int
    """Steps to the row that comes next in the window, or in which the episode was truncated if `final`."""
    final: bool
    slot: int
    lost: bool


@wp.func
def look_ahead(ring: Ring, n_step: int, gamma: float, row: int, env: int, agent: int) -> Window:
    """Up to n steps on: to the end of the episode, or until the agent leaves."""
    w = Window()
    worth = float(1.0)
    total = float(0.0)
    going = bool(True)
    for k in range(n_step):
        if going:
            now = (row + k) % ring.rows
            total += worth * ring.reward[now, env, agent]
            worth *= gamma
            if ring.terminated[now, env]:
                going = False
            elif ring.truncated[now, env]:
                going = False
                number = ring.serial[now, env]
                w.final = True
                w.ahead = k
                w.slot = number % ring.kept
                w.lost = number < 0 or ring.final_count[env] - number > ring.kept
                w.discount = worth
                if ring.leaves:
                    if not w.lost:
                        if not ring.final_alive[w.slot, env, agent]:
                            w.discount = 0.0
            elif ring.leaves:
                going = ring.alive[(now + 1) % ring.rows, env, agent]
    if going:
        w.ahead = n_step
        w.discount = worth
    w.reward = total
    return w


@wp.func
def frame_at(ring: Ring, row: int, env: int, agent: int, k: int) -> int:
    """The k-th frame that an agent sees at a row: not from before its episode."""
    back = int(0)
    if ring.stack > 1:
        back = wp.min(ring.stack - 1 - k, ring.age[row, env])
    return (((row - back + ring.rows) % ring.rows) * ring.envs + env) * ring.agents + agent


@wp.func
def located(ring: Ring, place: wp.int64) -> wp.vec3i:
    """Row (or number of the sequence), env and agent of a place."""
    number = int(place)
    cell = number // ring.agents
    return wp.vec3i(cell // ring.envs, cell % ring.envs, number % ring.agents)


@wp.func
def place_of(ring: Ring, row: int, env: int, agent: int) -> wp.int64:
    """The number of a place."""
    return (wp.int64(row) * wp.int64(ring.envs) + wp.int64(env)) * wp.int64(ring.agents) + wp.int64(agent)


@wp.func
def final_at(ring: Ring, slot: int, env: int, agent: int) -> int:
    """The source that stands for a final observation: below 0."""
    return -1 - ((slot * ring.envs + env) * ring.agents + agent)


@wp.kernel
def look(
    first: int,
    ring: Ring,
    n_step: int,
    gamma: float,
    place: wp.array(dtype=wp.int64),
    priority: wp.array(dtype=float),
    later_place: wp.array(dtype=wp.int64),
    reward: wp.array(dtype=float),
    discount: wp.array(dtype=float),
    counts: wp.array(dtype=wp.bool),
    source: wp.array2d(dtype=int),
    later_source: wp.array2d(dtype=int),
):
    """What followed on each place, and which frames to show."""
    i = first + wp.tid()
    at = located(ring, place[i])
    row = at[0]
    env = at[1]
    agent = at[2]
    w = look_ahead(ring, n_step, gamma, row, env, agent)
    reward[i] = w.reward
    discount[i] = w.discount
    counts[i] = priority[i] > 0.0 and not w.lost
    final = w.final and not w.lost
    later = row
    if not w.final:
        later = (row + w.ahead) % ring.rows
    later_place[i] = place_of(ring, later, env, agent)
    for k in range(ring.stack):
        source[i, k] = frame_at(ring, row, env, agent, k)
        if final:
            later_source[i, k] = final_at(ring, w.slot, env, agent)
        else:
            later_source[i, k] = frame_at(ring, later, env, agent, k)


@wp.kernel
def lay_out(
    first: int,
    ring: Ring,
    stride: int,
    place: wp.array(dtype=wp.int64),
    priority: wp.array(dtype=float),
    counted: wp.array(dtype=wp.bool),
    at: wp.array2d(dtype=wp.int64),
    alive: wp.array2d(dtype=wp.bool),
    final_index: wp.array2d(dtype=int),
    final_row: wp.array2d(dtype=wp.int64),
    source: wp.array3d(dtype=int),
    final_source: wp.array3d(dtype=int),
):
    """The rows of each sequence, which frames to show, and its first truncated episodes."""
    i = first + wp.tid()
    which = located(ring, place[i])
    begin = which[0] * stride
    env = which[1]
    agent = which[2]
    counted[i] = priority[i] > 0.0
    found = int(0)
    for t in range(at.shape[0]):
        row = (begin + t) % ring.rows
        at[t, i] = place_of(ring, row, env, agent)
        alive[t, i] = chooses(ring, row, env, agent)
        for k in range(ring.stack):
            source[t, i, k] = frame_at(ring, row, env, agent, k)
        index = int(-1)
        serial = ring.serial[row, env]
        if serial >= 0 and ring.final_count[env] - serial <= ring.kept and found < final_row.shape[0]:
            index = found
            final_row[found, i] = wp.int64(t)
            for k in range(ring.stack):
                final_source[found, i, k] = final_at(ring, serial % ring.kept, env, agent)
            found += 1
        final_index[t, i] = index
    for f in range(found, final_row.shape[0]):
        final_row[f, i] = wp.int64(-1)
        for k in range(ring.stack):
            final_source[f, i, k] = source[0, i, k]


@wp.kernel
def look_along(
    first: int,
    ring: Ring,
    stride: int,
    batch: int,
    n_step: int,
    gamma: float,
    place: wp.array(dtype=wp.int64),
    alive: wp.array2d(dtype=wp.bool),
    final_index: wp.array2d(dtype=int),
    reward: wp.array2d(dtype=float),
    discount: wp.array2d(dtype=float),
    later: wp.array2d(dtype=wp.int64),
    counts: wp.array2d(dtype=wp.bool),
):
    """What followed on each row of each sequence."""
    n = first + wp.tid()
    t = n // batch
    i = n % batch
    which = located(ring, place[i])
    row = (which[0] * stride + t) % ring.rows
    env = which[1]
    agent = which[2]
    w = look_ahead(ring, n_step, gamma, row, env, agent)
    reward[t, i] = w.reward
    discount[t, i] = w.discount
    known = alive[t, i]
    target = t + w.ahead
    if w.final:
        index = final_index[target, i]
        known = known and index >= 0
        target = wp.where(index >= 0, final_index.shape[0] + index, t)
    later[t, i] = wp.int64(target)
    counts[t, i] = known
