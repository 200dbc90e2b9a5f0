"""Conversion of a parsed mesh file to a checked scene: up axis, unit, labels, and removal of degenerate triangles."""

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from shoal.core.errors import ShoalError, excerpt
from shoal.scene.scene import MAX_DISTANCE, MAX_EXTENT, Material, Scene, check_scene

MAX_TRIANGLES = 50_000_000
"""Maximum triangles of a scene; a larger search tree does not fit on current devices."""
MAX_NAME_CHARS = 100
"""Characters of a name that are used for its label."""
UP_AXES = ("auto", "y", "z")

_GENERIC_NAMES = frozenset(
    "default defaultobject geometry gltf group mesh mesh_id model node none null object obj polysurface primitive root "
    "rootnode scene sketchup unnamed untitled world".split()
)


@dataclass
class ParsedMesh:
    """The content of a mesh file, in the file's axes and unit."""

    vertices: np.ndarray
    """float64 [V, 3]."""
    triangles: np.ndarray
    """int64 [T, 3], vertex indices, unchecked."""
    uv: np.ndarray
    """float32 [T, 3, 2], v up."""
    colors: np.ndarray
    """uint8 [T, 3, 4]."""
    material: np.ndarray
    """int32 [T]."""
    instance: np.ndarray
    """int32 [T], from 1."""
    label_index: np.ndarray
    """int32 [T], index into `labels`."""
    labels: list[str]
    """Labels; the empty string is unlabeled."""
    materials: list[Material]
    textures: list[np.ndarray] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    """References to texture files that do not exist."""
    notes: list[str] = field(default_factory=list)


def check_settings(up: str, scale: float) -> None:
    """Raise a ShoalError for an invalid up axis or scale."""
    if up not in UP_AXES:
        raise ShoalError(f"The up axis is one of {', '.join(UP_AXES)}, not {up!r}.")
    if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0):
        raise ShoalError(f"The scale must be a positive number (0.001 for millimeters), not {scale!r}.")


def check_count(name: str, count: int) -> None:
    """Raise a ShoalError for more than MAX_TRIANGLES triangles; called before arrays of that size are allocated."""
    if count > MAX_TRIANGLES:
        raise ShoalError(f"{name} has {count:,} triangles; at most {MAX_TRIANGLES:,} are read: simplify or split it.")


def label(*candidates: str) -> str:
    """The label of an object, from the first name with a meaning: "Chair_12" and "chair.001" give "chair"."""
    return next((name for candidate in candidates if (name := _strip_number(candidate[:MAX_NAME_CHARS]))), "")


@lru_cache(4096)
def _strip_number(name: str) -> str:
    """A name in lower case without trailing numbers; empty for generic names such as "mesh"."""
    name = re.sub(r"[\s_.\-:#()\[\]]*\d*[\s_.\-:#()\[\]]*$", "", name.strip())
    while name != (shorter := re.sub(r"[\s_.\-:#()\[\]]+\d+$", "", name)):
        name = shorter
    name = name.strip(" _.-:#").lower()
    return "" if name in _GENERIC_NAMES or name.isdigit() else excerpt(name)


def to_scene(mesh: ParsedMesh, name: str, up: str, scale: float) -> Scene:
    """Convert to meters and z up, remove unused vertices and degenerate triangles, and check the scene."""
    count = len(mesh.triangles)
    if count == 0 or len(mesh.vertices) == 0:
        raise ShoalError(f"{name} holds no triangles: {len(mesh.vertices)} vertices, {count} faces.")
    check_count(name, count)
    _check_indices(name, mesh.triangles, len(mesh.vertices))

    used = np.zeros(len(mesh.vertices), dtype=bool)
    used[mesh.triangles] = True
    triangles = (np.cumsum(used) - 1)[mesh.triangles].astype(np.int32)
    vertices = _to_meters(name, mesh.vertices[used], np.flatnonzero(used), up, scale)

    keep = _has_area(vertices, triangles)
    flat = count - int(keep.sum())
    if flat == count:
        raise ShoalError(f"{name}: none of its {count} triangles has an area; the scene is empty.")
    notes = list(mesh.notes)
    if flat:
        notes.append(f"{flat} of {count} triangles have no area and were skipped")

    labels = ["unlabeled", *sorted({n for n in mesh.labels if n} - {"unlabeled"})]
    index = {"": 0, **{text: i for i, text in enumerate(labels)}}
    semantic = np.array([index[n] for n in mesh.labels], dtype=np.int32)
    return check_scene(
        Scene(
            name=name,
            vertices=vertices,
            triangles=triangles[keep],
            uv=mesh.uv[keep],
            colors=mesh.colors[keep],
            material=mesh.material[keep],
            semantic=semantic[mesh.label_index[keep]],
            instance=mesh.instance[keep],
            materials=tuple(mesh.materials),
            textures=tuple(mesh.textures),
            labels=tuple(labels),
            missing=mesh.missing,
            notes=tuple(notes),
        )
    )


def _check_indices(name: str, triangles: np.ndarray, count: int) -> None:
    bad = np.flatnonzero(((triangles < 0) | (triangles >= count)).any(1))
    if len(bad):
        corners = triangles[bad[0]]
        wrong = corners[(corners < 0) | (corners >= count)][0]
        raise ShoalError(
            f"{name}: triangle {bad[0]} refers to vertex {wrong}, but the mesh has {count} vertices (0 to "
            f"{count - 1}); {len(bad)} triangles have such indices: export it again."
        )


def _to_meters(name: str, vertices: np.ndarray, indices: np.ndarray, up: str, scale: float) -> np.ndarray:
    """float32 [V, 3] in meters, z up. `indices` [V] are the vertices' indices in the file, for messages."""
    bad = np.flatnonzero(~np.isfinite(vertices).all(1))
    if len(bad):
        x, y, z = vertices[bad[0]]
        raise ShoalError(f"{name}: vertex {indices[bad[0]]} is not finite ({x}, {y}, {z}), {len(bad)} in all.")
    low, high = vertices.min(0) * scale, vertices.max(0) * scale
    away = max(np.abs(low).max(), np.abs(high).max())
    if not ((high - low).max() <= MAX_EXTENT and away <= MAX_DISTANCE):
        raise ShoalError(
            f"{name} reaches from ({low[0]:g}, {low[1]:g}, {low[2]:g}) to ({high[0]:g}, {high[1]:g}, {high[2]:g}) m, "
            f"more than {MAX_EXTENT:g} m across or {MAX_DISTANCE:g} m from the origin: "
            "give its unit with --scale (0.001 for millimeters)."
        )
    vertices = vertices * scale
    if up == "y":  # a rotation by 90 degrees about x, which keeps handedness
        vertices = np.stack([vertices[:, 0], -vertices[:, 2], vertices[:, 1]], 1)
    return np.ascontiguousarray(vertices, dtype=np.float32)


def _has_area(vertices: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """bool [T]: whether the corners span a triangle of nonzero area in float32."""
    a, b, c = (vertices[triangles[:, corner]].astype(np.float64) for corner in range(3))
    ab, ac = b - a, c - a
    longest = np.maximum((ab**2).sum(1), (ac**2).sum(1))
    return np.linalg.norm(np.cross(ab, ac), axis=1) > 1e-9 * longest
