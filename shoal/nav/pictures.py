"""Pictures and maps of navigation episodes."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from shoal.core.store import Store
from shoal.core.world import EpisodeStatistics, Outputs
from shoal.draw.canvas import Canvas
from shoal.draw.surface import Part
from shoal.nav.config import NavConfig
from shoal.nav.maps import AGENTS, TopDownMap, lighten
from shoal.nav.nav_scenes import NavScenes
from shoal.nav.paths import HostGround, host_field, shortest_path

STRIP = 24
"""Height of a line of text, in pixels."""

GAP = 8
"""Space around and between the parts of a picture, in pixels."""

DEPTH_COLORS = np.array([(255, 246, 224), (244, 196, 148), (206, 118, 122), (118, 78, 128), (46, 48, 92), (16, 20, 40)])
"""RGB colors from near to far, evenly spaced over the square root of depth for contrast between near objects."""


class NavView(Protocol):
    """The attributes of a navigation world that pictures are drawn from."""

    num_envs: int
    config: NavConfig
    store: Store
    outputs: Outputs
    nav_scenes: NavScenes | None
    has_goal: ClassVar[bool]
    reports: ClassVar[tuple[str, ...]]

    def statistics(self) -> EpisodeStatistics: ...


class EpisodePaths:
    """Ground, goals, shortest paths and agents' paths of an env's current episode.

    Args:
        world: the navigation world.
        env: number of the env.
        maps: cache of maps by scene row.
    """

    def __init__(self, world: NavView, env: int, maps: dict[int, TopDownMap] | None = None):
        store, scenes = world.store, world.nav_scenes
        assert scenes is not None
        rows = store.row[env].tolist()
        maps = {} if maps is None else maps
        if rows[0] not in maps:
            maps[rows[0]] = TopDownMap(HostGround.of(scenes.ground, rows[0]))
        self.map = maps[rows[0]]
        scene = scenes.pool.memory.scene(rows[0])
        assert scene is not None
        self.scene = scene.name
        self.starts = store.start[env].double().cpu().numpy()
        """[agent, 3]: start positions [m]."""
        self.goals = store.goal[env].double().cpu().numpy() if world.has_goal else None
        """[agent, 3]: goal positions [m]; None in tasks without goals."""
        self.shortest_paths: list[np.ndarray | None] = []
        """By agent, the shortest path [n, 3] from the start."""
        self.shortest_length = float(store.start_distance[env].mean()) if world.has_goal else 0.0
        """Geodesic distance from start to goal, mean over the agents [m]."""
        if self.goals is not None:
            for agent, slot in enumerate(store.goal_slot[env].tolist()):
                field = host_field(scenes.fields, rows[0], slot)
                path = shortest_path(self.map.ground, field, self.starts[agent], self.goals[agent])
                self.shortest_paths.append(path)
        self.positions: list[np.ndarray] = []
        """By step, positions [agent, 3] in meters."""

    def draw(self, canvas: Canvas, part: Part | None, yaws: Sequence[float | None] = ()) -> None:
        """Draw the map with all paths. An agent is an arrow along its yaw, or a dot if its yaw is None."""
        top = self.map
        top.draw_ground(canvas, part)
        colors = [AGENTS[k % len(AGENTS)] for k in range(len(self.starts))]
        # The shortest path is green for a single agent, as in Habitat; of several agents it has the agent's color.
        bands = ["green"] if len(colors) == 1 else colors
        for points, color in zip(self.shortest_paths, bands, strict=False):
            if points is not None:
                top.draw_shortest_path(canvas, points, color)
        walked = np.stack(self.positions or [self.starts])
        for k, color in enumerate(colors):
            if self.goals is not None:
                top.draw_goal(canvas, self.goals[k], "green" if len(colors) == 1 else color)
            top.draw_path(canvas, walked[:, k], color)
            top.draw_start(canvas, self.starts[k], color)
        for k, color in enumerate(colors):
            yaw = yaws[k] if k < len(yaws) else None
            if yaw is None:
                canvas.disc((walked[-1, k, 0], walked[-1, k, 1]), 4.0 * canvas.smooth / canvas.scale, color)
            else:
                top.draw_agent(canvas, walked[-1, k], yaw, color)


class NavTrajectoryRecorder:
    """Records one episode of each of the first envs of a navigation world, and draws maps of them.

    Positions are copied on the device at every step, and read by the host when a map is drawn. The last step of an
    episode is missing, since the env has restarted by then: a STOP does not move, but a truncated path lacks one step.
    """

    MAX_SIZE = (640, 560)
    """Maximum width and height of a map, in pixels."""

    def __init__(self, world: NavView, envs: int):
        self.world, self.envs = world, min(envs, world.num_envs)
        self.episodes: list[EpisodePaths] = []
        self._positions: list[torch.Tensor] = []
        self._going: list[torch.Tensor] = []

    def follow(self, going: torch.Tensor) -> None:
        """Record the positions in the envs whose flag in `going` [env] is set."""
        if not self.episodes:
            maps: dict[int, TopDownMap] = {}
            self.episodes = [EpisodePaths(self.world, env, maps) for env in range(self.envs)]
        self._positions.append(self.world.store.place[: self.envs].clone())
        self._going.append(going[: self.envs].clone())

    def size(self, env: int) -> tuple[int, int]:
        """Width and height of the map of an env with its title, in pixels."""
        width, height = self.episodes[env].map.size(*self.MAX_SIZE)
        return max(width, self.MAX_SIZE[0]) + 2 * GAP, height + 2 * STRIP + 2 * GAP

    def draw(self, canvas: Canvas, env: int, title: str) -> None:
        """Draw the map of an env's episode."""
        if self._positions:
            positions = torch.stack(self._positions).double().cpu().numpy()
            going = torch.stack(self._going).cpu().numpy()
            for k, episode in enumerate(self.episodes):
                episode.positions = list(positions[going[:, k], k])
            self._positions.clear()
        episode = self.episodes[env]
        episode.draw(canvas, (GAP, STRIP + GAP, canvas.width - GAP, canvas.height - STRIP - GAP))
        canvas.text((GAP, 6), title)
        draw_legend(canvas, canvas.height - STRIP + 2, episode)


