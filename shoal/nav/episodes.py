"""Episodes in files: Habitat's PointNav datasets read, checked against a scene, drawn by its rules and written.

Habitat's axes are y up and -z forward; Shoal's are z up, and a yaw of 0 looks along x. A place (x, y, z) of Habitat is
(x, -z, y) here. Meshes with y up are turned alike when they are loaded, and Habitat turns those with z up the other way
round, so places fit whatever axis a mesh was kept in.
"""

import contextlib
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from shoal.core.errors import ShoalError, excerpt, make_folder, missing, writing
from shoal.nav.ground import SMALLEST_REGION, GroundMemory
from shoal.nav.queries import Pathfinder
from shoal.scene.load import EXTENSIONS
from shoal.scene.memory import SceneMemory
from shoal.scene.sources import expand, prepare

FILES = (".json.gz", ".json")

NEAR = 0.5
"""Meters from walkable floor that a start or a goal may be, to be put there."""

RADIUS = 0.2
"""Meters around a goal that count as there, where a file says nothing."""

UPRIGHT = 0.999
"""Cosine of the most that a start may lean: an agent turns about the upward axis only."""

LONGEST_ID = 200
"""Characters of an episode's id: all ids of a scene take as much memory as its longest."""

LARGEST_TEXT = 2**31
"""Bytes of an episode file once decompressed."""

BATCH, STARTS = 64, 16
"""Goals that are drawn at a time, and starts that are tried for each."""

ROUNDS = 20
"""How many times as many goals as needed are tried before a scene is given up."""


@dataclass(frozen=True)
class Episodes:
    """Episodes of one scene, in Shoal's axes."""

    scene: str
    """The scene as the file names it: a path, or house:7."""
    ids: np.ndarray
    """str [n]."""
    starts: np.ndarray
    """float32 [n, 3], meters."""
    yaws: np.ndarray
    """float32 [n], radians from x towards y."""
    goals: np.ndarray
    """float32 [n, 3], meters."""
    radius: np.ndarray
    """float32 [n], meters around the goal."""
    distance: np.ndarray
    """float32 [n], meters from start to goal along the floor; NaN where the file does not say."""
    file: str = ""
    """Where they were read, for messages."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def name(self) -> str:
        """What the scene is called in a dataset."""
        return scene_name(self.scene)

    def take(self, which: np.ndarray) -> "Episodes":
        """Some of them, by number."""
        arrays = {f.name: getattr(self, f.name)[which] for f in fields(self) if f.name not in ("scene", "file")}
        return replace(self, **arrays)

    def refuse(self, which: int, why: str) -> NoReturn:
        """One of them cannot be played."""
        raise ShoalError(f"{self.file or 'An episode'}: episode {self.ids[which]} of {excerpt(self.scene)} {why}.")


@lru_cache(4096)
def scene_name(source: str) -> str:
    """What a scene is called in a dataset: `a/Adrian.glb` is Adrian, `house:7@0` house-7@0, `house:7@1` house-7."""
    name = re.split(r"[\\/]", str(source))[-1]
    ending = next((ending for ending in EXTENSIONS if name.lower().endswith(ending)), "")
    return name[: len(name) - len(ending)].removesuffix(".basis").removesuffix("@1").replace(":", "-")


# --- axes ----------------------------------------------------------------------------------------------------------


def from_habitat(places: np.ndarray) -> np.ndarray:
    """Layout2D [n, 3] of Habitat in Shoal's axes."""
    return np.stack([places[:, 0], -places[:, 2], places[:, 1]], 1)


def to_habitat(places: np.ndarray) -> np.ndarray:
    """Layout2D [n, 3] of Shoal in Habitat's axes."""
    return np.stack([places[:, 0], places[:, 2], -places[:, 1]], 1)


def yaw_of(rotations: np.ndarray) -> np.ndarray:
    """Yaws [n] of Habitat's unit quaternions [n, 4], xyzw: where they turn -z to, seen from above."""
    x, y, z, w = rotations.T
    right, back = 2 * (x * z + w * y), 1 - 2 * (x * x + y * y)  # what becomes of z
    return np.arctan2(back, -right)


