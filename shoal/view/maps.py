"""Top-down maps of evaluated episodes, for worlds that support them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from shoal.core.errors import ShoalError, make_folder
from shoal.core.world import TrajectoryRecorder, World
from shoal.draw.canvas import Canvas
from shoal.runs.evaluation import Evaluation
from shoal.runs.files import replacing


class Maps:
    """Top-down maps of the first `count` episodes of an evaluation.

    >>> maps = Maps(8)
    >>> maps.save(run.evaluate(watch=maps), "folder")
    """

    def __init__(self, count: int):
        if count < 1:
            raise ShoalError(f"--maps must be at least 1, got {count}.")
        self.count = count
        self._tracks: TrajectoryRecorder | None = None

    def __call__(self, world: World, running: torch.Tensor) -> None:
        """Record the positions of a world; `running` [env] are the unfinished episodes."""
        if self._tracks is None:
            self._tracks = world.trajectory_recorder(self.count)
        self._tracks.follow(running)

    def save(self, evaluation: Evaluation, folder: Path | str) -> list[Path]:
        """Write a .png per episode, named after its env and scene."""
        tracks = self._tracks
        if tracks is None:
            raise ShoalError("These top-down maps hold no evaluation; call run.evaluate(watch=maps) first.")
        folder = make_folder(folder)
        paths = []
        for row in evaluation.episodes:
            env = row["env"]
            if env >= self.count:
                continue
            canvas = Canvas(*tracks.size(env))
            tracks.draw(canvas, env, _title(row))
            scene = "".join(c if c.isalnum() or c in "-." else "_" for c in Path(row.get("scene", "")).name)
            paths.append(folder / f"{env:03d}{'_' * bool(scene)}{scene}.png")
            with replacing(paths[-1]) as file:
                Image.fromarray(canvas.array()).save(file)
        return paths


def _title(row: Mapping[str, Any]) -> str:
    """Title of a map: scene, reports and length of its episode."""
    words = [row["scene"][-28:]] if "scene" in row else []
    words += [f"{name.replace('_', ' ')} {value:.3g}" for name, value in row["reports"].items()]
    return "   ".join([*words, f"{row['length']} steps"])
