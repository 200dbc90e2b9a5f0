"""What a scene holds, for people to read."""

import numpy as np

from shoal.scene.pack import SECTIONS
from shoal.scene.scene import Scene
from shoal.scene.sources import fetch, open_scene

SMALL, LARGE = 0.05, 300.0
"""Meters; a scene that is smaller or larger was probably drawn in another unit."""


def scene_info(source: str, up: str = "auto", scale: float = 1.0, strict: bool = False) -> list[str]:
    """Lines about a scene: what it is made of, how large it is, and what it takes on a device."""
    scene = open_scene(source, up, scale, strict)
    packed = fetch(source, up, scale)
    low, high = scene.bounds
    extent = high - low
    lines = [
        f"scene      {scene.name}",
        f"size       {extent[0]:.2f} x {extent[1]:.2f} x {extent[2]:.2f} m, from {_point(low)} to {_point(high)}",
        f"triangles  {len(scene.triangles):,} over {len(scene.vertices):,} vertices",
        f"objects    {len(np.unique(scene.instance[scene.instance > 0])):,}",
        f"materials  {len(scene.materials)}, of which {sum(m.cutoff > 0 for m in scene.materials)} with holes",
        f"textures   {_textures(scene)}",
        f"labels     {_labels(scene)}",
        f"on device  {packed.nbytes / 1e6:.1f} MB: {_sections(packed)}",
    ]
    if extent.max() > LARGE:
        lines.append(f"note       {extent.max():.4g} m across: in centimeters (--scale 0.01) or millimeters (0.001)?")
    elif extent.max() < SMALL:
        lines.append(f"note       only {extent.max():.4g} m across: give the length of its unit with --scale?")
    return lines + [f"note       {note}" for note in scene.notes]


def _point(corner: np.ndarray) -> str:
    return "(" + ", ".join(f"{x:.2f}" for x in corner) + ")"


def _textures(scene: Scene) -> str:
    if not scene.textures:
        return "none"
    largest = max(scene.textures, key=lambda t: t.size)
    total = sum(t.nbytes for t in scene.textures)
    return f"{len(scene.textures)}, {total / 1e6:.1f} MB, the largest {largest.shape[1]} x {largest.shape[0]}"


def _labels(scene: Scene) -> str:
    counts = np.bincount(scene.semantic, minlength=len(scene.labels))
    there = [(count, label) for label, count in zip(scene.labels, counts, strict=True) if count]
    shown = [f"{label} {count:,}" for count, label in sorted(there, key=lambda pair: -pair[0])[:12]]
    return ", ".join(shown) + (f" and {len(there) - 12} more" if len(there) > 12 else "")


def _sections(packed) -> str:
    ends = [*packed.places[1:], len(packed.words)]
    sizes = [(end - first) * 16 / 1e6 for first, end in zip(packed.places, ends, strict=True)]
    return ", ".join(f"{name} {size:.1f}" for name, size in zip(SECTIONS, sizes, strict=True))
