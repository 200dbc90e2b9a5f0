"""Random permutations: valid at every size, different each time, uncorrelated."""

import numpy as np
import pytest
import torch

from shoal.core.kernels import Broadcast
from shoal.core.launch import bind
from shoal.learn.shuffle import order_plan, permuted


def order(n: int, seed: int = 0, epoch: int = 0, counter: int = 0) -> np.ndarray:
    out = torch.full((n,), -1, dtype=torch.int32)
    order_plan(out, seed, epoch, torch.tensor([counter], dtype=torch.int32))()
    return out.numpy()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 64, 65, 1000, 4096, 8191, 8192, 12_289, 100_003])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_index_occurs_once(n, threads, monkeypatch):
    """For any number of CPU threads."""
    monkeypatch.setattr("shoal.core.launch.cpu_threads", lambda: threads)
    for seed, epoch, counter in [(0, 0, 0), (1, 0, 0), (0, 3, 5), (2**31 - 1, 1, 2**31 - 1)]:
        np.testing.assert_array_equal(np.sort(order(n, seed, epoch, counter)), np.arange(n))


def test_threads_change_nothing(monkeypatch):
    orders = []
    for threads in (1, 2):
        monkeypatch.setattr("shoal.core.launch.cpu_threads", lambda n=threads: n)
        orders.append(order(8192))
    np.testing.assert_array_equal(*orders)


def test_seed_epoch_and_counter_each_change_the_order():
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0)]
    orders = [order(1000, *place) for place in places]
    for i, one in enumerate(orders):
        np.testing.assert_array_equal(one, order(1000, *places[i]))
        for other in orders[:i]:
            # Two random orders agree at about one position.
            assert (one == other).sum() < 10


def test_one_plan_follows_the_counter():
    """The counter is read when the plan runs, so a captured launch gives a new order per update."""
    out, counter = torch.zeros(100, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    plan = order_plan(out, 0, 0, counter)
    for i in range(3):
        counter.fill_(i)
        plan()
        np.testing.assert_array_equal(out, order(100, counter=i))


def test_every_position_is_equally_likely():
    """Over many updates, each sample gets each position about equally often."""
    n, times = 8, 4000
    counts = np.zeros((n, n))
    out, counter = torch.zeros(n, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    plan = order_plan(out, 7, 0, counter)
    for i in range(times):
        counter.fill_(i)
        plan()
        counts[np.arange(n), out.numpy()] += 1
    chi_square = ((counts - times / n) ** 2 / (times / n)).sum()
    freedom = (n - 1) ** 2
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [1000, 8192])
def test_neighbors_are_uncorrelated(n, monkeypatch):
    """Samples are uncorrelated with their positions and their predecessors."""
    monkeypatch.setattr("shoal.core.launch.cpu_threads", lambda: 1)
    for counter in range(5):
        found = order(n, counter=counter).astype(float)
        assert abs(np.corrcoef(found, np.arange(n))[0, 1]) < 5 / np.sqrt(n)
        assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 5 / np.sqrt(n)
        assert (np.diff(found) == 1).mean() < 10 / n


def test_orders_of_more_than_2_to_the_30_samples_stay_in_range():
    n, shown = 2**30 + 5, 4096
    order = torch.zeros(shown, dtype=torch.int32)
    arguments = dict(
        n=n,
        half_bits=16,
        seed=3,
        epoch=0,
        counter=Broadcast(torch.zeros(1, dtype=torch.int32)),
        sample=torch.arange(shown, dtype=torch.int32),
        order=order,
    )
    bind("order", permuted, order.device, shown, arguments)()
    assert int(order.min()) >= 0
    assert int(order.max()) < n
    assert order.unique().numel() == shown
