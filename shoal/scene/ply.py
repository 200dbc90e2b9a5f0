"""Reader for `.ply` files, text or binary of either byte order, with vertex and face colors and labels."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from shoal.core.errors import ShoalError
from shoal.scene.files import Source, TextureSet
from shoal.scene.parsed import MAX_TRIANGLES, ParsedMesh, check_count
from shoal.scene.polygons import triangulate
from shoal.scene.scene import Material

_TYPES = {
    "char": "i1", "int8": "i1", "uchar": "u1", "uint8": "u1", "short": "i2", "int16": "i2", "ushort": "u2",
    "uint16": "u2", "int": "i4", "int32": "i4", "uint": "u4", "uint32": "u4", "float": "f4", "float32": "f4",
    "double": "f8", "float64": "f8",
}  # fmt: skip
_Order = Literal["", "<", ">"]
_ORDERS: dict[str, _Order] = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}


@dataclass
class _Property:
    name: str
    kind: np.dtype
    length: np.dtype | None = None
    """dtype of a list's length; None for a scalar."""


@dataclass
class _Element:
    name: str
    count: int
    properties: list[_Property] = field(default_factory=list)


@dataclass
class _List:
    """A list property of all rows; lists may differ in length."""

    values: np.ndarray
    """The values of all lists, one list after another."""
    lengths: np.ndarray
    """int64 [rows]."""


def read_ply(source: Source) -> ParsedMesh:
    """Read all faces as triangles; the faces' `object_id` and `category_id` become instance ids and labels."""
    name = source.name
    elements, order, body, texture_file = _header(source)
    found = _text(name, elements, body) if order == "" else _binary(name, elements, body)
    vertex, face = found.get("vertex"), found.get("face")
    if vertex is None or any(axis not in vertex for axis in "xyz"):
        raise ShoalError(f"{name} has no vertices with x, y and z.")
    points = np.stack([vertex[axis].astype(np.float64) for axis in "xyz"], 1)
    corners = next((face[key] for key in ("vertex_indices", "vertex_index") if face and key in face), None)
    if face is None or not isinstance(corners, _List) or len(corners.lengths) == 0:
        raise ShoalError(f"{name} holds no triangles: {len(points)} vertices, 0 faces (a point cloud has no surface).")
    index = corners.values.astype(np.int64)
    bad = np.flatnonzero((index < 0) | (index >= len(points)))
    if len(bad):
        raise ShoalError(
            f"{name}: a face refers to vertex {index[bad[0]]}, but there are {len(points)} (counted from 0)."
        )
    triangle_corners, owner = triangulate(name, points[index], corners.lengths)
    check_count(name, len(triangle_corners))
    triangles = index[triangle_corners]
    count = len(triangles)

    notes, textures, texture = [], TextureSet(source), -1
    uv = _uv(vertex, face, corners, triangle_corners, triangles)
    if texture_file and uv is not None and (path := textures.find(texture_file)) is not None:
        texture = textures.index_of(0, lambda: textures.read(path, f"the texture {texture_file!r}"))
    small = int((corners.lengths < 3).sum())
    if small:
        notes.append(f"{small} faces of fewer than three corners were skipped")
    colors = _colors(vertex)
    face_colors = _colors(face)
    if colors is not None:
        colors = colors[triangles]
    elif face_colors is not None:
        colors = np.repeat(face_colors[owner][:, None], 3, 1)
    else:
        colors = np.full((count, 3, 4), 255, np.uint8)

    instance = np.ones(count, np.int32)
    if isinstance(ids := face.get("object_id"), np.ndarray):
        instance = (ids.astype(np.int64)[owner] + 1).clip(0, 2**31 - 1).astype(np.int32)
    label_index, labels = np.zeros(count, np.int32), [""]
    if isinstance(ids := face.get("category_id"), np.ndarray):
        kinds, which = np.unique(ids.astype(np.int64), return_inverse=True)
        label_index = which[owner].astype(np.int32)
        labels = [f"category {kind}" if kind >= 0 else "" for kind in kinds]
    return ParsedMesh(
        vertices=points,
        triangles=triangles,
        uv=np.zeros((count, 3, 2), np.float32) if uv is None else uv.astype(np.float32),
        colors=colors,
        material=np.zeros(count, np.int32),
        instance=instance,
        label_index=label_index,
        labels=labels,
        materials=[Material(texture=texture)],
        textures=textures.textures,
        missing=textures.missing,
        notes=notes,
    )


