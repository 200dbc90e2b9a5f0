"""Complete jobs: networks of loaded policies, and the number of envs for `--num-envs auto`."""

from pathlib import Path
from typing import Any

from shoal.config.counts import AUTO
from shoal.config.job import POLICY_SETTINGS, Job
from shoal.config.parse import job_from_flags
from shoal.config.resolve import check_groups, job_from_settings
from shoal.core.errors import ShoalError, unknown
from shoal.core.user_files import full_path
from shoal.runs.config_file import load_job
from shoal.runs.folder import RunFolder
from shoal.training.memory_estimate import most_envs


def make_job(world: str, **overrides: Any) -> Job:
    """A job from Python keywords over the tuned settings; `world_config=dict(...)` sets the world's."""
    return complete(job_from_settings(world, **overrides))


def parse_job(world: str, arguments: list[str], command: str = "shoal train") -> Job:
    """A job from flags over the tuned settings of the world, the learner and the device."""
    return complete(job_from_flags(world, arguments, command))


def complete(job: Job, saved: bool = False) -> Job:
    """Add the networks of loaded policies, resolve `--num-envs auto`, and check the job.

    Args:
        saved: The job comes from a run folder and already has these networks.
    """
    if not saved:
        job = _with_loaded_networks(job)
    check_groups(job)
    if job.run.num_envs == AUTO:
        job = job.change(num_envs=most_envs(job))
    job.check_samples()
    job.check_preemption()
    return job


def _with_loaded_networks(job: Job) -> Job:
    """Set each loaded policy's network as settings of its group."""
    names = list(job.policy_groups())
    loaded: list[str] = []
    for name, path in loads(job).items():
        if name not in names:
            raise unknown("group to load:", name, names)
        loaded += _network_of(job, path, name)
    return job.change(group_settings=(*loaded, *job.multi_agent.group_settings))


def loads(job: Job) -> dict[str, Path]:
    """Group -> the run that its policy is loaded from."""
    found = {}
    for entry in job.multi_agent.load_policy:
        name, path = parse_load(entry)
        found[name] = path
    return found


def parse_load(entry: str) -> tuple[str, Path]:
    """Group and run folder of GROUP=RUN."""
    name, equals, path = entry.partition("=")
    if not equals or not name or not path:
        raise ShoalError(f"--load-policy must be GROUP=RUN, got {entry!r}.")
    return name, RunFolder.open(path).path


def _network_of(job: Job, path: Path, name: str) -> list[str]:
    """The network settings of a policy in another run, as `--group-settings` entries for a group."""
    other = load_job(path, job.run.trust)
    if type(other.learn).network_settings != type(job.learn).network_settings:
        raise ShoalError(
            f"--load-policy {name}={path}: the policy was trained with {other.run.algo}, and {job.run.algo} uses "
            "another network; use the same --algo."
        )
    own = other.for_policy(other.policy_of(same_group(other, name, path)))
    settings = []
    for key in (*POLICY_SETTINGS, *own.learn.network_settings):
        value = getattr(own.policy, key) if key in POLICY_SETTINGS else getattr(own.learn, key)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        settings.append(f"{name}.{key}={full_path(text) if key == 'encoder' else text}")
    return settings


def same_group(job: Job, name: str, path: Path) -> str:
    """The group of another run whose policy fits a group: the one of the same name, or the only one."""
    names = [g.name for g in job.groups]
    if name in names:
        return name
    if len(names) == 1 or job.multi_agent.one_policy:
        return names[0]
    raise unknown(f"group in {path}:", name, names)
