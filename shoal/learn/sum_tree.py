"""Priorities that can be drawn from: a tree of sums, 32 children to a node, walked down by one thread per draw.

Nothing is added up by atomics: a changed node is the sum of its children in their order, so that runs repeat bit for
bit, on CPU and GPU alike.
"""

import torch
import warp as wp

from shoal.core.launch import Plan, init_warp

wp.set_module_options({"enable_backward": False, "fuse_fp": False, "optimization_level": 3})

FAN = 32
"""Children of a node: 128 bytes, what a GPU reads at once."""

CHILDREN = wp.constant(FAN)

LEAST = wp.constant(1.0e-30)
"""What a leaf holds while it gets a new priority: next to nothing, but not 0, which means 'never'."""

MOST = wp.constant(1.0e30)
"""An upper limit to priorities: sums of millions of them stay finite."""

BLOCK = 128

UNIT = 4096
"""Threads of these kernels below which a second core of a CPU costs more than it brings."""


class SumTree:
    """`size` priorities, the leaves, and above them sums of 32 at a time, up to one number.

    `nodes` holds all levels in one row, leaves first, each padded with zeros to whole families. A leaf of 0 is never
    drawn, and no error raises it: it is the place of something that must not be sampled.
    """

    def __init__(self, size: int, device: torch.device, alpha: float = 1.0, eps: float = 0.0):
        init_warp()
        self.size, self.device, self.alpha, self.eps = size, device, alpha, eps
        self.counts = [size]
        """Nodes of every level, from the leaves to the root."""
        while self.counts[-1] > 1 or len(self.counts) == 1:
            self.counts.append(-(-self.counts[-1] // FAN))
        self.starts = [0]
        for count in self.counts[:-1]:
            self.starts.append(self.starts[-1] + -(-count // FAN) * FAN)
        self.nodes = torch.zeros(self.starts[-1] + 1, device=device)
        """float32: priorities, then sums."""
        self.top = torch.ones(1, device=device)
        """float32 [1]: the largest priority so far, which new leaves are given."""
        self._starts = torch.tensor(self.starts, dtype=torch.int32, device=device)
        self._first = torch.zeros(1, dtype=torch.int32, device=device)
        self._updates: dict[int, tuple[torch.Tensor, torch.Tensor, Plan]] = {}

    @property
    def leaves(self) -> torch.Tensor:
        return self.nodes[: self.size]

    @property
    def inputs(self) -> list:
        """What `descend` takes after the point to go to."""
        return [len(self.starts), wp.from_torch(self._starts), wp.from_torch(self.nodes)]

    def update(self, place: torch.Tensor, error: torch.Tensor) -> None:
        """Leaves `place` [n] get the priorities (|error| + eps)^alpha; of those named twice the largest counts."""
        count = place.numel()
        if count not in self._updates:
            self._updates[count] = self._update_plan(count)
        places, errors, plan = self._updates[count]
        places.copy_(place)
        errors.copy_(error)
        plan()

    def _update_plan(self, count: int) -> tuple[torch.Tensor, torch.Tensor, Plan]:
        place = torch.zeros(count, dtype=torch.int32, device=self.device)
        error = torch.zeros(count, device=self.device)
        nodes, places = wp.from_torch(self.nodes), wp.from_torch(place)
        plan = Plan(self.device, count)
        plan.add_kernel(clear_leaves, count, [places, nodes], unit=UNIT, block=BLOCK)
        given = [self.alpha, self.eps, places, wp.from_torch(error), nodes, wp.from_torch(self.top)]
        # One CPU thread: there, Warp's atomics are plain reads and writes.
        plan.add_kernel(raise_leaves, count, given, unit=count, block=BLOCK)
        for level in range(1, len(self.counts)):
            if self.counts[level] > count:
                levels = [self.starts[level - 1], self.starts[level], FAN**level]
                plan.add_kernel(sum_above, count, [*levels, places, nodes], unit=UNIT, block=BLOCK)
            else:
                self._add_range(plan, level, wp.from_torch(self._first), self.size)
        return place, error, plan

    def renew(self) -> None:
        """Make all sums anew from the leaves: the same numbers as if they had grown step by step."""
        self.range_plan(self._first, self.size)()

    def range_plan(self, begin: torch.Tensor, length: int) -> Plan:
        """Renews all sums above `length` leaves from `begin` [1] (int32, on the device) on, round the end too."""
        plan = Plan(self.device, length)
        for level in range(1, len(self.counts)):
            self._add_range(plan, level, wp.from_torch(begin), length)
        return plan

    def _add_range(self, plan: Plan, level: int, begin: wp.array, length: int) -> None:
        reach = FAN**level
        # Both ends may cut a family in two, and so may the end of the ring.
        count = min(self.counts[level], -(-length // reach) + 3)
        levels = [self.starts[level - 1], self.starts[level], reach, self.counts[level]]
        plan.add_kernel(sum_range, count, [*levels, begin, wp.from_torch(self.nodes)], unit=UNIT, block=BLOCK)


@wp.func
def descend(target: wp.float64, levels: int, starts: wp.array(dtype=int), nodes: wp.array(dtype=float)) -> int:
    """The leaf at which the running sum of all leaves passes `target`, which is below their total."""
    node = int(0)
    rest = target
    for up in range(levels - 1):
        base = starts[levels - 2 - up] + node * CHILDREN
        chosen = int(0)
        found = bool(False)
        k = int(0)
        while k < CHILDREN and not found:
            value = wp.float64(nodes[base + k])
            if value > wp.float64(0.0):
                chosen = k  # if a rounded sum leads beyond the last child, the last one that holds anything
                found = rest < value
                if not found:
                    rest -= value
            k += 1
        node = node * CHILDREN + chosen
    return node


@wp.func
def family(child: int, node: int, nodes: wp.array(dtype=float)) -> float:
    """The sum of a node's children, always in the same order."""
    total = float(0.0)
    for k in range(CHILDREN):
        total += nodes[child + node * CHILDREN + k]
    return total


@wp.kernel
def clear_leaves(first: int, place: wp.array(dtype=int), nodes: wp.array(dtype=float)):
    """Forget the priorities that are about to change."""
    leaf = place[first + wp.tid()]
    if nodes[leaf] > 0.0:
        nodes[leaf] = LEAST


@wp.kernel
def raise_leaves(
    first: int,
    alpha: float,
    eps: float,
    place: wp.array(dtype=int),
    error: wp.array(dtype=float),
    nodes: wp.array(dtype=float),
    top: wp.array(dtype=float),
):
    """The new priorities. What must not be sampled stays at 0; an error that is no number leaves next to nothing."""
    i = first + wp.tid()
    leaf = place[i]
    priority = wp.min(wp.pow(wp.abs(error[i]) + eps, alpha), MOST)
    if nodes[leaf] > 0.0 and wp.isfinite(error[i]):
        wp.atomic_max(nodes, leaf, priority)
        if priority > top[0]:  # few get here: an atomic of all threads on one number would make them queue
            wp.atomic_max(top, 0, priority)


@wp.kernel
def sum_above(
    first: int, child: int, parent: int, reach: int, place: wp.array(dtype=int), nodes: wp.array(dtype=float)
):
    """Renew the nodes of one level above some leaves. Threads that meet in a node write the same number."""
    node = place[first + wp.tid()] // reach
    nodes[parent + node] = family(child, node, nodes)


@wp.kernel
def sum_range(
    first: int,
    child: int,
    parent: int,
    reach: int,
    count: int,
    begin: wp.array(dtype=int),
    nodes: wp.array(dtype=float),
):
    """Renew neighboring nodes of one level, from the one above leaf `begin` on."""
    node = (begin[0] // reach + first + wp.tid()) % count
    nodes[parent + node] = family(child, node, nodes)
