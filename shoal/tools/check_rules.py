"""What must hold in any world: rules about its arrays after a step, and random actions to get there."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from shoal.core.spaces import Box, Discrete, Mixed, MultiDiscrete
from shoal.core.user_code import UserCodeError, describe
from shoal.core.world import Group, Outputs, World

Arrays = dict[str, torch.Tensor]

AGENT_ARRAYS = (
    "action observation final_observation reward episode_return alive was_alive final_alive action_mask is_decision_step held"
).split()
"""Arrays of a group whose second index is the agent."""


@dataclass(frozen=True)
class Finding:
    """What one check has to say."""

    kind: Literal["ok", "note", "FAIL"]
    text: str

    def __str__(self) -> str:
        return f"{self.kind:<4} {self.text}"


@dataclass(frozen=True)
class Moment:
    """The arrays of a world after a step and before it (at step 0, the reset, they are the same), on the host."""

    step: int
    groups: tuple[Group, ...]
    now: Arrays
    before: Arrays

    @property
    def ended(self) -> torch.Tensor:
        """Envs whose episode ended in this step."""
        return self.now["terminated"] | self.now["truncated"]

    def place(self, name: str, index: tuple[int, ...]) -> str:
        """An element of an array, in words."""
        where = [f"{name} at step {self.step}" if self.step else f"{name} after reset", f"env {index[0]}"]
        rest = index[1:]
        if rest and name in {array_name(self.groups, g, item) for g in self.groups for item in AGENT_ARRAYS}:
            where.append(f"agent {rest[0]}")
            rest = rest[1:]
        return ", ".join([*where, *([f"element {', '.join(map(str, rest))}"] if rest else [])])

    def first(self, name: str, bad: torch.Tensor) -> str:
        """The first element of an array that is marked as bad, with its value; "" if none is."""
        if not bool(bad.any()):
            return ""
        index = first_index(bad)
        value = self.now[name][index]
        return self.place(name, index) + (f" is {value.item()}" if value.ndim == 0 else "")


def array_name(groups: tuple[Group, ...], group: Group, item: str) -> str:
    """The name of a group's array in the store."""
    return item if len(groups) == 1 else f"{group.name}_{item}"


def first_index(bad: torch.Tensor) -> tuple[int, ...]:
    """Where the first True is."""
    return tuple(bad.nonzero()[0].tolist())


def per_env(flags: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Flags [env] that go with an array [env, ...]."""
    return flags.view(-1, *[1] * (like.ndim - 1))


def on_host(arrays: Arrays) -> Arrays:
    """Copies on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in arrays.items()}


def told(error: BaseException, cls: type) -> str:
    """An error in one line, with the author's line that raised it."""
    if isinstance(error, UserCodeError) and error.__cause__ is not None:
        error = error.__cause__
    return describe(error, cls)


# --- random actions ---------------------------------------------------------------------------------------------------


def draw(world: World, generator: torch.Generator) -> Arrays:
    """Noise for the actions of one step, by group: on the CPU, so that it is the same for every device."""
    shapes = {g: (g.choices,) if g.choices else g.action.shape for g in world.groups}
    return {g.name: torch.rand(world.num_envs, g.agents, *shape, generator=generator) for g, shape in shapes.items()}


def to_actions(world: World, noise: Arrays, outputs: Outputs) -> Arrays:
    """Valid actions out of noise: an allowed choice in each part, or numbers of a Box, its bounds among them."""
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
    """One part of a Mixed action: choices are whole numbers, from one number of noise each."""
    if isinstance(part, Box):
        return _numbers(part, noise)
    return (noise * torch.tensor([part.n] if isinstance(part, Discrete) else part.nvec)).floor()


def take(world: World, actions: Arrays, rows: slice | torch.Tensor = slice(None)) -> None:
    """One step with these rows of the actions."""
    world.step({name: tensor[rows].to(world.device) for name, tensor in actions.items()})


