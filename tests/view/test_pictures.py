"""Recordings and plots: the files are there, of the right size, and show something."""

from dataclasses import dataclass

import imageio.v2 as imageio
import numpy as np
import pytest
import torch
import warp as wp
from PIL import Image

import shoal
from shoal.core import Box, Discrete, Field, ForGroup, Group, KernelWorld, Layout2D, TimeLimit
from shoal.core.errors import ShoalError
from shoal.core.registry import KERNEL_WORLDS
from shoal.core.world_loading import world_class
from shoal.draw.canvas import Canvas
from shoal.draw.layout import FLASH, GROUPS, TRAIL
from shoal.runs.jobs import make_job
from shoal.tools.bench import bench_stepping, bench_training
from shoal.view.plot import plot_bench, plot_runs
from shoal.view.video import SQUARE, contact_sheet, frames, record

SMALL = dict(num_envs=16, rollout_steps=8, eval_episodes=2, quiet=True, device="cpu", log_every_seconds=0.0)


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
    with pytest.raises(ShoalError, match=r"\.mp4, \.gif or \.png"):
        record(run, tmp_path / "a.txt")


def test_a_sheet_is_one_picture_of_sixteen_envs(run, tmp_path):
    with Image.open(record(run, tmp_path / "a.png", steps=3)) as image:
        assert image.format == "PNG"
        assert image.size == (4 * 320, 4 * 240)


@pytest.mark.parametrize("name", KERNEL_WORLDS)
def test_every_bundled_world_has_a_picture(name):
    world = world_class(name)(1)
    world.reset(1)
    sheet = contact_sheet(world)
    assert len(np.unique(sheet.reshape(-1, 3), axis=0)) > 10


def test_colors_by_name_or_number():
    Canvas().disc((0.0, 0.0), 0.1, "#d04030")
    with pytest.raises(ShoalError, match="There is no color 'rde'; did you mean 'red'"):
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


# --- Ditch: two groups on their way to the right; those who cross the middle leave --------------------------------


@wp.func
def walk(env: int, agent: int, walker_x: wp.array2d[float], walker_alive: wp.array2d[wp.bool]):
    """Half a meter to the right; who is past the ditch is put far away, to show that a cross stays where it was."""
    there = walker_alive[env, agent]
    if there:
        walker_x[env, agent] = walker_x[env, agent] + 0.5
        walker_alive[env, agent] = walker_x[env, agent] < 6.0
    else:
        walker_x[env, agent] = 1000.0


@wp.func
def stand(env: int, agent: int, guard_x: wp.array2d[float], guard_y: wp.array2d[float]):
    guard_x[env, agent] = 8.0
    guard_y[env, agent] = 2.0 + 6.0 * float(agent)


@wp.func
def line_up(env: int, agent: int, walker_x: wp.array2d[float], walker_y: wp.array2d[float]):
    walker_x[env, agent] = 1.0 - float(agent)
    walker_y[env, agent] = 3.0 + 3.0 * float(agent)


@wp.func
def look(env: int, walker_observation: wp.array3d[float], guard_observation: wp.array3d[float]):
    for agent in range(2):
        walker_observation[env, agent, 0] = 0.0
        guard_observation[env, agent, 0] = 0.0


class Ditch(KernelWorld):
    @dataclass(frozen=True)
    class Config:
        size: float = 10.0
        max_steps: int = 16

    state = dict(
        walker_x=Field(float, (2,)),
        walker_y=Field(float, (2,)),
        guard_x=Field(float, (2,)),
        guard_y=Field(float, (2,)),
        guard_turn=Field(float, (2,)),
    )
    groups = (
        Group("walker", observation=Box(1), action=Discrete(2), agents=2, can_leave=True),
        Group("guard", observation=Box(1), action=Discrete(2), agents=2),
    )
    step, observe = [ForGroup("walker", walk)], look
    reset = [ForGroup("walker", line_up), ForGroup("guard", stand)]
    layout = Layout2D(size="size", heading="{group}_turn")


WALKER, GUARD, RED = (np.array(Canvas.rgb(name)) for name in (*GROUPS[:2], "red"))


class Watch:
    """A Ditch of one env in a wrapper, and the pictures of it."""

    def __init__(self):
        self.world, self.memory = TimeLimit(Ditch(1), 16), {}
        self.world.reset(0)
        self.sheet = contact_sheet(self.world, [self.memory])

    def walk(self, steps: int) -> "Watch":
        actions = {g.name: torch.zeros(1, g.agents, dtype=torch.int32) for g in self.world.groups}
        for _ in range(steps):
            self.world.step(actions)
            self.sheet = contact_sheet(self.world, [self.memory])
        return self

    def near(self, x: float, y: float, half: float = 0.25) -> np.ndarray:
        """The pixels around a place of the world [n, 3]."""
        canvas = Canvas(*SQUARE)
        canvas.view(-0.3, 10.3, -0.3, 10.3 + 10.6 * 20 / (SQUARE[1] - 20))
        (left, low), (right, high) = (canvas.at(p) for p in ((x - half, y - half), (x + half, y + half)))
        rows, columns = slice(int(high / 2), int(low / 2) + 1), slice(int(left / 2), int(right / 2) + 1)
        return self.sheet[rows, columns].reshape(-1, 3).astype(int)

    def shows(self, color: np.ndarray, x: float, y: float, half: float = 0.25) -> bool:
        return bool((np.abs(self.near(x, y, half) - color).max(axis=1) < 40).any())


