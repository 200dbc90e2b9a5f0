"""Walkable ground of scenes: a grid of cells in up to four levels, computed on the device by casting rays.

An agent can stand on a cell if the floor is not too steep, the free height is at least the agent's height, and
obstacles are farther away than the agent's radius. `clearance` is the distance to the nearest obstacle in meters. It is
interpolated between cell centers, so that agents slide smoothly along walls in any direction.

A survey is cached on disk with the prepared scene. A copy on the host answers queries without waiting for the device.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import no_type_check

import numpy as np
import torch
import warp as wp

from shoal.core.errors import ShoalError, require
from shoal.core.launch import Plan, init_warp
from shoal.core.store import free_memory, warp_view
from shoal.nav import regions, walk
from shoal.nav.regions import find_floor_cells, join_regions, name_regions
from shoal.nav.walk import CLEARANCE_TOLERANCE, NO_FLOOR, Ground, cell_center, neighbor
from shoal.render import cast
from shoal.render.cast import Hit, Table, Words, face_normal, trace
from shoal.scene.cache import cached
from shoal.scene.memory import SceneMemory
from shoal.scene.pack import PackedScene

wp.set_module_options({"enable_backward": False})

MAX_LEVELS = 4
"""Maximum number of floors above one another."""

LEVEL_HEIGHT = 3.5
"""Assumed height of a level, in meters."""

DIRECTIONS = wp.constant(16)
"""Horizontal rays around a cell center, per height."""

HEIGHTS = wp.constant(4)
"""Heights at which rays are cast, from the maximum step height to the agent's head."""

MAX_CLEARANCE = wp.constant(1.0)
"""Largest clearance that is measured, in meters."""

RAY_OFFSET = wp.constant(1.0e-3)
"""Distance by which rays begin behind the cell center, in meters, so that they hit a wall through the center."""

INDOOR_FRACTION = 0.25
"""If at least this fraction of the floor has something above it, floor without anything above it (roofs) is removed."""

BYTES_PER_CELL = 16
"""Height, clearance, region and start cell."""

LINK_BYTES = 32
"""Bytes per cell for the links between cells, while distance fields are solved."""

ARRAYS = ("height", "clearance", "region")
"""Arrays of a survey, one value per cell."""

MIN_REGION_AREA = 4.0
"""Minimum area of a region that episodes start in, in m²."""


@dataclass(frozen=True)
class Body:
    """Size of an agent, and the floor it can walk on."""

    radius: float = 0.1
    """Minimum distance between its center and obstacles, in meters."""
    height: float = 1.5
    """Free height needed above the floor, in meters."""
    max_step_height: float = 0.2
    """Highest step up or down, in meters."""
    max_slope: float = 45.0
    """Steepest floor, in degrees."""


@dataclass(frozen=True)
class Survey:
    """The ground of one scene, on the host."""

    dims: tuple[int, int, int]
    """Cells along x, cells along y, levels."""
    origin: np.ndarray
    """float32 [3]: lower corner of the grid [m]."""
    height: np.ndarray
    """float32 [cells]: height of the floor [m], NO_FLOOR where there is none."""
    clearance: np.ndarray
    """float32 [cells]: distance to the nearest obstacle [m]."""
    region: np.ndarray
    """int32 [cells]: connected region, numbered by its first cell; -1 where no agent can stand."""
    area: np.ndarray
    """float32 [cells]: area of the region with this number [m²]."""


