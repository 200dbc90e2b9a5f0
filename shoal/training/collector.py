"""Collect rollouts: policies act, the world steps, rows are written in agents; on a GPU as one CUDA graph."""

from typing import TYPE_CHECKING, no_type_check

import torch
import warp as wp

from shoal.core.kernels import Broadcast
from shoal.core.launch import Plan, bind
from shoal.core.noise import noise_plan
from shoal.core.world import Group, GroupOutputs, Outputs, World
from shoal.learn.rollout import allocate, stacked
from shoal.policy import Policy

if TYPE_CHECKING:
    from shoal.policy.fused import FusedActor


def action_noise(
    world: World,
    actors: dict[str, tuple[Policy, int]],
    steps: int,
    seed: int,
    counter: torch.Tensor,
    first_env: int = 0,
) -> tuple[dict[str, torch.Tensor], list[Plan]]:
    """Noise that policies sample actions from, and the launches that refill it.

    Args:
        actors: Name -> policy and its number of agents A per env.
        steps: Number of steps T that the noise lasts for.
        counter: int32 [1], part of the key of the random numbers; advance it between refills.
        first_env: Index, in the whole run, of the world's first env.

    Returns:
        Name -> noise [T, N * A, noise width], and the plans to call before each use. They also refill noisy networks.
    """
    envs, device = world.num_envs, world.device
    env_id = torch.arange(first_env, first_env + envs, dtype=torch.int32, device=device)
    noises, plans = {}, []
    for index, (name, (policy, agents)) in enumerate(actors.items()):
        head = policy.head
        noise = torch.zeros(steps, envs, agents * head.noise_width, device=device)
        plans.append(noise_plan(noise, head.gaussian_noise, actor_seed(seed, index), env_id, counter))
        noises[name] = noise.view(steps, envs * agents, head.noise_width)
        network_noise = policy.noise_plan(actor_seed(seed, index), 0, counter)
        plans += [network_noise] if network_noise else []
    return noises, plans


@wp.func
@no_type_check
def take_slot(
    env: int,
    agent: int,
    slots: int,
    terminated: wp.array[wp.bool],
    truncated: wp.array[wp.bool],
    used: wp.array[int],
    used_next: wp.array[int],
):
    """The next free slot of an env truncated in this step; -1 for other envs, or if none is free."""
    slot = used[env]
    takes = truncated[env] and not terminated[env] and slot < slots
    if agent == 0:
        used_next[env] = wp.where(takes, slot + 1, slot)
    return wp.where(takes, slot, -1)


@wp.func
@no_type_check
def store_final_words(
    env: int,
    agent: int,
    stack: int,
    terminated: wp.array[wp.bool],
    truncated: wp.array[wp.bool],
    age: wp.array[int],
    earlier: wp.array4d[int],
    final: wp.array3d[int],
    used: wp.array[int],
    used_next: wp.array[int],
    stored: wp.array4d[int],
):
    """Store an agent's final frame stack in the next free slot of its env, if the env was truncated in this step.

    The stack is the final frame and the frames before it, as far back as the episode's age.
    """
    slot = take_slot(env, agent, stored.shape[1], terminated, truncated, used, used_next)
    if slot >= 0:
        size = final.shape[2]
        for back in range(1, stack):
            row = earlier.shape[1] - wp.min(back, age[env] + 1)
            for i in range(size):
                stored[env, slot, agent, (stack - 1 - back) * size + i] = earlier[env, row, agent, i]
        for i in range(size):
            stored[env, slot, agent, (stack - 1) * size + i] = final[env, agent, i]


@wp.func
@no_type_check
def store_final_bytes(
    env: int,
    agent: int,
    stack: int,
    terminated: wp.array[wp.bool],
    truncated: wp.array[wp.bool],
    age: wp.array[int],
    earlier: wp.array4d[wp.uint8],
    final: wp.array3d[wp.uint8],
    used: wp.array[int],
    used_next: wp.array[int],
    stored: wp.array4d[wp.uint8],
):
    """`store_final_words` for observations whose bytes are no multiple of four."""
    slot = take_slot(env, agent, stored.shape[1], terminated, truncated, used, used_next)
    if slot >= 0:
        size = final.shape[2]
        for back in range(1, stack):
            row = earlier.shape[1] - wp.min(back, age[env] + 1)
            for i in range(size):
                stored[env, slot, agent, (stack - 1 - back) * size + i] = earlier[env, row, agent, i]
        for i in range(size):
            stored[env, slot, agent, (stack - 1) * size + i] = final[env, agent, i]


