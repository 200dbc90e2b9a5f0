"""From what a user types to a scene: `house:SEED`, or the path of a mesh file."""

from shoal.errors import ShoalError, unknown
from shoal.scene.cache import cached, pack_scene, unpack_scene
from shoal.scene.files import Source
from shoal.scene.load import build, content_key
from shoal.scene.scene import Scene

FORMAT = 1
"""Counts up whenever the same file would become another scene, so that older entries of the cache are passed over."""


def open_scene(source: str, up: str = "auto", scale: float = 1.0, cache: bool = True) -> Scene:
    """The scene a user names: `house:SEED` is made, anything else is a mesh file, prepared once and cached."""
    kind, colon, rest = str(source).partition(":")
    if kind == "house":
        return _house(rest)
    if not str(source).strip():
        raise ShoalError("The scene has no name; give house:SEED or the path of a .glb, .gltf, .obj or .ply file.")
    if "://" in str(source):
        raise ShoalError(f"{source} is an address; fetch the file and give its path.")
    if colon and len(kind) > 1 and kind.isalpha() and "." not in rest:
        raise unknown("kind of scene", kind, ["house"])
    file = Source(source)
    if not cache:
        return build(file, up, scale)
    key = content_key(file, up, scale, FORMAT)
    return cached(key, lambda: build(file, up, scale), pack_scene, unpack_scene)


def _house(seed: str) -> Scene:
    if not (seed.isascii() and seed.isdigit() and len(seed) <= 18):
        raise ShoalError(f"A house needs a seed, a whole number from 0 on, such as house:7, not {seed!r}.")
    from shoal.scene.house import make_house

    return make_house(int(seed))
