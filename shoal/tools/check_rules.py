"""Rules that hold in every world, checked on its arrays after a step, and random valid actions."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from shoal.core.spaces import Box, Discrete, Mixed, MultiDiscrete
from shoal.core.user_code import UserCodeError, describe
from shoal.core.world import Group, Outputs, World

Arrays = dict[str, torch.Tensor]

AGENT_ARRAYS = (
    "action observation final_observation reward episode_return alive was_alive final_alive action_mask held "
    "is_decision_step"
).split()
"""Arrays of a group whose second index is the agent."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    kind: Literal["ok", "note", "FAIL"]
    text: str

    def __str__(self) -> str:
        return f"{self.kind:<4} {self.text}"


@dataclass(frozen=True)
class StepSnapshot:
    """The arrays of a world after a step and before it, on the CPU; at step 0, the reset, both are the same."""

    step: int
    groups: tuple[Group, ...]
    now: Arrays
    before: Arrays

    @property
    def ended(self) -> torch.Tensor:
        """Envs whose episode ended in this step."""
        return self.now["terminated"] | self.now["truncated"]

    def describe(self, name: str, index: tuple[int, ...]) -> str:
        """An element of an array in words: "reward at step 3, env 5, agent 1"."""
        where = [f"{name} at step {self.step}" if self.step else f"{name} after reset", f"env {index[0]}"]
        rest = index[1:]
        if rest and name in {array_name(self.groups, g, item) for g in self.groups for item in AGENT_ARRAYS}:
            where.append(f"agent {rest[0]}")
            rest = rest[1:]
        return ", ".join([*where, *([f"element {', '.join(map(str, rest))}"] if rest else [])])

    def first(self, name: str, bad: torch.Tensor) -> str:
        """The first element where `bad` is True, in words, with its value; "" if there is none."""
        if not bool(bad.any()):
            return ""
        index = first_index(bad)
        value = self.now[name][index]
        return self.describe(name, index) + (f" is {value.item()}" if value.ndim == 0 else "")


def array_name(groups: tuple[Group, ...], group: Group, item: str) -> str:
    """The name of a group's array in the world's store."""
    return item if len(groups) == 1 else f"{group.name}_{item}"


def first_index(bad: torch.Tensor) -> tuple[int, ...]:
    """Index of the first True."""
    return tuple(bad.nonzero()[0].tolist())


def per_env(flags: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View flags [env] so that they broadcast with an array [env, ...]."""
    return flags.view(-1, *[1] * (like.ndim - 1))


def on_host(arrays: Arrays) -> Arrays:
    """Copy arrays to the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in arrays.items()}


def error_line(error: BaseException, cls: type) -> str:
    """An error in one line, with the line of the author's code that raised it."""
    if isinstance(error, UserCodeError) and error.__cause__ is not None:
        error = error.__cause__
    return describe(error, cls)


# --- random actions ---------------------------------------------------------------------------------------------------


def draw_noise(world: World, generator: torch.Generator) -> Arrays:
    """Group -> uniform noise for the actions of one step, on the CPU, so that it is equal for every device."""
    shapes = {g: (g.choices,) if g.choices else g.action.shape for g in world.groups}
    return {g.name: torch.rand(world.num_envs, g.agents, *shape, generator=generator) for g, shape in shapes.items()}


def to_actions(world: World, noise: Arrays, outputs: Outputs) -> Arrays:
    """Valid actions from noise: an allowed choice in each part, or Box values, sometimes exactly at a bound."""
    actions = {}
    for g in world.groups:
        mask = outputs.groups[g.name].action_mask
        if isinstance(g.action, Box):
            actions[g.name] = _numbers(g.action, noise[g.name])
        elif isinstance(g.action, Mixed):
            parts = zip(g.action.parts, g.action.split(noise[g.name]), strict=True)
            actions[g.name] = torch.cat([_mixed(part, drawn) for part, drawn in parts], dim=-1)
        else:
            scores = noise[g.name] if mask is None else noise[g.name] + mask.cpu()
            parts = [part.argmax(-1) for part in scores.split(choices(g), dim=-1)]
            actions[g.name] = (parts[0] if isinstance(g.action, Discrete) else torch.stack(parts, -1)).int()
    return actions


def _numbers(space: Box, noise: torch.Tensor) -> torch.Tensor:
    low = space.low if math.isfinite(space.low) else min(-1.0, space.high - 2.0)
    high = space.high if math.isfinite(space.high) else max(1.0, low + 2.0)
    return (low + (high - low) * (1.2 * noise - 0.1)).clamp(low, high)


def _mixed(part: Discrete | MultiDiscrete | Box, noise: torch.Tensor) -> torch.Tensor:
    """One part of a Mixed action; choices come as whole floats, from one noise value each."""
    if isinstance(part, Box):
        return _numbers(part, noise)
    return (noise * torch.tensor([part.n] if isinstance(part, Discrete) else part.nvec)).floor()


