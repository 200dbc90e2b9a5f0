"""Access to the content of a glTF 2.0 file: its JSON, buffers and accessors, with every index and size checked."""

import base64
import json
import math
import struct
from typing import Any
from urllib.parse import unquote

import numpy as np

from shoal.core.errors import ShoalError, excerpt
from shoal.scene.files import Source
from shoal.scene.parsed import MAX_TRIANGLES

_COMPONENTS = {5120: "<i1", 5121: "<u1", 5122: "<i2", 5123: "<u2", 5125: "<u4", 5126: "<f4"}
_WIDTHS = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4}
COMPRESSED = {
    "KHR_draco_mesh_compression": "Draco-compressed",
    "EXT_meshopt_compression": "meshopt-compressed",
    "KHR_meshopt_compression": "meshopt-compressed",
    "KHR_texture_basisu": "with KTX2 (Basis) textures",
}
MAX_ITEMS = 10**6
"""Maximum items of each list of a file, such as nodes, and maximum entries of an accessor without data."""
_SUPPORTED = frozenset({"KHR_texture_transform", "KHR_mesh_quantization", "EXT_texture_webp", "KHR_lights_punctual"})


def open_gltf(source: Source) -> tuple[dict, bytes | None]:
    """The JSON of a file and, of a .glb, its binary chunk."""
    name, data = source.name, source.data
    if source.path.suffix.lower() == ".gltf":
        return _parse(name, data), None
    if data[:4] != b"glTF":
        raise ShoalError(f"{name} is not a .glb file: it begins with {data[:8]!r} instead of 'glTF'.")
    if len(data) < 20:
        raise ShoalError(f"{name} is truncated: {len(data)} bytes are shorter than its header.")
    version, length = struct.unpack_from("<II", data, 4)
    if version != 2:
        raise ShoalError(f"{name} is glTF version {version}; convert it to glTF 2.0.")
    if length > len(data):
        raise ShoalError(f"{name} is truncated: it declares {length:,} bytes and has {len(data):,}.")
    chunks: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= length:
        size, kind = struct.unpack_from("<I4s", data, at)
        if at + 8 + size > length:
            raise ShoalError(f"{name} is damaged: a chunk of {size:,} bytes at {at} goes beyond its end at {length:,}.")
        chunks.setdefault(kind, data[at + 8 : at + 8 + size])
        at += 8 + size
    if b"JSON" not in chunks:
        raise ShoalError(f"{name} is damaged: it has no JSON chunk.")
    return _parse(name, chunks[b"JSON"]), chunks.get(b"BIN\0")


def _parse(name: str, text: bytes) -> dict:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"{name} is not glTF: its JSON cannot be read ({error}).") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("asset"), dict):
        raise ShoalError(f"{name} is JSON but not glTF: it has no 'asset'.")
    version = str(tree["asset"].get("version", ""))
    if not version.startswith("2."):
        raise ShoalError(f"{name} is glTF version {version!r}; convert it to glTF 2.0.")
    for extension in tree.get("extensionsRequired", []):
        if extension in COMPRESSED:
            raise ShoalError(compressed_message(name, extension))
        if extension not in _SUPPORTED and not str(extension).startswith("KHR_materials_"):
            raise ShoalError(f"{name} requires the glTF extension {extension}, which is not supported.")
    return tree


def compressed_message(name: str, extension: str) -> str:
    """Error message about a compression extension."""
    remedy = "export it with PNG or JPEG textures"
    if "texture" not in extension:
        remedy = "decompress it with `gltf-transform copy in.glb out.glb`"
    return f"{name} is {COMPRESSED[extension]} ({extension}), which is not supported; {remedy}."


