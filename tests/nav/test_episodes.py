"""Episode files: Habitat's axes, round trips, refusal of invalid files, and NavScenes with episodes."""

import gzip
import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import shoal.nav.episode_files
from shoal.cli import main
from shoal.core.errors import ShoalError
from shoal.nav.episode_files import read_episodes, write_episodes
from shoal.nav.episode_sampling import SamplingRules, sample_episodes
from shoal.nav.episodes import (
    Episodes,
    check_episodes,
    check_scenes,
    from_habitat,
    rotation_of,
    scene_name,
    to_habitat,
    yaw_of,
)
from shoal.nav.nav_scenes import NavScenes
from shoal.scene.load import load_scene
from tests.nav.rooms import pathfinder, room, write_obj

WALL = (4.0, 0.0, 4.3, 5.0, 2.6)
ACROSS = (4.0, 0.0, 4.3, 8.0, 2.6)

GOOD = dict(
    episode_id="7",
    scene_id="gibson/Adrian.glb",
    start_position=[1.0, 0.0, -3.0],
    start_rotation=[0.0, 0.0, 0.0, 1.0],
    goals=[dict(position=[2.0, 0.0, -4.0], radius=0.2)],
    info=dict(geodesic_distance=1.5),
)


def made(starts, goals, scene="room.obj", yaws=0.0) -> Episodes:
    starts, goals = np.array(starts, np.float32), np.array(goals, np.float32)
    count = len(starts)
    return Episodes(
        scene,
        np.array([f"e{i}" for i in range(count)]),
        starts,
        np.full(count, yaws, np.float32),
        goals,
        np.full(count, 0.2, np.float32),
        np.full(count, np.nan, np.float32),
        "val.json.gz",
    )


def save(path, entries, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps({"episodes": entries, **more}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# --- axes ------------------------------------------------------------------------------------------------------------

HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("rotation", "yaw"),
    [
        ((0, 0, 0, 1), math.pi / 2),  # along Habitat's -z, which is y here
        ((0, 0, 0, -1), math.pi / 2),  # the same turn
        ((0, HALF, 0, HALF), math.pi),  # a quarter to the left: along -x
        ((0, -HALF, 0, HALF), 0.0),  # to the right: along x
        ((0, 1, 0, 0), -math.pi / 2),  # about: along z, which is -y here
        ((0, math.sin(0.15), 0, math.cos(0.15)), math.pi / 2 + 0.3),
    ],
)
def test_yaws_of_given_quaternions(rotation, yaw):
    found = yaw_of(np.array([rotation], float))[0]
    assert math.remainder(found - yaw, 2 * math.pi) == pytest.approx(0, abs=1e-12)
    back = rotation_of(np.array([yaw]))[0]
    assert abs(np.dot(back, rotation)) == pytest.approx(1, abs=1e-12), "a quaternion and its negative are one turn"


def test_points_rotate_as_meshes_do(tmp_path):
    places = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, -6.0], [-7.0, 0.5, 8.0]], np.float32)
    np.testing.assert_array_equal(from_habitat(places)[0], [1, -3, 2])
    np.testing.assert_array_equal(to_habitat(from_habitat(places)), places)
    path = write_obj(tmp_path / "a.obj", places[None])
    np.testing.assert_array_equal(load_scene(path, up="y").corners[0], from_habitat(places))


def test_forward_is_the_same_direction_as_in_habitat():
    """Habitat's forward, rotated by the quaternion and converted to our axes, is (cos yaw, sin yaw)."""
    for yaw in np.linspace(-3, 3, 13):
        x, y, z, w = rotation_of(np.array([yaw]))[0]
        assert x == z == 0
        angle = 2 * math.atan2(y, w)
        ahead = np.array([[-math.sin(angle), 0.0, -math.cos(angle)]])  # -z, turned about y
        np.testing.assert_allclose(from_habitat(ahead)[0], [math.cos(yaw), math.sin(yaw), 0], atol=1e-12)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("data/scene_datasets/gibson/Adrian.glb", "Adrian"),
        ("hm3d/val/00800-TEEsavR23oF/TEEsavR23oF.basis.glb", "TEEsavR23oF"),
        ("C:\\scans\\my.room.PLY", "my.room"),
        ("house:7@0.5", "house-7@0.5"),
    ],
)
def test_names_of_scenes(source, name):
    assert scene_name(source) == name


