"""Moving objects: boxes, spheres, cylinders, capsules and meshes with their own pose in each env."""

from dataclasses import dataclass
from typing import ClassVar, no_type_check

import torch
import warp as wp

from shoal.core.errors import ShoalError
from shoal.core.store import full_device
from shoal.render.cast import Hit, Table
from shoal.scene.memory import RADIUS

NONE, BOX, SPHERE, CYLINDER, CAPSULE = 0, 1, 2, 3, 4
MESH = 16
"""Kind MESH + row is the mesh of the scene in that row of the scene memory."""


@dataclass(frozen=True)
class Movers:
    """`[envs, per_env]` objects, visible only to the cameras of their env. Changes of the tensors show in the next image.

    | tensor | shape | meaning |
    |---|---|---|
    | kind | int32 [E, M] | NONE, BOX, SPHERE, CYLINDER, CAPSULE, or MESH + row of a scene |
    | position | float32 [E, M, 3] | meters |
    | rotation | float32 [E, M, 4] | quaternion x, y, z, w |
    | size | float32 [E, M, 3] | box: half extents; sphere, cylinder (along z): half axes; capsule: radius, unused, half the length of the straight part (meters); mesh: scale |
    | color | float32 [E, M, 3] | red, green, blue, 0 to 1 |
    | semantic, instance | int32 [E, M] | values in the semantic and instance images |
    """  # noqa: E501 - a table

    kind: torch.Tensor
    position: torch.Tensor
    rotation: torch.Tensor
    size: torch.Tensor
    color: torch.Tensor
    semantic: torch.Tensor
    instance: torch.Tensor

    KINDS: ClassVar[dict[str, int]] = {"box": BOX, "sphere": SPHERE, "cylinder": CYLINDER, "capsule": CAPSULE}

    @classmethod
    def make(cls, envs: int, per_env: int, device: str | torch.device) -> "Movers":
        """Allocate invisible objects: kind NONE, no rotation, size 1, white."""
        if envs < 1 or per_env < 1:
            raise ShoalError(f"Movers need at least one env and one object per env, got {envs} and {per_env}.")
        device = full_device(device)
        shape = (envs, per_env)
        rotation = torch.zeros(*shape, 4, device=device)
        rotation[..., 3] = 1.0
        return cls(
            kind=torch.zeros(shape, dtype=torch.int32, device=device),
            position=torch.zeros(*shape, 3, device=device),
            rotation=rotation,
            size=torch.ones(*shape, 3, device=device),
            color=torch.ones(*shape, 3, device=device),
            semantic=torch.zeros(shape, dtype=torch.int32, device=device),
            instance=torch.zeros(shape, dtype=torch.int32, device=device),
        )


@wp.func
@no_type_check
def bounding_radius(kind: int, size: wp.vec3, table: Table) -> float:
    """Radius of the bounding sphere around the object's position."""
    size = wp.abs(size)
    if kind == BOX:
        return wp.length(size)
    if kind == SPHERE:
        return wp.max(size)
    if kind == CYLINDER:
        return wp.sqrt(wp.max(size[0], size[1]) * wp.max(size[0], size[1]) + size[2] * size[2])
    if kind == CAPSULE:
        return size[0] + size[2]
    return wp.max(size) * wp.cast(table[kind - MESH, RADIUS], float)


@wp.func
@no_type_check
def half_extents(size: wp.vec3) -> wp.vec3:
    """Positive half extents; flat objects get a thickness of a micrometer."""
    return wp.max(wp.abs(size), wp.vec3(1.0e-6))


@wp.func
@no_type_check
def unit_quat(q: wp.quat) -> wp.quat:
    """The quaternion normalized; the identity for zero."""
    length = wp.length(q)
    return wp.where(length > 0.0, q / wp.max(length, 1.0e-30), wp.quat_identity())


@wp.func
@no_type_check
def intersect_box(o: wp.vec3, d: wp.vec3) -> float:
    """Distance at which a ray enters the box from -1 to 1, or leaves it from inside; inf if it misses."""
    a = wp.cw_div(wp.vec3(-1.0) - o, d)
    b = wp.cw_div(wp.vec3(1.0) - o, d)
    enter = wp.max(wp.min(a, b))
    leave = wp.min(wp.max(a, b))
    return wp.where(enter <= leave and leave > 0.0, wp.where(enter > 0.0, enter, leave), wp.inf)


@wp.func
@no_type_check
def smallest_positive_root(a: float, b: float, c: float) -> float:
    """Smallest positive root of a t² + 2 b t + c; inf if there is none."""
    inside = b * b - a * c
    if inside < 0.0 or a == 0.0:
        return wp.inf
    root = wp.sqrt(inside)
    first = (-b - root) / a
    second = (-b + root) / a
    return wp.where(first > 0.0, first, wp.where(second > 0.0, second, wp.inf))


