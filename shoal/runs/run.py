"""A run and its policies, for evaluation and recording."""

import typing
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from shoal.config.job import Job
from shoal.core.errors import ShoalError, unknown
from shoal.core.machine import pick_device
from shoal.core.settings import read_setting
from shoal.learn.learner import part_of
from shoal.policy import Policy
from shoal.runs.checkpoint import POLICY, Checkpoint, compare, load_checkpoint
from shoal.runs.config_file import load_job
from shoal.runs.evaluation import Evaluation, RandomPolicy, Watch, evaluate
from shoal.runs.folder import RunFolder
from shoal.runs.jobs import parse_load, same_group
from shoal.training.build import by_group, make_policies, make_world


class Run:
    """A finished or interrupted run: its folder, its job and the policy of every group."""

    def __init__(self, folder: RunFolder, job: Job, policies: dict[str, Policy]):
        self.folder, self.job, self.policies = folder, job, policies

    @property
    def path(self) -> Path:
        return self.folder.path

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def evaluate(
        self, episodes: int = 100, seed: int | None = None, stochastic: bool | None = None, watch: Watch | None = None
    ) -> Evaluation:
        """Play whole episodes in new envs and score each group, with the current weights.

        After training these are the last ones; `load_run` loads the best.

        Args:
            stochastic: Sample actions instead of taking the mode; None: the run's `eval_stochastic`.
            watch: Called with the world after every step; see `shoal.view.maps`.
        """
        return evaluate(self.job, self.policies, episodes, seed, stochastic, watch=watch)


def load_run(
    path: Path | str,
    which: str = "best",
    device: str | None = None,
    random: Sequence[str] = (),
    others: Sequence[str] = (),
    settings: Sequence[str] = (),
    trust: bool = False,
) -> Run:
    """Load a run with the weights of a checkpoint.

    Args:
        which: `best`, `last` or a step number.
        random: Groups that act at random.
        others: Groups whose policy comes from another run: "runner=RUN".
        settings: Overrides of the world's settings: "max_steps=100".
        trust: Execute the run's code even if this user has not trained with it on this machine, or it has changed.
    """
    folder = RunFolder.open(path)
    job = _with_world_overrides(load_job(folder.path, trust), settings)
    wanted = pick_device(device or "auto")
    job = job.change(device=wanted)
    checkpoint = load_checkpoint(folder.pick(which), wanted, (POLICY,))
    world = make_world(job, 1)
    policies = make_policies(job, world)
    for name, policy in policies.items():
        take_weights(policy, checkpoint, name)
    played = by_group(job, policies)
    for entry in others:
        name, other = parse_load(entry)
        if name not in played:
            raise unknown("group to load:", name, played)
        guest = load_run(other, device=wanted, trust=trust)
        played[name] = guest.policies[same_group(guest.job, name, other)]
        own, its = world.group(name), played[name].group
        if (own.policy_observation.shape, own.action) != (its.policy_observation.shape, its.action):
            raise ShoalError(
                f"{other} cannot play for {name}: its policy has observations {tuple(its.policy_observation.shape)} "
                f"and actions {its.action}, but {name} has {tuple(own.policy_observation.shape)} and {own.action}."
            )
    for name in random:
        if name not in played:
            raise unknown("group to play at random:", name, played)
        played[name] = RandomPolicy(world.group(name)).to(world.device)
    return Run(folder, job, played)


def _with_world_overrides(job: Job, settings: Sequence[str]) -> Job:
    """The job with overrides of its world's settings, NAME=VALUE each."""
    hints = typing.get_type_hints(type(job.world_config))
    changed = {}
    for entry in settings:
        name, equals, text = entry.partition("=")
        key = name.replace("-", "_")
        if not equals:
            raise ShoalError(f"--set must be NAME=VALUE, got {entry!r}.")
        if key not in {f.name for f in fields(job.world_config)}:
            raise unknown(f"setting of {job.world}", name, [f.name for f in fields(job.world_config)])
        changed[key] = read_setting(f"--set {entry}", text, hints[key])
    return replace(job, world_config=replace(job.world_config, **changed))


def take_weights(policy: Policy, checkpoint: Checkpoint, name: str) -> None:
    """Load a policy's weights from a checkpoint; raises ShoalError with a list of what does not fit."""
    saved = part_of(checkpoint.state, f"policy.{name}.")
    compare(saved, policy.state_dict(), checkpoint.path)
    policy.load_state_dict(saved)
