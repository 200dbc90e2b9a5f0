"""The World contract: the interface between simulation and learning."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch

from shoal.core.errors import ShoalError, unknown
from shoal.core.spaces import Box, Discrete, MultiDiscrete, Space, check_range, check_tensor


@dataclass(frozen=True)
class Group:
    """Agents of a world that share spaces and, by default, a policy."""

    name: str
    observation: Box
    action: Space
    agents: int = 1
    masked: bool = False
    """The world writes `action_mask` [env, agent, choices]: the allowed choices."""
    can_leave: bool = False
    """Agents can leave before the episode ends: the world writes `alive` [env, agent]."""
    action_interval: int = 1
    """Interval between actions of the group [steps]; in between, the last action stays in effect."""
    stack: int = 1
    """Number of consecutive observations that the policy gets, joined along the first axis. Each is stored once. At the
    start of an episode its first observation is repeated."""

    def __post_init__(self):
        if self.agents < 1:
            raise ShoalError(f"Group {self.name!r} needs at least one agent per env, got {self.agents}.")
        if self.action_interval < 1:
            raise ShoalError(
                f"Group {self.name!r} must act every 1 or more steps, got action_interval={self.action_interval}."
            )
        if self.stack < 1:
            raise ShoalError(f"Group {self.name!r} needs a stack of at least one observation, got stack={self.stack}.")
        if self.masked and not self.choices:
            raise ShoalError(f"Group {self.name!r} has a {type(self.action).__name__} action, which cannot be masked.")

    @property
    def policy_observation(self) -> Box:
        """The space of the policy's observation: `stack` observations joined."""
        first, *rest = self.observation.shape
        parts = self.stack * self.observation.parts
        return replace(self.observation, shape=(self.stack * first, *rest), parts=parts)

    @property
    def choices(self) -> int:
        """Number of choices over all parts of an action: the width of the action mask. 0 for other spaces."""
        if isinstance(self.action, Discrete):
            return self.action.n
        return sum(self.action.nvec) if isinstance(self.action, MultiDiscrete) else 0


@dataclass(frozen=True)
class Layout2D:
    """Names of the arrays with the positions of agents in a square: enough to draw the world.

    An array belongs to a group, [env, agent], with `{group}` in its name for the group's name; or it has the agents of
    all groups, group after group. `position[0]` is the first element of a vector.
    """

    size: str | float
    """Side of the square, from 0: a number, or the name of a setting. Integer positions are cells 0 to size."""
    x: str = "{group}_x"
    y: str = "{group}_y"
    heading: str | None = None
    """Direction of an agent [rad], from the x axis towards the y axis. Groups without such an array have none."""

    def side(self, config: object) -> float:
        """Side of the square under these settings."""
        if not isinstance(self.size, str):
            return float(self.size)
        if not hasattr(config, self.size):
            raise unknown("setting for the size of the layout:", self.size, vars(config))
        return float(getattr(config, self.size))

    def find(self, arrays: Mapping[str, torch.Tensor], groups: tuple[Group, ...]) -> dict[str, dict[str, torch.Tensor]]:
        """x, y and possibly heading of each group: views [env, agent] of a world's arrays."""
        found = {}
        for g in groups:
            views = {name: self._view(getattr(self, name), g, arrays, groups) for name in ("x", "y", "heading")}
            found[g.name] = {name: view for name, view in views.items() if view is not None}
        optional = self.heading is None or any("heading" in views for views in found.values())
        for g in groups:
            for axis in ("x", "y") if optional else ("x", "y", "heading"):
                if axis not in found[g.name]:
                    name = str(getattr(self, axis)).format(group=g.name)
                    raise unknown(f"array for {axis} of {g.name}:", name, arrays)
        return found

    def _view(
        self, name: str | None, group: Group, arrays: Mapping[str, torch.Tensor], groups: tuple[Group, ...]
    ) -> torch.Tensor | None:
        name, _, element = (name or "").format(group=group.name).rstrip("]").partition("[")
        if name not in arrays:
            return None
        view = arrays[name]
        if element.isdigit() and int(element) < view.shape[-1]:
            view = view[..., int(element)]
        view = view[:, None] if view.ndim == 1 else view
        sizes = [g.agents for g in groups]
        if len(groups) > 1 and view.shape[1] == sum(sizes):
            view = view.split(sizes, 1)[groups.index(group)]
        if view.ndim != 2 or view.shape[1] != group.agents:
            raise ShoalError(
                f"The layout needs one number of {name!r} per agent of {group.name!r}; name an element: [0]."
            )
        return view


