"""The sum tree against plain sums in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.learn.sum_tree import FANOUT, SumTree

CPU = torch.device("cpu")


def assert_sums(tree: SumTree) -> None:
    """Every node of every level is the sum of its children."""
    below = tree.leaves.numpy().astype(np.float64)
    for start, count in zip(tree.starts[1:], tree.counts[1:], strict=True):
        padded = np.zeros(count * FANOUT)
        padded[: len(below)] = below
        below = padded.reshape(count, FANOUT).sum(1)
        np.testing.assert_allclose(tree.nodes[start : start + count].numpy(), below, rtol=1e-5)


def filled_tree(size: int, alpha=1.0, eps=0.0, seed=0) -> SumTree:
    tree = SumTree(size, CPU, alpha, eps)
    tree.leaves.copy_(torch.as_tensor(np.random.default_rng(seed).random(size)))
    tree.range_plan(torch.zeros(1, dtype=torch.int32), size)()
    return tree


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 1024, 1025, 40_000])
def test_a_full_range_computes_all_sums(size):
    assert_sums(filled_tree(size))


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 5000),
    batches=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    alpha=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_batches_of_updates_with_duplicates_equal_numpy(size, batches, alpha, seed):
    """Of duplicate leaves the maximum counts; leaves at 0 stay 0."""
    rng = np.random.default_rng(seed)
    tree = filled_tree(size, alpha, 1e-3, seed)
    tree.leaves[torch.as_tensor(rng.random(size) < 0.2)] = 0.0
    tree.range_plan(torch.zeros(1, dtype=torch.int32), size)()
    expected, top = tree.leaves.numpy().copy(), 1.0
    for batch in batches:
        place = rng.integers(0, size, batch)
        error = rng.normal(size=batch).astype(np.float32) * 3
        tree.update(torch.as_tensor(place), torch.as_tensor(error))
        new = np.zeros(size)
        np.maximum.at(new, place, (np.abs(error) + 1e-3) ** alpha)
        hit = (new > 0) & (expected > 0)
        expected[hit] = new[hit]
        top = max(top, new[hit].max(initial=0.0))
        np.testing.assert_allclose(tree.leaves.numpy(), expected, rtol=1e-5)
        np.testing.assert_allclose(float(tree.top), top, rtol=1e-5)
        assert_sums(tree)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 5000), begin=st.floats(0, 1), length=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_a_range_of_leaves_updates_all_sums_above_it(size, begin, length, seed):
    """Also with wrap-around."""
    tree = filled_tree(size, seed=seed)
    first, count = int(begin * (size - 1)), max(1, int(length * size))
    places = (first + np.arange(count)) % size
    tree.leaves[torch.as_tensor(places)] = torch.as_tensor(np.random.default_rng(seed).random(count)).float()
    tree.range_plan(torch.tensor([first], dtype=torch.int32), count)()
    assert_sums(tree)


def test_a_nan_error_does_not_affect_other_leaves():
    tree = filled_tree(100)
    tree.update(torch.tensor([3, 4, 5]), torch.tensor([np.nan, np.inf, 2.0]))
    assert torch.isfinite(tree.nodes).all()
    assert float(tree.leaves[5]) == 2.0
    assert float(tree.leaves[3]) < 1e-20
    assert_sums(tree)
