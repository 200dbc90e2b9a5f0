"""Sampling of episodes by Habitat's rules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.nav.episode_files import DEFAULT_RADIUS, write_episodes
from shoal.nav.episodes import Episodes, scenes_by_name
from shoal.nav.ground import MIN_REGION_AREA, GroundMemory
from shoal.nav.queries import Pathfinder
from shoal.scene.memory import SceneMemory
from shoal.scene.sources import expand, prepare

BATCH, STARTS = 64, 16
"""Goals that are sampled at a time, and candidate starts for each."""

ROUNDS = 20
"""Maximum number of sampled goals, as a multiple of the number of episodes."""


@dataclass(frozen=True)
class SamplingRules:
    """Rules for starts and goals; the defaults are Habitat's."""

    min_distance: float = 1.0
    """Minimum geodesic distance, in meters."""
    max_distance: float = 30.0
    """Maximum geodesic distance, in meters."""
    max_rise: float = 0.5
    """Maximum height difference between start and goal, in meters."""
    min_ratio: float = 1.1
    """Paths with a smaller ratio of geodesic to straight distance are kept with probability 20 (ratio - 0.98)²."""


def sample_episodes(finder: Pathfinder, count: int, seed: int = 0, rules: SamplingRules | None = None) -> Episodes:
    """Sample episodes on regions of at least `MIN_REGION_AREA`, with random headings.

    Args:
        finder: queries of the scene's ground.
        count: number of episodes.
        seed: seed of the random numbers.
        rules: rules for starts and goals.

    Returns:
        The episodes.

    Raises:
        ShoalError: the scene has too little floor, or too few paths meet the rules.
    """
    rules = rules or SamplingRules()
    ground, row = finder.ground, finder.row
    scene = ground.memory.scene(row)
    name = scene.name if scene else "The scene"
    cells = ground.navigable_cells(row, MIN_REGION_AREA)
    if not len(cells):
        raise ShoalError(f"{name} has no walkable floor of {MIN_REGION_AREA:g} m²; check its up axis and scale.")
    rng = np.random.default_rng(seed)
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    missing, tries = count, ROUNDS * count
    while missing > 0 and tries > 0:
        some = min(BATCH, missing)
        drawn = ground.cell_centers(row, cells[rng.integers(len(cells), size=some * (STARTS + 1))])
        goals, starts = drawn[:some], drawn[some:].reshape(some, STARTS, 3)
        far = finder.geodesic(torch.from_numpy(starts.reshape(-1, 3)), torch.from_numpy(goals)).cpu().numpy()
        far = far.reshape(some, STARTS, some)[np.arange(some), :, np.arange(some)]
        fits = _allowed(rules, starts, goals[:, None], far, rng.random((some, STARTS)))
        kept, first = np.flatnonzero(fits.any(1)), fits.argmax(1)
        parts.append((starts[kept, first[kept]], goals[kept], far[kept, first[kept]]))
        missing, tries = missing - len(kept), tries - some
    if missing > 0:
        raise ShoalError(
            f"Only {count - missing} of {count} episodes were found in {name}: "
            f"paths of {rules.min_distance:g} to {rules.max_distance:g} m are too rare there."
        )
    starts, goals, distance = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Episodes(
        scene=name,
        ids=np.arange(count).astype(str),
        starts=starts,
        yaws=rng.uniform(-np.pi, np.pi, count).astype(np.float32),
        goals=goals,
        radius=np.full(count, DEFAULT_RADIUS, np.float32),
        distance=distance,
    )


def _allowed(
    rules: SamplingRules, starts: np.ndarray, goals: np.ndarray, far: np.ndarray, chance: np.ndarray
) -> np.ndarray:
    """bool [...]: whether the rules accept each pair; `chance` is uniform in [0, 1)."""
    straight = np.linalg.norm(starts - goals, axis=-1)
    ratio = far / np.maximum(straight, 1e-6)
    level = np.abs(starts[..., 2] - goals[..., 2]) <= rules.max_rise
    fits = (far >= rules.min_distance) & (far <= rules.max_distance) & level  # False where there is no path (inf)
    return fits & ((ratio >= rules.min_ratio) | (chance < 20 * (ratio - 0.98) ** 2))


def make_episodes(
    sources: Sequence[str],
    count: int,
    split: str,
    folder: str,
    *,
    seed: int = 0,
    up: str = "auto",
    scale: float = 1.0,
    strict: bool = False,
    device: str | torch.device = "cpu",
    cell_size: float = 0.1,
) -> Iterator[str]:
    """Sample and write episodes scene by scene; yields a line of text about each file."""
    if count < 1 or seed < 0:
        raise ShoalError(f"The number of episodes must be at least 1 and the seed at least 0, got {count} and {seed}.")
    scenes = scenes_by_name(expand(sources)).values()
    write_episodes(folder, split, [])  # fails before the work if the folder cannot be written
    for source in scenes:
        packed = prepare(source, up, scale, device, strict)
        memory = SceneMemory.holding([packed], device)
        cells = GroundMemory.cells_per_row([packed], cell_size, memory.device, goals=BATCH)
        finder = Pathfinder(GroundMemory(memory, cells, cell_size=cell_size))
        episodes = replace(sample_episodes(finder, count, seed), scene=source.replace("\\", "/"))
        (file,) = write_episodes(folder, split, [episodes])
        yield f"{file}  {count} episodes of {source}, {episodes.distance.mean():.1f} m on average"