# --- files -----------------------------------------------------------------------------------------------------------

meters = st.floats(-1e4, 1e4, width=32)


@st.composite
def any_episodes(draw):
    count = draw(st.integers(1, 5))
    lengths = st.floats(0, 1e4, width=32) | st.just(math.nan)
    return Episodes(
        draw(st.sampled_from(["room.obj", "house:7@0", "a/b.glb"])),
        np.array(draw(st.lists(st.text(max_size=5), min_size=count, max_size=count))),
        draw(arrays(np.float32, (count, 3), elements=meters)),
        draw(arrays(np.float32, count, elements=st.floats(-3.125, 3.125, width=32))),
        draw(arrays(np.float32, (count, 3), elements=meters)),
        draw(arrays(np.float32, count, elements=st.floats(0, 10, width=32))),
        draw(arrays(np.float32, count, elements=lengths)),
    )


@settings(max_examples=40, deadline=None)
@given(episodes=any_episodes())
def test_written_episodes_are_read_back(tmp_path_factory, episodes):
    folder = tmp_path_factory.mktemp("set")
    (file,) = write_episodes(folder, "val", [episodes])
    first = file.read_bytes()
    assert write_episodes(folder, "val", [episodes]) == [file]
    assert file.read_bytes() == first
    for path in (folder / "val", folder / "val" / "val.json.gz", folder / "val" / "content", file):
        ((name, read),) = read_episodes(path).items()
        assert name == episodes.name == file.name.removesuffix(".json.gz")
        assert read.scene == episodes.scene
        assert read.ids.tolist() == episodes.ids.tolist()
        for field in ("starts", "goals", "radius", "distance"):
            np.testing.assert_array_equal(getattr(read, field), getattr(episodes, field))
        np.testing.assert_allclose(read.yaws, episodes.yaws, atol=1e-6)


def test_layouts_of_habitat_datasets(tmp_path):
    other = GOOD | dict(scene_id="gibson/Other.glb", goals=[dict(position=[2, 0, -4], radius=None)], info=None)
    extra = GOOD | dict(episode_id=8, shortest_paths=None, start_room=None)
    one = save(tmp_path / "one.json.gz", [GOOD, other, extra])
    plain = save(tmp_path / "one.json", [GOOD, other, extra])
    alone = save(tmp_path / "mini" / "mini.json.gz", [GOOD, other, extra])
    save(tmp_path / "val" / "val.json.gz", [], content_scenes_path="{data_path}/content/{scene}.json.gz")
    save(tmp_path / "val" / "content" / "Adrian.json.gz", [GOOD, extra])
    save(tmp_path / "val" / "content" / "Other.json.gz", [other])
    for path in (one, plain, alone, alone.parent, tmp_path / "val", tmp_path / "val" / "val.json.gz"):
        found = read_episodes(path)
        assert list(found) == ["Adrian", "Other"]
        assert found["Adrian"].ids.tolist() == ["7", "8"]
        np.testing.assert_array_equal(found["Adrian"].starts[0], [1, 3, 0])
        np.testing.assert_array_equal(found["Adrian"].goals[0], [2, 4, 0])
        assert found["Adrian"].yaws[0] == pytest.approx(math.pi / 2)
        assert found["Adrian"].distance.tolist() == [1.5, 1.5]
        assert found["Other"].radius[0] == np.float32(0.2)
        assert math.isnan(found["Other"].distance[0])
    one.unlink()
    plain.unlink()
    with pytest.raises(ShoalError, match=r"name one of its splits: mini, val"):
        read_episodes(tmp_path)


