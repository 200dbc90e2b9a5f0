"""Packing of a scene into one memory block for ray casting: tree, triangles, attributes, materials and mipmaps.

Sizes and offsets count words of four 32-bit numbers, the widest load of a GPU:

    nodes      8 words each: min x of the four children, max x, min y, max y, min z, max z, child code, unused
    triangles  3 words each, in leaf order: the rows (u, v, height) of the map from a point to the triangle
    attributes 3 words each: uv of corners 0 and 1 | uv of corner 2, texel density, material | colors, label, instance
    materials  2 words each: color | first texel, width and height, mipmap levels, cutoff
    texels     four per word, RGBA with a byte per channel; a texture, then its mipmap levels

`tree.Tree` defines child codes. Offsets are relative to their section, so a block can be stored at any address.
Coordinates are relative to the center of the scene, so scans in map coordinates keep the precision of scenes at the
origin.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import interpolate

from shoal.core.errors import ShoalError
from shoal.scene.scene import Scene, check_scene
from shoal.scene.tree import LEAF, STACK, Tree, build_tree, stack_needed

SECTIONS = ("nodes", "triangles", "attributes", "materials", "texels")
NODE_WORDS = 8
TRIANGLE_WORDS = 3
ATTRIBUTE_WORDS = 3
MATERIAL_WORDS = 2

MAX_TEXTURE_SIZE = 1024
"""Pixels along the longer side; larger textures are halved until they fit."""

LEAF_BITS = 4
"""Low bits of a leaf's code: its number of triangles (0 to 4), plus 8 if any of them has cutouts."""


@dataclass(frozen=True)
class PackedScene:
    """A scene packed for a device."""

    name: str
    words: torch.Tensor
    """float32 [words, 4], on the CPU; integers are stored as float32 bits."""
    section_starts: tuple[int, ...]
    """The first word of each of SECTIONS."""
    bounds: np.ndarray
    """float32 [2, 3], meters."""
    center: np.ndarray
    """float32 [3], whole meters: the offset subtracted from all coordinates."""
    labels: tuple[str, ...]
    triangles: int
    has_cutouts: bool
    """Whether any triangle has a material with an alpha cutoff."""
    notes: tuple[str, ...]
    """Messages about what the reader skipped or changed."""
    missing: tuple[str, ...] = ()
    """References to texture files that do not exist."""
    key: str = ""
    """Hash of the content, for caches; empty for a scene created in memory."""

    @property
    def nbytes(self) -> int:
        return self.words.nbytes


def pack_scene(
    scene: Scene, device: str | torch.device = "cpu", max_texture_size: int = MAX_TEXTURE_SIZE
) -> PackedScene:
    """Check a scene, build its search tree on `device` and pack it into words on the CPU."""
    check_scene(scene)
    center = np.round(scene.bounds.astype(np.float64).mean(0)).astype(np.float32)
    corners = torch.from_numpy(scene.corners - center)
    corners, kept = _drop_degenerate(scene, corners)
    tree = build_tree(corners.to(device))
    if stack_needed(tree) > STACK:  # a balanced tree is slower to traverse but never too deep
        tree = build_tree(corners.to(device), balanced=True)
    order = tree.order.cpu()
    source = kept[order.numpy()]
    texels, textures = _texels(scene, max_texture_size)
    has_cutout = np.array([m.cutoff > 0 for m in scene.materials])[scene.material[source]]
    sections = [
        _nodes(tree, torch.from_numpy(has_cutout)),
        _triangles(corners[order]),
        _attributes(scene, source, corners[order], textures),
        _materials(scene, textures),
        texels,
    ]
    starts = np.cumsum([0] + [len(part) for part in sections[:-1]])
    return PackedScene(
        name=scene.name,
        words=torch.cat(sections),
        section_starts=tuple(int(start) for start in starts),
        bounds=scene.bounds,
        center=center,
        labels=scene.labels,
        triangles=len(source),
        has_cutouts=bool(has_cutout.any()),
        notes=scene.notes,
        missing=scene.missing,
    )


