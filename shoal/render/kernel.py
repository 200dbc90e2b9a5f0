"""The kernel that renders: one thread per pixel of every view, made to measure for what the images are to hold."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import warp as wp

from shoal.core.store import TORCH_TYPES
from shoal.render.cast import LOOKS, Hit, Table, Words, bits, face_normal, holds_scene, surface, trace
from shoal.render.movers import MESH, meet_shape, near_ray, reach, shape_normal, upright
from shoal.scene.pack import LOOK_WORDS

TILE = (4, 8)
"""Pixels that 32 neighboring threads share: what they meet lies close together in the tree. (8, 4) is 6 % slower."""

BLOCK = 128
"""Threads of a GPU block."""

BLOCKS = 10
"""Blocks of a multiprocessor at once, which limits a thread to 48 registers: more rays that wait hide more delay."""

RAYS_PER_TILE = TILE[0] * TILE[1]

CHANNELS = {"depth": 1, "rgb": 3, "semantic": 1, "instance": 1, "normal": 3}
"""What an image can hold, and the channels that it takes."""

DEFAULT_TYPES = {
    "depth": torch.float32,
    "rgb": torch.uint8,
    "semantic": torch.int32,
    "instance": torch.int32,
    "normal": torch.float32,
}

WARP_TYPES = {torch_type: warp_type for warp_type, torch_type in TORCH_TYPES.items() if warp_type not in (float, int)}


@dataclass(frozen=True)
class Recipe:
    """All that the kernel is made to measure for."""

    width: int
    height: int
    outputs: tuple[tuple[str, torch.dtype], ...]
    light: bool
    movers: bool
    masked: bool

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.width // TILE[0]), -(-self.height // TILE[1])

    @property
    def rays_per_view(self) -> int:
        """Threads of a view: its pixels, with those beyond the edges of the last tiles."""
        return self.tiles[0] * self.tiles[1] * RAYS_PER_TILE


@cache
def render_kernel(recipe: Recipe) -> Any:
    """The kernel for a recipe; its parameters are those of `render` below."""
    kinds = dict(recipe.outputs)
    depth_type, rgb_type, semantic_type, instance_type, normal_type = (
        WARP_TYPES[kinds.get(name, default)] for name, default in DEFAULT_TYPES.items()
    )
    per_view, tiles_x, width, height = recipe.rays_per_view, recipe.tiles[0], recipe.width, recipe.height
    wants_depth, wants_rgb = "depth" in kinds, "rgb" in kinds
    wants_semantic, wants_instance, wants_normal = "semantic" in kinds, "instance" in kinds, "normal" in kinds
    wants_facing = wants_normal or (wants_rgb and recipe.light)
    wants_more = wants_rgb or wants_semantic or wants_instance or wants_normal
    depth_bytes, rgb_bytes, normal_bytes = (kind is wp.uint8 for kind in (depth_type, rgb_type, normal_type))
    # What does not fit in a byte is told as 255, not as something else.
    most_semantic, most_instance = (255 if kind is wp.uint8 else 2**31 - 1 for kind in (semantic_type, instance_type))
    has_movers, light, masked = recipe.movers, recipe.light, recipe.masked

    def render(
        first: int,
        # the scenes
        words: Words,
        table: Table,
        # the views
        position: wp.array(dtype=wp.vec3),
        rotation: wp.array(dtype=wp.quat),
        slope: wp.array(dtype=float),
        scene: wp.array(dtype=int),
        only: wp.array(dtype=wp.bool),
        far: float,
        max_depth: float,
        sky: wp.vec3,
        # the moving things
        env: wp.array(dtype=int),
        seen: wp.array2d(dtype=int),
        kind: wp.array2d(dtype=int),
        place: wp.array2d(dtype=wp.vec3),
        turn: wp.array2d(dtype=wp.quat),
        size: wp.array2d(dtype=wp.vec3),
        color: wp.array2d(dtype=wp.vec3),
        mover_semantic: wp.array2d(dtype=int),
        mover_instance: wp.array2d(dtype=int),
        # the images
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
            # The camera looks along x, with y to the left and z up. The direction's length along the view axis is 1,
            # so a distance along the ray is a depth.
            wide = slope[view]
            step = 2.0 * wide / wp.static(float(width))
            left = wide - (float(x) + 0.5) * step
            up = (0.5 * wp.static(float(height)) - float(y) - 0.5) * step
            origin = position[view]
            direction = wp.quat_rotate(upright(rotation[view]), wp.vec3(1.0, left, up))
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
                for k in range(seen[view, 0]):
                    m = seen[view, k + 1]
                    what = kind[e, m]
                    shape = size[e, m]
                    offset = place[e, m] - origin
                    if near_ray(offset, reach(what, shape, table), direction, hit):
                        pose = upright(turn[e, m])
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
                            distance = meet_shape(what, shape, local_origin, local_direction)
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
                met = hit.distance < far
                shown = row
                what = int(0)
                if wp.static(has_movers):
                    if mover >= 0:
                        what = kind[e, mover]
                        shown = what - wp.static(MESH)
                of_mesh = met and (mover < 0 or what >= wp.static(MESH))
                label = int(0)
                thing = int(0)
                facing = wp.vec3()
                if wp.static(wants_facing):
                    if met:
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
                                facing = wp.quat_rotate(upright(turn[e, mover]), facing)
                        facing = wp.normalize(facing)
                        if wp.dot(facing, direction) > 0.0:
                            facing = -facing
                if wp.static(wants_semantic or wants_instance):
                    if of_mesh:
                        look = table[shown, wp.static(LOOKS)] + hit.triangle * wp.static(LOOK_WORDS)
                        label = (bits(words[look + 1][3]) >> 16) & 65535
                        thing = bits(words[look + 2][3])
                    if wp.static(has_movers):
                        if mover >= 0:
                            label = mover_semantic[e, mover]
                            thing = mover_instance[e, mover]
                if wp.static(wants_rgb):
                    tint = sky
                    if of_mesh:
                        fineness = wp.log2(hit.distance * step)
                        paint = surface(words, table, shown, hit.triangle, hit.u, hit.v, fineness)
                        tint = wp.vec3(paint[0], paint[1], paint[2])
                    if wp.static(has_movers):
                        if mover >= 0:
                            if of_mesh:
                                tint = wp.cw_mul(tint, color[e, mover])
                            else:
                                tint = color[e, mover]
                    if wp.static(light):
                        if met:
                            # From above, and from the camera.
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
                    instance[view, y, x, 0] = instance_type(wp.min(thing, most_instance))
                if wp.static(wants_normal):
                    for c in range(3):
                        value = facing[c]
                        if wp.static(normal_bytes):
                            value = value * 127.5 + 128.0
                        normal[view, y, x, c] = normal_type(value)

    options = {"enable_backward": False}
    return wp.kernel(render, module="unique", launch_bounds=(BLOCK, BLOCKS), module_options=options)


@wp.kernel(module="unique", module_options={"enable_backward": False})
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
    place: wp.array2d(dtype=wp.vec3),
    size: wp.array2d(dtype=wp.vec3),
    seen: wp.array2d(dtype=int),
):
    """List for each view the moving things of its env that its field of view touches; `seen[view, 0]` counts them."""
    view = first + wp.tid()
    e = env[view]
    wide = slope[view]
    high = wide * ratio
    count = int(0)
    things = int(0)
    if e >= 0 and e < kind.shape[0]:
        things = kind.shape[1]
    for m in range(things):
        what = kind[e, m]
        shown = what > 0 and m != hidden[view]
        if what >= MESH:
            shown = shown and holds_scene(table, what - MESH)
        if shown:
            radius = reach(what, size[e, m], table)
            c = wp.quat_rotate_inv(upright(rotation[view]), place[e, m] - position[view])
            ahead = c[0] + radius > 0.0 and c[0] - radius < far
            across = wp.abs(c[1]) - c[0] * wide <= radius * wp.sqrt(1.0 + wide * wide)
            along = wp.abs(c[2]) - c[0] * high <= radius * wp.sqrt(1.0 + high * high)
            if ahead and across and along:
                count += 1
                seen[view, count] = m
    seen[view, 0] = count