def test_only_requested_scenes_are_read(tmp_path):
    save(tmp_path / "val" / "content" / "Adrian.json.gz", [GOOD])
    (tmp_path / "val" / "content" / "Broken.json.gz").write_bytes(b"not gzip")
    assert list(read_episodes(tmp_path / "val", ["scenes/Adrian.glb"])) == ["Adrian"]
    with pytest.raises(ShoalError, match="Broken"):
        read_episodes(tmp_path / "val")


def test_episodes_of_another_scene_are_refused_by_name(tmp_path):
    file = save(tmp_path / "Adrian.json.gz", [GOOD])
    with pytest.raises(ShoalError, match=r"Adrian\.json\.gz has no episodes of b/Bert\.glb; it has those of Adrian"):
        read_episodes(file, ["b/Bert.glb"])
    save(tmp_path / "val" / "content" / "Bert.json.gz", [GOOD])
    with pytest.raises(ShoalError, match=r"no episodes of b/Bert\.glb; it has those of Adrian"):
        read_episodes(tmp_path / "val", ["b/Bert.glb"])
    with pytest.raises(ShoalError, match=r"no episodes of Bert\.glb; it has those of Adrian"):
        read_episodes(file, ["Adrian.glb", "Bert.glb"])
    with pytest.raises(ShoalError, match=r"a/Adrian\.glb and b/Adrian\.glb are both named Adrian"):
        read_episodes(file, ["a/Adrian.glb", "b/Adrian.glb"])
    with pytest.raises(ShoalError, match=r"no episodes of house:1, .*house:5 and 4 more; it has those of Adrian\."):
        check_scenes(read_episodes(file), [f"house:{k}" for k in range(1, 10)])


def without(field):
    return {k: v for k, v in GOOD.items() if k != field}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (without("episode_id"), "episode number 0 has no episode_id"),
        (without("scene_id"), "episode 7 has no scene_id"),
        (without("start_position"), "episode 7 has no start_position"),
        (without("start_rotation"), "episode 7 has no start_rotation"),
        (without("goals"), "episode 7 has no goals"),
        (GOOD | dict(goals=[]), "a list of one goal, not 0"),
        (GOOD | dict(goals=[{}, {}]), "a list of one goal, not 2"),
        (GOOD | dict(goals=[3]), r"goals\[0\] is 3, not an object"),
        (GOOD | dict(goals=[{}]), r"episode 7 has no goals\[0\]\.position"),
        (GOOD | dict(goals=[dict(position=[1, 2])]), r"goals\[0\]\.position is \[1, 2\], not 3 finite numbers"),
        (GOOD | dict(goals=[dict(position=[1, 2, 3], radius=-1)]), r"radius is -1, not a length"),
        (GOOD | dict(start_position=[1, math.nan, 3]), r"start_position is \[1, nan, 3\]"),
        (GOOD | dict(start_position=[1, math.inf, 3]), "start_position"),
        (GOOD | dict(start_position=[1, 10**400, 3]), "start_position"),
        (GOOD | dict(start_position=[1, 1e300, 3]), "start_position"),
        (GOOD | dict(start_position=["1", 2, 3]), "start_position"),
        (GOOD | dict(start_position=[True, 2, 3]), "start_position"),
        (GOOD | dict(start_position="123"), "start_position is '123'"),
        (GOOD | dict(start_rotation=[0, 0, 1]), "start_rotation is .*, not 4 finite numbers"),
        (GOOD | dict(start_rotation=[0, 0, 0, 0]), "not a unit quaternion"),
        (GOOD | dict(start_rotation=[0, math.nan, 0, 1]), "start_rotation"),
        (GOOD | dict(start_rotation=[HALF, 0, 0, HALF]), "is tilted"),
        (GOOD | dict(info=dict(geodesic_distance=math.nan)), r"info\.geodesic_distance is nan"),
        (GOOD | dict(info=[1]), "info is"),
        (GOOD | dict(scene_id=""), "scene_id is ''"),
        (GOOD | dict(scene_id=5), "scene_id is 5"),
        ([], "episode number 0 is "),
        (None, "episode number 0 is None, not an object"),
    ],
)
def test_invalid_episodes_are_refused(tmp_path, entry, words):
    file = save(tmp_path / "bad.json.gz", [entry])
    with pytest.raises(ShoalError, match=words) as caught:
        read_episodes(file)
    assert "bad.json.gz" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json.gz", b"", "is empty"),
        ("a.json.gz", b'{"episodes": []}', "is not a gzip file"),
        ("a.json.gz", gzip.compress(b'{"episodes": []}'), "holds no episodes"),
        ("a.json.gz", gzip.compress(b"x" * 1000)[:20], "damaged"),
        ("a.json.gz", gzip.compress(b"x" * 1000)[:12] + b"\xff" * 30, "damaged"),
        ("a.json.gz", gzip.compress(b"hello"), "not JSON"),
        ("a.json", b"\xff\xfe\xfd", "not JSON"),
        ("a.json", b"[" * 100_000, "not JSON"),
        ("a.json", b"[]", "no list of episodes"),
        ("a.json", b'{"episodes": {}}', "no list of episodes"),
        ("a.json", b"{}", "no list of episodes"),
    ],
    ids=[
        "empty",
        "not_gzip",
        "no_episodes",
        "cut_off",
        "damaged",
        "gzip_of_no_json",
        "no_text",
        "too_deep",
        "a_list",
        "an_object",
        "no_list",
    ],
)
def test_invalid_files_are_refused(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ShoalError, match=words) as caught:
        read_episodes(tmp_path / name)
    assert name in str(caught.value)