@dataclass
class GroupOutputs:
    """Outputs of a step for one group: tensors [env, agent, ...] on the device."""

    observation: torch.Tensor
    """Current observation; after a restart, the first one of the new episode."""
    reward: torch.Tensor
    final_observation: torch.Tensor | None = None
    """Last observation of the episode, in envs that have just ended; other rows hold old values."""
    alive: torch.Tensor | None = None
    """Whether the agent is in the game (None: always)."""
    action_mask: torch.Tensor | None = None
    """Allowed choices of the next action (None: all)."""
    is_decision_step: torch.Tensor | None = None
    """Whether the agent chooses at the next step; if not, its last action stays in effect (None: at every step)."""
    final_alive: torch.Tensor | None = None
    """Whether the agent was in the game at the end, in envs that have just ended (None: always)."""


@dataclass
class Outputs:
    """Outputs of a step: end flags [env] and one GroupOutputs per group.

    An episode ends for the whole env; an agent that leaves earlier is no longer `alive`.
    """

    terminated: torch.Tensor
    """The episode ended by the rules of the world: its future return is 0."""
    truncated: torch.Tensor
    """The episode was cut off: its future return is estimated from the final observation."""
    groups: dict[str, GroupOutputs]

    def tensors(self, names: "Mapping[tuple[str, str], str]") -> dict[str, torch.Tensor]:
        """Every tensor that is not None, by the name that `names` has for (group, field)."""
        found = {"terminated": self.terminated, "truncated": self.truncated}
        for group, out in self.groups.items():
            for item in fields(out):
                tensor = getattr(out, item.name)
                if tensor is not None:
                    found[names[group, item.name]] = tensor
        return found


@dataclass
class EpisodeStatistics:
    """Counts and sums over finished episodes: tensors [env], so that no sum depends on the order of threads."""

    episodes: torch.Tensor
    return_sum: dict[str, torch.Tensor]
    """By group. The return of a group is the mean over its agents."""
    length_sum: torch.Tensor
    report_sum: dict[str, torch.Tensor]
    """By name of the world's reports."""


@dataclass
class LastEpisode:
    """The last finished episode of every env: tensors [env], by group or by report."""

    returns: dict[str, torch.Tensor]
    length: torch.Tensor
    reports: dict[str, torch.Tensor]


class TrajectoryRecorder(Protocol):
    """Records the paths of some envs through one episode each, and draws a map of each."""

    def follow(self, going: torch.Tensor) -> None:
        """Record the positions of envs; `going` [env] flags those whose episode continues."""
        ...

    def size(self, env: int) -> tuple[int, int]:
        """Width and height of the map of an env [pixels]."""
        ...

    def draw(self, canvas, env: int, title: str) -> None:
        """Draw the map of an env on a shoal.draw canvas."""
        ...