class GroundMemory:
    """Walkable ground of every row of a scene memory, up to `cells` cells per row over all levels."""

    def __init__(self, memory: SceneMemory, cells: int, body: Body | None = None, cell_size: float = 0.1):
        init_warp()
        self.memory, self.cells, self.cell_size = memory, cells, cell_size
        self.body = body or Body()
        check_cell_size(cell_size, self.body.radius)
        self.device = memory.device
        rows = memory.rows

        def make(*shape: int, dtype: torch.dtype = torch.float32, value: float = 0) -> torch.Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=self.device)

        self.origin = make(3)
        """float32 [rows, 3]: lower corner of the grid [m]."""
        self.dims = make(3, dtype=torch.int32)
        """int32 [rows, 3]: cells along x, cells along y, levels."""
        self.height = make(cells, value=NO_FLOOR)
        """float32 [rows, cells]: height of the floor [m], NO_FLOOR where there is none."""
        self.clearance = make(cells)
        """float32 [rows, cells]: distance to the nearest obstacle [m], at most 1; 0 where there is no floor."""
        self.region = make(cells, dtype=torch.int32, value=-1)
        """int32 [rows, cells]: connected region, numbered by its first cell; -1 where no agent can stand."""
        self.arrays = Ground()
        self.arrays.cell_size = cell_size
        self.arrays.radius = self.body.radius
        self.arrays.max_step_height = self.body.max_step_height
        self.arrays.origin = wp.from_torch(self.origin, dtype=wp.vec3)
        self.arrays.dims = wp.from_torch(self.dims, dtype=wp.vec3i)
        self.arrays.height = wp.from_torch(self.height)
        self.arrays.clearance = wp.from_torch(self.clearance)
        self.arrays.region = wp.from_torch(self.region)
        self.surveys: dict[int, Survey] = {}
        """Row -> copy of its ground on the host."""

    @staticmethod
    def cells_needed(bounds: np.ndarray, cell_size: float) -> int:
        """Cells of a grid over a scene, over all levels that fit into its height."""
        width, depth = _grid(bounds, cell_size)
        return width * depth * min(MAX_LEVELS, 1 + int(float(bounds[1][2] - bounds[0][2]) // LEVEL_HEIGHT))

    @classmethod
    def cells_per_row(
        cls,
        scenes: Sequence[PackedScene],
        cell_size: float,
        device: torch.device,
        rows: int = 1,
        goals: int = 1,
        headroom: float = 1,
    ) -> int:
        """Cells per row for scenes up to `headroom` times the largest given one; refuses more than the device holds."""
        largest = max(scenes, key=lambda scene: cls.cells_needed(scene.bounds, cell_size))
        cells = int(headroom * cls.cells_needed(largest.bounds, cell_size))
        need, free = cells * (rows * (BYTES_PER_CELL + 2 * goals) + 4 * goals + LINK_BYTES), free_memory(device)
        if need > free:
            (x0, y0, _), (x1, y1, _) = largest.bounds
            raise ShoalError(
                f"{largest.name} is {x1 - x0:.0f} x {y1 - y0:.0f} m: its ground needs {need / 1e9:.1f} GB, but "
                f"{free / 1e9:.1f} GB are free; set its unit (--scale 0.01: centimeters) or a larger --cell-size."
            )
        return cells

    def check_capacity(self, scene: PackedScene) -> None:
        """Refuse a scene that has more cells than a row holds."""
        need = self.cells_needed(scene.bounds, self.cell_size)
        if need > self.cells:
            raise ShoalError(
                f"{scene.name} needs {need} cells of {self.cell_size} m, more than the capacity of {self.cells}; "
                "use a larger --cell-size, or load larger scenes first."
            )

    def survey(self, row: int) -> None:
        """Compute the ground of the scene in a row on torch's current stream, or read it from the cache.

        Only a scene that is not in the cache makes the host wait for the device.
        """
        scene = self.memory.scene(row)
        if scene is None:
            raise ShoalError(f"Scene slot {row} is empty; load a scene before computing its walkable floor.")
        self.check_capacity(scene)
        width, depth = _grid(scene.bounds, self.cell_size)
        dims = (width, depth, max(1, min(MAX_LEVELS, self.cells // (width * depth))))
        x0, y0, z0 = scene.bounds[0]
        origin = np.array([x0 - self.cell_size, y0 - self.cell_size, z0], np.float32)
        upload(self.origin[row], torch.from_numpy(origin))
        upload(self.dims[row], torch.tensor(dims, dtype=torch.int32))

        def compute() -> Survey:
            return self._make_survey(dims, origin, *self._compute(row, scene, dims))

        def pack(survey: Survey) -> tuple[dict[str, np.ndarray], dict]:
            return {name: getattr(survey, name) for name in ARRAYS}, {}

        def unpack(arrays: dict[str, np.ndarray], _: dict) -> Survey:
            return self._make_survey(dims, origin, *(arrays[name] for name in ARRAYS))

        if not scene.key:  # built in memory, not cached
            self.surveys[row] = compute()
            return
        # Results differ in the last bit between devices, and runs must be reproducible.
        key = _key(scene.key, astuple(self.body), self.cell_size, dims, self.device.type)
        self.surveys[row] = cached(key, compute, pack, unpack)
        self._upload(row)

    def navigable_cells(self, row: int, min_area: float = 0.0) -> np.ndarray:
        """int64 [n]: cells of a row whose center an agent can stand on, in regions of at least `min_area` m²."""
        found = self.surveys[row]
        standable = np.flatnonzero((found.clearance >= np.float32(self.body.radius)) & (found.region >= 0))
        return standable[found.area[found.region[standable]] >= min_area]

    def cell_centers(self, row: int, cells: np.ndarray) -> np.ndarray:
        """float32 [n, 3]: centers of cells, on their floor [m]."""
        found = self.surveys[row]
        width, depth, levels = found.dims
        return cell_centers(found.origin[:2], self.cell_size, found.height.reshape(levels, depth, width), cells)

    def _compute(self, row: int, scene: PackedScene, dims: tuple[int, int, int]) -> list[np.ndarray]:
        """Compute height, clearance and region of a scene on the device, and copy them to the host."""
        columns, cells = dims[0] * dims[1], dims[0] * dims[1] * dims[2]
        self._clear(row)
        cover = torch.zeros(self.cells, dtype=torch.int32, device=self.device)
        top = float(scene.bounds[1][2]) + 1.0
        upright = float(np.cos(np.radians(np.float32(self.body.max_slope))))
        shape = [self.arrays, row, warp_view(self.memory.words, Words), wp.from_torch(self.memory.table)]
        plan = Plan(self.device, cells)
        sizes = dict(unit=64, block=128)
        plan.add_kernel(find_floors, columns, [*shape, top, upright, self.body.height, wp.from_torch(cover)], **sizes)
        plan.add_function(lambda: self._remove_roofs(row, cover))
        plan.add_kernel(find_obstacles, cells, [*shape, self.body.height], **sizes)
        plan.add_kernel(find_edges, cells, [self.arrays, row], **sizes)
        plan.add_kernel(find_floor_cells, cells, [self.arrays, row], **sizes)
        # One thread on a CPU: Warp's atomic functions are not thread-safe there.
        plan.add_kernel(join_regions, cells, [self.arrays, row], unit=cells, block=128)
        plan.add_kernel(name_regions, cells, [self.arrays, row], unit=cells, block=128)
        plan()
        bits = torch.stack([getattr(self, name)[row, :cells].view(torch.int32) for name in ARRAYS])
        height, clearance, region = bits.cpu().numpy()  # deliberate sync
        return [height.view(np.float32), clearance.view(np.float32), region]

    def _upload(self, row: int) -> None:
        """Copy a cached survey to the device."""
        cells = len(self.surveys[row].height)
        for name in ARRAYS:
            upload(getattr(self, name)[row, :cells], torch.from_numpy(getattr(self.surveys[row], name)))
        self._clear(row, cells)

    def _clear(self, row: int, first: int = 0) -> None:
        """Remove the floor of a row, from cell `first` on."""
        self.height[row, first:] = NO_FLOOR
        self.clearance[row, first:] = 0.0
        self.region[row, first:] = -1

    def _make_survey(
        self,
        dims: tuple[int, int, int],
        origin: np.ndarray,
        height: np.ndarray,
        clearance: np.ndarray,
        region: np.ndarray,
    ) -> Survey:
        cells = dims[0] * dims[1] * dims[2]
        for array, kind in ((height, np.float32), (clearance, np.float32), (region, np.int32)):
            if array.shape != (cells,) or array.dtype != kind:
                raise ValueError("the cached ground is that of another scene")
        area = np.bincount(region[region >= 0], minlength=cells).astype(np.float32) * np.float32(self.cell_size**2)
        return Survey(dims, origin, height, clearance, region, area)

    def _remove_roofs(self, row: int, cover: torch.Tensor) -> None:
        there = self.height[row] > NO_FLOOR
        roofed = (cover > 0) & there
        indoors = roofed.sum() >= INDOOR_FRACTION * there.sum()
        self.height[row] = torch.where(roofed | ~indoors, self.height[row], NO_FLOOR)


def check_cell_size(cell_size: float, radius: float) -> None:
    """Refuse cells so large that a thin wall between two centers, half a cell from each, would not block agents."""
    largest = 2 * (radius - CLEARANCE_TOLERANCE)
    rule = f"below {largest:g}, twice the agent's radius, or agents walk through thin walls"
    require("cell-size", cell_size, cell_size < largest, rule)


def cell_centers(origin: np.ndarray, cell_size: float, height: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """[n, 3]: centers of cells on their floor [m], in the dtype of `origin`; `height` is [level, row, column]."""
    _, depth, width = height.shape
    y, x = np.divmod(cells % (depth * width), width)
    flat = origin + (np.stack([x, y], 1).astype(origin.dtype) + 0.5) * cell_size
    return np.concatenate([flat, height.reshape(-1)[cells][:, None]], 1)


def upload(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy to the device on torch's current stream, without waiting."""
    if target.is_cuda and not values.is_cuda:
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)


def _key(*parts) -> str:
    """Key of a cache entry; depends on everything that the survey depends on."""
    return "ground-" + hashlib.sha256(repr((_code_hash(), *parts)).encode()).hexdigest()


@cache
def _code_hash() -> str:
    """Hash of the code that computes the ground."""
    code = [Path(path).read_bytes() for path in (__file__, regions.__file__, walk.__file__, cast.__file__)]
    return hashlib.sha256(b"".join(code)).hexdigest()


def _grid(bounds: np.ndarray, cell_size: float) -> tuple[int, int]:
    """Cells along x and y over a scene, with a border of one cell."""
    (x0, y0, _), (x1, y1, _) = bounds
    return int((x1 - x0) / cell_size) + 3, int((y1 - y0) / cell_size) + 3


@wp.kernel
@no_type_check
def find_floors(
    first: int,
    ground: Ground,
    row: int,
    words: Words,
    table: Table,
    top: float,
    upright: float,
    tall: float,
    cover: wp.array(dtype=int),
):
    """From above, find every surface that is flat enough and has free height for the agent; the lowest comes first."""
    i = first + wp.tid()
    dims = ground.dims[row]
    center = cell_center(ground, row, i)
    total = dims[0] * dims[1]
    found = int(0)
    ceiling = float(1.0e6)
    z = top
    searching = bool(True)
    while searching:
        hit = Hit()
        hit.distance = float(1.0e5)
        hit.triangle = -1
        hit = trace(words, table, row, wp.vec3(center[0], center[1], z), wp.vec3(0.0, 0.0, -1.0), hit)
        searching = hit.triangle >= 0
        if searching:
            z = z - hit.distance
            face = face_normal(words, table, row, hit.triangle)
            if wp.abs(face[2]) >= upright and ceiling - z >= tall:
                # Each new floor is the lowest so far; beyond the maximum, the highest are dropped.
                for k in range(wp.min(found, dims[2] - 1)):
                    s = wp.min(found, dims[2] - 1) - k
                    ground.height[row, s * total + i] = ground.height[row, (s - 1) * total + i]
                    cover[s * total + i] = cover[(s - 1) * total + i]
                ground.height[row, i] = z
                cover[i] = wp.where(ceiling < 1.0e5, 1, 0)
                found += 1
            ceiling = z
            z = z - 0.001


@wp.kernel
@no_type_check
def find_obstacles(first: int, ground: Ground, row: int, words: Words, table: Table, tall: float):
    """Distance to the nearest obstacle around a cell center, between step height and the agent's head."""
    i = first + wp.tid()
    floor = ground.height[row, i]
    if floor > NO_FLOOR:
        center = cell_center(ground, row, i)
        hit = Hit()
        hit.distance = MAX_CLEARANCE + RAY_OFFSET
        hit.triangle = -1
        for k in range(HEIGHTS):
            z = (
                floor
                + ground.max_step_height
                + 0.05
                + (tall - ground.max_step_height - 0.1) * float(k) / float(HEIGHTS - 1)
            )
            for d in range(DIRECTIONS):
                angle = 6.2831853 * (float(d) + 0.25 * float(k)) / float(DIRECTIONS)
                direction = wp.vec3(wp.cos(angle), wp.sin(angle), 0.0)
                eye = wp.vec3(center[0], center[1], z) - RAY_OFFSET * direction
                hit = trace(words, table, row, eye, direction, hit)
        ground.clearance[row, i] = wp.max(hit.distance - RAY_OFFSET, 0.0)


@wp.kernel
@no_type_check
def find_edges(first: int, ground: Ground, row: int):
    """Limit the clearance of cells beside an open edge of the floor to half a cell, so that no agent steps over it."""
    i = first + wp.tid()
    if ground.height[row, i] > NO_FLOOR:
        for k in range(8):
            away = wp.where(k < 4, 1.0, 1.4143) * ground.cell_size
            if neighbor(ground, row, i, k) < 0 and ground.clearance[row, i] > away:
                ground.clearance[row, i] = 0.5 * ground.cell_size
