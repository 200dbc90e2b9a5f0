"""Algorithms, one file each, independent of worlds."""
