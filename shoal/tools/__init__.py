"""Programs for developers and authors of worlds: benchmarks and checks."""
