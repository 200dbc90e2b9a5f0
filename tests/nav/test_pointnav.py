"""PointNav on scripted paths with known answers."""

import math

import numpy as np
import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.nav.pictures import record_path
from shoal.nav.pointnav import PointNav, PointNavConfig
from shoal.nav.stages import FORWARD, LEFT, RIGHT, STOP
from shoal.render.renderer import Renderer, heading
from tests.nav.rooms import room, write_obj

SIZE = 16


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Eight envs in one room with a partial wall."""
    folder = tmp_path_factory.mktemp("scenes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(folder / "cache"))
        scene = write_obj(folder / "room.obj", room(boxes=[(4.0, 0.0, 4.3, 5.0, 2.6)]))
        config = PointNavConfig(
            scenes=scene, up="z", scenes_in_memory=1, goals_per_scene=4, image_size=SIZE, max_steps=20
        )
        made = PointNav(8, "cpu", config)
        made.reset(3)
    yield made
    made.close()


def put(world, place, yaw=0.0, walked=0.0):
    """Reset, and put every env at a position with goal 0."""
    world.reset(3)
    store = world.store
    store.goal_slot.fill_(0)
    store.goal[:] = world.nav_scenes.fields.goal[0, 0]
    store.place[:] = torch.as_tensor(place, dtype=torch.float32)
    store.yaw.fill_(yaw)
    store.walked.fill_(walked)
    store.distance[:, 0] = geodesic(world)
    store.start_distance[:] = store.distance


def geodesic(world) -> torch.Tensor:
    from shoal.nav.queries import Pathfinder

    goal = world.nav_scenes.fields.goal[0, 0:1]
    return Pathfinder(world.nav_scenes.ground).geodesic(world.store.place[:, 0].clone(), goal)[:, 0]


def step(world, action):
    actions = torch.full((8, 1), action, dtype=torch.int32)
    return world.step(actions)


def test_pictures_of_one_step_episodes_show_their_goals(world):
    world.reset(3)
    memory = {}
    for _ in range(4):
        seen = record_path(memory, world, 0)
        np.testing.assert_allclose(seen.goals[0], world.store.goal[0, 0].numpy(), atol=1e-5)
        assert len(seen.positions) == 1
        step(world, STOP)


def test_actions_move_and_turn(world):
    put(world, (2.0, 4.0, 0.0), yaw=0.5)
    step(world, FORWARD)
    expected = torch.tensor([2.0 + 0.25 * math.cos(0.5), 4.0 + 0.25 * math.sin(0.5), 0.0])
    torch.testing.assert_close(world.store.place[0, 0], expected)
    assert world.store.walked[0, 0] == pytest.approx(0.25, abs=1e-5)
    step(world, LEFT)
    assert world.store.yaw[0, 0] == pytest.approx(0.5 + math.radians(10), abs=1e-5)
    step(world, RIGHT)
    assert world.store.yaw[0, 0] == pytest.approx(0.5, abs=1e-5)


def test_reward_is_the_distance_gained_plus_the_slack_reward(world):
    put(world, (2.0, 4.0, 0.0), yaw=1.0)
    before = geodesic(world)
    step(world, FORWARD)
    after = geodesic(world)
    torch.testing.assert_close(world.store.reward[:, 0], before - after - 0.01, atol=1e-5, rtol=0)


def test_walls_block_and_count_as_collisions(world):
    put(world, (3.85, 2.0, 0.0), yaw=0.0)
    for _ in range(3):
        step(world, FORWARD)
    assert (world.store.place[:, 0, 0] < 3.96).all()
    assert (world.store.collisions == 3).all()


@pytest.mark.parametrize("walked", [0.0, 9.0])
def test_stop_at_the_goal_is_rewarded_by_spl(world, walked):
    goal = world.nav_scenes.fields.goal[0, 0]
    put(world, goal + torch.tensor([0.05, 0.0, 0.0]), walked=walked)
    world.store.start_distance.fill_(6.0)
    out = step(world, STOP)
    assert out.terminated.all()
    share = 6.0 / max(6.0, walked)
    done = world.last_episode().reports
    torch.testing.assert_close(done["success"], torch.ones(8))
    torch.testing.assert_close(done["spl"], torch.full((8,), share))
    torch.testing.assert_close(world.store.reward[:, 0], torch.full((8,), 2.5 * share - 0.01), atol=1e-4, rtol=0)


def test_stop_elsewhere_fails(world):
    goal = world.nav_scenes.fields.goal[0, 0]
    put(world, goal + torch.tensor([0.25, 0.0, 0.0]))
    out = step(world, STOP)
    assert out.terminated.all()
    assert (world.last_episode().reports["success"] == 0).all()
    assert (world.store.reward[:, 0] < 0.1).all()


def test_truncation_at_the_goal_is_no_success(world):
    goal = world.nav_scenes.fields.goal[0, 0]
    put(world, goal)
    for _ in range(20):
        out = step(world, LEFT)
    assert out.truncated.all()
    assert not out.terminated.any()
    assert (world.last_episode().reports["success"] == 0).all()
    assert (world.last_episode().reports["spl"] == 0).all()


def test_observations_hold_the_image_and_the_goal(world):
    put(world, (2.0, 6.0, 0.0), yaw=0.3)
    step(world, LEFT)
    seen = world.outputs.groups["agent"].observation[0, 0].float()
    away = world.store.goal[0, 0] - world.store.place[0, 0]
    angle = math.atan2(away[1], away[0]) - (0.3 + math.radians(10))
    goal = torch.tensor([away[:2].norm(), math.cos(angle), math.sin(angle)])
    torch.testing.assert_close(seen[-3:], goal, atol=0.01, rtol=0)
    assert seen[-8:-3].tolist() == [0, 0, 0, 1, 0], "the previous action, counted from 1"
    renderer = Renderer(world.nav_scenes.pool.memory, 1, (SIZE, SIZE), ["depth"], max_depth=10.0)
    pose = torch.cat([world.store.place[0, 0] + torch.tensor([0, 0, 1.25]), heading(world.store.yaw[0, 0])])[None]
    image = renderer.render(pose)["depth"].reshape(-1)
    torch.testing.assert_close(seen[: SIZE**2], image, atol=0.01, rtol=1e-3)


def test_final_and_next_observations(world):
    put(world, (2.0, 6.0, 0.0), yaw=0.3)
    place = world.store.place[0, 0].clone()
    out = step(world, STOP).groups["agent"]
    renderer = Renderer(world.nav_scenes.pool.memory, 1, (SIZE, SIZE), ["depth"], max_depth=10.0)
    for at, yaw, seen in (
        (place, torch.tensor(0.3), out.final_observation),
        (world.store.place[0, 0], world.store.yaw[0, 0], out.observation),
    ):
        pose = torch.cat([at + torch.tensor([0, 0, 1.25]), heading(yaw)])[None]
        image = renderer.render(pose)["depth"].reshape(-1)
        torch.testing.assert_close(seen[0, 0, : SIZE**2].float(), image, atol=0.01, rtol=1e-3)


def test_starts_obey_the_rules(world):
    """Starts are 1 to 30 m from the goal, and straight paths are rarer than by chance."""
    starts, ratios = [], []
    for _ in range(40):
        step(world, STOP)
        straight = (world.store.goal - world.store.place).norm(dim=2)
        starts += world.store.start_distance.flatten().tolist()
        ratios += (world.store.start_distance / straight).flatten().tolist()
        assert torch.equal(world.store.distance, world.store.start_distance)
    assert min(starts) >= 1.0
    assert max(starts) <= 30.0
    assert np.mean(np.array(ratios) > 1.1) > 0.3


def test_scenes_without_floor_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    wall = write_obj(tmp_path / "wall.obj", room()[:2])
    world = PointNav(
        2, "cpu", PointNavConfig(scenes=wall, up="z", scenes_in_memory=1, goals_per_scene=2, image_size=SIZE)
    )
    with pytest.raises(ShoalError, match=r"wall\.obj has no walkable floor"):
        world.reset(0)
    world.close()


def test_a_blind_agent_observes_no_image():
    config = PointNavConfig(image="none")
    (group,) = PointNav.groups_of(config)
    assert group.observation.shape == (8,)
