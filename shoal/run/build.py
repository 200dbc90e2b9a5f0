"""From a job to the things it names: the wrapped world and the policies."""

import torch

from shoal.core.world import World
from shoal.core.wrappers import ActionRepeat, FrameStack, KeepAs, TimeLimit
from shoal.errors import ShoalError
from shoal.policy import ActorCritic, Torso, mlp_torso
from shoal.run.config import Job
from shoal.worlds import load_object, world_class


def make_world(job: Job, num_envs: int | None = None) -> World:
    """The world of a job in its wrappers, with as many envs as the job says or as asked for."""
    count = num_envs or job.train.num_envs
    world = wrapped(job, world_class(job.world)(count, job.train.device, job.world_config))
    kept = getattr(torch, job.train.observation_type)
    return world if kept == torch.float32 else KeepAs(world, kept)


def wrapped(job: Job, world: World) -> World:
    """A world in the wrappers that a job names."""
    if job.train.time_limit is not None:
        world = TimeLimit(world, job.train.time_limit)
    if job.train.action_repeat > 1:
        world = ActionRepeat(world, job.train.action_repeat)
    if job.train.frame_stack > 1:
        world = FrameStack(world, job.train.frame_stack)
    return world


def make_policies(job: Job, world: World) -> dict[str, ActorCritic]:
    """One policy per team of groups, with weights that depend on the seed alone."""
    torch.manual_seed(job.train.seed)
    policies = {}
    for name, groups in job.teams().items():
        own = job.for_policy(name)
        config = own.train
        group = world.group(groups[0].name)
        policy = ActorCritic(group, make_torso(own), config.shared, config.normalise_observation, config.log_std)
        policies[name] = policy.to(world.device)
    return policies


def by_group(job: Job, policies: dict[str, ActorCritic]) -> dict[str, ActorCritic]:
    """The policy of every group."""
    return {g.name: policies[job.policy_of(g.name)] for g in job.groups}


def make_torso(job: Job) -> Torso:
    """The MLP, or the user's own network."""
    if job.train.policy == "mlp":
        return mlp_torso(job.train.hidden, job.train.activation)
    if ":" not in job.train.policy:
        raise ShoalError(f"--policy must be mlp or FILE.py:NAME, got {job.train.policy!r}.")
    return load_object(job.train.policy, "policy")
