"""A scene as one block of memory that rays are cast into: tree, triangles, looks, materials and texture pyramids.

Everything is counted in words of four 32-bit numbers, the most that a GPU reads at once:

    nodes      8 words each: least x of the four children, greatest x, y, y, z, z, the way on (see `tree.Tree`), unused
    triangles  3 words each, in the order of the leaves: the rows (u, v, height) of the map from a point to the triangle
    looks      3 words each: uv of corner 0 and 1 | uv of corner 2, fineness, material | three colors, label, object
    materials  2 words each: color | first texel, width and height, levels, cutoff
    texels     four a word, red, green, blue and alpha a byte each; a picture, then its halves, quarters, ...

Offsets inside the block are relative to its sections, so that it can lie anywhere. Layout2D are relative to the middle of
the scene, so that a scan with coordinates of a map is as exact as one at the origin.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import interpolate

from shoal.core.errors import ShoalError
from shoal.scene.scene import Scene, check_scene
from shoal.scene.tree import LEAF, STACK, Tree, build_tree, stack_needed

SECTIONS = ("nodes", "triangles", "looks", "materials", "texels")
NODE_WORDS = 8
TRIANGLE_WORDS = 3
LOOK_WORDS = 3
MATERIAL_WORDS = 2

LARGEST_TEXTURE = 1024
"""Pixels along the longer side; larger pictures are halved until they fit."""

LEAF_BITS = 4
"""Low bits of a leaf's code: its number of triangles (0 to 4), and 8 if any of them has holes."""


@dataclass(frozen=True)
class Packed:
    """A scene ready for a device."""

    name: str
    words: torch.Tensor
    """float32 [words, 4], on the CPU; many are integers in disguise."""
    places: tuple[int, ...]
    """The first word of each of SECTIONS."""
    bounds: np.ndarray
    """float32 [2, 3], meters."""
    middle: np.ndarray
    """float32 [3], meters: what has been taken off all places, in whole meters."""
    labels: tuple[str, ...]
    triangles: int
    holes: bool
    """Whether any triangle has parts cut out."""
    notes: tuple[str, ...]
    """What was left out or mended while loading."""
    missing: tuple[str, ...] = ()
    """Textures that were not there."""
    key: str = ""
    """Of its content, for the cache; a scene that was made in memory has none."""

    @property
    def nbytes(self) -> int:
        return self.words.nbytes


def pack_scene(scene: Scene, device: str | torch.device = "cpu", largest_texture: int = LARGEST_TEXTURE) -> Packed:
    """Check a scene, build its tree on `device` and lay everything out."""
    check_scene(scene)
    middle = np.round(scene.bounds.astype(np.float64).mean(0)).astype(np.float32)
    corners = torch.from_numpy(scene.corners - middle)
    corners, kept = _drop_degenerate(scene, corners)
    tree = build_tree(corners.to(device))
    if stack_needed(tree) > STACK:  # a very uneven tree: halves by count are less good but never deep
        tree = build_tree(corners.to(device), balanced=True)
    order = tree.order.cpu()
    source = kept[order.numpy()]
    texels, pictures = _texels(scene, largest_texture)
    cutting = np.array([m.cutoff > 0 for m in scene.materials])[scene.material[source]]
    sections = [
        _nodes(tree, torch.from_numpy(cutting)),
        _triangles(corners[order]),
        _looks(scene, source, corners[order], pictures),
        _materials(scene, pictures),
        texels,
    ]
    places = np.cumsum([0] + [len(part) for part in sections[:-1]])
    return Packed(
        name=scene.name,
        words=torch.cat(sections),
        places=tuple(int(p) for p in places),
        bounds=scene.bounds,
        middle=middle,
        labels=scene.labels,
        triangles=len(source),
        holes=bool(cutting.any()),
        notes=scene.notes,
        missing=scene.missing,
    )


