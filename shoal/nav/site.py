"""The site of a navigation world: scenes, their ground, and fields of distance to goals, kept up while it trains."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.core.kernels import Broadcast
from shoal.nav.episodes import Episodes, check_episodes, check_scenes, scene_name
from shoal.nav.geodesic import MILLI, UNREACHABLE, FieldMemory
from shoal.nav.ground import SMALLEST_REGION, Body, GroundMemory, send
from shoal.nav.queries import Pathfinder
from shoal.scene.pool import ScenePool

ROOM = 2.5
"""How much larger a later scene may be than the first ones; one that is larger still is left out."""


class Site:
    """A scene pool whose rows are surveyed as they come: ground, places to stand, goals and their fields.

    `sources` are single scenes. With `episodes`, by the scenes' names, goals and starts are theirs; every scene must
    have some.
    """

    def __init__(
        self, sources: list[str], envs: int, resident: int, goals: int, device: torch.device, seed: int,
        period: int, body: Body, cell: float, limit: int | None, up: str, scale: float,
        episodes: Mapping[str, Episodes] | None = None, measured_from: Literal["goals", "starts"] = "goals",
        ways: tuple[float, float] | None = None, strict: bool = False,
    ):  # fmt: skip
        """Fields are `measured_from` the goals of episodes, or from where they start.

        Scenes without any way of a length within `ways` are refused.
        """
        self.episodes, self.measured_from, self.ways = episodes, measured_from, ways
        if episodes is not None:
            check_scenes(episodes, sources)
        self.pool = ScenePool(
            sources, envs, resident, device=device, limit=limit, swap_interval=period, seed=seed, up=up, scale=scale,
            strict=strict,
        )  # fmt: skip
        self.rng = torch.Generator().manual_seed(seed)
        memory = self.pool.memory
        first = [memory.scene(row) for row in range(memory.rows) if memory.scene(row)]
        try:
            room = ROOM if self.pool.swap_interval else 1.0
            cells = GroundMemory.cells_for(first, cell, memory.device, memory.rows, goals, room)
            self._make_tables(GroundMemory(memory, cells, body, cell), goals)
            for row in self.pool.active:
                self.survey(row)
        except ShoalError:
            self.pool.close()
            raise
        self.pool.before_upload, self.pool.before_use = self.ground.check_room, self.survey

    def _make_tables(self, ground: GroundMemory, goals: int) -> None:
        self.ground, rows, device = ground, ground.memory.rows, ground.device
        self.fields = FieldMemory(self.ground, goals)
        self.standing = torch.zeros(rows, self.ground.cells, dtype=torch.int32, device=device)
        """int32 [rows, cells]: cells to start from, one region after the other."""
        self.goal_starts = torch.zeros(rows, goals, 2, dtype=torch.int32, device=device)
        """int32 [rows, goals, 2]: of those, the first from which a goal can be reached, and how many there are."""
        self.episode_count = torch.zeros(rows, dtype=torch.int32, device=device)
        """int32 [rows]: how many goals, from the first on, are those of an episode with a start of its own."""
        self.episode_start = torch.zeros(rows, goals, 4, device=device)
        """float32 [rows, goals, 4]: place and yaw where the episode with that goal begins."""

    def survey(self, row: int) -> None:
        """Find the ground of a scene that has come, take or draw its goals and solve their fields."""
        ground = self.ground
        ground.survey(row)
        scene = ground.memory.scene(row)
        assert scene is not None
        stands = ground.standing(row, SMALLEST_REGION)
        if not len(stands):
            raise ShoalError(f"{scene.name} has no walkable floor of {SMALLEST_REGION:g} m².")
        if self.episodes is not None:
            self._take_episodes(row, self.episodes[scene_name(scene.name)])
            return
        stands = stands[np.argsort(ground.found[row].region[stands], kind="stable")]
        region = ground.found[row].region[stands]
        drawn = torch.randint(len(stands), (self.fields.goals,), generator=self.rng).numpy()
        first, last = (np.searchsorted(region, region[drawn], side) for side in ("left", "right"))
        send(self.standing[row, : len(stands)], torch.from_numpy(stands.astype(np.int32)))
        send(self.goal_starts[row], torch.from_numpy(np.stack([first, last - first], 1).astype(np.int32)))
        goals = ground.middles(row, stands[drawn])
        self.fields.solve(row, torch.from_numpy(goals))
        if self.ways is not None:
            starts = ground.middles(row, stands[first[0] : last[0]])
            self._check_ways(row, goals[0], starts, *self.ways)

    def _take_episodes(self, row: int, episodes: Episodes) -> None:
        """Goals and starts from episodes, some of them if there are more than goals; the host waits for the device."""
        goals, finder = self.fields.goals, Pathfinder(self.ground, row)
        if len(episodes) > goals:
            drawn = torch.randperm(len(episodes), generator=self.rng)[:goals].sort().values
            episodes = episodes.take(drawn.numpy())
        episodes = check_episodes(finder, episodes)
        count = len(episodes)
        ends = [torch.from_numpy(places) for places in (episodes.starts, episodes.goals)]
        starts, goal = ends if self.measured_from == "goals" else ends[::-1]
        # Fields beyond the episodes repeat theirs.
        self.fields.solve(row, goal[torch.arange(goals) % count])
        far = finder.distances(starts, self.fields).diagonal().cpu().numpy()
        lost = np.flatnonzero(~np.isfinite(far))
        if len(lost):
            episodes.refuse(lost[0], "cannot be played: its way is longer than the 65 m that are measured")
        send(self.episode_start[row, :count], torch.cat([ends[0], torch.from_numpy(episodes.yaws)[:, None]], 1))
        self.episode_count[row] = count

    def _check_ways(self, row: int, goal: np.ndarray, starts: np.ndarray, shortest: float, longest: float) -> None:
        """Refuse a scene in which no goal can be reached over so many meters.

        Where one of the `starts` is that far from a `goal` as the crow flies, some place on the way is just as far as
        wanted. Otherwise the fields must tell, and the host waits for the device.
        """
        wide = longest - shortest >= 2 * self.ground.cell
        if wide and np.linalg.norm(starts - goal, axis=1).max() >= shortest:
            return
        stands = self.standing[row].long()
        meters = (self.fields.field[row].int() & UNREACHABLE)[:, stands] / MILLI
        first, count = self.goal_starts[row].T[..., None]
        place = torch.arange(len(stands), device=stands.device)
        fits = (place >= first) & (place < first + count) & (meters >= shortest) & (meters <= longest)
        if not fits.any():
            scene = self.ground.memory.scene(row)
            raise ShoalError(
                f"{scene.name if scene else 'A scene'} has no way of {shortest:g} to {longest:g} m to any of "
                f"{self.fields.goals} goals; choose other scenes, or other distances."
            )

    def tables(self) -> dict[str, Broadcast]:
        """What kernels read by name."""
        return {
            "field": Broadcast(self.fields.field),
            "goal_places": Broadcast(self.fields.goal),
            "standing": Broadcast(self.standing),
            "goal_starts": Broadcast(self.goal_starts),
            "choice": Broadcast(self.pool.choice),
            "choices": Broadcast(self.pool.choices),
            "episode_count": Broadcast(self.episode_count),
            "episode_start": Broadcast(self.episode_start),
        }

    def poll(self) -> None:
        """Let scenes come and go; call it between rollouts."""
        self.pool.poll()

    def close(self) -> None:
        self.pool.close()
