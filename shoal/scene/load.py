"""Loading meshes that people bring: `.glb`, `.gltf`, `.obj` and `.ply` become a checked `Scene`, or one clear error."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.core.errors import ShoalError, excerpt
from shoal.scene.draft import Draft, check_settings, finish
from shoal.scene.files import Source, check_textures
from shoal.scene.gltf import gltf_references, read_gltf
from shoal.scene.obj import obj_references, read_obj
from shoal.scene.ply import ply_references, read_ply
from shoal.scene.scene import Scene

LONGEST_MESSAGE = 1000
"""Characters of a refusal, whatever a file puts into it."""


@dataclass(frozen=True)
class _Format:
    name: str
    up: str
    """The axis that points up where nothing else is said."""
    read: Callable[[Source], Draft]
    references: Callable[[Source], list[Path | None]]


_FORMATS = {
    ".glb": _Format("glTF", "y", read_gltf, gltf_references),
    ".gltf": _Format("glTF", "y", read_gltf, gltf_references),
    ".obj": _Format("OBJ", "y", read_obj, obj_references),
    ".ply": _Format("PLY", "z", read_ply, ply_references),
}


ENDINGS = tuple(_FORMATS)
"""The endings of files that can be loaded."""


def load_scene(path: str | Path, up: str = "auto", scale: float = 1.0, strict: bool = False) -> Scene:
    """A mesh file as a scene, in meters and z up.

    `up` is the file's own axis: "auto" takes y for glTF (its standard) and OBJ (its custom) and z for PLY; scans in
    .glb are often z up in truth, so look at the scene's bounds. A y-up point (x, y, z) becomes (x, -z, y). `scale` is
    the length of the file's unit in meters. What was mended or left out stands in the scene's notes. Missing textures
    are a warning, or, if `strict`, an error.
    """
    scene = build(Source(path), up, scale)
    check_textures(scene.name, scene.missing, strict)
    return scene


def build(source: Source, up: str = "auto", scale: float = 1.0) -> Scene:
    """A scene from a file that has been opened."""
    check_settings(up, scale)
    form = _form(source)
    draft = _guarded(source, form, form.read)
    return finish(draft, source.name, form.up if up == "auto" else up, scale)


def content_key(source: Source, up: str, scale: float, version: int) -> str:
    """SHA-256 of all that decides what the scene becomes: the files, the settings, and the version of this code."""
    check_settings(up, scale)
    form = _form(source)
    settings = repr((version, source.name, form.up if up == "auto" else up, float(scale)))
    return source.digest(_guarded(source, form, form.references), settings)


def _form(source: Source) -> _Format:
    suffix = source.path.suffix.lower()
    if suffix not in _FORMATS:
        raise ShoalError(f"{source.name} has the unknown ending {suffix!r}; known are {', '.join(_FORMATS)}.")
    return _FORMATS[suffix]


def _guarded(source: Source, form: _Format, action: Callable):
    """What a reader returns. Damage that no check foresaw still becomes one sentence; control codes are escaped."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return action(source)
    except ShoalError as error:
        raise ShoalError(excerpt(error, LONGEST_MESSAGE)) from None
    except Exception as error:
        cause = excerpt(f"{type(error).__name__}: {error}", LONGEST_MESSAGE)
        raise ShoalError(f"{source.name} could not be read as {form.name}: {cause}.") from error