def test_paths_without_episodes_are_refused(tmp_path):
    with pytest.raises(ShoalError, match="There is no file or folder"):
        read_episodes(tmp_path / "none")
    with pytest.raises(ShoalError, match="holds no episodes"):
        read_episodes(tmp_path)
    with pytest.raises(ShoalError):
        read_episodes("a\0b")
    with pytest.raises(ShoalError, match="plain name"):
        write_episodes(tmp_path, "../val", [])


# --- against a scene -------------------------------------------------------------------------------------------------


def test_starts_and_goals_are_moved_to_the_floor():
    finder = pathfinder(room(boxes=[WALL]))
    # A little above the floor; within the wall, which is hollow; where one can stand.
    given = made([[1.0, 1.0, 0.15], [4.15, 2.0, 0.0], [2.0, 6.0, 0.0]], [[8.0, 1.0, 0.1], [2.0, 2.0, 0.0], [9, 7, 0]])
    found = check_episodes(finder, given)
    assert finder.is_navigable(torch.from_numpy(np.concatenate([found.starts, found.goals]))).all()
    np.testing.assert_allclose(found.starts[0], [1, 1, 0], atol=1e-5)
    np.testing.assert_allclose(found.goals[2], [9, 7, 0], atol=1e-5)
    assert np.linalg.norm(found.starts[1] - given.starts[1]) < 0.4
    assert found.ids.tolist() == given.ids.tolist()


@pytest.mark.parametrize(
    ("start", "goal", "words"),
    [
        (
            (12.0, 4.0, 0.0),
            (2.0, 2.0, 0.0),
            r"episode e1 of room\.obj .* start_position \(12\.00, 0\.00, -4\.00\) is 2\.\d",
        ),
        (
            (2.0, 2.0, 0.0),
            (2.0, 4.0, 1.5),
            r"episode e1 of room\.obj .* its goal \(2\.00, 1\.50, -4\.00\) is 1\.50 m from",
        ),
        ((2.0, 2.0, 0.0), (3e38, 4.0, 0.0), "episode e1 .* goal"),
        ((2.0, 2.0, 0.0), (8.0, 2.0, 0.0), r"val\.json\.gz: episode e1 of room\.obj .* no path connects"),
    ],
)
def test_unplayable_episodes_are_refused(start, goal, words):
    finder = pathfinder(room(boxes=[ACROSS]))
    with pytest.raises(ShoalError, match=words):
        check_episodes(finder, made([[1.0, 1.0, 0.0], start], [[2.0, 7.0, 0.0], goal]))


