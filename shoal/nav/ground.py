"""Walkable ground of scenes: a grid of cells in up to a few storeys, found by casting rays on the device.

A cell of a storey is a place where an agent may stand if the floor is not too steep, nothing is lower than the agent is
high, and walls and furniture are farther away than its radius. `clearance` is the distance to the nearest obstacle, in
metres; between the cells' middles it is interpolated, so that walls in any direction are smooth to slide along.
"""

from dataclasses import dataclass

import torch
import warp as wp

from shoal.core.launch import Plan, init_warp
from shoal.core.store import warp_view
from shoal.errors import ShoalError
from shoal.nav.walk import NOWHERE, Ground, cell_middle, neighbour
from shoal.render.cast import Hit, Table, Words, face_normal, trace
from shoal.scene.memory import SceneMemory

wp.set_module_options({"enable_backward": False})

STOREYS = 4
"""Floors above one another that are told apart."""

DIRECTIONS = wp.constant(16)
HEIGHTS = wp.constant(4)
"""Rays around each place, at so many heights between the climb and the head."""

FAR = wp.constant(1.0)
"""Metres: obstacles farther away than this are not told apart."""

SLACK = 0.45
"""Parts of a cell that its middle may be nearer to an obstacle than an agent."""

COVERED = 0.25
"""If this part of the floor or more has something above it, the rest is roof or garden and nobody walks there."""


@dataclass(frozen=True)
class Body:
    """Who walks."""

    radius: float = 0.1
    """Metres from obstacles that its middle must keep."""
    height: float = 1.5
    """Metres of free space above the floor."""
    climb: float = 0.2
    """Metres of a step that it can take up or down."""
    slope: float = 45.0
    """Degrees of the steepest floor."""


