"""The search tree (BVH) over a scene's triangles: built level by level with torch operations, on any device.

Splits are chosen by the binned surface area heuristic, cost = sum over both sides of (area x triangles), for all nodes
of a level at once. The binary tree is then folded into nodes of four children, so a ray reads one node instead of
three.
"""

from dataclasses import dataclass

import torch

BINS = 16
"""Bins per axis of the surface area heuristic; small nodes use fewer."""

LEAF = 4
"""Maximum triangles in a leaf."""

WIDTH = 4
"""Children of a folded node."""

STEP_COST = 2.0
"""Cost of visiting a node, relative to testing one triangle."""

STACK = 64
"""Size of a ray's traversal stack in nodes; a tree that needs more is rebuilt as a balanced one."""


@dataclass(frozen=True)
class Tree:
    """A folded tree. Child k of node i has the box `lower[i, k]` to `upper[i, k]` and the code `child[i, k]`.

    A code >= 0 is the index of a node. The code -1 - (8 * first + count) is a leaf with the triangles
    `order[first : first + count]`; an unused child has count 0 and an inverted box. Node 0 is the root.
    """

    lower: torch.Tensor
    """float32 [nodes, WIDTH, 3]"""
    upper: torch.Tensor
    """float32 [nodes, WIDTH, 3]"""
    child: torch.Tensor
    """int32 [nodes, WIDTH]"""
    order: torch.Tensor
    """int64 [T]: triangle indices in leaf order."""


def build_tree(corners: torch.Tensor, balanced: bool = False) -> Tree:
    """Build the tree over triangles `corners` [T, 3, 3], on their device.

    A `balanced` tree splits at the median along a space-filling curve: slower to traverse, but of minimum depth.
    """
    binary, order = _split(corners.amin(1), corners.amax(1), balanced)
    return _fold(binary, order, binary.count.float() if balanced else _area(binary.bounds))


def stack_needed(tree: Tree) -> int:
    """Maximum entries on a ray's traversal stack: along the worst path, all children but one of each node."""
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
    """A binary tree in breadth-first order; `left` < 0 marks a leaf, and the right child is `left` + 1."""

    bounds: torch.Tensor  # [n, 6]: minimum corner, then the negated maximum corner (so that both reduce by min)
    left: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor


