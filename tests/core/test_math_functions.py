"""Branch-free math functions against NumPy in float64."""

import numpy as np
import pytest
import warp as wp

from shoal.core.launch import init_warp
from shoal.core.math_functions import sincos, wrap_angle
from tests.helpers import kernel_results

init_warp()


@wp.kernel(enable_backward=False)
def math_kernel(x: wp.array[float], out: wp.array2d[float]):
    i = wp.tid()
    s, c = sincos(x[i])
    out[i, 0] = s
    out[i, 1] = c
    out[i, 2] = wrap_angle(x[i])


def compute(x: np.ndarray) -> np.ndarray:
    return kernel_results(math_kernel, lambda n: wp.zeros((n, 3), dtype=float, device="cpu"), x.astype(np.float32))


def points(limit: float) -> np.ndarray:
    """Random points, multiples of an eighth of a turn with their float neighbors, and zero."""
    rng = np.random.default_rng(0)
    eighths = np.arange(-limit, limit, np.pi / 4).astype(np.float32)
    near = [np.nextafter(eighths, np.float32(d)) for d in (-np.inf, np.inf)]
    return np.concatenate([rng.uniform(-limit, limit, 100_000).astype(np.float32), eighths, *near, [0.0]])


@pytest.mark.parametrize(("limit", "tolerance"), [(100.0, 2e-7), (1000.0, 5e-7), (10_000.0, 5e-7)])
def test_sincos(limit, tolerance):
    x = points(limit).astype(np.float32)
    found = compute(x)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(found[:, 0], np.sin(exact), rtol=0, atol=tolerance)
    np.testing.assert_allclose(found[:, 1], np.cos(exact), rtol=0, atol=tolerance)


def test_sincos_is_on_the_unit_circle_and_odd_and_even():
    x = points(50.0).astype(np.float32)
    here, mirrored = compute(x), compute(-x)
    np.testing.assert_allclose(here[:, 0] ** 2 + here[:, 1] ** 2, 1.0, atol=5e-7)
    np.testing.assert_array_equal(here[:, 0], -mirrored[:, 0])
    np.testing.assert_array_equal(here[:, 1], mirrored[:, 1])


@pytest.mark.parametrize("limit", [10.0, 100.0, 1000.0])
def test_wrap_angle(limit):
    """The wrapped angle is in [-pi, pi] and differs from the angle by whole turns, to the rounding of the angle."""
    x = points(limit).astype(np.float32)
    wrapped = compute(x)[:, 2].astype(np.float64)
    rounding = 2 * np.spacing(np.abs(x).astype(np.float32)) + 5e-7
    assert (np.abs(wrapped) <= np.pi + rounding).all()
    turns = (x.astype(np.float64) - wrapped) / (2 * np.pi)
    assert (np.abs(turns - np.round(turns)) * 2 * np.pi <= rounding).all()


def test_wrap_angle_keeps_angles_in_range():
    x = np.linspace(-3.14, 3.14, 1001, dtype=np.float32)
    np.testing.assert_array_equal(compute(x)[:, 2], x)
