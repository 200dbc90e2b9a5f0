"""Cameras and the batch ray caster: depth, colour, labels and normals of thousands of views in one call."""
