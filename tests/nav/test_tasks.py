"""Flee, Explore, images of colors, and several agents in one env."""

import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
import warp as wp

import shoal
from shoal.core.errors import ShoalError
from shoal.core.wrappers import ActionRepeat, TimeLimit
from shoal.nav.config import NavConfig, scene_sources, unseen_scenes
from shoal.nav.episode_files import write_episodes
from shoal.nav.episode_sampling import sample_episodes
from shoal.nav.explore import Explore, ExploreConfig
from shoal.nav.flee import Flee
from shoal.nav.pointnav import PointNav, PointNavConfig
from shoal.nav.queries import Pathfinder
from shoal.nav.stages import FORWARD, LEFT, STOP, enter_scene, sample_start, store_start
from shoal.render.renderer import Renderer, heading
from shoal.runs.jobs import make_job
from shoal.scene.pack import pack_scene
from shoal.tools.check import check_world
from shoal.training.build import make_world
from shoal.training.trainer import Trainer
from tests.nav.rooms import opened_worlds, room, write_obj
from tests.scene.shapes import make_scene

SIZE = 16


@wp.func
def enter_elsewhere(
    env: int,
    num_agents: int,
    row: wp.array2d(dtype=int),
    present: wp.array2d(dtype=wp.bool),
    active_rows: wp.array(dtype=int),
):
    """A replacement of `enter_scene` that does not reset the path."""
    for k in range(num_agents):
        row[env, k] = active_rows[0]
        present[env, k] = True


@wp.func
def end_early(env: int, head_start: wp.array(dtype=int)):
    head_start[env] = 15


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Opens worlds with one room that has a partial wall."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    scene = write_obj(tmp_path / "room.obj", room(boxes=[(4.0, 0.0, 4.3, 5.0, 2.6)]))
    with opened_worlds(
        scenes=scene, up="z", scenes_in_memory=1, goals_per_scene=8, image_size=SIZE, max_steps=30
    ) as maker:
        yield lambda world, config, envs=4, **settings: maker(world, config, envs, **settings)


def act(world, *actions):
    """Step all envs with the same actions, one per agent, numbered as in PointNav."""
    first = 0 if world.has_stop else 1
    row = torch.tensor(actions, dtype=torch.int32) - first
    return world.step(row.expand(world.num_envs, -1).contiguous())


def test_flee_rewards_the_distance_from_the_start(make):
    world = make(Flee, NavConfig)
    assert torch.equal(world.store.place, world.store.start)
    finder = Pathfinder(world.nav_scenes.ground)
    total = torch.zeros(4)
    for k in range(30):
        before = world.store.start.clone()
        out = act(world, FORWARD if k % 3 else LEFT)
        total += world.store.reward[:, 0]
        if k < 29:
            way = torch.stack([finder.geodesic(world.store.place[e], before[e])[0, 0] for e in range(4)])
            torch.testing.assert_close(total, way, atol=1e-4, rtol=0)
            last = way
    assert out.truncated.all()
    fled = world.last_episode().reports["fled"]
    torch.testing.assert_close(fled, total, atol=1e-4, rtol=0)
    assert (fled - last).abs().max() <= 0.26


def test_explore_rewards_each_cell_once(make):
    """A NumPy reference: cells of 1 m in the frame of the start, counted as a set."""
    world = make(Explore, ExploreConfig)
    start, yaw = world.store.start[:, 0].clone(), world.store.start_yaw[:, 0].clone()
    seen = [{(0, 0)} for _ in range(4)]
    rng = torch.Generator().manual_seed(1)
    for _ in range(29):
        actions = torch.randint(3, (4, 1), generator=rng, dtype=torch.int32) * 0
        actions[torch.rand(4, 1, generator=rng) < 0.3] = 1
        world.step(actions)
        away = world.store.place[:, 0] - start
        for e in range(4):
            c, s = math.cos(yaw[e]), math.sin(yaw[e])
            ahead, left = c * away[e, 0] + s * away[e, 1], c * away[e, 1] - s * away[e, 0]
            cell = (math.floor(ahead + 0.5), math.floor(left + 0.5))
            assert world.store.reward[e, 0] == (0.0 if cell in seen[e] else 0.25)
            seen[e].add(cell)
    act(world, LEFT)
    assert world.last_episode().reports["explored"].tolist() == [len(cells) for cells in seen]
    assert max(len(cells) for cells in seen) > 3
    assert (world.store.cells == 1).all(), "a new episode has visited only its start"


