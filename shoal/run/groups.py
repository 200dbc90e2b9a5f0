"""Settings of single groups: read, checked, and what `--freeze` and `--load` mean."""

import typing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from shoal.core.settings import read_setting
from shoal.errors import ShoalError, unknown
from shoal.learn import check_group
from shoal.run.config import POLICY_SETTINGS, Job, TrainConfig, load_job
from shoal.run.folder import RunFolder
from shoal.worlds import full_path


def with_loaded_networks(job: Job) -> Job:
    """The job with the networks of the runs that it loads policies from, as settings of single groups."""
    names = list(job.teams())
    loaded: list[str] = []
    for name, path in loads(job).items():
        if name not in names:
            raise unknown("group to load:", name, names)
        loaded += _network_of(job, path, name)
    return replace(job, train=replace(job.train, per_group=(*loaded, *job.train.per_group)))


def check_groups(job: Job) -> None:
    """Refuse a job whose groups are not there or do not fit their settings."""
    names = list(job.teams())
    if job.train.one_policy:
        _require_same_spaces(job)
    for name in job.train.freeze:
        if name not in names:
            raise unknown("group to freeze:", name, names)
    if set(job.train.freeze) == set(names):
        raise ShoalError("--freeze names every group: nobody is left to learn.")
    for name in overrides(job):
        if name not in names:
            raise unknown("group in --per-group:", name, names)
    for name, groups in job.teams().items():
        own = job.for_policy(name)
        for group in groups:
            check_group(own.learn, group)
        own.learn.check_core(own.train.core != "none")


def loads(job: Job) -> dict[str, Path]:
    """Group -> the run its policy comes from."""
    found = {}
    for entry in job.train.load:
        name, path = parse_load(entry)
        found[name] = path
    return found


def parse_load(entry: str) -> tuple[str, Path]:
    """The two sides of GROUP=RUN."""
    name, equals, path = entry.partition("=")
    if not equals or not name or not path:
        raise ShoalError(f"--load must be GROUP=RUN, got {entry!r}.")
    return name, RunFolder.open(path).path


def overrides(job: Job) -> dict[str, dict[str, Any]]:
    """Policy -> its own settings, with values of their proper types."""
    hints = {k: v for k, v in typing.get_type_hints(TrainConfig).items() if k in POLICY_SETTINGS}
    learn_hints = typing.get_type_hints(type(job.learn))
    hints.update({f.name: learn_hints[f.name] for f in fields(job.learn)})
    found: dict[str, dict[str, Any]] = {}
    for entry in job.train.per_group:
        where, equals, text = entry.partition("=")
        name, dot, key = where.partition(".")
        key = key.replace("-", "_")
        if not equals or not dot:
            raise ShoalError(f"--per-group must be GROUP.SETTING=VALUE, got {entry!r}.")
        if key not in hints:
            raise unknown(f"setting of group {name}:", key, hints)
        found.setdefault(name, {})[key] = read_setting(f"--per-group {entry}", text, hints[key])
    return found


def _network_of(job: Job, path: Path, name: str) -> list[str]:
    """The network of a policy in another run, as settings of a group of this one."""
    other = load_job(path, job.train.trust)
    if type(other.learn).network != type(job.learn).network:
        raise ShoalError(
            f"--load {name}={path}: that run's policy was made for {other.train.algo}, and {job.train.algo} has "
            "another kind of network; train with the same --algo."
        )
    own = other.for_policy(other.policy_of(same_group(other, name, path)))
    settings = []
    for key in (*POLICY_SETTINGS, *own.learn.network):
        value = getattr(own.train, key) if key in POLICY_SETTINGS else getattr(own.learn, key)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        settings.append(f"{name}.{key}={full_path(text) if key == 'policy' else text}")
    return settings


def same_group(job: Job, name: str, path: Path) -> str:
    """The group of another run whose policy is meant for a group of this one: of the same name, or its only one."""
    names = [g.name for g in job.groups]
    if name in names:
        return name
    if len(names) == 1 or job.train.one_policy:
        return names[0]
    raise unknown(f"group in {path}:", name, names)


def _require_same_spaces(job: Job) -> None:
    first, *others = job.groups
    for g in others:
        if (g.observation, g.stack, g.action) != (first.observation, first.stack, first.action):
            raise ShoalError(
                f"--one-policy needs groups with the same spaces, but {first.name} has {first.stack} x "
                f"{first.observation} and {first.action}, {g.name} has {g.stack} x {g.observation} and {g.action}."
            )
