"""Walkable ground of scenes: a grid of cells in up to a few storeys, found by casting rays on the device.

A cell of a storey is a place where an agent may stand if the floor is not too steep, nothing is lower than the agent is
high, and walls and furniture are farther away than its radius. `clearance` is the distance to the nearest obstacle, in
meters; between the cells' middles it is interpolated, so that walls in any direction are smooth to slide along.

A survey is kept on disk beside the prepared scene, and on the host: what is asked of it there waits for no device.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import warp as wp

from shoal.core.errors import ShoalError, require
from shoal.core.launch import Plan, init_warp
from shoal.core.store import free_memory, warp_view
from shoal.nav import walk
from shoal.nav.walk import CLOSE, NOWHERE, Ground, beside_diagonal, cell_middle, is_clear, neighbor
from shoal.render import cast
from shoal.render.cast import Hit, Table, Words, face_normal, trace
from shoal.scene.cache import cached
from shoal.scene.memory import SceneMemory
from shoal.scene.pack import PackedScene

wp.set_module_options({"enable_backward": False})

STOREYS = 4
"""Floors above one another that are told apart."""

STOREY = 3.5
"""Meters that a storey is high."""

DIRECTIONS = wp.constant(16)
HEIGHTS = wp.constant(4)
"""Rays around each place, at so many heights between the climb and the head."""

FAR = wp.constant(1.0)
"""Meters: obstacles farther away than this are not told apart."""

BEHIND = wp.constant(1.0e-3)
"""Meters behind the middle of a cell where rays begin: a wall whose face goes through the middle is met."""

SLACK = wp.constant(0.45)
"""Parts of a cell that the middle of a cell beside a wall may be nearer to it than an agent, to belong to the floor."""

COVERED = 0.25
"""If this part of the floor or more has something above it, the rest is roof or garden and nobody walks there."""

BYTES = 16
"""Of a cell: height, clearance, region, and a place among those to start from."""

LINK_BYTES = 32
"""Of a cell while fields are solved: the cells around it."""

PARTS = ("height", "clearance", "region")
"""What is found of every cell."""

SMALLEST_REGION = 4.0
"""Square meters of connected floor that episodes may begin on."""


@dataclass(frozen=True)
class Body:
    """Who walks."""

    radius: float = 0.1
    """Meters from obstacles that its middle must keep."""
    height: float = 1.5
    """Meters of free space above the floor."""
    climb: float = 0.2
    """Meters of a step that it can take up or down."""
    slope: float = 45.0
    """Degrees of the steepest floor."""


@dataclass(frozen=True)
class Survey:
    """The ground of one scene, on the host."""

    size: tuple[int, int, int]
    """Cells along x, along y, and storeys."""
    origin: np.ndarray
    """float32 [3]: the corner of least x and y, and the least height."""
    height: np.ndarray
    """float32 [cells]: height of the floor, NOWHERE where there is none."""
    clearance: np.ndarray
    """float32 [cells]: meters to the nearest obstacle."""
    region: np.ndarray
    """int32 [cells]: the connected region, numbered by the first of its cells; -1 where nobody can stand."""
    area: np.ndarray
    """float32 [cells]: square meters of the region of that number."""


class GroundMemory:
    """Walkable ground for the rows of a scene memory, `cells` cells a row at most (all storeys together)."""

    def __init__(self, memory: SceneMemory, cells: int, body: Body | None = None, cell: float = 0.1):
        init_warp()
        self.memory, self.cells, self.cell = memory, cells, cell
        self.body = body or Body()
        check_cell(cell, self.body.radius)
        self.device = memory.device
        rows = memory.rows

        def make(*shape: int, dtype: torch.dtype = torch.float32, value: float = 0) -> torch.Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=self.device)

        self.origin = make(3)
        """float32 [rows, 3]: the corner of least x and y, and the least height."""
        self.size = make(3, dtype=torch.int32)
        """int32 [rows, 3]: cells along x, along y, and storeys."""
        self.height = make(cells, value=NOWHERE)
        """float32 [rows, cells]: height of the floor, NOWHERE where there is none."""
        self.clearance = make(cells)
        """float32 [rows, cells]: meters to the nearest obstacle, 1 at most; 0 where there is no floor."""
        self.region = make(cells, dtype=torch.int32, value=-1)
        """int32 [rows, cells]: the connected region, numbered by the first of its cells; -1 where nobody can stand."""
        self.ground = Ground()
        self.ground.cell = cell
        self.ground.radius = self.body.radius
        self.ground.climb = self.body.climb
        self.ground.origin = wp.from_torch(self.origin, dtype=wp.vec3)
        self.ground.size = wp.from_torch(self.size, dtype=wp.vec3i)
        self.ground.height = wp.from_torch(self.height)
        self.ground.clearance = wp.from_torch(self.clearance)
        self.ground.region = wp.from_torch(self.region)
        self.found: dict[int, Survey] = {}
        """Row -> what was found there."""

    @staticmethod
    def cells_needed(bounds, cell: float) -> int:
        """Cells of a grid over a scene, with as many storeys as may lie above one another in one as high as this."""
        width, depth = _grid(bounds, cell)
        return width * depth * min(STOREYS, 1 + int(float(bounds[1][2] - bounds[0][2]) // STOREY))

    @classmethod
    def cells_for(
        cls,
        scenes: Sequence[PackedScene],
        cell: float,
        device: torch.device,
        rows: int = 1,
        goals: int = 1,
        room: float = 1,
    ) -> int:
        """Cells of each row, `room` times as many as the largest of some scenes needs; refuses more than fit."""
        largest = max(scenes, key=lambda scene: cls.cells_needed(scene.bounds, cell))
        cells = int(room * cls.cells_needed(largest.bounds, cell))
        need, free = cells * (rows * (BYTES + 2 * goals) + 4 * goals + LINK_BYTES), free_memory(device)
        if need > free:
            (x0, y0, _), (x1, y1, _) = largest.bounds
            raise ShoalError(
                f"{largest.name} is {x1 - x0:.0f} x {y1 - y0:.0f} m: its ground would take {need / 1e9:.1f} GB, and "
                f"{free / 1e9:.1f} GB are free; say what its unit is (--scale 0.01: centimeters) or use larger cells."
            )
        return cells

    def check_room(self, scene: PackedScene) -> None:
        """Refuse a scene that has more cells than a row holds."""
        need = self.cells_needed(scene.bounds, self.cell)
        if need > self.cells:
            raise ShoalError(
                f"{scene.name} needs {need} cells of {self.cell} m, but there is room for {self.cells}; "
                "use larger cells or allow for more of them."
            )

    def survey(self, row: int) -> None:
        """Find the ground of the scene in a row, on torch's current stream; from the cache if it was found before.

        A scene that is in the cache holds up nobody; for another one the host waits for the device, once.
        """
        scene = self.memory.scene(row)
        if scene is None:
            raise ShoalError(f"Row {row} of the scene memory is empty; there is no ground to find.")
        self.check_room(scene)
        width, depth = _grid(scene.bounds, self.cell)
        size = (width, depth, max(1, min(STOREYS, self.cells // (width * depth))))
        x0, y0, z0 = scene.bounds[0]
        origin = np.array([x0 - self.cell, y0 - self.cell, z0], np.float32)
        send(self.origin[row], torch.from_numpy(origin))
        send(self.size[row], torch.tensor(size, dtype=torch.int32))

        def find() -> Survey:
            return self._survey(size, origin, *self._find(row, scene, size))

        def unpack(arrays: dict[str, np.ndarray], _: dict) -> Survey:
            return self._survey(size, origin, *(arrays[name] for name in PARTS))

        if not scene.key:  # made in memory
            self.found[row] = find()
            return
        # Bits differ from device to device, and runs that are repeated must not.
        key = _key(scene.key, astuple(self.body), self.cell, size, self.device.type)
        self.found[row] = cached(key, find, lambda found: ({name: getattr(found, name) for name in PARTS}, {}), unpack)
        self._place(row)

    def standing(self, row: int, smallest: float = 0.0) -> np.ndarray:
        """int64 [n]: the cells of a row whose middle an agent can stand on, in regions of `smallest` m² or more."""
        found = self.found[row]
        stands = np.flatnonzero((found.clearance >= np.float32(self.body.radius)) & (found.region >= 0))
        return stands[found.area[found.region[stands]] >= smallest]

    def middles(self, row: int, cells: np.ndarray) -> np.ndarray:
        """float32 [n, 3]: the middles of cells, on their floor."""
        found = self.found[row]
        width, depth, storeys = found.size
        return cell_middles(found.origin[:2], self.cell, found.height.reshape(storeys, depth, width), cells)

    def _find(self, row: int, scene: PackedScene, size: tuple[int, int, int]) -> list[np.ndarray]:
        """Height, clearance and region of a scene, found on the device and copied to the host."""
        columns, cells = size[0] * size[1], size[0] * size[1] * size[2]
        self._clear(row)
        cover = torch.zeros(self.cells, dtype=torch.int32, device=self.device)
        top = float(scene.bounds[1][2]) + 1.0
        upright = float(np.cos(np.radians(np.float32(self.body.slope))))
        shape = [self.ground, row, warp_view(self.memory.words, Words), wp.from_torch(self.memory.table)]
        plan = Plan(self.device, cells)
        sizes = dict(unit=64, block=128)
        plan.add_kernel(find_floors, columns, [*shape, top, upright, self.body.height, wp.from_torch(cover)], **sizes)
        plan.add_function(lambda: self._drop_roofs(row, cover))
        plan.add_kernel(find_obstacles, cells, [*shape, self.body.height], **sizes)
        plan.add_kernel(find_edges, cells, [self.ground, row], **sizes)
        plan.add_kernel(find_places, cells, [self.ground, row], **sizes)
        # On a CPU one thread: Warp's atomic functions are not safe between several there.
        plan.add_kernel(join_regions, cells, [self.ground, row], unit=cells, block=128)
        plan.add_kernel(name_regions, cells, [self.ground, row], unit=cells, block=128)
        plan()
        bits = torch.stack([getattr(self, name)[row, :cells].view(torch.int32) for name in PARTS])
        height, clearance, region = bits.cpu().numpy()  # the host waits here for the device
        return [height.view(np.float32), clearance.view(np.float32), region]

    def _place(self, row: int) -> None:
        """Copy to the device what has been found before."""
        cells = len(self.found[row].height)
        for name in PARTS:
            send(getattr(self, name)[row, :cells], torch.from_numpy(getattr(self.found[row], name)))
        self._clear(row, cells)

    def _clear(self, row: int, first: int = 0) -> None:
        """No floor in a row, from a cell on."""
        self.height[row, first:] = NOWHERE
        self.clearance[row, first:] = 0.0
        self.region[row, first:] = -1

    def _survey(self, size, origin, height: np.ndarray, clearance: np.ndarray, region: np.ndarray) -> Survey:
        cells = size[0] * size[1] * size[2]
        for array, kind in ((height, np.float32), (clearance, np.float32), (region, np.int32)):
            if array.shape != (cells,) or array.dtype != kind:
                raise ValueError("it is the ground of another scene")
        area = np.bincount(region[region >= 0], minlength=cells).astype(np.float32) * np.float32(self.cell**2)
        return Survey(size, origin, height, clearance, region, area)

    def _drop_roofs(self, row: int, cover: torch.Tensor) -> None:
        there = self.height[row] > NOWHERE
        roofed = (cover > 0) & there
        indoors = roofed.sum() >= COVERED * there.sum()
        self.height[row] = torch.where(roofed | ~indoors, self.height[row], NOWHERE)


def check_cell(cell: float, radius: float) -> None:
    """Refuse cells that are too large for an agent: between two of them a thin wall has a clearance of half a cell."""
    largest = 2 * (radius - CLOSE)
    require("cell", cell, cell < largest, f"below {largest:g}, by the agent's radius: thin walls would be open")


def cell_middles(origin: np.ndarray, cell: float, height: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """[n, 3]: the middles of cells, on their floor; heights are by storey, row and column, the type is the origin's."""
    _, depth, width = height.shape
    y, x = np.divmod(cells % (depth * width), width)
    flat = origin + (np.stack([x, y], 1).astype(origin.dtype) + 0.5) * cell
    return np.concatenate([flat, height.reshape(-1)[cells][:, None]], 1)


