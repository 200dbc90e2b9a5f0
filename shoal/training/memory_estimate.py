"""What a run costs in memory, told before anything is allocated, and how many envs fit."""

from dataclasses import dataclass

import torch

from shoal.algos.off_policy import OffPolicyConfig
from shoal.config.job import Job
from shoal.core.errors import ShoalError
from shoal.core.limits import whole_memory
from shoal.core.store import SHARE, free_memory, full_device
from shoal.core.world import World
from shoal.core.world_loading import world_class
from shoal.core.wrappers import FrameStack, Wrapper
from shoal.learn.learner import BYTES_PER_ACTIVATION, activation_memory
from shoal.learn.replay import Replay
from shoal.learn.rollout import allocate
from shoal.policy import Policy
from shoal.training.build import make_policies, make_world
from shoal.training.collector import truncations

COUNTED = 16
"""Envs of the copy, without memory of its own, that the bytes are counted in."""

BYTES_PER_ACTING = 6
"""What a number between two layers costs while a policy acts."""

RESERVED = {"cpu": 0, "cuda": 2**30}
"""What CUDA's libraries and graphs take whatever the size of the batch."""


BLOCK, BLOCKS_FROM = 1024, 4096
"""More envs than the second number are a multiple of the first: whole blocks of threads."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of a run, per env and beyond."""

    num_envs: int
    agents: int
    state: int
    """Per env: the world's arrays and those of its wrappers."""
    rollout: int
    """Per env: experience, noise, values, advantages."""
    acting: int
    """Per env: activations while the policies act."""
    update: int
    """Per env: activations of an update, up to `update_limit` in all, since large updates are made in passes."""
    update_limit: int
    replay: int
    """Whatever the number of envs: experience that is remembered."""
    reserved: int
    """Whatever the number of envs."""
    free: int
    on_gpu: bool = False

    @property
    def per_env(self) -> int:
        return self.state + self.rollout + self.acting

    @property
    def updates(self) -> int:
        """Bytes of an update of all envs."""
        return min(self.update_limit, self.num_envs * self.update)

    @property
    def needed(self) -> int:
        """Bytes of all."""
        return self.num_envs * self.per_env + self.updates + self.replay

    def check(self) -> None:
        """Refuse what this process can never have, before it is asked for and takes everything else down."""
        whole = whole_memory()
        if not self.on_gpu and self.needed > whole:
            raise ShoalError(
                f"{self.num_envs:,} envs take {size(self.needed)}, and this process may have {size(whole)}; "
                f"about {self.fits:,} envs fit: choose a smaller --num-envs, or auto."
            )

    @property
    def fits(self) -> int:
        """The largest number of envs."""
        free = max(0, self.free - self.reserved - self.replay)
        count = free // (self.per_env + self.update)
        if count * self.update > self.update_limit:
            count = max(0, free - self.update_limit) // self.per_env
        return count

    def __str__(self) -> str:
        return (
            f"{self.num_envs:,} envs x {self.agents:,} agent(s): {size(self.per_env)} per env "
            f"({size(self.state)} state, {size(self.rollout)} rollout, {size(self.acting)} acting), "
            f"{size(self.num_envs * self.per_env)} in all, "
            f"{f'{size(self.replay)} of replay ' if self.replay else ''}"
            f"and {size(self.updates)} for updates; "
            f"about {self.fits:,} envs fit"
        )


