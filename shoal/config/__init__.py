"""Settings: their schema, presets of worlds, and the command line."""
