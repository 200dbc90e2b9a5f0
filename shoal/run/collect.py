"""Collecting: policies act, the world steps, rows of the rollout are written in place; on a GPU as one graph."""

import torch
import warp as wp

from shoal.core.launch import Plan, Whole, bind
from shoal.core.random import ACTION_STREAM, philox, unit_float, unit_normal, vec4u
from shoal.core.world import GroupOutputs, Outputs, World
from shoal.learn.rollout import Rollout, allocate
from shoal.policy import ActorCritic

STREAM = wp.constant(wp.uint32(ACTION_STREAM))


@wp.func
def uniform_noise(env: int, seed: int, env_id: wp.array[int], counter: wp.array[int], noise: wp.array3d[float]):
    """Numbers in [0, 1) for every step of a rollout, keyed by (seed, env, rollout, step, part of the action)."""
    for part in range(noise.shape[2]):
        for block in range((noise.shape[1] + 3) // 4):
            place = vec4u(wp.uint32(env_id[env]), wp.uint32(counter[0]), wp.uint32(block), STREAM + wp.uint32(part))
            words = philox(place, wp.uint64(seed))
            for k in range(4):
                t = block * 4 + k
                if t < noise.shape[1]:
                    noise[env, t, part] = unit_float(words[k])


@wp.func
def normal_noise(env: int, seed: int, env_id: wp.array[int], counter: wp.array[int], noise: wp.array3d[float]):
    """The same for standard normal numbers, two from each draw."""
    for part in range(noise.shape[2]):
        for block in range((noise.shape[1] + 1) // 2):
            place = vec4u(wp.uint32(env_id[env]), wp.uint32(counter[0]), wp.uint32(block), STREAM + wp.uint32(part))
            words = philox(place, wp.uint64(seed))
            for k in range(2):
                t = block * 2 + k
                if t < noise.shape[1]:
                    noise[env, t, part] = unit_normal(words[2 * k], words[2 * k + 1])


def noise_plan(noise: torch.Tensor, gaussian: bool, seed: int, env_id: torch.Tensor, counter: torch.Tensor) -> Plan:
    """Fills `noise` [T, N, parts] for the rollout that `counter` [1] numbers."""
    function = normal_noise if gaussian else uniform_noise
    arguments = dict(seed=seed, env_id=env_id, counter=Whole(counter), noise=noise.transpose(0, 1))
    return bind("noise", function, noise.device, noise.shape[1], arguments)


def action_noise(
    world: World,
    policies: dict[str, ActorCritic],
    steps: int,
    seed: int,
    counter: torch.Tensor,
    first_env: int = 0,
) -> tuple[dict[str, torch.Tensor], list[Plan]]:
    """What the groups' heads draw their actions from, [T, N * A, width] each, and the plans that fill it anew."""
    envs, device = world.num_envs, world.device
    env_id = torch.arange(first_env, first_env + envs, dtype=torch.int32, device=device)
    noises, plans = {}, []
    for index, g in enumerate(world.groups):
        head = policies[g.name].head
        noise = torch.zeros(steps, envs, g.agents * head.noise_width, device=device)
        plans.append(noise_plan(noise, head.gaussian_noise, group_seed(seed, index), env_id, counter))
        noises[g.name] = noise.view(steps, envs * g.agents, head.noise_width)
    return noises, plans


@wp.func
def keep_words(
    env: int,
    terminated: wp.array[wp.bool],
    truncated: wp.array[wp.bool],
    final: wp.array2d[int],
    used: wp.array[int],
    kept: wp.array3d[int],
):
    """Put the final observation of an env that was cut off in this step into its next free slot."""
    if truncated[env] and not terminated[env] and used[env] < kept.shape[1]:
        for i in range(final.shape[1]):
            kept[env, used[env], i] = final[env, i]
        used[env] = used[env] + 1


@wp.func
def keep_bytes(
    env: int,
    terminated: wp.array[wp.bool],
    truncated: wp.array[wp.bool],
    final: wp.array2d[wp.uint8],
    used: wp.array[int],
    kept: wp.array3d[wp.uint8],
):
    """The same for observations whose size is no multiple of four bytes."""
    if truncated[env] and not terminated[env] and used[env] < kept.shape[1]:
        for i in range(final.shape[1]):
            kept[env, used[env], i] = final[env, i]
        used[env] = used[env] + 1


class Collector:
    """Fills one rollout per group, `steps` steps of all envs at a time."""

    def __init__(
        self,
        world: World,
        policies: dict[str, ActorCritic],
        steps: int,
        seed: int,
        first_env: int = 0,
        compiled: bool = False,
        bf16: bool = False,
    ):
        self.world, self.policies, self.steps, self.bf16 = world, policies, steps, bf16
        device, envs = world.device, world.num_envs
        limit = world.time_limit
        truncations = steps if limit is None else -(-steps // limit)
        self.rollouts: dict[str, Rollout] = {
            g.name: allocate(g, steps, envs, truncations, device) for g in world.groups
        }
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        """Rollouts made so far."""
        self._used = {g.name: torch.zeros(envs, dtype=torch.int32, device=device) for g in world.groups}
        self._final = {g.name: torch.zeros_like(self.rollouts[g.name].observation[0]) for g in world.groups}
        self._noise, self._plans = action_noise(world, policies, steps, seed, self.counter, first_env)
        # Box actions are scaled and clipped for the world; choices are read by it where the rollout keeps them.
        self._world_action = {
            name: torch.zeros_like(self.rollouts[name].action[0])
            for name, policy in policies.items()
            if policy.head.gaussian_noise
        }
        first, *others = self.rollouts.values()
        for other in others:  # episodes end for all groups at once
            other.terminated, other.truncated = first.terminated, first.truncated
        self._rows = [self._row(t) for t in range(steps)]
        self._keep = [[self._keep_plan(name, t) for name in self.rollouts] for t in range(steps)]
        self._act = torch.compile(self._act_eager, dynamic=False) if compiled else self._act_eager

    def start(self, seed: int, first_env: int = 0) -> None:
        """Reset the world and put its first observations where the first rollout begins."""
        self.world.reset(seed, first_env)
        self.show_current()

    def show_current(self) -> None:
        """Copy the world's present outputs to the last row, from where the next rollout takes them."""
        for name, out in self.world.outputs.groups.items():
            rollout = self.rollouts[name]
            rollout.observation[-1].copy_(out.observation)
            if rollout.alive is not None:
                rollout.alive[-1].copy_(out.alive)
            if rollout.action_mask is not None:
                rollout.action_mask[-1].copy_(out.action_mask)

    def collect(self) -> None:
        """Make one rollout. Recorded as a graph on a GPU: no allocation, nothing read on the host."""
        for plan in self._plans:
            plan()
        for used in self._used.values():
            used.zero_()
        for rollout in self.rollouts.values():
            rollout.observation[0].copy_(rollout.observation[-1])
            if rollout.alive is not None:
                rollout.alive[0].copy_(rollout.alive[-1])
            if rollout.action_mask is not None:
                rollout.action_mask[0].copy_(rollout.action_mask[-1])
        for t in range(self.steps):
            actions = {name: self._choose(name, t) for name in self.policies}
            self.world.step(actions, into=self._rows[t])
            for plan in self._keep[t]:
                plan()
        self.counter.add_(1)

    def _choose(self, name: str, t: int) -> torch.Tensor:
        rollout = self.rollouts[name]
        world_action = self._world_action.get(name)
        mask = None if rollout.action_mask is None else rollout.action_mask[t]
        with torch.no_grad():
            self._act(
                self.policies[name],
                rollout.observation[t],
                mask,
                self._noise[name][t],
                rollout.action[t],
                rollout.log_prob[t],
                world_action,
            )
        return rollout.action[t] if world_action is None else world_action

    def _act_eager(self, policy, observation, mask, noise, action_out, log_prob_out, world_out) -> None:
        with torch.autocast(noise.device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            params = policy.distribution(observation.flatten(0, 1), None if mask is None else mask.flatten(0, 1))
        action, log_prob = policy.head.sample(params, noise)
        action_out.copy_(action.view_as(action_out))
        log_prob_out.copy_(log_prob.view_as(log_prob_out))
        if world_out is not None:
            world_out.copy_(policy.head.to_world(action).view_as(world_out))

    def _row(self, t: int) -> Outputs:
        """Where step t writes: its rewards and flags to row t, what is seen afterwards to row t + 1."""
        groups = {}
        for name, r in self.rollouts.items():
            groups[name] = GroupOutputs(
                observation=r.observation[t + 1],
                reward=r.reward[t],
                final_observation=self._final[name],
                alive=None if r.alive is None else r.alive[t + 1],
                action_mask=None if r.action_mask is None else r.action_mask[t + 1],
            )
        flags = next(iter(self.rollouts.values()))
        return Outputs(flags.terminated[t], flags.truncated[t], groups)

    def _keep_plan(self, name: str, t: int) -> Plan:
        r = self.rollouts[name]
        final = self._final[name].flatten(1).view(torch.uint8)
        kept = r.final_observation.flatten(2).view(torch.uint8)
        words = final.shape[1] % 4 == 0
        if words:
            final, kept = final.view(torch.int32), kept.view(torch.int32)
        arguments = dict(
            terminated=r.terminated[t],
            truncated=r.truncated[t],
            final=final,
            used=self._used[name],
            kept=kept.transpose(0, 1),
        )
        return bind("keep", keep_words if words else keep_bytes, final.device, final.shape[0], arguments)


def group_seed(seed: int, index: int) -> int:
    """A seed of its own for every group, away from the worlds' and from each other's."""
    return (seed * 1_000_003 + 7919 * (index + 1)) & 0x7FFFFFFF
