"""Building blocks of furniture: small meshes with texture coordinates in meters, combined with NumPy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shoal.scene.house.textures import SurfaceType

Color = tuple[float, float, float]
"""Red, green, blue; 0 to 1, sRGB."""


@dataclass(frozen=True)
class Mesh:
    """A part of a house: triangles with texture coordinates, surface types and tints."""

    vertices: np.ndarray
    """float32 [V, 3], meters."""
    triangles: np.ndarray
    """int32 [T, 3]."""
    uv: np.ndarray
    """float32 [T, 3, 2], meters along the surface (fractions of the image for those without a scale in `SIZE`)."""
    surface: np.ndarray
    """int32 [T], `SurfaceType` of each triangle."""
    tint: np.ndarray
    """float32 [T, 3], color that multiplies the texture."""

    @property
    def bounds(self) -> np.ndarray:
        """float32 [2, 3], meters: minimum and maximum corner of the bounding box."""
        return np.stack([self.vertices.min(0), self.vertices.max(0)])

    def moved(self, offset: Sequence[float], yaw: float = 0.0) -> "Mesh":
        """The mesh rotated about the z axis by `yaw` radians, then translated by `offset` meters."""
        vertices = self.vertices if yaw == 0.0 else self.vertices @ _rotation(yaw).T
        return Mesh(vertices + np.asarray(offset, np.float32), self.triangles, self.uv, self.surface, self.tint)

    def turned(self, axis: int, angle: float) -> "Mesh":
        """The mesh rotated about the x (0), y (1) or z (2) axis by `angle` radians."""
        cos, sin = np.cos(angle), np.sin(angle)
        a, b = (axis + 1) % 3, (axis + 2) % 3
        matrix = np.eye(3, dtype=np.float32)
        matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = cos, -sin, sin, cos
        return Mesh(self.vertices @ matrix.T, self.triangles, self.uv, self.surface, self.tint)


def steps(fine: float, usual: float, least: int = 1) -> int:
    """Segments of a curve: `usual` at fineness 1, at least `least`."""
    return max(least, round(usual * fine))


def join(parts: Iterable[Mesh]) -> Mesh:
    """One mesh of all parts."""
    parts = list(parts)
    starts = np.cumsum([0] + [len(part.vertices) for part in parts[:-1]])
    return Mesh(
        np.concatenate([part.vertices for part in parts]),
        np.concatenate([part.triangles + np.int32(start) for part, start in zip(parts, starts, strict=True)]),
        np.concatenate([part.uv for part in parts]),
        np.concatenate([part.surface for part in parts]),
        np.concatenate([part.tint for part in parts]),
    )


def copies(mesh: Mesh, offsets, scales=None, yaws=None, tints=None) -> Mesh:
    """N copies of a mesh: scaled [N, 3], rotated about z [N], then translated [N, 3]; `tints` [N, 3] replace colors."""
    offsets = np.asarray(offsets, np.float32).reshape(-1, 3)
    count = len(offsets)
    vertices = np.broadcast_to(mesh.vertices, (count, *mesh.vertices.shape))
    if scales is not None:
        vertices = vertices * np.asarray(scales, np.float32).reshape(count, 1, 3)
    if yaws is not None:
        cos, sin = (f(np.asarray(yaws, np.float32)) for f in (np.cos, np.sin))
        zero, one = np.zeros_like(cos), np.ones_like(cos)
        turn = np.stack([cos, -sin, zero, sin, cos, zero, zero, zero, one], -1).reshape(count, 3, 3)
        vertices = np.einsum("nij,nvj->nvi", turn, vertices)
    vertices = (vertices + offsets[:, None]).reshape(-1, 3).astype(np.float32)
    shift = (np.arange(count, dtype=np.int32) * len(mesh.vertices))[:, None, None]
    tint = np.broadcast_to(mesh.tint, (count, *mesh.tint.shape))
    if tints is not None:
        tint = np.broadcast_to(np.asarray(tints, np.float32).reshape(count, 1, 3), tint.shape)
    return Mesh(
        vertices,
        (mesh.triangles[None] + shift).reshape(-1, 3),
        np.tile(mesh.uv, (count, 1, 1)),
        np.tile(mesh.surface, count),
        tint.reshape(-1, 3),
    )


def build(vertices, triangles, surface: SurfaceType, tint: Color, uv=None, grain: bool = True) -> Mesh:
    """A mesh of one surface type; by default uv is a projection along each triangle's main axis.

    With `grain`, its first axis is the long side.
    """
    vertices = np.asarray(vertices, np.float32).reshape(-1, 3)
    triangles = np.asarray(triangles, np.int32).reshape(-1, 3)
    corners = vertices[triangles]
    if uv is None:
        uv = _project_uv(vertices, corners, grain)
    count = len(triangles)
    return Mesh(
        vertices,
        triangles,
        np.asarray(uv, np.float32).reshape(count, 3, 2),
        np.full(count, int(surface), np.int32),
        np.broadcast_to(np.asarray(tint, np.float32), (count, 3)),
    )


def box(
    size: Sequence[float], center: Sequence[float], surface: SurfaceType, tint: Color, radius=0.0, fine=0.0
) -> Mesh:
    """A box with edges rounded by `radius` if the fineness allows; 12, 108, 300, ... triangles."""
    half = np.asarray(size, np.float32) / 2
    level = steps(fine, 1.5, 0) if radius > 0 else 0
    if level == 0:
        vertices = _CORNERS * half + np.asarray(center, np.float32)
        return build(vertices, _BOX, surface, tint)
    radius = min(radius, float(half.min()) * 0.999)
    signs, directions, triangles = _rounded_box(min(level, 6))
    vertices = signs * (half - radius) + directions * radius + np.asarray(center, np.float32)
    return build(vertices, triangles, surface, tint)


def lathe(profile, sides: int, surface: SurfaceType, tint: Color, center: Sequence[float] = (0, 0, 0)) -> Mesh:
    """A surface of revolution: `profile` [N, 2] is radius and height, bottom to top; a radius of 0 closes an end."""
    profile = np.asarray(profile, np.float32)
    angle = np.arange(sides) * (2 * np.pi / sides)
    ring = np.stack([np.cos(angle), np.sin(angle)], -1)
    points = np.concatenate(
        [
            profile[:, None, :1] * ring[None],
            np.broadcast_to(profile[:, None, 1:], (len(profile), sides, 1)),
        ],
        -1,
    )
    triangles = _lattice(len(profile), sides, closed=True)
    # A ring of radius 0 is a point: drop the degenerate half of the triangles that touch it.
    point = np.repeat(profile[:, 0] < 1e-6, sides)
    triangles = triangles[point[triangles].sum(1) < 2]
    return build(points.reshape(-1, 3) + np.asarray(center, np.float32), triangles, surface, tint)


def rod(
    radius: float, height: float, sides: int, surface: SurfaceType, tint: Color, center: Sequence[float] = (0, 0, 0)
) -> Mesh:
    """An upright cylinder with its lower end at `center`, closed at both ends."""
    return lathe([(0, 0), (radius, 0), (radius, height), (0, height)], max(3, sides), surface, tint, center)


def turned_leg(radius: float, height: float, fine: float, surface: SurfaceType, tint: Color, style: int = 0) -> Mesh:
    """A turned table or chair leg: a taper, a baluster or a beaded shape; a square taper at low fineness."""
    count, sides = steps(fine, 18, 2), steps(fine, 12, 4)
    t = np.linspace(0, 1, count)
    taper = 0.62 + 0.38 * t
    if style % 3 == 1:
        taper = taper * (1 + 0.22 * np.sin(t * 9.5))
    elif style % 3 == 2:
        taper = 0.8 + 0.2 * np.cos(t * 25) * (np.abs(t - 0.5) < 0.35)
    scale = radius * np.clip(taper, 0.35, 1.0)
    profile = np.stack([scale, t * height], -1)
    profile = np.concatenate([[(0, 0)], profile])
    return lathe(profile, sides, surface, tint)


def tube(path, radius, sides: int, surface: SurfaceType, tint: Color) -> Mesh:
    """A bent pipe along `path` [N, 3] with a scalar `radius` or one per point [N]; the ends are open."""
    path = np.asarray(path, np.float32)
    along = np.gradient(path, axis=0)
    along /= np.linalg.norm(along, axis=1, keepdims=True) + 1e-9
    helper = np.where(np.abs(along[:, 2:3]) < 0.9, [[0.0, 0.0, 1.0]], [[1.0, 0.0, 0.0]])
    # One helper for the whole pipe: it would twist where the direction passes the threshold.
    helper = np.broadcast_to(helper[len(path) // 2], path.shape)
    side = np.cross(along, helper)
    side /= np.linalg.norm(side, axis=1, keepdims=True) + 1e-9
    up = np.cross(side, along)
    angle = np.arange(sides) * (2 * np.pi / sides)
    scale = np.broadcast_to(np.asarray(radius, np.float32), (len(path),))[:, None, None]
    ring = np.cos(angle)[None, :, None] * side[:, None] + np.sin(angle)[None, :, None] * up[:, None]
    points = path[:, None] + scale * ring
    return build(points.reshape(-1, 3), _lattice(len(path), sides, closed=True), surface, tint)


def sheet(points, surface: SurfaceType, tint: Color, uv=None) -> Mesh:
    """A surface through a grid of points [M, N, 3]; `uv` is [M, N, 2], by default projected as in `build`."""
    points = np.asarray(points, np.float32)
    triangles = _lattice(points.shape[0], points.shape[1], closed=False)
    if uv is not None:
        uv = np.asarray(uv, np.float32).reshape(-1, 2)[triangles]
    return build(points.reshape(-1, 3), triangles, surface, tint, uv, grain=False)


def panel(corners, surface: SurfaceType, tint: Color, uv=None) -> Mesh:
    """A flat quad; `uv` [4, 2] defaults to the whole texture, counterclockwise from the lower left."""
    uv = np.asarray([(0, 0), (1, 0), (1, 1), (0, 1)] if uv is None else uv, np.float32)
    triangles = np.array([(0, 1, 2), (0, 2, 3)])
    return build(corners, triangles, surface, tint, uv[triangles])


def cushion(
    size: Sequence[float], center: Sequence[float], fine: float, surface: SurfaceType, tint: Color, plump=0.45
) -> Mesh:
    """A pillow: box-like for `plump` near 0, an ellipsoid at 1."""
    if steps(fine, 2, 0) == 0:
        return box(size, center, surface, tint)
    rows, columns = steps(fine, 9, 3), 4 * steps(fine, 5, 2)
    phi = np.linspace(-np.pi / 2, np.pi / 2, rows + 1)[:, None]
    theta = ((np.arange(columns) + 0.5) * (2 * np.pi / columns))[None]
    half = np.asarray(size, np.float32) / 2
    ring = _power(np.cos(phi), 0.7)
    points = np.stack(
        [
            half[0] * ring * _power(np.cos(theta), plump),
            half[1] * ring * _power(np.sin(theta), plump),
            half[2] * np.broadcast_to(_power(np.sin(phi), 0.8), (rows + 1, columns)),
        ],
        -1,
    )
    triangles = _lattice(rows + 1, columns, closed=True)
    pole = np.arange((rows + 1) * columns) // columns % rows == 0
    triangles = triangles[pole[triangles].sum(1) < 2]
    return build(points.reshape(-1, 3) + np.asarray(center, np.float32), triangles, surface, tint, grain=False)


def molding(profile, start: Sequence[float], end: Sequence[float], surface: SurfaceType, tint: Color) -> Mesh:
    """A strip from `start` to `end` with the `profile` [N, 2] (to the left of that direction, up), in meters."""
    profile = np.asarray(profile, np.float32)
    first, last = np.asarray(start, np.float32), np.asarray(end, np.float32)
    along = (last - first) / np.linalg.norm(last - first)
    left = np.array([-along[1], along[0], 0.0], np.float32)
    offset = profile[:, :1] * left + profile[:, 1:] * np.array([0, 0, 1], np.float32)
    return sheet(np.stack([first + offset, last + offset], 1), surface, tint)


def normals(corners: np.ndarray) -> np.ndarray:
    """float32 [T, 3]: normals with length twice the area; np.cross would take four times as long."""
    a, b = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    return np.stack([a[:, k - 2] * b[:, k - 1] - a[:, k - 1] * b[:, k - 2] for k in range(3)], -1)


_CORNERS = np.array([(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float32)
_BOX = np.array(
    [
        (0, 1, 3), (0, 3, 2), (4, 6, 7), (4, 7, 5), (0, 4, 5), (0, 5, 1),
        (2, 3, 7), (2, 7, 6), (0, 2, 6), (0, 6, 4), (1, 5, 7), (1, 7, 3),
    ],
    np.int32,
)  # fmt: skip


@lru_cache
def _rounded_box(level: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A box with rounded edges: each vertex's corner (signs), its direction from the corner, and the triangles."""
    t = np.concatenate([np.linspace(-1, 0, level + 1), np.linspace(0, 1, level + 1)])
    sign = np.repeat([-1.0, 1.0], level + 1)
    slope = np.tan(np.pi / 4 * t)
    signs, directions = [], []
    for axis in range(3):
        for side in (-1.0, 1.0):
            a, b = (axis + 1) % 3, (axis + 2) % 3
            corner, direction = np.zeros((2, len(t), len(t), 3))
            corner[..., axis], direction[..., axis] = side, side
            corner[..., a], direction[..., a] = sign[:, None], slope[:, None]
            corner[..., b], direction[..., b] = sign[None], slope[None]
            signs.append(corner.reshape(-1, 3))
            directions.append(direction.reshape(-1, 3))
    directions = np.concatenate(directions)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    one = _lattice(len(t), len(t), closed=False)
    triangles = np.concatenate([one + face * len(t) ** 2 for face in range(6)])
    return np.concatenate(signs).astype(np.float32), directions.astype(np.float32), triangles.astype(np.int32)


