"""A scene: checked triangles in meters, z up, with materials, textures, labels and instance ids."""

from dataclasses import dataclass, field

import numpy as np

from shoal.core.errors import ShoalError

MAX_EXTENT = 1e4
"""Meters across. In larger scenes rays would pass between adjacent triangles; most likely the unit is wrong."""

MAX_DISTANCE = 1e6
"""Meters from the origin. Farther away float32 no longer resolves ten centimeters."""


@dataclass(frozen=True)
class Material:
    """Appearance of a surface: color times texture times vertex colors."""

    name: str = ""
    color: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    """Red, green, blue, alpha; 0 to 1, sRGB."""
    texture: int = -1
    """Index into the scene's textures, -1 for none."""
    cutoff: float = 0.0
    """Alpha cutoff: surface points with alpha below this are holes; 0 disables it."""


@dataclass(frozen=True)
class Scene:
    """Triangles in meters, z up, with materials, textures and labels, as NumPy arrays on the CPU."""

    name: str
    vertices: np.ndarray
    """float32 [V, 3], meters."""
    triangles: np.ndarray
    """int32 [T, 3], vertex indices; triangles are double-sided."""
    uv: np.ndarray
    """float32 [T, 3, 2], texture coordinates of the corners; v points up, and the texture repeats outside 0 to 1."""
    colors: np.ndarray
    """uint8 [T, 3, 4], red, green, blue and alpha of the corners; white if a file has no colors."""
    material: np.ndarray
    """int32 [T], index into `materials`."""
    semantic: np.ndarray
    """int32 [T], index into `labels`; 0 is "unlabeled"."""
    instance: np.ndarray
    """int32 [T], instance id of the object, from 1; 0 is none."""
    materials: tuple[Material, ...] = (Material(),)
    textures: tuple[np.ndarray, ...] = ()
    """uint8 [height, width, 4] each; row 0 is the top of the image."""
    labels: tuple[str, ...] = ("unlabeled",)
    missing: tuple[str, ...] = ()
    """References to texture files that do not exist; their surfaces show the material's color."""
    notes: tuple[str, ...] = field(default=())
    """Messages for the user about what the reader skipped or changed."""

    @property
    def corners(self) -> np.ndarray:
        """float32 [T, 3, 3], meters: the positions of each triangle's corners."""
        return self.vertices[self.triangles]

    @property
    def bounds(self) -> np.ndarray:
        """float32 [2, 3], meters: minimum and maximum corner of the bounding box of all triangles."""
        corners = self.corners.reshape(-1, 3)
        return np.stack([corners.min(0), corners.max(0)])


def check_scene(scene: Scene) -> Scene:
    """Validate a scene and return it. The search tree and the kernels rely on these checks.

    Raises:
        ShoalError: If an array has the wrong shape, dtype or range, or the scene is empty or too large.
    """
    name, count = scene.name, len(scene.triangles)
    if len(scene.vertices) == 0 or count == 0:
        raise ShoalError(f"{name} holds no triangles: {len(scene.vertices)} vertices, {count} faces.")
    _expect(name, "vertices", scene.vertices, (len(scene.vertices), 3), np.float32)
    _expect(name, "triangles", scene.triangles, (count, 3), np.int32)
    _expect(name, "uv", scene.uv, (count, 3, 2), np.float32)
    _expect(name, "colors", scene.colors, (count, 3, 4), np.uint8)
    for part in ("material", "semantic", "instance"):
        _expect(name, part, getattr(scene, part), (count,), np.int32)
    for texture in scene.textures:
        _expect(name, "a texture", texture, (*texture.shape[:2], 4), np.uint8)
        if texture.size == 0:
            raise ShoalError(f"{name}: a texture has no pixels (shape {texture.shape}).")
    bad = np.flatnonzero(~np.isfinite(scene.vertices).all(1))
    if len(bad):
        raise ShoalError(f"{name}: vertex {bad[0]} is not finite ({scene.vertices[bad[0]]}), {len(bad)} in all.")
    bad = np.flatnonzero(~np.isfinite(scene.uv).all((1, 2)))
    if len(bad):
        raise ShoalError(f"{name}: the texture coordinates of triangle {bad[0]} are not finite, {len(bad)} in all.")
    _within(name, "a vertex index", scene.triangles, len(scene.vertices))
    _within(name, "a material", scene.material, len(scene.materials))
    _within(name, "a label", scene.semantic, len(scene.labels))
    _within(name, "a texture index", np.array([m.texture for m in scene.materials]), len(scene.textures), least=-1)
    low, high = scene.bounds
    extent = float((high - low).max())
    if extent == 0.0:
        raise ShoalError(f"{name}: all triangles lie in one point {low.tolist()}; the scene is empty.")
    if extent > MAX_EXTENT:
        raise ShoalError(
            f"{name} is {extent:.6g} m across, more than {MAX_EXTENT:g} m: "
            "give its unit with --scale (0.001 for millimeters)."
        )
    away = float(np.abs([low, high]).max())
    if away > MAX_DISTANCE:
        raise ShoalError(f"{name} lies {away:.6g} m from the origin, more than {MAX_DISTANCE:g} m: move it nearer.")
    return scene


def _expect(name: str, what: str, array: np.ndarray, shape: tuple[int, ...], dtype: type) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ShoalError(
            f"{name}: {what} must have shape {shape} and type {np.dtype(dtype)}, not {array.shape} and {array.dtype}."
        )


def _within(name: str, what: str, indices: np.ndarray, count: int, least: int = 0) -> None:
    bad = np.flatnonzero((indices < least) | (indices >= count))
    if len(bad):
        where = bad[0] // indices.shape[1] if indices.ndim > 1 else bad[0]
        value = indices.ravel()[bad[0]]
        raise ShoalError(f"{name}: {what} is out of range at {where}: {value}, but there are {count}.")
