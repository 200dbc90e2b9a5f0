"""Pictures: recordings of worlds, learning curves, benchmark curves."""
