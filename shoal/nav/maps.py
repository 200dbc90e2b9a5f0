"""Ground seen from above: maps of episodes, and the picture of an env."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter

from shoal.draw.canvas import Canvas
from shoal.draw.surface import Part
from shoal.nav.ground import SLACK
from shoal.nav.paths import Floor, field_of, shortest_path
from shoal.nav.walk import NOWHERE

AGENTS = ("orange", "blue", "green", "#c8a814")
"""Colors of agents, in turn; about those that they have in one another's eyes."""

FLOOR, NARROW, THINGS, EDGE = (255, 255, 255), (232, 235, 240), (206, 211, 218), (112, 122, 138)
"""Open floor, floor beside obstacles, what nobody can stand on, and the line around walkable floor."""

MARGIN = 0.4
"""Meters around the walkable floor that a map shows."""

PINHOLE = 7
"""Cells of the largest gap in a thing that is not drawn."""

STRIP = 24
"""Height of the line of text [pixels]."""

GAP = 8
"""Pixels around and between the parts of a picture."""

DART = np.array([(1.5, 0.0), (-1.0, 0.9), (-0.5, 0.0), (-1.0, -0.9)])
"""Corners of an agent that looks along the x axis, in its size."""

NEAR_TO_FAR = np.array([(255, 246, 224), (244, 196, 148), (206, 118, 122), (118, 78, 128), (46, 48, 92), (16, 20, 40)])
"""Colors of depth, evenly over its square root: near things are told apart best."""


# --- maps ----------------------------------------------------------------------------------------------------------