@wp.func
@no_type_check
def record_empty_masks(
    env: int,
    agent: int,
    steps: int,
    parts: int,
    counter: wp.array[int],
    nvec: wp.array[int],
    mask: wp.array4d[wp.bool],
    alive: wp.array3d[wp.bool],
    is_decision_step: wp.array3d[wp.bool],
    first: wp.array2d[int],
):
    """Keep the first step, counted over all rollouts, at which an agent must act and its mask allows nothing."""
    for t in range(steps):
        if first[env, agent] < 0 and alive[env, t, agent] and is_decision_step[env, t, agent]:
            choice = int(0)
            for part in range(parts):
                allowed = int(0)
                for _ in range(nvec[part]):
                    allowed = allowed + wp.where(mask[env, t, agent, choice], 1, 0)
                    choice = choice + 1
                if allowed == 0:
                    first[env, agent] = counter[0] * steps + t


PolicyGroups = dict[str, list[Group]]
"""Policy -> the groups it acts for; their agents are concatenated along the agent axis of its rollout."""


class Collector:
    """Fills one rollout per policy with `steps` steps of all envs."""

    def __init__(
        self,
        world: World,
        policies: dict[str, Policy],
        steps: int,
        seed: int,
        policy_groups: PolicyGroups | None = None,
        first_env: int = 0,
        compiled: bool = False,
        bf16: bool = False,
        preemptible: bool = False,
    ):
        """With `preemptible`, rollouts have the arrays that preemption needs."""
        self.world, self.policies, self.steps, self.bf16 = world, policies, steps, bf16
        policy_groups = policy_groups or {g.name: [g] for g in world.groups}
        device, envs = world.device, world.num_envs
        room = truncations(world.time_limit, steps)
        self.rollouts = {
            name: allocate(
                groups, steps, envs, room, device, policies[name].state_size, policies[name].explores, preemptible
            )
            for name, groups in policy_groups.items()
        }
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        """int32 [1]: rollouts collected so far."""
        self._slots = {name: _slots(groups) for name, groups in policy_groups.items()}
        # int32 [2, N]: slots used so far. A step reads one row and writes the other, so threads of one env do not race.
        self._used = {name: torch.zeros(2, envs, dtype=torch.int32, device=device) for name in policy_groups}
        self._final = {name: torch.zeros_like(r.observation[-1]) for name, r in self.rollouts.items()}
        self._final_alive = {n: torch.ones_like(r.alive[0]) for n, r in self.rollouts.items() if r.alive is not None}
        actors = {name: (policies[name], sum(g.agents for g in groups)) for name, groups in policy_groups.items()}
        self._noise, self._plans = action_noise(world, actors, steps, seed, self.counter, first_env)
        # Box actions are scaled and clipped for the world; it reads discrete actions from the rollout.
        self._world_action = {
            name: torch.zeros_like(self.rollouts[name].action[0])
            for name, policy in policies.items()
            if policy.head.gaussian_noise
        }
        first, *others = self.rollouts.values()
        for other in others:  # episodes end for all groups at the same step
            other.terminated, other.truncated = first.terminated, first.truncated
        self._empty_masks = {
            name: torch.full((envs, r.action_mask.shape[2]), -1, dtype=torch.int32, device=device)
            for name, r in self.rollouts.items()
            if r.action_mask is not None
        }
        """Policy -> int32 [N, A]: the first step at which an agent's mask allowed nothing; -1: none."""
        self._empty_mask_plans = [self._empty_mask_plan(name, first) for name, first in self._empty_masks.items()]
        self._rows = [self._row(t) for t in range(steps)]
        self._final_plans_by_step = self._plan_finals()
        self._act = torch.compile(self._act_eager, dynamic=False) if compiled else self._act_eager
        self._fused = self._fuse() if compiled and bf16 and device.type == "cuda" else {}
        for name, policy in policies.items():
            self.rollouts[name].has_values = policy.shared_encoder
            self.rollouts[name].time_limit = world.time_limit

    @property
    def nbytes(self) -> int:
        """Bytes that grow with the number of envs."""
        own = [*self._used.values(), *self._final.values(), *self._final_alive.values(), *self._noise.values()]
        shared = sum(r.terminated.nbytes + r.truncated.nbytes for r in list(self.rollouts.values())[1:])
        rollouts = sum(r.nbytes for r in self.rollouts.values()) - shared
        return rollouts + sum(t.nbytes for t in [*own, *self._world_action.values()])

    def describe_stepping(self) -> list[str]:
        """Lines for the progress output: how the envs are stepped."""
        return []

    def start(self, seed: int, first_env: int = 0) -> None:
        """Reset the world and copy its first observations to where the first rollout begins."""
        self.world.reset(seed, first_env)
        self.show_current()

    def show_current(self) -> None:
        """Copy the world's current outputs to the rows that the next rollout carries over."""
        for name, slots in self._slots.items():
            self.rollouts[name].start_episodes()
            for group, agents in slots.items():
                out = self.world.outputs.groups[group]
                for item, row in self.rollouts[name].carry_state().items():
                    if getattr(out, item, None) is not None:
                        row[:, agents].copy_(getattr(out, item))

    def collect(self) -> None:
        """Collect one rollout. A CUDA graph records this on a GPU: no allocation, no host reads."""
        self._begin()
        for t in range(self.steps):
            actions = {}
            for name, slots in self._slots.items():
                chosen = self._choose(name, t)
                actions.update({group: chosen[:, agents] for group, agents in slots.items()})
            self.world.step(actions, into=self._rows[t])
            for plan in self._final_plans_by_step[t]:
                plan()
            for rollout in self.rollouts.values():
                rollout.update_ages(t)
        for plan in self._empty_mask_plans:
            plan()
        self.counter.add_(1)

    def _begin(self) -> None:
        """Refill the noise, free the slots, carry over the last row of the previous rollout."""
        for plan in self._plans:
            plan()
        for used in self._used.values():
            used.zero_()
        for name, rollout in self.rollouts.items():
            rollout.carry_over()
            if rollout.epsilon is not None:
                self.policies[name].head.explore(self._noise[name], rollout.epsilon.flatten())

    def _fuse(self) -> dict[str, "FusedActor"]:
        """Fused acting kernels, for the policies that support them."""
        try:
            from shoal.policy.fused import FusedActor, supports
        except ImportError:  # a build of torch without Triton
            return {}
        return {name: FusedActor(policy) for name, policy in self.policies.items() if supports(policy)}

    def _choose(self, name: str, t: int) -> torch.Tensor:
        rollout = self.rollouts[name]
        world_action = self._world_action.get(name)
        mask = None if rollout.action_mask is None else rollout.action_mask[t]
        if name in self._fused:
            out = rollout.action[t], rollout.log_prob[t], rollout.value[t]
            self._fused[name](rollout.observation[t], mask, self._noise[name][t], *out)
            return rollout.action[t]
        with torch.no_grad():
            self._act(
                self.policies[name],
                *rollout.window(t),
                None if rollout.rnn_state is None else rollout.rnn_state[-1],
                mask,
                self._noise[name][t],
                rollout.action[t],
                rollout.log_prob[t],
                rollout.value[t] if rollout.has_values else None,
                world_action,
            )
        return rollout.action[t] if world_action is None else world_action

    def _act_eager(
        self, policy, observation, age, state, mask, noise, action_out, log_prob_out, value_out, world_out
    ) -> None:
        seen, mask = stacked(observation, age), None if mask is None else mask.flatten(0, 1)
        with torch.autocast(noise.device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            if state is not None:
                params, value, after = policy.step(seen, state.flatten(0, 1), mask)
                value_out.copy_(value.view_as(value_out))
                state.copy_(after.view_as(state))
            elif value_out is None:
                params = policy.distribution(seen, mask)
            else:  # with a shared encoder, the value is nearly free
                params, value = policy.distribution_and_value(seen, mask)
                value_out.copy_(value.view_as(value_out))
        action, log_prob = policy.head.sample(params, noise)
        action_out.copy_(action.view_as(action_out))
        log_prob_out.copy_(log_prob.view_as(log_prob_out))
        if world_out is not None:
            world_out.copy_(policy.head.to_world(action).view_as(world_out))

    def _empty_mask_plan(self, name: str, first: torch.Tensor) -> Plan:
        r, nvec = self.rollouts[name], self.policies[name].head.nvec
        assert r.action_mask is not None
        always = torch.ones((), dtype=torch.bool, device=first.device).expand_as(r.reward)
        arguments = dict(
            steps=self.steps,
            parts=len(nvec),
            counter=Broadcast(self.counter),
            nvec=Broadcast(torch.tensor(nvec, dtype=torch.int32, device=first.device)),
            mask=r.action_mask.transpose(0, 1),
            alive=(always if r.alive is None else r.alive).transpose(0, 1),
            is_decision_step=(always if r.is_decision_step is None else r.is_decision_step).transpose(0, 1),
            first=first,
        )
        return bind("empty_masks", record_empty_masks, first.device, first.shape[0], arguments, first.shape[1])

    @property
    def masked(self) -> bool:
        """Whether any group has an action mask."""
        return bool(self._empty_masks)

    def first_empty_mask(self) -> tuple[int, int, str, int] | None:
        """Step, env, group and agent of the first action mask that allowed nothing; None if there is none."""
        found = []
        for name, first in self._empty_masks.items():
            for group, agents in self._slots[name].items():
                steps = first[:, agents].cpu()  # sync: with a log line or a checkpoint
                found += [(int(steps[e, a]), e, group, a) for e, a in (steps >= 0).nonzero().tolist()]
        return min(found, default=None)

    def _row(self, t: int | slice) -> Outputs:
        """Views that step t writes: rewards and end flags of row t, observations and masks of row t + 1.

        For a slice of steps they are [step, env, ...]; final observations are [env, ...] in both cases.
        """
        groups = {}
        for name, slots in self._slots.items():
            r, final_alive = self.rollouts[name], self._final_alive.get(name)
            for group, agents in slots.items():
                kind = self.world.group(group)
                groups[group] = GroupOutputs(
                    observation=r.observation[r.stack :][t, :, agents],
                    reward=r.reward[t, :, agents],
                    final_observation=self._final[name][:, agents],
                    alive=r.alive[1:][t, :, agents] if r.alive is not None and kind.can_leave else None,
                    final_alive=final_alive[:, agents] if final_alive is not None and kind.can_leave else None,
                    action_mask=r.action_mask[1:][t, :, agents] if r.action_mask is not None and kind.masked else None,
                    is_decision_step=r.is_decision_step[1:][t, :, agents]
                    if r.is_decision_step is not None and kind.action_interval > 1
                    else None,
                )
        flags = next(iter(self.rollouts.values()))
        return Outputs(flags.terminated[t], flags.truncated[t], groups)

    def _plan_finals(self) -> list[list[Plan]]:
        """Plans by step that store the final observations of truncated episodes."""
        return [[plan for name in self.rollouts for plan in self._final_plans(name, t)] for t in range(self.steps)]

    def _final_plans(self, name: str, t: int) -> list[Plan]:
        r = self.rollouts[name]
        pairs = [(self._final[name], r.final_observation)]
        if r.final_alive is not None:
            pairs.append((self._final_alive[name], r.final_alive))
        if r.rnn_state is not None and r.final_state is not None:
            pairs.append((r.rnn_state[-1], r.final_state))
        return [self._final_plan(name, t, final, stored) for final, stored in pairs]

    def _final_plan(self, name: str, t: int, final: torch.Tensor, stored: torch.Tensor) -> Plan:
        r, used = self.rollouts[name], self._used[name]
        stack = r.stack if final is self._final[name] else 1
        # Without a stack the kernel reads no earlier frames, but the argument must be an array.
        earlier = r.observation[t + 1 : t + stack] if stack > 1 else final.unsqueeze(0)
        words = final[0, 0].nbytes % 4 == 0
        final, earlier, stored = (
            tensor.flatten(start).unflatten(start, (r.reward.shape[2], -1)).view(torch.int32 if words else torch.uint8)
            for tensor, start in ((final, 1), (earlier, 2), (stored, 2))
        )
        arguments = dict(
            stack=stack,
            terminated=r.terminated[t],
            truncated=r.truncated[t],
            age=used[0] if r.age is None else r.age[t],
            earlier=earlier.transpose(0, 1),
            final=final,
            used=used[t % 2],
            used_next=used[(t + 1) % 2],
            stored=stored.transpose(0, 1),
        )
        return bind(
            "store_final",
            store_final_words if words else store_final_bytes,
            final.device,
            final.shape[0],
            arguments,
            final.shape[1],
        )


def truncations(time_limit: int | None, steps: int) -> int:
    """Maximum number of truncated episodes of one env in `steps` steps."""
    return steps if time_limit is None else -(-steps // time_limit)


def _slots(groups: list[Group]) -> dict[str, slice]:
    """Group -> its slice of the agent axis of a policy's rollout."""
    found, start = {}, 0
    for g in groups:
        found[g.name] = slice(start, start + g.agents)
        start += g.agents
    return found


def actor_seed(seed: int, index: int) -> int:
    """A seed for the policy at an index, distinct from the world's and the other policies'."""
    return (seed * 1_000_003 + 7919 * (index + 1)) & 0x7FFFFFFF
