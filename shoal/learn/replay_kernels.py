"""Kernels of the replay: serial numbers, priorities, draws and n-step returns."""

from typing import no_type_check

import warp as wp

from shoal.core.random import below, philox, vec4u
from shoal.learn.sum_tree import descend

wp.set_module_options({"enable_backward": False, "fuse_fp": False, "optimization_level": 3})

DRAW_STREAM = wp.constant(wp.uint32(1 << 31))
"""Random stream of draws, distinct from those of worlds and of actions."""


@wp.struct
class Ring:
    """A replay as an argument of kernels; `Replay` documents the arrays."""

    rows: int
    envs: int
    agents: int
    stack: int
    num_slots: int
    can_leave: bool
    can_wait: bool
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
@no_type_check
def assign_final_serials(first: int, ring: Ring, steps: int, slots: int, new_finals: wp.array(dtype=int)):
    """Assign serial numbers to an env's final observations in the `steps` rows from the head, in slot order."""
    env = first + wp.tid()
    found = int(0)
    for t in range(steps):
        row = (ring.head[0] + t) % ring.rows
        serial = int(-1)
        if ring.truncated[row, env] and not ring.terminated[row, env] and found < slots:
            serial = ring.final_count[env] + found
            found += 1
        ring.serial[row, env] = serial
    new_finals[env] = found
    ring.final_count[env] = ring.final_count[env] + found


@wp.func
@no_type_check
def is_decision(ring: Ring, row: int, env: int, agent: int) -> bool:
    """Whether the agent was alive and chose its action at this row."""
    found = bool(True)
    if ring.can_leave:
        found = ring.alive[row, env, agent]
    if ring.can_wait:
        found = found and ring.is_decision_step[row, env, agent]
    return found


@wp.func
@no_type_check
def any_decision(ring: Ring, row: int, span: int, env: int, agent: int) -> bool:
    """Whether the agent chose any action in `span` rows."""
    found = bool(False)
    for t in range(span):
        if not found:
            found = is_decision(ring, (row + t) % ring.rows, env, agent)
    return found


