"""Procedural textures for houses: floors, walls, fabric, leaves, paintings and the view from the window.

Textures are gray or pale; the color is the tint of each triangle, so one texture serves many objects.
"""

from collections.abc import Collection
from enum import IntEnum
from functools import lru_cache

import numpy as np

from shoal.scene.scene import Material


class SurfaceType(IntEnum):
    """Surface type; its value is the index of the material in every house."""

    PLAIN = 0
    WOOD = 1
    PLANKS = 2
    PARQUET = 3
    TILES = 4
    CARPET = 5
    PLASTER = 6
    PAPER_STRIPES = 7
    PAPER_LEAVES = 8
    WALL_TILES = 9
    BRICK = 10
    FABRIC = 11
    MARBLE = 12
    RUG = 13
    LEAF = 14
    PICTURE_A = 15
    PICTURE_B = 16
    PICTURE_C = 17
    VIEW = 18
    CHECKS = 19


SIZE = {
    SurfaceType.WOOD: 0.8,
    SurfaceType.PLANKS: 1.6,
    SurfaceType.PARQUET: 1.2,
    SurfaceType.TILES: 1.2,
    SurfaceType.CARPET: 0.6,
    SurfaceType.PLASTER: 1.5,
    SurfaceType.PAPER_STRIPES: 0.6,
    SurfaceType.PAPER_LEAVES: 0.8,
    SurfaceType.WALL_TILES: 0.6,
    SurfaceType.BRICK: 0.96,
    SurfaceType.FABRIC: 0.25,
    SurfaceType.MARBLE: 1.0,
    SurfaceType.CHECKS: 0.4,
}
"""Meters per repeat of a texture; surface types without an entry are single images without a scale."""


def house_materials(seed: int, used: Collection[int]) -> tuple[tuple[Material, ...], tuple[np.ndarray, ...]]:
    """The materials of a house, in the order of `SurfaceType`, and the textures, uint8 [size, size, 4], of `used`."""
    painters = {
        SurfaceType.WOOD: _wood,
        SurfaceType.PLANKS: _planks,
        SurfaceType.PARQUET: _parquet,
        SurfaceType.TILES: _tiles,
        SurfaceType.CARPET: _carpet,
        SurfaceType.PLASTER: _plaster,
        SurfaceType.PAPER_STRIPES: _stripes,
        SurfaceType.PAPER_LEAVES: _leafy,
        SurfaceType.WALL_TILES: _wall_tiles,
        SurfaceType.BRICK: _brick,
        SurfaceType.FABRIC: _fabric,
        SurfaceType.MARBLE: _marble,
        SurfaceType.RUG: _rug,
        SurfaceType.LEAF: _leaf,
        SurfaceType.PICTURE_A: _landscape,
        SurfaceType.PICTURE_B: _abstract,
        SurfaceType.PICTURE_C: _still,
        SurfaceType.VIEW: _view,
        SurfaceType.CHECKS: _checks,
    }
    materials, textures = [], []
    for surface in SurfaceType:
        name = surface.name.lower()
        if surface not in painters or surface not in used:
            materials.append(Material(name))
            continue
        # One random stream per surface type, so a texture does not depend on `used`. Streams below 64 are for plans and
        # shells.
        rng = np.random.Generator(np.random.Philox(key=np.array([seed, 64 + surface], np.uint64)))
        picture = painters[surface](rng)
        pixels = np.full((*picture.shape[:2], 4), 255, np.uint8)
        pixels[..., : picture.shape[-1]] = np.clip(picture * 255 + 0.5, 0, 255)
        materials.append(Material(name, texture=len(textures), cutoff=0.5 if surface == SurfaceType.LEAF else 0.0))
        textures.append(pixels)
    return tuple(materials), tuple(textures)


def noise(rng: np.random.Generator, size: int, roughness: float = 1.5, stretch: tuple[float, float] = (1, 1)):
    """Tileable noise, float32 [size, size], mean 0, std 1; `stretch` elongates it along rows and columns."""
    weight = _spectrum(size, roughness, stretch)
    cloud = np.fft.irfft2(weight * np.exp(2j * np.pi * rng.random(weight.shape)), s=(size, size))
    return (cloud / (cloud.std() + 1e-9)).astype(np.float32)