def test_sampled_episodes_obey_the_rules(tmp_path):
    finder = pathfinder(room(boxes=[WALL]))
    drawn = sample_episodes(finder, 70, 3)
    assert len(drawn) == len(set(drawn.ids.tolist())) == 70
    assert drawn.distance.min() >= 1.0
    assert drawn.distance.max() <= 30.0
    far = finder.geodesic(torch.from_numpy(drawn.starts), torch.from_numpy(drawn.goals)).diagonal().numpy()
    np.testing.assert_array_equal(far, drawn.distance)
    straight = np.linalg.norm(drawn.starts - drawn.goals, axis=1)
    assert np.mean(drawn.distance / straight > 1.1) > 0.5, "by chance it would be a fifth"
    assert -math.pi <= drawn.yaws.min() < -2.5 < 2.5 < drawn.yaws.max() <= math.pi
    few, again, other = (sample_episodes(finder, 5, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(few.starts, again.starts)
    assert not np.array_equal(few.starts, other.starts)
    checked = check_episodes(finder, drawn)
    np.testing.assert_allclose(checked.starts, drawn.starts, atol=1e-6)
    far = sample_episodes(finder, 10, 0, SamplingRules(min_distance=9.0, max_distance=12.0))
    assert far.distance.min() >= 9.0
    with pytest.raises(ShoalError, match=r"Only 0 of 5 episodes were found in test: paths of 40 to 50 m"):
        sample_episodes(finder, 5, 0, SamplingRules(min_distance=40.0, max_distance=50.0))


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def test_the_command_writes_readable_episodes(cache, tmp_path, capsys):
    mesh = write_obj(tmp_path / "room.obj", room(boxes=[WALL]))
    words = ["scene", "episodes", mesh, "house:7@0", "--up", "z", "--count", "5", "--out", str(tmp_path / "set")]
    assert main([*words, "--device", "cpu"]) == 0
    assert "5 episodes of house:7@0" in capsys.readouterr().out
    found = read_episodes(tmp_path / "set" / "val", [mesh, "house:7@0"])
    assert sorted(found) == ["house-7@0", "room"]
    assert found["room"].scene == mesh
    check_episodes(pathfinder(room(boxes=[WALL])), found["room"])
    raw = json.loads(gzip.decompress((tmp_path / "set/val/content/room.json.gz").read_bytes()))["episodes"][0]
    assert raw.keys() == {"episode_id", "scene_id", "start_position", "start_rotation", "goals", "info"}
    assert -8 <= raw["start_position"][2] <= 0, "y of the room is -z of Habitat"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["house:7@0", "--count", "0"], "number of episodes must be at least 1"),
        (["house:7@0", "--seed", "-1"], "the seed at least 0"),
        (["house:7@0", "--split", "a/b"], "plain name"),
        (["none.glb"], "There is no file none.glb"),
        (["hous:7"], "did you mean"),
        (["{wall}", "--up", "z"], "wall.obj has no walkable floor"),
        (["{wall}", "other/wall.glb"], "are both named wall"),
        (["{room}", "--up", "z", "--count", "1", "--out", "{room}"], "cannot be written"),
    ],
)
def test_bad_arguments_exit_with_2(cache, tmp_path, capsys, words, reason):
    names = dict(wall=write_obj(tmp_path / "wall.obj", room()[:2]), room=write_obj(tmp_path / "room.obj", room()))
    out = ["--out", str(tmp_path / "set")] if "--out" not in words else []
    assert main(["scene", "episodes", "--device", "cpu", *(word.format(**names) for word in words), *out]) == 2
    printed = capsys.readouterr().err
    assert reason in printed
    assert printed.count("\n") == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


# --- scenes with episodes --------------------------------------------------------------------------------------------


def load(sources, episodes, goals=4, seed=0) -> NavScenes:
    sources = [sources] if isinstance(sources, str) else sources
    scenes = NavScenes(sources, 4, 1, goals, torch.device("cpu"), seed, up="z", episodes=episodes)
    scenes.close()
    return scenes