def step_rows(world: World, actions: Arrays, rows: slice | torch.Tensor = slice(None)) -> None:
    """Step a world with `rows` of the actions."""
    world.step({name: tensor[rows].to(world.device) for name, tensor in actions.items()})


def choices(group: Group) -> list[int]:
    """Number of choices in each part of a discrete action."""
    if isinstance(group.action, Discrete):
        return [group.action.n]
    assert isinstance(group.action, MultiDiscrete)
    return list(group.action.nvec)


# --- rules: each returns the first violation in words, or "" ----------------------------------------------------------


def check_spaces(snapshot: StepSnapshot) -> str:
    """Observations have the declared shape and dtype, finite and in their Box; rewards are finite; flags are bool."""
    for g in snapshot.groups:
        for item in ("observation", "final_observation"):
            name, space = array_name(snapshot.groups, g, item), g.observation
            seen = snapshot.now[name]
            if seen.shape[1:] != (g.agents, *space.shape) or seen.dtype != space.dtype:
                return f"{name} has shape {tuple(seen.shape)} and type {seen.dtype}, declared is {space}"
            rows = snapshot.ended if item == "final_observation" else torch.ones_like(snapshot.ended)
            if not bool(rows.any()) or _all_within(seen, space):
                continue
            rows = per_env(rows, seen)
            if strange := snapshot.first(name, ~torch.isfinite(seen) & rows):
                return strange
            if outside := snapshot.first(name, ((seen < space.low) | (seen > space.high)) & rows):
                return f"{outside}, outside of its Box from {space.low} to {space.high}"
        reward = array_name(snapshot.groups, g, "reward")
        if strange := snapshot.first(reward, ~torch.isfinite(snapshot.now[reward])):
            return strange
    flags = [name for name in ("terminated", "truncated") if snapshot.now[name].dtype != torch.bool]
    return f"{flags[0]} is {snapshot.now[flags[0]].dtype}, not bool" if flags else ""


def _all_within(seen: torch.Tensor, space: Box) -> bool:
    """Whether all values are finite and in the Box, in one pass over a large array."""
    ends = torch.stack(torch.aminmax(seen))
    return bool((torch.isfinite(ends) & (ends >= space.low) & (ends <= space.high)).all())


def check_counters(snapshot: StepSnapshot) -> str:
    """An env whose episode ended is at step 0 of the next one; all others advance by one step."""
    episode, steps = (
        snapshot.before["episode"] + snapshot.ended,
        torch.where(snapshot.ended, 0, snapshot.before["step_count"] + 1),
    )
    if snapshot.step == 0:
        episode, steps = torch.zeros_like(episode), torch.zeros_like(steps)
    for name, expected in (("episode", episode), ("step_count", steps)):
        if wrong := snapshot.first(name, snapshot.now[name] != expected):
            return f"{wrong}, which does not fit the end flags; only Shoal may write it"
    return ""


def check_masks(snapshot: StepSnapshot) -> str:
    """Every living agent has at least one allowed choice in each part of its action."""
    for g in snapshot.groups:
        if not g.masked:
            continue
        name = array_name(snapshot.groups, g, "action_mask")
        parts = snapshot.now[name].split(choices(g), dim=-1)
        for part, allowed in enumerate(parts):
            none = ~allowed.any(-1)
            if g.can_leave:
                none &= snapshot.now[array_name(snapshot.groups, g, "alive")]
            if stuck := snapshot.first(name, none):
                return f"{stuck} allows no choice" + (f" in part {part} of the action" if len(parts) > 1 else "")
    return ""


def check_alive(snapshot: StepSnapshot) -> str:
    """An agent that has left stays absent until the episode ends, and gets no reward."""
    for g in snapshot.groups:
        if not g.can_leave or snapshot.step == 0:
            continue
        alive, final, reward = (array_name(snapshot.groups, g, item) for item in ("alive", "final_alive", "reward"))
        gone = ~snapshot.before[alive]
        back = torch.where(snapshot.ended[:, None], snapshot.now[final], snapshot.now[alive]) & gone
        if bool(back.any()):
            return f"{snapshot.describe(alive, first_index(back))} is True again, within the same episode"
        if paid := snapshot.first(reward, gone & (snapshot.now[reward] != 0.0)):
            return f"{paid}, for an agent that had left"
    return ""


def check_any_alive(snapshot: StepSnapshot) -> str:
    """An unfinished episode has a living agent."""
    if not all(g.can_leave for g in snapshot.groups):
        return ""
    alive = torch.cat([snapshot.now[array_name(snapshot.groups, g, "alive")] for g in snapshot.groups], dim=1)
    return snapshot.first("step_count", ~alive.any(1))
