"""Write and read config.json of a run folder."""

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from shoal.algos.registry import LEARNERS
from shoal.config.counts import AUTO
from shoal.config.job import Job
from shoal.config.schema import SECTIONS, make_sections
from shoal.core.errors import ShoalError, excerpt, unknown
from shoal.core.registry import kind_of_world
from shoal.core.settings import make_settings
from shoal.core.world_loading import world_class
from shoal.runs.files import read_json
from shoal.runs.trust import check_code, record_code

CONFIG = "config.json"
"""File of a run folder with its settings."""

VERSION = 2
"""Format version; it changes with the names of settings."""

NOT_SAVED = {"run_dir", "trust"}
"""Settings of a command, not of the run."""


def job_to_json(job: Job) -> str:
    """The text of config.json: all settings, and the user code that they need."""
    parts: dict[str, Any] = {"version": VERSION, "world": job.world, "world_config": asdict(job.world_config)}
    for section in SECTIONS:
        parts[section] = {k: v for k, v in asdict(getattr(job, section)).items() if k not in NOT_SAVED}
    parts["learn"] = asdict(job.learn)
    # The signature covers the values as JSON returns them.
    parts = json.loads(json.dumps(parts, default=str))
    return json.dumps(parts | record_code(parts), indent=2) + "\n"


def load_job(folder: Path, trust: bool = False) -> Job:
    """Load the job of a run folder; refuses user code that is neither signed by this user nor trusted."""
    path = folder / CONFIG
    if not os.path.lexists(path):
        raise ShoalError(f"{folder} is not a run: it has no config.json.")
    try:
        parts = read_json(path)
        world, settings = _parts_of(path, parts)
        kind_of_world(world)
        check_code(path, parts, trust)
        cls = world_class(world)
        learn_class = LEARNERS[settings["run"].get("algo", SECTIONS["run"].algo)][0]
        kinds = {**SECTIONS, "learn": learn_class, "world_config": cls.Config}
        for name, kind in kinds.items():
            _check_names(path, name, settings[name], kind)
        settings["run"].update(run_dir=folder, trust=trust)
        sections = make_sections({k: v for section in SECTIONS for k, v in settings[section].items()})
        world_config = make_settings(cls.Config, settings["world_config"], "world.")
        return Job(world, learn_class(**settings["learn"]), world_config, **sections)
    except ShoalError as error:
        raise ShoalError(str(error) if str(folder) in str(error) else f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError, OSError) as error:
        raise ShoalError(f"{path} cannot be read as a run's settings: {excerpt(error, 200)}.") from None


def _parts_of(path: Path, parts: Any) -> tuple[str, dict[str, dict[str, Any]]]:
    """The world's name and the settings by section, with their types checked."""
    if not isinstance(parts, dict):
        raise ShoalError(f"{path} must hold a JSON object.")
    if type(version := parts.get("version")) is not int or version != VERSION:
        raise ShoalError(
            f"{path}: version must be {VERSION}, which this version of Shoal reads, got {excerpt(version)}."
        )
    names = (*SECTIONS, "learn", "world_config")
    if not isinstance(parts.get("world"), str) or not all(isinstance(parts.get(name), dict) for name in names):
        raise ShoalError(f"{path} must name a world, and hold objects called {', '.join(names)}.")
    settings = {name: _with_tuples(parts[name]) for name in names}
    for section, name in (("policy", "encoder"), ("run", "algo")):
        if not isinstance(value := settings[section].get(name, ""), str):
            raise ShoalError(f"{path}: {name} must be a str, got {excerpt(value)}.")
    if settings["run"].get("num_envs") == AUTO:
        raise ShoalError(f"{path}: num_envs must be at least 1, got {AUTO}.")
    if not all(isinstance(entry, str) for entry in settings["multi_agent"].get("group_settings", ())):
        raise ShoalError(f"{path}: group_settings must be a list of texts.")
    return parts["world"], settings


def _check_names(path: Path, part: str, values: dict[str, Any], kind: Any) -> None:
    """Raise ShoalError for unknown or missing settings."""
    known = {f.name for f in fields(kind)}
    for name in values:
        if name not in known:
            raise unknown(f"setting in {part} of {path}:", name, known)
    if absent := known - values.keys() - NOT_SAVED:
        raise ShoalError(f"{path} lacks {', '.join(sorted(absent))} in {part}.")


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Replace JSON's lists by tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
