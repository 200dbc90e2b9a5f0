"""The one seam: everything that makes experience looks like this to everything that learns from it."""

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
    """The world writes `action_mask` [env, agent, choices]: which choices are allowed now."""
    can_leave: bool = False
    """Agents can leave the game before the episode ends: the world writes `alive` [env, agent]."""
    action_interval: int = 1
    """The group chooses an action at every so many steps of an episode; in between, its last choice stands."""
    stack: int = 1
    """The policy sees the last `stack` observations of the episode at once, joined along their first axis; each is kept
    once. In the first steps of an episode, copies of its first observation stand for those before it."""

    def __post_init__(self):
        if self.agents < 1:
            raise ShoalError(f"Group {self.name!r} needs at least one agent per env, got {self.agents}.")
        if self.action_interval < 1:
            raise ShoalError(
                f"Group {self.name!r} must act every 1 or more steps, got action_interval={self.action_interval}."
            )
        if self.stack < 1:
            raise ShoalError(f"Group {self.name!r} must see at least one observation, got stack={self.stack}.")
        if self.masked and not self.choices:
            raise ShoalError(f"Group {self.name!r} has a {type(self.action).__name__} action, which cannot be masked.")

    @property
    def policy_observation(self) -> Box:
        """What a policy sees at once: `stack` observations."""
        first, *rest = self.observation.shape
        parts = self.stack * self.observation.parts
        return replace(self.observation, shape=(self.stack * first, *rest), parts=parts)

    @property
    def choices(self) -> int:
        """Number of discrete choices over all parts of an action: the width of the action mask."""
        if isinstance(self.action, Discrete):
            return self.action.n
        return sum(self.action.nvec) if isinstance(self.action, MultiDiscrete) else 0


@dataclass(frozen=True)
class Layout2D:
    """Where the agents of a world are in a square, by the names of arrays; enough for a picture of it.

    An array is the group's own, [env, agent], with `{group}` in its name for the group's; or it holds the agents of all
    groups, one group after the other. Of vectors, `position[0]` is the first element.
    """

    size: str | float
    """Side of the square, from 0: a number, or the name of a setting. Positions may be cells, whole numbers 0 to size."""
    x: str = "{group}_x"
    y: str = "{group}_y"
    heading: str | None = None
    """Where an agent points to [rad], from the x axis towards the y axis; groups without such an array have none."""

    def side(self, config: object) -> float:
        """Side of the square under these settings."""
        if not isinstance(self.size, str):
            return float(self.size)
        if not hasattr(config, self.size):
            raise unknown("setting for the size of places:", self.size, vars(config))
        return float(getattr(config, self.size))

    def find(self, arrays: Mapping[str, torch.Tensor], groups: tuple[Group, ...]) -> dict[str, dict[str, torch.Tensor]]:
        """For each group its x, y and perhaps heading: views [env, agent] of a world's arrays."""
        found = {}
        for g in groups:
            views = {what: self._view(getattr(self, what), g, arrays, groups) for what in ("x", "y", "heading")}
            found[g.name] = {what: view for what, view in views.items() if view is not None}
        optional = self.heading is None or any("heading" in views for views in found.values())
        for g in groups:
            for what in ("x", "y") if optional else ("x", "y", "heading"):
                if what not in found[g.name]:
                    name = str(getattr(self, what)).format(group=g.name)
                    raise unknown(f"array for {what} of {g.name}:", name, arrays)
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
                f"A Layout2D needs one number of {name!r} per agent of {group.name!r}; name an element: [0]."
            )
        return view


@dataclass
class GroupOutputs:
    """What a step wrote for one group: tensors [env, agent, ...] on the device."""

    observation: torch.Tensor
    """What each agent sees now; after a restart, the first observation of the new episode."""
    reward: torch.Tensor
    final_observation: torch.Tensor | None = None
    """What it saw last, in envs that have just ended; elsewhere left from before."""
    alive: torch.Tensor | None = None
    """Whether the agent is in the game (None: always)."""
    action_mask: torch.Tensor | None = None
    """Which choices are allowed for the next action (None: all)."""
    is_decision_step: torch.Tensor | None = None
    """Whether the agent chooses at the next step; elsewhere its last choice stands (None: at every step)."""
    final_alive: torch.Tensor | None = None
    """Whether it was in the game at the end, in envs that have just ended (None: always)."""


@dataclass
class Outputs:
    """What a step wrote: end flags [env] and one GroupOutputs per group.

    An episode ends for the whole env; an agent that leaves earlier is no longer `alive`.
    """

    terminated: torch.Tensor
    """The episode ended by the world's own rules: its future is worth nothing."""
    truncated: torch.Tensor
    """The episode was cut off: its future is the value of the final observation."""
    groups: dict[str, GroupOutputs]

    def tensors(self, names: "Mapping[tuple[str, str], str]") -> dict[str, torch.Tensor]:
        """Every tensor that is here, by the name `names` gives (group, field)."""
        found = {"terminated": self.terminated, "truncated": self.truncated}
        for group, out in self.groups.items():
            for item in fields(out):
                tensor = getattr(out, item.name)
                if tensor is not None:
                    found[names[group, item.name]] = tensor
        return found


@dataclass
class EpisodeStatistics:
    """Finished episodes since the last reading: tensors per env, so that nothing is summed in thread order."""

    episodes: torch.Tensor
    return_sum: dict[str, torch.Tensor]
    """By group; the return of a group is the mean over its agents."""
    length_sum: torch.Tensor
    report_sum: dict[str, torch.Tensor]
    """Sums of the figures that the world reports of an episode, by name."""


