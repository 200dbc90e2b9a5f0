"""Reading glTF 2.0: `.glb`, and `.gltf` with its buffers and pictures.

Read by hand, with NumPy: every number in such a file is an index or an offset, and a general library follows a bad one
into an exception without a cause, or silently leaves out what it does not know (fans, sparse or normalized accessors).
"""

import base64
import json
import math
import struct
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from shoal.core.errors import ShoalError, excerpt
from shoal.core.store import free_memory
from shoal.scene.draft import LARGEST_COUNT, Draft, check_count, label
from shoal.scene.files import Pictures, Source
from shoal.scene.scene import Material

_COMPONENTS = {5120: "<i1", 5121: "<u1", 5122: "<i2", 5123: "<u2", 5125: "<u4", 5126: "<f4"}
_WIDTHS = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4}
_TRANSFORMS = frozenset({"matrix", "rotation", "scale", "translation"})
_TRIANGLES, _STRIP, _FAN = 4, 5, 6
_COMPRESSED = {
    "KHR_draco_mesh_compression": "Draco-compressed",
    "EXT_meshopt_compression": "meshopt-compressed",
    "KHR_meshopt_compression": "meshopt-compressed",
    "KHR_texture_basisu": "with KTX2 (Basis) pictures",
}
LARGEST_LIST = 10**6
"""Nodes, meshes and so on in a file, parts of meshes that its nodes place, and entries of an accessor without data."""
_TRIANGLE_BYTES, _VERTEX_BYTES = 150, 100
"""What reading takes for each, about."""
_UNDERSTOOD = frozenset({"KHR_texture_transform", "KHR_mesh_quantization", "EXT_texture_webp", "KHR_lights_punctual"})


def read_gltf(source: Source) -> Draft:
    """The triangles of the file's scene, every node where its parents put it."""
    return _Reader(source).draft()


def gltf_references(source: Source) -> list[Path | None]:
    """The files beside it that it is made of."""
    tree, _ = _open(source)
    listed = [item for kind in ("buffers", "images") for item in tree.get(kind, []) if isinstance(item, dict)]
    uris = [item["uri"] for item in listed if isinstance(item.get("uri"), str)]
    return [source.find(unquote(uri)) for uri in uris if not uri.startswith("data:")]


def _open(source: Source) -> tuple[dict, bytes | None]:
    """The JSON of a file, and the binary chunk of a .glb."""
    name, data = source.name, source.data
    if source.path.suffix.lower() == ".gltf":
        return _parse(name, data), None
    if data[:4] != b"glTF":
        raise ShoalError(f"{name} is not a .glb file: it begins with {data[:8]!r} instead of 'glTF'.")
    if len(data) < 20:
        raise ShoalError(f"{name} is truncated: {len(data)} bytes do not even hold its header.")
    version, length = struct.unpack_from("<II", data, 4)
    if version != 2:
        raise ShoalError(f"{name} is glTF version {version}; only version 2 is read: convert it.")
    if length > len(data):
        raise ShoalError(f"{name} is truncated: it promises {length:,} bytes and has {len(data):,}.")
    chunks: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= length:
        size, kind = struct.unpack_from("<I4s", data, at)
        if at + 8 + size > length:
            raise ShoalError(f"{name} is damaged: a part of {size:,} bytes at {at} goes beyond its end at {length:,}.")
        chunks.setdefault(kind, data[at + 8 : at + 8 + size])
        at += 8 + size
    if b"JSON" not in chunks:
        raise ShoalError(f"{name} is damaged: it has no JSON part.")
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
        raise ShoalError(f"{name} is glTF version {version!r}; only version 2 is read: convert it.")
    for extension in tree.get("extensionsRequired", []):
        if extension in _COMPRESSED:
            raise ShoalError(_compressed(name, extension))
        if extension not in _UNDERSTOOD and not str(extension).startswith("KHR_materials_"):
            raise ShoalError(f"{name} requires the glTF extension {extension}, which is not supported.")
    return tree


def _compressed(name: str, extension: str) -> str:
    remedy = (
        "gltf-transform copy in.glb out.glb" if "texture" not in extension else "export it with PNG or JPEG pictures"
    )
    if "texture" not in extension:
        remedy = f"decompress it with `{remedy}`"
    return f"{name} is {_COMPRESSED[extension]} ({extension}), which is not read; {remedy}."