def ply_references(source: Source) -> list[Path | None]:
    """The texture named in the header, if any; None if it is missing."""
    texture_file = _header(source)[3]
    return [source.find(texture_file)] if texture_file else []


def _header(source: Source) -> tuple[list[_Element], _Order, bytes, str]:
    """The elements, the byte order ("" for text), the bytes after the header, and the texture's file name or ""."""
    name, data = source.name, source.data
    if re.match(rb"ply\s", data) is None:
        raise ShoalError(f"{name} is not a .ply file: it begins with {data[:8]!r} instead of 'ply'.")
    end = re.search(rb"(?:^|\n|\r)end_header[ \t]*(\r\n|\n|\r)", data[: 1 << 20])
    if end is None:
        raise ShoalError(f"{name} is truncated or damaged: its header has no end.")
    order: _Order | None = None
    texture_file = ""
    elements: list[_Element] = []
    for line in data[: end.start()].decode("ascii", "replace").splitlines()[1:]:
        words = line.split()
        try:
            if words[:1] == ["format"]:
                order = _ORDERS[words[1]]
            elif words[:1] == ["element"]:
                elements.append(_Element(words[1], int(words[2])))
                if elements[-1].count < 0:
                    raise ValueError
            elif words[:2] == ["property", "list"]:
                length, kind, label = words[2:5]
                if np.dtype(_TYPES[length]).kind == "f":
                    raise ValueError
                elements[-1].properties.append(_Property(label, np.dtype(_TYPES[kind]), np.dtype(_TYPES[length])))
            elif words[:1] == ["property"]:
                kind, label = words[1:3]
                elements[-1].properties.append(_Property(label, np.dtype(_TYPES[kind])))
            elif words[:1] == ["comment"] and len(words) > 2 and words[1].lower() == "texturefile":
                texture_file = line.split(None, 2)[2].strip()
        except (KeyError, ValueError, IndexError):
            raise ShoalError(f"{name} is damaged: its header has the invalid line {line[:60]!r}.") from None
    if order is None:
        raise ShoalError(f"{name} is damaged: its header names no format.")
    for element in elements:
        if element.count > 3 * MAX_TRIANGLES:
            raise ShoalError(
                f"{name} declares {element.count:,} entries of {element.name!r}; "
                f"at most {3 * MAX_TRIANGLES:,} are read."
            )
        if element.name == "face":
            check_count(name, element.count)
        for item in element.properties:
            item.kind = item.kind.newbyteorder(order or "=")
            item.length = item.length.newbyteorder(order or "=") if item.length is not None else None
    return elements, order, data[end.end() :], texture_file


def _text(name: str, elements: list[_Element], body: bytes) -> dict[str, dict]:
    """The properties of each element of a text file, whose numbers are parsed as one array."""
    words = body.split()
    try:
        numbers = np.array(words, dtype=np.float64) if words else np.zeros(0)
    except ValueError as error:
        raise ShoalError(f"{name} is damaged: it holds something other than numbers ({error}).") from None
    found, at = {}, 0
    for element in elements:
        found[element.name], at = _rows(name, element, numbers, at)
    return found