class GltfFile:
    """A glTF file. Each list, buffer and accessor is checked and decoded once, at its first use."""

    def __init__(self, source: Source):
        self.source, self.name = source, source.name
        self.tree, self.binary = open_gltf(source)
        self._lists: dict[str, list[dict]] = {}
        self._buffers: dict[int, bytes] = {}
        self._arrays: dict[int, np.ndarray] = {}

    # --- JSON ----------------------------------------------------------------------------------------------------

    def items(self, kind: str) -> list[dict]:
        """A top-level list of the file, such as "nodes"; empty if there is none."""
        if kind not in self._lists:
            items = self.tree.get(kind, [])
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                raise ShoalError(f"{self.name} is damaged: its {kind!r} is not a list of objects.")
            if len(items) > MAX_ITEMS:
                raise ShoalError(
                    f"{self.name} has {len(items):,} {kind!r}; at most {MAX_ITEMS:,} are read: simplify or split it."
                )
            self._lists[kind] = items
        return self._lists[kind]

    def item(self, kind: str, index: Any) -> dict:
        """One item of a top-level list; a ShoalError if the index is invalid."""
        items = self.items(kind)
        if type(index) is not int or not 0 <= index < len(items):
            raise ShoalError(
                f"{self.name} refers to index {excerpt(index)} of its {kind!r}, but there are {len(items)}."
            )
        return items[index]

    def count(self, value: Any, what: str) -> int:
        """An integer of at least 0; `what` names it in the error."""
        if type(value) is not int or value < 0:
            raise ShoalError(f"{self.name}: {what} must be an integer of at least 0, not {excerpt(repr(value))}.")
        return value

    def _component(self, code: Any, what: str) -> np.dtype:
        if code not in _COMPONENTS:
            raise ShoalError(f"{self.name}: {what} has the unknown component type {excerpt(repr(code))}.")
        return np.dtype(_COMPONENTS[code])

    def numbers(self, values: Any, count: int, what: str) -> np.ndarray:
        """float64 [count] from a JSON list of finite numbers; `what` names it in the error."""
        if (
            not isinstance(values, list)
            or len(values) != count
            or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)
        ):
            raise ShoalError(f"{self.name}: {what} must be {count} finite numbers, not {excerpt(repr(values))}.")
        return np.array(values, dtype=np.float64)

    # --- Accessors and buffers ---------------------------------------------------------------------------------------

    def attribute(
        self, primitive: dict, name: str, widths: int | tuple[int, ...], count: int | None = None
    ) -> np.ndarray:
        """float64 [V, width]: a vertex attribute of a primitive, with one of the given widths and `count` entries."""
        index = primitive["attributes"][name]
        if name == "POSITION" and "bufferView" not in (accessor := self.item("accessors", index)):
            for extension in COMPRESSED:
                if extension in primitive.get("extensions", {}) and "sparse" not in accessor:
                    raise ShoalError(compressed_message(self.name, extension))
        array = self.accessor(index, (widths,) if isinstance(widths, int) else widths)
        if count is not None and len(array) != count:
            raise ShoalError(f"{self.name}: a mesh has {count} vertices, but its {name} has {len(array)} entries.")
        return array

    def accessor(self, index: Any, widths: tuple[int, ...], indices: bool = False) -> np.ndarray:
        """float64 [count, width], normalized if the accessor is; for `indices` unsigned integers instead."""
        if index not in self._arrays:
            accessor = self.item("accessors", index)
            what = f"accessor {index}"
            count = self.count(accessor.get("count"), f"the count of {what}")
            if count > 3 * MAX_TRIANGLES:
                raise ShoalError(
                    f"{self.name}: {what} declares {count:,} entries; at most {3 * MAX_TRIANGLES:,} are read."
                )
            width = _WIDTHS.get(str(accessor.get("type")), 0)
            if width not in widths:
                raise ShoalError(
                    f"{self.name}: {what} is of type {excerpt(repr(accessor.get('type')))}, which does not fit its use."
                )
            kind = self._component(accessor.get("componentType"), what)
            if indices and kind.kind != "u":
                raise ShoalError(f"{self.name}: {what} holds indices of type {kind}; they must be unsigned integers.")
            array = self._block(accessor, count, width, kind, what)
            if "sparse" in accessor:
                array = self._sparse(array, accessor["sparse"], width, kind, what)
            if not indices:
                values = array.astype(np.float64)
                if accessor.get("normalized") and kind.kind in "iu":
                    values = np.maximum(values / np.iinfo(kind).max, -1.0)
                array = values
            self._arrays[index] = array
        array = self._arrays[index]
        if array.shape[1] not in widths or (indices and array.dtype.kind != "u"):
            raise ShoalError(f"{self.name}: accessor {index} is used in two incompatible ways.")
        return array

    def _sparse(self, array: np.ndarray, sparse: dict, width: int, kind: np.dtype, what: str) -> np.ndarray:
        """A copy of the array with the entries of a sparse accessor replaced."""
        count = self.count(sparse.get("count"), f"the sparse count of {what}")
        if count > len(array):
            raise ShoalError(f"{self.name}: {what} replaces {count:,} entries, but it has {len(array):,}.")
        place = self._component(sparse["indices"].get("componentType"), what)
        where = self._block(sparse["indices"], count, 1, place, f"the sparse part of {what}")[:, 0]
        if count and (where.max() >= len(array) or where.min() < 0):
            raise ShoalError(f"{self.name}: {what} replaces entry {where.max()}, but it has {len(array)}.")
        array = array.copy()
        array[where] = self._block(sparse["values"], count, width, kind, f"the sparse part of {what}")
        return array

    def _block(self, place: dict, count: int, width: int, kind: np.dtype, what: str) -> np.ndarray:
        """[count, width] from a buffer view, or zeros without one."""
        if "bufferView" not in place:
            if count > MAX_ITEMS:
                raise ShoalError(
                    f"{self.name}: {what} declares {count:,} entries without data; at most {MAX_ITEMS:,} are read."
                )
            return np.zeros((count, width), kind)
        data, stride = self.view(place["bufferView"])
        start = self.count(place.get("byteOffset", 0), f"the offset of {what}")
        row = width * kind.itemsize
        stride = stride or row
        if stride < row or (count and start + (count - 1) * stride + row > len(data)):
            raise ShoalError(
                f"{self.name}: {what} needs {start + max(count - 1, 0) * stride + row:,} bytes, "
                f"but its buffer view has {len(data):,}; the file is truncated or damaged."
            )
        if count == 0:
            return np.zeros((0, width), kind)
        return np.ndarray((count, width), kind, data, start, (stride, kind.itemsize))

    def view(self, index: Any) -> tuple[memoryview, int]:
        """The bytes of a buffer view and its stride (0 for none)."""
        view = self.item("bufferViews", index)
        which: Any = view.get("buffer")
        buffer = self.item("buffers", which)
        for extension in COMPRESSED:
            if extension in view.get("extensions", {}) and "uri" not in buffer and which != 0:
                raise ShoalError(compressed_message(self.name, extension))
        if which not in self._buffers:
            self._buffers[which] = self._buffer(which, buffer)
        data = self._buffers[which]
        start = self.count(view.get("byteOffset", 0), f"the offset of buffer view {index}")
        size = self.count(view.get("byteLength"), f"the length of buffer view {index}")
        if start + size > len(data):
            raise ShoalError(
                f"{self.name}: buffer view {index} ends at byte {start + size:,}, but its buffer has {len(data):,}; "
                "the file is truncated or damaged."
            )
        return memoryview(data)[start : start + size], self.count(view.get("byteStride", 0), "a stride")

    def _buffer(self, index: int, buffer: dict) -> bytes:
        if "uri" in buffer:
            data = self.read_uri(buffer["uri"], "buffer")
        elif index == 0 and self.binary is not None:
            data = self.binary
        else:
            raise ShoalError(f"{self.name}: buffer {index} has no URI and is not the binary chunk of a .glb.")
        size = self.count(buffer.get("byteLength"), f"the length of buffer {index}")
        if size > len(data):
            raise ShoalError(
                f"{self.name}: buffer {index} declares {size:,} bytes and has {len(data):,}; it is truncated."
            )
        return data

    def read_uri(self, uri: Any, what: str) -> bytes:
        """The bytes of a file or data URI; `what` names it in errors."""
        if not isinstance(uri, str):
            raise ShoalError(f"{self.name}: a {what} has no URI.")
        if not uri.startswith("data:"):
            return self.source.read(unquote(uri), what)
        head, comma, body = uri.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ShoalError(f"{self.name}: a {what} has the data URI {excerpt(head, 40)!r}, which is not base64.")
        try:
            return base64.b64decode(body)
        except ValueError as error:
            raise ShoalError(f"{self.name}: an embedded {what} is not base64: {error}.") from None


def text(value: Any) -> str:
    """A name as a string; the empty string if the file gives another type."""
    return value if isinstance(value, str) else ""
