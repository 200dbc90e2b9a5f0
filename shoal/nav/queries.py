"""Pathfinder: queries of walkable ground for many points at once, as in Habitat, on the device."""

from typing import Any, no_type_check

import numpy as np
import torch
import warp as wp
from PIL import Image

from shoal.core.errors import ShoalError
from shoal.core.launch import Plan
from shoal.nav.geodesic import FieldMemory, distance_at
from shoal.nav.ground import GroundMemory
from shoal.nav.paths import HostGround, host_field, shortest_path
from shoal.nav.walk import Ground, can_stand, clearance_at, clearest_cell, on_floor, walk

wp.set_module_options({"enable_backward": False})


class Pathfinder:
    """Queries of the ground of one row; points are float32 [n, 3] on the ground's device, in meters."""

    def __init__(self, ground: GroundMemory, row: int = 0):
        self.ground, self.row = ground, row
        if row not in ground.surveys:
            ground.survey(row)

    def _launch(self, kernel: Any, count: int, inputs: list) -> None:
        plan = Plan(self.ground.device, count)
        plan.add_kernel(kernel, count, [self.ground.arrays, self.row, *inputs], unit=16, block=128)
        plan()

    def _points(self, points: torch.Tensor) -> wp.array:
        if points.ndim != 2 or points.shape[1] != 3:
            raise ShoalError(f"Points must have shape [n, 3], not {list(points.shape)}.")
        return wp.from_torch(points.to(self.ground.device, torch.float32).contiguous(), dtype=wp.vec3)

    def is_navigable(self, points: torch.Tensor) -> torch.Tensor:
        """bool [n]: whether an agent can stand there."""
        out = torch.zeros(len(points), dtype=torch.bool, device=self.ground.device)
        self._launch(query_navigable, len(points), [self._points(points), wp.from_torch(out)])
        return out

    def obstacle_distance(self, points: torch.Tensor) -> torch.Tensor:
        """float [n]: distance to the nearest obstacle [m], at most 1."""
        out = torch.zeros(len(points), device=self.ground.device)
        self._launch(query_clearance, len(points), [self._points(points), wp.from_torch(out)])
        return out

    def region(self, points: torch.Tensor) -> torch.Tensor:
        """int [n]: connected region of each point, -1 outside of regions."""
        out = torch.full((len(points),), -1, dtype=torch.int32, device=self.ground.device)
        self._launch(query_region, len(points), [self._points(points), wp.from_torch(out)])
        return out

    def step(
        self, points: torch.Tensor, displacement: torch.Tensor, allow_sliding: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Points after a step by `displacement` [n, 2], and whether an obstacle blocked it."""
        out = torch.zeros(len(points), 3, device=self.ground.device)
        blocked = torch.zeros(len(points), dtype=torch.bool, device=self.ground.device)
        steps = wp.from_torch(displacement.to(self.ground.device, torch.float32).contiguous(), dtype=wp.vec2)
        outputs = [wp.from_torch(out, dtype=wp.vec3), wp.from_torch(blocked)]
        self._launch(query_walk, len(points), [self._points(points), steps, allow_sliding, *outputs])
        return out, blocked

    @property
    def navigable_points(self) -> torch.Tensor:
        """float32 [n, 3]: centers of all cells that an agent can stand on."""
        return self._cell_centers(self.ground.navigable_cells(self.row))

    def _cell_centers(self, cells: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.ground.cell_centers(self.row, cells)).to(self.ground.device)

    def nearest(self, points: torch.Tensor, min_area: float = 0.0) -> torch.Tensor:
        """float32 [n, 3]: nearest navigable points, to the accuracy of a cell, in regions of at least `min_area` m²."""
        cells = self._cell_centers(self.ground.navigable_cells(self.row, min_area))
        if not len(cells):
            raise self._no_floor(f" in regions of at least {min_area:g} m²" if min_area else "")
        best = [torch.cdist(part.to(cells), cells).argmin(1) for part in points.split(1024)]
        snapped = cells[torch.cat(best)]
        area = torch.from_numpy(self.ground.surveys[self.row].area).to(cells.device)
        region = self.region(points)
        standable = (region >= 0) & (area[region] >= min_area)
        return torch.where(standable[:, None], points.to(snapped), snapped)

    def _no_floor(self, where: str = "") -> ShoalError:
        body = self.ground.body
        return ShoalError(
            f"This scene has no walkable floor{where} for an agent of radius {body.radius:g} m and height "
            f"{body.height:g} m; check its up axis and scale, or use a smaller agent."
        )

    def on_floor(self, points: torch.Tensor) -> torch.Tensor:
        """float32 [n, 3]: points moved to the height of the floor under them, if it is within a step height."""
        out = torch.zeros(len(points), 3, device=self.ground.device)
        self._launch(query_floor, len(points), [self._points(points), wp.from_torch(out, dtype=wp.vec3)])
        return out

    def random(self, count: int, seed: int = 0, region: int | None = None) -> torch.Tensor:
        """float32 [count, 3]: points sampled uniformly from the walkable floor, or from one region of it."""
        cells = self.ground.navigable_cells(self.row)
        if region is not None:
            cells = cells[self.ground.surveys[self.row].region[cells] == region]
        if not len(cells):
            raise self._no_floor("" if region is None else f" in region {region}")
        rng = torch.Generator().manual_seed(seed)
        return self._cell_centers(cells[torch.randint(len(cells), (count,), generator=rng).numpy()])

    @property
    def main_region(self) -> int:
        """The largest connected region."""
        area = self.ground.surveys[self.row].area
        if not area.any():
            raise self._no_floor()
        return int(area.argmax())

    def geodesic(self, points: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
        """float [n, g]: geodesic distance from each point to each goal [m]; inf where there is no path."""
        fields = FieldMemory(self.ground, len(goals))
        fields.solve(self.row, goals)
        return self.distances(points, fields)

    def distances(self, points: torch.Tensor, fields: FieldMemory) -> torch.Tensor:
        """float [n, g]: geodesic distance from each point to each goal of solved `fields` [m]."""
        out = torch.zeros(len(points), fields.goals, device=self.ground.device)
        field = wp.from_torch(fields.field, dtype=wp.uint16)
        goal = wp.from_torch(fields.goal, dtype=wp.vec3)
        self._launch(query_distance, len(points), [self._points(points), field, goal, wp.from_torch(out)])
        return out

    def shortest_path(self, point: torch.Tensor, goal: torch.Tensor) -> torch.Tensor | None:
        """float32 [n, 3] on the host: corners of the shortest path between two points; None if there is no path."""
        fields = FieldMemory(self.ground, 1)
        fields.solve(self.row, goal[None].to(self.ground.device))
        ends = point.cpu().numpy(), goal.cpu().numpy()
        found = shortest_path(HostGround.of(self.ground, self.row), host_field(fields, self.row, 0), *ends)
        return None if found is None else torch.from_numpy(found).float()

    def topdown_view(self) -> Image.Image:
        """The ground from above, one pixel per cell, y up: walkable floor light, other floor gray, no floor black.

        `shoal.nav.maps.TopDownMap` draws larger maps.
        """
        return Image.fromarray(HostGround.of(self.ground, self.row).image())


@wp.kernel
@no_type_check
def query_navigable(
    first: int, ground: Ground, row: int, points: wp.array(dtype=wp.vec3), out: wp.array(dtype=wp.bool)
):
    """Whether an agent can stand at each point."""
    i = first + wp.tid()
    out[i] = can_stand(ground, row, points[i])


@wp.kernel
@no_type_check
def query_clearance(first: int, ground: Ground, row: int, points: wp.array(dtype=wp.vec3), out: wp.array(dtype=float)):
    """Distance from each point to the nearest obstacle."""
    i = first + wp.tid()
    out[i] = clearance_at(ground, row, points[i])[0]


@wp.kernel
@no_type_check
def query_region(first: int, ground: Ground, row: int, points: wp.array(dtype=wp.vec3), out: wp.array(dtype=int)):
    """Connected region of each point."""
    i = first + wp.tid()
    if can_stand(ground, row, points[i]):
        out[i] = ground.region[row, clearest_cell(ground, row, points[i])]


@wp.kernel
@no_type_check
def query_floor(first: int, ground: Ground, row: int, points: wp.array(dtype=wp.vec3), out: wp.array(dtype=wp.vec3)):
    """Each point at the height of the floor."""
    i = first + wp.tid()
    out[i] = on_floor(ground, row, points[i])


@wp.kernel
@no_type_check
def query_walk(
    first: int,
    ground: Ground,
    row: int,
    points: wp.array(dtype=wp.vec3),
    displacement: wp.array(dtype=wp.vec2),
    allow_sliding: bool,
    out: wp.array(dtype=wp.vec3),
    blocked: wp.array(dtype=wp.bool),
):
    """A step from each point."""
    i = first + wp.tid()
    done = walk(ground, row, points[i], displacement[i], allow_sliding)
    out[i] = done.point
    blocked[i] = done.blocked


@wp.kernel
@no_type_check
def query_distance(
    first: int,
    ground: Ground,
    row: int,
    points: wp.array(dtype=wp.vec3),
    field: wp.array3d(dtype=wp.uint16),
    goal: wp.array2d(dtype=wp.vec3),
    out: wp.array2d(dtype=float),
):
    """Distance from each point to all goals."""
    i = first + wp.tid()
    for g in range(goal.shape[1]):
        out[i, g] = distance_at(ground, row, field, g, goal[row, g], points[i])
