"""Arrays that every world has: counters and flags per env, and for each group its actions, rewards and observations."""

from collections.abc import Mapping
from dataclasses import fields, replace

import torch
import warp as wp

from shoal.core.errors import ShoalError
from shoal.core.spaces import Box, Mixed
from shoal.core.store import Field, Store
from shoal.core.world import Group, GroupOutputs, Outputs

ENV_FIELDS = {
    "seed": Field(wp.uint64, doc="key of the random numbers"),
    "env_id": Field(int, doc="global index of the env"),
    "episode": Field(int, doc="index of the episode, from 0"),
    "step_count": Field(int, unit="steps", doc="steps since the episode began"),
    "terminated": Field(bool),
    "truncated": Field(bool),
    "ended": Field(bool, doc="terminated or truncated; the env restarts in this step"),
    "active": Field(bool, doc="not held by a wrapper"),
    "finished": Field(int, doc="finished episodes"),
    "length_sum": Field(wp.int64, unit="steps", doc="sum over finished episodes"),
    "last_length": Field(int, unit="steps", doc="length of the last finished episode"),
}
"""Arrays [env] of every world."""

CARRIED = ("alive", "action_mask", "is_decision_step")
"""Outputs that a step also reads. They stay in the store; a row of a rollout gets a copy."""


def group_fields(g: Group) -> dict[str, Field]:
    """The arrays of one group, by name."""
    observation = _observation_field(g.observation, g.agents)
    found = {
        "action": Field(float if isinstance(g.action, (Box, Mixed)) else int, (g.agents, *g.action.shape)),
        "observation": observation,
        "final_observation": observation,
        "reward": Field(float, (g.agents,)),
        "episode_return": Field(float, (g.agents,), doc="sum of rewards since the episode began"),
        "return_sum": Field(float, doc="sum over finished episodes"),
        "last_return": Field(float, doc="return of the last finished episode"),
    }
    if g.can_leave:
        found["alive"] = Field(bool, (g.agents,))
        found["was_alive"] = Field(bool, (g.agents,), doc="alive when the step began")
        found["final_alive"] = Field(bool, (g.agents,))
    if g.masked:
        found["action_mask"] = Field(bool, (g.agents, g.choices))
    if g.action_interval > 1:
        found["is_decision_step"] = Field(bool, (g.agents,))
        found["held"] = replace(found["action"], doc="the action in effect")
    return found


def _observation_field(space: Box, agents: int) -> Field:
    types = {torch.float32: float, torch.uint8: wp.uint8, torch.float16: wp.float16}
    if space.dtype not in types:
        raise ShoalError(f"An observation cannot be {space.dtype}; use float32, float16 or uint8.")
    return Field(types[space.dtype], (agents, *space.shape))


class GroupArrays:
    """The standard arrays of all groups. With several groups, names start with the group's: `runner_reward`."""

    def __init__(self, store: Store, groups: tuple[Group, ...]):
        """Allocate the arrays."""
        self.store, self.groups = store, groups
        self.names: dict[tuple[str, str], str] = {}
        """(group, field) -> name in the store."""
        for g in groups:
            for name, item in group_fields(g).items():
                self.names[g.name, name] = name if len(groups) == 1 else f"{g.name}_{name}"
                store.add(self.names[g.name, name], item)

    def get(self, group: str, field: str) -> torch.Tensor:
        """One array, by group and field."""
        return self.store[self.names[group, field]]

    def by_group(self, field: str) -> dict[str, torch.Tensor]:
        """The arrays of one field, by group."""
        return {g.name: self.get(g.name, field) for g in self.groups}

    def outputs(self) -> Outputs:
        """The store's own arrays as outputs."""
        groups = {}
        for g in self.groups:
            shown = [f.name for f in fields(GroupOutputs) if (g.name, f.name) in self.names]
            groups[g.name] = GroupOutputs(**{name: self.get(g.name, name) for name in shown})
        return Outputs(self.store.terminated, self.store.truncated, groups)

    def routes(self, out: Outputs, actions: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Tensors that a plan uses in place of the store's arrays, by name: those of `out`, and `actions` by group."""
        carried = {qualified for (_, name), qualified in self.names.items() if name in CARRIED}
        found = {name: tensor for name, tensor in out.tensors(self.names).items() if name not in carried}
        return {**found, **{self.names[g, "action"]: tensor for g, tensor in (actions or {}).items()}}

    def copy_carried(self, out: Outputs) -> None:
        """Copy the arrays of CARRIED to outputs outside the store."""
        for name, group in out.groups.items():
            for item in CARRIED:
                if (name, item) in self.names:
                    getattr(group, item).copy_(self.get(name, item))

    def held_actions(self) -> dict[str, str]:
        """Map of action arrays to the arrays of actions in effect, for groups that do not act at every step."""
        return {self.names[g.name, "action"]: self.names[g.name, "held"] for g in self.groups if g.action_interval > 1}
