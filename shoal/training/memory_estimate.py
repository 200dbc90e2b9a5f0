"""Estimate the memory of a run before allocating it, and how many envs fit."""

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

SAMPLE_ENVS = 16
"""Envs of the world on the meta device whose bytes are counted."""

BYTES_PER_ACTING = 6
"""Bytes per activation while a policy acts."""

RESERVED = {"cpu": 0, "cuda": 2**30}
"""Bytes of CUDA's libraries and graphs, independent of the number of envs."""

BLOCK, BLOCKS_FROM = 1024, 4096
"""Above BLOCKS_FROM envs, their number is a multiple of BLOCK, for full thread blocks."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of a run."""

    num_envs: int
    agents: int
    state: int
    """Per env: arrays of the world and its wrappers."""
    rollout: int
    """Per env: experience, noise, values, advantages."""
    acting: int
    """Per env: activations while the policies act."""
    update: int
    """Per env: activations of an update; large updates run in micro-batches of `update_limit` bytes."""
    update_limit: int
    replay: int
    """In all: the replay."""
    reserved: int
    """In all: see RESERVED."""
    free: int
    on_gpu: bool = False

    @property
    def per_env(self) -> int:
        return self.state + self.rollout + self.acting

    @property
    def updates(self) -> int:
        """Bytes of the activations of one update."""
        return min(self.update_limit, self.num_envs * self.update)

    @property
    def needed(self) -> int:
        """Bytes of the run, without `reserved`."""
        return self.num_envs * self.per_env + self.updates + self.replay

    def check(self) -> None:
        """Refuse more memory than this process may ever have; allocating it would invoke the OOM killer."""
        limit = whole_memory()
        if not self.on_gpu and self.needed > limit:
            raise ShoalError(
                f"{self.num_envs:,} envs take {size(self.needed)}, but this process is limited to {size(limit)}; about "
                f"{self.fits:,} envs fit: use a smaller --num-envs, or --num-envs auto."
            )

    @property
    def fits(self) -> int:
        """The largest number of envs that fits in free memory."""
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
    """Estimate the memory of a job; `free` defaults to the device's free bytes."""
    kind = torch.device(job.hardware.device).type
    on_meta = job.change(device="meta")
    with torch.device("meta"):
        world = make_world(on_meta, SAMPLE_ENVS)
        policies = make_policies(on_meta, world)
    rollout = acting = update = update_limit = replay = 0
    steps, preemptible = job.run.rollout_steps, job.schedule.sync_frac > 0
    copies = _copies(job)
    room = truncations(world.time_limit, steps)
    for name, groups in job.policy_groups().items():
        members = [world.group(g.name) for g in groups]
        agents = sum(g.agents for g in members)
        policy = policies[name]
        memory = allocate(
            members, steps, SAMPLE_ENVS, room, torch.device("meta"), policy.state_size, policy.explores, preemptible
        )
        memory.time_limit = world.time_limit
        rollout += memory.nbytes // SAMPLE_ENVS + steps * agents * 4 * policy.head.noise_width
        if name not in job.multi_agent.freeze_groups:
            rollout += copies * memory.nbytes // SAMPLE_ENVS
        # Final observations before they are stored; slot counters; actions scaled for the world.
        rollout += (
            memory.observation[-1].nbytes + (0 if memory.alive is None else memory.alive[-1].nbytes)
        ) // SAMPLE_ENVS
        rollout += 2 * 4 + (memory.action[0].nbytes // SAMPLE_ENVS if policy.head.gaussian_noise else 0)
        learn = job.for_policy(name).learn
        activations = _activations(policy)
        bytes_each = BYTES_PER_ACTIVATION[job.hardware.precision] * activations
        if name in job.multi_agent.freeze_groups:
            pass
        elif isinstance(learn, OffPolicyConfig):
            burn_in, length = learn.sequence_rows(policy.rnn is not None)
            each = Replay.bytes_per_step(memory, learn.prioritized, length > 0)
            replay += each * learn.buffer_size // (SAMPLE_ENVS * agents)
            # The network sees observations and next observations, the target network the next ones.
            batch = learn.batch_size
            if length:  # sequences include burn-in and n-step rows
                batch = batch * (burn_in + length + learn.n_step) // length
            update = update_limit = max(update, 3 * bytes_each * batch)
        else:
            # Advantages, returns, V-trace ratios, weights of absent agents, the shuffled order of PPO's samples
            per_step = (
                2 + (memory.alive is not None or memory.is_decision_step is not None) + getattr(learn, "vtrace", False)
            )
            ordered = (1 if policy.state_size else steps) if hasattr(learn, "num_minibatches") else 0
            rollout += 4 * agents * (steps * per_step + ordered + memory.final_observation.shape[0] + 1)
            update = max(update, bytes_each * agents * steps // getattr(learn, "num_minibatches", 1))
            whole = activation_memory(torch.device(job.hardware.device))
            update_limit = max(update_limit, learn.micro_batch_size * bytes_each if learn.micro_batch_size else whole)
        acting = max(acting, agents * activations * BYTES_PER_ACTING)
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
    """Rollouts beside the collector's: the queue's and the learner's."""
    schedule, device = job.schedule, job.hardware.device
    same_device = schedule.learner_device is None or full_device(schedule.learner_device) == full_device(device)
    return schedule.max_policy_lag + 2 if schedule.asynchronous and same_device else 0


def _state(world: World) -> int:
    """Bytes per env of a world and of the outputs that its wrappers allocate."""
    if not isinstance(world, Wrapper):
        return world.bytes_per_env
    if isinstance(world, FrameStack):  # allocates nothing
        return _state(world.world)
    outputs = 2  # end flags
    for g in world.groups:
        outputs += g.agents * (2 * g.observation.size * g.observation.dtype.itemsize + 4 + g.choices + 3)
    return world.bytes_per_env + outputs + _state(world.world) - world.world.bytes_per_env


def _activations(policy: Policy) -> int:
    with torch.device("meta"):
        return policy.activations()


def most_envs(job: Job) -> int:
    """The value of `--num-envs auto`: the most envs that fit in memory and that total_steps needs."""
    if not world_class(job.world).on_device:
        raise ShoalError(f"--num-envs auto fills the device's memory, but {job.world} steps on the CPU; give a number.")
    costs = estimate(job)
    learn = [job.for_policy(name).learn for name in job.policy_groups()]
    step = max(1, *(getattr(settings, "num_minibatches", 1) for settings in learn))
    count = costs.fits // step * step
    if count < 1:
        raise ShoalError(
            f"Not one env of {job.world} fits: it takes {size(costs.per_env + costs.update)} of {size(costs.free)}. "
            "Lower --rollout-steps."
        )
    block = step * -(-BLOCK // step)
    if count > BLOCKS_FROM:
        count = count // block * block
    # The fewest iterations, then the fewest envs that reach total_steps in them.
    iterations = -(-job.run.total_steps // (count * job.run.rollout_steps))
    needed = -(-job.run.total_steps // (iterations * job.run.rollout_steps))
    unit = block if needed > BLOCKS_FROM else step
    return min(count, -(-needed // unit) * unit)


def out_of_memory(job: Job) -> ShoalError:
    """The error for a full GPU: bytes per env and how many envs fit."""
    whole = int(SHARE["cuda"] * torch.cuda.mem_get_info(torch.device(job.hardware.device))[1])
    costs = estimate(job, whole)
    return ShoalError(
        f"The GPU's memory is full: {job.run.num_envs:,} envs of {job.world} cost about {size(costs.per_env)} each "
        f"with rollouts of {job.run.rollout_steps}. About {costs.fits:,} fit in all of it: lower --num-envs or "
        "--rollout-steps."
    )


def size(count: float) -> str:
    """Bytes in a readable unit: 5.87 MiB."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= step:
            return f"{count / step:.3g} {unit}"
    return f"{count:.0f} bytes"