def test_goals_and_starts_are_those_of_the_episodes(cache, tmp_path):
    mesh = write_obj(tmp_path / "room.obj", room(boxes=[WALL]))
    given = made([[1.0, 1.0, 0.1], [2.0, 6.0, 0.0]], [[8.0, 1.0, 0.0], [9.0, 7.0, 0.0]], yaws=0.7)
    played = load(mesh, {"room": given})
    row = played.pool.active[0]
    assert played.episode_count[row] == 2
    expected = torch.tensor([[1.0, 1.0, 0.0, 0.7], [2.0, 6.0, 0.0, 0.7]])
    torch.testing.assert_close(played.episode_start[row, :2], expected, atol=1e-5, rtol=0)
    goals = torch.from_numpy(given.goals)
    torch.testing.assert_close(played.fields.goal[row], goals[[0, 1, 0, 1]], atol=1e-5, rtol=0)
    tables = played.tables()
    assert tables["episode_count"].tensor is played.episode_count
    assert tables["episode_start"].tensor is played.episode_start
    drawn = load(mesh, None)
    assert (drawn.episode_count == 0).all()


def test_a_subset_of_many_episodes_is_loaded(cache, tmp_path):
    mesh = write_obj(tmp_path / "room.obj", room())
    xs = np.linspace(1, 9, 30)
    given = made(np.c_[xs, 0 * xs + 1, 0 * xs], np.c_[xs, 0 * xs + 7, 0 * xs])
    seen = []
    for seed in (0, 0, 1):
        played = load(mesh, {"room": given}, goals=8, seed=seed)
        row = played.pool.active[0]
        assert played.episode_count[row] == 8
        start, goal = played.episode_start[row], played.fields.goal[row]
        torch.testing.assert_close(start[:, 0], goal[:, 0])
        assert len(set(start[:, 0].tolist())) == 8
        seen.append(start)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_scenes_with_unplayable_episodes_are_refused(cache, tmp_path):
    one = write_obj(tmp_path / "room.obj", room(boxes=[ACROSS]))
    two = write_obj(tmp_path / "other.obj", room())
    good = made([[1.0, 1.0, 0.0]], [[2.0, 7.0, 0.0]])
    with pytest.raises(ShoalError, match=r"no episodes of .*other\.obj; it has those of room"):
        load([one, two], {"room": good})
    with pytest.raises(ShoalError, match=r"no episodes of .*room\.obj; it has those of Adrian"):
        load(one, {"Adrian": good})
    with pytest.raises(ShoalError, match=r"episode e0 of room\.obj .*no path connects"):
        load(one, {"room": made([[1.0, 1.0, 0.0]], [[8.0, 7.0, 0.0]])})


def test_too_long_paths_are_refused(cache, tmp_path):
    """A zigzag of walls: connected, but more than 65 m."""
    walls = [
        (2.0 * k, *((0.0, 2.0 * k + 0.2, 8.6) if k % 2 else (1.4, 2.0 * k + 0.2, 10.0)), 2.6) for k in range(1, 10)
    ]
    boxes = [(x0, y0, x1, y1, top) for x0, y0, x1, y1, top in walls]
    mesh = write_obj(tmp_path / "zigzag.obj", room((20.0, 10.0), boxes=boxes))
    near = made([[1.0, 1.0, 0.0]], [[3.0, 9.0, 0.0]], "zigzag.obj")
    assert load(mesh, {"zigzag": near}).episode_count.sum() == 1
    with pytest.raises(ShoalError, match=r"episode e0 of zigzag\.obj .*longer than the maximum of 65 m"):
        load(mesh, {"zigzag": made([[1.0, 1.0, 0.0]], [[19.0, 9.0, 0.0]], "zigzag.obj")})


def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shoal.nav.episode_files, "MAX_TEXT_SIZE", 10**6)
    file = tmp_path / "a.json.gz"
    file.write_bytes(gzip.compress(b" " * 10**7))
    with pytest.raises(ShoalError, match=r"a\.json\.gz holds more than 1,000,000 bytes once decompressed"):
        read_episodes(file)