def _drop_degenerate(scene: Scene, corners: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """Corners and indices of the triangles with an area; rays cannot hit the others."""
    sides = corners.double()
    area = torch.linalg.cross(sides[:, 1] - sides[:, 0], sides[:, 2] - sides[:, 0]).norm(dim=1)
    longest = torch.stack([(sides[:, i] - sides[:, i - 1]).norm(dim=1) for i in range(3)]).amax(0)
    kept = torch.nonzero(area > 1e-9 * longest**2).squeeze(1)
    if len(kept) == 0:
        raise ShoalError(f"{scene.name}: none of its {len(corners)} triangles has an area; the scene is empty.")
    return corners[kept], kept.numpy()


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """Integers as float32 with the same bits."""
    return numbers.to(torch.int32).contiguous().view(torch.float32)


def _nodes(tree: Tree, has_cutout: torch.Tensor) -> torch.Tensor:
    child = tree.child.cpu().long()
    code = -1 - child
    first, count = code // 8, code % 8
    cutouts = torch.cat([torch.zeros(1, dtype=torch.long), torch.cumsum(has_cutout.long(), 0)])
    leaf = child < 0
    first, count = first * leaf, count * leaf
    any_cutout = cutouts[first + count] > cutouts[first]
    code = (first << LEAF_BITS) + 8 * any_cutout.long() + count
    child = torch.where(leaf, -1 - code, child)
    if LEAF >= 8 or int(code.max()) >= 2**31:
        raise ShoalError("The scene has too many triangles for its search tree (134 million at most).")
    words = torch.zeros(len(child), NODE_WORDS, 4)
    words[:, 0:6:2] = tree.lower.cpu().transpose(1, 2)
    words[:, 1:6:2] = tree.upper.cpu().transpose(1, 2)
    words[:, 6] = _bits(child)
    return words.reshape(-1, 4)


def _triangles(corners: torch.Tensor) -> torch.Tensor:
    """Rows that turn a point into (u, v, height above the triangle): the inverse of [edge 1, edge 2, normal]."""
    sides = corners.double()
    origin, one, two = sides[:, 0], sides[:, 1] - sides[:, 0], sides[:, 2] - sides[:, 0]
    normal = torch.linalg.cross(one, two)
    normal = normal / normal.norm(dim=1, keepdim=True)
    det = (torch.linalg.cross(one, two) * normal).sum(1, keepdim=True)
    rows = torch.stack([torch.linalg.cross(two, normal) / det, torch.linalg.cross(normal, one) / det, normal], 1)
    shift = -(rows * origin[:, None]).sum(2, keepdim=True)
    return torch.cat([rows, shift], 2).float().reshape(-1, 4)


@dataclass(frozen=True)
class _Texture:
    """A texture and its mipmap levels in the texels of a scene."""

    first: int  # texel
    width: int
    height: int
    levels: int


def _texels(scene: Scene, max_size: int) -> tuple[torch.Tensor, list[_Texture]]:
    parts: list[np.ndarray] = []
    textures = []
    total = 0
    for texture in scene.textures:
        image = torch.from_numpy(np.ascontiguousarray(texture)).permute(2, 0, 1)[None].float()
        while max(image.shape[2:]) > max_size:
            image = _half(image)
        textures.append(_Texture(total, image.shape[3], image.shape[2], 0))
        levels = 0
        while True:
            level = image[0].permute(1, 2, 0).round().to(torch.uint8).numpy().reshape(-1, 4)
            parts.append(level)
            total += len(level)
            levels += 1
            if max(image.shape[2:]) == 1:
                break
            image = _half(image)
        last = textures[-1]
        textures[-1] = _Texture(last.first, last.width, last.height, levels)
    if total >= 2**31:
        raise ShoalError(f"{scene.name}: its textures have {total} pixels, more than can be addressed.")
    flat = np.concatenate(parts) if parts else np.zeros((0, 4), np.uint8)
    flat = np.concatenate([flat, np.zeros((-len(flat) % 4, 4), np.uint8)])
    return torch.from_numpy(flat.reshape(-1, 16)).view(torch.float32), textures


def _half(image: torch.Tensor) -> torch.Tensor:
    size = [max(1, side // 2) for side in image.shape[2:]]
    return interpolate(image, size=size, mode="area")


def _attributes(scene: Scene, source: np.ndarray, corners: torch.Tensor, textures: list[_Texture]) -> torch.Tensor:
    for what, count in (("materials", len(scene.materials)), ("labels", len(scene.labels))):
        if count > 2**16:
            raise ShoalError(f"{scene.name} has {count} {what}; at most {2**16} are supported.")
    uv = torch.from_numpy(scene.uv[source])
    material = scene.material[source]
    # log2 of texels per meter on the triangle, which selects the mipmap level.
    pixels = np.array([textures[m.texture].width * textures[m.texture].height if m.texture >= 0 else 1
                       for m in scene.materials], dtype=np.float64)  # fmt: skip
    one, two = uv[:, 1] - uv[:, 0], uv[:, 2] - uv[:, 0]
    flat = (one[:, 0] * two[:, 1] - one[:, 1] * two[:, 0]).abs().double() * torch.from_numpy(pixels[material])
    area = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]).double().norm(dim=1)
    density = 0.5 * torch.log2(flat.clamp(min=1e-12) / area.clamp(min=1e-12))
    words = torch.zeros(len(source), 12)
    words[:, :6] = uv.reshape(-1, 6)
    words[:, 6] = density.float()
    packed = material.astype(np.int64) | (scene.semantic[source].astype(np.int64) << 16)
    words[:, 7] = _bits(torch.from_numpy(packed.astype(np.uint32).view(np.int32)))
    colors = np.ascontiguousarray(scene.colors[source])
    words[:, 8:11] = torch.from_numpy(colors.reshape(-1, 12)).view(torch.float32)
    words[:, 11] = _bits(torch.from_numpy(scene.instance[source]))
    return words.reshape(-1, 4)


def _materials(scene: Scene, textures: list[_Texture]) -> torch.Tensor:
    words = torch.zeros(len(scene.materials), 8)
    for row, material in zip(words, scene.materials, strict=True):
        row[:4] = torch.tensor(material.color)
        texture = textures[material.texture] if material.texture >= 0 else _Texture(-1, 1, 1, 1)
        row[4:7] = _bits(torch.tensor([texture.first, texture.width | texture.height << 16, texture.levels]))
        row[7] = material.cutoff
    return words.reshape(-1, 4)
