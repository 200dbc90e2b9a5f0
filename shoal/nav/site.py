"""The site of a navigation world: scenes, their ground, and fields of distance to goals, kept up while it trains."""

import torch

from shoal.core.kernels import Whole
from shoal.errors import ShoalError
from shoal.nav.geodesic import FieldMemory
from shoal.nav.ground import Body, GroundMemory
from shoal.scene.pool import ScenePool

SMALLEST_REGION = 4.0
"""Square metres of connected floor that a scene must have."""

ROOM = 2.5
"""How much larger a later scene may be than the first ones; one that is larger still is left out."""


class Site:
    """A scene pool whose rows are surveyed as they come: ground, places to stand, goals and their fields."""

    def __init__(
        self, sources: str | list[str], envs: int, resident: int, goals: int, device: torch.device, seed: int,
        period: int, body: Body, cell: float, limit: int | None, up: str, scale: float,
    ):  # fmt: skip
        self.pool = ScenePool(
            sources, envs, resident, device=device, limit=limit, period=period, seed=seed, up=up, scale=scale
        )
        self.rng = torch.Generator().manual_seed(seed)
        memory = self.pool.memory
        first = [memory.scene(row) for row in range(memory.rows) if memory.scene(row)]
        cells = max(GroundMemory.cells_needed(scene.bounds, cell) for scene in first)
        tall = max(float(scene.bounds[1, 2] - scene.bounds[0, 2]) for scene in first)
        storeys = 1 + int(tall // 3.5)
        self.ground = GroundMemory(memory, int(ROOM * cells) * storeys, body, cell)
        self.fields = FieldMemory(self.ground, goals)
        rows = memory.rows
        self.standing = torch.zeros(rows, self.ground.cells, dtype=torch.int32, device=device)
        """int32 [rows, cells]: cells to start from, as many as `standing_count` says."""
        self.standing_count = torch.zeros(rows, dtype=torch.int32, device=device)
        for row in self.pool.active:
            self.survey(row)
        self.pool.before_use = self.survey

    def survey(self, row: int) -> None:
        """Find the ground of a scene that has come, draw its goals and solve their fields."""
        ground = self.ground
        ground.survey(row)
        stands = ground.standing(row)
        stands = stands[ground.area[row][ground.region[row, stands].long()] >= SMALLEST_REGION]
        if not len(stands):
            scene = ground.memory.scene(row)
            raise ShoalError(f"{scene.name if scene else 'The scene'} has no walkable floor of {SMALLEST_REGION:g} m².")
        self.standing[row, : len(stands)] = stands.int()
        self.standing_count[row] = len(stands)
        drawn = stands[torch.randint(len(stands), (self.fields.goals,), generator=self.rng).to(stands.device)]
        self.fields.solve(row, ground.middles(row, drawn))

    def tables(self) -> dict[str, Whole]:
        """What kernels read by name."""
        return {
            "field": Whole(self.fields.field),
            "goal_places": Whole(self.fields.goal),
            "standing": Whole(self.standing),
            "standing_count": Whole(self.standing_count),
            "choice": Whole(self.pool.choice),
            "choices": Whole(self.pool.choices),
        }

    def poll(self) -> None:
        """Let scenes come and go; call it between rollouts."""
        self.pool.poll()

    def close(self) -> None:
        self.pool.close()
