"""Collecting: policies act, the world steps, rows of the rollout are written in place; on a GPU as one graph."""

from typing import TYPE_CHECKING

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
    """What policies draw the actions of so many agents from, [T, N * A, width] each, and plans that fill it anew.

    The plans also fill networks that have noise inside.
    """
    envs, device = world.num_envs, world.device
    env_id = torch.arange(first_env, first_env + envs, dtype=torch.int32, device=device)
    noises, plans = {}, []
    for index, (name, (policy, agents)) in enumerate(actors.items()):
        head = policy.head
        noise = torch.zeros(steps, envs, agents * head.noise_width, device=device)
        plans.append(noise_plan(noise, head.gaussian_noise, actor_seed(seed, index), env_id, counter))
        noises[name] = noise.view(steps, envs * agents, head.noise_width)
        inside = policy.noise_plan(actor_seed(seed, index), 0, counter)
        plans += [inside] if inside else []
    return noises, plans


@wp.func
def take_slot(
    env: int,
    agent: int,
    slots: int,
    terminated: wp.array[wp.bool],
    truncated: wp.array[wp.bool],
    used: wp.array[int],
    used_next: wp.array[int],
):
    """The next free slot of an env that was cut off in this step; -1 for others, or if none is free."""
    slot = used[env]
    cut = truncated[env] and not terminated[env] and slot < slots
    if agent == 0:
        used_next[env] = wp.where(cut, slot + 1, slot)
    return wp.where(cut, slot, -1)


@wp.func
def keep_words(
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
    kept: wp.array4d[int],
):
    """Put what an agent of an env that was cut off in this step saw last into the env's next free slot.

    What it saw are the observations before, as far back as its age, and the final one.
    """
    slot = take_slot(env, agent, kept.shape[1], terminated, truncated, used, used_next)
    if slot >= 0:
        size = final.shape[2]
        for back in range(1, stack):
            row = earlier.shape[1] - wp.min(back, age[env] + 1)
            for i in range(size):
                kept[env, slot, agent, (stack - 1 - back) * size + i] = earlier[env, row, agent, i]
        for i in range(size):
            kept[env, slot, agent, (stack - 1) * size + i] = final[env, agent, i]


@wp.func
def keep_bytes(
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
    kept: wp.array4d[wp.uint8],
):
    """The same for what is no multiple of four bytes long."""
    slot = take_slot(env, agent, kept.shape[1], terminated, truncated, used, used_next)
    if slot >= 0:
        size = final.shape[2]
        for back in range(1, stack):
            row = earlier.shape[1] - wp.min(back, age[env] + 1)
            for i in range(size):
                kept[env, slot, agent, (stack - 1 - back) * size + i] = earlier[env, row, agent, i]
        for i in range(size):
            kept[env, slot, agent, (stack - 1) * size + i] = final[env, agent, i]


@wp.func
def note_stuck(
    env: int,
    agent: int,
    steps: int,
    parts: int,
    counter: wp.array[int],
    nvec: wp.array[int],
    mask: wp.array4d[wp.bool],
    alive: wp.array3d[wp.bool],
    is_decision_step: wp.array3d[wp.bool],
    stuck: wp.array2d[int],
):
    """Keep the first step, counted over all rollouts, at which the agent has to act and its mask allows nothing."""
    for t in range(steps):
        if stuck[env, agent] < 0 and alive[env, t, agent] and is_decision_step[env, t, agent]:
            choice = int(0)
            for part in range(parts):
                allowed = int(0)
                for _ in range(nvec[part]):
                    allowed = allowed + wp.where(mask[env, t, agent, choice], 1, 0)
                    choice = choice + 1
                if allowed == 0:
                    stuck[env, agent] = counter[0] * steps + t


PolicyGroups = dict[str, list[Group]]
"""Name of a policy -> the groups it acts for. Their agents stand one after the other in its rollout."""


