"""Sum tree of priorities with 32 children per node, descended by one thread per draw.

No sum uses atomics: a changed node is the sum of its children in a fixed order, so runs are reproducible bit for bit.
"""

from typing import no_type_check

import torch
import warp as wp

from shoal.core.launch import Plan, init_warp

wp.set_module_options({"enable_backward": False, "fuse_fp": False, "optimization_level": 3})

FANOUT = 32
"""Children per node: 128 bytes, one memory transaction of a GPU."""

CHILDREN = wp.constant(FANOUT)

MIN_PRIORITY = wp.constant(1.0e-30)
"""Priority of a leaf during an update; not 0, which means that it is never drawn."""

MAX_PRIORITY = wp.constant(1.0e30)
"""Maximum priority; sums of millions of these stay finite."""

BLOCK = 128

UNIT = 4096
"""Threads per CPU core; with fewer, a second core does not pay off."""


class SumTree:
    """A tree of `size` leaves, the priorities, and sums of 32 children each, up to the root.

    `nodes` holds all levels, leaves first, each padded with zeros to a multiple of 32. A leaf of priority 0 is never
    drawn, and updates do not change it.
    """

    def __init__(self, size: int, device: torch.device, alpha: float = 1.0, eps: float = 0.0):
        init_warp()
        self.size, self.device, self.alpha, self.eps = size, device, alpha, eps
        self.counts = [size]
        """Number of nodes per level, from the leaves to the root."""
        while self.counts[-1] > 1 or len(self.counts) == 1:
            self.counts.append(-(-self.counts[-1] // FANOUT))
        self.starts = [0]
        for count in self.counts[:-1]:
            self.starts.append(self.starts[-1] + -(-count // FANOUT) * FANOUT)
        self.nodes = torch.zeros(self.starts[-1] + 1, device=device)
        """float32: priorities, then the sums."""
        self.top = torch.ones(1, device=device)
        """float32 [1]: maximum priority so far, that of new leaves."""
        self._starts = torch.tensor(self.starts, dtype=torch.int32, device=device)
        self._first = torch.zeros(1, dtype=torch.int32, device=device)
        self._updates: dict[int, tuple[torch.Tensor, torch.Tensor, Plan]] = {}

    @property
    def leaves(self) -> torch.Tensor:
        return self.nodes[: self.size]

    @property
    def inputs(self) -> list:
        """Arguments of `descend` after the target."""
        return [len(self.starts), wp.from_torch(self._starts), wp.from_torch(self.nodes)]

    def update(self, leaf_index: torch.Tensor, error: torch.Tensor) -> None:
        """Set the priorities of leaves `leaf_index` [n] to (|error| + eps)^alpha; of duplicates, the maximum counts."""
        count = leaf_index.numel()
        if count not in self._updates:
            self._updates[count] = self._update_plan(count)
        leaf_indices, errors, plan = self._updates[count]
        leaf_indices.copy_(leaf_index)
        errors.copy_(error)
        plan()

    def _update_plan(self, count: int) -> tuple[torch.Tensor, torch.Tensor, Plan]:
        leaf_index = torch.zeros(count, dtype=torch.int32, device=self.device)
        error = torch.zeros(count, device=self.device)
        nodes, leaf_indices = wp.from_torch(self.nodes), wp.from_torch(leaf_index)
        plan = Plan(self.device, count)
        plan.add_kernel(reset_leaves, count, [leaf_indices, nodes], unit=UNIT, block=BLOCK)
        inputs = [self.alpha, self.eps, leaf_indices, wp.from_torch(error), nodes, wp.from_torch(self.top)]
        # One CPU thread, because Warp's atomics on a CPU are plain reads and writes.
        plan.add_kernel(set_leaf_priorities, count, inputs, unit=count, block=BLOCK)
        for level in range(1, len(self.counts)):
            if self.counts[level] > count:
                levels = [self.starts[level - 1], self.starts[level], FANOUT**level]
                plan.add_kernel(update_parents, count, [*levels, leaf_indices, nodes], unit=UNIT, block=BLOCK)
            else:
                self._add_range(plan, level, wp.from_torch(self._first), self.size)
        return leaf_index, error, plan

    def recompute_sums(self) -> None:
        """Recompute all sums from the leaves, equal bit for bit to incremental updates."""
        self.range_plan(self._first, self.size)()

    def range_plan(self, begin: torch.Tensor, length: int) -> Plan:
        """Plan that updates all sums above `length` leaves from `begin` (int32 [1]), wrapping around the end."""
        plan = Plan(self.device, length)
        for level in range(1, len(self.counts)):
            self._add_range(plan, level, wp.from_torch(begin), length)
        return plan

    def _add_range(self, plan: Plan, level: int, begin: wp.array, length: int) -> None:
        reach = FANOUT**level
        # Each end of the range, and the wrap-around, may split the children of a node.
        count = min(self.counts[level], -(-length // reach) + 3)
        levels = [self.starts[level - 1], self.starts[level], reach, self.counts[level]]
        plan.add_kernel(update_node_range, count, [*levels, begin, wp.from_torch(self.nodes)], unit=UNIT, block=BLOCK)


@wp.func
@no_type_check
def descend(target: wp.float64, levels: int, starts: wp.array(dtype=int), nodes: wp.array(dtype=float)) -> int:
    """The first leaf whose cumulative sum exceeds `target`, which is below the total."""
    node = int(0)
    remainder = target
    for up in range(levels - 1):
        base = starts[levels - 2 - up] + node * CHILDREN
        chosen = int(0)
        found = bool(False)
        k = int(0)
        while k < CHILDREN and not found:
            value = wp.float64(nodes[base + k])
            if value > wp.float64(0.0):
                chosen = k  # the last nonzero child, if rounding leads beyond the last one
                found = remainder < value
                if not found:
                    remainder -= value
            k += 1
        node = node * CHILDREN + chosen
    return node


@wp.func
@no_type_check
def sum_of_children(child: int, node: int, nodes: wp.array(dtype=float)) -> float:
    """The sum of a node's children, in a fixed order."""
    total = float(0.0)
    for k in range(CHILDREN):
        total += nodes[child + node * CHILDREN + k]
    return total


@wp.kernel
@no_type_check
def reset_leaves(first: int, leaf_index: wp.array(dtype=int), nodes: wp.array(dtype=float)):
    """Reset the priorities that are about to change."""
    leaf = leaf_index[first + wp.tid()]
    if nodes[leaf] > 0.0:
        nodes[leaf] = MIN_PRIORITY


@wp.kernel
@no_type_check
def set_leaf_priorities(
    first: int,
    alpha: float,
    eps: float,
    leaf_index: wp.array(dtype=int),
    error: wp.array(dtype=float),
    nodes: wp.array(dtype=float),
    top: wp.array(dtype=float),
):
    """Set new priorities. Leaves at 0 stay 0; errors that are not finite leave `MIN_PRIORITY`."""
    i = first + wp.tid()
    leaf = leaf_index[i]
    priority = wp.min(wp.pow(wp.abs(error[i]) + eps, alpha), MAX_PRIORITY)
    if nodes[leaf] > 0.0 and wp.isfinite(error[i]):
        wp.atomic_max(nodes, leaf, priority)
        if priority > top[0]:  # few threads enter, which avoids contention on one address
            wp.atomic_max(top, 0, priority)


@wp.kernel
@no_type_check
def update_parents(
    first: int, child: int, parent: int, reach: int, leaf_index: wp.array(dtype=int), nodes: wp.array(dtype=float)
):
    """Update the nodes of one level above some leaves. Threads that share a node write the same value."""
    node = leaf_index[first + wp.tid()] // reach
    nodes[parent + node] = sum_of_children(child, node, nodes)


@wp.kernel
@no_type_check
def update_node_range(
    first: int,
    child: int,
    parent: int,
    reach: int,
    count: int,
    begin: wp.array(dtype=int),
    nodes: wp.array(dtype=float),
):
    """Update consecutive nodes of one level, starting above leaf `begin`."""
    node = (begin[0] // reach + first + wp.tid()) % count
    nodes[parent + node] = sum_of_children(child, node, nodes)
