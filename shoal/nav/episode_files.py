"""Episode files: Habitat's PointNav datasets, read and written."""

import contextlib
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import ShoalError, excerpt, make_folder, missing, writing
from shoal.nav.episodes import Episodes, check_scenes, from_habitat, rotation_of, scene_name, to_habitat, yaw_of

EXTENSIONS = (".json.gz", ".json")

DEFAULT_RADIUS = 0.2
"""Radius of a goal if the file has none, in meters."""

MIN_UP = 0.999
"""Smallest cosine of a start's tilt: agents turn about the upward axis only."""

MAX_ID_LENGTH = 200
"""Largest length of an episode id; all ids of a scene take as much memory as the longest."""

MAX_TEXT_SIZE = 2**31
"""Largest size of a decompressed episode file, in bytes."""


# --- reading -------------------------------------------------------------------------------------------------------


def read_episodes(path: str | Path, scenes: Sequence[str] | None = None) -> dict[str, Episodes]:
    """Read episodes in Habitat's PointNav format.

    Args:
        path: a file, or the folder of a split with a file per scene in `content`.
        scenes: scenes to read episodes of (None: all).

    Returns:
        Episodes by scene name.

    Raises:
        ShoalError: a file or an episode is invalid, or one of `scenes` has no episodes.
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
    episodes = {name: _concatenate(parts) for name, parts in found.items() if wanted is None or name in wanted}
    if scenes is not None:
        check_scenes(episodes, scenes, str(path), {*found, *map(_stem, inner)})
    return episodes


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """Files with the episodes of a split, and files of single scenes, which are read if the former are empty."""
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
                f"name one of its splits: {', '.join(splits)}"
                if splits
                else f"expected {' or '.join(EXTENSIONS)} files"
            )
            raise ShoalError(f"{path} holds no episodes; {remedy}.")
        return tops, inner
    except (OSError, ValueError) as error:
        raise ShoalError(f"{str(path)[:200]!r} cannot be read: {error}.") from None


def _episode_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.name.endswith(EXTENSIONS) and p.is_file()) if folder.is_dir() else []


def _stem(file: Path) -> str:
    return next((file.name.removesuffix(ending) for ending in EXTENSIONS if file.name.endswith(ending)), file.stem)


def _read_file(file: Path, found: dict[str, list[Episodes]], may_be_empty: bool = False) -> None:
    """Append the episodes of a file to `found`, by scene name."""
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
        episodes = Episodes(
            scene=scenes[name],
            ids=np.array(ids),
            starts=from_habitat(np.array(starts, np.float32)),
            yaws=yaw_of(np.array(rotations, np.float64)).astype(np.float32),
            goals=from_habitat(np.array(goals, np.float32)),
            radius=np.array(radius, np.float32),
            distance=np.array(distance, np.float32),
            file=str(file),
        )
        found.setdefault(name, []).append(episodes)


def _entries(file: Path) -> list:
    """The JSON list of episodes in a file."""
    try:
        data = file.read_bytes()
        if not data:
            raise ShoalError(f"{file} is empty (0 bytes).")
        content = json.loads(_decompressed(file, data) if file.name.endswith(".gz") else data)
    except gzip.BadGzipFile:
        raise ShoalError(f"{file} is not a gzip file; rename it to .json if it is not compressed.") from None
    except (EOFError, zlib.error) as error:
        raise ShoalError(f"{file} is damaged: {error}.") from None
    except OSError as error:
        raise ShoalError(f"{file} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"{file} is not JSON: {error}.") from None
    entries = content.get("episodes") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ShoalError(f"{file} has no list of episodes; a Habitat dataset is an object with the key 'episodes'.")
    return entries


def _decompressed(file: Path, data: bytes) -> bytes:
    """Decompress in chunks, since a small file may expand to any size."""
    chunks, total = [], 0
    with gzip.open(io.BytesIO(data)) as text:
        while chunk := text.read(2**20):
            total += len(chunk)
            if total > MAX_TEXT_SIZE:
                raise ShoalError(f"{file} holds more than {MAX_TEXT_SIZE:,} bytes once decompressed: split it.")
            chunks.append(chunk)
    return b"".join(chunks)


def _row(file: Path, index: int, entry: Any) -> tuple[str, tuple]:
    """Scene and (id, start, rotation, goal, radius, distance) of one episode, in Habitat's axes."""
    name = f"{file}: episode number {index}"
    entry = _object(name, "", entry)
    number = _required(name, entry, "episode_id")
    if not isinstance(number, (str, int)) or len(str(number)) > MAX_ID_LENGTH:
        raise ShoalError(f"{name}: episode_id is {_short(number)}, not an id of at most {MAX_ID_LENGTH} characters.")
    name = f"{file}: episode {excerpt(number)}"
    scene = _required(name, entry, "scene_id")
    if not isinstance(scene, str) or not scene_name(scene):
        raise ShoalError(f"{name}: scene_id is {_short(scene)}, not a text with a file name, such as a/Adrian.glb.")
    goals = _required(name, entry, "goals")
    if not isinstance(goals, list) or len(goals) != 1:
        count = len(goals) if isinstance(goals, list) else _short(goals)
        raise ShoalError(f"{name} must have a list of one goal, not {count}.")
    goal = _object(name, "goals[0]", goals[0])
    info = _object(name, "info", entry.get("info") or {})
    rotation = _vector(name, "start_rotation", _required(name, entry, "start_rotation"), 4)
    length = math.hypot(*rotation)
    if not 0.95 < length < 1.05:
        raise ShoalError(f"{name}: start_rotation is {_short(rotation)}, not a unit quaternion (x, y, z, w).")
    rotation = [part / length for part in rotation]
    if 1 - 2 * (rotation[0] ** 2 + rotation[2] ** 2) < MIN_UP:
        raise ShoalError(f"{name}: start_rotation {_short(rotation)} is tilted; agents turn about y only.")
    return scene, (
        str(number),
        _vector(name, "start_position", _required(name, entry, "start_position"), 3),
        rotation,
        _vector(name, "goals[0].position", _required(name, goal, "position", "goals[0]."), 3),
        _length(name, "goals[0].radius", goal.get("radius"), DEFAULT_RADIUS),
        _length(name, "info.geodesic_distance", info.get("geodesic_distance"), math.nan),
    )