def _rows(name: str, element: _Element, numbers: np.ndarray, at: int) -> tuple[dict, int]:
    """The properties of one element from `numbers[at:]`, and the index of the next element's first number."""
    lists = [p for p in element.properties if p.length is not None]
    plain = len(element.properties) - len(lists)
    if not lists:
        size = element.count * plain
        _enough(name, element, len(numbers) - at, size)
        table = numbers[at : at + size].reshape(element.count, plain)
        return {p.name: _cast(table[:, i], p.kind) for i, p in enumerate(element.properties)}, at + size
    equal = _equal_rows(element, numbers[at:])
    if equal is not None:
        return equal[0], at + equal[1]
    # The rows differ in length: read them one by one.
    singles: dict[str, list] = {p.name: [] for p in element.properties if p.length is None}
    pieces: dict[str, list] = {p.name: [] for p in lists}
    for _ in range(element.count):
        for item in element.properties:
            _enough(name, element, len(numbers) - at, 1)
            if item.length is None:
                singles[item.name].append(numbers[at])
                at += 1
                continue
            length = numbers[at]
            if not 0 <= length <= len(numbers) - at - 1:
                raise ShoalError(
                    f"{name} is truncated or damaged: a list of {element.name!r} has the length {length:g}."
                )
            pieces[item.name].append(numbers[at + 1 : at + 1 + int(length)])
            at += 1 + int(length)
    kinds = {p.name: p.kind for p in element.properties}
    result: dict = {key: _cast(np.array(values), kinds[key]) for key, values in singles.items()}
    for key, values in pieces.items():
        result[key] = _List(np.concatenate(values) if values else np.zeros(0), np.array([len(v) for v in values], int))
    return result, at


def _equal_rows(element: _Element, numbers: np.ndarray) -> tuple[dict, int] | None:
    """`_rows` as array operations if all rows are as long as the first, with the count of numbers; otherwise None."""
    at, spans = 0, []
    for item in element.properties:
        if at >= len(numbers) or element.count == 0:
            return None
        length = 1 if item.length is None else int(np.nan_to_num(numbers[at]).clip(0, len(numbers)))
        spans.append((at, length))
        at += length + (item.length is not None)
    if at * element.count > len(numbers):
        return None
    table = numbers[: at * element.count].reshape(element.count, at)
    result: dict = {}
    for item, (start, length) in zip(element.properties, spans, strict=True):
        if item.length is None:
            result[item.name] = _cast(table[:, start], item.kind)
        elif (table[:, start] == length).all():
            values = table[:, start + 1 : start + 1 + length].reshape(-1)
            result[item.name] = _List(values, np.full(element.count, length))
        else:
            return None
    return result, table.size