def draw_legend(canvas: Canvas, y: int, episode: EpisodePaths) -> None:
    """Draw the legend of a map at height `y`."""
    one = len(episode.starts) == 1
    lines = [("walked", AGENTS[0] if one else "ink", 2.5)]
    if episode.goals is not None:
        words = f"shortest: {episode.shortest_length:.1f} m{'' if one else ' on average'}"
        lines.append((words, lighten(canvas, "green" if one else "ink", 0.45), 6.0))
    canvas.view(0, canvas.width, -canvas.height, 0)
    x = GAP
    for words, color, width in lines:
        canvas.line([(x, -y - 8), (x + 22, -y - 8)], color, width)
        x += 28 + canvas.text((x + 28, y), words) + 16


def record_path(memory: dict[str, Any], world: NavView, env: int) -> EpisodePaths:
    """Append the agents' current positions to the paths of an env's episode, which `memory` keeps for a recording."""
    number, step = int(world.store.episode[env]), int(world.store.step_count[env])
    if memory.get("number") != number:
        memory.update(number=number, step=None, episode=EpisodePaths(world, env))
    if memory["step"] != step:
        memory["episode"].positions.append(world.store.place[env].double().cpu().numpy())
        memory["step"] = step
    return memory["episode"]


def draw_env(canvas: Canvas, world: NavView, env: int) -> None:
    """Draw one env: a line of text, the agents' images, and beside them a map with the paths so far."""
    store = world.store
    episode = record_path(canvas.memory, world, env)
    views = agent_images(world, env)
    side = canvas.height - STRIP - GAP
    left = GAP
    if views:
        rows = math.ceil(math.sqrt(len(views)))
        each = (side - (rows - 1) * GAP) / rows
        for k, (agent, view) in enumerate(views):
            x, y = GAP + k // rows * (each + GAP), STRIP + k % rows * (each + GAP)
            if len(episode.starts) > 1:
                frame = np.full((2, 2, 3), canvas.rgb(AGENTS[agent % len(AGENTS)]), np.uint8)
                canvas.paste(frame, (x - 2, y - 2, x + each + 2, y + each + 2))
            canvas.paste(view, (x, y, x + each, y + each))
        left += math.ceil(len(views) / rows) * (each + GAP)
    part = (left, STRIP, canvas.width - GAP, canvas.height - GAP)
    there = store.present[env].tolist()
    yaws = [yaw if there[k] else None for k, yaw in enumerate(store.yaw[env].tolist())]
    episode.draw(canvas, part, yaws)
    canvas.text((GAP, 5), status_text(world, env, episode))


def agent_images(world: NavView, env: int) -> list[tuple[int, np.ndarray]]:
    """(agent, uint8 image [size, size, 3]) of up to 9 agents; depth beside RGB only for a single agent."""
    seen = world.outputs.groups["agent"].observation[env].float().cpu().numpy()
    kind, size, images = world.config.image, world.config.image_size, []
    color_at = size * size if kind == "rgbd" else 0
    for agent in range(min(len(seen), 9)):
        if kind in ("rgb", "rgbd"):
            rgb = seen[agent, color_at : color_at + 3 * size * size].reshape(size, size, 3)
            images.append((agent, (np.clip(rgb, 0.0, 1.0) * 255).astype(np.uint8)))
        if kind == "depth" or (kind == "rgbd" and len(seen) == 1):
            depth = seen[agent, : size * size].reshape(size, size)
            images.append((agent, colorize_depth(depth / world.config.max_depth)))
    return images


def colorize_depth(depth: np.ndarray) -> np.ndarray:
    """uint8 [..., 3]: colors of depths, which are scaled to 0 to 1."""
    at = np.sqrt(np.clip(depth, 0.0, 1.0)) * (len(DEPTH_COLORS) - 1)
    stops = np.arange(len(DEPTH_COLORS))
    return np.stack([np.interp(at, stops, DEPTH_COLORS[:, c]) for c in range(3)], -1).astype(np.uint8)


def status_text(world: NavView, env: int, episode: EpisodePaths) -> str:
    """Scene, step, distance to the goal, path length, and success of earlier episodes of the recording."""
    store, finished = world.store, int(world.statistics().episodes[env])
    words = [episode.scene[-28:], f"step {int(store.step_count[env])}"]
    if episode.goals is not None:
        words.append(f"to goal {float(store.distance[env].mean()):.1f} m")
    else:
        words.append(f"{world.reports[0]} {float(store[world.reports[0]][env]):.1f}")
    words.append(f"walked {float(store.walked[env].mean()):.1f} m")
    if finished and "success" in world.reports:
        words.append(f"success in {float(store.success_sum[env]):g} of {finished}")
    return "   ".join(words)
