"""The search tree over a scene's triangles: built level by level with whole-array operations, on any device.

Splits are chosen by the surface area heuristic over bins: cost = sum over both sides of (area x triangles), for all
nodes of a level at once. The binary tree is then folded into nodes of four children, so that a ray reads one node
where it would have read three.
"""

from dataclasses import dataclass

import torch

BINS = 16
"""Parts of a node between which it may be split, per axis; small nodes have fewer."""

LEAF = 4
"""The most triangles in a leaf."""

WIDTH = 4
"""Children of a folded node."""

STEP_COST = 2.0
"""What visiting a node costs beside testing one triangle."""

STACK = 64
"""Nodes that a ray may have to remember; a tree that needs more is built anew, balanced."""


@dataclass(frozen=True)
class Tree:
    """A folded tree. Children of node i: `lower[i, k]` to `upper[i, k]` is the box, `child[i, k]` the way on.

    `child` >= 0 is a node; -1 - (8 * first + count) is a leaf: `count` triangles of `order` from `first` on; an empty
    place has count 0 and an inverted box. Node 0 is the root.
    """

    lower: torch.Tensor
    """float32 [nodes, WIDTH, 3]"""
    upper: torch.Tensor
    """float32 [nodes, WIDTH, 3]"""
    child: torch.Tensor
    """int32 [nodes, WIDTH]"""
    order: torch.Tensor
    """int64 [T]: the triangles in the order of the leaves."""


def build_tree(corners: torch.Tensor, balanced: bool = False) -> Tree:
    """The tree over triangles `corners` [T, 3, 3], on the device that holds them.

    A `balanced` one halves the triangles along a space-filling curve: less good, but no deeper than it must be.
    """
    binary, order = _split(corners.amin(1), corners.amax(1), balanced)
    return _fold(binary, order, binary.count.float() if balanced else _area(binary.bounds))


def stack_needed(tree: Tree) -> int:
    """The most children that can wait on a ray's stack: along the worst path, all but one of each node."""
    used = (tree.child != -1).sum(1)
    nodes = torch.zeros(1, dtype=torch.long, device=tree.child.device)
    waiting = torch.zeros_like(nodes)
    most = 0
    while len(nodes):
        waiting = waiting + used[nodes] - 1
        most = max(most, int(waiting.max()))
        child = tree.child[nodes].long()
        waiting = waiting[:, None].expand_as(child)[child >= 0]
        nodes = child[child >= 0]
    return most + 1


@dataclass
class _Binary:
    """A binary tree in the order of its levels; `left` < 0 marks a leaf, and the right child is `left` + 1."""

    bounds: torch.Tensor  # [n, 6]: least corner, then the greatest with its sign turned (so that both are minima)
    left: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor


