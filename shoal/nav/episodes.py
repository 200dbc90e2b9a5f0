"""Episodes of a scene: their arrays, Habitat's axes, and checks against scenes.

Habitat's axes are y up and -z forward; Shoal's are z up, and a yaw of 0 faces along x. Habitat's point (x, y, z) is
(x, -z, y) here. Meshes with y up are rotated in the same way when they are loaded, and Habitat rotates meshes with z up
inversely, so that points match whatever the upward axis of the mesh.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NoReturn

import numpy as np
import torch

from shoal.core.errors import ShoalError, excerpt
from shoal.nav.ground import MIN_REGION_AREA
from shoal.nav.queries import Pathfinder
from shoal.scene.load import EXTENSIONS

MAX_SNAP_DISTANCE = 0.5
"""Largest distance by which a start or goal is moved to walkable floor, in meters."""


@dataclass(frozen=True)
class Episodes:
    """Episodes of one scene, in Shoal's axes."""

    scene: str
    """Name of the scene as in the file: a path, or house:7."""
    ids: np.ndarray
    """str [n]: episode ids."""
    starts: np.ndarray
    """float32 [n, 3]: start positions [m]."""
    yaws: np.ndarray
    """float32 [n]: headings at the start [rad], from x towards y."""
    goals: np.ndarray
    """float32 [n, 3]: goal positions [m]."""
    radius: np.ndarray
    """float32 [n]: radius of the goal [m]."""
    distance: np.ndarray
    """float32 [n]: geodesic distance from start to goal [m]; NaN if the file has none."""
    file: str = ""
    """Path of the file, for messages."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def name(self) -> str:
        """Name of the scene in a dataset."""
        return scene_name(self.scene)

    def take(self, which: np.ndarray) -> "Episodes":
        """A subset, by index."""
        arrays = {f.name: getattr(self, f.name)[which] for f in fields(self) if f.name not in ("scene", "file")}
        return replace(self, **arrays)

    def refuse(self, which: int, why: str) -> NoReturn:
        """Raise an error that names the file and the episode."""
        raise ShoalError(f"{self.file or 'An episode'}: episode {self.ids[which]} of {excerpt(self.scene)} {why}.")


@lru_cache(4096)
def scene_name(source: str) -> str:
    """Name of a scene in a dataset: Adrian for `a/Adrian.glb`, house-7@0 for `house:7@0`, house-7 for `house:7@1`."""
    name = re.split(r"[\\/]", str(source))[-1]
    ending = next((ending for ending in EXTENSIONS if name.lower().endswith(ending)), "")
    return name[: len(name) - len(ending)].removesuffix(".basis").removesuffix("@1").replace(":", "-")


# --- axes ----------------------------------------------------------------------------------------------------------


def from_habitat(points: np.ndarray) -> np.ndarray:
    """Habitat's points [n, 3] in Shoal's axes."""
    return np.stack([points[:, 0], -points[:, 2], points[:, 1]], 1)


def to_habitat(points: np.ndarray) -> np.ndarray:
    """Shoal's points [n, 3] in Habitat's axes."""
    return np.stack([points[:, 0], points[:, 2], -points[:, 1]], 1)


def yaw_of(rotations: np.ndarray) -> np.ndarray:
    """Yaws [n] of Habitat's unit quaternions [n, 4], xyzw: the direction of the rotated -z axis, from above."""
    x, y, z, w = rotations.T
    right, back = 2 * (x * z + w * y), 1 - 2 * (x * x + y * y)  # components of the rotated z axis
    return np.arctan2(back, -right)


def rotation_of(yaws: np.ndarray) -> np.ndarray:
    """Habitat's quaternions [n, 4], xyzw, of yaws [n]: rotations about y; no rotation faces -z, a yaw of pi / 2."""
    half = (np.asarray(yaws, np.float64) - np.pi / 2) / 2
    zero = np.zeros_like(half)
    return np.stack([zero, np.sin(half), zero, np.cos(half)], 1)


# --- checks --------------------------------------------------------------------------------------------------------


def check_scenes(
    episodes: Mapping[str, Episodes], scenes: Sequence[str], file: str = "", available: Iterable[str] = ()
) -> None:
    """Refuse scenes without episodes. `available` names all scenes of the file, if `episodes` holds only some."""
    missing = [scene for name, scene in scenes_by_name(scenes).items() if name not in episodes]
    if missing:
        held = sorted(available or episodes)
        plain = {name.partition("@")[0] for name in held}
        other = any(scene_name(scene).partition("@")[0] in plain for scene in missing)
        hint = ", at another level of detail: use --detail 1, or make episodes for house:7@0" if other else ""
        file = file or "The episode file"
        raise ShoalError(f"{file} has no episodes of {_listed(missing)}; it has those of {_listed(held)}{hint}.")


def scenes_by_name(scenes: Sequence[str]) -> dict[str, str]:
    """Scenes by their name in a dataset. Refuses two with one name, whose episodes could not be distinguished."""
    named: dict[str, str] = {}
    for scene in scenes:
        name = scene_name(scene)
        if named.setdefault(name, scene) != scene:
            raise ShoalError(f"{named[name]} and {scene} are both named {name} in episode files; rename one of them.")
    return named


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(excerpt, names[:most])) + more


def check_episodes(finder: Pathfinder, episodes: Episodes) -> Episodes:
    """Move starts and goals to the nearest walkable floor, and refuse episodes that cannot be played.

    Small regions are ignored: the top of a table or the inside of a wall may be nearer than the floor beside it.

    Args:
        finder: queries of the scene's ground.
        episodes: episodes of that scene.

    Returns:
        The episodes with starts and goals on the floor.

    Raises:
        ShoalError: a start or goal is too far from walkable floor, or no path connects the two.
    """
    given = torch.from_numpy(np.concatenate([episodes.starts, episodes.goals]))
    points = finder.on_floor(finder.nearest(given, MIN_REGION_AREA))
    away = (points.cpu() - given).norm(dim=1).numpy()
    region = finder.region(points).cpu().numpy()
    count = len(episodes)
    for i in range(2 * count):
        if not away[i] <= MAX_SNAP_DISTANCE:
            what = "start_position" if i < count else "goal"
            x, y, z = to_habitat(given[i : i + 1].numpy())[0]
            far = f"its {what} ({x:.2f}, {y:.2f}, {z:.2f}) is {away[i]:.2f} m from walkable floor, more than"
            hint = "the scene may have another version or unit"
            episodes.refuse(i % count, f"cannot be played: {far} {MAX_SNAP_DISTANCE} m; {hint}")
    apart = np.flatnonzero(region[:count] != region[count:])
    if len(apart):
        episodes.refuse(apart[0], "cannot be played: no path connects its start and goal")
    found = points.cpu().numpy()
    return replace(episodes, starts=found[:count], goals=found[count:])