def estimate(job: Job, free: int | None = None) -> Estimate:
    """Count the bytes of a job without allocating them; `free` bytes are to be had (none: look)."""
    kind = torch.device(job.hardware.device).type
    nowhere = job.change(device="meta")
    with torch.device("meta"):
        world = make_world(nowhere, COUNTED)
        policies = make_policies(nowhere, world)
    rollout = acting = update = update_limit = replay = 0
    steps, cuts = job.run.rollout_steps, job.schedule.sync_frac > 0
    copies = _copies(job)
    room = truncations(world.time_limit, steps)
    for name, groups in job.policy_groups().items():
        inside = [world.group(g.name) for g in groups]
        agents = sum(g.agents for g in inside)
        policy = policies[name]
        memory = allocate(inside, steps, COUNTED, room, torch.device("meta"), policy.state_size, policy.explores, cuts)
        memory.time_limit = world.time_limit
        rollout += memory.nbytes // COUNTED + steps * agents * 4 * policy.head.noise_width
        if name not in job.multi_agent.freeze:
            rollout += copies * memory.nbytes // COUNTED
        # How episodes end, before it is put in its place; how many places are taken; actions as the world wants them.
        rollout += (memory.observation[-1].nbytes + (0 if memory.alive is None else memory.alive[-1].nbytes)) // COUNTED
        rollout += 2 * 4 + (memory.action[0].nbytes // COUNTED if policy.head.gaussian_noise else 0)
        learn = job.for_policy(name).learn
        numbers = _activations(policy)
        bytes_each = BYTES_PER_ACTIVATION[job.hardware.precision] * numbers
        if name in job.multi_agent.freeze:
            pass
        elif isinstance(learn, OffPolicyConfig):
            burn_in, length = learn.span(policy.rnn is not None)
            each = Replay.bytes_per_step(memory, learn.prioritized, length > 0)
            replay += each * learn.buffer_size // (COUNTED * agents)
            # A batch goes through the network that learns, and what comes later through it and its target.
            batch = learn.batch_size
            if length:  # sequences come with rows before and after what is learned
                batch = batch * (burn_in + length + learn.n_step) // length
            update = update_limit = max(update, 3 * bytes_each * batch)
        else:
            # Advantages, targets, V-trace's ratios; weights where agents leave; the order of PPO's samples or sequences
            per_step = (
                2 + (memory.alive is not None or memory.is_decision_step is not None) + getattr(learn, "vtrace", False)
            )
            ordered = (1 if policy.state_size else steps) if hasattr(learn, "num_minibatches") else 0
            rollout += 4 * agents * (steps * per_step + ordered + memory.final_observation.shape[0] + 1)
            update = max(update, bytes_each * agents * steps // getattr(learn, "num_minibatches", 1))
            whole = activation_memory(torch.device(job.hardware.device))
            update_limit = max(update_limit, learn.micro_batch_size * bytes_each if learn.micro_batch_size else whole)
        acting = max(acting, agents * numbers * BYTES_PER_ACTING)
    return Estimate(
        num_envs=job.run.num_envs,
        agents=sum(g.agents for g in world.groups),
        state=_state(world),
        rollout=rollout,
        acting=acting,
        update=update,
        update_limit=update_limit,
        replay=replay,
        reserved=RESERVED[kind],
        free=free_memory(job.hardware.device) if free is None else free,
        on_gpu=kind == "cuda",
    )


def _copies(job: Job) -> int:
    """Rollouts besides the one that is made: those that wait to be learned from, and the one that is learned from."""
    schedule, device = job.schedule, job.hardware.device
    here = schedule.learner_device is None or full_device(schedule.learner_device) == full_device(device)
    return schedule.max_policy_lag + 2 if schedule.asynchronous and here else 0


def _state(world: World) -> int:
    """Bytes per env of a world and of the outputs that each wrapper around it keeps."""
    if not isinstance(world, Wrapper):
        return world.bytes_per_env
    if isinstance(world, FrameStack):  # keeps nothing
        return _state(world.world)
    shown = 2
    for g in world.groups:
        shown += g.agents * (2 * g.observation.size * g.observation.dtype.itemsize + 4 + g.choices + 3)
    return world.bytes_per_env + shown + _state(world.world) - world.world.bytes_per_env


def _activations(policy: Policy) -> int:
    with torch.device("meta"):
        return policy.activations()


def most_envs(job: Job) -> int:
    """What `--num-envs auto` means: the most envs that fit in memory and steps, such that mini-batches divide."""
    if not world_class(job.world).on_device:
        raise ShoalError(
            f"--num-envs auto fills the device's memory, but {job.world} is stepped by CPU cores; give a number."
        )
    told = estimate(job)
    learn = [job.for_policy(name).learn for name in job.policy_groups()]
    step = max(1, *(getattr(settings, "num_minibatches", 1) for settings in learn))
    count = told.fits // step * step
    if count < 1:
        raise ShoalError(
            f"Not one env of {job.world} fits: it takes {size(told.per_env + told.update)} of {size(told.free)}. "
            "Lower --rollout-steps."
        )
    block = step * -(-BLOCK // step)
    if count > BLOCKS_FROM:
        count = count // block * block
    # As few iterations, with the fewest envs that make all steps in them.
    iterations = -(-job.run.total_steps // (count * job.run.rollout_steps))
    needed = -(-job.run.total_steps // (iterations * job.run.rollout_steps))
    unit = block if needed > BLOCKS_FROM else step
    return min(count, -(-needed // unit) * unit)


def out_of_memory(job: Job) -> ShoalError:
    """What to say when the GPU is full: what an env costs and how many fit."""
    whole = int(SHARE["cuda"] * torch.cuda.mem_get_info(torch.device(job.hardware.device))[1])
    told = estimate(job, whole)
    return ShoalError(
        f"The GPU's memory is full: {job.run.num_envs:,} envs of {job.world} cost about {size(told.per_env)} each "
        f"with rollouts of {job.run.rollout_steps}. About {told.fits:,} fit in all of it: lower --num-envs or --rollout-steps."
    )


def size(count: float) -> str:
    """Bytes that people can read."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= step:
            return f"{count / step:.3g} {unit}"
    return f"{count:.0f} bytes"
