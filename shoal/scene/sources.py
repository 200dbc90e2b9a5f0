"""Scene sources: turns `house:SEED`, `cabin:SEED` and mesh file paths into scenes, prepared once and cached on disk."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from shoal.core.errors import ShoalError, unknown
from shoal.scene.cache import cached
from shoal.scene.files import Source, check_textures
from shoal.scene.house import BUILDINGS, TEST, TRAIN, make_house
from shoal.scene.load import EXTENSIONS, build, content_key
from shoal.scene.pack import PackedScene, pack_scene
from shoal.scene.scene import Scene

FORMAT = 5
"""Version of the cache entries of mesh files; incremented when the same file gives other content."""

MAX_HOUSES = 10**6

SOURCE_FORMS = "house:SEED or cabin:SEED (house:SEED@DETAIL), or the path of a .glb, .gltf, .obj or .ply file"


def open_scene(source: str, up: str = "auto", scale: float = 1.0, strict: bool = False) -> Scene:
    """Open a scene by its source.

    Args:
        source: `house:SEED`, `cabin:SEED`, either with `@DETAIL`, or the path of a mesh file.
        up, scale: As in `load_scene`; ignored for houses and cabins.
        strict: Raise an error for missing textures instead of a warning.
    """
    parsed = _parse_building(source)
    if parsed is None:
        scene = build(_file(source), up, scale)
        check_textures(scene.name, scene.missing, strict)
        return scene
    building, seed, detail = parsed
    return replace(make_house(seed, detail, building), name=source)


def prepare(
    source: str,
    up: str = "auto",
    scale: float = 1.0,
    device: str | torch.device = "cpu",
    strict: bool = False,
) -> PackedScene:
    """A packed scene, from the cache or else with its search tree built on `device`.

    Args:
        source, up, scale: As in `open_scene`.
        device: Builds the tree if the scene is not cached; the packed scene is on the CPU.
        strict: Raise an error for missing textures instead of a warning.
    """
    packed = prepare_unchecked(source, up, scale, device)
    check_textures(packed.name, packed.missing, strict)
    return packed


def prepare_unchecked(
    source: str, up: str = "auto", scale: float = 1.0, device: str | torch.device = "cpu"
) -> PackedScene:
    """`prepare` without the check for missing textures."""
    parsed = _parse_building(source)
    if parsed is None:
        file = _file(source)
        key = content_key(file, up, scale, FORMAT)
        return _cached(key, lambda: pack_scene(build(file, up, scale), device))
    building, seed, detail = parsed
    key = f"{building}-{seed}-{detail:g}-{_code_hash()}"
    return _cached(key, lambda: pack_scene(open_scene(source), device))


def _cached(key: str, compute: Callable[[], PackedScene]) -> PackedScene:
    return replace(cached(key, compute, to_arrays, from_arrays), key=key)


def expand(sources: str | Iterable[str]) -> list[str]:
    """Expand sources of several scenes into single ones.

    Sources of several scenes are `house:train`, `house:test`, `house:100-199`, the same for cabins, each with an
    optional detail as in `house:train@2`, and a folder of mesh files.
    """
    found: list[str] = []
    for source in [sources] if isinstance(sources, str) else sources:
        kind, _, rest = source.partition(":")
        if kind in BUILDINGS:
            seeds, at, detail = rest.partition("@")
            found += [f"{kind}:{seed}{at}{detail}" for seed in _seeds(kind, seeds)]
        elif Path(source).is_dir():
            files = sorted(p for p in Path(source).rglob("*") if p.suffix.lower() in EXTENSIONS)
            if not files:
                raise ShoalError(f"The folder {source} holds no mesh files ({', '.join(EXTENSIONS)}).")
            found += map(str, files)
        else:
            found.append(source)
    if not found:
        raise ShoalError(f"No scene is named; give {SOURCE_FORMS}.")
    return found


def check_exists(sources: Iterable[str]) -> None:
    """Raise a ShoalError for a single source whose file does not exist."""
    for source in sources:
        if _parse_building(source) is None:
            _file(source)


def _seeds(building: str, text: str) -> Iterable[int | str]:
    if text in ("train", "test"):
        return {"train": TRAIN, "test": TEST}[text]
    first, dash, last = text.partition("-")
    if dash and first.isdigit() and last.isdigit():
        if int(last) < int(first):
            raise ShoalError(f"{building}:{text} is empty: {last} comes before {first}.")
        if int(last) - int(first) >= MAX_HOUSES:
            raise ShoalError(f"{building}:{text} is more than {MAX_HOUSES:,} {building}s.")
        return range(int(first), int(last) + 1)
    return [text]


def _parse_building(source: str) -> tuple[str, int, float] | None:
    """Building ("house" or "cabin"), seed and detail of a source; None for other sources."""
    kind, _, rest = str(source).partition(":")
    if kind not in BUILDINGS:
        return None
    seed, at, detail = rest.partition("@")
    if seed in ("train", "test") or "-" in seed.strip("-"):
        raise ShoalError(f"{source} is many {kind}s; name one of them, such as {kind}:7.")
    if not (seed.isascii() and seed.isdigit() and len(seed) <= 18):
        raise ShoalError(f"A {kind} needs a seed, an integer of at least 0, such as {kind}:7, not {seed!r}.")
    try:
        return kind, int(seed), float(detail) if at else 1.0
    except ValueError:
        raise ShoalError(f"The detail of a {kind} is a number such as 2 in {kind}:7@2, not {detail!r}.") from None


@cache
def _code_hash() -> str:
    """Hash of this package's source code: a cached house of another version of the code is not reused."""
    code = [path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    return hashlib.sha256(b"".join(code)).hexdigest()[:16]


def _file(source: str) -> Source:
    kind, colon, rest = str(source).partition(":")
    if not str(source).strip():
        raise ShoalError(f"The scene has no name; give {SOURCE_FORMS}.")
    if "://" in str(source):
        raise ShoalError(f"{source} is a URL; download the file and give its path.")
    if colon and len(kind) > 1 and kind.isalpha() and "." not in rest:
        raise unknown("kind of scene", kind, BUILDINGS)
    return Source(source)


def to_arrays(packed: PackedScene) -> tuple[dict[str, np.ndarray], dict]:
    """A packed scene as arrays and JSON metadata."""
    meta = dict(
        name=packed.name,
        section_starts=packed.section_starts,
        labels=packed.labels,
        triangles=packed.triangles,
        has_cutouts=packed.has_cutouts,
        notes=packed.notes,
        missing=packed.missing,
        key=packed.key,
    )
    # As integers: copying floats may change the bits of NaNs.
    return {"words": packed.words.view(torch.int32).numpy(), "bounds": packed.bounds, "center": packed.center}, meta


def from_arrays(arrays: dict[str, np.ndarray], meta: dict) -> PackedScene:
    """The inverse of `to_arrays`."""
    return PackedScene(
        name=meta["name"],
        words=torch.from_numpy(arrays["words"]).view(torch.float32),
        section_starts=tuple(meta["section_starts"]),
        bounds=arrays["bounds"],
        center=arrays["center"],
        labels=tuple(meta["labels"]),
        triangles=meta["triangles"],
        has_cutouts=meta["has_cutouts"],
        notes=tuple(meta["notes"]),
        missing=tuple(meta["missing"]),
        key=meta.get("key", ""),
    )