def send(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy to the device, on torch's current stream; where the values come from the host, it does not wait."""
    if target.is_cuda and not values.is_cuda:
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)


def _key(*parts) -> str:
    """Of an entry in the cache: changes with all that decides what is found."""
    return "ground-" + hashlib.sha256(repr((_recipe(), *parts)).encode()).hexdigest()


@cache
def _recipe() -> str:
    """Changes with the code that finds ground."""
    code = [Path(path).read_bytes() for path in (__file__, walk.__file__, cast.__file__)]
    return hashlib.sha256(b"".join(code)).hexdigest()


def _grid(bounds, cell: float) -> tuple[int, int]:
    """Cells along x and y over a scene, with a border of one."""
    (x0, y0, _), (x1, y1, _) = bounds
    return int((x1 - x0) / cell) + 3, int((y1 - y0) / cell) + 3


@wp.kernel
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
    """From above, every surface that is level enough and has room for the agent is a floor; the lowest come first."""
    i = first + wp.tid()
    size = ground.size[row]
    middle = cell_middle(ground, row, i)
    total = size[0] * size[1]
    found = int(0)
    ceiling = float(1.0e6)
    z = top
    searching = bool(True)
    while searching:
        hit = Hit()
        hit.distance = float(1.0e5)
        hit.triangle = -1
        hit = trace(words, table, row, wp.vec3(middle[0], middle[1], z), wp.vec3(0.0, 0.0, -1.0), hit)
        searching = hit.triangle >= 0
        if searching:
            z = z - hit.distance
            face = face_normal(words, table, row, hit.triangle)
            if wp.abs(face[2]) >= upright and ceiling - z >= tall:
                # The newest floor is the lowest; if there are too many, the highest are dropped.
                for k in range(wp.min(found, size[2] - 1)):
                    s = wp.min(found, size[2] - 1) - k
                    ground.height[row, s * total + i] = ground.height[row, (s - 1) * total + i]
                    cover[s * total + i] = cover[(s - 1) * total + i]
                ground.height[row, i] = z
                cover[i] = wp.where(ceiling < 1.0e5, 1, 0)
                found += 1
            ceiling = z
            z = z - 0.001


