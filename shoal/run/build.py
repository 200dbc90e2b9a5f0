"""From a job to the things it names: the wrapped world and the policies."""

from typing import Any

import torch

from shoal.core.world import World
from shoal.core.wrappers import ActionRepeat, FrameStack, TimeLimit
from shoal.errors import ShoalError
from shoal.policy import ActorCritic, Torso, mlp_torso
from shoal.run.config import Job
from shoal.worlds import load_object, world_class


def make_world(job: Job, num_envs: int | None = None) -> World:
    """The world of a job in its wrappers, with as many envs as the job says or as asked for."""
    cls = world_class(job.world)
    count = num_envs or job.train.num_envs
    try:
        world: World = cls(count, job.train.device, job.world_config)
    except torch.cuda.OutOfMemoryError:
        raise out_of_memory(job, cls) from None
    if job.train.time_limit is not None:
        world = TimeLimit(world, job.train.time_limit)
    if job.train.action_repeat > 1:
        world = ActionRepeat(world, job.train.action_repeat)
    if job.train.frame_stack > 1:
        world = FrameStack(world, job.train.frame_stack)
    return world


def make_policies(job: Job, world: World) -> dict[str, ActorCritic]:
    """One policy per group, with weights that depend on the seed alone."""
    torch.manual_seed(job.train.seed)
    torso = make_torso(job)
    policies = {}
    for group in world.groups:
        policy = ActorCritic(group, torso, job.train.shared, job.train.normalise_observation, job.train.log_std)
        policies[group.name] = policy.to(world.device)
    return policies


def make_torso(job: Job) -> Torso:
    """The MLP, or the user's own network."""
    if job.train.policy == "mlp":
        return mlp_torso(job.train.hidden, job.train.activation)
    if ":" not in job.train.policy:
        raise ShoalError(f"--policy must be mlp or FILE.py:NAME, got {job.train.policy!r}.")
    return load_object(job.train.policy, "policy")


def out_of_memory(job: Job, cls: Any) -> ShoalError:
    """What to say when the GPU is full: what an env costs and how many fit."""
    small = cls(16, "cpu", job.world_config)
    see = sum(g.agents * g.observation.size * g.observation.dtype.itemsize for g in small.groups)
    # Activations of policy and value, forward and backward, for the samples that are in work at the same time.
    width = 4 * 4 * 2 * sum(job.train.hidden) // getattr(job.learn, "minibatches", 1)
    agents = sum(g.agents for g in small.groups)
    per_env = small.bytes_per_env + job.train.rollout * (see + agents * (24 + width))
    whole = torch.cuda.mem_get_info()[1]
    return ShoalError(
        f"The GPU's memory is full: {job.train.num_envs} envs of {job.world} cost about {per_env:,} bytes each with "
        f"rollouts of {job.train.rollout}. About {int(whole * 0.9 / per_env):,} fit: lower --num-envs or --rollout."
    )
