"""The render kernel: one thread per pixel of every view, specialized for the requested images."""

from dataclasses import dataclass
from functools import cache
from typing import Any, no_type_check

import torch
import warp as wp

from shoal.core.store import TORCH_TYPES
from shoal.render.cast import ATTRIBUTES, Hit, Table, Words, bits, face_normal, holds_scene, surface_color, trace
from shoal.render.movers import MESH, bounding_radius, intersect_shape, near_ray, shape_normal, unit_quat
from shoal.scene.pack import ATTRIBUTE_WORDS

TILE = (4, 8)
"""Width and height of the tile of pixels that a warp of 32 threads renders; (8, 4) is 6 % slower."""

BLOCK = 128
"""Threads of a GPU block."""

BLOCKS = 10
"""Blocks per multiprocessor; limits a thread to 48 registers, for more rays in flight to hide latency."""

RAYS_PER_TILE = TILE[0] * TILE[1]

CHANNELS = {"depth": 1, "rgb": 3, "semantic": 1, "instance": 1, "normal": 3}
"""Kinds of images and their number of channels."""

DEFAULT_TYPES = {
    "depth": torch.float32,
    "rgb": torch.uint8,
    "semantic": torch.int32,
    "instance": torch.int32,
    "normal": torch.float32,
}
"""Default dtype of each kind of image."""

WARP_TYPES = {torch_type: warp_type for warp_type, torch_type in TORCH_TYPES.items() if warp_type not in (float, int)}


