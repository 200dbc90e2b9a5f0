"""Reader for glTF 2.0 scenes: `.glb`, and `.gltf` with its buffers and images.

Written for this project, with NumPy, because every number in a glTF file is an index or an offset: general readers turn
a bad one into an unrelated exception, or silently skip features (triangle fans, sparse or normalized accessors).
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from shoal.core.errors import ShoalError
from shoal.core.store import free_memory
from shoal.scene.files import Source
from shoal.scene.gltf_file import GltfFile, open_gltf, text
from shoal.scene.gltf_material import GltfMaterials
from shoal.scene.parsed import ParsedMesh, check_count, label

MAX_PRIMITIVES = 10**6
"""Maximum primitives placed by nodes; a mesh may be placed several times."""
_TRIANGLE_BYTES, _VERTEX_BYTES = 150, 100
"""Approximate memory for reading a triangle and a vertex."""
_TRANSFORMS = frozenset({"matrix", "rotation", "scale", "translation"})
_TRIANGLES, _STRIP, _FAN = 4, 5, 6


def read_gltf(source: Source) -> ParsedMesh:
    """Read the triangles of the file's default scene, with the transforms of its nodes applied."""
    return _Reader(source).mesh()


def gltf_references(source: Source) -> list[Path | None]:
    """The buffer and image files it refers to; None for each missing one."""
    tree, _ = open_gltf(source)
    listed = [item for kind in ("buffers", "images") for item in tree.get(kind, []) if isinstance(item, dict)]
    uris = [item["uri"] for item in listed if isinstance(item.get("uri"), str)]
    return [source.find(unquote(uri)) for uri in uris if not uri.startswith("data:")]


@dataclass
class _Primitive:
    """A decoded primitive, in the coordinates of its mesh."""

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


@dataclass
class _MeshNode:
    """A node with a mesh."""

    transform: np.ndarray
    """float64 [4, 4], from the mesh to the scene."""
    mesh: int
    label: str


