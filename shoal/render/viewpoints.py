"""Where to stand in a scene that nothing is known of: free places at eye height, looking into the open."""

import math

import torch

from shoal.render.renderer import Renderer, heading
from shoal.scene.memory import SceneMemory

EYE = 1.25
"""Meters above the floor."""

CLEARANCE = 0.4
"""Meters around the camera that must be free."""

DIRECTIONS = 12
TRIES = 32
"""Layout2D that are tried per view that is wanted."""

PLACE = 0.1
"""The part of them that must be good in a scene that one can stand in; in a single object hardly any is."""


def find_viewpoints(memory: SceneMemory, row: int, count: int, seed: int = 0) -> torch.Tensor:
    """Poses [count, 7] inside a scene, on some floor with walls around; around it if it has no such inside."""
    inside = _inside(memory, row, count, torch.Generator().manual_seed(seed % 2**63))
    poses = _around(memory, row, count) if len(inside) < PLACE * TRIES * count else inside[:count]
    return poses.to(memory.device)


def _inside(memory: SceneMemory, row: int, count: int, rng: torch.Generator) -> torch.Tensor:
    scene = memory.scene(row)
    assert scene is not None
    low, high = (torch.from_numpy(corner) for corner in scene.bounds)
    tries = TRIES * count
    drawn = low + (high - low) * torch.rand(tries, 3, generator=rng)
    look = _Look(memory, row, tries)
    drawn[:, 2] += EYE - look(drawn, torch.zeros(tries), -math.pi / 2)
    yaws = torch.arange(DIRECTIONS) * (2 * math.pi / DIRECTIONS)
    around = torch.stack([look(drawn, yaw.expand(tries), 0.0) for yaw in yaws], 1)
    up, down = (look(drawn, torch.zeros(tries), side * math.pi / 2) for side in (1, -1))
    closed = (around < look.far).sum(1) >= DIRECTIONS * 3 // 4
    free = (around.amin(1) > CLEARANCE) & (up > CLEARANCE) & (up < look.far) & ((down - EYE).abs() < 0.01)
    good = torch.nonzero(closed & free & (drawn[:, 2] < high[2])).squeeze(1)
    # Towards the side that is open over the widest angle.
    near = around[good].clamp(max=6.0)
    openness = near + 0.7 * (near.roll(1, 1) + near.roll(-1, 1))
    return torch.cat([drawn[good], heading(yaws[openness.argmax(1)])], 1)


class _Look:
    """Distances along single rays."""

    def __init__(self, memory: SceneMemory, row: int, views: int):
        scene = memory.scene(row)
        assert scene is not None
        far = 10.0 * float((scene.bounds[1] - scene.bounds[0]).max())
        self._renderer = Renderer(memory, views, (1, 1), ["depth"], fov=1.0, far=far)
        self._renderer.scene.fill_(row)
        self.far = self._renderer.far

    def __call__(self, places: torch.Tensor, yaw: torch.Tensor, pitch: float) -> torch.Tensor:
        poses = torch.cat([places, heading(yaw, pitch)], 1)
        return self._renderer.render(poses)["depth"].reshape(-1).to("cpu", copy=True)


def _around(memory: SceneMemory, row: int, count: int) -> torch.Tensor:
    """A circle around the scene, a little above it, with all of it in view."""
    scene = memory.scene(row)
    assert scene is not None
    low, high = (torch.from_numpy(corner) for corner in scene.bounds)
    center, radius = (low + high) / 2, float((high - low).norm()) / 2
    yaw = torch.arange(count) * (2 * math.pi / count)
    pitch = -0.35
    flat = torch.stack([yaw.cos(), yaw.sin(), torch.full((count,), math.tan(pitch))], 1)
    return torch.cat([center - flat * (1.6 * radius * math.cos(pitch)), heading(yaw, pitch)], 1)
