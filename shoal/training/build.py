"""From a job to the things it names: the wrapped world and the policies."""

from typing import Literal

import torch

from shoal.algos.continuous_q import DDPGConfig
from shoal.algos.dqn import QConfig
from shoal.config.job import Job
from shoal.core.errors import ShoalError
from shoal.core.global_random import seeded
from shoal.core.user_code import UserCode
from shoal.core.user_files import load_object
from shoal.core.world import Group, World
from shoal.core.world_loading import world_class
from shoal.core.wrappers import ActionRepeat, CastObservation, FrameStack, TimeLimit
from shoal.policy import ActorCritic, ContinuousQPolicy, Encoder, Policy, QPolicy, choose_encoder, rnn_maker


def make_world(
    job: Job, num_envs: int | None = None, purpose: Literal["training", "evaluation", "recording"] = "training"
) -> World:
    """The world of a job in its wrappers, with as many envs as the job says or as asked for.

    Some worlds are set up differently for evaluation (`for_evaluation`) and for recordings (`for_recording`).
    """
    cls, config = world_class(job.world), job.world_config
    if purpose != "training":
        config = getattr(cls, f"for_{purpose}")(config)
    seen_to = {name: getattr(job.wrappers, name) for name in cls.handles_settings}
    if (
        seen_to.get("time_limit") and "action_repeat" not in cls.handles_settings
    ):  # it counts choices, a world its own steps
        seen_to["time_limit"] *= job.wrappers.action_repeat
    with UserCode(f"The world {job.world} cannot be made", cls, (ShoalError,)):
        inner = cls(num_envs or job.run.num_envs, job.hardware.device, config, **seen_to)
    world = wrapped(job, inner)
    kept = getattr(torch, job.wrappers.obs_dtype)
    as_they_are = kept == torch.float32 or all(g.observation.dtype != torch.float32 for g in world.groups)
    return world if as_they_are or "obs_dtype" in world.handles_settings else CastObservation(world, kept)


def wrapped(job: Job, world: World) -> World:
    """A world in the wrappers that a job names."""
    if job.wrappers.action_repeat > 1 and "action_repeat" not in world.handles_settings:
        if not world.on_device:  # an env whose episode ends would have to wait for the others
            own = "; --frame-skip does what is meant" if hasattr(job.world_config, "frame_skip") else ""
            raise ShoalError(f"--action-repeat does not go with {job.world}, whose envs are stepped all at once{own}.")
        world = ActionRepeat(world, job.wrappers.action_repeat)
    if job.wrappers.time_limit is not None and "time_limit" not in world.handles_settings:
        world = TimeLimit(world, job.wrappers.time_limit)
    if job.wrappers.frame_stack > 1 and "frame_stack" not in world.handles_settings:
        world = FrameStack(world, job.wrappers.frame_stack)
    return world


def make_policies(job: Job, world: World) -> dict[str, Policy]:
    """One policy per team of groups, with weights that depend on the seed alone."""
    policies = {}
    with seeded(job.run.seed):
        for name, groups in job.policy_groups().items():
            policies[name] = _make_policy(job.for_policy(name), world.group(groups[0].name)).to(world.device)
    return policies


def _make_policy(job: Job, group: Group) -> Policy:
    """The kind of policy that the job's learner makes better."""
    encoder = make_torso(job, group)
    with UserCode(f"The network {job.policy.encoder} cannot be used", encoder):
        return _policy_with(job, group, encoder)


def _policy_with(job: Job, group: Group, encoder: Encoder) -> Policy:
    config = job.policy
    if isinstance(job.learn, DDPGConfig):
        return ContinuousQPolicy(group, encoder, config.normalize_obs, **job.learn.head())
    rnn = rnn_maker(config.rnn, config.rnn_size, config.rnn_layers)
    if isinstance(job.learn, QConfig):
        return QPolicy(group, encoder, config.normalize_obs, rnn, **job.learn.head())
    return ActorCritic(group, encoder, config.shared_encoder, config.normalize_obs, config.log_std_init, rnn)


def by_group(job: Job, policies: dict[str, Policy]) -> dict[str, Policy]:
    """The policy of every group."""
    return {g.name: policies[job.policy_of(g.name)] for g in job.groups}


def make_torso(job: Job, group: Group) -> Encoder:
    """The encoder that `--encoder` names for a group, or the user's own network."""
    if ":" in job.policy.encoder:
        return load_object(job.policy.encoder, "policy")
    return choose_encoder(job.policy.encoder, group, job.policy.hidden, job.policy.activation)