@dataclass
class LastEpisode:
    """The last finished episode of every env."""

    returns: dict[str, torch.Tensor]
    length: torch.Tensor
    reports: dict[str, torch.Tensor]


class TrajectoryRecorder(Protocol):
    """Follows some envs through an episode each, and draws a map of every one."""

    def follow(self, going: torch.Tensor) -> None:
        """Look at where the envs are; the flags [env] are those whose episode goes on."""
        ...

    def size(self, env: int) -> tuple[int, int]:
        """Width and height of the map of an env [pixels]."""
        ...

    def draw(self, canvas, env: int, title: str) -> None:
        """Draw the map of an env on a canvas of shoal.view."""
        ...


class World(ABC):
    """A batch of `num_envs` copies of one environment, stepped together on one device."""

    name: str
    groups: tuple[Group, ...]
    num_envs: int
    device: torch.device
    outputs: Outputs
    """Where the last reset or step wrote."""
    layout: Layout2D | None = None
    """Where agents are, in worlds that play in a square."""
    picture_size: tuple[int, int] | None = None
    """Width and height of `picture` [pixels, multiples of 16]; None: the recording's."""
    picture_rate: int | None = None
    """Steps per second of a recording that can be followed; None: the recording's."""
    handles_settings: tuple[str, ...] = ()
    """Settings of a run that the world takes as arguments and sees to itself, instead of a wrapper."""
    resumable: bool = True
    """Whether `state_dict` holds everything; if not, a resumed run begins new episodes."""
    unsharded_state: tuple[str, ...] = ()
    """What of its `state_dict` does not have the envs along its first axis."""
    reuse_eval_world: bool = False
    """Whether it takes long before the first episode; a run then keeps the world of its evaluations."""
    on_device: bool = True
    """Whether steps run on the device, so that a whole rollout can be one graph."""

    @classmethod
    def for_evaluation(cls, config: Any) -> Any:
        """The settings under which whole episodes are played: for evaluation."""
        return config

    @classmethod
    def for_recording(cls, config: Any) -> Any:
        """The settings under which envs can be looked at: for recordings."""
        return config

    def prepare(self, seed: int) -> None:
        """Called some time before `reset(seed)`: begin what that will need, and refuse now what cannot be."""

    @abstractmethod
    def reset(self, seed: int = 0, first_env: int = 0) -> Outputs:
        """Start all envs. `first_env` is the global number of env 0, for a batch split over processes."""

    @abstractmethod
    def step(
        self,
        actions: torch.Tensor | Mapping[str, torch.Tensor],
        into: Outputs | None = None,
        hold: torch.Tensor | None = None,
    ) -> Outputs:
        """Advance all envs by one step; finished envs restart by themselves.

        `into` redirects what is written (a row of a rollout); `hold` [env] keeps some envs as they are.
        """

    @abstractmethod
    def restart(self, mask: torch.Tensor) -> None:
        """Begin a new episode in the envs of `mask` now, and rewrite their observation."""

    def between_rollouts(self) -> None:
        """Called between rollouts: what a world does now and then, outside of the graphs. It must not wait long."""

    def close(self) -> None:
        """Free what the world holds; it cannot be stepped any more."""

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
        """Steps within which no env is truncated twice, if there are any; else None."""

    @property
    @abstractmethod
    def bytes_per_env(self) -> int:
        """Device memory that one more env costs."""

    def picture(self, canvas, env: int) -> None:
        """Draw env `env` on a canvas of shoal.view; worlds that can be looked at override this."""
        raise ShoalError(f"The world {self.name!r} has no picture; give its class `layout` or a `picture` method.")

    def record_frame(self, memory: dict[str, Any], env: int) -> None:
        """Keep what later pictures of the episode need; called at every step of a recording, drawn or not."""

    def scenes_of_envs(self) -> list[str] | None:
        """Names of what each env plays in now, if that differs; None: all alike."""
        return None

    def duplicate_episodes(self) -> torch.Tensor | None:
        """bool [env]: envs whose first episode is also that of an env before them; None: of none."""
        return None

    def trajectory_recorder(self, envs: int) -> TrajectoryRecorder:
        """What follows the first `envs` envs and draws maps of them; worlds that have maps override this."""
        raise ShoalError(f"The world {self.name!r} has no maps; navigation worlds do.")

    @property
    def drawable(self) -> bool:
        """Whether `picture` is there."""
        return type(self).picture is not World.picture

    def group(self, name: str) -> Group:
        return next(g for g in self.groups if g.name == name)

    def check_actions(self, actions: Mapping[str, torch.Tensor], values: bool = True) -> None:
        """Refuse actions of a wrong shape, type or device, and (`values`) out of range, by name."""
        self.check_groups(actions)
        for group in self.groups:
            if group.name not in actions:
                raise ShoalError(f"No action for group {group.name!r}; give one tensor per group.")
            what = f"The action of group {group.name!r}"
            check_tensor(what, actions[group.name], group.action, (self.num_envs, group.agents), self.device)
            if values:
                check_range(what, actions[group.name], group.action)

    def check_groups(self, actions: Mapping[str, torch.Tensor]) -> None:
        """Refuse actions for a group that is not there."""
        for name in actions:
            if name not in {g.name for g in self.groups}:
                raise unknown(f"group in {self.name}", name, [g.name for g in self.groups])

    def by_group(self, actions: torch.Tensor | Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Actions as a mapping; one tensor will do for a world with one group."""
        if isinstance(actions, torch.Tensor):
            first = self.groups[0].name
            if len(self.groups) > 1:
                names = ", ".join(g.name for g in self.groups)
                raise ShoalError(f"{self.name} has several groups ({names}); give a tensor for each.")
            return {first: actions}
        return actions
