"""Pictures of worlds: a canvas, and layouts of agents in 2-D."""
