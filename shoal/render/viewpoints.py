"""Viewpoints in unknown scenes: free positions at eye height, facing open space."""

import math

import torch

from shoal.render.renderer import Renderer, heading
from shoal.scene.memory import SceneMemory

CAMERA_HEIGHT = 1.25
"""Height of the camera above the floor, in meters."""

CLEARANCE = 0.4
"""Minimum distance between the camera and surfaces, in meters."""

DIRECTIONS = 12
"""Number of headings that are tried at a position."""

TRIES = 32
"""Number of sampled positions per requested view."""

MIN_INDOOR_FRACTION = 0.1
"""Fraction of sampled positions that must be valid for an indoor scene; for a single object hardly any is."""


def find_viewpoints(memory: SceneMemory, row: int, count: int, seed: int = 0) -> torch.Tensor:
    """Find camera poses [count, 7]: on a floor between walls if there is one, else on a circle around the scene."""
    indoor = _indoor_poses(memory, row, count, torch.Generator().manual_seed(seed % 2**63))
    poses = _outdoor_poses(memory, row, count) if len(indoor) < MIN_INDOOR_FRACTION * TRIES * count else indoor[:count]
    return poses.to(memory.device)


def _indoor_poses(memory: SceneMemory, row: int, count: int, rng: torch.Generator) -> torch.Tensor:
    scene = memory.scene(row)
    assert scene is not None
    low, high = (torch.from_numpy(corner) for corner in scene.bounds)
    tries = TRIES * count
    drawn = low + (high - low) * torch.rand(tries, 3, generator=rng)
    probe = _DepthProbe(memory, row, tries)
    drawn[:, 2] += CAMERA_HEIGHT - probe(drawn, torch.zeros(tries), -math.pi / 2)
    yaws = torch.arange(DIRECTIONS) * (2 * math.pi / DIRECTIONS)
    around = torch.stack([probe(drawn, yaw.expand(tries), 0.0) for yaw in yaws], 1)
    up, down = (probe(drawn, torch.zeros(tries), side * math.pi / 2) for side in (1, -1))
    closed = (around < probe.far).sum(1) >= DIRECTIONS * 3 // 4
    free = (around.amin(1) > CLEARANCE) & (up > CLEARANCE) & (up < probe.far) & ((down - CAMERA_HEIGHT).abs() < 0.01)
    good = torch.nonzero(closed & free & (drawn[:, 2] < high[2])).squeeze(1)
    # Face the heading with the most open space around it.
    near = around[good].clamp(max=6.0)
    openness = near + 0.7 * (near.roll(1, 1) + near.roll(-1, 1))
    return torch.cat([drawn[good], heading(yaws[openness.argmax(1)])], 1)


class _DepthProbe:
    """Measures distances along single rays."""

    def __init__(self, memory: SceneMemory, row: int, views: int):
        scene = memory.scene(row)
        assert scene is not None
        far = 10.0 * float((scene.bounds[1] - scene.bounds[0]).max())
        self._renderer = Renderer(memory, views, (1, 1), ["depth"], hfov=1.0, far=far)
        self._renderer.scene.fill_(row)
        self.far = self._renderer.far

    def __call__(self, points: torch.Tensor, yaw: torch.Tensor, pitch: float) -> torch.Tensor:
        poses = torch.cat([points, heading(yaw, pitch)], 1)
        return self._renderer.render(poses)["depth"].reshape(-1).to("cpu", copy=True)


def _outdoor_poses(memory: SceneMemory, row: int, count: int) -> torch.Tensor:
    """Poses on a circle around the scene, slightly above it, with all of it in view."""
    scene = memory.scene(row)
    assert scene is not None
    low, high = (torch.from_numpy(corner) for corner in scene.bounds)
    center, radius = (low + high) / 2, float((high - low).norm()) / 2
    yaw = torch.arange(count) * (2 * math.pi / count)
    pitch = -0.35
    flat = torch.stack([yaw.cos(), yaw.sin(), torch.full((count,), math.tan(pitch))], 1)
    return torch.cat([center - flat * (1.6 * radius * math.cos(pitch)), heading(yaw, pitch)], 1)
