"""Reader for Wavefront `.obj` files with their `.mtl` files.

Written for this project because general readers silently misread parts of the format: indices relative to the current
line, mixed faces with and without texture coordinates, several material files.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from shoal.core.errors import ShoalError, excerpt
from shoal.scene.files import Source, TextureSet
from shoal.scene.parsed import ParsedMesh, check_count, label
from shoal.scene.polygons import triangulate
from shoal.scene.scene import Material

_NUMBER = r"[+-]?\d+"
_CORNERS = dict(v="N", vt="N/N/?", vn="N//N", all="N/N/N")
_FACE = re.compile(
    "|".join(f"(?P<{key}>{c}(?:\\s+{c})*)" for key, c in _CORNERS.items()).replace("N", _NUMBER),
)
"""The corners of a face, all in one of the four notations."""
_OPTIONS = {"-o": 3, "-s": 3, "-t": 3, "-mm": 2}
"""Maximum numbers after a texture option; every other option takes one word."""


@dataclass(frozen=True)
class _Mtl:
    """A material of an .mtl file."""

    color: tuple[float, float, float] = (1.0, 1.0, 1.0)
    opacity: float = 1.0
    texture: str = ""
    """Reference to the color texture, `map_Kd`."""
    mask: str = ""
    """Reference to the opacity texture, `map_d`."""
    scale: tuple[float, float] = (1.0, 1.0)
    offset: tuple[float, float] = (0.0, 0.0)
    file: Path = Path()


def read_obj(source: Source) -> ParsedMesh:
    """Read all faces as triangles; every object or group of the file is one instance."""
    text = _Text(source)
    textures = TextureSet(source)
    library, notes = _libraries(source)
    corners, counts, state = text.faces()
    at, uv_at = corners[:, 0], corners[:, 1]
    points, colors = text.points()
    triangle_corners, face = triangulate(source.name, points[at], counts)
    check_count(source.name, len(triangle_corners))
    small = int((counts < 3).sum())
    if small:
        notes.append(f"{small} faces of fewer than three corners were skipped")

    all_uv = np.concatenate([np.zeros((1, 2)), text.texture_coordinates()])  # row 0: corners without coordinates
    uv = all_uv[uv_at][triangle_corners].astype(np.float32)

    used = sorted(set(state[face].tolist()))
    states = [text.states[i] for i in used]
    index_of = np.zeros(len(text.states), np.int64)
    index_of[used] = np.arange(len(used))
    state_index = index_of[state[face]]

    materials: dict[str | None, int] = {}
    scene_materials: list[Material] = []
    uv_transforms = []
    unknown = []
    for _, _, name in states:
        if name in materials:
            continue
        mtl = library.get(name) if name is not None else _Mtl()
        if mtl is None:
            unknown.append(name)
            mtl = _Mtl()
        materials[name] = len(scene_materials)
        scene_materials.append(_material(source, textures, name or "", mtl))
        uv_transforms.append((mtl.scale, mtl.offset))
    if unknown and library:
        notes.append(f"missing from the material files and therefore white: {_first(unknown)}")
    material = np.array([materials[name] for _, _, name in states], np.int32)[state_index]
    transforms = np.array(uv_transforms, np.float32).reshape(-1, 2, 2)
    transformed = (transforms != [[1.0, 1.0], [0.0, 0.0]]).any((1, 2))[material]
    scale, offset = transforms[material[transformed]].swapaxes(0, 1)[:, :, None]
    uv[transformed] = uv[transformed] * scale + offset
    without_uv = np.unique(material[(uv_at[triangle_corners] == 0).any(1)])
    incomplete = [scene_materials[i].name for i in without_uv if scene_materials[i].texture >= 0]
    if incomplete:
        notes.append(f"textured, but not all faces have texture coordinates: {_first(incomplete)}")
    transparent = [m.name for m in scene_materials if m.color[3] < m.cutoff]
    if transparent:
        notes.append(f"transparent like glass and therefore invisible: {_first(transparent)}")

    instances: dict[tuple[str, str], int] = {}
    for object_name, group, _ in states:
        instances.setdefault((object_name, group), len(instances) + 1)
    return ParsedMesh(
        vertices=points,
        triangles=at[triangle_corners],
        uv=uv,
        colors=colors[at[triangle_corners]],
        material=material,
        instance=np.array([instances[object_name, group] for object_name, group, _ in states], np.int32)[state_index],
        label_index=state_index.astype(np.int32),
        labels=[
            label(object_name, group, "" if object_name or group else name or "") for object_name, group, name in states
        ],
        materials=scene_materials,
        textures=textures.textures,
        missing=textures.missing,
        notes=notes,
    )


def obj_references(source: Source) -> list[Path | None]:
    """The material files and textures the file refers to; None for each missing one."""
    found: list[Path | None] = []
    files = _library_files(source)
    for path, library in _parsed(source, files):
        for mtl in library.values():
            found += [source.find(p, path) for p in (mtl.texture, mtl.mask) if p]
    return [*(path for _, path in files), *found]


class _Text:
    """The lines of the file by type. Numbers are parsed in bulk, and line by line only to locate an error."""

    def __init__(self, source: Source):
        self.name = source.name
        data = source.data
        if b"\0" in data[:4096]:
            raise ShoalError(f"{self.name} is not an .obj file: it holds binary data.")
        text = data.decode("utf-8", "replace").replace("\\\r\n", " ").replace("\\\n", " ")
        self.states: list[tuple[str, str, str | None]] = []
        """(object, group, material) of faces."""
        self._points: list[str] = []
        self._uv: list[str] = []
        self._faces: list[str] = []
        self._line: list[int] = []
        self._state: list[int] = []
        self._so_far: list[tuple[int, int]] = []
        self._read(text)
        if not self._points:
            what = (
                "no vertices" if self._faces else "neither vertices nor faces: it is not an .obj file, or an empty one"
            )
            raise ShoalError(f"{self.name} holds {what}.")
        if not self._faces:
            raise ShoalError(f"{self.name} holds no triangles: {len(self._points)} vertices, 0 faces.")

    def _read(self, text: str) -> None:
        known: dict[tuple[str, str, str | None], int] = {}
        object_name, group, material = "", "", None
        state = -1
        points, uv = self._points, self._uv
        for number, line in enumerate(text.splitlines(), start=1):
            key, _, rest = line.strip().replace("\t", " ").partition(" ")
            if key == "v":
                points.append(rest)
            elif key == "f":
                if state < 0:
                    state = known.setdefault((object_name, group, material), len(known))
                self._faces.append(rest)
                self._line.append(number)
                self._state.append(state)
                self._so_far.append((len(points), len(uv)))
            elif key == "vt":
                uv.append(rest)
            elif key in ("usemtl", "g", "o"):
                rest = sys.intern(rest.strip())  # makes the comparison for every face fast
                if key == "usemtl":
                    material = rest
                elif key == "g":
                    group = rest
                else:
                    object_name, group = rest, ""
                state = -1
        self.states = list(known)

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions, float64 [V, 3], and the optional vertex colors after them, uint8 [V, 4]."""
        table = self._table(self._points, "v", (3, 4, 6, 7))
        colors = np.full((len(table), 4), 255, np.uint8)
        if table.shape[1] >= 6:
            colors[:, :3] = np.rint(np.nan_to_num(table[:, 3:6]).clip(0, 1) * 255)
        return np.ascontiguousarray(table[:, :3]), colors

    def texture_coordinates(self) -> np.ndarray:
        """float64 [VT, 2]."""
        if not self._uv:
            return np.zeros((0, 2))
        table = self._table(self._uv, "vt", (1, 2, 3))
        return np.pad(table, ((0, 0), (0, 1)))[:, :2] if table.shape[1] == 1 else table[:, :2]

    def faces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The corners, corner counts and states of all faces.

        Returns:
            int64 [C, 2]: vertex (from 0) and texture coordinate (from 1; 0 for none) of each corner; int64 [F]: number
            of corners of each face; int64 [F]: index of its state.
        """
        kinds: dict[tuple[str, int], list[int]] = {}
        for i, text in enumerate(self._faces):
            match = _FACE.fullmatch(text.strip())
            if match is None:
                if "#" in text and _FACE.fullmatch(text.partition("#")[0].strip()):
                    self._faces[i] = text = text.partition("#")[0]
                    match = _FACE.fullmatch(text.strip())
                else:
                    raise ShoalError(f"{self.name}, line {self._line[i]}: 'f {text[:60].strip()}' is not a face.")
            kinds.setdefault((match.lastgroup, len(text.split())), []).append(i)  # type: ignore[union-attr, arg-type]

        counts = np.zeros(len(self._faces), np.int64)
        for (_, count), which in kinds.items():
            counts[which] = count
        starts = np.cumsum(counts) - counts
        corners = np.zeros((int(counts.sum()), 2), np.int64)
        so_far = np.array(self._so_far, np.int64)
        for (kind, count), which in kinds.items():
            per = {"v": 1, "vt": 2, "vn": 2, "all": 3}[kind]
            words = " ".join([self._faces[i] for i in which]).replace("/", " ").split()
            table = np.array(words, dtype=np.int64).reshape(len(which), count, per)
            at = starts[which][:, None] + np.arange(count)
            corners[at, 0] = self._resolve(table[:, :, 0], so_far[which, 0], len(self._points), which, "vertex") - 1
            if kind in ("vt", "all"):
                total = len(self._uv)
                corners[at, 1] = self._resolve(table[:, :, 1], so_far[which, 1], total, which, "texture coordinate")
        return corners, counts, np.array(self._state, np.int64)

    def _resolve(self, given: np.ndarray, so_far: np.ndarray, total: int, which: list[int], what: str) -> np.ndarray:
        """Indices from 1; negative ones are relative to the end of what the file defines above the line."""
        index = np.where(given < 0, so_far[:, None] + 1 + given, given)
        bad = np.argwhere((index < 1) | (index > total))
        if len(bad):
            face, corner = bad[0]
            raise ShoalError(
                f"{self.name}, line {self._line[which[face]]}: a face refers to {what} {given[face, corner]}, "
                f"but there are {total} (counted from 1)."
            )
        return index

    def _table(self, lines: list[str], key: str, widths: tuple[int, ...]) -> np.ndarray:
        """float64 [len(lines), width]; if the lines differ in length, the width of the shortest one."""
        words = " ".join(lines).split()
        width = len(lines[0].split())
        try:
            if width in widths and len(words) == width * len(lines):
                table = np.array(words, dtype=np.float64).reshape(len(lines), width)
                # Equal totals do not exclude a short line and a long one.
                if all(len(line.split()) == width for line in lines):
                    return table
        except ValueError:
            pass
        rows = []
        for line in lines:
            row = line.partition("#")[0].split()
            try:
                rows.append([float(word) for word in row])
            except ValueError:
                raise ShoalError(
                    f"{self.name}: '{key} {line[:60].strip()}' contains something other than numbers."
                ) from None
            if len(row) < widths[0]:
                raise ShoalError(
                    f"{self.name}: '{key} {line[:60].strip()}' has {len(row)} numbers instead of {widths[0]}; "
                    "the file is truncated or damaged."
                )
        width = min(len(row) for row in rows)
        return np.array([row[:width] for row in rows], dtype=np.float64)


def _library_files(source: Source) -> list[tuple[str, Path | None]]:
    """Reference and path of each material file. A name may contain spaces, and a line several names."""
    lines = [
        m.decode("utf-8", "replace").strip()
        for m in re.findall(rb"^[ \t]*mtllib[ \t]+(.+)$", source.data, re.MULTILINE)
    ]
    files: dict[str, Path | None] = {}
    for line in lines:
        whole = source.find(line)
        names = [line] if whole is not None or " " not in line else line.split()
        files.update({name: source.find(name) for name in names})
    return list(files.items())


def _libraries(source: Source) -> tuple[dict[str | None, _Mtl], list[str]]:
    library: dict[str | None, _Mtl] = {}
    notes = []
    files = _library_files(source)
    for name, path in files:
        if path is None:
            notes.append(f"the material file {name!r} is missing; its materials are white")
    for _, found in _parsed(source, files):
        library.update(found)
    return library, notes


def _parsed(source: Source, files: list[tuple[str, Path | None]]) -> Iterator[tuple[Path, dict[str, _Mtl]]]:
    """Path and materials of each material file; a file with several references is read once."""
    paths = {source.identity(path): path for _, path in reversed(files) if path is not None}
    for path in reversed(paths.values()):
        yield path, _parse_mtl(source, path)


def _parse_mtl(source: Source, path: Path) -> dict[str, _Mtl]:
    text = source.content(path).decode("utf-8", "replace")
    found: dict[str, _Mtl] = {}
    name = None
    for line in text.splitlines():
        key, _, rest = line.strip().replace("\t", " ").partition(" ")
        key, rest = key.lower(), rest.strip()
        if key == "newmtl":
            name = rest
            found[name] = _Mtl(file=path)
        if name is None or not rest:
            continue
        if key == "kd" and (numbers := _leading_numbers(rest.split())):
            found[name] = replace(
                found[name], color=tuple((numbers * 3)[:3]) if len(numbers) < 3 else tuple(numbers[:3])
            )
        elif key in ("d", "tr") and (numbers := _leading_numbers(rest.replace("-halo", "").split())):
            if key == "d" or found[name].opacity == 1.0:
                found[name] = replace(found[name], opacity=numbers[0] if key == "d" else 1.0 - numbers[0])
        elif key == "map_kd":
            texture, options = _map(rest)
            scale, offset = options.get("-s", []), options.get("-o", [])
            found[name] = replace(
                found[name],
                texture=texture,
                scale=tuple((scale + [1.0, 1.0][len(scale) :])[:2]),
                offset=tuple((offset + [0.0, 0.0][len(offset) :])[:2]),
            )
        elif key == "map_d":
            found[name] = replace(found[name], mask=_map(rest)[0])
    return found


def _map(rest: str) -> tuple[str, dict[str, list[float]]]:
    """The file name of a texture, which may contain spaces, and the options before it."""
    options: dict[str, list[float]] = {}
    words = list(re.finditer(r"\S+", rest))
    at = 0
    while at < len(words) and words[at][0].startswith("-"):
        option = words[at][0]
        following = [word[0] for word in words[at + 1 : at + 1 + _OPTIONS.get(option, 0)]]
        options[option] = _leading_numbers(following)
        at += 1 + (len(options[option]) if option in _OPTIONS else 1)
    return (rest[words[at].start() :] if at < len(words) else "").strip().strip('"'), options


def _first(names: list[str]) -> str:
    """Text for a scene's `notes`: the first material's name and how many more there are."""
    return f"material {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _leading_numbers(words: list[str]) -> list[float]:
    numbers = []
    for word in words:
        try:
            numbers.append(float(word))
        except ValueError:
            break
    return numbers


def _material(source: Source, textures: TextureSet, name: str, mtl: _Mtl) -> Material:
    """A material with its texture decoded. A translucent color or texture gets an alpha cutoff of 0.5."""
    texture = -1
    image, mask = (textures.find(name, mtl.file) if name else None for name in (mtl.texture, mtl.mask))
    if image or mask:
        key = tuple(path and source.identity(path) for path in (image, mask))
        texture = textures.index_of(key, lambda: _texture(textures, mtl, image, mask))
    color = mtl.color
    if mtl.texture and max(color) <= 0.0:
        color = (1.0, 1.0, 1.0)  # exporters write black if only the texture counts
    r, g, b, alpha = (float(c) for c in np.nan_to_num(np.array([*color, mtl.opacity]), nan=1.0).clip(0, 1))
    return Material(name, (r, g, b, alpha), texture, 0.5 if alpha < 1 or textures.has_alpha(texture) else 0.0)


def _texture(textures: TextureSet, mtl: _Mtl, image_file: Path | None, mask_file: Path | None) -> np.ndarray:
    """The color image with the mask as its alpha, uint8 [height, width, 4]; one of the two may be missing."""
    image = textures.read(image_file, f"the texture {excerpt(mtl.texture)!r}") if image_file else None
    mask = textures.read(mask_file, f"the texture {excerpt(mtl.mask)!r}") if mask_file else None
    if mask is None:
        assert image is not None
        return image
    if image is mask and mask[..., 3].min() < 255:
        return mask  # one file is both: use its alpha
    alpha = mask[..., 3] if mask[..., 3].min() < 255 else mask[..., :3].max(2)
    if image is None:
        image = np.full_like(mask, 255)
    height, width, _ = image.shape
    textures.count_pixels(alpha.size + height * width)  # the combined texture is another array
    if alpha.shape != (height, width):
        alpha = np.asarray(Image.fromarray(alpha).resize((width, height)))
    return np.dstack([image[..., :3], alpha])