class Collector:
    """Fills one rollout per policy, `steps` steps of all envs at a time."""

    def __init__(
        self,
        world: World,
        policies: dict[str, Policy],
        steps: int,
        seed: int,
        teams: PolicyGroups | None = None,
        first_env: int = 0,
        compiled: bool = False,
        bf16: bool = False,
        cuts: bool = False,
    ):
        """With `cuts`, there is room for rollouts that are cut short."""
        self.world, self.policies, self.steps, self.bf16 = world, policies, steps, bf16
        teams = teams or {g.name: [g] for g in world.groups}
        device, envs = world.device, world.num_envs
        room = truncations(world.time_limit, steps)
        self.rollouts = {
            name: allocate(groups, steps, envs, room, device, policies[name].state_size, policies[name].explores, cuts)
            for name, groups in teams.items()
        }
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        """Rollouts made so far."""
        self._slots = {name: _slots(groups) for name, groups in teams.items()}
        # Slots used so far: a step reads one row and writes the other, so that agents need not wait for one another.
        self._used = {name: torch.zeros(2, envs, dtype=torch.int32, device=device) for name in teams}
        self._final = {name: torch.zeros_like(r.observation[-1]) for name, r in self.rollouts.items()}
        self._final_alive = {n: torch.ones_like(r.alive[0]) for n, r in self.rollouts.items() if r.alive is not None}
        actors = {name: (policies[name], sum(g.agents for g in groups)) for name, groups in teams.items()}
        self._noise, self._plans = action_noise(world, actors, steps, seed, self.counter, first_env)
        # Box actions are scaled and clipped for the world; choices are read by it where the rollout keeps them.
        self._world_action = {
            name: torch.zeros_like(self.rollouts[name].action[0])
            for name, policy in policies.items()
            if policy.head.gaussian_noise
        }
        first, *others = self.rollouts.values()
        for other in others:  # episodes end for all groups at once
            other.terminated, other.truncated = first.terminated, first.truncated
        self._stuck = {
            name: torch.full((envs, r.action_mask.shape[2]), -1, dtype=torch.int32, device=device)
            for name, r in self.rollouts.items()
            if r.action_mask is not None
        }
        """Policy -> [N, A]: the first step at which an agent's mask allowed nothing; -1: there was none."""
        self._stuck_plans = [self._stuck_plan(name, stuck) for name, stuck in self._stuck.items()]
        self._rows = [self._row(t) for t in range(steps)]
        self._keep = self._keep_all()
        self._act = torch.compile(self._act_eager, dynamic=False) if compiled else self._act_eager
        self._fused = self._fuse() if compiled and bf16 and device.type == "cuda" else {}
        for name, policy in policies.items():
            self.rollouts[name].valued = policy.shared
            self.rollouts[name].time_limit = world.time_limit

    @property
    def nbytes(self) -> int:
        """Memory that grows with the number of envs."""
        own = [*self._used.values(), *self._final.values(), *self._final_alive.values(), *self._noise.values()]
        shared = sum(r.terminated.nbytes + r.truncated.nbytes for r in list(self.rollouts.values())[1:])
        rollouts = sum(r.nbytes for r in self.rollouts.values()) - shared
        return rollouts + sum(t.nbytes for t in [*own, *self._world_action.values()])

    def remarks(self) -> list[str]:
        """What people should know of how experience is made."""
        return []

    def start(self, seed: int, first_env: int = 0) -> None:
        """Reset the world and put its first observations where the first rollout begins."""
        self.world.reset(seed, first_env)
        self.show_current()

    def show_current(self) -> None:
        """Copy the world's present outputs to the last row, from where the next rollout takes them as first ones."""
        for name, slots in self._slots.items():
            self.rollouts[name].begin()
            for group, place in slots.items():
                out = self.world.outputs.groups[group]
                for item, row in self.rollouts[name].carried().items():
                    if getattr(out, item, None) is not None:
                        row[:, place].copy_(getattr(out, item))

    def collect(self) -> None:
        """Make one rollout. Recorded as a graph on a GPU: no allocation, nothing read on the host."""
        self._begin()
        for t in range(self.steps):
            actions = {}
            for name, slots in self._slots.items():
                chosen = self._choose(name, t)
                actions.update({group: chosen[:, place] for group, place in slots.items()})
            self.world.step(actions, into=self._rows[t])
            for plan in self._keep[t]:
                plan()
            for rollout in self.rollouts.values():
                rollout.settle(t)
        for plan in self._stuck_plans:
            plan()
        self.counter.add_(1)

    def _begin(self) -> None:
        """Fresh noise, free slots, and in row 0 what the last rollout ended with."""
        for plan in self._plans:
            plan()
        for used in self._used.values():
            used.zero_()
        for name, rollout in self.rollouts.items():
            rollout.carry_over()
            if rollout.epsilon is not None:
                self.policies[name].head.explore(self._noise[name], rollout.epsilon.flatten())

    def _fuse(self) -> dict[str, "FusedActor"]:
        """One kernel each for the policies that allow it."""
        try:
            from shoal.policy.fused import FusedActor, fits
        except ImportError:  # a build of torch without Triton
            return {}
        return {name: FusedActor(policy) for name, policy in self.policies.items() if fits(policy)}

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
                rollout.value[t] if rollout.valued else None,
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
            else:  # on top of one encoder, the value costs next to nothing
                params, value = policy.distribution_and_value(seen, mask)
                value_out.copy_(value.view_as(value_out))
        action, log_prob = policy.head.sample(params, noise)
        action_out.copy_(action.view_as(action_out))
        log_prob_out.copy_(log_prob.view_as(log_prob_out))
        if world_out is not None:
            world_out.copy_(policy.head.to_world(action).view_as(world_out))

    def _stuck_plan(self, name: str, stuck: torch.Tensor) -> Plan:
        r, nvec = self.rollouts[name], self.policies[name].head.nvec
        assert r.action_mask is not None
        always = torch.ones((), dtype=torch.bool, device=stuck.device).expand_as(r.reward)
        arguments = dict(
            steps=self.steps,
            parts=len(nvec),
            counter=Broadcast(self.counter),
            nvec=Broadcast(torch.tensor(nvec, dtype=torch.int32, device=stuck.device)),
            mask=r.action_mask.transpose(0, 1),
            alive=(always if r.alive is None else r.alive).transpose(0, 1),
            is_decision_step=(always if r.is_decision_step is None else r.is_decision_step).transpose(0, 1),
            stuck=stuck,
        )
        return bind("stuck", note_stuck, stuck.device, stuck.shape[0], arguments, stuck.shape[1])

    @property
    def masked(self) -> bool:
        """Whether any group has an action mask."""
        return bool(self._stuck)

    def first_stuck(self) -> tuple[int, int, str, int] | None:
        """Step, env, group and agent of the first action mask that allowed nothing; None: there was none."""
        found = []
        for name, stuck in self._stuck.items():
            for group, place in self._slots[name].items():
                steps = stuck[:, place].cpu()  # sync: with a log line or a checkpoint
                found += [(int(steps[e, a]), e, group, a) for e, a in (steps >= 0).nonzero().tolist()]
        return min(found, default=None)

    def _row(self, t: int | slice) -> Outputs:
        """Where step t writes: its rewards and flags to row t, what is seen afterwards to row t + 1.

        Given a range of steps, [step, env, ...]; but there is one place per env for what is seen last in an episode.
        """
        groups = {}
        for name, slots in self._slots.items():
            r, final_alive = self.rollouts[name], self._final_alive.get(name)
            for group, place in slots.items():
                kind = self.world.group(group)
                groups[group] = GroupOutputs(
                    observation=r.observation[r.stack :][t, :, place],
                    reward=r.reward[t, :, place],
                    final_observation=self._final[name][:, place],
                    alive=r.alive[1:][t, :, place] if r.alive is not None and kind.can_leave else None,
                    final_alive=final_alive[:, place] if final_alive is not None and kind.can_leave else None,
                    action_mask=r.action_mask[1:][t, :, place] if r.action_mask is not None and kind.masked else None,
                    is_decision_step=r.is_decision_step[1:][t, :, place]
                    if r.is_decision_step is not None and kind.action_interval > 1
                    else None,
                )
        flags = next(iter(self.rollouts.values()))
        return Outputs(flags.terminated[t], flags.truncated[t], groups)

    def _keep_all(self) -> list[list[Plan]]:
        """For every step, what keeps the final observations of episodes that it cut off."""
        return [[plan for name in self.rollouts for plan in self._keep_plans(name, t)] for t in range(self.steps)]

    def _keep_plans(self, name: str, t: int) -> list[Plan]:
        r = self.rollouts[name]
        pairs = [(self._final[name], r.final_observation)]
        if r.final_alive is not None:
            pairs.append((self._final_alive[name], r.final_alive))
        if r.rnn_state is not None and r.final_state is not None:
            pairs.append((r.rnn_state[-1], r.final_state))
        return [self._keep_plan(name, t, final, kept) for final, kept in pairs]

    def _keep_plan(self, name: str, t: int, final: torch.Tensor, kept: torch.Tensor) -> Plan:
        r, used = self.rollouts[name], self._used[name]
        stack = r.stack if final is self._final[name] else 1
        # A single one looks at nothing earlier, but the kernel wants to be given something.
        earlier = r.observation[t + 1 : t + stack] if stack > 1 else final.unsqueeze(0)
        words = final[0, 0].nbytes % 4 == 0
        final, earlier, kept = (
            tensor.flatten(start).unflatten(start, (r.reward.shape[2], -1)).view(torch.int32 if words else torch.uint8)
            for tensor, start in ((final, 1), (earlier, 2), (kept, 2))
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
            kept=kept.transpose(0, 1),
        )
        return bind(
            "keep", keep_words if words else keep_bytes, final.device, final.shape[0], arguments, final.shape[1]
        )


def truncations(time_limit: int | None, steps: int) -> int:
    """How many episodes of one env can be truncated in so many steps."""
    return steps if time_limit is None else -(-steps // time_limit)


def _slots(groups: list[Group]) -> dict[str, slice]:
    """Which agents of a policy's rollout belong to which group."""
    found, start = {}, 0
    for g in groups:
        found[g.name] = slice(start, start + g.agents)
        start += g.agents
    return found


def actor_seed(seed: int, index: int) -> int:
    """A seed of its own for every policy, away from the worlds' and from each other's."""
    return (seed * 1_000_003 + 7919 * (index + 1)) & 0x7FFFFFFF