@wp.func
@no_type_check
def intersect_sphere(o: wp.vec3, d: wp.vec3, radius: float) -> float:
    """Distance to a sphere around the origin; inf if the ray misses."""
    return smallest_positive_root(wp.dot(d, d), wp.dot(o, d), wp.dot(o, o) - radius * radius)


@wp.func
@no_type_check
def intersect_cap(o: wp.vec3, d: wp.vec3, radius: float, side: float) -> float:
    """Distance to the outer half sphere at the upper (side 1) or lower (-1) end of a capsule."""
    a = wp.dot(d, d)
    b = wp.dot(o, d)
    inside = b * b - a * (wp.dot(o, o) - radius * radius)
    best = float(wp.inf)
    if inside >= 0.0 and a > 0.0:
        root = wp.sqrt(inside)
        first = (-b - root) / a
        second = (-b + root) / a
        if second > 0.0 and (o[2] + second * d[2]) * side >= 0.0:
            best = second
        if first > 0.0 and (o[2] + first * d[2]) * side >= 0.0:
            best = first
    return best


@wp.func
@no_type_check
def intersect_tube(o: wp.vec3, d: wp.vec3, radius: float, half: float) -> float:
    """Distance to the wall of an upright cylinder: the nearer hit, or the farther one if the nearer is off its ends."""
    a = d[0] * d[0] + d[1] * d[1]
    b = o[0] * d[0] + o[1] * d[1]
    c = o[0] * o[0] + o[1] * o[1] - radius * radius
    inside = b * b - a * c
    best = float(wp.inf)
    if inside >= 0.0 and a > 0.0:
        root = wp.sqrt(inside)
        first = (-b - root) / a
        second = (-b + root) / a
        if second > 0.0 and wp.abs(o[2] + second * d[2]) <= half:
            best = second
        if first > 0.0 and wp.abs(o[2] + first * d[2]) <= half:
            best = first
    return best


@wp.func
@no_type_check
def intersect_disk(o: wp.vec3, d: wp.vec3, height: float) -> float:
    """Distance to a horizontal disk of radius 1 at a height; inf if the ray misses."""
    t = (height - o[2]) / d[2]
    x = o[0] + t * d[0]
    y = o[1] + t * d[1]
    return wp.where(t > 0.0 and x * x + y * y <= 1.0, t, wp.inf)


@wp.func
@no_type_check
def intersect_shape(kind: int, size: wp.vec3, o: wp.vec3, d: wp.vec3) -> float:
    """Distance to a shape along a ray in its (unscaled) frame; inf if the ray misses."""
    size = half_extents(size)
    unit_o = wp.cw_div(o, size)
    unit_d = wp.cw_div(d, size)
    best = float(wp.inf)
    if kind == BOX:
        best = intersect_box(unit_o, unit_d)
    elif kind == SPHERE:
        best = intersect_sphere(unit_o, unit_d, 1.0)
    elif kind == CYLINDER:
        lids = wp.min(intersect_disk(unit_o, unit_d, 1.0), intersect_disk(unit_o, unit_d, -1.0))
        best = wp.min(intersect_tube(unit_o, unit_d, 1.0, 1.0), lids)
    elif kind == CAPSULE:
        up = wp.vec3(0.0, 0.0, size[2])
        best = intersect_tube(o, d, size[0], size[2])
        best = wp.min(best, wp.min(intersect_cap(o - up, d, size[0], 1.0), intersect_cap(o + up, d, size[0], -1.0)))
    return best


@wp.func
@no_type_check
def shape_normal(kind: int, size: wp.vec3, point: wp.vec3) -> wp.vec3:
    """Outward normal, of any length, at a point on a shape in its frame."""
    size = half_extents(size)
    unit = wp.cw_div(point, size)
    normal = wp.cw_div(unit, size)
    if kind == BOX:
        side = wp.abs(unit)
        if side[0] >= side[1] and side[0] >= side[2]:
            normal = wp.vec3(unit[0], 0.0, 0.0)
        elif side[1] >= side[2]:
            normal = wp.vec3(0.0, unit[1], 0.0)
        else:
            normal = wp.vec3(0.0, 0.0, unit[2])
    elif kind == CYLINDER:
        if wp.abs(unit[2]) > wp.sqrt(unit[0] * unit[0] + unit[1] * unit[1]):
            normal = wp.vec3(0.0, 0.0, unit[2])
        else:
            normal = wp.vec3(normal[0], normal[1], 0.0)
    elif kind == CAPSULE:
        normal = point - wp.vec3(0.0, 0.0, wp.clamp(point[2], -size[2], size[2]))
    return normal


@wp.func
@no_type_check
def near_ray(center: wp.vec3, radius: float, direction: wp.vec3, hit: Hit) -> bool:
    """Whether a ray from the origin comes within `radius` of `center` before its nearest hit."""
    along = wp.dot(center, direction) / wp.dot(direction, direction)
    miss = center - along * direction
    length = radius / wp.length(direction)
    return wp.dot(miss, miss) <= radius * radius and along + length > 0.0 and along - length < hit.distance
