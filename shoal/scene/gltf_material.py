"""Materials, textures, texture coordinates and vertex colors of a glTF file."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from shoal.core.errors import ShoalError, excerpt
from shoal.scene.files import TextureSet
from shoal.scene.gltf_file import GltfFile, compressed_message, text
from shoal.scene.scene import Material


class GltfMaterials:
    """The materials and textures that primitives use; each is decoded once."""

    def __init__(self, file: GltfFile):
        self.file, self.name = file, file.name
        self.textures = TextureSet(file.source)
        self.untextured: dict[int, None] = {}
        """Materials with a texture on triangles without texture coordinates, in order of their use."""
        self._materials: list[Material] = []
        self._indices: dict[int | None, int] = {}
        self._blending: set[int] = set()
        self._vertex_alpha: set[int] = set()

    def index_of(self, index: Any) -> int:
        """The index in the scene of a material of the file; None is the default white material."""
        if index not in self._indices:
            given = self.file.item("materials", index) if index is not None else {}
            surface = self._surface(given)
            factor = self.file.numbers(surface["factor"], 4, f"the base color of material {index}").clip(0, 1)
            red, green, blue = (round(float(c), 6) for c in to_srgb(factor[:3]))
            color = (red, green, blue, float(factor[3]))
            texture = -1
            if surface["texture"]:
                texture = self._texture(surface["texture"])
            cutoff = 0.0
            if given.get("alphaMode") == "MASK":
                cutoff = self.file.numbers([given.get("alphaCutoff", 0.5)], 1, f"the alpha cutoff of material {index}")[
                    0
                ]
                cutoff = float(cutoff.clip(0, 2))  # above 1 everything is cut out; 2 fits a float32
            elif given.get("alphaMode") == "BLEND":
                self._blending.add(len(self._materials))
            self._materials.append(Material(text(given.get("name")), color, texture, cutoff))
            self._indices[index] = len(self._materials) - 1
        return self._indices[index]

    def finished(self) -> list[Material]:
        """The materials. Blended ones with any alpha below 1 get an alpha cutoff of 0.5."""
        done = list(self._materials)
        for i in self._blending:
            if self.textures.has_alpha(done[i].texture) or done[i].color[3] < 1 or i in self._vertex_alpha:
                done[i] = replace(done[i], cutoff=0.5)
        return done

    def note_vertex_alpha(self, index: int) -> None:
        """Record that vertex colors with alpha below 1 use a material (an index in the scene)."""
        self._vertex_alpha.add(index)

    def _surface(self, material: dict) -> dict:
        """The base color and its texture, of the metallic-roughness or the specular-glossiness model."""
        metal = material.get("pbrMetallicRoughness", {})
        gloss = material.get("extensions", {}).get("KHR_materials_pbrSpecularGlossiness")
        if gloss and "baseColorTexture" not in metal:
            return dict(factor=gloss.get("diffuseFactor", [1, 1, 1, 1]), texture=gloss.get("diffuseTexture"))
        return dict(factor=metal.get("baseColorFactor", [1, 1, 1, 1]), texture=metal.get("baseColorTexture"))

    def _texture(self, info: dict) -> int:
        """The index in the scene of a texture; -1 if its file is missing."""
        texture = self.file.item("textures", info.get("index"))
        extensions = texture.get("extensions", {})
        index = extensions.get("EXT_texture_webp", {}).get("source", texture.get("source"))
        if index is None:
            if "KHR_texture_basisu" in extensions:
                raise ShoalError(compressed_message(self.name, "KHR_texture_basisu"))
            raise ShoalError(f"{self.name}: texture {info.get('index')} has no image source.")
        image = self.file.item("images", index)
        uri, view = image.get("uri"), image.get("bufferView")
        if view is not None:
            key, what = ("view", view), f"the embedded image {index}"
            return self.textures.index_of(key, lambda: self.textures.decode(key, bytes(self.file.view(view)[0]), what))
        if isinstance(uri, str) and not uri.startswith("data:"):
            path = self.textures.find(unquote(uri))
            return -1 if path is None else self._image_file(path, uri)
        key = ("image", index)
        return self.textures.index_of(
            key, lambda: self.textures.decode(key, self.file.read_uri(uri, "image"), f"image {index}")
        )

    def _image_file(self, path: Path, uri: str) -> int:
        key = self.file.source.identity(path)
        return self.textures.index_of(key, lambda: self.textures.read(path, f"the image {excerpt(uri)!r}"))

    def uv(self, primitive: dict, count: int) -> np.ndarray:
        """float32 [V, 2], v up (in the file it points down), with the texture transform applied."""
        index = primitive.get("material")
        info = self._surface(self.file.item("materials", index))["texture"] if index is not None else None
        transform = (info or {}).get("extensions", {}).get("KHR_texture_transform", {})
        layer = transform.get("texCoord", (info or {}).get("texCoord", 0))
        if info is None or f"TEXCOORD_{layer}" not in primitive["attributes"]:
            if info is not None and index is not None:
                self.untextured[index] = None
            return np.zeros((count, 2), np.float32)
        uv = self.file.attribute(primitive, f"TEXCOORD_{layer}", 2, count)
        if transform:
            angle = float(transform.get("rotation", 0.0))
            uv = uv * self.file.numbers(transform.get("scale", [1, 1]), 2, "a texture transform's scale")
            cos, sin = np.cos(angle), np.sin(angle)
            uv = np.stack([cos * uv[:, 0] + sin * uv[:, 1], cos * uv[:, 1] - sin * uv[:, 0]], 1)
            uv = uv + self.file.numbers(transform.get("offset", [0, 0]), 2, "a texture transform's offset")
        return np.stack([uv[:, 0], 1.0 - uv[:, 1]], 1).astype(np.float32)

    def vertex_colors(self, primitive: dict, count: int) -> np.ndarray:
        """uint8 [V, 4], sRGB (linear in the file); white without vertex colors."""
        result = np.full((count, 4), 255, np.uint8)
        if "COLOR_0" not in primitive["attributes"]:
            return result
        colors = np.nan_to_num(self.file.attribute(primitive, "COLOR_0", (3, 4), count)).clip(0, 1)
        result[:, :3] = np.rint(to_srgb(colors[:, :3]) * 255)
        if colors.shape[1] == 4:
            result[:, 3] = np.rint(colors[:, 3] * 255)
        return result


def to_srgb(linear: np.ndarray) -> np.ndarray:
    """Linear color values, 0 to 1, converted to sRGB."""
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * np.maximum(linear, 0.0031308) ** (1 / 2.4) - 0.055)