@dataclass
class _Part:
    """A primitive of a mesh in the mesh's own axes."""

    points: np.ndarray
    """float64 [V, 3]."""
    faces: np.ndarray
    """int64 [T, 3]."""
    uv: np.ndarray
    """float32 [T, 3, 2]."""
    colors: np.ndarray
    """uint8 [T, 3, 4]."""
    material: int

    @cached_property
    def materials(self) -> np.ndarray:
        """int32 [T]."""
        return np.full(len(self.faces), self.material, np.int32)


class _Reader:
    """Each item of the file is checked and decoded once, however many others refer to it."""

    def __init__(self, source: Source):
        self.source, self.name = source, source.name
        self.tree, self.binary = _open(source)
        self.pictures = Pictures(source)
        self.skins = 0
        self.untextured: dict[int, None] = {}
        """Materials with a texture on triangles without texture coordinates."""
        self._lists: dict[str, list[dict]] = {}
        self._meshes: dict[int, list[dict]] = {}
        self._parts: dict[int, list[_Part]] = {}
        self._buffers: dict[int, bytes] = {}
        self._arrays: dict[int, np.ndarray] = {}
        self._materials: dict[int | None, int] = {}
        self._blending: set[int] = set()
        self._faint: set[int] = set()
        """Materials on corners whose colors have an alpha."""
        self.materials: list[Material] = []

    def draft(self) -> Draft:
        places = self._places()
        self._check_size([mesh for _, mesh, _ in places])
        vertices, triangles, placed, counts = [], [], [], []
        total = 0
        for matrix, mesh, _ in places:
            count = 0
            for part in self._decoded(mesh):
                vertices.append(part.points @ matrix[:3, :3].T + matrix[:3, 3])
                triangles.append(part.faces + total)
                total += len(part.points)
                count += len(part.faces)
                placed.append(part)
            counts.append(count)
        if not placed:
            raise ShoalError(f"{self.name} holds no triangles: {len(places)} nodes with a mesh, none with faces.")
        named = np.repeat(np.arange(len(places), dtype=np.int32), counts)
        return Draft(
            vertices=np.concatenate(vertices),
            triangles=np.concatenate(triangles),
            uv=np.concatenate([part.uv for part in placed]),
            colors=np.concatenate([part.colors for part in placed]),
            material=np.concatenate([part.materials for part in placed]),
            instance=named + np.int32(1),
            named=named,
            names=[name for _, _, name in places],
            materials=self._finished(),
            textures=self.pictures.textures,
            missing=self.pictures.missing,
            notes=self._notes([mesh for _, mesh, _ in places]),
        )

    def _check_size(self, placed: list[int]) -> None:
        """Refuse more than can be read, before anything of that size is made: meshes may be placed many times."""
        triangles = vertices = parts = 0
        sizes: dict[int, tuple[int, int, int]] = {}
        for mesh in placed:
            if mesh not in sizes:
                shown = [(count, self._points(p)) for p in self._primitives(mesh) if (count := self._count(p))]
                sizes[mesh] = len(shown), sum(count for count, _ in shown), sum(points for _, points in shown)
            parts, triangles, vertices = parts + sizes[mesh][0], triangles + sizes[mesh][1], vertices + sizes[mesh][2]
        check_count(self.name, triangles)
        check_count(self.name, vertices // 3)
        if parts > LARGEST_LIST:
            raise ShoalError(
                f"{self.name} places {parts:,} parts of meshes; at most {LARGEST_LIST:,} are read: join them."
            )
        need, free = triangles * _TRIANGLE_BYTES + vertices * _VERTEX_BYTES, free_memory("cpu")
        if need > free:
            raise ShoalError(
                f"{self.name} takes about {need / 1e9:.1f} GB of memory to read, and {free / 1e9:.1f} GB are free: "
                "simplify or split it."
            )

    def _decoded(self, mesh: int) -> list[_Part]:
        """The primitives of a mesh that hold triangles."""
        if mesh not in self._parts:
            self._parts[mesh] = [self._part(p) for p in self._primitives(mesh) if self._count(p)]
        return self._parts[mesh]

    def _part(self, primitive: dict) -> _Part:
        points = self._attribute(primitive, "POSITION", 3)
        faces = self._faces(primitive, len(points))
        shade = self._colors(primitive, len(points))
        index = self._material(primitive.get("material"))
        if shade[:, 3].min() < 255:
            self._faint.add(index)
        return _Part(points, faces, self._uv(primitive, len(points))[faces], shade[faces], index)

    def _notes(self, placed: list[int]) -> list[str]:
        notes = []
        if self.skins:
            notes.append(f"{self.skins} nodes have a skin, which was ignored: they stand in their resting pose")
        if self.untextured:
            first, *others = self.untextured
            more = f" and {len(others)} more" if others else ""
            notes.append(f"material {first}{more} has a texture, but not all of its triangles have texture coordinates")
        odd = {mesh: sum(self._is_odd(p) for p in self._primitives(mesh)) for mesh in set(placed)}
        if skipped := sum(odd[mesh] for mesh in placed):
            notes.append(f"{skipped} sets of points or lines were left out")
        return notes

    def _is_odd(self, primitive: dict) -> bool:
        """Whether it holds points or lines."""
        return primitive.get("mode", _TRIANGLES) not in (_TRIANGLES, _STRIP, _FAN)

    # --- Where things are ----------------------------------------------------------------------------------------

    def _places(self) -> list[tuple[np.ndarray, int, str]]:
        """For every node with a mesh: float64 [4, 4] to the scene, the number of the mesh, the label."""
        nodes = self._list("nodes")
        if "scenes" in self.tree:
            roots = self._item("scenes", self.tree.get("scene", 0)).get("nodes", [])
        else:
            children = {child for node in nodes for child in node.get("children", [])}
            roots = [i for i in range(len(nodes)) if i not in children]
        places, seen = [], set()
        waiting = [(index, np.eye(4), "") for index in reversed(roots)]
        while waiting:
            index, above, inherited = waiting.pop()
            node = self._item("nodes", index)
            if index in seen:
                raise ShoalError(f"{self.name} is damaged: node {index} has two parents, or is its own ancestor.")
            seen.add(index)
            matrix = above @ self._matrix(index, node) if node.keys() & _TRANSFORMS else above
            mesh = self._item("meshes", node["mesh"]) if "mesh" in node else {}
            name = label(_text(node.get("name")), _text(mesh.get("name")), inherited)
            if mesh:
                places.append((matrix, node["mesh"], name))
                self.skins += "skin" in node
            waiting += [(child, matrix, name) for child in reversed(node.get("children", []))]
        return places

    def _matrix(self, index: int, node: dict) -> np.ndarray:
        if "matrix" in node:
            matrix = self._numbers(node["matrix"], 16, f"the matrix of node {index}").reshape(4, 4).T
        else:
            x, y, z, w = self._numbers(node.get("rotation", [0, 0, 0, 1]), 4, f"the rotation of node {index}")
            size = np.sqrt(x * x + y * y + z * z + w * w)
            if size == 0:
                raise ShoalError(f"{self.name}: the rotation of node {index} is zero.")
            x, y, z, w = x / size, y / size, z / size, w / size
            turn = np.array(
                [
                    [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
                    [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
                    [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
                ]
            )
            matrix = np.eye(4)
            matrix[:3, :3] = turn * self._numbers(node.get("scale", [1, 1, 1]), 3, f"the scale of node {index}")
            matrix[:3, 3] = self._numbers(node.get("translation", [0, 0, 0]), 3, f"the translation of node {index}")
        return matrix

    # --- What things look like -----------------------------------------------------------------------------------

    def _material(self, index: Any) -> int:
        """The scene's number of a material of the file; None is the plain white one."""
        if index not in self._materials:
            given = self._item("materials", index) if index is not None else {}
            surface = self._surface(given)
            factor = self._numbers(surface["factor"], 4, f"the base color of material {index}").clip(0, 1)
            shown = (*(round(float(c), 6) for c in to_srgb(factor[:3])), float(factor[3]))
            texture = -1
            if surface["texture"]:
                texture = self._texture(surface["texture"])
            cutoff = 0.0
            if given.get("alphaMode") == "MASK":
                cutoff = self._numbers([given.get("alphaCutoff", 0.5)], 1, f"the cut-off of material {index}")[0]
                cutoff = float(cutoff.clip(0, 2))  # beyond 1 nothing is left; a float32 holds it
            elif given.get("alphaMode") == "BLEND":
                self._blending.add(len(self.materials))
            self.materials.append(Material(_text(given.get("name")), shown, texture, cutoff))
            self._materials[index] = len(self.materials) - 1
        return self._materials[index]

    def _finished(self) -> list[Material]:
        """The materials; those that blend are cut out at one half where anything about them has an alpha."""
        done = list(self.materials)
        for i in self._blending:
            if self.pictures.faint(done[i].texture) or done[i].color[3] < 1 or i in self._faint:
                done[i] = replace(done[i], cutoff=0.5)
        return done

    def _surface(self, material: dict) -> dict:
        """The base color and its texture, whichever of the two models a material uses."""
        metal = material.get("pbrMetallicRoughness", {})
        gloss = material.get("extensions", {}).get("KHR_materials_pbrSpecularGlossiness")
        if gloss and "baseColorTexture" not in metal:
            return dict(factor=gloss.get("diffuseFactor", [1, 1, 1, 1]), texture=gloss.get("diffuseTexture"))
        return dict(factor=metal.get("baseColorFactor", [1, 1, 1, 1]), texture=metal.get("baseColorTexture"))

    def _texture(self, info: dict) -> int:
        texture = self._item("textures", info.get("index"))
        extensions = texture.get("extensions", {})
        index = extensions.get("EXT_texture_webp", {}).get("source", texture.get("source"))
        if index is None:
            if "KHR_texture_basisu" in extensions:
                raise ShoalError(_compressed(self.name, "KHR_texture_basisu"))
            raise ShoalError(f"{self.name}: texture {info.get('index')} has no picture.")
        image = self._item("images", index)
        uri, view = image.get("uri"), image.get("bufferView")
        if view is not None:
            key, what = ("view", view), f"the picture {index} inside it"
            return self.pictures.number(key, lambda: self.pictures.decode(key, bytes(self._view(view)[0]), what))
        if isinstance(uri, str) and not uri.startswith("data:"):
            path = self.pictures.find(unquote(uri))
            return -1 if path is None else self._picture_file(path, uri)
        key = ("image", index)
        return self.pictures.number(
            key, lambda: self.pictures.decode(key, self._uri(uri, "picture"), f"picture {index}")
        )

    def _picture_file(self, path: Path, uri: str) -> int:
        key = self.source.identity(path)
        return self.pictures.number(key, lambda: self.pictures.read(path, f"the picture {excerpt(uri)!r}"))

    def _uv(self, primitive: dict, count: int) -> np.ndarray:
        """float32 [V, 2], v up. The file's v points down; its texture transforms are applied here."""
        index = primitive.get("material")
        info = self._surface(self._item("materials", index))["texture"] if index is not None else None
        transform = (info or {}).get("extensions", {}).get("KHR_texture_transform", {})
        layer = transform.get("texCoord", (info or {}).get("texCoord", 0))
        if info is None or f"TEXCOORD_{layer}" not in primitive["attributes"]:
            if info is not None and index is not None:
                self.untextured[index] = None
            return np.zeros((count, 2), np.float32)
        uv = self._attribute(primitive, f"TEXCOORD_{layer}", 2, count)
        if transform:
            turn = float(transform.get("rotation", 0.0))
            uv = uv * self._numbers(transform.get("scale", [1, 1]), 2, "a texture transform's scale")
            cos, sin = np.cos(turn), np.sin(turn)
            uv = np.stack([cos * uv[:, 0] + sin * uv[:, 1], cos * uv[:, 1] - sin * uv[:, 0]], 1)
            uv = uv + self._numbers(transform.get("offset", [0, 0]), 2, "a texture transform's offset")
        return np.stack([uv[:, 0], 1.0 - uv[:, 1]], 1).astype(np.float32)

    def _colors(self, primitive: dict, count: int) -> np.ndarray:
        """uint8 [V, 4], as shown; the file's are linear."""
        white = np.full((count, 4), 255, np.uint8)
        if "COLOR_0" not in primitive["attributes"]:
            return white
        colors = np.nan_to_num(self._attribute(primitive, "COLOR_0", (3, 4), count)).clip(0, 1)
        white[:, :3] = np.rint(to_srgb(colors[:, :3]) * 255)
        if colors.shape[1] == 4:
            white[:, 3] = np.rint(colors[:, 3] * 255)
        return white

    # --- Triangles -----------------------------------------------------------------------------------------------

    def _primitives(self, mesh: int) -> list[dict]:
        if mesh not in self._meshes:
            primitives = self._item("meshes", mesh).get("primitives")
            if not isinstance(primitives, list) or not all(
                isinstance(p, dict) and isinstance(p.get("attributes"), dict) for p in primitives
            ):
                raise ShoalError(f"{self.name} is damaged: a mesh has no list of primitives with attributes.")
            self._meshes[mesh] = primitives
        return self._meshes[mesh]

    def _count(self, primitive: dict) -> int:
        """How many triangles a primitive has, by its own word."""
        mode = primitive.get("mode", _TRIANGLES)
        if mode not in (_TRIANGLES, _STRIP, _FAN) or "POSITION" not in primitive["attributes"]:
            return 0
        index = primitive.get("indices", primitive["attributes"]["POSITION"])
        count = self._whole(self._item("accessors", index).get("count"), f"the count of accessor {index}")
        return count // 3 if mode == _TRIANGLES else max(count - 2, 0)

    def _points(self, primitive: dict) -> int:
        index = primitive["attributes"]["POSITION"]
        return self._whole(self._item("accessors", index).get("count"), f"the count of accessor {index}")

    def _faces(self, primitive: dict, count: int) -> np.ndarray:
        """int64 [T, 3] into the primitive's own vertices, all within range."""
        if "indices" in primitive:
            index = primitive["indices"]
            flat = self._accessor(index, (1,), whole=True)[:, 0].astype(np.int64)
            if len(flat) and flat.max() >= count:
                raise ShoalError(
                    f"{self.name}: accessor {index} refers to vertex {flat.max()}, but its mesh has {count} vertices."
                )
        else:
            flat = np.arange(count)
        mode = primitive.get("mode", _TRIANGLES)
        if mode == _STRIP:
            return np.stack([flat[:-2], flat[1:-1], flat[2:]], 1)
        if mode == _FAN:
            return np.stack([np.full(len(flat) - 2, flat[0]), flat[1:-1], flat[2:]], 1)
        if len(flat) % 3:
            raise ShoalError(f"{self.name}: a mesh has {len(flat)} indices, which is not three per triangle.")
        return flat.reshape(-1, 3)

    def _attribute(self, primitive: dict, name: str, widths: int | tuple[int, ...], count: int | None = None):
        index = primitive["attributes"][name]
        if name == "POSITION" and "bufferView" not in (accessor := self._item("accessors", index)):
            for extension in _COMPRESSED:
                if extension in primitive.get("extensions", {}) and "sparse" not in accessor:
                    raise ShoalError(_compressed(self.name, extension))
        array = self._accessor(index, (widths,) if isinstance(widths, int) else widths)
        if count is not None and len(array) != count:
            raise ShoalError(f"{self.name}: a mesh has {count} vertices, but its {name} has {len(array)} entries.")
        return array

    # --- Bytes ---------------------------------------------------------------------------------------------------

    def _accessor(self, index: Any, widths: tuple[int, ...], whole: bool = False) -> np.ndarray:
        """float64 [count, width], normalized where the file says so; or the integers as they are."""
        if index not in self._arrays:
            accessor = self._item("accessors", index)
            what = f"accessor {index}"
            count = self._whole(accessor.get("count"), f"the count of {what}")
            if count > 3 * LARGEST_COUNT:
                raise ShoalError(
                    f"{self.name}: {what} claims {count:,} entries; at most {3 * LARGEST_COUNT:,} are read."
                )
            width = _WIDTHS.get(accessor.get("type"), 0)
            if width not in widths:
                raise ShoalError(
                    f"{self.name}: {what} is of type {excerpt(repr(accessor.get('type')))}, which does not fit its use."
                )
            kind = self._component(accessor.get("componentType"), what)
            if whole and kind.kind != "u":
                raise ShoalError(f"{self.name}: {what} holds indices of type {kind}; they must be unsigned integers.")
            array = self._block(accessor, count, width, kind, what)
            if "sparse" in accessor:
                array = self._sparse(array, accessor["sparse"], width, kind, what)
            if not whole:
                values = array.astype(np.float64)
                if accessor.get("normalized") and kind.kind in "iu":
                    values = np.maximum(values / np.iinfo(kind).max, -1.0)
                array = values
            self._arrays[index] = array
        array = self._arrays[index]
        if array.shape[1] not in widths or (whole and array.dtype.kind != "u"):
            raise ShoalError(f"{self.name}: accessor {index} is used in two ways that exclude each other.")
        return array

    def _sparse(self, array: np.ndarray, sparse: dict, width: int, kind: np.dtype, what: str) -> np.ndarray:
        count = self._whole(sparse.get("count"), f"the sparse count of {what}")
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
        """[count, width] out of a buffer view, or zeros where there is none."""
        if "bufferView" not in place:
            if count > LARGEST_LIST:
                raise ShoalError(
                    f"{self.name}: {what} claims {count:,} entries without data; at most {LARGEST_LIST:,} are read."
                )
            return np.zeros((count, width), kind)
        data, stride = self._view(place["bufferView"])
        start = self._whole(place.get("byteOffset", 0), f"the offset of {what}")
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

    def _view(self, index: Any) -> tuple[memoryview, int]:
        """The bytes of a buffer view, and its stride (0 for none)."""
        view = self._item("bufferViews", index)
        which = view.get("buffer")
        buffer = self._item("buffers", which)
        for extension in _COMPRESSED:
            if extension in view.get("extensions", {}) and "uri" not in buffer and which != 0:
                raise ShoalError(_compressed(self.name, extension))
        if which not in self._buffers:
            self._buffers[which] = self._buffer(which, buffer)
        data = self._buffers[which]
        start = self._whole(view.get("byteOffset", 0), f"the offset of buffer view {index}")
        size = self._whole(view.get("byteLength"), f"the length of buffer view {index}")
        if start + size > len(data):
            raise ShoalError(
                f"{self.name}: buffer view {index} ends at byte {start + size:,}, but its buffer has {len(data):,}; "
                "the file is truncated or damaged."
            )
        return memoryview(data)[start : start + size], self._whole(view.get("byteStride", 0), "a stride")

    def _buffer(self, index: int, buffer: dict) -> bytes:
        if "uri" in buffer:
            data = self._uri(buffer["uri"], "buffer")
        elif index == 0 and self.binary is not None:
            data = self.binary
        else:
            raise ShoalError(f"{self.name}: buffer {index} has neither a file nor a part of this one.")
        size = self._whole(buffer.get("byteLength"), f"the length of buffer {index}")
        if size > len(data):
            raise ShoalError(
                f"{self.name}: buffer {index} promises {size:,} bytes and has {len(data):,}; it is truncated."
            )
        return data

    def _uri(self, uri: Any, what: str) -> bytes:
        if not isinstance(uri, str):
            raise ShoalError(f"{self.name}: a {what} has no address.")
        if not uri.startswith("data:"):
            return self.source.read(unquote(uri), what)
        head, comma, body = uri.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ShoalError(f"{self.name}: a {what} is written as {excerpt(head, 40)!r}, which is not base64.")
        try:
            return base64.b64decode(body)
        except ValueError as error:
            raise ShoalError(f"{self.name}: a {what} inside it is not base64: {error}.") from None

    # --- Numbers and indices -------------------------------------------------------------------------------------

    def _list(self, kind: str) -> list[dict]:
        if kind not in self._lists:
            items = self.tree.get(kind, [])
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                raise ShoalError(f"{self.name} is damaged: its {kind!r} is not a list of objects.")
            if len(items) > LARGEST_LIST:
                raise ShoalError(
                    f"{self.name} has {len(items):,} {kind!r}; at most {LARGEST_LIST:,} are read: simplify or split it."
                )
            self._lists[kind] = items
        return self._lists[kind]

    def _item(self, kind: str, index: Any) -> dict:
        items = self._list(kind)
        if type(index) is not int or not 0 <= index < len(items):
            raise ShoalError(
                f"{self.name} refers to number {excerpt(index)} of its {kind!r}, but there are {len(items)}."
            )
        return items[index]

    def _whole(self, value: Any, what: str) -> int:
        if type(value) is not int or value < 0:
            raise ShoalError(f"{self.name}: {what} must be a whole number, not {excerpt(repr(value))}.")
        return value

    def _component(self, code: Any, what: str) -> np.dtype:
        if code not in _COMPONENTS:
            raise ShoalError(f"{self.name}: {what} has the unknown component type {excerpt(repr(code))}.")
        return np.dtype(_COMPONENTS[code])

    def _numbers(self, values: Any, count: int, what: str) -> np.ndarray:
        if (
            not isinstance(values, list)
            or len(values) != count
            or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)
        ):
            raise ShoalError(f"{self.name}: {what} must be {count} finite numbers, not {excerpt(repr(values))}.")
        return np.array(values, dtype=np.float64)


def _text(name: Any) -> str:
    """A name that is one; others are left out."""
    return name if isinstance(name, str) else ""


def to_srgb(linear: np.ndarray) -> np.ndarray:
    """Linear light, 0 to 1, as the numbers pictures are stored in."""
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * np.maximum(linear, 0.0031308) ** (1 / 2.4) - 0.055)