def _split(lower: torch.Tensor, upper: torch.Tensor, balanced: bool) -> tuple[_Binary, torch.Tensor]:
    device, total = lower.device, len(lower)
    boxes = torch.cat([lower, -upper], 1)
    center = (lower + upper) * 0.5
    order = torch.argsort(_curve(center)) if balanced else torch.arange(total, device=device)
    # The nodes of this level: where their triangles begin in `order`, and how many they are.
    first, count = torch.zeros(1, dtype=torch.long, device=device), torch.full((1,), total, device=device)
    levels: list[_Binary] = []
    made = 1
    while len(first):
        node = torch.repeat_interleave(torch.arange(len(first), device=device), count)
        starts = torch.cumsum(count, 0) - count
        place = torch.arange(len(node), device=device) - starts[node] + first[node]
        triangles = order[place]
        bounds = _reduce(boxes[triangles], node, len(first))
        goes_left, cost = _best_split(boxes[triangles], center[triangles], node, count)
        if balanced:
            cost = torch.full_like(cost, torch.inf)
        # A leaf where splitting does not pay; a split in the middle where no border separates the triangles.
        stuck = ~torch.isfinite(cost)
        pays = (cost < _area(bounds) * (count - STEP_COST)) | (count > LEAF)
        inner = (count > 1) & pays & ~(stuck & (count <= LEAF))
        halfway = (place - first[node]) < (count // 2)[node]
        goes_left = torch.where(stuck[node], halfway, goes_left) & inner[node]
        lefts = torch.zeros_like(count).index_add_(0, node, goes_left.long())
        rank = torch.cumsum(goes_left.long(), 0) - goes_left.long()
        rank -= rank[starts][node]
        behind = lefts[node] + (place - first[node]) - rank
        target = first[node] + torch.where(goes_left, rank, behind)
        moved = inner[node]
        order[target[moved]] = triangles[moved]
        number = torch.cumsum(inner.long(), 0) - inner.long()
        left = torch.where(inner, made + 2 * number, -1)
        levels.append(_Binary(bounds, left, first, count))
        parent_first, parent_count, parent_lefts = first[inner], count[inner], lefts[inner]
        first = torch.stack([parent_first, parent_first + parent_lefts], 1).reshape(-1)
        count = torch.stack([parent_lefts, parent_count - parent_lefts], 1).reshape(-1)
        made += len(first)
    parts = [torch.cat([getattr(level, name) for level in levels]) for name in ("bounds", "left", "first", "count")]
    return _Binary(*parts), order


def _curve(points: torch.Tensor) -> torch.Tensor:
    """The place of points along Morton's curve through their box, 2^20 steps a side."""
    low = points.amin(0)
    cell = ((points - low) / (points.amax(0) - low).clamp(min=1e-20) * (2**20 - 1)).long()
    bit = torch.arange(20, device=points.device)
    return ((((cell[:, :, None] >> bit) & 1) << (3 * bit)).sum(2) << torch.arange(3, device=points.device)).sum(1)


def _reduce(boxes: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    """The box around the boxes of each group; inf where there are none."""
    out = torch.full((groups, boxes.shape[1]), torch.inf, device=boxes.device)
    return out.scatter_reduce_(0, group[:, None].expand_as(boxes), boxes, "amin")


def _area(bounds: torch.Tensor) -> torch.Tensor:
    """Half the surface of boxes [..., 6]; 0 for an empty one."""
    x, y, z = (-bounds[..., 3:] - bounds[..., :3]).clamp(min=0).unbind(-1)
    return x * y + y * z + z * x


def _best_split(
    boxes: torch.Tensor, center: torch.Tensor, node: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which triangles the best split of their node sends left, and its cost: inf where no border separates any."""
    nodes = len(count)
    parts = min(BINS, max(4, 2 * len(node) // nodes))
    around = _reduce(torch.cat([center, -center], 1), node, nodes)
    low, high = around[:, :3], -around[:, 3:]
    scale = parts / (high - low).clamp(min=1e-20)
    bins = ((center - low[node]) * scale[node]).int().clamp(max=parts - 1)
    slots = (node.int() * parts)[:, None] + bins
    best = torch.full((nodes,), torch.inf, device=boxes.device)
    axis, border = torch.zeros_like(count), torch.zeros_like(count)
    for a in range(3):
        slot = slots[:, a].long()
        inside = _reduce(boxes, slot, nodes * parts).reshape(nodes, parts, 6)
        many = torch.bincount(slot, minlength=nodes * parts).reshape(nodes, parts)
        before = torch.cummin(inside, 1).values[:, :-1]
        after = torch.cummin(inside.flip(1), 1).values.flip(1)[:, 1:]
        left = torch.cumsum(many, 1)[:, :-1]
        right = count[:, None] - left
        cost = _area(before) * left + _area(after) * right
        cost[(left == 0) | (right == 0)] = torch.inf
        least, where = cost.min(1)
        better = least < best
        best = torch.where(better, least, best)
        axis = torch.where(better, a, axis)
        border = torch.where(better, where, border)
    return bins.gather(1, axis[node, None]).squeeze(1) <= border[node], best


def _fold(tree: _Binary, order: torch.Tensor, weight: torch.Tensor) -> Tree:
    """Nodes of WIDTH children: the child of the greatest weight is replaced by its own two until the node is full."""
    device = order.device
    roots = torch.zeros(1, dtype=torch.long, device=device)
    lowers, uppers, children = [], [], []
    made = 1
    while len(roots):
        places = torch.full((len(roots), WIDTH), -1, device=device)
        places[:, 0] = roots
        rows = torch.arange(len(roots), device=device)
        for filled in range(1, WIDTH):
            open_ = (places >= 0) & (tree.left[places] >= 0)
            heaviest, which = torch.where(open_, weight[places], -1.0).max(1)
            grows = heaviest >= 0
            at = places[rows, which]
            places[rows, which] = torch.where(grows, tree.left[at], at)
            places[:, filled] = torch.where(grows, tree.left[at] + 1, -1)
        used = places >= 0
        inner = used & (tree.left[places] >= 0)
        number = torch.cumsum(inner.reshape(-1).long(), 0).reshape(inner.shape) - inner.long()
        leaf = torch.where(used, 8 * tree.first[places] + tree.count[places], 0)
        children.append(torch.where(inner, made + number, -1 - leaf).int())
        bounds = torch.where(used[..., None], tree.bounds[places], torch.inf)
        lowers.append(bounds[..., :3])
        uppers.append(-bounds[..., 3:])
        roots = places[inner]
        made += len(roots)
    return Tree(torch.cat(lowers), torch.cat(uppers), torch.cat(children), order)
