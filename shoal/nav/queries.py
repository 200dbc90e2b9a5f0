"""What people ask of walkable ground, for many places at once: Habitat's questions, answered on the device."""

import numpy as np
import torch
import warp as wp
from PIL import Image

from shoal.core.errors import ShoalError
from shoal.core.launch import Plan
from shoal.nav.geodesic import FieldMemory, distance_at
from shoal.nav.ground import GroundMemory
from shoal.nav.maps import TopDown
from shoal.nav.paths import Floor, field_of, shortest_path
from shoal.nav.walk import Ground, can_stand, clearance_at, on_floor, standing_cell, walk

wp.set_module_options({"enable_backward": False})


class Pathfinder:
    """Questions about the ground of one row; places are float32 [n, 3] on the ground's device."""

    def __init__(self, ground: GroundMemory, row: int = 0):
        self.ground, self.row = ground, row
        if row not in ground.found:
            ground.survey(row)

    def _ask(self, kernel, count: int, inputs: list) -> None:
        plan = Plan(self.ground.device, count)
        plan.add_kernel(kernel, count, [self.ground.ground, self.row, *inputs], unit=16, block=128)
        plan()

    def _places(self, places: torch.Tensor) -> wp.array:
        if places.ndim != 2 or places.shape[1] != 3:
            raise ShoalError(f"Layout2D must have shape [n, 3], not {list(places.shape)}.")
        return wp.from_torch(places.to(self.ground.device, torch.float32).contiguous(), dtype=wp.vec3)

    def is_navigable(self, places: torch.Tensor) -> torch.Tensor:
        """bool [n]: whether an agent may stand there."""
        out = torch.zeros(len(places), dtype=torch.bool, device=self.ground.device)
        self._ask(ask_stand, len(places), [self._places(places), wp.from_torch(out)])
        return out

    def obstacle_distance(self, places: torch.Tensor) -> torch.Tensor:
        """float [n]: meters to the nearest obstacle, 1 at most."""
        out = torch.zeros(len(places), device=self.ground.device)
        self._ask(ask_clearance, len(places), [self._places(places), wp.from_torch(out)])
        return out

    def region(self, places: torch.Tensor) -> torch.Tensor:
        """int [n]: the connected region of each place, -1 outside of any."""
        out = torch.full((len(places),), -1, dtype=torch.int32, device=self.ground.device)
        self._ask(ask_region, len(places), [self._places(places), wp.from_torch(out)])
        return out

    def step(self, places: torch.Tensor, along: torch.Tensor, slide: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a step `along` [n, 2] leads, and whether something was in the way."""
        out = torch.zeros(len(places), 3, device=self.ground.device)
        blocked = torch.zeros(len(places), dtype=torch.bool, device=self.ground.device)
        steps = wp.from_torch(along.to(self.ground.device, torch.float32).contiguous(), dtype=wp.vec2)
        answers = [wp.from_torch(out, dtype=wp.vec3), wp.from_torch(blocked)]
        self._ask(ask_walk, len(places), [self._places(places), steps, slide, *answers])
        return out, blocked

    @property
    def cells(self) -> torch.Tensor:
        """float32 [n, 3]: the middles of all cells that an agent can stand on."""
        return self._middles(self.ground.standing(self.row))

    def _middles(self, cells: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.ground.middles(self.row, cells)).to(self.ground.device)

    def nearest(self, places: torch.Tensor, smallest: float = 0.0) -> torch.Tensor:
        """float32 [n, 3]: the nearest places to stand on, to a cell, in regions of `smallest` m² or more."""
        cells = self._middles(self.ground.standing(self.row, smallest))
        if not len(cells):
            raise ShoalError("There is no walkable floor in this scene.")
        best = [torch.cdist(part.to(cells), cells).argmin(1) for part in places.split(1024)]
        there = cells[torch.cat(best)]
        area = torch.from_numpy(self.ground.found[self.row].area).to(cells.device)
        region = self.region(places)
        stands = (region >= 0) & (area[region] >= smallest)
        return torch.where(stands[:, None], places.to(there), there)

    def on_floor(self, places: torch.Tensor) -> torch.Tensor:
        """float32 [n, 3]: the places at the height of the floor under them, if there is one within a climb."""
        out = torch.zeros(len(places), 3, device=self.ground.device)
        self._ask(ask_floor, len(places), [self._places(places), wp.from_torch(out, dtype=wp.vec3)])
        return out

    def random(self, count: int, seed: int = 0, region: int | None = None) -> torch.Tensor:
        """float32 [count, 3]: places drawn evenly from the walkable floor, or from one region of it."""
        cells = self.ground.standing(self.row)
        if region is not None:
            cells = cells[self.ground.found[self.row].region[cells] == region]
        if not len(cells):
            raise ShoalError("There is no walkable floor in this scene.")
        rng = torch.Generator().manual_seed(seed)
        return self._middles(cells[torch.randint(len(cells), (count,), generator=rng).numpy()])

    @property
    def main_region(self) -> int:
        """The largest connected region."""
        area = self.ground.found[self.row].area
        if not area.any():
            raise ShoalError("There is no walkable floor in this scene.")
        return int(area.argmax())

    def geodesic(self, places: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
        """float [n, g]: meters along the floor from each place to each goal; inf where there is no way."""
        fields = FieldMemory(self.ground, len(goals))
        fields.solve(self.row, goals)
        return self.distances(places, fields)

    def distances(self, places: torch.Tensor, fields: FieldMemory) -> torch.Tensor:
        """float [n, g]: meters along the floor from each place to each goal of fields that have been solved."""
        out = torch.zeros(len(places), fields.goals, device=self.ground.device)
        field = wp.from_torch(fields.field, dtype=wp.uint16)
        goal = wp.from_torch(fields.goal, dtype=wp.vec3)
        self._ask(ask_distance, len(places), [self._places(places), field, goal, wp.from_torch(out)])
        return out

    def shortest_path(self, place: torch.Tensor, goal: torch.Tensor) -> torch.Tensor | None:
        """float32 [n, 3]: the corners of the shortest path between two places, on the host; None if there is no way."""
        fields = FieldMemory(self.ground, 1)
        fields.solve(self.row, goal[None].to(self.ground.device))
        ends = place.cpu().numpy(), goal.cpu().numpy()
        found = shortest_path(Floor.of(self.ground, self.row), field_of(fields, self.row, 0), *ends)
        return None if found is None else torch.from_numpy(found).float()

    def picture(self) -> Image.Image:
        """The ground from above, a pixel a cell, x to the right and y up: walkable light, other floor gray, none black.

        `shoal.nav.maps.TopDown` draws larger ones.
        """
        return Image.fromarray(TopDown.cells(Floor.of(self.ground, self.row)))


@wp.kernel
def ask_stand(first: int, ground: Ground, row: int, places: wp.array(dtype=wp.vec3), out: wp.array(dtype=wp.bool)):
    """Whether an agent may stand there."""
    i = first + wp.tid()
    out[i] = can_stand(ground, row, places[i])


@wp.kernel
def ask_clearance(first: int, ground: Ground, row: int, places: wp.array(dtype=wp.vec3), out: wp.array(dtype=float)):
    """Meters to the nearest obstacle."""
    i = first + wp.tid()
    out[i] = clearance_at(ground, row, places[i])[0]


@wp.kernel
def ask_region(first: int, ground: Ground, row: int, places: wp.array(dtype=wp.vec3), out: wp.array(dtype=int)):
    """The connected region of a place."""
    i = first + wp.tid()
    if can_stand(ground, row, places[i]):
        out[i] = ground.region[row, standing_cell(ground, row, places[i])]


@wp.kernel
def ask_floor(first: int, ground: Ground, row: int, places: wp.array(dtype=wp.vec3), out: wp.array(dtype=wp.vec3)):
    """The place on the floor."""
    i = first + wp.tid()
    out[i] = on_floor(ground, row, places[i])


@wp.kernel
def ask_walk(
    first: int,
    ground: Ground,
    row: int,
    places: wp.array(dtype=wp.vec3),
    along: wp.array(dtype=wp.vec2),
    slide: bool,
    out: wp.array(dtype=wp.vec3),
    blocked: wp.array(dtype=wp.bool),
):
    """Where a step leads."""
    i = first + wp.tid()
    done = walk(ground, row, places[i], along[i], slide)
    out[i] = done.place
    blocked[i] = done.blocked


@wp.kernel
def ask_distance(
    first: int,
    ground: Ground,
    row: int,
    places: wp.array(dtype=wp.vec3),
    field: wp.array3d(dtype=wp.uint16),
    goal: wp.array2d(dtype=wp.vec3),
    out: wp.array2d(dtype=float),
):
    """Distances to all goals."""
    i = first + wp.tid()
    for g in range(goal.shape[1]):
        out[i, g] = distance_at(ground, row, field, g, goal[row, g], places[i])
