"""Benchmarks and checks of worlds."""