def _split(lower: torch.Tensor, upper: torch.Tensor, balanced: bool) -> tuple[_Binary, torch.Tensor]:
    device, total = lower.device, len(lower)
    boxes = torch.cat([lower, -upper], 1)
    center = (lower + upper) * 0.5
    order = torch.argsort(_curve(center)) if balanced else torch.arange(total, device=device)
    # The nodes of this level: the index in `order` of their first triangle, and their number of triangles.
    first, count = torch.zeros(1, dtype=torch.long, device=device), torch.full((1,), total, device=device)
    levels: list[_Binary] = []
    node_count = 1
    while len(first):
        node = torch.repeat_interleave(torch.arange(len(first), device=device), count)
        starts = torch.cumsum(count, 0) - count
        position = torch.arange(len(node), device=device) - starts[node] + first[node]
        triangles = order[position]
        bounds = _reduce(boxes[triangles], node, len(first))
        goes_left, cost = _best_split(boxes[triangles], center[triangles], node, count)
        if balanced:
            cost = torch.full_like(cost, torch.inf)
        # A leaf if splitting costs more; a split at the median if no bin border separates the triangles.
        stuck = ~torch.isfinite(cost)
        pays = (cost < _area(bounds) * (count - STEP_COST)) | (count > LEAF)
        inner = (count > 1) & pays & ~(stuck & (count <= LEAF))
        halfway = (position - first[node]) < (count // 2)[node]
        goes_left = torch.where(stuck[node], halfway, goes_left) & inner[node]
        lefts = torch.zeros_like(count).index_add_(0, node, goes_left.long())
        rank = torch.cumsum(goes_left.long(), 0) - goes_left.long()
        rank -= rank[starts][node]
        behind = lefts[node] + (position - first[node]) - rank
        target = first[node] + torch.where(goes_left, rank, behind)
        moved = inner[node]
        order[target[moved]] = triangles[moved]
        inner_rank = torch.cumsum(inner.long(), 0) - inner.long()
        left = torch.where(inner, node_count + 2 * inner_rank, -1)
        levels.append(_Binary(bounds, left, first, count))
        parent_first, parent_count, parent_lefts = first[inner], count[inner], lefts[inner]
        first = torch.stack([parent_first, parent_first + parent_lefts], 1).reshape(-1)
        count = torch.stack([parent_lefts, parent_count - parent_lefts], 1).reshape(-1)
        node_count += len(first)
    parts = [torch.cat([getattr(level, name) for level in levels]) for name in ("bounds", "left", "first", "count")]
    return _Binary(*parts), order


def _curve(points: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the Morton code of points in their bounding box, 20 bits per axis."""
    low = points.amin(0)
    cell = ((points - low) / (points.amax(0) - low).clamp(min=1e-20) * (2**20 - 1)).long()
    bit = torch.arange(20, device=points.device)
    return ((((cell[:, :, None] >> bit) & 1) << (3 * bit)).sum(2) << torch.arange(3, device=points.device)).sum(1)


def _reduce(boxes: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    """For each group, the box that encloses its boxes; all numbers of an empty group are inf."""
    out = torch.full((groups, boxes.shape[1]), torch.inf, device=boxes.device)
    return out.scatter_reduce_(0, group[:, None].expand_as(boxes), boxes, "amin")


def _area(bounds: torch.Tensor) -> torch.Tensor:
    """Half the surface area of boxes [..., 6]; 0 for an empty box."""
    x, y, z = (-bounds[..., 3:] - bounds[..., :3]).clamp(min=0).unbind(-1)
    return x * y + y * z + z * x


def _best_split(
    boxes: torch.Tensor, center: torch.Tensor, node: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each triangle goes left in the best split of its node, and the split costs; inf if there is no split."""
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
        counts = torch.bincount(slot, minlength=nodes * parts).reshape(nodes, parts)
        before = torch.cummin(inside, 1).values[:, :-1]
        after = torch.cummin(inside.flip(1), 1).values.flip(1)[:, 1:]
        left = torch.cumsum(counts, 1)[:, :-1]
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
    """Fold into nodes of WIDTH children: the child of greatest weight is replaced by its two until the node is full."""
    device = order.device
    roots = torch.zeros(1, dtype=torch.long, device=device)
    lowers, uppers, children = [], [], []
    node_count = 1
    while len(roots):
        slots = torch.full((len(roots), WIDTH), -1, device=device)
        slots[:, 0] = roots
        rows = torch.arange(len(roots), device=device)
        for filled in range(1, WIDTH):
            open_ = (slots >= 0) & (tree.left[slots] >= 0)
            heaviest, which = torch.where(open_, weight[slots], -1.0).max(1)
            grows = heaviest >= 0
            at = slots[rows, which]
            slots[rows, which] = torch.where(grows, tree.left[at], at)
            slots[:, filled] = torch.where(grows, tree.left[at] + 1, -1)
        used = slots >= 0
        inner = used & (tree.left[slots] >= 0)
        inner_rank = torch.cumsum(inner.reshape(-1).long(), 0).reshape(inner.shape) - inner.long()
        leaf = torch.where(used, 8 * tree.first[slots] + tree.count[slots], 0)
        children.append(torch.where(inner, node_count + inner_rank, -1 - leaf).int())
        bounds = torch.where(used[..., None], tree.bounds[slots], torch.inf)
        lowers.append(bounds[..., :3])
        uppers.append(-bounds[..., 3:])
        roots = slots[inner]
        node_count += len(roots)
    return Tree(torch.cat(lowers), torch.cat(uppers), torch.cat(children), order)
