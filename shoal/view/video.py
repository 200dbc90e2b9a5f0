"""Recordings: several envs of a world side by side, played by a run's policy."""

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
"""Size of one env's picture [pixels], and of one that plays in a square; videos want multiples of 16."""
FAST, SLOW = 50, 20
"""Pictures per second; in a square there are many to follow."""
SECONDS = 10
"""Length of a video."""
STILL_ENVS, VIDEO_ENVS = 16, 4
STILL_STEPS = 100


def record(
    run: Run,
    out: str | Path | None = None,
    envs: int | None = None,
    steps: int | None = None,
    fps: int | None = None,
    seed: int | None = None,
    sample: bool | None = None,
) -> Path:
    """Play a run's policy for `steps` steps in `envs` envs and write what they look like.

    A video (.mp4 or .gif), or one picture at the end (.png); what is not said follows the kind of file and world.
    """
    path = new_file(out or run.folder.subfolder("videos") / f"{run.job.run.algo}.mp4", RECORDINGS, "A recording")
    still = path.suffix == ".png"
    envs = (STILL_ENVS if still else VIDEO_ENVS) if envs is None else envs
    cls = world_class(run.job.world)
    usual: int = cls.picture_rate or (FAST if cls.layout is None else SLOW)
    fps = usual if fps is None else fps
    steps = (STILL_STEPS if still else fps * SECONDS) if steps is None else steps
    if envs < 1 or steps < 1 or fps < 1:
        raise ShoalError(f"--envs, --steps and --fps must be at least 1, got {envs}, {steps} and {fps}.")
    with closing(make_world(run.job, envs, "shown")) as world:
        if not world.drawable:
            world.picture(None, 0)
        drawn = run.job.evaluation.eval_stochastic if sample is None else sample
        player = Player(world, run.policies, evaluation_seed(run.job, seed), drawn)
        with replacing(path) as file:
            if still:
                _write_still(file, player, steps)
            elif path.suffix == ".gif":
                _write_gif(file, frames(player, steps), fps)
            else:
                _write_video(file, frames(player, steps), fps)
    return path


def frames(player: Player, steps: int, last: int | None = None) -> Iterator[np.ndarray]:
    """One picture per step, from where the player stands; of the `last` steps only, if that is said."""
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
    """All envs of a (small) world in one picture, in rows; `memories` (one per env) go from one picture to the next."""
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
    if world.num_envs > 1:  # a thin line between envs
        sheet[height::height] = 225
        sheet[:, width::width] = 225
    return sheet


def _write_still(path: Path, player: Player, steps: int) -> None:
    """What there is after `steps` steps; pictures before that are drawn for their trails alone."""
    from PIL import Image

    *_, last = frames(player, steps + 1, TRAIL + 1)
    Image.fromarray(last).save(path)


def _write_video(path: Path, frames, fps: int) -> None:
    import imageio.v2 as imageio

    try:
        with imageio.get_writer(path, fps=fps, quality=7, macro_block_size=16, ffmpeg_log_level="quiet") as writer:
            for frame in frames:
                writer.append_data(frame)
    except OSError:  # its text is ffmpeg's command
        raise OSError("ffmpeg has stopped; free some space or choose another kind of file") from None


def _write_gif(path: Path, frames, fps: int) -> None:
    from PIL import Image

    images = [Image.fromarray(frame).quantize(64) for frame in frames]
    images[0].save(path, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0, optimize=True)