def orange(pixels: np.ndarray) -> float:
    """How near the strongest of the pixels is to the walkers' color, from 0 (white)."""
    return float((pixels[:, 0] - pixels[:, 2]).max())


def test_agents_are_where_the_store_says():
    watch = Watch()
    assert watch.sheet.shape == (*SQUARE, 3)
    for color, x, y in ((WALKER, 1.0, 3.0), (WALKER, 0.0, 6.0), (GUARD, 8.0, 2.0), (GUARD, 8.0, 8.0)):
        assert watch.shows(color, x, y)
    assert (watch.near(5.0, 3.0) == 255).all()
    assert watch.walk(8).shows(WALKER, 5.0, 3.0)


def test_guards_point_along_their_heading():
    """A dart is longer ahead than behind."""
    watch = Watch()
    assert watch.shows(GUARD, 8.3, 2.0, 0.05)
    assert not watch.shows(GUARD, 7.7, 2.0, 0.05)
    watch.world.world.store.guard_turn.fill_(np.pi / 2)
    watch.walk(1)
    assert watch.shows(GUARD, 8.0, 2.3, 0.05)
    assert not watch.shows(GUARD, 8.3, 2.0, 0.05)


def test_trails_fade_and_end():
    watch = Watch().walk(8)
    colors = [orange(watch.near(x, 3.0, 0.1)) for x in (1.3, 2.8, 4.3)]
    assert 10 < colors[0] < colors[1] < colors[2]
    watch.walk(TRAIL + 1 - 8)
    assert (watch.near(1.3, 3.0, 0.1) == 255).all()


def test_a_recording_forgets_trails_when_an_episode_begins():
    """Episodes end after 16 steps: the next ones start with the same picture."""

    class Still:
        world = Ditch(2)

        def step(self):
            self.world.step({g.name: torch.zeros(2, 2, dtype=torch.int32) for g in self.world.groups})

    player = Still()
    player.world.reset(0)
    seen = list(frames(player, 20))
    np.testing.assert_array_equal(seen[16], seen[0])
    assert not np.array_equal(seen[15], seen[0])
    np.testing.assert_array_equal(seen[19], seen[3])


def test_who_leaves_is_ringed_and_then_marked():
    watch = Watch().walk(9)
    assert not watch.shows(RED, 6.0, 3.0, 0.6)
    watch.walk(1)
    assert watch.shows(RED, 6.0, 3.0, 0.6)
    watch.walk(FLASH)
    assert not watch.shows(RED, 6.0, 3.0, 0.6)
    assert not watch.shows(WALKER, 6.0, 3.0)
    assert orange(watch.near(6.0, 3.0)) > 20


@pytest.mark.parametrize(("agents", "size"), [(1, 4), (5, 10), (1000, 50)])
def test_any_number_of_agents_on_cells(agents, size):
    """Agents on one cell are drawn apart."""
    canvas = Canvas(*SQUARE)
    rng = np.random.default_rng(0)
    crowds = {name: dict(zip("xy", rng.integers(0, size + 1, (2, agents)), strict=True)) for name in ("a", "b")}
    canvas.agents(size, crowds, 3)
    one, other = (Canvas(*SQUARE), Canvas(*SQUARE))
    for canvas, at in ((one, [2]), (other, [2, 2])):
        canvas.agents(4, dict(a=dict(x=np.array(at), y=np.array(at))), 0)
    count = [(np.abs(c.array()[30:].astype(int) - WALKER).max(axis=2) < 40).sum() for c in (one, other)]
    assert count[1] > 1.5 * count[0]


def test_recordings_of_a_square_are_square(tmp_path):
    run = shoal.train(f"{__file__}:Ditch", total_steps=512, run_dir=tmp_path / "run", **dict(SMALL, compile="off"))
    with Image.open(record(run, tmp_path / "a.png")) as image:
        assert image.size == (4 * SQUARE[0], 4 * SQUARE[1])
    frames = imageio.mimread(record(run, tmp_path / "a.mp4", envs=2, steps=5), memtest=False)
    assert [frame.shape for frame in frames] == [(SQUARE[1], 2 * SQUARE[0], 3)] * 5


def test_places_may_be_vectors_of_all_groups():
    """[env, agent of any group, element] is split into the groups, in their order."""
    at = torch.arange(2 * 4 * 3).view(2, 4, 3).float()
    found = Layout2D(size=1.0, x="at[0]", y="at[2]").find({"at": at}, Ditch.groups)
    assert found["walker"]["x"].tolist() == [[0.0, 3.0], [12.0, 15.0]]
    assert found["guard"]["y"].tolist() == [[8.0, 11.0], [20.0, 23.0]]
    with pytest.raises(ShoalError, match=r"name an element: \[0\]"):
        Layout2D(size=1.0, x="at", y="at[2]").find({"at": at}, Ditch.groups)


def test_layouts_that_name_nothing_are_refused():
    for layout, message in (
        (Layout2D(size="sise"), "setting for the size of the layout: 'sise'; did you mean 'size'"),
        (Layout2D(size=10.0, x="{group}_u"), "array for x of walker: 'walker_u'"),
        (Layout2D(size=10.0, heading="{group}_way"), "array for heading of walker: 'walker_way'"),
        (Layout2D(size=10.0, y="step_count"), "one number of 'step_count' per agent of 'walker'"),
    ):
        Wrong = type("Wrong", (Ditch,), dict(layout=layout))
        with pytest.raises(ShoalError, match=message):
            Wrong(1)
