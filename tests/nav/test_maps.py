"""Shortest paths against exact ones, maps and pictures pixel by pixel, and a whole run with both."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

import shoal
from shoal.cli import main
from shoal.core.wrappers import TimeLimit
from shoal.draw.canvas import Canvas
from shoal.nav.explore import Explore, ExploreConfig
from shoal.nav.geodesic import FieldMemory
from shoal.nav.maps import AGENTS, OBJECTS, TopDownMap
from shoal.nav.paths import HostGround, host_field, path_length, shortest_path
from shoal.nav.pictures import (
    STRIP,
    EpisodePaths,
    NavTrajectoryRecorder,
    colorize_depth,
    draw_env,
    record_path,
)
from shoal.nav.pointnav import PointNav, PointNavConfig
from shoal.nav.stages import FORWARD, LEFT, STOP
from shoal.view.video import frames, record
from tests.nav.rooms import BLOCKS, box_distance, opened_worlds, pathfinder, room, shortest_length, write_obj
from tests.nav.test_ground import stairs

SIZE = 16


# --- shortest paths ------------------------------------------------------------------------------------------------


def test_paths_have_exact_length_and_clearance():
    finder = pathfinder(room(boxes=BLOCKS))
    places, goals = finder.random(24, 1), finder.random(12, 2)
    fields, floor = FieldMemory(finder.ground, 12), HostGround.of(finder.ground, 0)
    fields.solve(0, goals)
    geodesic = finder.geodesic(places, goals).numpy()
    errors = []
    for i in range(24):
        place, goal = places[i].numpy(), goals[i % 12].numpy()
        path = shortest_path(floor, host_field(fields, 0, i % 12), place, goal)
        true = shortest_length(place[:2], goal[:2], BLOCKS, 0.1)
        assert (path is None) == np.isinf(true) == np.isinf(geodesic[i, i % 12])
        if path is None:
            continue
        np.testing.assert_allclose(path[[0, -1]], [place, goal], atol=1e-6)
        share = np.linspace(0, 1, 50)[:, None]
        along = np.concatenate([a + (b - a) * share for a, b in pairwise(path)])
        assert box_distance(along[:, :2], [b[:4] for b in BLOCKS]).min() > 0.04
        if true > 1.0:
            errors.append(path_length(path) / true - 1)
            assert abs(path_length(path) / geodesic[i, i % 12] - 1) < 0.04, "whose own error is up to 2.3 %"
    assert len(errors) > 15
    assert np.abs(errors).max() < 0.03
    assert np.abs(errors).mean() < 0.01


def test_a_path_climbs_stairs():
    corners, top, length = stairs()
    finder = pathfinder(corners, levels=4)
    below, above = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([9.0, 2.0, top])
    path = finder.shortest_path(below, above)
    assert path[-1, 2] == pytest.approx(top)
    slant = 1.0 + np.hypot(top, length) + (9.0 - 2.0 - length)
    assert slant * 0.97 < path_length(path.numpy()) < slant * 1.12
    on_stairs = path[(path[:, 0] > 2.3) & (path[:, 0] < 2 + length - 0.3)]
    assert ((on_stairs[:, 2] > 0.1) & (on_stairs[:, 2] < top)).all()


def test_there_is_no_path_beyond_walls():
    finder = pathfinder(room(boxes=[(5.0, 0.0, 5.4, 8.0, 2.6)]))
    assert finder.shortest_path(torch.tensor([8.0, 4.0, 0.0]), torch.tensor([2.0, 4.0, 0.0])) is None
    assert finder.shortest_path(torch.tensor([5.2, 4.0, 0.0]), torch.tensor([2.0, 4.0, 0.0])) is None


# --- maps ----------------------------------------------------------------------------------------------------------


class Drawn:
    """A map of a room of 10 x 8 m with a block, and its pixels by place."""

    def __init__(self):
        finder = pathfinder(room(boxes=[(3.0, 2.0, 5.0, 4.0, 1.0)]))
        self.top, self.canvas = TopDownMap(HostGround.of(finder.ground, 0)), Canvas(640, 480)
        self.top.draw_ground(self.canvas)

    def pixel(self, x: float, y: float) -> np.ndarray:
        column, row = self.canvas.at((x, y))
        return np.asarray(self.canvas.image)[round(row), round(column)].astype(int)

    def like(self, x: float, y: float, color: str) -> bool:
        return np.abs(self.pixel(x, y) - self.canvas.rgb(color)).max() < 30


def test_floor_is_light_and_objects_are_gray():
    drawn = Drawn()
    assert drawn.pixel(7.0, 5.0).min() > 245
    assert tuple(drawn.pixel(4.0, 3.0)) == OBJECTS, "the top of a block is not walkable"
    left, right, bottom, top = drawn.top.bounds
    assert (right - left) / (top - bottom) == pytest.approx(10 / 8, rel=0.05)
    assert drawn.top.image(640, 480).shape[1] >= 300


def test_positions_of_paths_goals_and_agents():
    drawn = Drawn()
    drawn.top.draw_path(drawn.canvas, np.array([(1.0, 6.0, 0.0), (6.0, 6.0, 0.0)]), "blue")
    drawn.top.draw_goal(drawn.canvas, np.array([8.0, 2.0, 0.0]), "green")
    drawn.top.draw_agent(drawn.canvas, np.array([8.0, 6.0, 0.0]), np.pi / 2, "orange")
    assert drawn.like(3.0, 6.0, "blue")
    assert not drawn.like(3.0, 6.3, "blue")
    assert drawn.like(8.0, 2.0, "green")
    pixel = drawn.canvas.smooth / drawn.canvas.scale
    assert drawn.like(8.0, 6.0 + 7 * pixel, "orange"), "it faces up"
    assert not drawn.like(8.0, 6.0 - 7 * pixel, "orange")


def test_colors_of_depth_go_from_light_to_dark():
    brightness = colorize_depth(np.linspace(0, 1, 20)).astype(int).sum(-1)
    assert (np.diff(brightness) < 0).all()


# --- worlds --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """A folder of two rooms with a partial wall."""
    folder = tmp_path_factory.mktemp("scenes")
    for k in range(2):
        write_obj(folder / f"room{k}.obj", room((6.0 + k, 5.0), boxes=[(2.8, 0.0, 3.0, 3.4, 2.6)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture
def make(scenes):
    with opened_worlds(
        scenes=str(scenes / "room0.obj"), up="z", scenes_in_memory=1, goals_per_scene=4, image_size=SIZE
    ) as maker:
        yield lambda world=PointNav, config=PointNavConfig, envs=2, **settings: maker(world, config, envs, **settings)


def act(world, action):
    return world.step(torch.full((world.num_envs, world.config.num_agents), action, dtype=torch.int32))


def test_the_recorder_keeps_the_positions_of_one_episode(make):
    world = make(max_steps=6)
    tracks = world.trajectory_recorder(1)
    going, seen = torch.ones(2, dtype=torch.bool), [world.store.place[0].clone()]
    tracks.follow(going)
    for _ in range(6):
        out = act(world, FORWARD)
        going = going & ~(out.terminated | out.truncated)
        tracks.follow(going)
        seen.append(world.store.place[0].clone())
    canvas = Canvas(*tracks.size(0))
    tracks.draw(canvas, 0, "title")
    np.testing.assert_allclose(np.stack(tracks.episodes[0].positions), torch.stack(seen[:-1]).numpy())
    assert isinstance(tracks, NavTrajectoryRecorder)
    assert tracks.episodes[0].shortest_length == pytest.approx(
        path_length(tracks.episodes[0].shortest_paths[0]), rel=0.05
    )
    pixels = canvas.array().reshape(-1, 3).astype(int)
    for color in (AGENTS[0], "green"):
        assert (np.abs(pixels - canvas.rgb(color)).max(1) < 30).any()


@pytest.mark.parametrize(("image", "agents"), [("depth", 1), ("rgb", 2), ("rgbd", 1), ("none", 1)])
def test_a_picture_shows_the_image_beside_the_map(make, image, agents):
    world = make(image=image, num_agents=agents)
    canvas = Canvas(*world.picture_size)
    TimeLimit(world, 50).picture(canvas, 1)
    array = canvas.array().astype(int)
    seen = array[STRIP + 12 : -20, 20:100]
    map_part = array[STRIP:, array.shape[0] :]
    assert (map_part.min(-1) > 250).mean() > 0.2, "floor"
    if image == "none":
        assert (seen[:, :40].min(-1) > 240).all()
    else:
        assert (seen.min(-1) > 240).mean() < 0.2
    if image == "depth":
        depth = world.outputs.groups["agent"].observation[1, 0, : SIZE * SIZE].float().view(SIZE, SIZE) / 10.0
        middle = colorize_depth(depth.numpy())[SIZE // 2, SIZE // 2]
        side = array.shape[0] - STRIP - 8
        found = array[STRIP + int(side * (SIZE // 2 + 0.5) / SIZE), 8 + int(side * (SIZE // 2 + 0.5) / SIZE)]
        assert np.abs(found - middle).max() < 12


def test_pictures_show_the_path_of_the_current_episode(make):
    world, memory = make(), {}
    record_path(memory, world, 0)
    for action in (LEFT, FORWARD, FORWARD):
        act(world, action)
        draw_env(Canvas(*world.picture_size, memory=memory), world, 0)
        draw_env(Canvas(*world.picture_size, memory=memory), world, 0)
    assert len(memory["episode"].positions) == 4
    assert path_length(np.stack(memory["episode"].positions)[:, 0]) == pytest.approx(
        float(world.store.walked[0, 0]), abs=1e-4
    )
    act(world, STOP)
    assert len(record_path(memory, world, 0).positions) == 1


def test_tasks_without_goals_draw_no_goal(make):
    world = make(Explore, ExploreConfig)
    episode = EpisodePaths(world, 0)
    assert episode.goals is None
    assert episode.shortest_paths == []
    canvas = Canvas(*world.picture_size)
    world.picture(canvas, 0)
    assert not (np.abs(canvas.array().astype(int) - canvas.rgb("green")).max(-1) < 20).any()


def test_a_recording_shows_the_whole_path_in_its_last_picture(make):
    class Turner:
        world = make(envs=1)

        def step(self):
            act(self.world, FORWARD)

    (last,) = frames(Turner(), 30, last=1)
    assert last.shape == (320, 768, 3)
    assert (np.abs(last.astype(int) - Canvas.rgb(AGENTS[0])).max(-1) < 30).sum() > 30


# --- a run ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(scenes, tmp_path_factory):
    config = dict(
        scenes=str(scenes / "room0.obj"),
        eval_scenes=str(scenes),
        up="z",
        scenes_in_memory=1,
        goals_per_scene=4,
        image_size=SIZE,
    )
    return shoal.train(
        "pointnav",
        total_steps=64,
        num_envs=4,
        rollout_steps=8,
        num_minibatches=1,
        epochs=1,
        rnn_size=16,
        eval_episodes=2,
        eval_stochastic=True,
        quiet=True,
        device="cpu",
        compile="off",
        log_every_seconds=0.0,
        run_dir=tmp_path_factory.mktemp("runs") / "run",
        world_config=dict(config, max_steps=40),
    )


def test_eval_scores_scenes_and_draws_maps(run, capsys):
    out = run.path / "found.json"
    assert main(["eval", str(run.path), "--episodes", "12", "--device", "cpu", "--maps", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "2 scenes, lowest success first:" in printed
    for word in ("success ", "spl ", "soft_spl ", "path_length ", "collisions ", "room0.obj", "3 maps: "):
        assert word in printed
    found = json.loads(out.read_text())
    assert sum(scores["success"]["episodes"] for scores in found["scenes"].values()) == 12
    assert {row["scene"] for row in found["episodes"]} == set(found["scenes"])
    low, high = found["reports"]["success"]["interval"]
    assert low <= found["reports"]["success"]["mean"] <= high
    maps = sorted((run.path / "maps").glob("*.png"))
    assert [path.name[:3] for path in maps] == ["000", "001", "002"]
    with Image.open(maps[0]) as image:
        assert image.width >= 300
    assert main(["eval", str(run.path), "--episodes", "12", "--device", "cpu", "--maps", "1"]) == 0
    assert len(list((run.path / "maps").glob("*.png"))) == 1  # earlier maps are removed


def test_maps_do_not_change_the_scores(run, tmp_path):
    from shoal.view.maps import Maps

    maps = Maps(2)
    watched = run.evaluate(6, watch=maps)
    assert watched == run.evaluate(6)
    assert len(maps.save(watched, tmp_path / "m")) == 2


def test_recordings_have_the_view_beside_the_map(run, tmp_path):
    with Image.open(record(run, tmp_path / "a.gif", envs=1, steps=6)) as image:
        assert image.size == (768, 320)
    with Image.open(record(run, tmp_path / "a.png", envs=2, steps=30)) as image:
        assert image.size == (2 * 768, 320)
