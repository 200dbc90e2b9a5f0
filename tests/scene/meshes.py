"""Small mesh files for tests, and colors and corners of the loaded scenes."""

import io
import json
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from shoal.scene.scene import Scene

RED, GREEN, BLUE, WHITE = (255, 0, 0, 255), (0, 255, 0, 255), (0, 0, 255, 255), (255, 255, 255, 255)
FOUR = np.array([[RED, GREEN], [BLUE, WHITE]], np.uint8)
"""An image of four colors: red at the top left, green at the top right, blue at the bottom left."""

SQUARE = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], np.float32)
FACES = np.array([[0, 1, 2], [0, 2, 3]], np.uint16)


def picture_bytes(picture: np.ndarray, form: str = "PNG") -> bytes:
    """An image as the bytes of a file."""
    image = Image.fromarray(picture)
    file = io.BytesIO()
    (image.convert("RGB") if form == "JPEG" else image).save(file, form, **({"quality": 100} if form == "JPEG" else {}))
    return file.getvalue()


class Gltf:
    """Builder of a glTF file: methods add an item and return its index."""

    def __init__(self):
        self.binary = b""
        self.tree: dict = {"asset": {"version": "2.0"}, "scene": 0, "scenes": [{"nodes": [0]}]}

    def append(self, kind: str, item: dict) -> int:
        self.tree.setdefault(kind, []).append(item)
        return len(self.tree[kind]) - 1

    def view(self, data: bytes, **more) -> int:
        self.binary += b"\0" * (-len(self.binary) % 4)
        start = len(self.binary)
        self.binary += data
        return self.append("bufferViews", dict(buffer=0, byteOffset=start, byteLength=len(data), **more))

    def accessor(self, array: np.ndarray, **more) -> int:
        codes = {"int8": 5120, "uint8": 5121, "int16": 5122, "uint16": 5123, "uint32": 5125, "float32": 5126}
        width = 1 if array.ndim == 1 else array.shape[1]
        kind = {1: "SCALAR", 2: "VEC2", 3: "VEC3", 4: "VEC4"}[width]
        fields = dict(bufferView=self.view(array.tobytes()), componentType=codes[str(array.dtype)], type=kind)
        return self.append("accessors", {**fields, "count": len(array), **more})

    def mesh(self, points=SQUARE, faces=FACES, material=None, mode=None, name=None, **attributes) -> int:
        """One primitive; attributes are accessors."""
        primitive: dict = {"attributes": {"POSITION": self.accessor(np.asarray(points, np.float32)), **attributes}}
        if faces is not None:
            primitive["indices"] = self.accessor(np.asarray(faces).reshape(-1))
        if material is not None:
            primitive["material"] = self.append("materials", material)
        if mode is not None:
            primitive["mode"] = mode
        return self.append("meshes", {"primitives": [primitive], **({"name": name} if name else {})})

    def texture(self, data: bytes, mime: str = "image/png") -> int:
        image = self.append("images", {"bufferView": self.view(data), "mimeType": mime})
        return self.append("textures", {"source": image})

    def bytes(self) -> bytes:
        if self.binary:
            self.tree["buffers"] = [{"byteLength": len(self.binary)}]
        return self.frame(json.dumps(self.tree).encode())

    def frame(self, text: bytes) -> bytes:
        """A .glb file with this JSON text and valid lengths."""
        text += b" " * (-len(text) % 4)
        binary = self.binary + b"\0" * (-len(self.binary) % 4)
        chunks = struct.pack("<I4s", len(text), b"JSON") + text + struct.pack("<I4s", len(binary), b"BIN\0") + binary
        return b"glTF" + struct.pack("<II", 2, 12 + len(chunks)) + chunks

    def save(self, path: Path) -> Path:
        path.write_bytes(self.bytes())
        return path

    def save_apart(self, path: Path) -> Path:
        """As .gltf with a .bin beside it."""
        path.with_suffix(".bin").write_bytes(self.binary)
        self.tree["buffers"] = [{"byteLength": len(self.binary), "uri": path.with_suffix(".bin").name}]
        path.write_text(json.dumps(self.tree))
        return path


def square_glb(material: dict | None = None, **attributes) -> Gltf:
    """One square, one node."""
    file = Gltf()
    file.mesh(material=material, **attributes)
    file.append("nodes", {"mesh": 0})
    return file


def seen(scene: Scene, triangle: int, weights=(1 / 3, 1 / 3, 1 / 3)) -> np.ndarray:
    """The color 0 to 255 of a point of a triangle: material times texture (nearest) times the corners' colors."""
    weights = np.asarray(weights)
    material = scene.materials[scene.material[triangle]]
    color = np.array(material.color) * (weights @ scene.colors[triangle]) / 255
    if material.texture >= 0:
        texture = scene.textures[material.texture]
        height, width = texture.shape[:2]
        u, v = np.mod(weights @ scene.uv[triangle], 1.0)
        color = color * texture[int((1 - v) * height) % height, int(u * width) % width] / 255
    return color * 255


def corner_points(scene: Scene) -> np.ndarray:
    """float64 [T, 9], the triangles in an order that does not depend on the file's."""
    rows = np.sort(scene.corners.astype(np.float64).round(4).view([("", np.float64)] * 3), axis=1)
    return np.unique(rows.view(np.float64).reshape(len(rows), 9), axis=0)
