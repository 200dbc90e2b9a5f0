"""The search tree holds every triangle once, inside all boxes above it, and never too deep."""

import numpy as np
import pytest
import torch

from shoal.scene.pack import pack_scene
from shoal.scene.tree import LEAF, STACK, build_tree, stack_needed
from tests.scene.shapes import box, make_scene, soup

CASES = {
    "one": soup(1),
    "two": soup(2),
    "few": soup(7, 1),
    "many": soup(3000, 2),
    "room": box((-3, -2, 0), (3, 2, 2.5)),
    "all the same": np.repeat(soup(1, 3), 500, 0),
    "a line": (soup(1, 4) + np.arange(300)[:, None, None] * np.array([1.0, 0, 0])).astype(np.float32),
    # Each triangle half as far as the last: the cheapest split separates one triangle at a time.
    "ever nearer": (soup(1, 5, size=1e-3)[0] + 2.0 ** -np.arange(100)[:, None, None] * 100).astype(np.float32),
}


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_triangle_once_inside_its_boxes(name, balanced):
    corners = torch.from_numpy(CASES[name])
    tree = build_tree(corners, balanced)
    assert sorted(tree.order.tolist()) == list(range(len(corners)))
    seen = []
    stack = [(0, torch.full((3,), -torch.inf), torch.full((3,), torch.inf))]
    visited = 0
    while stack:
        node, low, high = stack.pop()
        visited += 1
        for k, child in enumerate(tree.child[node].tolist()):
            if child == -1:
                assert (tree.lower[node, k] > tree.upper[node, k]).all(), "an unused child can be entered"
                continue
            lower, upper = tree.lower[node, k], tree.upper[node, k]
            assert (lower >= low).all()
            assert (upper <= high).all()
            if child >= 0:
                stack.append((child, lower, upper))
                continue
            first, count = divmod(-1 - child, 8)
            assert 1 <= count <= LEAF
            inside = corners[tree.order[first : first + count]].reshape(-1, 3)
            assert (inside >= lower).all()
            assert (inside <= upper).all()
            seen += range(first, first + count)
    assert sorted(seen) == list(range(len(corners)))
    assert visited == len(tree.child)


def waiting_most(tree, node=0, waiting=0):
    """Slow version of stack_needed: a ray that enters every box."""
    children = [c for c in tree.child[node].tolist() if c != -1]
    worst = waiting + len(children) - 1
    return max([worst, *(waiting_most(tree, c, waiting + len(children) - 1) for c in children if c >= 0)])


@pytest.mark.parametrize("name", ["few", "many", "a line", "ever nearer"])
def test_stack_needed_is_the_worst_path(name):
    tree = build_tree(torch.from_numpy(CASES[name]))
    assert stack_needed(tree) == waiting_most(tree) + 1


def test_balanced_trees_stay_shallow():
    corners = torch.from_numpy(soup(20_000, 6))
    assert stack_needed(build_tree(corners, balanced=True)) <= 3 * 7 + 1


def test_a_deep_tree_is_rebuilt_balanced():
    """Triangles that shrink geometrically towards a corner give a chain, too deep for the stack of a ray."""
    scale = 0.8 ** np.arange(400)
    corners = (np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0.1]])[None] + 1.0) * scale[:, None, None]
    chain = torch.from_numpy(corners.astype(np.float32))
    assert stack_needed(build_tree(chain)) > STACK, "the chain is not deep enough for this test"
    packed = pack_scene(make_scene(corners))
    assert packed.triangles > 0
