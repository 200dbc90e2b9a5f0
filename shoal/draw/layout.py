"""Agents in a square: what a recording of a 2-D world shows when the world has no picture of its own.

Sizes are shares of the square, so that five agents and a thousand are both seen. Trails and flashes need memory; the
canvas brings it from the recording, which empties it when an episode begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from shoal.draw.surface import Surface

TRAIL = 12
"""Pictures that a trail goes back."""
FLASH = 5
"""Pictures that a ring around an agent that leaves is seen."""
STRIP = 20
"""Height of the line of text [pixels]."""
GROUND = (255, 255, 255)
GROUPS = ("orange", "blue", "green", "red", "ink")
"""Colors of the groups, in their order."""
DART = np.array([(2.0, 0.0), (-1.3, 1.15), (-0.7, 0.0), (-1.3, -1.15)])
"""Corners of an agent that points along the x axis, in radii."""


@dataclass
class Trace:
    """What pictures remember of a group since the episode began."""

    alive: np.ndarray
    """[agent]: in the game at the last picture."""
    place: np.ndarray
    """[agent, 2]: where it is, or was when it left."""
    ago: np.ndarray
    """[agent]: pictures since it left."""
    trail: deque[np.ndarray] = field(default_factory=lambda: deque(maxlen=TRAIL + 1))

    def see(self, now: np.ndarray, alive: np.ndarray) -> None:
        """The next picture."""
        self.place = np.where(self.alive[:, None], now, self.place)
        self.ago = np.where(alive, -1, self.ago + 1)
        self.alive = alive
        self.trail.append(self.place)


def draw_agents(canvas: Surface, size: float, crowds: Mapping[str, Mapping[str, np.ndarray]], step: int) -> None:
    """The field, every group with its trails, who has left, and a line of text (see `Canvas.agents`)."""
    cells = all(np.issubdtype(crowd[axis].dtype, np.integer) for crowd in crowds.values() for axis in ("x", "y"))
    low, high = (-0.5, size + 0.5) if cells else (0.0, size)
    _field(canvas, low, high, cells)
    traces = {name: _trace(canvas.memory, name, crowd) for name, crowd in crowds.items()}
    shifts = _apart(traces) if cells else {}
    looks = {}
    for i, (name, trace) in enumerate(traces.items()):
        radius = (high - low) * min(0.022, 0.12 / np.sqrt(len(trace.place)))
        radius = min(radius, max(0.3, 0.014 * (high - low))) if cells else radius
        radius = max(radius, 0.006 * (high - low))
        looks[name] = (canvas.rgb(GROUPS[i % len(GROUPS)]), radius)
    for name, trace in traces.items():
        _crosses(canvas, trace, *looks[name])
    for name, trace in traces.items():
        _trails(canvas, trace, *looks[name], longest=0.5 * size)
    corners = [*canvas.at((low, high)), *canvas.at((high, low))]
    canvas.draw.rectangle(corners, None, canvas.rgb("gray"), canvas.smooth)
    for name in sorted(traces, key=lambda name: looks[name][1]):  # the few and large above the many and small
        heading = crowds[name].get("heading")
        _bodies(canvas, traces[name], *looks[name], heading, shifts.get(name, 0.0) * looks[name][1])
    for name, trace in traces.items():
        _flashes(canvas, trace, looks[name][1])
    _words(canvas, crowds, traces, step)


def _trace(memory: dict, name: str, crowd: Mapping[str, np.ndarray]) -> Trace:
    now = np.stack([crowd["x"], crowd["y"]], -1).astype(float)
    alive = np.array(crowd.get("alive", np.ones(len(now), bool)), bool)  # a copy: the array may be the store's own
    trace = memory.get(name)
    if trace is None:  # those who are not there at the first picture left some time ago
        trace = memory[name] = Trace(np.ones_like(alive), now, np.full(len(now), FLASH))
    trace.see(now, alive)
    return trace


def _field(canvas: Surface, low: float, high: float, cells: bool) -> None:
    side = high - low
    pad = 0.03 * side
    strip = (side + 2 * pad) * STRIP / (canvas.height - STRIP)
    canvas.view(low - pad, high + pad, low - pad, high + pad + strip)
    canvas.draw.rectangle([*canvas.at((low, high)), *canvas.at((high, low))], GROUND)
    if cells and side * 6 * canvas.smooth < side * canvas.scale:  # lines need cells of some pixels
        for i in range(1, round(side)):
            for ends in ([(low + i, low), (low + i, high)], [(low, low + i), (high, low + i)]):
                canvas.draw.line([canvas.at(p) for p in ends], (232, 234, 238), canvas.smooth)


def _apart(traces: dict[str, Trace]) -> dict[str, np.ndarray]:
    """Shifts that keep agents on one cell apart, in radii."""
    places = np.concatenate(
        [np.where(t.alive[:, None], t.place, -1.0 - np.arange(len(t.place))[:, None]) for t in traces.values()]
    )
    _, cell, count = np.unique(places, axis=0, return_inverse=True, return_counts=True)
    cell = cell.ravel()
    order = np.argsort(cell, kind="stable")
    rank = np.empty(len(cell), int)
    rank[order] = np.arange(len(cell)) - np.repeat(np.cumsum(count) - count, count)
    angle = 2 * np.pi * rank / count[cell] + 0.6
    shift = np.where(count[cell] > 1, 0.8, 0.0)[:, None] * np.stack([np.cos(angle), np.sin(angle)], -1)
    return dict(zip(traces, np.split(shift, np.cumsum([len(t.place) for t in traces.values()])[:-1]), strict=True))


def _trails(canvas: Surface, trace: Trace, color: tuple[int, ...], radius: float, longest: float) -> None:
    """Where agents came from, paler and thinner with age; a jump across the field is no way they went."""
    points = list(trace.trail)
    for i in range(1, len(points)):
        share = 1.0 - (len(points) - 1 - i) / TRAIL
        width = max(1, round(canvas.scale * radius * (0.3 + 0.5 * share)))
        way = np.abs(points[i] - points[i - 1]).max(axis=1)
        moved = (way > 0.0) & (way < longest)
        ends = np.concatenate([_pixels(canvas, points[i - 1][moved]), _pixels(canvas, points[i][moved])], -1)
        faded = _mixed(color, 0.5 * share)
        for line in ends.tolist():
            canvas.draw.line(line, faded, width)


def _bodies(
    canvas: Surface,
    trace: Trace,
    color: tuple[int, ...],
    radius: float,
    heading: np.ndarray | None,
    shift: np.ndarray | float,
) -> None:
    """Discs, or darts that point along their heading."""
    at = _pixels(canvas, trace.place + shift)[trace.alive]
    r = max(2.0, canvas.scale * radius)
    if heading is None:
        for x, y in at.tolist():
            canvas.draw.ellipse((x - r, y - r, x + r, y + r), color, GROUND, canvas.smooth)
        return
    cosine, sine = np.cos(heading[trace.alive]), np.sin(heading[trace.alive])
    turn = np.stack([np.stack([cosine, -sine], -1), np.stack([-sine, -cosine], -1)], -2)  # y points down in a picture
    corners = at[:, None, :] + r * np.einsum("aij,kj->aki", turn, DART)
    for corner in corners.reshape(len(at), -1).tolist():
        canvas.draw.polygon(corner, color, GROUND)


def _crosses(canvas: Surface, trace: Trace, color: tuple[int, ...], radius: float) -> None:
    """Where agents have left the game."""
    half = max(2.0 * canvas.smooth, 0.6 * canvas.scale * radius)
    pale = _mixed(color, 0.4)
    for x, y in _pixels(canvas, trace.place[~trace.alive]).tolist():
        canvas.draw.line((x - half, y - half, x + half, y + half), pale, canvas.smooth)
        canvas.draw.line((x - half, y + half, x + half, y - half), pale, canvas.smooth)


def _flashes(canvas: Surface, trace: Trace, radius: float) -> None:
    """A ring that grows and fades around an agent that has just left."""
    fresh = ~trace.alive & (trace.ago < FLASH)
    for (x, y), ago in zip(_pixels(canvas, trace.place[fresh]).tolist(), trace.ago[fresh].tolist(), strict=True):
        r = max(3.0 * canvas.smooth, canvas.scale * radius) * (1.4 + 0.5 * ago)
        ring = _mixed(canvas.rgb("red"), 1.0 - ago / FLASH)
        canvas.draw.ellipse((x - r, y - r, x + r, y + r), None, ring, 2 * canvas.smooth)


def _words(canvas: Surface, crowds: Mapping[str, Mapping], traces: dict[str, Trace], step: int) -> None:
    x = 8 + canvas.text((8, 4), f"step {step}") + 12
    for i, (name, trace) in enumerate(traces.items()):
        whole = f" of {len(trace.alive)}" if "alive" in crowds[name] else ""
        x += canvas.text((x, 4), f"{name} {int(trace.alive.sum())}{whole}", GROUPS[i % len(GROUPS)]) + 12


def _pixels(canvas: Surface, points: np.ndarray) -> np.ndarray:
    """Points of the world [..., 2] in the picture."""
    return np.array(canvas.origin) + canvas.scale * points * (1.0, -1.0)


def _mixed(color: tuple[int, ...], share: float) -> tuple[int, ...]:
    """A color thinned with the ground's."""
    return tuple(round(share * c + (1.0 - share) * g) for c, g in zip(color, GROUND, strict=True))
