"""Build the wrapped world and the policies of a job."""

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
    """Build the world of a job with its wrappers.

    Args:
        num_envs: Number of envs; None: the job's.
        purpose: Evaluation (`for_evaluation`) and recordings (`for_recording`) may change the world's config.
    """
    cls, config = world_class(job.world), job.world_config
    if purpose != "training":
        config = getattr(cls, f"for_{purpose}")(config)
    handled = {name: getattr(job.wrappers, name) for name in cls.handles_settings}
    # The setting counts agent decisions, a world counts its steps.
    if handled.get("time_limit") and "action_repeat" not in cls.handles_settings:
        handled["time_limit"] *= job.wrappers.action_repeat
    with UserCode(f"The world {job.world} cannot be built", cls, (ShoalError,)):
        inner = cls(num_envs or job.run.num_envs, job.hardware.device, config, **handled)
    world = wrapped(job, inner)
    dtype = getattr(torch, job.wrappers.obs_dtype)
    unchanged = dtype == torch.float32 or all(g.observation.dtype != torch.float32 for g in world.groups)
    return world if unchanged or "obs_dtype" in world.handles_settings else CastObservation(world, dtype)


def wrapped(job: Job, world: World) -> World:
    """Wrap a world as the job says: action repeat, time limit, frame stack."""
    if job.wrappers.action_repeat > 1 and "action_repeat" not in world.handles_settings:
        if not world.on_device:  # an env whose episode ended would wait for the others
            instead = "; use --frame-skip" if hasattr(job.world_config, "frame_skip") else ""
            raise ShoalError(f"--action-repeat does not work with {job.world}, which steps on the CPU{instead}.")
        world = ActionRepeat(world, job.wrappers.action_repeat)
    if job.wrappers.time_limit is not None and "time_limit" not in world.handles_settings:
        world = TimeLimit(world, job.wrappers.time_limit)
    if job.wrappers.frame_stack > 1 and "frame_stack" not in world.handles_settings:
        world = FrameStack(world, job.wrappers.frame_stack)
    return world


def make_policies(job: Job, world: World) -> dict[str, Policy]:
    """One policy per set of groups that share it; the weights depend on the seed alone."""
    policies = {}
    with seeded(job.run.seed):
        for name, groups in job.policy_groups().items():
            policies[name] = _make_policy(job.for_policy(name), world.group(groups[0].name)).to(world.device)
    return policies


def _make_policy(job: Job, group: Group) -> Policy:
    """The policy for a group, of the class that the job's learner trains."""
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
    """Policies by group instead of by policy name."""
    return {g.name: policies[job.policy_of(g.name)] for g in job.groups}


def make_torso(job: Job, group: Group) -> Encoder:
    """The encoder that `--encoder` names for a group, or the user's network."""
    if ":" in job.policy.encoder:
        return load_object(job.policy.encoder, "policy")
    return choose_encoder(job.policy.encoder, group, job.policy.hidden, job.policy.activation)
