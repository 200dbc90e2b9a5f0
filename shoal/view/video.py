"""Recordings: several envs of a world side by side, played by a run's policy."""

import math
from pathlib import Path

import numpy as np

from shoal.core.world import World
from shoal.errors import ShoalError
from shoal.run.build import make_world
from shoal.run.evaluate import EVALUATION_SEED, Player
from shoal.run.train import Run
from shoal.view.canvas import Canvas


def record(
    run: Run,
    out: str | Path | None = None,
    envs: int = 4,
    steps: int = 500,
    fps: int = 50,
    seed: int | None = None,
    sample: bool = False,
) -> Path:
    """Play a run's policy for `steps` steps in `envs` envs and write what they look like (.mp4 or .gif)."""
    if envs < 1 or steps < 1 or fps < 1:
        raise ShoalError(f"--envs, --steps and --fps must be at least 1, got {envs}, {steps} and {fps}.")
    path = Path(out) if out else run.path / "videos" / f"{run.job.train.algo}.mp4"
    if path.suffix not in (".mp4", ".gif"):
        raise ShoalError(f"A recording ends in .mp4 or .gif, got {path.name!r}.")
    world = make_world(run.job, envs)
    if not world.drawable:
        world.picture(None, 0)
    player = Player(world, run.policies, EVALUATION_SEED + (run.job.train.seed if seed is None else seed), sample)
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = (_play(player, step) for step in range(steps))
    if path.suffix == ".gif":
        _write_gif(path, frames, fps)
    else:
        _write_video(path, frames, fps)
    return path


def _play(player: Player, step: int) -> np.ndarray:
    if step:
        player.step()
    return contact_sheet(player.world)


def contact_sheet(world: World, width: int = 320, height: int = 240) -> np.ndarray:
    """All envs of a (small) world in one picture, in rows."""
    columns = math.ceil(math.sqrt(world.num_envs))
    rows = math.ceil(world.num_envs / columns)
    sheet = np.full((rows * height, columns * width, 3), 250, dtype=np.uint8)
    for env in range(world.num_envs):
        canvas = Canvas(width, height)
        world.picture(canvas, env)
        row, column = divmod(env, columns)
        sheet[row * height : (row + 1) * height, column * width : (column + 1) * width] = canvas.array()
    if world.num_envs > 1:  # a thin line between envs
        sheet[height::height] = 225
        sheet[:, width::width] = 225
    return sheet


def _write_video(path: Path, frames, fps: int) -> None:
    import imageio.v2 as imageio

    with imageio.get_writer(path, fps=fps, quality=7, macro_block_size=16) as writer:
        for frame in frames:
            writer.append_data(frame)


def _write_gif(path: Path, frames, fps: int) -> None:
    from PIL import Image

    images = [Image.fromarray(frame).quantize(64) for frame in frames]
    images[0].save(path, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0, optimize=True)
