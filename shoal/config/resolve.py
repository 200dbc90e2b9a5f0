"""Build a job from a world's presets and the user's settings, and resolve every "auto"."""

import os
import shutil
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from shoal.algos.registry import LEARNERS, check_group
from shoal.config.counts import AUTO, to_count
from shoal.config.job import Job
from shoal.config.schema import SECTION_OF, make_sections
from shoal.core.errors import ShoalError, unknown
from shoal.core.launch_info import find_launch_info
from shoal.core.machine import pick_device
from shoal.core.settings import make_settings
from shoal.core.user_files import full_path
from shoal.core.world_loading import world_class

KINDS = ("cpu", "gpu")
"""Kinds of devices with presets of their kind."""

COMPILE_FROM_STEPS = 20_000_000
"""Env steps of a CPU run from which compiling (20 s) pays off."""


def job_from_settings(world: str, **overrides: Any) -> Job:
    """A job from keyword arguments over the presets; settings of the world are `world_config=dict(...)`."""
    cls = world_class(world)
    world_overrides = overrides.pop("world_config", {})
    preset = select_preset(cls, overrides.get("algo", "ppo"), overrides.get("device", "auto"))
    run, learn = dict(preset.run), dict(preset.learn)
    learn_class = LEARNERS[preset.algo][0]
    learn_names = {f.name for f in fields(learn_class)}
    world_names = {f.name for f in fields(cls.Config)}
    for key, value in overrides.items():
        if key == "num_envs" and value == "auto":
            value = AUTO
        elif key in ("total_steps", "num_envs", "rollout_steps", "checkpoint_every") and value is not None:
            value = to_count(key, value)
        if key in ("group_settings", "freeze_groups", "load_policy") and isinstance(value, str):
            value = (value,)
        if key in SECTION_OF:
            run[key] = value
        elif key in learn_names:
            learn[key] = value
        elif key in world_names:
            raise ShoalError(f"{key} is a setting of the world: give it as world_config=dict({key}={value!r}).")
        else:
            raise unknown("setting", key, SECTION_OF.keys() | learn_names)
    for key in world_overrides:
        if key not in world_names:
            raise unknown(f"setting of {world}", key, world_names)
    chosen = run["group_settings"] if "group_settings" in overrides else ()
    run["group_settings"] = merge_group_overrides(preset.run.get("group_settings", ()), chosen, overrides)
    world_config = make_settings(cls.Config, {**preset.world, **world_overrides}, "world.")
    job = Job(full_path(world), learn_class(**learn), world_config, **make_sections(run))
    return resolve(job, preset.device)


class Preset(NamedTuple):
    """Settings that a world ships for an algorithm and a device; the user's settings go on top."""

    algo: str
    device: str
    run: dict[str, Any]
    learn: dict[str, Any]
    """Settings of the algorithm."""
    world: dict[str, Any]
    """Settings of the world."""


def select_preset(world: Any, algo: str, device: str) -> Preset:
    """The preset of a world for an algorithm and a device, both checked."""
    if algo not in LEARNERS:
        raise unknown("algorithm", algo, LEARNERS)
    return read_preset(world, algo, pick_device(device))


def read_preset(world: Any, algo: str, device: str) -> Preset:
    """The preset of a world for an algorithm and a device, which need not exist on this machine.

    Sections, each over the one before: common, the kind of device (cpu, gpu), the algorithm's own needs, the algorithm
    (ppo), and both (ppo_cpu). An algorithm that uses the presets of another one has those below its own.
    """
    check_preset(world)
    kind = "gpu" if device.startswith("cuda") else "cpu"
    found: dict[str, Any] = {}
    learner = LEARNERS[algo][0]
    own = [section for name in (learner.presets_of, algo) if name for section in (name, f"{name}_{kind}")]
    for section in ("common", kind, learner.run_defaults, *own):
        found.update(world.settings.get(section, {}) if isinstance(section, str) else section)
    learn_names = {f.name for f in fields(learner)}
    run = {k: v for k, v in found.items() if k in SECTION_OF}
    learn = {k: v for k, v in found.items() if k in learn_names}
    return Preset(algo, device, run, learn, found.get("world", {}))