def choices(group: Group) -> list[int]:
    """How many there are in each part of an action."""
    return [group.action.n] if isinstance(group.action, Discrete) else list(group.action.nvec)


# --- rules: each gives the first breach in words, or "" ---------------------------------------------------------------


def check_spaces(m: Moment) -> str:
    """Observations of the declared shape and type, finite, within their Box; finite rewards; flags that are bool."""
    for g in m.groups:
        for item in ("observation", "final_observation"):
            name, space = array_name(m.groups, g, item), g.observation
            seen = m.now[name]
            if seen.shape[1:] != (g.agents, *space.shape) or seen.dtype != space.dtype:
                return f"{name} has shape {tuple(seen.shape)} and type {seen.dtype}, declared is {space}"
            rows = m.ended if item == "final_observation" else torch.ones_like(m.ended)
            if not bool(rows.any()) or _all_within(seen, space):
                continue
            rows = per_env(rows, seen)
            if strange := m.first(name, ~torch.isfinite(seen) & rows):
                return strange
            if outside := m.first(name, ((seen < space.low) | (seen > space.high)) & rows):
                return f"{outside}, outside of its Box from {space.low} to {space.high}"
        reward = array_name(m.groups, g, "reward")
        if strange := m.first(reward, ~torch.isfinite(m.now[reward])):
            return strange
    flags = [name for name in ("terminated", "truncated") if m.now[name].dtype != torch.bool]
    return f"{flags[0]} is {m.now[flags[0]].dtype}, not bool" if flags else ""


def _all_within(seen: torch.Tensor, space: Box) -> bool:
    """Whether all is finite and within bounds, in one pass over what may be a large array."""
    ends = torch.stack(torch.aminmax(seen))
    return bool((torch.isfinite(ends) & (ends >= space.low) & (ends <= space.high)).all())


def check_counters(m: Moment) -> str:
    """An env that has ended is at step 0 of the next episode, any other one step further in the same."""
    episode, steps = m.before["episode"] + m.ended, torch.where(m.ended, 0, m.before["step_count"] + 1)
    if m.step == 0:
        episode, steps = torch.zeros_like(episode), torch.zeros_like(steps)
    for name, expected in (("episode", episode), ("step_count", steps)):
        if wrong := m.first(name, m.now[name] != expected):
            return f"{wrong}, which does not fit the end flags; only Shoal may write it"
    return ""


def check_masks(m: Moment) -> str:
    """Whoever is in the game has at least one allowed choice in each part of the action."""
    for g in m.groups:
        if not g.masked:
            continue
        name = array_name(m.groups, g, "action_mask")
        parts = m.now[name].split(choices(g), dim=-1)
        for part, allowed in enumerate(parts):
            none = ~allowed.any(-1)
            if g.can_leave:
                none &= m.now[array_name(m.groups, g, "alive")]
            if stuck := m.first(name, none):
                return f"{stuck} allows no choice" + (f" in part {part} of the action" if len(parts) > 1 else "")
    return ""


def check_alive(m: Moment) -> str:
    """Who has left stays away until the episode ends, and gets no reward."""
    for g in m.groups:
        if not g.can_leave or m.step == 0:
            continue
        alive, final, reward = (array_name(m.groups, g, item) for item in ("alive", "final_alive", "reward"))
        gone = ~m.before[alive]
        back = torch.where(m.ended[:, None], m.now[final], m.now[alive]) & gone
        if bool(back.any()):
            return f"{m.place(alive, first_index(back))} is True again, within the same episode"
        if paid := m.first(reward, gone & (m.now[reward] != 0.0)):
            return f"{paid}, for an agent that had left"
    return ""


def check_somebody(m: Moment) -> str:
    """In an episode that goes on, somebody is in the game."""
    if not all(g.can_leave for g in m.groups):
        return ""
    alive = torch.cat([m.now[array_name(m.groups, g, "alive")] for g in m.groups], dim=1)
    return m.first("step_count", ~alive.any(1))
