"""Rooms of boxes, and exact answers about them."""

import heapq
import math
from contextlib import contextmanager
from functools import cache

import numpy as np

from shoal.nav.ground import Body, GroundMemory
from shoal.nav.queries import Pathfinder
from shoal.scene.memory import SceneMemory
from shoal.scene.pack import pack_scene
from tests.scene.shapes import box, make_scene

BLOCKS = [(3.0, 2.0, 5.0, 4.0, 2.6), (7.0, 0.0, 7.4, 5.0, 2.6), (1.0, 5.5, 6.0, 5.8, 2.6), (4.2, 5.8, 4.5, 8.0, 2.6)]
"""Blocks in the default room: x0, y0, x1, y1 and height, in meters."""


def room(size=(10.0, 8.0), height=2.6, boxes=()):
    """Triangles of a room with its corner at (0, 0) and blocks [(x0, y0, x1, y1, top)] on the floor."""
    parts = [box((0, 0, 0), (*size, height))]
    parts += [box((x0, y0, 0), (x1, y1, top)) for x0, y0, x1, y1, top in boxes]
    return np.concatenate(parts)


def write_obj(path, corners) -> str:
    """Write triangles as an OBJ file; z is up."""
    lines = [f"v {x} {y} {z}" for x, y, z in corners.reshape(-1, 3)]
    lines += [f"f {3 * k + 1} {3 * k + 2} {3 * k + 3}" for k in range(len(corners))]
    path.write_text("\n".join(lines))
    return str(path)


@contextmanager
def opened_worlds(**common):
    """Yield a function that opens and resets worlds with common settings; closes all of them."""
    made = []

    def maker(world, config, envs, **settings):
        made.append(world(envs, "cpu", config(**(common | settings))))
        made[-1].reset(5)
        return made[-1]

    try:
        yield maker
    finally:
        for world in made:
            world.close()


def pathfinder(corners, body: Body | None = None, cell_size: float = 0.1, levels: int = 1) -> Pathfinder:
    """A pathfinder for the ground of some triangles."""
    packed = pack_scene(make_scene(corners))
    cells = GroundMemory.cells_needed(packed.bounds, cell_size) * levels
    return Pathfinder(GroundMemory(SceneMemory.holding([packed], "cpu"), cells, body, cell_size))


def box_distance(points, blocks):
    """Distance of points [n, 2] to the nearest of blocks [(x0, y0, x1, y1)]."""
    points = np.asarray(points)[:, None]
    low, high = np.asarray(blocks)[None, :, :2], np.asarray(blocks)[None, :, 2:4]
    return np.linalg.norm(np.maximum(np.maximum(low - points, points - high), 0), axis=-1).min(1)


@cache
def _free(a, b, blocks, radius):
    """Whether the straight line keeps `radius` from all blocks; cached, since later starts use the same lines."""
    share = np.linspace(0, 1, 120)[:, None]
    return (box_distance(np.array(a) + np.subtract(b, a) * share, blocks) >= radius - 2e-3).all()


def shortest_length(start, goal, blocks, radius, size=(10.0, 8.0)):
    """Length of the shortest path that keeps `radius` from all blocks: Dijkstra over points around their corners."""
    width, depth = size
    outside = [(-1, -1, 0, depth + 1), (width, -1, width + 1, depth + 1), (-1, -1, width + 1, 0)]
    blocks = (*(tuple(b[:4]) for b in blocks), *outside, (-1, depth, width + 1, depth + 1))
    nodes = [tuple(map(float, start)), tuple(map(float, goal))]
    for x0, y0, x1, y1 in blocks[:-4]:
        for cx, cy, begin in ((x1, y1, 0.0), (x0, y1, 0.5), (x0, y0, 1.0), (x1, y0, 1.5)):
            for angle in np.pi * (begin + np.linspace(0, 0.5, 9)):
                nodes.append((cx + radius * np.cos(angle), cy + radius * np.sin(angle)))
    best = {0: 0.0}
    queue = [(0.0, 0)]
    while queue:
        length, at = heapq.heappop(queue)
        if at == 1:
            return length
        if length > best[at]:
            continue
        for other in range(len(nodes)):
            far = length + math.dist(nodes[other], nodes[at])
            if other != at and far < best.get(other, np.inf) and _free(nodes[at], nodes[other], blocks, radius):
                best[other] = far
                heapq.heappush(queue, (far, other))
    return np.inf