def _drop_degenerate(scene: Scene, corners: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """Triangles with an area, and their numbers: a ray cannot meet the others."""
    sides = corners.double()
    area = torch.linalg.cross(sides[:, 1] - sides[:, 0], sides[:, 2] - sides[:, 0]).norm(dim=1)
    longest = torch.stack([(sides[:, i] - sides[:, i - 1]).norm(dim=1) for i in range(3)]).amax(0)
    kept = torch.nonzero(area > 1e-9 * longest**2).squeeze(1)
    if len(kept) == 0:
        raise ShoalError(f"{scene.name}: none of its {len(corners)} triangles has an area; there is nothing to see.")
    return corners[kept], kept.numpy()


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """Integers as floats of the same bits."""
    return numbers.to(torch.int32).contiguous().view(torch.float32)


def _nodes(tree: Tree, cutting: torch.Tensor) -> torch.Tensor:
    child = tree.child.cpu().long()
    code = -1 - child
    first, count = code // 8, code % 8
    seen = torch.cat([torch.zeros(1, dtype=torch.long), torch.cumsum(cutting.long(), 0)])
    leaf = child < 0
    first, count = first * leaf, count * leaf
    holes = seen[first + count] > seen[first]
    code = (first << LEAF_BITS) + 8 * holes.long() + count
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
class _Picture:
    first: int  # in texels
    width: int
    height: int
    levels: int


def _texels(scene: Scene, largest: int) -> tuple[torch.Tensor, list[_Picture]]:
    parts: list[np.ndarray] = []
    pictures = []
    total = 0
    for texture in scene.textures:
        image = torch.from_numpy(np.ascontiguousarray(texture)).permute(2, 0, 1)[None].float()
        while max(image.shape[2:]) > largest:
            image = _half(image)
        pictures.append(_Picture(total, image.shape[3], image.shape[2], 0))
        levels = 0
        while True:
            level = image[0].permute(1, 2, 0).round().to(torch.uint8).numpy().reshape(-1, 4)
            parts.append(level)
            total += len(level)
            levels += 1
            if max(image.shape[2:]) == 1:
                break
            image = _half(image)
        last = pictures[-1]
        pictures[-1] = _Picture(last.first, last.width, last.height, levels)
    if total >= 2**31:
        raise ShoalError(f"{scene.name}: its textures have {total} pixels, more than can be addressed.")
    flat = np.concatenate(parts) if parts else np.zeros((0, 4), np.uint8)
    flat = np.concatenate([flat, np.zeros((-len(flat) % 4, 4), np.uint8)])
    return torch.from_numpy(flat.reshape(-1, 16)).view(torch.float32), pictures


def _half(image: torch.Tensor) -> torch.Tensor:
    size = [max(1, side // 2) for side in image.shape[2:]]
    return interpolate(image, size=size, mode="area")


def _looks(scene: Scene, source: np.ndarray, corners: torch.Tensor, pictures: list[_Picture]) -> torch.Tensor:
    for what, many in (("materials", len(scene.materials)), ("labels", len(scene.labels))):
        if many > 2**16:
            raise ShoalError(f"{scene.name} has {many} {what}; at most {2**16} can be told apart.")
    uv = torch.from_numpy(scene.uv[source])
    material = scene.material[source]
    # log2 of texels per meter: how fine the texture lies on the triangle, which chooses the level of the pyramid.
    pixels = np.array([pictures[m.texture].width * pictures[m.texture].height if m.texture >= 0 else 1
                       for m in scene.materials], dtype=np.float64)  # fmt: skip
    one, two = uv[:, 1] - uv[:, 0], uv[:, 2] - uv[:, 0]
    flat = (one[:, 0] * two[:, 1] - one[:, 1] * two[:, 0]).abs().double() * torch.from_numpy(pixels[material])
    area = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]).double().norm(dim=1)
    fineness = 0.5 * torch.log2(flat.clamp(min=1e-12) / area.clamp(min=1e-12))
    words = torch.zeros(len(source), 12)
    words[:, :6] = uv.reshape(-1, 6)
    words[:, 6] = fineness.float()
    both = material.astype(np.int64) | (scene.semantic[source].astype(np.int64) << 16)
    words[:, 7] = _bits(torch.from_numpy(both.astype(np.uint32).view(np.int32)))
    colors = np.ascontiguousarray(scene.colors[source])
    words[:, 8:11] = torch.from_numpy(colors.reshape(-1, 12)).view(torch.float32)
    words[:, 11] = _bits(torch.from_numpy(scene.instance[source]))
    return words.reshape(-1, 4)


def _materials(scene: Scene, pictures: list[_Picture]) -> torch.Tensor:
    words = torch.zeros(len(scene.materials), 8)
    for row, material in zip(words, scene.materials, strict=True):
        row[:4] = torch.tensor(material.color)
        picture = pictures[material.texture] if material.texture >= 0 else _Picture(-1, 1, 1, 1)
        row[4:7] = _bits(torch.tensor([picture.first, picture.width | picture.height << 16, picture.levels]))
        row[7] = material.cutoff
    return words.reshape(-1, 4)