class GroundMemory:
    """Walkable ground for the rows of a scene memory, `cells` cells a row at most (all storeys together)."""

    def __init__(self, memory: SceneMemory, cells: int, body: Body | None = None, cell: float = 0.1):
        init_warp()
        self.memory, self.cells, self.cell = memory, cells, cell
        self.body = body or Body()
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
        """float32 [rows, cells]: metres to the nearest obstacle, 1 at most; 0 where there is no floor."""
        self.region = make(cells, dtype=torch.int32, value=-1)
        """int32 [rows, cells]: the connected region, numbered by one of its cells; -1 where nobody can stand."""
        self.ground = Ground()
        self.ground.cell = cell
        self.ground.radius = self.body.radius
        self.ground.climb = self.body.climb
        self.ground.origin = wp.from_torch(self.origin, dtype=wp.vec3)
        self.ground.size = wp.from_torch(self.size, dtype=wp.vec3i)
        self.ground.height = wp.from_torch(self.height)
        self.ground.clearance = wp.from_torch(self.clearance)
        self.ground.region = wp.from_torch(self.region)
        self.area: dict[int, torch.Tensor] = {}

    @staticmethod
    def cells_needed(bounds, cell: float) -> int:
        """Cells of a grid over a scene, one storey."""
        width, depth = _grid(bounds, cell)
        return width * depth

    def survey(self, row: int) -> None:
        """Find the ground of the scene in a row, on torch's current stream; it waits for the device, once per scene."""
        scene = self.memory.scene(row)
        if scene is None:
            raise ShoalError(f"Row {row} of the scene memory is empty; there is no ground to find.")
        need = self.cells_needed(scene.bounds, self.cell)
        if need > self.cells:
            raise ShoalError(
                f"{scene.name} needs {need} cells of {self.cell} m, but there is room for {self.cells}; "
                "use larger cells or allow for more of them."
            )
        width, depth = _grid(scene.bounds, self.cell)
        storeys = max(1, min(STOREYS, self.cells // (width * depth)))
        x0, y0, z0 = scene.bounds[0]
        corner = [x0 - self.cell, y0 - self.cell, z0]
        self.origin[row] = torch.tensor(corner, dtype=torch.float32)
        self.size[row] = torch.tensor([width, depth, storeys], dtype=torch.int32)
        self.height[row] = NOWHERE
        self.clearance[row] = 0.0
        cover = torch.zeros(self.cells, dtype=torch.int32, device=self.device)
        words = warp_view(self.memory.words, Words)
        table = wp.from_torch(self.memory.table)
        total = width * depth
        top = float(scene.bounds[1][2]) + 1.0
        upright = float(torch.cos(torch.deg2rad(torch.tensor(self.body.slope))))
        shape = [self.ground, row, words, table]
        self._plan(find_floors, total, [*shape, top, upright, self.body.height, wp.from_torch(cover)])()
        there = self.height[row] > NOWHERE
        roofed = (cover > 0) & there
        if float(roofed.sum()) >= COVERED * float(there.sum()):
            self.height[row] = torch.where(roofed, self.height[row], NOWHERE)
        self._plan(find_obstacles, total * storeys, [*shape, self.body.height])()
        self._plan(find_edges, total * storeys, [self.ground, row])()
        self._label(row, total * storeys)

    def standing(self, row: int) -> torch.Tensor:
        """int64 [n]: the cells of a row whose middle an agent can stand on."""
        clear = self.clearance[row] >= self.body.radius
        return torch.nonzero(clear & (self.region[row] >= 0)).squeeze(1)

    def middles(self, row: int, cells: torch.Tensor) -> torch.Tensor:
        """float32 [n, 3]: the middles of cells, on their floor."""
        width, depth, _ = self.size[row].tolist()
        flat = cells % (width * depth)
        x = self.origin[row, 0] + (flat % width + 0.5) * self.cell
        y = self.origin[row, 1] + (flat // width + 0.5) * self.cell
        return torch.stack([x, y, self.height[row, cells]], 1)

    def _plan(self, kernel, count: int, inputs: list) -> Plan:
        plan = Plan(self.device, count)
        plan.add_kernel(kernel, count, inputs, unit=64, block=128)
        return plan

    def _label(self, row: int, count: int) -> None:
        """Number connected regions: every cell takes the least number among its neighbours', until none changes."""
        region = self.region[row]
        # A cell counts if some place in it can be stood on. Less than half a cell of slack: of two neighbours on both
        # sides of the thinnest wall one is nearer to it than that, so no region leaks through.
        stands = self.clearance[row] >= self.body.radius - SLACK * self.cell
        number = torch.arange(self.cells, dtype=torch.int32, device=self.device)
        region.copy_(torch.where(stands, number, -1))
        changed = torch.ones(1, dtype=torch.int32, device=self.device)
        join = self._plan(join_regions, count, [self.ground, row, wp.from_torch(changed)])
        while bool(changed.item()):
            changed.zero_()
            for _ in range(8):
                join()
        self.area[row] = torch.bincount(region[region >= 0].long(), minlength=self.cells) * self.cell**2


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
        hit.distance = FAR
        hit.triangle = -1
        for k in range(HEIGHTS):
            z = floor + ground.climb + 0.05 + (tall - ground.climb - 0.1) * float(k) / float(HEIGHTS - 1)
            for d in range(DIRECTIONS):
                angle = 6.2831853 * (float(d) + 0.25 * float(k)) / float(DIRECTIONS)
                direction = wp.vec3(wp.cos(angle), wp.sin(angle), 0.0)
                hit = trace(words, table, row, wp.vec3(middle[0], middle[1], z), direction, hit)
        ground.clearance[row, i] = hit.distance


@wp.kernel
def find_edges(first: int, ground: Ground, row: int):
    """Where the floor ends beside a cell and nothing is in the way, its clearance is half a cell: nobody steps over."""
    i = first + wp.tid()
    if ground.height[row, i] > NOWHERE:
        for k in range(8):
            away = wp.where(k < 4, 1.0, 1.4143) * ground.cell
            if neighbour(ground, row, i, k) < 0 and ground.clearance[row, i] > away:
                ground.clearance[row, i] = 0.5 * ground.cell


@wp.kernel
def join_regions(first: int, ground: Ground, row: int, changed: wp.array(dtype=int)):
    """One round of numbering: the least number around, and then the number of the cell of that number."""
    i = first + wp.tid()
    mine = ground.region[row, i]
    if mine >= 0:
        least = mine
        for k in range(4):
            other = neighbour(ground, row, i, k)
            if other >= 0:
                theirs = ground.region[row, other]
                if theirs >= 0:
                    least = wp.min(least, theirs)
        least = wp.min(least, ground.region[row, least])
        if least < mine:
            ground.region[row, i] = least
            wp.atomic_min(ground.region, row, mine, least)
            changed[0] = 1
