"""From what a user types to scenes: `house:SEED`, `cabin:SEED`, or mesh files; prepared once, and kept on disk."""

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
from shoal.scene.load import ENDINGS, build, content_key
from shoal.scene.pack import Packed, pack_scene
from shoal.scene.scene import Scene

FORMAT = 3
"""Counts up whenever the same file would become another scene, so that older entries of the cache are passed over."""

MOST_HOUSES = 10**6

FORMS = "house:SEED or cabin:SEED (house:SEED@DETAIL), or the path of a .glb, .gltf, .obj or .ply file"


def open_scene(source: str, up: str = "auto", scale: float = 1.0, strict: bool = False) -> Scene:
    """The scene a user names: `house:SEED`, `cabin:SEED` or `house:SEED@DETAIL` is made, all else is a mesh file.

    Missing textures are a warning, or, if `strict`, an error.
    """
    made = _building(source)
    if made is None:
        scene = build(_file(source), up, scale)
        check_textures(scene.name, scene.missing, strict)
        return scene
    building, seed, detail = made
    return replace(make_house(seed, detail, building), name=source)


def prepare(
    source: str,
    up: str = "auto",
    scale: float = 1.0,
    device: str | torch.device = "cpu",
    strict: bool = False,
) -> Packed:
    """A scene ready for rays, from the cache if it was prepared before; else its tree is built on `device`.

    Missing textures are a warning, or, if `strict`, an error.
    """
    packed = fetch(source, up, scale, device)
    check_textures(packed.name, packed.missing, strict)
    return packed


def fetch(source: str, up: str = "auto", scale: float = 1.0, device: str | torch.device = "cpu") -> Packed:
    """The same for a process that prepares scenes for another, which checks their textures."""
    made = _building(source)
    if made is None:
        file = _file(source)
        key = content_key(file, up, scale, FORMAT)
        return _cached(key, lambda: pack_scene(build(file, up, scale), device))
    building, seed, detail = made
    key = f"{building}-{seed}-{detail:g}-{_recipe()}"
    return _cached(key, lambda: pack_scene(open_scene(source), device))


def _cached(key: str, make: Callable[[], Packed]) -> Packed:
    return replace(cached(key, make, to_arrays, from_arrays), key=key)


def expand(sources: str | Iterable[str]) -> list[str]:
    """Single sources from several at once: `house:train`, `house:test`, `house:100-199`, or a folder of mesh files.

    The same goes for cabins. A detail may follow: `house:train@2`.
    """
    found: list[str] = []
    for source in [sources] if isinstance(sources, str) else sources:
        kind, _, rest = source.partition(":")
        if kind in BUILDINGS:
            seeds, at, detail = rest.partition("@")
            found += [f"{kind}:{seed}{at}{detail}" for seed in _seeds(kind, seeds)]
        elif Path(source).is_dir():
            files = sorted(p for p in Path(source).rglob("*") if p.suffix.lower() in ENDINGS)
            if not files:
                raise ShoalError(f"The folder {source} holds no mesh files ({', '.join(ENDINGS)}).")
            found += map(str, files)
        else:
            found.append(source)
    if not found:
        raise ShoalError(f"No scene is named; give {FORMS}.")
    return found


def check_there(sources: Iterable[str]) -> None:
    """Refuse single sources that are no files, before anybody waits for them."""
    for source in sources:
        if _building(source) is None:
            _file(source)


def _seeds(building: str, text: str) -> Iterable[int | str]:
    if text in ("train", "test"):
        return {"train": TRAIN, "test": TEST}[text]
    first, dash, last = text.partition("-")
    if dash and first.isdigit() and last.isdigit():
        if int(last) < int(first):
            raise ShoalError(f"{building}:{text} is empty: {last} comes before {first}.")
        if int(last) - int(first) >= MOST_HOUSES:
            raise ShoalError(f"{building}:{text} is more than {MOST_HOUSES:,} {building}s.")
        return range(int(first), int(last) + 1)
    return [text]


def _building(source: str) -> tuple[str, int, float] | None:
    """House or cabin, seed and detail; None for anything else."""
    kind, _, rest = str(source).partition(":")
    if kind not in BUILDINGS:
        return None
    seed, at, detail = rest.partition("@")
    if seed in ("train", "test") or "-" in seed.strip("-"):
        raise ShoalError(f"{source} is many {kind}s; name one of them, such as {kind}:7.")
    if not (seed.isascii() and seed.isdigit() and len(seed) <= 18):
        raise ShoalError(f"A {kind} needs a seed, a whole number from 0 on, such as {kind}:7, not {seed!r}.")
    try:
        return kind, int(seed), float(detail) if at else 1.0
    except ValueError:
        raise ShoalError(f"The detail of a {kind} is a number such as 2 in {kind}:7@2, not {detail!r}.") from None


@cache
def _recipe() -> str:
    """Changes with the code that makes houses and cabins: one of an older version is not this one."""
    code = [path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    return hashlib.sha256(b"".join(code)).hexdigest()[:16]


def _file(source: str) -> Source:
    kind, colon, rest = str(source).partition(":")
    if not str(source).strip():
        raise ShoalError(f"The scene has no name; give {FORMS}.")
    if "://" in str(source):
        raise ShoalError(f"{source} is an address; fetch the file and give its path.")
    if colon and len(kind) > 1 and kind.isalpha() and "." not in rest:
        raise unknown("kind of scene", kind, BUILDINGS)
    return Source(source)


def to_arrays(packed: Packed) -> tuple[dict[str, np.ndarray], dict]:
    """A packed scene as arrays and JSON, for a file."""
    meta = dict(
        name=packed.name,
        places=packed.places,
        labels=packed.labels,
        triangles=packed.triangles,
        holes=packed.holes,
        notes=packed.notes,
        missing=packed.missing,
        key=packed.key,
    )
    # Integers: where floats are copied, the bits of those that are no numbers are not safe everywhere.
    return {"words": packed.words.view(torch.int32).numpy(), "bounds": packed.bounds, "middle": packed.middle}, meta


def from_arrays(arrays: dict[str, np.ndarray], meta: dict) -> Packed:
    """The packed scene that a file holds."""
    return Packed(
        name=meta["name"],
        words=torch.from_numpy(arrays["words"]).view(torch.float32),
        places=tuple(meta["places"]),
        bounds=arrays["bounds"],
        middle=arrays["middle"],
        labels=tuple(meta["labels"]),
        triangles=meta["triangles"],
        holes=meta["holes"],
        notes=tuple(meta["notes"]),
        missing=tuple(meta["missing"]),
        key=meta.get("key", ""),
    )