@wp.kernel
def find_obstacles(first: int, ground: Ground, row: int, words: Words, table: Table, tall: float):
    """The least distance to anything around a place, between what can be climbed and the agent's head."""
    i = first + wp.tid()
    floor = ground.height[row, i]
    if floor > NOWHERE:
        middle = cell_middle(ground, row, i)
        hit = Hit()
        hit.distance = FAR + BEHIND
        hit.triangle = -1
        for k in range(HEIGHTS):
            z = floor + ground.climb + 0.05 + (tall - ground.climb - 0.1) * float(k) / float(HEIGHTS - 1)
            for d in range(DIRECTIONS):
                angle = 6.2831853 * (float(d) + 0.25 * float(k)) / float(DIRECTIONS)
                direction = wp.vec3(wp.cos(angle), wp.sin(angle), 0.0)
                eye = wp.vec3(middle[0], middle[1], z) - BEHIND * direction
                hit = trace(words, table, row, eye, direction, hit)
        ground.clearance[row, i] = wp.max(hit.distance - BEHIND, 0.0)


@wp.kernel
def find_edges(first: int, ground: Ground, row: int):
    """Where the floor ends beside a cell and nothing is in the way, its clearance is half a cell: nobody steps over."""
    i = first + wp.tid()
    if ground.height[row, i] > NOWHERE:
        for k in range(8):
            away = wp.where(k < 4, 1.0, 1.4143) * ground.cell
            if neighbor(ground, row, i, k) < 0 and ground.clearance[row, i] > away:
                ground.clearance[row, i] = 0.5 * ground.cell


