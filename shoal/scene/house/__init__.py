"""Procedural houses: `house:SEED` is a furnished home of several rooms, `cabin:SEED` one or two rooms of such a home.

plan (sketch, plan) → walls, floors, doors (shell) → furniture (layout, space; furniture, fixtures, decor) → build
"""

from shoal.scene.house.build import HOUSES, KINDS, LABELS, TEST, TRAIN, house_plan, is_test, make_house
from shoal.scene.house.sketch import BUILDINGS

__all__ = ["BUILDINGS", "HOUSES", "KINDS", "LABELS", "TEST", "TRAIN", "house_plan", "is_test", "make_house"]
