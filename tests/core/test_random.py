"""Random numbers: Philox against published answers and a NumPy reference; ranges and moments of distributions."""

import numpy as np
import pytest
import warp as wp

from shoal.core.launch import init_warp
from shoal.core.random import integer, normal, philox, random_at, uniform, uniform4, vec4u
from tests.helpers import kernel_results

init_warp()
MANY = 200_000


@wp.kernel(enable_backward=False)
def philox_kernel(counter: wp.array[vec4u], key: wp.array[wp.uint64], out: wp.array[vec4u]):
    i = wp.tid()
    out[i] = philox(counter[i], key[i])


@wp.kernel(enable_backward=False)
def draws_kernel(position: wp.array2d[int], out: wp.array2d[float]):
    """Columns of `position`: env, episode, step, stream. Writes uniform, normal, integer and the four of uniform4."""
    i = wp.tid()
    rng = random_at(wp.uint64(42), position[i, 0], position[i, 1], position[i, 2])
    stream = position[i, 3]
    out[i, 0] = uniform(rng, stream, -3.0, 5.0)
    out[i, 1] = normal(rng, stream)
    out[i, 2] = float(integer(rng, stream, 7))
    four = uniform4(rng, stream, -3.0, 5.0)
    for k in range(4):
        out[i, 3 + k] = four[k]


def philox_reference(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox 4x32-10 with 64-bit integers, after Salmon et al. 2011: counters [n, 4], keys [n, 2]."""
    low = np.uint64(0xFFFFFFFF)
    c, k = counter.astype(np.uint64), key.astype(np.uint64)
    for _ in range(10):
        a, b = c[:, 0] * np.uint64(0xD2511F53), c[:, 2] * np.uint64(0xCD9E8D57)
        high_a, high_b = a >> np.uint64(32), b >> np.uint64(32)
        c = np.stack([high_b ^ c[:, 1] ^ k[:, 0], b & low, high_a ^ c[:, 3] ^ k[:, 1], a & low], axis=1)
        k = (k + np.array([0x9E3779B9, 0xBB67AE85], np.uint64)) & low
    return c.astype(np.uint32)


def run_philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    joined = key[:, 0].astype(np.uint64) | (key[:, 1].astype(np.uint64) << np.uint64(32))
    counters = wp.array(counter.astype(np.uint32), dtype=vec4u, device="cpu")
    out = wp.zeros(len(counter), dtype=vec4u, device="cpu")
    wp.launch(philox_kernel, len(counter), [counters, wp.array(joined, device="cpu"), out], device="cpu")
    return out.numpy()


def draws(position: np.ndarray) -> np.ndarray:
    return kernel_results(
        draws_kernel, lambda n: wp.zeros((n, 7), dtype=float, device="cpu"), position.astype(np.int32)
    )


@pytest.fixture(scope="module")
def many():
    """Draws of one env and episode over many steps."""
    position = np.zeros((MANY, 4), np.int32)
    position[:, 2] = np.arange(MANY)
    return draws(position)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_published_answers(counter, key, answer):
    """Random123's known answers, from the kernel and from the reference."""
    counter, key = np.array([counter], np.uint64), np.array([key], np.uint64)
    assert run_philox(counter, key)[0].tolist() == answer
    assert philox_reference(counter, key)[0].tolist() == answer


def test_philox_equals_reference_anywhere():
    rng = np.random.default_rng(0)
    counter = rng.integers(0, 2**32, (5000, 4), dtype=np.uint64)
    key = rng.integers(0, 2**32, (5000, 2), dtype=np.uint64)
    np.testing.assert_array_equal(run_philox(counter, key), philox_reference(counter, key))


def test_uniform_is_uniform(many):
    u = many[:, 0]
    assert u.min() >= -3.0
    assert u.max() < 5.0
    assert u.mean() == pytest.approx(1.0, abs=5 * 8 / np.sqrt(12 * MANY))
    assert u.std() == pytest.approx(8 / np.sqrt(12), rel=0.01)
    counts = np.histogram(u, 100, (-3.0, 5.0))[0]
    chi_square = ((counts - MANY / 100) ** 2 / (MANY / 100)).sum()
    assert chi_square < 99 + 5 * np.sqrt(2 * 99)


def test_uniform4_is_four_uncorrelated_uniform_numbers(many):
    four = many[:, 3:]
    np.testing.assert_array_equal(four[:, 0], many[:, 0])
    assert four.min() >= -3.0
    assert four.max() < 5.0
    np.testing.assert_allclose(four.mean(axis=0), 1.0, atol=0.03)
    np.testing.assert_allclose(np.corrcoef(four, rowvar=False), np.eye(4), atol=5 / np.sqrt(MANY))


def test_normal_moments(many):
    z = many[:, 1].astype(np.float64)
    assert np.isfinite(z).all()
    moments = [(z**k).mean() for k in range(1, 5)]
    np.testing.assert_allclose(moments, [0.0, 1.0, 0.0, 3.0], atol=0.06)
    # The tails beyond two standard deviations are those of a normal distribution, on either side.
    assert (z > 2).mean() == pytest.approx(0.02275, abs=0.002)
    assert (z < -2).mean() == pytest.approx(0.02275, abs=0.002)


def test_integers_take_every_value_equally(many):
    values, counts = np.unique(many[:, 2], return_counts=True)
    assert values.tolist() == [0, 1, 2, 3, 4, 5, 6]
    chi_square = ((counts - MANY / 7) ** 2 / (MANY / 7)).sum()
    assert chi_square < 6 + 5 * np.sqrt(12)


def test_every_part_of_the_position_matters():
    """Changing or swapping env, episode, step and stream changes the numbers."""
    positions = np.array(
        [[1, 2, 3, 4], [9, 2, 3, 4], [1, 9, 3, 4], [1, 2, 9, 4], [1, 2, 3, 9], [2, 1, 3, 4], [1, 3, 2, 4]]
    )
    assert len(np.unique(draws(positions)[:, 0])) == len(positions)
    np.testing.assert_array_equal(draws(positions), draws(positions))


@pytest.mark.parametrize("column", range(4))
def test_neighbors_are_uncorrelated(column):
    """Counting up any part of the position gives an uncorrelated sequence."""
    position = np.ones((20_000, 4), np.int32)
    position[:, column] = np.arange(20_000)
    u = draws(position)[:, 0]
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 5 / np.sqrt(20_000)
    assert u.mean() == pytest.approx(1.0, abs=5 * 8 / np.sqrt(12 * 20_000))
