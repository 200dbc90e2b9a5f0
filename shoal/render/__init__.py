"""Cameras and the batch ray caster: depth, color, labels and normals of thousands of views in one call."""

from shoal.render.movers import BOX, CAPSULE, CYLINDER, MESH, NONE, SPHERE, Movers
from shoal.render.renderer import Renderer, heading
from shoal.render.viewpoints import find_viewpoints

__all__ = [
    "BOX",
    "CAPSULE",
    "CYLINDER",
    "MESH",
    "NONE",
    "SPHERE",
    "Movers",
    "Renderer",
    "find_viewpoints",
    "heading",
]