@lru_cache
def _spectrum(size: int, roughness: float, stretch: tuple[float, float]) -> np.ndarray:
    row = np.fft.fftfreq(size)[:, None] * stretch[0]
    column = np.fft.rfftfreq(size)[None] * stretch[1]
    weight = (row**2 + column**2 + (0.7 / size) ** 2) ** (-roughness / 2)
    weight[0, 0] = 0.0
    return weight


def _colored(value: np.ndarray, color=(1.0, 1.0, 1.0)) -> np.ndarray:
    return value[..., None] * np.asarray(color, np.float32)


def _grid(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Fractional coordinates (v, u) of each pixel, float32 [size, size]; v points up."""
    place = ((np.arange(size) + 0.5) / size).astype(np.float32)
    return np.broadcast_to(place[::-1, None], (size, size)), np.broadcast_to(place[None], (size, size))


def _joint(place: np.ndarray, count: float, width: float) -> np.ndarray:
    """1 in the joints between `count` equal tiles, 0 elsewhere; `width` is a fraction of a tile."""
    t = (place * count) % 1.0
    return ((t < width) | (t > 1 - width)).astype(float)


def _wood(rng):
    size = 128
    long = noise(rng, size, 1.6, (1.0, 9.0))
    v, _ = _grid(size)
    rings = np.sin(2 * np.pi * (5 * v + 0.35 * long))
    return _colored(0.88 + 0.03 * rings + 0.025 * noise(rng, size, 1.2, (1.0, 12.0)), (1.0, 0.985, 0.96))


def _planks(rng):
    size, rows = 256, 12
    v, u = _grid(size)
    row = (v * rows).astype(int)
    shift = rng.random(rows)[row]
    board = ((u + shift) * 2).astype(int) % 2 + 2 * row
    shade = 0.86 + 0.07 * (rng.random(2 * rows)[board] - 0.5) * 2
    grain = 0.03 * noise(rng, size, 1.4, (1.0, 10.0))
    gaps = np.maximum(_joint(v, rows, 0.035), _joint((u + shift) % 1.0, 2, 0.004))
    warm = 0.03 * (rng.random(2 * rows)[board] - 0.5)
    value = (shade + grain) * (1 - 0.33 * gaps)
    return np.stack([value + warm, value, value - warm], -1)


def _parquet(rng):
    size, cells, strips = 256, 4, 4
    v, u = _grid(size)
    row, column = (v * cells).astype(int), (u * cells).astype(int)
    turned = (row + column) % 2 == 1
    along, across = np.where(turned, v, u), np.where(turned, u, v)
    strip = (across * cells * strips).astype(int) % strips
    board = (row * cells + column) * strips + strip
    shade = 0.84 + 0.09 * (rng.random(cells * cells * strips)[board] - 0.5) * 2
    lines = noise(rng, size, 1.4, (1.0, 8.0))
    grain = np.where(turned, lines.T, lines)
    gaps = np.maximum(_joint(across, cells * strips, 0.05), _joint(along, cells, 0.012))
    return _colored((shade + 0.04 * grain) * (1 - 0.4 * gaps), (1.0, 0.98, 0.95))


def _tiles(rng):
    size, cells = 128, 4
    v, u = _grid(size)
    shade = 0.9 + 0.06 * (rng.random((cells, cells)) - 0.5)
    shade = shade[(v * cells).astype(int), (u * cells).astype(int)] + 0.02 * noise(rng, size, 1.6)
    gaps = np.maximum(_joint(v, cells, 0.02), _joint(u, cells, 0.02))
    return _colored(shade * (1 - 0.3 * gaps))


def _checks(rng):
    size = 128
    v, u = _grid(size)
    dark = ((v * 2).astype(int) + (u * 2).astype(int)) % 2
    return _colored(0.95 - 0.42 * dark + 0.015 * noise(rng, size, 1.4))


def _carpet(rng):
    size = 128
    return _colored(0.85 + 0.05 * noise(rng, size, 0.2) + 0.025 * noise(rng, size, 1.6))


def _plaster(rng):
    size = 128
    return _colored(0.955 + 0.009 * noise(rng, size, 1.7) + 0.006 * noise(rng, size, 0.3))


def _stripes(rng):
    size = 128
    _, u = _grid(size)
    count = int(rng.integers(3, 7))
    wave = (np.sin(2 * np.pi * count * u) > rng.uniform(-0.5, 0.5)).astype(float)
    return _colored(0.88 + 0.08 * wave + 0.006 * noise(rng, size, 0.3), (1.0, 0.99, 0.97))


def _leafy(rng):
    size = 128
    v, u = _grid(size)
    value = np.full((size, size), 0.96)
    for k in range(18):
        cu, cv, angle = (k * 0.618034) % 1.0, (k + 0.5) / 18, rng.uniform(0, np.pi)
        du, dv = (u - cu + 0.5) % 1.0 - 0.5, (v - cv + 0.5) % 1.0 - 0.5
        a, b = du * np.cos(angle) + dv * np.sin(angle), dv * np.cos(angle) - du * np.sin(angle)
        inside = (a / 0.11) ** 2 + (b / (0.035 * np.clip(1.2 - np.abs(a) / 0.11, 0.05, 1))) ** 2 < 1
        value = np.where(inside, 0.82 + 0.06 * (np.abs(b) > 0.006), value)
    return _colored(value, (0.99, 1.0, 0.97))


def _wall_tiles(rng):
    size, cells = 128, 4
    v, u = _grid(size)
    shade = 0.93 + 0.035 * (rng.random((cells, cells)) - 0.5)
    shade = shade[(v * cells).astype(int), (u * cells).astype(int)]
    gaps = np.maximum(_joint(v, cells, 0.03), _joint(u, cells, 0.03))
    return _colored(shade * (1 - 0.17 * gaps))


def _brick(rng):
    size, rows, per_row = 128, 12, 4
    v, u = _grid(size)
    row = (v * rows).astype(int)
    moved = (u + 0.5 / per_row * (row % 2)) % 1.0
    brick = row * per_row + (moved * per_row).astype(int)
    shade = 0.78 + 0.2 * (rng.random(rows * per_row)[brick] - 0.5) + 0.04 * noise(rng, size, 1.0)
    gaps = np.maximum(_joint(v, rows, 0.07), _joint(moved, per_row, 0.022))
    return shade[..., None] * (1 - gaps[..., None]) + gaps[..., None] * np.array([0.9, 0.88, 0.86])


def _fabric(rng):
    size = 128
    v, u = _grid(size)
    weave = np.sin(2 * np.pi * 24 * u) * np.sin(2 * np.pi * 24 * v)
    return _colored(0.92 + 0.045 * weave + 0.012 * noise(rng, size, 0.5))


def _marble(rng):
    size = 128
    veins = np.abs(np.sin(2 * np.pi * (0.4 * noise(rng, size, 1.9))))
    return _colored(0.9 - 0.14 * (1 - veins) ** 5 + 0.015 * noise(rng, size, 1.2))


def _rug(rng):
    size = 256
    v, u = _grid(size)
    du, dv = np.abs(u - 0.5) * 2, np.abs(v - 0.5) * 2
    edge = np.maximum(du, dv)
    style = int(rng.integers(3))
    if style == 0:
        value = 0.75 + 0.2 * np.sign(np.sin(14 * du + 0.3) * np.sin(14 * dv + 0.3))
    elif style == 1:
        value = 0.72 + 0.22 * np.sign(np.sin(20 * (du + dv)))
    else:
        value = 0.85 - 0.3 * ((v * 14).astype(int) % 3 == 0)
    value = np.where((edge > 0.8) & (edge < 0.87), 0.5, np.where(edge > 0.87, 0.92, value))
    paper = _colored(value + 0.035 * noise(rng, size, 0.2))
    warm = np.where((edge < 0.8)[..., None], np.array([1.0, 0.95, 0.9]), np.array([0.93, 0.95, 1.0]))
    return paper * warm


def _leaf(rng):
    size = 64
    v, u = _grid(size)
    half = 0.48 * np.sin(np.pi * np.clip(v, 0, 1) ** 0.8) ** 0.75
    across = np.abs(u - 0.5)
    rib = (across < 0.025) | (np.abs((v * 7 - across * 5) % 1.0 - 0.5) < 0.07)
    value = 0.82 + 0.14 * rib + 0.03 * noise(rng, size, 1.2)
    alpha = (across < half).astype(float)
    return np.concatenate([_colored(value, (0.97, 1.0, 0.92)), alpha[..., None]], -1)


def _sky(size: int, rng) -> np.ndarray:
    v, _ = _grid(size)
    cloud = np.clip(0.5 + 0.4 * noise(rng, size, 1.7, (1.6, 1.0)), 0, 1) * np.clip(v * 1.5, 0, 1)
    blue = np.array([0.62, 0.78, 0.95]) * (1 - v[..., None]) + np.array([0.45, 0.66, 0.93]) * v[..., None]
    return blue + (np.array([0.97, 0.98, 1.0]) - blue) * (0.85 * cloud[..., None])


def _ridge(rng, size: int, rough: float) -> np.ndarray:
    """A line of hills, float64 [1, size], mean 0, std 1."""
    weight = _spectrum(size, rough, (1, 1))[0]
    line = np.fft.irfft(weight * np.exp(2j * np.pi * rng.random(len(weight))), n=size)
    return (line / (line.std() + 1e-9))[None]


def _view(rng):
    size = 256
    v, _ = _grid(size)
    picture = _sky(size, rng)
    for height, swing, color in (
        (0.44, 0.03, (0.55, 0.66, 0.72)),
        (0.38, 0.02, (0.42, 0.56, 0.42)),
        (0.32, 0.025, (0.33, 0.48, 0.28)),
    ):
        below = v < height + swing * _ridge(rng, size, 1.2)
        shade = np.asarray(color) * (1 + 0.07 * noise(rng, size, 0.9))[..., None]
        picture = np.where(below[..., None], shade, picture)
    lawn = (np.array([0.45, 0.6, 0.32]) + 0.15 * (0.22 - v[..., None])) * (1 + 0.03 * noise(rng, size, 0.7))[..., None]
    return np.where((v < 0.22)[..., None], lawn, picture)


def _landscape(rng):
    size = 128
    v, u = _grid(size)
    dusk = rng.random()
    sky = np.array([0.95, 0.75 - 0.2 * dusk, 0.5 + 0.3 * dusk]) * (1 - v[..., None]) + 0.75 * v[..., None] * np.array(
        [0.5, 0.65, 0.95]
    )
    sun = (u - rng.uniform(0.25, 0.75)) ** 2 + (v - 0.7) ** 2 < 0.006
    picture = np.where(sun[..., None], np.array([1.0, 0.93, 0.7]), sky)
    for k in range(4):
        below = v < 0.55 - 0.12 * k + 0.05 * _ridge(rng, size, 1.8)
        color = np.array([0.25 + 0.04 * k, 0.34 + 0.07 * k, 0.45 - 0.06 * k])
        picture = np.where(below[..., None], color, picture)
    return picture


def _abstract(rng):
    size = 128
    v, u = _grid(size)
    picture = np.ones((size, size, 3)) * np.array([0.95, 0.93, 0.88])
    palette = np.array([(0.8, 0.28, 0.2), (0.16, 0.3, 0.5), (0.92, 0.72, 0.25), (0.12, 0.12, 0.14), (0.35, 0.55, 0.5)])
    for _ in range(9):
        cu, cv, w, h = rng.uniform(0.1, 0.9), rng.uniform(0.1, 0.9), rng.uniform(0.05, 0.25), rng.uniform(0.05, 0.25)
        if rng.random() < 0.5:
            inside = (np.abs(u - cu) < w) & (np.abs(v - cv) < h)
        else:
            inside = (u - cu) ** 2 + (v - cv) ** 2 < (0.6 * w) ** 2
        picture = np.where(inside[..., None], palette[int(rng.integers(5))], picture)
    return picture


def _still(rng):
    size = 128
    v, u = _grid(size)
    picture = np.where((v < 0.35)[..., None], np.array([0.5, 0.36, 0.24]), np.array([0.78, 0.8, 0.72]))
    vase = (np.abs(u - 0.5) < 0.09 + 0.05 * np.sin(9 * v)) & (v > 0.2) & (v < 0.52)
    picture = np.where(vase[..., None], np.array([0.25, 0.38, 0.55]), picture)
    for _ in range(14):
        cu, cv = rng.normal(0.5, 0.13), rng.normal(0.68, 0.09)
        color = np.array([rng.uniform(0.7, 1), rng.uniform(0.2, 0.8), rng.uniform(0.2, 0.5)])
        picture = np.where(((u - cu) ** 2 + (v - cv) ** 2 < 0.0035)[..., None], color, picture)
    return picture * (1 + 0.04 * noise(rng, size, 0.8))[..., None]
