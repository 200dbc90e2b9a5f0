"""From what a reader found in a file to a checked scene: axes, unit, labels, and triangles that have an area."""

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from shoal.core.errors import ShoalError, excerpt
from shoal.scene.scene import FARTHEST, LARGEST_EXTENT, Material, Scene, check_scene

LARGEST_COUNT = 50_000_000
"""Triangles. A search tree over more than that does not fit on the devices this is made for."""
LONGEST_NAME = 100
"""Characters of a name that a label is made from."""
UPS = ("auto", "y", "z")

_MEANINGLESS = frozenset(
    "default defaultobject geometry gltf group mesh mesh_id model node none null object obj polysurface primitive root "
    "rootnode scene sketchup unnamed untitled world".split()
)


@dataclass
class Draft:
    """What stands in a file, in the file's own axes and unit."""

    vertices: np.ndarray
    """float64 [V, 3]."""
    triangles: np.ndarray
    """int64 [T, 3], indices of vertices, not checked yet."""
    uv: np.ndarray
    """float32 [T, 3, 2], v up."""
    colors: np.ndarray
    """uint8 [T, 3, 4]."""
    material: np.ndarray
    """int32 [T]."""
    instance: np.ndarray
    """int32 [T], from 1."""
    named: np.ndarray
    """int32 [T], index into `names`."""
    names: list[str]
    """Labels; the empty name is no label."""
    materials: list[Material]
    textures: list[np.ndarray] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    """References to pictures that lead to no file."""
    notes: list[str] = field(default_factory=list)


def check_settings(up: str, scale: float) -> None:
    """Refuse an up axis or a scale that means nothing."""
    if up not in UPS:
        raise ShoalError(f"The up axis is one of {', '.join(UPS)}, not {up!r}.")
    if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0):
        raise ShoalError(f"The scale must be a positive number (0.001 for millimeters), not {scale!r}.")


def check_count(name: str, count: int) -> None:
    """Refuse more triangles than can be used, before anything of that size is made."""
    if count > LARGEST_COUNT:
        raise ShoalError(f"{name} has {count:,} triangles; at most {LARGEST_COUNT:,} are read: simplify or split it.")


def label(*candidates: str) -> str:
    """What an object is called, from the first name that says anything: "Chair_12" and "chair.001" are a "chair"."""
    return next((name for candidate in candidates if (name := _plain(candidate[:LONGEST_NAME]))), "")


@lru_cache(4096)
def _plain(name: str) -> str:
    """A name without what numbers it; the empty one where it says nothing."""
    name = re.sub(r"[\s_.\-:#()\[\]]*\d*[\s_.\-:#()\[\]]*$", "", name.strip())
    while name != (shorter := re.sub(r"[\s_.\-:#()\[\]]+\d+$", "", name)):
        name = shorter
    name = name.strip(" _.-:#").lower()
    return "" if name in _MEANINGLESS or name.isdigit() else excerpt(name)


def finish(draft: Draft, name: str, up: str, scale: float) -> Scene:
    """Meters, z up, no vertex that nothing uses, no triangle without an area; then the checks of every scene."""
    count = len(draft.triangles)
    if count == 0 or len(draft.vertices) == 0:
        raise ShoalError(f"{name} holds no triangles: {len(draft.vertices)} vertices, {count} faces.")
    check_count(name, count)
    _check_indices(name, draft.triangles, len(draft.vertices))

    used = np.zeros(len(draft.vertices), dtype=bool)
    used[draft.triangles] = True
    triangles = (np.cumsum(used) - 1)[draft.triangles].astype(np.int32)
    vertices = _place(name, draft.vertices[used], np.flatnonzero(used), up, scale)

    keep = _has_area(vertices, triangles)
    flat = count - int(keep.sum())
    if flat == count:
        raise ShoalError(f"{name}: none of its {count} triangles has an area; there is nothing to see.")
    notes = list(draft.notes)
    if flat:
        notes.append(f"{flat} of {count} triangles have no area and were left out")

    labels = ["unlabeled", *sorted({n for n in draft.names if n} - {"unlabeled"})]
    number = {"": 0, **{text: i for i, text in enumerate(labels)}}
    meaning = np.array([number[n] for n in draft.names], dtype=np.int32)
    return check_scene(
        Scene(
            name=name,
            vertices=vertices,
            triangles=triangles[keep],
            uv=draft.uv[keep],
            colors=draft.colors[keep],
            material=draft.material[keep],
            semantic=meaning[draft.named[keep]],
            instance=draft.instance[keep],
            materials=tuple(draft.materials),
            textures=tuple(draft.textures),
            labels=tuple(labels),
            missing=draft.missing,
            notes=tuple(notes),
        )
    )


def _check_indices(name: str, triangles: np.ndarray, count: int) -> None:
    bad = np.flatnonzero(((triangles < 0) | (triangles >= count)).any(1))
    if len(bad):
        corners = triangles[bad[0]]
        wrong = corners[(corners < 0) | (corners >= count)][0]
        raise ShoalError(
            f"{name}: triangle {bad[0]} refers to vertex {wrong}, but there are {count} (counted from 0); "
            f"{len(bad)} triangles are broken like this."
        )


def _place(name: str, vertices: np.ndarray, numbers: np.ndarray, up: str, scale: float) -> np.ndarray:
    """float32 [V, 3] in meters, z up. `numbers` are the vertices' indices in the file, for messages."""
    bad = np.flatnonzero(~np.isfinite(vertices).all(1))
    if len(bad):
        x, y, z = vertices[bad[0]]
        raise ShoalError(f"{name}: vertex {numbers[bad[0]]} is not finite ({x}, {y}, {z}), {len(bad)} in all.")
    low, high = vertices.min(0) * scale, vertices.max(0) * scale
    away = max(np.abs(low).max(), np.abs(high).max())
    if not ((high - low).max() <= LARGEST_EXTENT and away <= FARTHEST):
        raise ShoalError(
            f"{name} reaches from ({low[0]:g}, {low[1]:g}, {low[2]:g}) to ({high[0]:g}, {high[1]:g}, {high[2]:g}) m, "
            f"more than {LARGEST_EXTENT:g} m across or {FARTHEST:g} m from the origin: "
            "give its unit with --scale (0.001 for millimeters)."
        )
    vertices = vertices * scale
    if up == "y":  # a quarter turn about x, so left stays left
        vertices = np.stack([vertices[:, 0], -vertices[:, 2], vertices[:, 1]], 1)
    return np.ascontiguousarray(vertices, dtype=np.float32)


def _has_area(vertices: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """bool [T]: whether the corners still span a triangle in single precision."""
    a, b, c = (vertices[triangles[:, corner]].astype(np.float64) for corner in range(3))
    ab, ac = b - a, c - a
    longest = np.maximum((ab**2).sum(1), (ac**2).sum(1))
    return np.linalg.norm(np.cross(ab, ac), axis=1) > 1e-9 * longest
