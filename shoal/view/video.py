"""Recordings of a run's policy: several envs of a world side by side."""

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import ShoalError, new_file
from shoal.core.user_code import UserCode
from shoal.core.world import World
from shoal.core.world_loading import world_class
from shoal.draw.canvas import Canvas
from shoal.draw.layout import TRAIL
from shoal.runs.evaluation import Player, evaluation_seed
from shoal.runs.files import replacing
from shoal.runs.run import Run
from shoal.training.build import make_world

RECORDINGS = (".mp4", ".gif", ".png")

WIDE, SQUARE = (320, 240), (368, 368)
"""Size of one env's picture [pixels]; SQUARE for 2-D worlds. Video encoders need multiples of 16."""
FAST, SLOW = 50, 20
"""Pictures per second; SLOW for 2-D worlds, which show many agents."""
SECONDS = 10
"""Length of a video [s]."""
STILL_ENVS, VIDEO_ENVS = 16, 4
STILL_STEPS = 100


def record(
    run: Run,
    out: str | Path | None = None,
    envs: int | None = None,
    steps: int | None = None,
    fps: int | None = None,
    seed: int | None = None,
    stochastic: bool | None = None,
) -> Path:
    """Record a run's policy as a video (.mp4, .gif) or as one picture after the last step (.png).

    Args:
        out: File; None: in the run folder.
        envs: Number of envs side by side.
        steps: Number of steps.
        fps: Pictures per second.
        seed: Seed of the episodes; None: the run's.
        stochastic: Sample actions instead of taking the mode; None: the run's `eval_stochastic`.
    """
    path = new_file(out or run.folder.subfolder("videos") / f"{run.job.run.algo}.mp4", RECORDINGS, "A recording")
    still = path.suffix == ".png"
    envs = (STILL_ENVS if still else VIDEO_ENVS) if envs is None else envs
    cls = world_class(run.job.world)
    default_fps: int = cls.picture_rate or (FAST if cls.layout is None else SLOW)
    fps = default_fps if fps is None else fps
    steps = (STILL_STEPS if still else fps * SECONDS) if steps is None else steps
    if envs < 1 or steps < 1 or fps < 1:
        raise ShoalError(f"--envs, --steps and --fps must be at least 1, got {envs}, {steps} and {fps}.")
    with closing(make_world(run.job, envs, "recording")) as world:
        if not world.drawable:
            world.picture(None, 0)
        stochastic = run.job.evaluation.eval_stochastic if stochastic is None else stochastic
        player = Player(world, run.policies, evaluation_seed(run.job, seed), stochastic)
        with replacing(path) as file:
            if still:
                _write_still(file, player, steps)
            elif path.suffix == ".gif":
                _write_gif(file, frames(player, steps), fps)
            else:
                _write_video(file, frames(player, steps), fps)
    return path


def frames(player: Player, steps: int, last: int | None = None) -> Iterator[np.ndarray]:
    """Yield a picture before the first step and after each other one; with `last`, of the last steps only."""
    world = player.world
    memories: list[dict[str, Any]] = [{} for _ in range(world.num_envs)]
    for step in range(steps):
        if step:
            player.step()
            for env in (world.outputs.terminated | world.outputs.truncated).nonzero().flatten().tolist():
                memories[env].clear()
        for env, memory in enumerate(memories):
            world.record_frame(memory, env)
        if last is None or step >= steps - last:
            yield contact_sheet(world, memories)


def contact_sheet(world: World, memories: list[dict[str, Any]] | None = None) -> np.ndarray:
    """Draw all envs in one picture, in rows.

    Args:
        memories: Per env, what `World.picture` keeps from one picture to the next, such as trails.
    """
    width, height = world.picture_size or (WIDE if world.layout is None else SQUARE)
    columns = math.ceil(math.sqrt(world.num_envs))
    rows = math.ceil(world.num_envs / columns)
    sheet = np.full((rows * height, columns * width, 3), 250, dtype=np.uint8)
    for env in range(world.num_envs):
        canvas = Canvas(width, height, memory=memories[env] if memories else None)
        with UserCode(f"A picture of env {env} failed", type(world).picture):
            world.picture(canvas, env)
        row, column = divmod(env, columns)
        sheet[row * height : (row + 1) * height, column * width : (column + 1) * width] = canvas.array()
    if world.num_envs > 1:  # lines between envs
        sheet[height::height] = 225
        sheet[:, width::width] = 225
    return sheet


def _write_still(path: Path, player: Player, steps: int) -> None:
    """Write the picture after `steps` steps; earlier ones are drawn for the trails."""
    from PIL import Image

    *_, last = frames(player, steps + 1, TRAIL + 1)
    Image.fromarray(last).save(path)


def _write_video(path: Path, frames: Iterator[np.ndarray], fps: int) -> None:
    import imageio.v2 as imageio

    try:
        with imageio.get_writer(path, fps=fps, quality=7, macro_block_size=16, ffmpeg_log_level="quiet") as writer:
            for frame in frames:
                writer.append_data(frame)  # pyright: ignore[reportAttributeAccessIssue]  # its stub is the base class's
    except OSError:  # its text is ffmpeg's command line
        raise OSError("ffmpeg failed; free some disk space or choose .gif") from None


def _write_gif(path: Path, frames: Iterator[np.ndarray], fps: int) -> None:
    from PIL import Image

    images = [Image.fromarray(frame).quantize(64) for frame in frames]
    images[0].save(path, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0, optimize=True)