class World(ABC):
    """A batch of `num_envs` copies of one environment, stepped together on one device."""

    name: str
    groups: tuple[Group, ...]
    num_envs: int
    device: torch.device
    outputs: Outputs
    """Outputs of the last reset or step."""
    layout: Layout2D | None = None
    """Positions of agents, in 2-D worlds."""
    picture_size: tuple[int, int] | None = None
    """Width and height of `picture` [pixels, multiples of 16]; None: the recording's default."""
    picture_rate: int | None = None
    """Steps per second at which a viewer can follow a recording; None: the recording's default."""
    handles_settings: tuple[str, ...] = ()
    """Settings of a run that the world takes as arguments and implements, instead of a wrapper."""
    resumable: bool = True
    """Whether `state_dict` is complete; if not, a resumed run begins new episodes."""
    unsharded_state: tuple[str, ...] = ()
    """Entries of `state_dict` whose first axis is not the env."""
    reuse_eval_world: bool = False
    """Whether the first episode takes long to load; a run then reuses the world of its evaluations."""
    on_device: bool = True
    """Whether steps run on the device, so that a whole rollout can be one CUDA graph."""

    @classmethod
    def for_evaluation(cls, config: Any) -> Any:
        """The settings for evaluation, in which whole episodes are played."""
        return config

    @classmethod
    def for_recording(cls, config: Any) -> Any:
        """The settings for recordings."""
        return config

    def prepare(self, seed: int) -> None:
        """Start preparing for a later `reset(seed)`, and refuse now what that call would refuse."""

    @abstractmethod
    def reset(self, seed: int = 0, first_env: int = 0) -> Outputs:
        """Start all envs. `first_env` is the global index of env 0, in a batch that is split over processes."""

    @abstractmethod
    def step(
        self,
        actions: torch.Tensor | Mapping[str, torch.Tensor],
        into: Outputs | None = None,
        hold: torch.Tensor | None = None,
    ) -> Outputs:
        """Advance all envs by one step. Envs whose episode ends restart in the same step.

        Args:
            actions: Tensor [env, agent, ...] by group; a world with one group also takes the tensor alone.
            into: Where to write the outputs, such as a row of a rollout; None: the world's own tensors.
            hold: bool [env]: envs that stay as they are.
        """

    @abstractmethod
    def restart(self, mask: torch.Tensor) -> None:
        """Begin a new episode in the envs of `mask` [env] now, and rewrite their observation."""

    def between_rollouts(self) -> None:
        """Called between rollouts, outside CUDA graphs, for occasional work. It must not block for long."""

    def close(self) -> None:
        """Free the world's resources; it cannot be stepped afterwards."""

    @abstractmethod
    def statistics(self) -> EpisodeStatistics:
        """Counts and sums over finished episodes since the start of training, on the device."""

    @abstractmethod
    def last_episode(self) -> LastEpisode:
        """Returns, length and reports of the last finished episode of every env."""

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything a step depends on."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from a saved state, bit for bit."""

    @property
    @abstractmethod
    def time_limit(self) -> int | None:
        """Minimum number of steps between two truncations of an env. None if a world has no such minimum."""

    @property
    @abstractmethod
    def bytes_per_env(self) -> int:
        """Device memory per env."""

    def picture(self, canvas, env: int) -> None:
        """Draw env `env` on a shoal.draw canvas; worlds that can be recorded override this."""
        raise ShoalError(f"The world {self.name!r} has no picture; give its class `layout` or a `picture` method.")

    def record_frame(self, memory: dict[str, Any], env: int) -> None:
        """Store in `memory` what later pictures of the episode need. Called at every step of a recording."""

    def scenes_of_envs(self) -> list[str] | None:
        """Name of the current scene of each env. Returns None if all envs share one scene or have none."""
        return None

    def duplicate_episodes(self) -> torch.Tensor | None:
        """bool [env]: envs whose first episode duplicates that of an earlier env. Returns None if there are none."""
        return None

    def trajectory_recorder(self, envs: int) -> TrajectoryRecorder:
        """A recorder of paths for maps of the first `envs` envs; worlds that have maps override this."""
        raise ShoalError(f"The world {self.name!r} has no maps; navigation worlds do.")

    @property
    def drawable(self) -> bool:
        """Whether the world can be drawn: it has a `layout` or a `picture` method."""
        return type(self).picture is not World.picture

    def group(self, name: str) -> Group:
        return next(g for g in self.groups if g.name == name)

    def check_actions(self, actions: Mapping[str, torch.Tensor], values: bool = True) -> None:
        """Refuse actions of a wrong shape, type or device, and with `values` also values out of range."""
        self.check_groups(actions)
        for group in self.groups:
            if group.name not in actions:
                raise ShoalError(f"No action for group {group.name!r}; give one tensor per group.")
            label = f"The action of group {group.name!r}"
            check_tensor(label, actions[group.name], group.action, (self.num_envs, group.agents), self.device)
            if values:
                check_range(label, actions[group.name], group.action)

    def check_groups(self, actions: Mapping[str, torch.Tensor]) -> None:
        """Refuse actions for a group that does not exist."""
        for name in actions:
            if name not in {g.name for g in self.groups}:
                raise unknown(f"group in {self.name}", name, [g.name for g in self.groups])

    def by_group(self, actions: torch.Tensor | Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Actions as a mapping by group; for a world with one group, `actions` may be a tensor."""
        if isinstance(actions, torch.Tensor):
            first = self.groups[0].name
            if len(self.groups) > 1:
                names = ", ".join(g.name for g in self.groups)
                raise ShoalError(f"{self.name} has several groups ({names}); give a tensor for each.")
            return {first: actions}
        return actions
