"""Pictures of worlds: a canvas, and the default picture of a 2-D world."""