def _cast(values: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Numbers read from text, clipped to the dtype of the header."""
    if kind.kind == "f":
        return values.astype(kind)
    limits = np.iinfo(kind)
    return np.nan_to_num(values).clip(limits.min, limits.max).astype(kind)


def _binary(name: str, elements: list[_Element], body: bytes) -> dict[str, dict]:
    """The properties of each element of a binary file."""
    found, at = {}, 0
    for element in elements:
        found[element.name], at = _block(name, element, body, at)
    return found


def _block(name: str, element: _Element, body: bytes, at: int) -> tuple[dict, int]:
    """The properties of one element from `body[at:]`, and the offset of the next element."""
    if element.count == 0:
        empty = {p.name: np.zeros(0, p.kind) for p in element.properties if p.length is None}
        lists = {p.name: _List(np.zeros(0), np.zeros(0, int)) for p in element.properties if p.length is not None}
        return {**empty, **lists}, at
    lengths, _ = _first_lengths(name, element, body, at)
    fields = []
    for i, item in enumerate(element.properties):
        if item.length is not None:
            fields.append((f"{i}n", item.length))
        fields.append((f"{i}", item.kind, lengths[i] if item.length is not None else ()))
    layout = np.dtype(fields)
    if element.count * layout.itemsize <= len(body) - at:
        table = np.frombuffer(body, layout, element.count, at)
        if all((table[f"{i}n"] == n).all() for i, n in lengths.items()):
            result: dict = {}
            for i, item in enumerate(element.properties):
                result[item.name] = table[f"{i}"]
                if item.length is not None:
                    result[item.name] = _List(table[f"{i}"].reshape(-1), np.full(element.count, lengths[i]))
            return result, at + element.count * layout.itemsize
    elif not lengths:
        _enough(name, element, len(body) - at, element.count * layout.itemsize)
    return _walk(name, element, body, at)


def _walk(name: str, element: _Element, body: bytes, at: int) -> tuple[dict, int]:
    """`_block` for rows of different lengths, read one by one."""
    starts: dict[int, list[int]] = {i: [] for i in range(len(element.properties))}
    lengths: dict[int, list[int]] = {i: [] for i, p in enumerate(element.properties) if p.length is not None}
    for _ in range(element.count):
        row, at = _first_lengths(name, element, body, at, starts)
        for i, n in row.items():
            lengths[i].append(n)
    raw = np.frombuffer(body, np.uint8)
    result: dict = {}
    for i, item in enumerate(element.properties):
        size = item.kind.itemsize
        first = np.array(starts[i], dtype=np.int64)
        counts = np.array(lengths[i] if i in lengths else np.ones(len(first)), dtype=np.int64)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        where = np.repeat(first, counts) + within * size
        values = raw[where[:, None] + np.arange(size)].reshape(-1).view(item.kind)
        result[item.name] = _List(values, counts) if i in lengths else values
    return result, at


def _first_lengths(name: str, element: _Element, body: bytes, at: int, starts: dict[int, list[int]] | None = None):
    """The list lengths of one row by property, and the row's end; the offsets of values are appended to `starts`."""
    lengths: dict[int, int] = {}
    for i, item in enumerate(element.properties):
        n = 1
        if item.length is not None:
            size = item.length.itemsize
            _enough(name, element, len(body) - at, size)
            sign = item.length.kind == "i"
            n = int.from_bytes(body[at : at + size], "big" if item.length.byteorder == ">" else "little", signed=sign)
            at += size
            lengths[i] = n
        if n < 0 or n * item.kind.itemsize > len(body) - at:
            raise ShoalError(f"{name} is truncated or damaged: its {element.name!r} goes beyond the end of the file.")
        if starts is not None:
            starts[i].append(at)
        at += n * item.kind.itemsize
    return lengths, at


def _enough(name: str, element: _Element, have: int, need: int) -> None:
    if need > have:
        raise ShoalError(
            f"{name} is truncated: it declares {element.count} of {element.name!r}, and the file ends before."
        )


def _colors(of: dict) -> np.ndarray | None:
    """uint8 [N, 4], or None without colors. Fractions and 16-bit values are converted to 8 bits."""
    for prefix in ("", "diffuse_"):
        keys = [prefix + key for key in ("red", "green", "blue")]
        if all(isinstance(of.get(key), np.ndarray) for key in keys):
            alpha = [of[prefix + "alpha"]] if isinstance(of.get(prefix + "alpha"), np.ndarray) else []
            values = [of[key] for key in keys] + alpha
            break
    else:
        return None
    colors = np.full((len(values[0]), 4), 255, np.uint8)
    fractions = values[0].dtype.kind == "f" and max(np.nan_to_num(v).max(initial=0.0) for v in values[:3]) <= 1.0
    for i, value in enumerate(values):
        deep = 257.0 if value.dtype.kind == "u" and value.dtype.itemsize == 2 else 1.0
        shown = np.nan_to_num(value.astype(np.float64)) * (255.0 if fractions else 1.0 / deep)
        colors[:, i] = np.rint(shown.clip(0, 255))
    return colors


def _uv(
    vertex: dict, face: dict, corners: _List, triangle_corners: np.ndarray, triangles: np.ndarray
) -> np.ndarray | None:
    """[T, 3, 2] from the `texcoord` lists of faces or the texture coordinates of vertices; None without them."""
    texcoord = face.get("texcoord")
    if isinstance(texcoord, _List) and (texcoord.lengths == 2 * corners.lengths).all():
        return texcoord.values.reshape(-1, 2)[triangle_corners]
    for u, v in (("texture_u", "texture_v"), ("u", "v"), ("s", "t")):
        if isinstance(vertex.get(u), np.ndarray) and isinstance(vertex.get(v), np.ndarray):
            return np.stack([vertex[u], vertex[v]], 1)[triangles]
    return None
