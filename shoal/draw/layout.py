"""Agents in a square: the default picture of a 2-D world.

Sizes are relative to the square and the number of agents, so that five agents and a thousand are both visible. Trails
and flashes need a memory, which the recording passes with the canvas and clears when an episode begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from shoal.draw.surface import Surface

TRAIL = 12
"""Length of a trail [pictures]."""
FLASH = 5
"""Duration of the ring around an agent that leaves [pictures]."""
STRIP = 20
"""Height of the line of text [pixels]."""
GROUND = (255, 255, 255)
GROUPS = ("orange", "blue", "green", "red", "ink")
"""Colors of the groups, in their order."""
DART = np.array([(2.0, 0.0), (-1.3, 1.15), (-0.7, 0.0), (-1.3, -1.15)])
"""Corners of an agent that points along the x axis [radii]."""


@dataclass
class Trace:
    """Past positions of a group's agents in this episode."""

    alive: np.ndarray
    """[agent]: alive at the last picture."""
    position: np.ndarray
    """[agent, 2]: current position, or the last one before the agent left."""
    age: np.ndarray
    """[agent]: pictures since the agent left; -1 while it is alive."""
    trail: deque[np.ndarray] = field(default_factory=lambda: deque(maxlen=TRAIL + 1))

    def add(self, position: np.ndarray, alive: np.ndarray) -> None:
        """Add the next picture."""
        self.position = np.where(self.alive[:, None], position, self.position)
        self.age = np.where(alive, -1, self.age + 1)
        self.alive = alive
        self.trail.append(self.position)


def draw_agents(canvas: Surface, size: float, groups: Mapping[str, Mapping[str, np.ndarray]], step: int) -> None:
    """Draw the field, every group with its trails, agents that have left, and a line of text (see `Canvas.agents`)."""
    cells = all(np.issubdtype(arrays[axis].dtype, np.integer) for arrays in groups.values() for axis in ("x", "y"))
    low, high = (-0.5, size + 0.5) if cells else (0.0, size)
    _draw_field(canvas, low, high, cells)
    traces = {name: _trace(canvas.memory, name, arrays) for name, arrays in groups.items()}
    shifts = _cell_shifts(traces) if cells else {}
    styles: dict[str, tuple[tuple[int, ...], float]] = {}  # color, radius
    for i, (name, trace) in enumerate(traces.items()):
        radius = (high - low) * min(0.022, 0.12 / np.sqrt(len(trace.position)))
        radius = min(radius, max(0.3, 0.014 * (high - low))) if cells else radius
        radius = max(radius, 0.006 * (high - low))
        styles[name] = (canvas.rgb(GROUPS[i % len(GROUPS)]), radius)
    for name, trace in traces.items():
        _draw_crosses(canvas, trace, *styles[name])
    for name, trace in traces.items():
        _draw_trails(canvas, trace, *styles[name], longest=0.5 * size)
    corners = [*canvas.at((low, high)), *canvas.at((high, low))]
    canvas.draw.rectangle(corners, None, canvas.rgb("gray"), canvas.smooth)
    for name in sorted(traces, key=lambda name: styles[name][1]):  # large agents are drawn over small ones
        color, radius = styles[name]
        _draw_bodies(canvas, traces[name], color, radius, groups[name].get("heading"), shifts.get(name, 0.0) * radius)
    for name, trace in traces.items():
        _draw_flashes(canvas, trace, styles[name][1])
    _draw_text(canvas, groups, traces, step)


def _trace(memory: dict, name: str, arrays: Mapping[str, np.ndarray]) -> Trace:
    """The trace of a group, with its current positions added."""
    position = np.stack([arrays["x"], arrays["y"]], -1).astype(float)
    alive = np.array(arrays.get("alive", np.ones(len(position), bool)), bool)  # a copy: the array may be the store's
    trace = memory.get(name)
    if trace is None:  # agents that are not alive at the first picture left long ago: no flash
        trace = memory[name] = Trace(np.ones_like(alive), position, np.full(len(position), FLASH))
    trace.add(position, alive)
    return trace


def _draw_field(canvas: Surface, low: float, high: float, cells: bool) -> None:
    side = high - low
    pad = 0.03 * side
    strip = (side + 2 * pad) * STRIP / (canvas.height - STRIP)
    canvas.view(low - pad, high + pad, low - pad, high + pad + strip)
    canvas.draw.rectangle([*canvas.at((low, high)), *canvas.at((high, low))], GROUND)
    if cells and side * 6 * canvas.smooth < side * canvas.scale:  # lines need cells of some pixels
        for i in range(1, round(side)):
            for ends in ([(low + i, low), (low + i, high)], [(low, low + i), (high, low + i)]):
                canvas.draw.line([canvas.at(p) for p in ends], (232, 234, 238), canvas.smooth)


