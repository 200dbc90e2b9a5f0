"""Algorithms, one file each. Nothing here knows a world."""