@wp.func
def around(k: int) -> int:
    """The k-th neighbor on the way around a cell, for `neighbor`."""
    turn = wp.vector(0, 4, 2, 7, 1, 5, 3, 6, dtype=int)
    return turn[k % 8]


@wp.func
def is_margin(ground: Ground, row: int, i: int) -> bool:
    """Whether a cell lies along the edge of the floor, where an agent can be in a part of it.

    Those of its neighbors that an agent can stand on must hang together, one beside the other. A cell in a gap that is
    too narrow has such neighbors on both sides, and what is on one side of it is not to reach the other.
    """
    groups = int(0)
    clear = int(0)
    if ground.clearance[row, i] >= ground.radius - SLACK * ground.cell:
        before = neighbor(ground, row, i, around(7))
        for k in range(8):
            other = neighbor(ground, row, i, around(k))
            if is_clear(ground, row, other):
                clear += 1
                joined = bool(False)
                if is_clear(ground, row, before):
                    rise = ground.height[row, other] - ground.height[row, before]
                    joined = wp.abs(rise) <= ground.climb + 1.0e-3
                if not joined:
                    groups += 1
            before = other
    return clear == 8 or groups == 1


@wp.func
def can_cross(ground: Ground, row: int, i: int, other: int, k: int) -> bool:
    """Whether an agent gets from one cell that it can stand on to another along a diagonal.

    Clearance is interpolated between four cells, a and b across from c and d. If neither c nor d is clear, the way
    leads over the saddle, where it is (ab - cd) / (a + b - c - d).
    """
    beside = beside_diagonal(ground, row, i, k)
    crosses = is_clear(ground, row, beside[0]) or is_clear(ground, row, beside[1])
    if not crosses:
        a = ground.clearance[row, i]
        b = ground.clearance[row, other]
        c = float(0.0)
        d = float(0.0)
        if beside[0] >= 0:
            c = ground.clearance[row, beside[0]]
        if beside[1] >= 0:
            d = ground.clearance[row, beside[1]]
        crosses = (a * b - c * d) / (a + b - c - d) >= ground.radius - CLOSE
    return crosses