@lru_cache(maxsize=512)
def _lattice(rows: int, columns: int, closed: bool) -> np.ndarray:
    """int32 [T, 3]: triangles of a grid of points; `closed` joins the last column to the first."""
    row, column = np.meshgrid(np.arange(rows - 1), np.arange(columns if closed else columns - 1), indexing="ij")
    after = (column + 1) % columns
    a, b = row * columns + column, row * columns + after
    c, d = a + columns, b + columns
    return np.stack([a, b, d, a, d, c], -1).reshape(-1, 3).astype(np.int32)


def _project_uv(vertices: np.ndarray, corners: np.ndarray, grain: bool) -> np.ndarray:
    axis = np.abs(normals(corners)).argmax(1)
    first = np.where(axis == 0, 1, 0)
    second = np.where(axis == 2, 1, 2)
    if grain:
        long = int(np.ptp(vertices, axis=0).argmax())
        first, second = np.where(second == long, second, first), np.where(second == long, first, second)
    pick = np.broadcast_to(np.stack([first, second], -1)[:, None], (len(axis), 3, 2))
    return np.take_along_axis(corners, pick, axis=2)


def _power(value: np.ndarray, exponent: float) -> np.ndarray:
    return np.sign(value) * np.abs(value) ** exponent


def _rotation(yaw: float) -> np.ndarray:
    cos, sin = np.cos(yaw), np.sin(yaw)
    return np.array([(cos, -sin, 0), (sin, cos, 0), (0, 0, 1)], np.float32)
