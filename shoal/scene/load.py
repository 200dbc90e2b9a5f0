"""Loading of mesh files: `.glb`, `.gltf`, `.obj` and `.ply` become a checked `Scene` or raise one clear error."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.core.errors import ShoalError, excerpt
from shoal.scene.files import Source, check_textures
from shoal.scene.gltf import gltf_references, read_gltf
from shoal.scene.obj import obj_references, read_obj
from shoal.scene.parsed import ParsedMesh, check_settings, to_scene
from shoal.scene.ply import ply_references, read_ply
from shoal.scene.scene import Scene

MAX_MESSAGE_CHARS = 1000
"""Maximum characters of an error message; file contents quoted in it are cut."""


@dataclass(frozen=True)
class _Format:
    name: str
    up: str
    """The up axis for `up="auto"`."""
    read: Callable[[Source], ParsedMesh]
    references: Callable[[Source], list[Path | None]]


_FORMATS = {
    ".glb": _Format("glTF", "y", read_gltf, gltf_references),
    ".gltf": _Format("glTF", "y", read_gltf, gltf_references),
    ".obj": _Format("OBJ", "y", read_obj, obj_references),
    ".ply": _Format("PLY", "z", read_ply, ply_references),
}

EXTENSIONS = tuple(_FORMATS)
"""File name extensions of the formats that can be loaded."""


def load_scene(path: str | Path, up: str = "auto", scale: float = 1.0, strict: bool = False) -> Scene:
    """Load a mesh file as a scene in meters, z up.

    Args:
        path: A .glb, .gltf, .obj or .ply file.
        up: Up axis of the file. "auto" is y for glTF (by its standard) and OBJ (by convention), z for PLY. Scans in
            .glb files are often z up; compare the scene's bounds. A y-up point (x, y, z) becomes (x, -z, y).
        scale: Meters per unit of the file.
        strict: Raise an error for missing textures instead of a warning.

    Returns:
        The scene; its `notes` list what was skipped or changed.

    Raises:
        ShoalError: If the file cannot be read, with the reason in one sentence.
    """
    scene = build(Source(path), up, scale)
    check_textures(scene.name, scene.missing, strict)
    return scene


def build(source: Source, up: str = "auto", scale: float = 1.0) -> Scene:
    """Read a scene from an opened file."""
    check_settings(up, scale)
    form = _form(source)
    mesh = _guarded(source, form, form.read)
    return to_scene(mesh, source.name, form.up if up == "auto" else up, scale)


def content_key(source: Source, up: str, scale: float, version: int) -> str:
    """SHA-256 of everything that determines the scene: the files, the settings and the version of this code."""
    check_settings(up, scale)
    form = _form(source)
    settings = repr((version, source.name, form.up if up == "auto" else up, float(scale)))
    return source.digest(_guarded(source, form, form.references), settings)


def _form(source: Source) -> _Format:
    suffix = source.path.suffix.lower()
    if suffix not in _FORMATS:
        raise ShoalError(f"{source.name} has the unknown extension {suffix!r}; use one of {', '.join(_FORMATS)}.")
    return _FORMATS[suffix]


def _guarded(source: Source, form: _Format, action: Callable):
    """The result of `action`. Any exception becomes a ShoalError of one sentence with control codes escaped."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return action(source)
    except ShoalError as error:
        raise ShoalError(excerpt(error, MAX_MESSAGE_CHARS)) from None
    except Exception as error:
        cause = excerpt(f"{type(error).__name__}: {error}", MAX_MESSAGE_CHARS)
        raise ShoalError(f"{source.name} could not be read as {form.name}: {cause}.") from error
