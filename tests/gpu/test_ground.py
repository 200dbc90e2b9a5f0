"""Ground on a GPU: equal to the CPU's, cached, and read from the cache without a sync."""

import numpy as np
import pytest
import torch

from shoal.nav.episode_sampling import sample_episodes
from shoal.nav.episodes import check_episodes
from shoal.nav.ground import MIN_REGION_AREA, GroundMemory
from shoal.nav.nav_scenes import NavScenes
from shoal.nav.queries import Pathfinder
from shoal.scene.memory import SceneMemory
from shoal.scene.sources import prepare


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def ground_on(device: str, scene) -> GroundMemory:
    ground = GroundMemory(SceneMemory.holding([scene], device), 2 * GroundMemory.cells_needed(scene.bounds, 0.1))
    ground.survey(0)
    return ground


@pytest.mark.usefixtures("cpu_kernels")
def test_ground_equals_the_cpus():
    scene = prepare("house:7@0")
    cpu, gpu = ground_on("cpu", scene).surveys[0], ground_on("cuda", scene).surveys[0]
    assert (np.abs(cpu.height - gpu.height) < 1e-3).mean() > 0.999
    assert (np.abs(cpu.clearance - gpu.clearance) < 1e-3).mean() > 0.998
    assert ((cpu.region >= 0) == (gpu.region >= 0)).mean() > 0.999
    assert abs(cpu.area.max() - gpu.area.max()) < 0.5


def test_a_cached_scene_needs_no_sync(tmp_path):
    scenes = NavScenes(["house:7@0"], 8, 1, 8, torch.device("cuda"), 0)
    assert len(list((tmp_path / "cache").glob("ground-*"))) == 1
    row = scenes.pool.active[0]
    before = [part[row].clone() for part in (scenes.ground.height, scenes.ground.clearance, scenes.ground.region)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scenes.survey(row)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = [part[row] for part in (scenes.ground.height, scenes.ground.clearance, scenes.ground.region)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    cells = scenes.ground.navigable_cells(row, MIN_REGION_AREA)
    assert sorted(scenes.start_cells[row, : len(cells)].tolist()) == cells.tolist()
    region = scenes.ground.region[row][scenes.start_cells[row].long()]
    for first, count in scenes.goal_starts[row].tolist():
        assert region[first : first + count].unique().numel() == 1
    finder = Pathfinder(scenes.ground, row)
    assert finder.is_navigable(scenes.fields.goal[row]).all()
    scenes.close()


def test_sampled_episodes_are_played():
    finder = Pathfinder(ground_on("cuda", prepare("house:7@0")))
    drawn = sample_episodes(finder, 70, 0)
    np.testing.assert_allclose(check_episodes(finder, drawn).starts, drawn.starts, atol=1e-5)
    episodes = {drawn.name: drawn}
    scenes = NavScenes(["house:7@0"], 8, 1, 16, torch.device("cuda"), 0, episodes=episodes)
    row = scenes.pool.active[0]
    assert scenes.episode_count[row] == 16
    far = Pathfinder(scenes.ground, row).distances(scenes.episode_start[row, :, :3], scenes.fields).diagonal()
    assert ((far >= 0.99) & (far <= 30.1)).all()
    scenes.close()