def rotation_of(yaws: np.ndarray) -> np.ndarray:
    """Habitat's quaternions [n, 4], xyzw, of yaws [n]: about y, from -z, which is a yaw of a quarter turn."""
    half = (np.asarray(yaws, np.float64) - np.pi / 2) / 2
    nought = np.zeros_like(half)
    return np.stack([nought, np.sin(half), nought, np.cos(half)], 1)


# --- reading -------------------------------------------------------------------------------------------------------


def read_episodes(path: str | Path, scenes: Sequence[str] | None = None) -> dict[str, Episodes]:
    """The episodes of a file, or of a split's folder with a file per scene in `content`, by the scenes' names.

    With `scenes` only theirs are read, and a scene that has none is refused.
    """
    path = Path(path).expanduser()
    tops, inner = _files(path)
    wanted = None if scenes is None else {scene_name(scene) for scene in scenes}
    found: dict[str, list[Episodes]] = {}
    for file in tops:
        _read_file(file, found, may_be_empty=bool(inner))
    if not found:
        for file in inner:
            if wanted is None or _stem(file) in wanted:
                _read_file(file, found)
    episodes = {name: _joined(parts) for name, parts in found.items() if wanted is None or name in wanted}
    if scenes is not None:
        check_scenes(episodes, scenes, str(path), {*found, *map(_stem, inner)})
    return episodes


def check_scenes(
    episodes: Mapping[str, Episodes], scenes: Sequence[str], file: str = "", there: Iterable[str] = ()
) -> None:
    """Refuse scenes that have no episodes, by name; `there` are the scenes that have some, if not just these."""
    missing = [scene for name, scene in _by_name(scenes).items() if name not in episodes]
    if missing:
        held = sorted(there or episodes)
        plain = {name.partition("@")[0] for name in held}
        other = any(scene_name(scene).partition("@")[0] in plain for scene in missing)
        hint = ", in another detail: play with --detail 1, or draw them as house:7@0" if other else ""
        file = file or "The episode file"
        raise ShoalError(f"{file} has no episodes of {_listed(missing)}; it has those of {_listed(held)}{hint}.")


def _by_name(scenes: Sequence[str]) -> dict[str, str]:
    """Name in a dataset -> scene; two of one name are refused, since nobody could tell their episodes apart."""
    named: dict[str, str] = {}
    for scene in scenes:
        name = scene_name(scene)
        if named.setdefault(name, scene) != scene:
            raise ShoalError(f"{named[name]} and {scene} are both called {name} in episode files; rename one of them.")
    return named


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(excerpt, names[:most])) + more


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """Files that may hold the episodes themselves, and those of single scenes, read where the former hold none."""
    try:
        if path.is_file():
            return [path], _episode_files(path.parent / "content")
        if not path.is_dir():
            raise ShoalError(missing("file or folder", path))
        inner = _episode_files(path / "content")
        tops = _episode_files(path)
        if inner:
            tops = [file for file in tops if _stem(file) == path.resolve().name]
        if not tops and not inner:
            splits = sorted(p.name for p in path.iterdir() if (p / "content").is_dir() or _episode_files(p))
            remedy = (
                f"name one of its splits: {', '.join(splits)}" if splits else f"it wants {' or '.join(FILES)} files"
            )
            raise ShoalError(f"{path} holds no episodes; {remedy}.")
        return tops, inner
    except (OSError, ValueError) as error:
        raise ShoalError(f"{str(path)[:200]!r} cannot be read: {error}.") from None


def _episode_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.name.endswith(FILES) and p.is_file()) if folder.is_dir() else []


def _stem(file: Path) -> str:
    return next((file.name.removesuffix(ending) for ending in FILES if file.name.endswith(ending)), file.stem)