@pytest.mark.parametrize("image", ["rgb", "rgbd"])
def test_images_equal_the_renderers(make, image):
    world = make(PointNav, PointNavConfig, image=image)
    act(world, LEFT)
    seen = world.outputs.groups["agent"].observation[0, 0].float()
    renderer = Renderer(
        world.nav_scenes.pool.memory, 1, (SIZE, SIZE), {"depth": torch.float32, "rgb": torch.float32}, max_depth=10.0
    )
    pose = torch.cat([world.store.place[0, 0] + torch.tensor([0, 0, 1.25]), heading(world.store.yaw[0, 0])])[None]
    images = renderer.render(pose)
    wanted = [images["depth"].reshape(-1)] if image == "rgbd" else []
    wanted = torch.cat([*wanted, images["rgb"].reshape(-1)])
    torch.testing.assert_close(seen[: len(wanted)], wanted, atol=0.01, rtol=1e-3)
    assert float(images["rgb"].max()) <= 1.0
    space = world.groups[0].observation
    assert space.kind("rgb") == "color"


def test_agents_see_each_other(make):
    """An agent sees another one 1 m away, until that one stops."""
    world = make(PointNav, PointNavConfig, num_agents=2)
    world.store.place[:] = torch.tensor([[1.0, 6.0, 0.0], [2.0, 6.0, 0.0]])
    world.store.yaw[:] = torch.tensor([-math.radians(10), 0.0])
    act(world, LEFT, LEFT)
    seen = world.outputs.groups["agent"].observation[:, :, : SIZE**2].float().view(4, 2, SIZE, SIZE)
    middle = seen[:, 0, SIZE // 2, SIZE // 2 - 1 : SIZE // 2 + 1]
    torch.testing.assert_close(middle.amin(1), torch.full((4,), 0.92), atol=0.03, rtol=0)
    assert (seen[:, 1, SIZE // 2, SIZE // 2] > 3.0).all()
    world.store.yaw[:, 0] = -math.radians(10)
    out = act(world, LEFT, STOP)
    assert not out.terminated.any()
    assert out.groups["agent"].alive.tolist() == [[True, False]] * 4
    seen = out.groups["agent"].observation[:, 0, : SIZE**2].float().view(4, SIZE, SIZE)
    assert (seen[:, SIZE // 2, SIZE // 2] > 5.0).all()
    assert act(world, STOP, FORWARD).terminated.all()


def test_agents_block_each_other(make):
    world = make(PointNav, PointNavConfig, num_agents=2)
    world.store.place[:] = torch.tensor([[1.0, 6.0, 0.0], [2.1, 6.0, 0.0]])
    world.store.yaw[:] = torch.tensor([0.0, math.pi])
    for _ in range(6):
        act(world, FORWARD, FORWARD)
    gap = (world.store.place[:, 0] - world.store.place[:, 1]).norm(dim=1)
    assert (gap >= 0.2).all()
    assert (gap < 0.5).all()
    assert (world.store.collisions > 1).all()


def test_agents_start_apart_with_different_goals(make):
    world = make(PointNav, PointNavConfig, num_agents=3, envs=16)
    for _ in range(10):
        gaps = torch.cdist(world.store.place, world.store.place) + 10 * torch.eye(3)
        assert gaps.min() >= 0.5
        assert (world.store.row == 0).all()
        act(world, STOP, STOP, STOP)
    assert (world.store.goal_slot[:, 0] != world.store.goal_slot[:, 1]).any()


def test_agents_get_no_reward_after_stop(make):
    """One of two agents stops at its goal: the success rate is 0.5."""
    world = make(PointNav, PointNavConfig, num_agents=2)
    world.store.place[:, 0] = world.store.goal[:, 0]
    world.store.distance[:, 0] = 0.0
    act(world, STOP, LEFT)
    assert (world.store.reward[:, 0] > 2.0).all()
    for _ in range(3):
        act(world, FORWARD, LEFT)
        assert (world.store.reward[:, 0] == 0).all()
    assert (world.store.success == 0.5).all()


def test_worlds_play_the_episodes_of_a_file(make, tmp_path):
    """At random in training, by env number in evaluations."""
    world = make(PointNav, PointNavConfig)
    episodes = replace(sample_episodes(Pathfinder(world.nav_scenes.ground), 5, seed=1), scene=world.config.scenes)
    write_episodes(tmp_path, "val", [episodes])
    files = dict(episode_files=str(tmp_path / "val"), eval_episode_files=str(tmp_path / "val"))
    places = torch.from_numpy(episodes.starts)
    for evaluating in (False, True):
        world = make(PointNav, PointNavConfig, envs=10, evaluating=evaluating, **files)
        which = torch.cdist(world.store.place[:, 0], places).argmin(1)
        torch.testing.assert_close(world.store.place[:, 0], places[which], atol=0.02, rtol=0)
        torch.testing.assert_close(world.store.goal[:, 0], torch.from_numpy(episodes.goals)[which], atol=0.02, rtol=0)
        torch.testing.assert_close(world.store.yaw[:, 0], torch.from_numpy(episodes.yaws)[which], atol=1e-3, rtol=0)
        if evaluating:
            assert which.tolist() == [0, 1, 2, 3, 4] * 2
            assert world.duplicate_episodes().tolist() == [False] * 5 + [True] * 5

    # `goals_per_scene` does not limit evaluations; agents of an env never share an episode.
    world = make(PointNav, PointNavConfig, envs=5, evaluating=True, **(files | dict(goals_per_scene=2)))
    assert len(world.store.place[:, 0].unique(dim=0)) == 5
    world = make(PointNav, PointNavConfig, envs=64, num_agents=3, **files)
    assert (world.store.goal_slot.sort(1).values.diff(dim=1) > 0).all()
    with pytest.raises(ShoalError, match="too few for 6 agents"):
        make(PointNav, PointNavConfig, envs=2, num_agents=6, **files)

    # Tasks without goals start where the episodes do.
    world = make(Flee, NavConfig, envs=20, **files)
    assert torch.cdist(world.store.place[:, 0], places).min(1).values.max() < 0.02


def test_goals_in_closed_rooms_are_reachable(tmp_path, monkeypatch):
    """Twelve rooms without doors: a start sampled anywhere would mostly be in another room."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    rooms = [room((3.8, 3.8)) + np.array([4.0 * i, 4.0 * j, 0.0]) for i in range(4) for j in range(3)]
    scene = write_obj(tmp_path / "rooms.obj", np.concatenate(rooms))
    config = PointNavConfig(
        scenes=scene, up="z", scenes_in_memory=1, goals_per_scene=32, image="none", scene_swap_interval=0
    )
    with closing(PointNav(2048, "cpu", config)) as world:
        world.reset(0)
        assert (world.store.start_distance >= 1.0).all()
        assert (world.store.start_distance < 6.0).all()
    with pytest.raises(ShoalError, match="no path of 10 to 30 m"):
        PointNav(4, "cpu", replace(config, min_distance=10.0)).reset(0)


def test_a_mesh_in_the_wrong_unit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    scene = write_obj(tmp_path / "centimeters.obj", 1000 * room())
    with pytest.raises(ShoalError, match=r"centimeters\.obj is 10000 x 8000 m.*--scale"):
        PointNav(4, "cpu", PointNavConfig(scenes=scene, up="z", scenes_in_memory=1, image="none")).reset(0)


def test_invalid_settings_are_refused():
    bad = dict(
        cell_size=0.2,
        goals_per_scene=0,
        agent_radius=-1.0,
        agent_height=0.0,
        forward_step_size=-1.0,
        scene_swap_interval=-1,
        num_eval_scenes=0,
        min_distance=40.0,
    )
    for name, value in bad.items():
        with pytest.raises(ShoalError, match=f"--{name.replace('_', '-')} must be"):
            PointNavConfig(**{name: value})
    with pytest.raises(ShoalError, match="--forward-step-size must be at most"):
        PointNavConfig(num_agents=2, forward_step_size=0.5)


def test_later_scenes_must_have_paths_in_range(tmp_path, monkeypatch):
    """A small room without paths of 6 m is refused."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    scene = write_obj(tmp_path / "hall.obj", room((12.0, 9.0)))
    config = PointNavConfig(scenes=scene, up="z", scenes_in_memory=1, goals_per_scene=8, image="none", min_distance=6.0)
    with closing(PointNav(16, "cpu", config)) as world:
        world.reset(0)
        site = world.nav_scenes
        site.pool.memory.remove(row := site.pool.active[0])
        site.pool.memory.put(row, pack_scene(make_scene(room((2.6, 2.6)))))
        with pytest.raises(ShoalError, match="no path of 6 to 30 m"):
            site.pool.before_use(row)


def test_resuming_does_not_count_interrupted_episodes(make):
    world = make(Flee, NavConfig, desync_episodes=True)
    for _ in range(5):
        act(world, LEFT)
    state = {name: tensor.clone() for name, tensor in world.state_dict().items()}
    before = world.statistics()
    counts = int(before.episodes.sum()), int(before.length_sum.sum())
    world.load_state_dict(state)
    after = world.statistics()
    assert (int(after.episodes.sum()), int(after.length_sum.sum())) == counts


@pytest.mark.parametrize("wrap", [lambda w: TimeLimit(w, 10), lambda w: ActionRepeat(w, 2)], ids=["limit", "repeat"])
def test_wrappers_output_the_episodes_after_a_resume(make, wrap):
    world = wrap(make(Flee, NavConfig))
    world.reset(5)
    for _ in range(7):
        world.step(torch.zeros(4, 1, dtype=torch.int32))
    state = {name: tensor.clone() for name, tensor in world.state_dict().items()}
    world.load_state_dict(state)
    inner = world.world
    assert torch.equal(world.outputs.groups["agent"].observation, inner.outputs.groups["agent"].observation)
    assert all(not tensor.any() for tensor in world._buffers().values())
    assert not torch.equal(world.outputs.groups["agent"].observation, state[next(k for k in state if "agent.obs" in k)])


def test_only_first_episodes_are_shortened_in_any_task(make):
    class Own(Flee):
        reset = [enter_elsewhere, sample_start, store_start]

    class Early(Flee):
        reset = [enter_scene, sample_start, store_start, end_early]

    assert make(Own, NavConfig, desync_episodes=True).time_limit == 30
    early = make(Early, NavConfig, desync_episodes=True)
    assert early.time_limit is None
    cuts = torch.stack([act(early, LEFT).truncated[0].clone() for _ in range(60)]).nonzero().flatten()
    assert cuts.diff().tolist()[-2:] == [15, 15]
    world = make(Own, NavConfig, envs=10, desync_episodes=True)
    ends = torch.stack([act(world, LEFT).truncated.clone() for _ in range(90)])
    assert ends.unfold(0, world.time_limit, 1).sum(-1).max() == 1


def test_eval_scenes_are_not_training_scenes(tmp_path):
    config = PointNavConfig(scenes="house:0-9499", evaluating=True)
    assert set(scene_sources(config)) == {f"house:{k}" for k in range(9500, 10000)}
    with pytest.raises(ShoalError, match="leaves no scene for evaluations"):
        scene_sources(replace(config, scenes="house:0-9999"))
    with pytest.raises(ShoalError, match=r"There is no file nope\.glb"):
        PointNav(1, "cpu", replace(config, eval_scenes="nope.glb")).prepare(0)


def test_unseen_scenes():
    assert unseen_scenes("house:train") == "house:test"
    assert unseen_scenes("cabin:0-99@0.5") == "cabin:test@0.5"
    assert unseen_scenes("folder/of/glb") == "folder/of/glb"


def test_desynchronized_envs_end_at_different_steps(make):
    """Evenly over the time limit of 30: at least 2 steps between any of 10 envs, full episodes afterwards."""
    world = make(Flee, NavConfig, envs=10, desync_episodes=True)
    ends = torch.zeros(60, 10, dtype=torch.bool)
    for k in range(60):
        ends[k] = act(world, LEFT).truncated
    first = ends.int().argmax(dim=0)
    assert first.max() < 30
    assert first.sort().values.diff().min() >= 2
    assert torch.equal(first + 30, 59 - ends.flip(0).int().argmax(dim=0))
    stats = world.statistics()
    assert torch.equal(stats.length_sum, first + 1 + 30)
    assert ends.unfold(0, world.time_limit, 1).sum(-1).max() == 1  # so a rollout needs one final observation per env
    assert not Flee.for_evaluation(world.config).desync_episodes


def test_a_shorter_time_limit_keeps_envs_desynchronized(make):
    config = dict(
        scenes=make(Flee, NavConfig).config.scenes,
        up="z",
        scenes_in_memory=1,
        goals_per_scene=2,
        image="none",
        desync_episodes=True,
    )
    settings = dict(num_envs=20, num_minibatches=1, device="cpu", world_config=config)
    with closing(make_world(make_job("flee", time_limit=10, **settings))) as world:
        world.reset(0)
        ends = torch.stack([world.step(torch.zeros(20, 1, dtype=torch.int32)).truncated.clone() for _ in range(30)])
    assert ends.sum(1).max() <= 3
    assert world.time_limit == 10
    assert make_world(make_job("flee", time_limit=10, action_repeat=2, **settings)).time_limit == 10


def test_tasks_pass_shoal_check(make):
    config = make(Flee, NavConfig, desync_episodes=True).config
    found = check_world(Flee, config, envs=8, steps=40, debug=False)
    assert not [str(each) for each in found if each.kind == "FAIL"]
    assert any("slices, saved state: left out" in str(each) for each in found)


def test_preloaded_scenes_are_those_loaded(tmp_path, monkeypatch):
    """Three of six cabins are used: only these are in the cache, before and after loading."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    config = NavConfig(eval_scenes="cabin:0-5@0", num_eval_scenes=3, goals_per_scene=2, image="none", evaluating=True)
    world = Flee(4, "cpu", config)
    world.prepare(8)
    world._preload.wait()
    kept = set((tmp_path / "cache").iterdir())
    assert len(kept) == 3
    world.reset(8)
    assert len(set(world.scenes_of_envs())) == 3
    opened = {path for path in (tmp_path / "cache").iterdir() if "ground" not in path.name}
    world.close()
    assert opened == kept


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(eval_scenes="{0}/wall.obj"), "no walkable floor"),
        (dict(eval_episode_files="{0}/none"), "There is no file or folder"),
    ],
)
def test_impossible_evaluations_are_refused_before_training(tmp_path, monkeypatch, settings, message):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    scene = write_obj(tmp_path / "room.obj", room((5.0, 5.0)))
    write_obj(tmp_path / "wall.obj", room((0.2, 5.0)))
    config = dict(scenes=scene, up="z", scenes_in_memory=1, goals_per_scene=4, image_size=SIZE)
    config |= {name: path.format(tmp_path) for name, path in settings.items()}
    with pytest.raises(ShoalError, match=message):
        shoal.train(
            "pointnav", device="cpu", num_envs=8, total_steps=10_000, eval_episodes=2, quiet=True,
            run_dir=tmp_path / "run", world_config=config,
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_an_agent_learns_pointnav(make):
    """A short training by depth in one room with easy goals: success rises from below 0.1 to above 0.4."""
    scene = make(PointNav, PointNavConfig).config.scenes
    easy = dict(success_distance=1.0, min_distance=1.5, max_distance=5.0, max_steps=60)
    world = dict(scenes=scene, up="z", scenes_in_memory=1, goals_per_scene=16, image_size=SIZE, **easy)
    job = make_job(
        "pointnav", device="cpu", seed=2, total_steps=120_000, num_envs=64, num_minibatches=4, world_config=world
    )
    trainer, parts = Trainer(job), []
    for share in (1, 2, 3, 4):
        while trainer.steps < 30_000 * share:
            trainer.iterate()
        parts.append(trainer.read_metrics())
    trainer.world.close()
    rewards = [found["rollout/ep_rew_mean"] for found in parts]
    assert rewards == sorted(rewards)
    assert parts[0]["rollout/success"] < 0.1
    assert parts[-1]["rollout/success"] > 0.4
