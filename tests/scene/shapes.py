"""Small scenes for tests."""

import numpy as np

from shoal.scene.scene import Material, Scene


def make_scene(corners: np.ndarray, name: str = "test", **parts) -> Scene:
    """A scene of loose triangles [T, 3, 3]; each triangle is one instance unless `instance` is given."""
    corners = np.asarray(corners, np.float32)
    count = len(corners)
    given = dict(
        uv=np.tile(np.array([[0, 0], [1, 0], [0, 1]], np.float32), (count, 1, 1)),
        colors=np.full((count, 3, 4), 255, np.uint8),
        material=np.zeros(count, np.int32),
        semantic=np.zeros(count, np.int32),
        instance=np.arange(1, count + 1, dtype=np.int32),
    )
    given.update(parts)
    return Scene(name, corners.reshape(-1, 3), np.arange(3 * count, dtype=np.int32).reshape(-1, 3), **given)


def quad(a, b, c, d) -> np.ndarray:
    """Two triangles; with the default uv of `QUAD_UV`, a is the texture's lower left corner and c its upper right."""
    return np.array([[a, b, c], [a, c, d]], np.float32)


QUAD_UV = np.array([[[0, 0], [1, 0], [1, 1]], [[0, 0], [1, 1], [0, 1]]], np.float32)


def box(low, high) -> np.ndarray:
    """The twelve triangles of an upright box; sides in the order -x, +x, -y, +y, -z, +z."""
    (x0, y0, z0), (x1, y1, z1) = low, high
    sides = [
        quad((x0, y0, z0), (x0, y1, z0), (x0, y1, z1), (x0, y0, z1)),
        quad((x1, y0, z0), (x1, y1, z0), (x1, y1, z1), (x1, y0, z1)),
        quad((x0, y0, z0), (x1, y0, z0), (x1, y0, z1), (x0, y0, z1)),
        quad((x0, y1, z0), (x1, y1, z0), (x1, y1, z1), (x0, y1, z1)),
        quad((x0, y0, z0), (x1, y0, z0), (x1, y1, z0), (x0, y1, z0)),
        quad((x0, y0, z1), (x1, y0, z1), (x1, y1, z1), (x0, y1, z1)),
    ]
    return np.concatenate(sides)


def soup(count: int, seed: int = 0, spread: float = 4.0, size: float = 0.4) -> np.ndarray:
    """Random triangles in a cube."""
    rng = np.random.default_rng(seed)
    return (rng.uniform(-spread, spread, (count, 1, 3)) + rng.normal(0, size, (count, 3, 3))).astype(np.float32)


def textured_wall(texture: np.ndarray, repeat: float = 1.0, cutoff: float = 0.0, distance: float = 2.0) -> Scene:
    """A wall of 4 x 4 m across x = `distance`, upright from the origin; `texture` covers it `repeat` times a side."""
    corners = quad((distance, 2, -2), (distance, -2, -2), (distance, -2, 2), (distance, 2, 2))
    material = Material("picture", texture=0, cutoff=cutoff)
    return make_scene(corners, uv=QUAD_UV * repeat, materials=(material,), textures=(texture,))
