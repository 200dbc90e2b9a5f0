"""Summary of a scene as text, for `shoal scene info`."""

import numpy as np

from shoal.scene.pack import SECTIONS, PackedScene
from shoal.scene.scene import Scene
from shoal.scene.sources import open_scene, prepare_unchecked

SMALL, LARGE = 0.05, 300.0
"""Meters; a smaller or larger scene probably uses another unit."""


def scene_info(source: str, up: str = "auto", scale: float = 1.0, strict: bool = False) -> list[str]:
    """Lines of text about a scene: its size, contents, device memory and notes."""
    scene = open_scene(source, up, scale, strict)
    packed = prepare_unchecked(source, up, scale)
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
        lines.append(f"note       {extent.max():.4g} m across: set --scale 0.01 for centimeters, 0.001 for millimeters")
    elif extent.max() < SMALL:
        lines.append(f"note       only {extent.max():.4g} m across: set --scale to the meters per unit of the file")
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
    present = [(count, label) for label, count in zip(scene.labels, counts, strict=True) if count]
    shown = [f"{label} {count:,}" for count, label in sorted(present, key=lambda pair: -pair[0])[:12]]
    return ", ".join(shown) + (f" and {len(present) - 12} more" if len(present) > 12 else "")


def _sections(packed: PackedScene) -> str:
    ends = [*packed.section_starts[1:], len(packed.words)]
    sizes = [(end - first) * 16 / 1e6 for first, end in zip(packed.section_starts, ends, strict=True)]
    return ", ".join(f"{name} {size:.1f}" for name, size in zip(SECTIONS, sizes, strict=True))
