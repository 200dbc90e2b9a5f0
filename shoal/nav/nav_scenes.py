"""The scenes of a navigation world: their walkable ground and the distance fields of their goals, kept in memory."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.core.kernels import Broadcast
from shoal.nav.config import NavConfig
from shoal.nav.episodes import Episodes, check_episodes, check_scenes, scene_name
from shoal.nav.geodesic import MM_PER_METER, UNREACHABLE, FieldMemory
from shoal.nav.ground import MIN_REGION_AREA, Body, GroundMemory, upload
from shoal.nav.queries import Pathfinder
from shoal.scene.pool import ScenePool

HEADROOM = 2.5
"""Capacity for the ground of later scenes, as a multiple of the largest first one; larger scenes are left out."""


def episodes_per_scene(config: NavConfig, episodes: Mapping[str, Episodes], num_envs: int, scenes: int) -> int:
    """Number of episodes of a scene to keep in memory; an evaluation keeps those that its envs play."""
    agents = config.num_agents
    fewest = min(episodes.values(), key=len)
    if len(fewest) < agents:
        raise ShoalError(
            f"{fewest.file} has {len(fewest)} episode(s) of {fewest.scene}, too few for {agents} agents, which need "
            "one each; lower --num-agents or add episodes to the file."
        )
    if not config.evaluating:
        return max(config.goals_per_scene, agents)
    envs_per_scene = -(-num_envs // scenes)
    return min(envs_per_scene + agents - 1, max(map(len, episodes.values())))


class NavScenes:
    """A scene pool with ground, start cells, goals and distance fields for each row.

    Args:
        sources: names of single scenes.
        envs: number of envs that share the scenes.
        scenes_in_memory: number of scenes that new episodes may begin in.
        goals: goals per scene, each with a distance field.
        device: where scenes and fields are kept.
        seed: seed of the order of scenes, and of goals.
        swap_interval: minimum number of polls between scene swaps (0: never swap).
        body: size of the agents.
        cell_size: side of a grid cell [m].
        memory_limit: bytes of device memory for scenes (None: sized by the first scenes).
        up: upward axis of mesh files.
        scale: meters per unit of mesh files.
        strict: refuse mesh files with missing textures.
        episodes: by scene name, episodes that give goals and starts; each scene needs some (None: both are sampled).
        fields_from: whether distance fields begin at the goals or at the starts of `episodes`.
        path_range: shortest and longest geodesic distance [m]; a scene without such a path is refused.
    """

    def __init__(
        self,
        sources: list[str],
        envs: int,
        scenes_in_memory: int,
        goals: int,
        device: torch.device,
        seed: int,
        *,
        swap_interval: int = 0,
        body: Body | None = None,
        cell_size: float = 0.1,
        memory_limit: int | None = None,
        up: str = "auto",
        scale: float = 1.0,
        strict: bool = False,
        episodes: Mapping[str, Episodes] | None = None,
        fields_from: Literal["goals", "starts"] = "goals",
        path_range: tuple[float, float] | None = None,
    ):
        self.episodes, self.fields_from, self.path_range = episodes, fields_from, path_range
        if episodes is not None:
            check_scenes(episodes, sources)
        self.pool = ScenePool(
            sources,
            envs,
            scenes_in_memory,
            device=device,
            limit=memory_limit,
            swap_interval=swap_interval,
            seed=seed,
            up=up,
            scale=scale,
            strict=strict,
        )
        self.rng = torch.Generator().manual_seed(seed)
        memory = self.pool.memory
        first = [scene for row in range(memory.rows) if (scene := memory.scene(row))]
        try:
            headroom = HEADROOM if self.pool.swap_interval else 1.0
            cells = GroundMemory.cells_per_row(first, cell_size, memory.device, memory.rows, goals, headroom)
            self._make_tables(GroundMemory(memory, cells, body, cell_size), goals)
            for row in self.pool.active:
                self.survey(row)
        except ShoalError:
            self.pool.close()
            raise
        self.pool.before_upload, self.pool.before_use = self.ground.check_capacity, self.survey

    def _make_tables(self, ground: GroundMemory, goals: int) -> None:
        self.ground, rows, device = ground, ground.memory.rows, ground.device
        self.fields = FieldMemory(self.ground, goals)
        self.start_cells = torch.zeros(rows, self.ground.cells, dtype=torch.int32, device=device)
        """int32 [rows, cells]: cells that episodes may start on, sorted by region."""
        self.goal_starts = torch.zeros(rows, goals, 2, dtype=torch.int32, device=device)
        """int32 [rows, goals, 2]: first index and number of the `start_cells` that a goal can be reached from."""
        self.episode_count = torch.zeros(rows, dtype=torch.int32, device=device)
        """int32 [rows]: number of episodes from a file, which take the first goal slots; 0 if they are sampled."""
        self.episode_start = torch.zeros(rows, goals, 4, device=device)
        """float32 [rows, goals, 4]: start position [m] and yaw [rad] of the episode in a goal slot."""

    def survey(self, row: int) -> None:
        """Prepare a loaded scene for navigation: find its walkable floor, choose goals, compute their distance fields.

        A field holds the geodesic distance from every cell to a goal. `row` is the scene slot.
        """
        ground = self.ground
        ground.survey(row)
        scene = ground.memory.scene(row)
        assert scene is not None
        cells = ground.navigable_cells(row, MIN_REGION_AREA)
        if not len(cells):
            raise ShoalError(
                f"{scene.name} has no walkable floor of {MIN_REGION_AREA:g} m²; check --up and --scale, or lower "
                "--agent-radius or --agent-height."
            )
        if self.episodes is not None:
            self._load_episodes(row, self.episodes[scene_name(scene.name)])
            return
        cells = cells[np.argsort(ground.surveys[row].region[cells], kind="stable")]
        region = ground.surveys[row].region[cells]
        drawn = torch.randint(len(cells), (self.fields.goals,), generator=self.rng).numpy()
        first, last = (np.searchsorted(region, region[drawn], side) for side in ("left", "right"))
        upload(self.start_cells[row, : len(cells)], torch.from_numpy(cells.astype(np.int32)))
        upload(self.goal_starts[row], torch.from_numpy(np.stack([first, last - first], 1).astype(np.int32)))
        goals = ground.cell_centers(row, cells[drawn])
        self.fields.solve(row, torch.from_numpy(goals))
        if self.path_range is not None:
            starts = ground.cell_centers(row, cells[first[0] : last[0]])
            self._check_path_range(row, goals[0], starts, *self.path_range)

    def _load_episodes(self, row: int, episodes: Episodes) -> None:
        """Write goals and starts of episodes, a random subset if there are too many; the host waits for the device."""
        goals, finder = self.fields.goals, Pathfinder(self.ground, row)
        if len(episodes) > goals:
            drawn = torch.randperm(len(episodes), generator=self.rng)[:goals].sort().values
            episodes = episodes.take(drawn.numpy())
        episodes = check_episodes(finder, episodes)
        count = len(episodes)
        ends = [torch.from_numpy(points) for points in (episodes.starts, episodes.goals)]
        starts, goal = ends if self.fields_from == "goals" else ends[::-1]
        # Unused goal slots repeat episodes.
        self.fields.solve(row, goal[torch.arange(goals) % count])
        far = finder.distances(starts, self.fields).diagonal().cpu().numpy()
        lost = np.flatnonzero(~np.isfinite(far))
        if len(lost):
            episodes.refuse(int(lost[0]), "cannot be played: its path is longer than the maximum of 65 m")
        upload(self.episode_start[row, :count], torch.cat([ends[0], torch.from_numpy(episodes.yaws)[:, None]], 1))
        self.episode_count[row] = count

    def _check_path_range(
        self, row: int, goal: np.ndarray, starts: np.ndarray, shortest: float, longest: float
    ) -> None:
        """Refuse a scene in which no goal has a start cell at an allowed geodesic distance.

        If one of the `starts` of a `goal` is `shortest` away in a straight line, some cell on its path is at an allowed
        distance. Otherwise the distance fields are read, and the host waits for the device.
        """
        wide = longest - shortest >= 2 * self.ground.cell_size
        if wide and np.linalg.norm(starts - goal, axis=1).max() >= shortest:
            return
        cells = self.start_cells[row].long()
        meters = (self.fields.field[row].int() & UNREACHABLE)[:, cells] / MM_PER_METER
        first, count = self.goal_starts[row].T[..., None]
        index = torch.arange(len(cells), device=cells.device)
        fits = (index >= first) & (index < first + count) & (meters >= shortest) & (meters <= longest)
        if not fits.any():
            scene = self.ground.memory.scene(row)
            raise ShoalError(
                f"{scene.name if scene else 'A scene'} has no path of {shortest:g} to {longest:g} m to any of "
                f"{self.fields.goals} goals; choose other scenes or distances."
            )

    def tables(self) -> dict[str, Broadcast]:
        """Arrays that kernels read, by parameter name."""
        return {
            "field": Broadcast(self.fields.field),
            "goal_positions": Broadcast(self.fields.goal),
            "start_cells": Broadcast(self.start_cells),
            "goal_starts": Broadcast(self.goal_starts),
            "active_rows": Broadcast(self.pool.active_rows),
            "num_active": Broadcast(self.pool.num_active),
            "episode_count": Broadcast(self.episode_count),
            "episode_start": Broadcast(self.episode_start),
        }

    def poll(self) -> None:
        """Swap scenes if it is time; call it between rollouts."""
        self.pool.poll()

    def close(self) -> None:
        """End the background loading of scenes."""
        self.pool.close()
