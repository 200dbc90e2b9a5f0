"""Recordings of worlds, learning curves, benchmark curves, maps of episodes."""