@wp.kernel
@no_type_check
def set_new_priorities(
    first: int,
    ring: Ring,
    max_behind: int,
    stride: int,
    span: int,
    window: int,
    top: wp.array(dtype=float),
    nodes: wp.array(dtype=float),
):
    """Give transitions with a complete n-step window the maximum priority so far, all others 0."""
    i = first + wp.tid()
    cells = ring.envs * ring.agents
    behind = (max_behind - i // cells) * stride  # rows behind the head; 0 and below: the oldest rows
    row = (ring.head[0] - behind + ring.rows) % ring.rows
    env = (i % cells) // ring.agents
    agent = i % ring.agents
    priority = float(0.0)
    if behind >= window and behind <= ring.filled[0] - ring.stack + 1:
        if any_decision(ring, row, span, env, agent):
            priority = top[0]
    nodes[row // stride * cells + i % cells] = priority


@wp.func
@no_type_check
def draw_words(i: int, seed: int, counter: wp.array(dtype=int)):
    """Four random words for the i-th element of a draw."""
    return philox(vec4u(wp.uint32(i), wp.uint32(counter[0]), wp.uint32(0), DRAW_STREAM), wp.uint64(seed))


@wp.kernel
@no_type_check
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
    index: wp.array(dtype=wp.int64),
    priority: wp.array(dtype=float),
):
    """Draw uniformly from rows with complete history and n-step window; priority 1, or 0 without a decision.

    Stratified over the envs and agents of all processes: each process draws its own strata, so the number of processes
    does not change what all of them draw.
    """
    i = first + wp.tid()
    stratum = process * batch + i
    words = draw_words(stratum, seed, counter)
    cells = ring.envs * ring.agents
    min_behind = (window + stride - 1) // stride
    choices = wp.max((ring.filled[0] - ring.stack + 1) // stride - min_behind + 1, 1)
    behind = (min_behind + below(words[0], choices)) * stride
    row = (ring.head[0] - behind + ring.rows) % ring.rows
    share = (wp.float64(stratum) + wp.float64(words[1]) * wp.float64(2.3283064365386963e-10)) / wp.float64(
        processes * batch
    )
    among_all = wp.int64(share * wp.float64(processes) * wp.float64(cells))
    cell = wp.clamp(int(among_all - wp.int64(process) * wp.int64(cells)), 0, cells - 1)
    index[i] = wp.int64(row // stride) * wp.int64(cells) + wp.int64(cell)
    valid = any_decision(ring, row, span, cell // ring.agents, cell % ring.agents)
    priority[i] = wp.where(valid, 1.0, 0.0)


@wp.kernel
@no_type_check
def draw_by_priority(
    first: int,
    batch: int,
    process: int,
    seed: int,
    counter: wp.array(dtype=int),
    levels: int,
    starts: wp.array(dtype=int),
    nodes: wp.array(dtype=float),
    index: wp.array(dtype=wp.int64),
    priority: wp.array(dtype=float),
):
    """Draw one index from each of `batch` equal parts of the sum of all priorities."""
    i = first + wp.tid()
    words = draw_words(process * batch + i, seed, counter)
    share = (wp.float64(i) + wp.float64(words[0]) * wp.float64(2.3283064365386963e-10)) / wp.float64(batch)
    leaf = descend(share * wp.float64(nodes[starts[levels - 1]]), levels, starts, nodes)
    index[i] = wp.int64(leaf)
    priority[i] = nodes[leaf]


@wp.struct
class NStepWindow:
    """An n-step return and the row to bootstrap from."""

    reward: float
    discount: float
    length: int
    """Steps to the row to bootstrap from; if `final`, to the row in which the episode was truncated."""
    final: bool
    """Whether to bootstrap from the final observation in `slot`."""
    slot: int
    lost: bool
    """Whether that final observation is no longer stored."""


@wp.func
@no_type_check
def n_step_window(ring: Ring, n_step: int, gamma: float, row: int, env: int, agent: int) -> NStepWindow:
    """Up to n steps, until the episode ends or the agent leaves."""
    w = NStepWindow()
    discount = float(1.0)
    total = float(0.0)
    active = bool(True)
    for k in range(n_step):
        if active:
            current = (row + k) % ring.rows
            total += discount * ring.reward[current, env, agent]
            discount *= gamma
            if ring.terminated[current, env]:
                active = False
            elif ring.truncated[current, env]:
                active = False
                serial = ring.serial[current, env]
                w.final = True
                w.length = k
                w.slot = serial % ring.num_slots
                w.lost = serial < 0 or ring.final_count[env] - serial > ring.num_slots
                w.discount = discount
                if ring.can_leave:
                    if not w.lost:
                        if not ring.final_alive[w.slot, env, agent]:
                            w.discount = 0.0
            elif ring.can_leave:
                active = ring.alive[(current + 1) % ring.rows, env, agent]
    if active:
        w.length = n_step
        w.discount = discount
    w.reward = total
    return w


@wp.func
@no_type_check
def source_of_frame(ring: Ring, row: int, env: int, agent: int, k: int) -> int:
    """Index in `frames` of the k-th stacked frame at a row, never from before the episode."""
    back = int(0)
    if ring.stack > 1:
        back = wp.min(ring.stack - 1 - k, ring.age[row, env])
    return (((row - back + ring.rows) % ring.rows) * ring.envs + env) * ring.agents + agent


@wp.func
@no_type_check
def unpack_index(ring: Ring, index: wp.int64) -> wp.vec3i:
    """Row (or position of the sequence), env and agent of an index."""
    i = int(index)
    cell = i // ring.agents
    return wp.vec3i(cell // ring.envs, cell % ring.envs, i % ring.agents)


@wp.func
@no_type_check
def pack_index(ring: Ring, row: int, env: int, agent: int) -> wp.int64:
    """Index of a row, env and agent."""
    return (wp.int64(row) * wp.int64(ring.envs) + wp.int64(env)) * wp.int64(ring.agents) + wp.int64(agent)


@wp.func
@no_type_check
def source_of_final(ring: Ring, slot: int, env: int, agent: int) -> int:
    """Source index of a final observation, below 0."""
    return -1 - ((slot * ring.envs + env) * ring.agents + agent)


@wp.kernel
@no_type_check
def gather_transitions(
    first: int,
    ring: Ring,
    n_step: int,
    gamma: float,
    index: wp.array(dtype=wp.int64),
    priority: wp.array(dtype=float),
    next_index: wp.array(dtype=wp.int64),
    reward: wp.array(dtype=float),
    discount: wp.array(dtype=float),
    valid: wp.array(dtype=wp.bool),
    source: wp.array2d(dtype=int),
    next_source: wp.array2d(dtype=int),
):
    """N-step return of each transition, and the sources of its frames."""
    i = first + wp.tid()
    at = unpack_index(ring, index[i])
    row = at[0]
    env = at[1]
    agent = at[2]
    w = n_step_window(ring, n_step, gamma, row, env, agent)
    reward[i] = w.reward
    discount[i] = w.discount
    valid[i] = priority[i] > 0.0 and not w.lost
    final = w.final and not w.lost
    next_row = row
    if not w.final:
        next_row = (row + w.length) % ring.rows
    next_index[i] = pack_index(ring, next_row, env, agent)
    for k in range(ring.stack):
        source[i, k] = source_of_frame(ring, row, env, agent, k)
        if final:
            next_source[i, k] = source_of_final(ring, w.slot, env, agent)
        else:
            next_source[i, k] = source_of_frame(ring, next_row, env, agent, k)


@wp.kernel
@no_type_check
def gather_sequence_rows(
    first: int,
    ring: Ring,
    stride: int,
    index: wp.array(dtype=wp.int64),
    priority: wp.array(dtype=float),
    drawable: wp.array(dtype=wp.bool),
    cell: wp.array2d(dtype=wp.int64),
    alive: wp.array2d(dtype=wp.bool),
    final_index: wp.array2d(dtype=int),
    final_row: wp.array2d(dtype=wp.int64),
    source: wp.array3d(dtype=int),
    final_source: wp.array3d(dtype=int),
):
    """Cells and frame sources of each sequence, and its first truncated episodes."""
    i = first + wp.tid()
    start = unpack_index(ring, index[i])
    first_row = start[0] * stride
    env = start[1]
    agent = start[2]
    drawable[i] = priority[i] > 0.0
    found = int(0)
    for t in range(cell.shape[0]):
        row = (first_row + t) % ring.rows
        cell[t, i] = pack_index(ring, row, env, agent)
        alive[t, i] = is_decision(ring, row, env, agent)
        for k in range(ring.stack):
            source[t, i, k] = source_of_frame(ring, row, env, agent, k)
        order = int(-1)
        serial = ring.serial[row, env]
        if serial >= 0 and ring.final_count[env] - serial <= ring.num_slots and found < final_row.shape[0]:
            order = found
            final_row[found, i] = wp.int64(t)
            for k in range(ring.stack):
                final_source[found, i, k] = source_of_final(ring, serial % ring.num_slots, env, agent)
            found += 1
        final_index[t, i] = order
    for f in range(found, final_row.shape[0]):
        final_row[f, i] = wp.int64(-1)
        for k in range(ring.stack):
            final_source[f, i, k] = source[0, i, k]


@wp.kernel
@no_type_check
def gather_sequence_targets(
    first: int,
    ring: Ring,
    stride: int,
    batch: int,
    n_step: int,
    gamma: float,
    index: wp.array(dtype=wp.int64),
    alive: wp.array2d(dtype=wp.bool),
    final_index: wp.array2d(dtype=int),
    reward: wp.array2d(dtype=float),
    discount: wp.array2d(dtype=float),
    next_row: wp.array2d(dtype=wp.int64),
    valid: wp.array2d(dtype=wp.bool),
):
    """N-step return of each row of each sequence, and the row of q to bootstrap from."""
    n = first + wp.tid()
    t = n // batch
    i = n % batch
    start = unpack_index(ring, index[i])
    row = (start[0] * stride + t) % ring.rows
    env = start[1]
    agent = start[2]
    w = n_step_window(ring, n_step, gamma, row, env, agent)
    reward[t, i] = w.reward
    discount[t, i] = w.discount
    is_valid = alive[t, i]
    target = t + w.length
    if w.final:
        order = final_index[target, i]
        is_valid = is_valid and order >= 0
        target = wp.where(order >= 0, final_index.shape[0] + order, t)
    next_row[t, i] = wp.int64(target)
    valid[t, i] = is_valid
