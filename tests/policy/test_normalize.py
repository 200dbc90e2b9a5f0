"""Running moments against NumPy over all batches."""

import numpy as np
import pytest
import torch

from shoal.policy import RunningMoments


def batches(shape, sizes, seed=0):
    """Batches with changing mean and variance."""
    rng = np.random.default_rng(seed)
    return [(rng.normal(3 * i - 4, 0.5 + i, (n, *shape))).astype(np.float32) for i, n in enumerate(sizes)]


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
def test_merging_equals_the_moments_of_all_batches(shape):
    moments = RunningMoments(shape)
    seen = batches(shape, [5, 1, 200, 17])
    for i, batch in enumerate(seen):
        moments.merge(torch.as_tensor(batch))
        everything = np.concatenate(seen[: i + 1]).astype(np.float64)
        np.testing.assert_allclose(moments.mean, everything.mean(axis=0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(moments.var, everything.var(axis=0), rtol=1e-4, atol=1e-5)
        assert float(moments.count) == len(everything)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_rows_of_weight_zero_are_ignored(dtype):
    moments = RunningMoments((3,))
    rng = np.random.default_rng(1)
    kept = []
    for batch in batches((3,), [8, 50, 3]):
        weight = rng.random(len(batch)) < 0.6
        batch[~weight] = 1e6
        moments.merge(torch.as_tensor(batch), torch.as_tensor(weight).to(dtype))
        kept.append(batch[weight])
    everything = np.concatenate(kept).astype(np.float64)
    np.testing.assert_allclose(moments.mean, everything.mean(axis=0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(moments.var, everything.var(axis=0), rtol=1e-4)
    assert float(moments.count) == len(everything)


def test_a_batch_without_weight_changes_nothing():
    moments = RunningMoments((2,))
    nothing = torch.zeros(4)
    moments.merge(torch.randn(4, 2), nothing)
    assert (moments.mean.tolist(), moments.var.tolist(), float(moments.count)) == ([0, 0], [1, 1], 0)
    moments.merge(torch.randn(10, 2))
    before = {name: t.clone() for name, t in moments.state_dict().items()}
    moments.merge(torch.randn(4, 2), nothing)
    for name, tensor in moments.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_variance_is_accurate_far_from_zero():
    """Small deviations around a large mean are not lost in rounding."""
    rng = np.random.default_rng(0)
    moments = RunningMoments()
    seen = [(1000.0 + rng.normal(0, 0.5, 500)).astype(np.float32) for _ in range(20)]
    for batch in seen:
        moments.merge(torch.as_tensor(batch))
    assert float(moments.var) == pytest.approx(np.concatenate(seen).astype(np.float64).var(), rel=1e-3)


def test_many_merges_do_not_drift():
    """After a thousand batches the mean is that of all of them, not of the last ones."""
    rng = np.random.default_rng(0)
    moments = RunningMoments()
    seen = rng.normal(2.0, 3.0, (1000, 64)).astype(np.float32)
    for batch in torch.as_tensor(seen):
        moments.merge(batch)
    assert float(moments.mean) == pytest.approx(seen.astype(np.float64).mean(), abs=1e-3)
    assert float(moments.scale()) == pytest.approx(1 / seen.astype(np.float64).std(), rel=1e-4)


def test_bytes_can_be_merged():
    moments = RunningMoments((2,))
    moments.merge(torch.tensor([[0, 255], [100, 255]], dtype=torch.uint8))
    assert moments.mean.tolist() == [50.0, 255.0]
    assert moments.var.tolist() == [2500.0, 0.0]