def _object(name: str, field: str, value: Any) -> dict:
    if not isinstance(value, dict):
        raise ShoalError(f"{name}{field and f': {field}'} is {_short(value)}, not an object.")
    return value


def _required(name: str, entry: dict, field: str, within: str = "") -> Any:
    if entry.get(field) is None:
        raise ShoalError(f"{name} has no {within}{field}.")
    return entry[field]


def _is_number(value: Any) -> bool:
    # Larger numbers overflow float32.
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


def _concatenate(parts: list[Episodes]) -> Episodes:
    if len(parts) == 1:
        return parts[0]
    names = [f.name for f in fields(Episodes) if f.name not in ("scene", "file")]
    return replace(parts[0], **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


# --- writing -------------------------------------------------------------------------------------------------------


def write_episodes(folder: str | Path, split: str, episodes: Iterable[Episodes]) -> list[Path]:
    """Write episodes as a Habitat dataset.

    Args:
        folder: folder of the dataset.
        split: name of the split, such as train or val.
        episodes: episodes of one scene each, written to `{folder}/{split}/content/{scene}.json.gz`.

    Returns:
        Paths of the written files, without the empty `{split}.json.gz` that Habitat requires.
    """
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
    """Episodes as JSON objects with only Habitat's fields, since it refuses others."""
    starts, goals = _decimals(to_habitat(episodes.starts)), _decimals(to_habitat(episodes.goals))
    rotations = rotation_of(episodes.yaws).tolist()
    radius, distance = _decimals(episodes.radius), _decimals(episodes.distance)
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


def _decimals(values: np.ndarray) -> list:
    """The shortest decimal numbers that round to the same float32."""
    return values.astype(np.float32).astype(str).astype(np.float64).tolist()


def _write(file: Path, entries: list[dict[str, Any]]) -> None:
    """Write a file atomically and reproducibly: the same episodes give the same bytes."""
    data = gzip.compress(json.dumps({"episodes": entries}, allow_nan=False).encode(), mtime=0)
    temporary = make_folder(file.parent) / f".{file.name}.{os.getpid()}"
    try:
        with writing(file):
            temporary.write_bytes(data)
            temporary.replace(file)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
