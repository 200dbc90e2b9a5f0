"""Procedural houses: `house:SEED` is a furnished home of several rooms, the same in every process.

plan (sketch, plan) → walls, floors, doors (shell) → furniture (layout, space; furniture, fixtures, decor) → build
"""

from shoal.scene.house.build import HOUSES, KINDS, LABELS, TEST, TRAIN, house_plan, is_test, make_house

__all__ = ["HOUSES", "KINDS", "LABELS", "TEST", "TRAIN", "house_plan", "is_test", "make_house"]