@dataclass(frozen=True)
class KernelVariant:
    """Constants that the kernel is compiled for."""

    width: int
    height: int
    outputs: tuple[tuple[str, torch.dtype], ...]
    light: bool
    movers: bool
    masked: bool

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of tiles across and down a view."""
        return -(-self.width // TILE[0]), -(-self.height // TILE[1])

    @property
    def rays_per_view(self) -> int:
        """Threads per view, with the padding of the last tiles."""
        return self.tiles[0] * self.tiles[1] * RAYS_PER_TILE


@cache
def render_kernel(variant: KernelVariant) -> Any:
    """The kernel for a variant, with the parameters of `render` below."""
    kinds = dict(variant.outputs)
    depth_type, rgb_type, semantic_type, instance_type, normal_type = (
        WARP_TYPES[kinds.get(name, default)] for name, default in DEFAULT_TYPES.items()
    )
    per_view, tiles_x, width, height = variant.rays_per_view, variant.tiles[0], variant.width, variant.height
    wants_depth, wants_rgb = "depth" in kinds, "rgb" in kinds
    wants_semantic, wants_instance, wants_normal = "semantic" in kinds, "instance" in kinds, "normal" in kinds
    wants_facing = wants_normal or (wants_rgb and variant.light)
    wants_more = wants_rgb or wants_semantic or wants_instance or wants_normal
    depth_bytes, rgb_bytes, normal_bytes = (kind is wp.uint8 for kind in (depth_type, rgb_type, normal_type))
    # Numbers that do not fit in a byte become 255.
    most_semantic, most_instance = (255 if kind is wp.uint8 else 2**31 - 1 for kind in (semantic_type, instance_type))
    has_movers, light, masked = variant.movers, variant.light, variant.masked

    @no_type_check
    def render(
        first: int,
        # scenes
        words: Words,
        table: Table,
        # views
        position: wp.array(dtype=wp.vec3),
        rotation: wp.array(dtype=wp.quat),
        slope: wp.array(dtype=float),
        scene: wp.array(dtype=int),
        only: wp.array(dtype=wp.bool),
        far: float,
        max_depth: float,
        sky: wp.vec3,
        # moving objects
        env: wp.array(dtype=int),
        visible: wp.array2d(dtype=int),
        kind: wp.array2d(dtype=int),
        mover_position: wp.array2d(dtype=wp.vec3),
        mover_rotation: wp.array2d(dtype=wp.quat),
        size: wp.array2d(dtype=wp.vec3),
        color: wp.array2d(dtype=wp.vec3),
        mover_semantic: wp.array2d(dtype=int),
        mover_instance: wp.array2d(dtype=int),
        # images
        depth: wp.array4d(dtype=depth_type),
        rgb: wp.array4d(dtype=rgb_type),
        semantic: wp.array4d(dtype=semantic_type),
        instance: wp.array4d(dtype=instance_type),
        normal: wp.array4d(dtype=normal_type),
    ):
        ray = first + wp.tid()
        view = ray // wp.static(per_view)
        pixel = ray % wp.static(per_view)
        tile = pixel // wp.static(RAYS_PER_TILE)
        lane = pixel % wp.static(RAYS_PER_TILE)
        x = (tile % wp.static(tiles_x)) * wp.static(TILE[0]) + lane % wp.static(TILE[0])
        y = (tile // wp.static(tiles_x)) * wp.static(TILE[1]) + lane // wp.static(TILE[0])
        wanted = x < wp.static(width) and y < wp.static(height)
        if wp.static(masked):
            wanted = wanted and only[view]
        if wanted:
            # The camera faces along x, with y to the left and z up. The direction has length 1 along the view axis,
            # so a distance in lengths of the direction is a depth.
            wide = slope[view]
            step = 2.0 * wide / wp.static(float(width))
            left = wide - (float(x) + 0.5) * step
            up = (0.5 * wp.static(float(height)) - float(y) - 0.5) * step
            origin = position[view]
            direction = wp.quat_rotate(unit_quat(rotation[view]), wp.vec3(1.0, left, up))
            row = scene[view]
            hit = Hit()
            hit.distance = far
            hit.triangle = -1
            hit = trace(words, table, row, origin, direction, hit)
            mover = int(-1)
            e = int(0)
            hit_origin = origin
            hit_direction = direction
            if wp.static(has_movers):
                e = env[view]
                for k in range(visible[view, 0]):
                    m = visible[view, k + 1]
                    what = kind[e, m]
                    shape = size[e, m]
                    offset = mover_position[e, m] - origin
                    if near_ray(offset, bounding_radius(what, shape, table), direction, hit):
                        pose = unit_quat(mover_rotation[e, m])
                        local_origin = wp.quat_rotate_inv(pose, -offset)
                        local_direction = wp.quat_rotate_inv(pose, direction)
                        if what >= wp.static(MESH):
                            local_origin = wp.cw_div(local_origin, shape)
                            local_direction = wp.cw_div(local_direction, shape)
                            before = hit.distance
                            hit = trace(words, table, what - wp.static(MESH), local_origin, local_direction, hit)
                            if hit.distance < before:
                                mover = m
                                hit_origin = local_origin
                                hit_direction = local_direction
                        else:
                            distance = intersect_shape(what, shape, local_origin, local_direction)
                            if distance < hit.distance:
                                hit.distance = distance
                                mover = m
                                hit_origin = local_origin
                                hit_direction = local_direction
            if wp.static(wants_depth):
                value = wp.min(hit.distance, max_depth)
                if wp.static(depth_bytes):
                    value = value * (255.0 / max_depth) + 0.5
                depth[view, y, x, 0] = depth_type(value)
            if wp.static(wants_more):
                is_hit = hit.distance < far
                shown = row
                what = int(0)
                if wp.static(has_movers):
                    if mover >= 0:
                        what = kind[e, mover]
                        shown = what - wp.static(MESH)
                of_mesh = is_hit and (mover < 0 or what >= wp.static(MESH))
                label = int(0)
                object_id = int(0)
                facing = wp.vec3()
                if wp.static(wants_facing):
                    if is_hit:
                        if of_mesh:
                            facing = face_normal(words, table, shown, hit.triangle)
                            if wp.static(has_movers):
                                if mover >= 0:
                                    facing = wp.cw_div(facing, size[e, mover])
                        if wp.static(has_movers):
                            if mover >= 0:
                                if not of_mesh:
                                    spot = hit_origin + hit.distance * hit_direction
                                    facing = shape_normal(what, size[e, mover], spot)
                                facing = wp.quat_rotate(unit_quat(mover_rotation[e, mover]), facing)
                        facing = wp.normalize(facing)
                        if wp.dot(facing, direction) > 0.0:
                            facing = -facing
                if wp.static(wants_semantic or wants_instance):
                    if of_mesh:
                        attributes = table[shown, wp.static(ATTRIBUTES)] + hit.triangle * wp.static(ATTRIBUTE_WORDS)
                        label = (bits(words[attributes + 1][3]) >> 16) & 65535
                        object_id = bits(words[attributes + 2][3])
                    if wp.static(has_movers):
                        if mover >= 0:
                            label = mover_semantic[e, mover]
                            object_id = mover_instance[e, mover]
                if wp.static(wants_rgb):
                    tint = sky
                    if of_mesh:
                        fineness = wp.log2(hit.distance * step)
                        paint = surface_color(words, table, shown, hit.triangle, hit.u, hit.v, fineness)
                        tint = wp.vec3(paint[0], paint[1], paint[2])
                    if wp.static(has_movers):
                        if mover >= 0:
                            if of_mesh:
                                tint = wp.cw_mul(tint, color[e, mover])
                            else:
                                tint = color[e, mover]
                    if wp.static(light):
                        if is_hit:
                            # Light from above and from the camera.
                            frontal = -wp.dot(facing, wp.normalize(direction))
                            tint = tint * (0.5 + 0.2 * (0.5 + 0.5 * facing[2]) + 0.3 * frontal)
                    for c in range(3):
                        value = wp.clamp(tint[c], 0.0, 1.0)
                        if wp.static(rgb_bytes):
                            value = value * 255.0 + 0.5
                        rgb[view, y, x, c] = rgb_type(value)
                if wp.static(wants_semantic):
                    semantic[view, y, x, 0] = semantic_type(wp.min(label, most_semantic))
                if wp.static(wants_instance):
                    instance[view, y, x, 0] = instance_type(wp.min(object_id, most_instance))
                if wp.static(wants_normal):
                    for c in range(3):
                        value = facing[c]
                        if wp.static(normal_bytes):
                            value = value * 127.5 + 128.0
                        normal[view, y, x, c] = normal_type(value)

    options = {"enable_backward": False}
    return wp.kernel(render, module="unique", launch_bounds=(BLOCK, BLOCKS), module_options=options)


@wp.kernel(module="unique", module_options={"enable_backward": False})
@no_type_check
def find_movers(
    first: int,
    table: Table,
    position: wp.array(dtype=wp.vec3),
    rotation: wp.array(dtype=wp.quat),
    slope: wp.array(dtype=float),
    ratio: float,
    far: float,
    env: wp.array(dtype=int),
    hidden: wp.array(dtype=int),
    kind: wp.array2d(dtype=int),
    mover_position: wp.array2d(dtype=wp.vec3),
    size: wp.array2d(dtype=wp.vec3),
    visible: wp.array2d(dtype=int),
):
    """List for each view the objects of its env that intersect the view frustum; `visible[view, 0]` is their number."""
    view = first + wp.tid()
    e = env[view]
    wide = slope[view]
    high = wide * ratio
    count = int(0)
    objects = int(0)
    if e >= 0 and e < kind.shape[0]:
        objects = kind.shape[1]
    for m in range(objects):
        what = kind[e, m]
        shown = what > 0 and m != hidden[view]
        if what >= MESH:
            shown = shown and holds_scene(table, what - MESH)
        if shown:
            radius = bounding_radius(what, size[e, m], table)
            c = wp.quat_rotate_inv(unit_quat(rotation[view]), mover_position[e, m] - position[view])
            ahead = c[0] + radius > 0.0 and c[0] - radius < far
            across = wp.abs(c[1]) - c[0] * wide <= radius * wp.sqrt(1.0 + wide * wide)
            along = wp.abs(c[2]) - c[0] * high <= radius * wp.sqrt(1.0 + high * high)
            if ahead and across and along:
                count += 1
                visible[view, count] = m
    visible[view, 0] = count