def _cell_shifts(traces: dict[str, Trace]) -> dict[str, np.ndarray]:
    """Shifts that separate agents on the same cell [radii]."""
    unused = [-1.0 - np.arange(len(t.position))[:, None] for t in traces.values()]  # a cell for each that has left
    positions = np.concatenate(
        [np.where(t.alive[:, None], t.position, u) for t, u in zip(traces.values(), unused, strict=True)]
    )
    _, cell, count = np.unique(positions, axis=0, return_inverse=True, return_counts=True)
    cell = cell.ravel()
    order = np.argsort(cell, kind="stable")
    rank = np.empty(len(cell), int)
    rank[order] = np.arange(len(cell)) - np.repeat(np.cumsum(count) - count, count)
    angle = 2 * np.pi * rank / count[cell] + 0.6
    shift = np.where(count[cell] > 1, 0.8, 0.0)[:, None] * np.stack([np.cos(angle), np.sin(angle)], -1)
    return dict(zip(traces, np.split(shift, np.cumsum([len(t.position) for t in traces.values()])[:-1]), strict=True))


def _draw_trails(canvas: Surface, trace: Trace, color: tuple[int, ...], radius: float, longest: float) -> None:
    """Lines along past positions, paler and thinner with age. Jumps across the field are omitted."""
    points = list(trace.trail)
    for i in range(1, len(points)):
        share = 1.0 - (len(points) - 1 - i) / TRAIL
        width = max(1, round(canvas.scale * radius * (0.3 + 0.5 * share)))
        distance = np.abs(points[i] - points[i - 1]).max(axis=1)
        moved = (distance > 0.0) & (distance < longest)
        ends = np.concatenate([_pixels(canvas, points[i - 1][moved]), _pixels(canvas, points[i][moved])], -1)
        faded = _mixed(color, 0.5 * share)
        for line in ends.tolist():
            canvas.draw.line(line, faded, width)


def _draw_bodies(
    canvas: Surface,
    trace: Trace,
    color: tuple[int, ...],
    radius: float,
    heading: np.ndarray | None,
    shift: np.ndarray | float,
) -> None:
    """A disc per agent, or a dart that points along its heading."""
    at = _pixels(canvas, trace.position + shift)[trace.alive]
    r = max(2.0, canvas.scale * radius)
    if heading is None:
        for x, y in at.tolist():
            canvas.draw.ellipse((x - r, y - r, x + r, y + r), color, GROUND, canvas.smooth)
        return
    cosine, sine = np.cos(heading[trace.alive]), np.sin(heading[trace.alive])
    rotation = np.stack(
        [np.stack([cosine, -sine], -1), np.stack([-sine, -cosine], -1)], -2
    )  # y points down in a picture
    corners = at[:, None, :] + r * np.einsum("aij,kj->aki", rotation, DART)
    for corner in corners.reshape(len(at), -1).tolist():
        canvas.draw.polygon(corner, color, GROUND)


def _draw_crosses(canvas: Surface, trace: Trace, color: tuple[int, ...], radius: float) -> None:
    """A cross where an agent has left."""
    half = max(2.0 * canvas.smooth, 0.6 * canvas.scale * radius)
    pale = _mixed(color, 0.4)
    for x, y in _pixels(canvas, trace.position[~trace.alive]).tolist():
        canvas.draw.line((x - half, y - half, x + half, y + half), pale, canvas.smooth)
        canvas.draw.line((x - half, y + half, x + half, y - half), pale, canvas.smooth)


def _draw_flashes(canvas: Surface, trace: Trace, radius: float) -> None:
    """A ring that grows and fades around an agent that has just left."""
    recent = ~trace.alive & (trace.age < FLASH)
    for (x, y), age in zip(_pixels(canvas, trace.position[recent]).tolist(), trace.age[recent].tolist(), strict=True):
        r = max(3.0 * canvas.smooth, canvas.scale * radius) * (1.4 + 0.5 * age)
        ring = _mixed(canvas.rgb("red"), 1.0 - age / FLASH)
        canvas.draw.ellipse((x - r, y - r, x + r, y + r), None, ring, 2 * canvas.smooth)


def _draw_text(canvas: Surface, groups: Mapping[str, Mapping], traces: dict[str, Trace], step: int) -> None:
    x = 8 + canvas.text((8, 4), f"step {step}") + 12
    for i, (name, trace) in enumerate(traces.items()):
        total = f" of {len(trace.alive)}" if "alive" in groups[name] else ""
        x += canvas.text((x, 4), f"{name} {int(trace.alive.sum())}{total}", GROUPS[i % len(GROUPS)]) + 12


def _pixels(canvas: Surface, points: np.ndarray) -> np.ndarray:
    """Points of the world [..., 2] as pixels."""
    return np.array(canvas.origin) + canvas.scale * points * (1.0, -1.0)


def _mixed(color: tuple[int, ...], share: float) -> tuple[int, ...]:
    """A color mixed with the background's; `share` is the color's part."""
    return tuple(round(share * c + (1.0 - share) * g) for c, g in zip(color, GROUND, strict=True))