@wp.kernel
def find_places(first: int, ground: Ground, row: int):
    """Every cell that an agent can be in is a region of its own."""
    i = first + wp.tid()
    is_place = bool(False)
    if ground.height[row, i] > NOWHERE:
        is_place = is_clear(ground, row, i) or is_margin(ground, row, i)
    ground.region[row, i] = wp.where(is_place, i, -1)


@wp.func
def first_cell(ground: Ground, row: int, i: int) -> int:
    """The cell that a cell's region is numbered by, as far as it has been joined."""
    at = int(i)
    above = ground.region[row, at]
    while above != at:
        at = above
        above = ground.region[row, at]
    return at


@wp.kernel
def join_regions(first: int, ground: Ground, row: int):
    """Join every cell with those that an agent can go to from it: of two regions the later is hung below the other.

    The number of a region's first cell is its own; all others lead to it, over ever smaller numbers. Whoever finds that
    another thread has hung the region in between joins with where it hangs now.
    """
    i = first + wp.tid()
    if ground.region[row, i] >= 0:
        inside = is_clear(ground, row, i)
        for k in range(8):
            other = neighbor(ground, row, i, k)
            joins = is_clear(ground, row, other)
            if joins and inside and k >= 4:
                joins = can_cross(ground, row, i, other, k)
            if joins:
                a = first_cell(ground, row, i)
                b = first_cell(ground, row, other)
                while a != b:
                    later = wp.max(a, b)
                    sooner = wp.min(a, b)
                    was = wp.atomic_min(ground.region, row, later, sooner)
                    a = sooner
                    b = sooner
                    if was != later:
                        a = first_cell(ground, row, was)
                        b = first_cell(ground, row, sooner)


@wp.kernel
def name_regions(first: int, ground: Ground, row: int):
    """Every cell takes the number of its region's first cell."""
    i = first + wp.tid()
    if ground.region[row, i] >= 0:
        ground.region[row, i] = first_cell(ground, row, i)
