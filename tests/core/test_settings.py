"""Bounds in the types of settings."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from shoal.core.settings import Bounds, NonNegative, bounds_of


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "text"),
    [
        (Bounds(ge=1), (1, 7), (0, -1), "at least 1"),
        (Bounds(gt=0, lt=1000), (0.1, 999.9), (0, 1000), "above 0 and below 1000"),
        (Bounds(ge=0, le=1), (0, 1), (-0.1, 1.1), "between 0 and 1"),
        (Bounds(ge=1, also=(-5,)), (1, -5), (0, -4), "at least 1"),
    ],
)
def test_bounds_admit_values_within_them(bounds, inside, outside, text):
    assert all(map(bounds.admit, inside))
    assert not any(map(bounds.admit, outside))
    assert str(bounds) == text


def test_bounds_of_a_dataclass():
    @dataclass(frozen=True)
    class Config:
        count: NonNegative = 0
        speed: Annotated[float, "a note", Bounds(gt=0)] = 1.0
        name: str = ""

    assert bounds_of(Config) == dict(count=Bounds(ge=0), speed=Bounds(gt=0))