def check_preset(world: Any) -> None:
    """Refuse sections and keys of a world's preset that name no setting."""
    algos = [name if kind is None else f"{name}_{kind}" for name in LEARNERS for kind in (None, *KINDS)]
    sections = ["common", *KINDS, *algos]
    names = {*SECTION_OF, *(f.name for config, _ in LEARNERS.values() for f in fields(config))}
    world_names = {f.name for f in fields(world.Config)}
    for section, values in world.settings.items():
        if section not in sections:
            raise unknown(f"section in the preset of {world.__name__}:", section, sections)
        for key in values:
            if key not in names | {"world"}:
                raise unknown(f"setting in the preset {section!r} of {world.__name__}:", key, names)
        for key in values.get("world", {}):
            if key not in world_names:
                raise unknown(f"setting of the world in the preset {section!r} of {world.__name__}:", key, world_names)


def merge_group_overrides(preset: tuple[str, ...], chosen: tuple[str, ...], given: Any) -> tuple[str, ...]:
    """Per-group settings: the preset's, without those `given` for all groups, then the user's."""
    kept = [entry for entry in preset if entry.partition("=")[0].rpartition(".")[2] not in given]
    return (*kept, *(entry for entry in chosen if entry not in kept))


def resolve(job: Job, device: str) -> Job:
    """Resolve every "auto", so that a resumed run computes the same.

    GPU runs are compiled; CPU runs only if they are long and there is a C++ compiler.
    """
    job = resolve_process_count(job.change(device=device))
    gpu = device.startswith("cuda")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    compile_it = gpu or (compiler is not None and job.run.total_steps >= COMPILE_FROM_STEPS)
    if job.schedule.learner_device is not None:
        pick_device(job.schedule.learner_device, "--learner-device")
    hardware = job.hardware
    return job.change(
        compile=hardware.compile if hardware.compile != "auto" else "on" if compile_it else "off",
        encoder=full_path(job.policy.encoder),
        precision=hardware.precision if hardware.precision != "auto" else "bf16" if gpu else "fp32",
    )


def resolve_process_count(job: Job) -> Job:
    """The job with its number of processes, checked: those that a launcher has started, or those to start."""
    launched, hardware, num_envs = find_launch_info(), job.hardware, job.run.num_envs
    count = hardware.processes
    if launched is not None:
        count = launched.size
    elif hardware.gpus is not None:
        available = torch.cuda.device_count()
        if count not in (1, hardware.gpus):
            raise ShoalError(
                f"--gpus {hardware.gpus} starts one process per GPU, which contradicts --processes {count}; omit "
                "one of the two."
            )
        if not hardware.device.startswith("cuda") or available < hardware.gpus:
            raise ShoalError(
                f"--gpus {hardware.gpus}: torch sees {available} GPU(s) here, and the device is {hardware.device}; use "
                "--processes to share one, or CPU cores."
            )
        count = hardware.gpus
    if num_envs == AUTO:
        if count > 1:
            raise ShoalError(
                f"--num-envs auto supports one process, but there are {count}; give the total number of envs of all "
                "processes."
            )
    elif num_envs % count:
        raise ShoalError(
            f"{num_envs} envs cannot be split evenly between {count} processes; use a multiple of {count} envs, or a "
            f"number of processes that divides {num_envs}."
        )
    return job.change(processes=count)


def check_groups(job: Job) -> None:
    """Refuse names of groups that do not exist, and settings that do not fit their groups."""
    names = list(job.policy_groups())
    if job.multi_agent.one_policy:
        _require_same_spaces(job)
    for name in job.multi_agent.freeze_groups:
        if name not in names:
            raise unknown("group to freeze:", name, names)
    if set(job.multi_agent.freeze_groups) == set(names):
        raise ShoalError("--freeze-groups names every group, so no policy is left to train.")
    for name in job.overrides():
        if name not in names:
            raise unknown("group in --group-settings:", name, names)
    for name, groups in job.policy_groups().items():
        own = job.for_policy(name)
        for group in groups:
            check_group(own.learn, group)
        own.learn.check_rnn(own.policy.rnn != "none")


def _require_same_spaces(job: Job) -> None:
    first, *others = job.groups
    for g in others:
        if (g.observation, g.stack, g.action) != (first.observation, first.stack, first.action):
            raise ShoalError(
                f"--one-policy needs groups with the same spaces, but {first.name} has {first.stack} x "
                f"{first.observation} and {first.action}, {g.name} has {g.stack} x {g.observation} and {g.action}."
            )