class _Reader:
    """Reads the scene of a file. Each mesh is decoded once, also if several nodes place it."""

    def __init__(self, source: Source):
        self.name = source.name
        self.file = GltfFile(source)
        self.materials = GltfMaterials(self.file)
        self.skins = 0
        self._meshes: dict[int, list[dict]] = {}
        self._primitives: dict[int, list[_Primitive]] = {}

    def mesh(self) -> ParsedMesh:
        """All triangles of the scene."""
        nodes = self._mesh_nodes()
        self._check_size(nodes)
        vertices, triangles, placed, counts = [], [], [], []
        total = 0
        for node in nodes:
            count = 0
            for primitive in self._decoded(node.mesh):
                vertices.append(primitive.points @ node.transform[:3, :3].T + node.transform[:3, 3])
                triangles.append(primitive.faces + total)
                total += len(primitive.points)
                count += len(primitive.faces)
                placed.append(primitive)
            counts.append(count)
        if not placed:
            raise ShoalError(f"{self.name} holds no triangles: {len(nodes)} nodes with a mesh, none with faces.")
        node_index = np.repeat(np.arange(len(nodes), dtype=np.int32), counts)
        return ParsedMesh(
            vertices=np.concatenate(vertices),
            triangles=np.concatenate(triangles),
            uv=np.concatenate([primitive.uv for primitive in placed]),
            colors=np.concatenate([primitive.colors for primitive in placed]),
            material=np.concatenate([primitive.materials for primitive in placed]),
            instance=node_index + np.int32(1),
            label_index=node_index,
            labels=[node.label for node in nodes],
            materials=self.materials.finished(),
            textures=self.materials.textures.textures,
            missing=self.materials.textures.missing,
            notes=self._notes(nodes),
        )

    def _check_size(self, nodes: list[_MeshNode]) -> None:
        """Raise a ShoalError if the scene is too large; called before arrays of its size are allocated."""
        triangles = vertices = primitives = 0
        sizes: dict[int, tuple[int, int, int]] = {}
        for node in nodes:
            if node.mesh not in sizes:
                filled = [(n, self._vertex_count(p)) for p in self._items(node.mesh) if (n := self._triangle_count(p))]
                sizes[node.mesh] = len(filled), sum(n for n, _ in filled), sum(points for _, points in filled)
            size = sizes[node.mesh]
            primitives, triangles, vertices = primitives + size[0], triangles + size[1], vertices + size[2]
        check_count(self.name, triangles)
        check_count(self.name, vertices // 3)
        if primitives > MAX_PRIMITIVES:
            raise ShoalError(
                f"{self.name} places {primitives:,} primitives; at most {MAX_PRIMITIVES:,} are read: join them."
            )
        need, free = triangles * _TRIANGLE_BYTES + vertices * _VERTEX_BYTES, free_memory("cpu")
        if need > free:
            raise ShoalError(
                f"{self.name} takes about {need / 1e9:.1f} GB of memory to read, and {free / 1e9:.1f} GB are free: "
                "simplify or split it."
            )

    def _notes(self, nodes: list[_MeshNode]) -> list[str]:
        notes = []
        if self.skins:
            notes.append(f"{self.skins} nodes have a skin, which is ignored: they are shown in the rest pose")
        if self.materials.untextured:
            first, *others = self.materials.untextured
            more = f" and {len(others)} more" if others else ""
            notes.append(f"material {first}{more} has a texture, but not all of its triangles have texture coordinates")
        skipped = {mesh: sum(map(_is_skipped, self._items(mesh))) for mesh in {node.mesh for node in nodes}}
        if total := sum(skipped[node.mesh] for node in nodes):
            notes.append(f"{total} primitives of points or lines were skipped")
        return notes

    # --- Nodes ---------------------------------------------------------------------------------------------------

    def _mesh_nodes(self) -> list[_MeshNode]:
        """The nodes of the scene that have a mesh, depth first."""
        nodes = self.file.items("nodes")
        if "scenes" in self.file.tree:
            roots = self.file.item("scenes", self.file.tree.get("scene", 0)).get("nodes", [])
        else:
            children = {child for node in nodes for child in node.get("children", [])}
            roots = [i for i in range(len(nodes)) if i not in children]
        found, visited = [], set()
        stack = [(index, np.eye(4), "") for index in reversed(roots)]
        while stack:
            index, parent, inherited = stack.pop()
            node = self.file.item("nodes", index)
            if index in visited:
                raise ShoalError(f"{self.name} is damaged: node {index} has two parents, or is its own ancestor.")
            visited.add(index)
            matrix = parent @ self._matrix(index, node) if node.keys() & _TRANSFORMS else parent
            mesh = self.file.item("meshes", node["mesh"]) if "mesh" in node else {}
            name = label(text(node.get("name")), text(mesh.get("name")), inherited)
            if mesh:
                found.append(_MeshNode(matrix, node["mesh"], name))
                self.skins += "skin" in node
            stack += [(child, matrix, name) for child in reversed(node.get("children", []))]
        return found

    def _matrix(self, index: int, node: dict) -> np.ndarray:
        """float64 [4, 4]: the local transform of a node."""
        if "matrix" in node:
            matrix = self.file.numbers(node["matrix"], 16, f"the matrix of node {index}").reshape(4, 4).T
        else:
            x, y, z, w = self.file.numbers(node.get("rotation", [0, 0, 0, 1]), 4, f"the rotation of node {index}")
            norm = np.sqrt(x * x + y * y + z * z + w * w)
            if norm == 0:
                raise ShoalError(f"{self.name}: the rotation of node {index} is zero.")
            x, y, z, w = x / norm, y / norm, z / norm, w / norm
            rotation = np.array(
                [
                    [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
                    [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
                    [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
                ]
            )
            matrix = np.eye(4)
            matrix[:3, :3] = rotation * self.file.numbers(node.get("scale", [1, 1, 1]), 3, f"the scale of node {index}")
            matrix[:3, 3] = self.file.numbers(node.get("translation", [0, 0, 0]), 3, f"the translation of node {index}")
        return matrix

    # --- Primitives ----------------------------------------------------------------------------------------------

    def _items(self, mesh: int) -> list[dict]:
        """The primitives of a mesh, as JSON."""
        if mesh not in self._meshes:
            primitives = self.file.item("meshes", mesh).get("primitives")
            if not isinstance(primitives, list) or not all(
                isinstance(p, dict) and isinstance(p.get("attributes"), dict) for p in primitives
            ):
                raise ShoalError(f"{self.name} is damaged: a mesh has no list of primitives with attributes.")
            self._meshes[mesh] = primitives
        return self._meshes[mesh]

    def _decoded(self, mesh: int) -> list[_Primitive]:
        """The primitives of a mesh that hold triangles."""
        if mesh not in self._primitives:
            self._primitives[mesh] = [self._decode(p) for p in self._items(mesh) if self._triangle_count(p)]
        return self._primitives[mesh]

    def _decode(self, primitive: dict) -> _Primitive:
        points = self.file.attribute(primitive, "POSITION", 3)
        faces = self._faces(primitive, len(points))
        colors = self.materials.vertex_colors(primitive, len(points))
        index = self.materials.index_of(primitive.get("material"))
        if colors[:, 3].min() < 255:
            self.materials.note_vertex_alpha(index)
        return _Primitive(points, faces, self.materials.uv(primitive, len(points))[faces], colors[faces], index)

    def _triangle_count(self, primitive: dict) -> int:
        """Triangles of a primitive, from the counts of its accessors."""
        mode = primitive.get("mode", _TRIANGLES)
        if _is_skipped(primitive) or "POSITION" not in primitive["attributes"]:
            return 0
        index = primitive.get("indices", primitive["attributes"]["POSITION"])
        count = self.file.count(self.file.item("accessors", index).get("count"), f"the count of accessor {index}")
        return count // 3 if mode == _TRIANGLES else max(count - 2, 0)

    def _vertex_count(self, primitive: dict) -> int:
        index = primitive["attributes"]["POSITION"]
        return self.file.count(self.file.item("accessors", index).get("count"), f"the count of accessor {index}")

    def _faces(self, primitive: dict, count: int) -> np.ndarray:
        """int64 [T, 3]: indices into the vertices of the primitive, all within range."""
        if "indices" in primitive:
            index = primitive["indices"]
            flat = self.file.accessor(index, (1,), indices=True)[:, 0].astype(np.int64)
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


def _is_skipped(primitive: dict) -> bool:
    """Whether a primitive holds points or lines."""
    return primitive.get("mode", _TRIANGLES) not in (_TRIANGLES, _STRIP, _FAN)