class TopDown:
    """The ground of one row from above, x to the right and y up, with all storeys in one picture."""

    def __init__(self, floor: Floor):
        self.floor, self._walkable = floor, floor.walkable()
        stands = self._walkable.any(0)
        if not stands.any():
            stands = np.ones_like(stands)
        rows, columns = np.flatnonzero(stands.any(1)), np.flatnonzero(stands.any(0))
        pad = round(MARGIN / floor.cell)
        depth, width = stands.shape
        self._rows = slice(max(0, rows[0] - pad), min(depth, rows[-1] + 1 + pad))
        self._columns = slice(max(0, columns[0] - pad), min(width, columns[-1] + 1 + pad))
        x0, y0 = floor.origin + floor.cell * np.array([self._columns.start, self._rows.start])
        x1, y1 = floor.origin + floor.cell * np.array([self._columns.stop, self._rows.stop])
        self.bounds = (float(x0), float(x1), float(y0), float(y1))
        """Left, right, bottom and top of what is shown [m]."""
        self._drawn: tuple[tuple[int, int], np.ndarray] | None = None

    @staticmethod
    def cells(floor: Floor) -> np.ndarray:
        """uint8 [row, column, 3], a pixel a cell, y up: walkable light, other floor gray, nothing black."""
        image = np.zeros((*floor.height.shape[1:], 3), np.uint8)
        image[(floor.height > NOWHERE).any(0)] = (70, 70, 74)
        image[(floor.region >= 0).any(0)] = (205, 220, 205)
        return image[::-1]

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Pixels of a map that fits into so many."""
        left, right, bottom, top = self.bounds
        scale = min(width / (right - left), height / (top - bottom))
        return max(1, round(scale * (right - left))), max(1, round(scale * (top - bottom)))

    def image(self, width: int, height: int) -> np.ndarray:
        """uint8 [height, width, 3] at most: the ground alone, its edges smooth between the middles of cells."""
        size = self.size(width, height)
        if self._drawn is None or self._drawn[0] != size:
            self._drawn = size, self._draw(*size)
        return self._drawn[1]

    def _draw(self, width: int, height: int) -> np.ndarray:
        floor = self.floor
        stands = np.where(self._walkable, floor.clearance, 0.0).max(0)[self._rows, self._columns]
        there = (floor.height > NOWHERE).any(0)[self._rows, self._columns]
        # Pinholes in things, where their tops are too steep or too low to be a floor, are filled.
        whole = Image.fromarray(np.pad(there, PINHOLE).astype(np.uint8))
        for close in (ImageFilter.MaxFilter, ImageFilter.MinFilter):
            whole = whole.filter(close(2 * (PINHOLE // 2) + 1))
        there = np.asarray(whole)[PINHOLE:-PINHOLE, PINHOLE:-PINHOLE]

        def enlarged(cells: np.ndarray) -> np.ndarray:
            image = Image.fromarray(np.ascontiguousarray(cells[::-1], dtype=np.float32))
            return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))

        clear, there = enlarged(stands), enlarged(there)
        limit = floor.radius - SLACK * floor.cell
        walkable = clear >= limit
        open_floor = np.clip((clear - limit) / 0.35, 0.0, 1.0)[..., None]
        image = np.full((height, width, 3), 250.0)
        image[..., 2] = 247.0
        image[there >= 0.5] = THINGS
        image = np.where(walkable[..., None], np.array(NARROW) + (np.array(FLOOR) - NARROW) * open_floor, image)
        edge = np.zeros_like(walkable)
        for axis in (0, 1):
            for turn in (1, -1):
                edge |= walkable & ~np.roll(walkable, turn, axis)
        image[edge] = EDGE
        return np.clip(image, 0, 255).astype(np.uint8)

    def lay(self, canvas: Canvas, part: Part | None = None) -> None:
        """The ground on a part of a canvas, whose lengths are meters of the scene from then on."""
        canvas.view(*self.bounds, part)
        left, right, bottom, top = self.bounds
        (x0, y0), (x1, y1) = canvas.at((left, top)), canvas.at((right, bottom))
        image = self.image(round(x1 - x0), round(y1 - y0))
        canvas.paste(image, part)

    def path(self, canvas: Canvas, points: np.ndarray, color: str, width: float = 2.5) -> None:
        """A path [n, 2 or more] that was walked, `width` pixels wide."""
        if len(points) > 1:
            canvas.line([(x, y) for x, y in points[:, :2]], color, width * canvas.smooth / canvas.scale)

    def best(self, canvas: Canvas, points: np.ndarray, color: str) -> None:
        """The shortest path: a pale band, on which the one that was walked is seen."""
        self.path(canvas, points, pale(canvas, color, 0.45), 6.0)
        for end in (points[0], points[-1]):
            canvas.disc(end[:2], 3.0 * canvas.smooth / canvas.scale, pale(canvas, color, 0.45))

    def start(self, canvas: Canvas, place: np.ndarray, color: str) -> None:
        """Where an agent began: a ring."""
        pixel = canvas.smooth / canvas.scale
        canvas.disc(place[:2], 4.5 * pixel, color)
        canvas.disc(place[:2], 2.5 * pixel, "#ffffff")

    def goal(self, canvas: Canvas, place: np.ndarray, color: str) -> None:
        """Where an agent should go: a target."""
        pixel = canvas.smooth / canvas.scale
        for radius, tint in ((8.0, color), (6.0, "#ffffff"), (4.0, color)):
            canvas.disc(place[:2], radius * pixel, tint)

    def agent(self, canvas: Canvas, place: np.ndarray, yaw: float, color: str) -> None:
        """An agent that looks along its yaw [rad]."""
        size = 6.5 * canvas.smooth / canvas.scale
        turn = np.array([[math.cos(yaw), -math.sin(yaw)], [math.sin(yaw), math.cos(yaw)]])
        for scale, tint in ((1.45, "#ffffff"), (1.0, color)):
            corners = np.asarray(place)[:2] + (scale * size * DART) @ turn.T
            canvas.polygon([(x, y) for x, y in corners], tint)


def pale(canvas: Canvas, color: str, share: float) -> str:
    """A color thinned with white."""
    return "#" + "".join(f"{round(share * c + (1 - share) * 255):02x}" for c in canvas.rgb(color))


# --- episodes of navigation worlds ---------------------------------------------------------------------------------


class Episode:
    """One env of a navigation world from the start of an episode on: the ground, the goals, the paths."""

    def __init__(self, world: Any, env: int, tops: dict[int, TopDown] | None = None):
        store, site = world.store, world._site
        rows = store.row[env].tolist()
        tops = {} if tops is None else tops
        if rows[0] not in tops:
            tops[rows[0]] = TopDown(Floor.of(site.ground, rows[0]))
        self.top = tops[rows[0]]
        self.scene = site.pool.memory.scene(rows[0]).name
        self.starts = store.start[env].double().cpu().numpy()
        """[agent, 3]: where it began [m]."""
        self.goals = store.goal[env].double().cpu().numpy() if world.goals_shown else None
        """[agent, 3], or None where there is nothing to go to."""
        self.best: list[np.ndarray | None] = []
        """By agent, the shortest path from the start."""
        self.shortest = float(store.start_distance[env].mean()) if world.goals_shown else 0.0
        """Its length along the floor as the world knows it, mean over the agents [m]."""
        if self.goals is not None:
            for agent, slot in enumerate(store.goal_slot[env].tolist()):
                field = field_of(site.fields, rows[0], slot)
                self.best.append(shortest_path(self.top.floor, field, self.starts[agent], self.goals[agent]))
        self.paths: list[np.ndarray] = []
        """Layout2D [agent, 3] step by step."""

    def draw(self, canvas: Canvas, part: Part | None, yaws: Sequence[float | None] = ()) -> None:
        """The map with everything that is known; agents as darts, or as dots where they look nowhere any more."""
        top = self.top
        top.lay(canvas, part)
        colors = [AGENTS[k % len(AGENTS)] for k in range(len(self.starts))]
        # One agent's own shortest path is green, as people know it; among several it has the agent's color.
        bands = ["green"] if len(colors) == 1 else colors
        for points, color in zip(self.best, bands, strict=False):
            if points is not None:
                top.best(canvas, points, color)
        walked = np.stack(self.paths or [self.starts])
        for k, color in enumerate(colors):
            if self.goals is not None:
                top.goal(canvas, self.goals[k], "green" if len(colors) == 1 else color)
            top.path(canvas, walked[:, k], color)
            top.start(canvas, self.starts[k], color)
        for k, color in enumerate(colors):
            yaw = yaws[k] if k < len(yaws) else None
            if yaw is None:
                canvas.disc(walked[-1, k, :2], 4.0 * canvas.smooth / canvas.scale, color)
            else:
                top.agent(canvas, walked[-1, k], yaw, color)


class NavTracks:
    """Follows the first envs of a navigation world through an episode each, and draws maps of them.

    What is needed is copied on the device, step by step, and read when a map is drawn: nothing waits meanwhile. The
    step that ends an episode is not seen, for the env has started anew by then; a STOP does not move, and of a path
    that is cut off for time the last step is missing.
    """

    LARGEST = (640, 560)
    """Most pixels of a map."""

    def __init__(self, world: Any, envs: int):
        self.world, self.envs = world, min(envs, world.num_envs)
        self.episodes: list[Episode] = []
        self._places: list[torch.Tensor] = []
        self._going: list[torch.Tensor] = []

    def follow(self, going: torch.Tensor) -> None:
        """Look at where the envs are."""
        if not self.episodes:
            tops: dict[int, TopDown] = {}
            self.episodes = [Episode(self.world, env, tops) for env in range(self.envs)]
        self._places.append(self.world.store.place[: self.envs].clone())
        self._going.append(going[: self.envs].clone())

    def size(self, env: int) -> tuple[int, int]:
        """Pixels of a map, title included."""
        width, height = self.episodes[env].top.size(*self.LARGEST)
        return max(width, self.LARGEST[0]) + 2 * GAP, height + 2 * STRIP + 2 * GAP

    def draw(self, canvas: Canvas, env: int, title: str) -> None:
        """The map of the episode of an env."""
        if self._places:
            places = torch.stack(self._places).double().cpu().numpy()
            going = torch.stack(self._going).cpu().numpy()
            for k, episode in enumerate(self.episodes):
                episode.paths = list(places[going[:, k], k])
            self._places.clear()
        episode = self.episodes[env]
        episode.draw(canvas, (GAP, STRIP + GAP, canvas.width - GAP, canvas.height - STRIP - GAP))
        canvas.text((GAP, 6), title)
        legend(canvas, canvas.height - STRIP + 2, episode)


def legend(canvas: Canvas, y: int, episode: Episode) -> None:
    """What the lines of a map are."""
    one = len(episode.starts) == 1
    lines = [("walked", AGENTS[0] if one else "ink", 2.5)]
    if episode.goals is not None:
        words = f"shortest: {episode.shortest:.1f} m{'' if one else ' on average'}"
        lines.append((words, pale(canvas, "green" if one else "ink", 0.45), 6.0))
    canvas.view(0, canvas.width, -canvas.height, 0)
    x = GAP
    for words, color, width in lines:
        canvas.line([(x, -y - 8), (x + 22, -y - 8)], color, width)
        x += 28 + canvas.text((x + 28, y), words) + 16


# --- pictures of envs ----------------------------------------------------------------------------------------------


def remember_path(memory: dict[str, Any], world: Any, env: int) -> Episode:
    """The episode of an env as a recording has seen it, with where its agents are now."""
    number, step = int(world.store.episode[env]), int(world.store.step_count[env])
    if memory.get("number") != number:
        memory.update(number=number, step=None, episode=Episode(world, env))
    if memory["step"] != step:
        memory["episode"].paths.append(world.store.place[env].double().cpu().numpy())
        memory["step"] = step
    return memory["episode"]


def draw_env(canvas: Canvas, world: Any, env: int) -> None:
    """One env of a navigation world: what the agents see, beside a map with the paths so far, and a line of text."""
    store = world.store
    episode = remember_path(canvas.memory, world, env)
    views = views_of(world, env)
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
    canvas.text((GAP, 5), words_of(world, env, episode))


def views_of(world: Any, env: int) -> list[tuple[int, np.ndarray]]:
    """Agents and the pictures [size, size, 3] that they see; of one agent that sees both, color and depth."""
    seen = world.outputs.groups["agent"].observation[env].float().cpu().numpy()
    kind, size, pictures = world.config.image, world.config.size, []
    color_at = size * size if kind == "rgbd" else 0
    for agent in range(min(len(seen), 9)):
        if kind in ("rgb", "rgbd"):
            rgb = seen[agent, color_at : color_at + 3 * size * size].reshape(size, size, 3)
            pictures.append((agent, (np.clip(rgb, 0.0, 1.0) * 255).astype(np.uint8)))
        if kind == "depth" or (kind == "rgbd" and len(seen) == 1):
            depth = seen[agent, : size * size].reshape(size, size)
            pictures.append((agent, colored(depth / world.config.max_depth)))
    return pictures


def colored(depth: np.ndarray) -> np.ndarray:
    """uint8 [..., 3]: colors of depths from 0 to 1."""
    place = np.sqrt(np.clip(depth, 0.0, 1.0)) * (len(NEAR_TO_FAR) - 1)
    stops = np.arange(len(NEAR_TO_FAR))
    return np.stack([np.interp(place, stops, NEAR_TO_FAR[:, c]) for c in range(3)], -1).astype(np.uint8)


def words_of(world: Any, env: int, episode: Episode) -> str:
    """Scene, step, how far it is and was, and how earlier episodes of the recording ended."""
    store, finished = world.store, int(world.statistics().episodes[env])
    words = [episode.scene[-28:], f"step {int(store.step_count[env])}"]
    if episode.goals is not None:
        words.append(f"to go {float(store.distance[env].mean()):.1f} m")
    else:
        words.append(f"{world.reports[0]} {float(store[world.reports[0]][env]):.1f}")
    words.append(f"walked {float(store.walked[env].mean()):.1f} m")
    if finished and "success" in world.reports:
        words.append(f"success in {float(store.success_sum[env]):g} of {finished}")
    return "   ".join(words)
