"""Things that move: boxes, spheres, cylinders, capsules and meshes with their own pose in each env."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import warp as wp

from shoal.core.errors import ShoalError
from shoal.core.store import full_device
from shoal.render.cast import Hit, Table
from shoal.scene.memory import RADIUS

NONE, BOX, SPHERE, CYLINDER, CAPSULE = 0, 1, 2, 3, 4
MESH = 16
"""Kind MESH + row is the scene in that row of the scene memory."""


@dataclass(frozen=True)
class Movers:
    """`[envs, per_env]` things, each seen by the cameras of its env only. Write the tensors; the next image shows it.

    | tensor | shape | meaning |
    |---|---|---|
    | kind | int32 [E, M] | NONE, BOX, SPHERE, CYLINDER, CAPSULE, or MESH + row of a scene |
    | position | float32 [E, M, 3] | meters |
    | rotation | float32 [E, M, 4] | quaternion x, y, z, w |
    | size | float32 [E, M, 3] | half lengths of a box, half axes of a sphere or cylinder (along z), meters; of a capsule the radius and half the length of its straight part; of a mesh the scale |
    | color | float32 [E, M, 3] | red, green, blue, 0 to 1 |
    | semantic, instance | int32 [E, M] | what the label and object images show |
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
        """Nothing to be seen yet: kind NONE, unturned, of size 1, white."""
        if envs < 1 or per_env < 1:
            raise ShoalError(f"Moving things need at least one env and one thing each, not {envs} and {per_env}.")
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
def reach(kind: int, size: wp.vec3, table: Table) -> float:
    """The radius of a ball around the thing's position that holds all of it."""
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
def solid(size: wp.vec3) -> wp.vec3:
    """Half lengths, positive: something flat is a micrometer thick."""
    return wp.max(wp.abs(size), wp.vec3(1.0e-6))


@wp.func
def upright(turn: wp.quat) -> wp.quat:
    """A rotation of length 1; one of length 0 does not turn."""
    length = wp.length(turn)
    return wp.where(length > 0.0, turn / wp.max(length, 1.0e-30), wp.quat_identity())


@wp.func
def meet_box(o: wp.vec3, d: wp.vec3) -> float:
    """Where a ray enters the box from -1 to 1 (or leaves it, from within); inf if never."""
    a = wp.cw_div(wp.vec3(-1.0) - o, d)
    b = wp.cw_div(wp.vec3(1.0) - o, d)
    enter = wp.max(wp.min(a, b))
    leave = wp.min(wp.max(a, b))
    return wp.where(enter <= leave and leave > 0.0, wp.where(enter > 0.0, enter, leave), wp.inf)


@wp.func
def meet_round(a: float, b: float, c: float) -> float:
    """The least positive root of a t² + 2 b t + c; inf if there is none."""
    inside = b * b - a * c
    if inside < 0.0 or a == 0.0:
        return wp.inf
    root = wp.sqrt(inside)
    first = (-b - root) / a
    second = (-b + root) / a
    return wp.where(first > 0.0, first, wp.where(second > 0.0, second, wp.inf))


@wp.func
def meet_ball(o: wp.vec3, d: wp.vec3, radius: float) -> float:
    return meet_round(wp.dot(d, d), wp.dot(o, d), wp.dot(o, o) - radius * radius)


@wp.func
def meet_end(o: wp.vec3, d: wp.vec3, radius: float, side: float) -> float:
    """The outer half of the ball at an end of a capsule, above (side 1) or below (-1) its middle."""
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
def meet_tube(o: wp.vec3, d: wp.vec3, radius: float, half: float) -> float:
    """The wall of an upright cylinder: the nearer meeting, or the farther where the nearer lies above or below."""
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
def meet_lid(o: wp.vec3, d: wp.vec3, height: float) -> float:
    """The round lid of radius 1 of an upright cylinder."""
    t = (height - o[2]) / d[2]
    x = o[0] + t * d[0]
    y = o[1] + t * d[1]
    return wp.where(t > 0.0 and x * x + y * y <= 1.0, t, wp.inf)


@wp.func
def meet_shape(kind: int, size: wp.vec3, o: wp.vec3, d: wp.vec3) -> float:
    """Distance to a simple shape along a ray in its own frame (unscaled); inf if it is not met."""
    size = solid(size)
    unit_o = wp.cw_div(o, size)
    unit_d = wp.cw_div(d, size)
    best = float(wp.inf)
    if kind == BOX:
        best = meet_box(unit_o, unit_d)
    elif kind == SPHERE:
        best = meet_ball(unit_o, unit_d, 1.0)
    elif kind == CYLINDER:
        lids = wp.min(meet_lid(unit_o, unit_d, 1.0), meet_lid(unit_o, unit_d, -1.0))
        best = wp.min(meet_tube(unit_o, unit_d, 1.0, 1.0), lids)
    elif kind == CAPSULE:
        up = wp.vec3(0.0, 0.0, size[2])
        best = meet_tube(o, d, size[0], size[2])
        best = wp.min(best, wp.min(meet_end(o - up, d, size[0], 1.0), meet_end(o + up, d, size[0], -1.0)))
    return best


@wp.func
def shape_normal(kind: int, size: wp.vec3, point: wp.vec3) -> wp.vec3:
    """The outward normal (any length) at a point on a simple shape, in its own frame."""
    size = solid(size)
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
def near_ray(center: wp.vec3, radius: float, direction: wp.vec3, hit: Hit) -> bool:
    """Whether a ray from the origin comes within `radius` of `center` before what it has met."""
    along = wp.dot(center, direction) / wp.dot(direction, direction)
    miss = center - along * direction
    length = radius / wp.length(direction)
    return wp.dot(miss, miss) <= radius * radius and along + length > 0.0 and along - length < hit.distance
