"""Recordings and plots: the files are there, of the right size, and show something."""

import imageio.v2 as imageio
import numpy as np
import pytest
from PIL import Image

import shoal
from shoal.errors import ShoalError
from shoal.run.bench import bench_stepping, bench_training
from shoal.run.config import make_job
from shoal.view.canvas import Canvas
from shoal.view.plot import plot_bench, plot_runs
from shoal.view.video import contact_sheet, record
from shoal.worlds import WORLDS, world_class

SMALL = dict(num_envs=16, rollout=8, eval_episodes=2, quiet=True, device="cpu", log_every=0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return shoal.train("cartpole", total_steps=512, run_dir=tmp_path_factory.mktemp("runs") / "run", **SMALL)


def test_video_has_the_steps_asked_for(run, tmp_path):
    frames = imageio.mimread(record(run, tmp_path / "a.mp4", envs=2, steps=12), memtest=False)
    assert len(frames) == 12
    assert frames[0].shape == (240, 640, 3)
    assert not np.array_equal(frames[0], frames[-1])


def test_gif(run, tmp_path):
    with Image.open(record(run, tmp_path / "a.gif", envs=1, steps=5)) as image:
        assert 2 <= image.n_frames <= 5  # pictures that are alike are merged


def test_other_endings_are_refused(run, tmp_path):
    with pytest.raises(ShoalError, match=r"\.mp4 or \.gif"):
        record(run, tmp_path / "a.txt")


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_every_bundled_world_has_a_picture(name):
    world = world_class(name)(1)
    world.reset(1)
    sheet = contact_sheet(world)
    assert len(np.unique(sheet.reshape(-1, 3), axis=0)) > 10


def test_colours_by_name_or_number():
    Canvas().disc((0.0, 0.0), 0.1, "#d04030")
    with pytest.raises(ShoalError, match="There is no colour 'rde'; did you mean 'red'"):
        Canvas().disc((0.0, 0.0), 0.1, "rde")


def test_canvas_puts_y_up():
    canvas = Canvas(100, 100, smooth=1)
    canvas.view(0.0, 1.0, 0.0, 1.0)
    canvas.disc((0.25, 0.75), 0.05, "red")
    red = np.argwhere(canvas.array()[..., 0].astype(int) - canvas.array()[..., 1] > 80)
    assert abs(red[:, 0].mean() - 25) < 2
    assert abs(red[:, 1].mean() - 25) < 2


def test_curves(run, tmp_path):
    with Image.open(plot_runs([run.path], tmp_path / "curve.png")) as image:
        assert image.size[0] > 500
    job = make_job("cartpole", **dict(SMALL, compile="off"))
    rows = [bench_stepping(job, 16, 0.05), bench_training(job, 0.05)]
    assert rows[0]["steps_per_second"] > 0
    assert rows[1]["rollout_only"] > rows[1]["steps_per_second"] * 0.5
    assert plot_bench(rows, tmp_path / "bench.png").is_file()