def _read_file(file: Path, found: dict[str, list[Episodes]], may_be_empty: bool = False) -> None:
    """Add the episodes of a file to those that were found, by scene."""
    entries = _entries(file)
    if not entries and not may_be_empty:
        raise ShoalError(f"{file} holds no episodes.")
    rows: dict[str, list[tuple]] = {}
    scenes: dict[str, str] = {}
    for number, entry in enumerate(entries):
        scene, row = _row(file, number, entry)
        name = scene_name(scene)
        scenes.setdefault(name, scene)
        rows.setdefault(name, []).append(row)
    for name, group in rows.items():
        ids, starts, rotations, goals, radius, distance = zip(*group, strict=True)
        made = Episodes(
            scene=scenes[name],
            ids=np.array(ids),
            starts=from_habitat(np.array(starts, np.float32)),
            yaws=yaw_of(np.array(rotations, np.float64)).astype(np.float32),
            goals=from_habitat(np.array(goals, np.float32)),
            radius=np.array(radius, np.float32),
            distance=np.array(distance, np.float32),
            file=str(file),
        )
        found.setdefault(name, []).append(made)


def _entries(file: Path) -> list:
    """The list of episodes that stands in a file."""
    try:
        data = file.read_bytes()
        if not data:
            raise ShoalError(f"{file} is empty (0 bytes).")
        content = json.loads(_decompressed(file, data) if file.name.endswith(".gz") else data)
    except gzip.BadGzipFile:
        raise ShoalError(f"{file} is not compressed by gzip, as its name says; call it .json if it is plain.") from None
    except (EOFError, zlib.error) as error:
        raise ShoalError(f"{file} is damaged: {error}.") from None
    except OSError as error:
        raise ShoalError(f"{file} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"{file} is not JSON: {error}.") from None
    entries = content.get("episodes") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ShoalError(f"{file} has no list of episodes; Habitat's datasets are an object with the key 'episodes'.")
    return entries


def _decompressed(file: Path, data: bytes) -> bytes:
    """In pieces: a small file may claim any size."""
    pieces, total = [], 0
    with gzip.open(io.BytesIO(data)) as text:
        while piece := text.read(2**20):
            total += len(piece)
            if total > LARGEST_TEXT:
                raise ShoalError(f"{file} holds more than {LARGEST_TEXT:,} bytes once decompressed: split it.")
            pieces.append(piece)
    return b"".join(pieces)


def _row(file: Path, place: int, entry: Any) -> tuple[str, tuple]:
    """Scene, and (id, start, rotation, goal, radius, distance) of one episode, in the file's axes."""
    name = f"{file}: episode number {place}"
    entry = _object(name, "", entry)
    number = _given(name, entry, "episode_id")
    if not isinstance(number, (str, int)) or len(str(number)) > LONGEST_ID:
        raise ShoalError(f"{name}: episode_id is {_short(number)}, not an id of at most {LONGEST_ID} characters.")
    name = f"{file}: episode {excerpt(number)}"
    scene = _given(name, entry, "scene_id")
    if not isinstance(scene, str) or not scene_name(scene):
        raise ShoalError(f"{name}: scene_id is {_short(scene)}, not the name of a scene.")
    goals = _given(name, entry, "goals")
    if not isinstance(goals, list) or len(goals) != 1:
        count = len(goals) if isinstance(goals, list) else _short(goals)
        raise ShoalError(f"{name} must have a list of one goal, not {count}.")
    goal = _object(name, "goals[0]", goals[0])
    info = _object(name, "info", entry.get("info") or {})
    rotation = _vector(name, "start_rotation", _given(name, entry, "start_rotation"), 4)
    length = math.hypot(*rotation)
    if not 0.95 < length < 1.05:
        raise ShoalError(f"{name}: start_rotation is {_short(rotation)}, not a unit quaternion (x, y, z, w).")
    rotation = [part / length for part in rotation]
    if 1 - 2 * (rotation[0] ** 2 + rotation[2] ** 2) < UPRIGHT:
        raise ShoalError(f"{name}: start_rotation {_short(rotation)} leans; agents turn about y only.")
    return scene, (
        str(number),
        _vector(name, "start_position", _given(name, entry, "start_position"), 3),
        rotation,
        _vector(name, "goals[0].position", _given(name, goal, "position", "goals[0]."), 3),
        _length(name, "goals[0].radius", goal.get("radius"), RADIUS),
        _length(name, "info.geodesic_distance", info.get("geodesic_distance"), math.nan),
    )


def _object(name: str, field: str, value: Any) -> dict:
    if not isinstance(value, dict):
        raise ShoalError(f"{name}{field and f': {field}'} is {_short(value)}, not an object.")
    return value


def _given(name: str, entry: dict, field: str, within: str = "") -> Any:
    if entry.get(field) is None:
        raise ShoalError(f"{name} has no {within}{field}.")
    return entry[field]


def _is_number(value: Any) -> bool:
    # Beyond this, single precision has no number.
    return type(value) in (int, float) and -3e38 < value < 3e38


def _vector(name: str, field: str, value: Any, count: int) -> list[float]:
    if not (isinstance(value, list) and len(value) == count and all(map(_is_number, value))):
        raise ShoalError(f"{name}: {field} is {_short(value)}, not {count} finite numbers.")
    return value


def _length(name: str, field: str, value: Any, default: float) -> float:
    if value is None:
        return default
    if not _is_number(value) or value < 0:
        raise ShoalError(f"{name}: {field} is {_short(value)}, not a length in meters.")
    return value


def _short(value: Any) -> str:
    return excerpt(repr(value), 80)


def _joined(parts: list[Episodes]) -> Episodes:
    if len(parts) == 1:
        return parts[0]
    names = [f.name for f in fields(Episodes) if f.name not in ("scene", "file")]
    return replace(parts[0], **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


# --- checking against a scene --------------------------------------------------------------------------------------


def check_episodes(finder: Pathfinder, episodes: Episodes) -> Episodes:
    """The episodes with starts and goals put on the nearest walkable floor; one that cannot be played is refused.

    Small islands do not count: the top of a table, or the hollow of a wall, may be nearer than the floor beside it.
    """
    given = torch.from_numpy(np.concatenate([episodes.starts, episodes.goals]))
    places = finder.on_floor(finder.nearest(given, SMALLEST_REGION))
    away = (places.cpu() - given).norm(dim=1).numpy()
    island = finder.region(places).cpu().numpy()
    count = len(episodes)
    for i in range(2 * count):
        if not away[i] <= NEAR:
            what = "start_position" if i < count else "goal"
            x, y, z = to_habitat(given[i : i + 1].numpy())[0]
            far = f"{what} ({x:.2f}, {y:.2f}, {z:.2f}) is {away[i]:.2f} m from walkable floor, more than {NEAR} m"
            episodes.refuse(i % count, f"cannot be played: its {far}; the scene may be another version, or unit")
    apart = np.flatnonzero(island[:count] != island[count:])
    if len(apart):
        episodes.refuse(apart[0], "cannot be played: no way leads from its start to its goal; they are on two islands")
    found = places.cpu().numpy()
    return replace(episodes, starts=found[:count], goals=found[count:])


# --- drawing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """Which starts and goals make an episode; Habitat's unless told otherwise."""

    shortest: float = 1.0
    """Meters along the floor at least."""
    longest: float = 30.0
    """Meters at most."""
    rise: float = 0.5
    """Meters that the goal may be higher or lower than the start."""
    straight: float = 1.1
    """Ways that are shorter than this many times the straight line are kept with probability 20 (ratio - 0.98)²."""


def sample_episodes(finder: Pathfinder, count: int, seed: int = 0, rules: Rules | None = None) -> Episodes:
    """Episodes drawn by the rules, on connected floor of some size, facing anywhere."""
    rules = rules or Rules()
    ground, row = finder.ground, finder.row
    scene = ground.memory.scene(row)
    name = scene.name if scene else "The scene"
    stands = ground.standing(row, SMALLEST_REGION)
    if not len(stands):
        raise ShoalError(f"{name} has no walkable floor of {SMALLEST_REGION:g} m².")
    rng = np.random.default_rng(seed)
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    missing, tries = count, ROUNDS * count
    while missing > 0 and tries > 0:
        some = min(BATCH, missing)
        drawn = ground.middles(row, stands[rng.integers(len(stands), size=some * (STARTS + 1))])
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
            f"ways of {rules.shortest:g} to {rules.longest:g} m are too rare there."
        )
    starts, goals, distance = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Episodes(
        scene=name,
        ids=np.arange(count).astype(str),
        starts=starts,
        yaws=rng.uniform(-np.pi, np.pi, count).astype(np.float32),
        goals=goals,
        radius=np.full(count, RADIUS, np.float32),
        distance=distance,
    )


def _allowed(rules: Rules, starts: np.ndarray, goals: np.ndarray, far: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """bool [...]: which of them the rules keep; `chance` is uniform."""
    straight = np.linalg.norm(starts - goals, axis=-1)
    ratio = far / np.maximum(straight, 1e-6)
    level = np.abs(starts[..., 2] - goals[..., 2]) <= rules.rise
    fits = (far >= rules.shortest) & (far <= rules.longest) & level  # also false where there is no way
    return fits & ((ratio >= rules.straight) | (chance < 20 * (ratio - 0.98) ** 2))


# --- writing -------------------------------------------------------------------------------------------------------


def write_episodes(folder: str | Path, split: str, episodes: Iterable[Episodes]) -> list[Path]:
    """Write `{split}/content/{scene}.json.gz` for each scene, and the file beside `content` that Habitat looks for."""
    if not re.fullmatch(r"[\w][\w.-]*", split) or split == "content":
        raise ShoalError(f"A split needs a plain name such as train or val, not {split!r}.")
    base = Path(folder).expanduser() / split
    written = []
    for part in episodes:
        written.append(base / "content" / f"{part.name}.json.gz")
        _write(written[-1], _to_entries(part))
    _write(base / f"{split}.json.gz", [])
    return written


def _to_entries(episodes: Episodes) -> list[dict[str, Any]]:
    """Episodes with Habitat's fields, and no others: it refuses those."""
    starts, goals = _numbers(to_habitat(episodes.starts)), _numbers(to_habitat(episodes.goals))
    rotations = rotation_of(episodes.yaws).tolist()
    radius, distance = _numbers(episodes.radius), _numbers(episodes.distance)
    return [
        dict(
            episode_id=str(episodes.ids[i]),
            scene_id=episodes.scene,
            start_position=starts[i],
            start_rotation=rotations[i],
            goals=[dict(position=goals[i], radius=radius[i])],
            info={} if math.isnan(distance[i]) else dict(geodesic_distance=distance[i]),
        )
        for i in range(len(episodes))
    ]


def _numbers(values: np.ndarray) -> list:
    """The shortest numbers that become the same float32."""
    return values.astype(np.float32).astype(str).astype(np.float64).tolist()


def _write(file: Path, entries: list[dict[str, Any]]) -> None:
    """Under another name first, so that no half of a file is ever read; the same episodes are the same bytes."""
    data = gzip.compress(json.dumps({"episodes": entries}, allow_nan=False).encode(), mtime=0)
    half = make_folder(file.parent) / f".{file.name}.{os.getpid()}"
    try:
        with writing(file):
            half.write_bytes(data)
            half.replace(file)
    finally:
        with contextlib.suppress(OSError):
            half.unlink()


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
    cell: float = 0.1,
) -> Iterator[str]:
    """Draw and write episodes for scenes, one after the other; a line about each."""
    if count < 1 or seed < 0:
        raise ShoalError(f"At least one episode and a seed from 0 on are needed, not {count} and {seed}.")
    scenes = _by_name(expand(sources)).values()
    write_episodes(folder, split, [])  # what cannot be written is told before the work
    for source in scenes:
        packed = prepare(source, up, scale, device, strict)
        memory = SceneMemory.holding([packed], device)
        cells = GroundMemory.cells_for([packed], cell, memory.device, goals=BATCH)
        finder = Pathfinder(GroundMemory(memory, cells, cell=cell))
        made = replace(sample_episodes(finder, count, seed), scene=source.replace("\\", "/"))
        (file,) = write_episodes(folder, split, [made])
        yield f"{file}  {count} episodes of {source}, {made.distance.mean():.1f} m on average"
