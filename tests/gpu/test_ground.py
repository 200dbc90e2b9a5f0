"""Ground on a GPU: the CPU's, kept in the cache, from where it comes without holding up the device."""

import numpy as np
import pytest
import torch

from shoal.nav.episodes import check_episodes, sample_episodes
from shoal.nav.ground import SMALLEST_REGION, Body, GroundMemory
from shoal.nav.queries import Pathfinder
from shoal.nav.site import Site
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
def test_ground_is_the_cpus():
    scene = prepare("house:7@0")
    cpu, gpu = ground_on("cpu", scene).found[0], ground_on("cuda", scene).found[0]
    assert (np.abs(cpu.height - gpu.height) < 1e-3).mean() > 0.999
    assert (np.abs(cpu.clearance - gpu.clearance) < 1e-3).mean() > 0.998
    assert ((cpu.region >= 0) == (gpu.region >= 0)).mean() > 0.999
    assert abs(cpu.area.max() - gpu.area.max()) < 0.5


def test_a_scene_of_the_cache_holds_up_nobody(tmp_path):
    site = Site(["house:7@0"], 8, 1, 8, torch.device("cuda"), 0, 0, Body(), 0.1, None, "auto", 1.0)
    assert len(list((tmp_path / "cache").glob("ground-*"))) == 1
    row = site.pool.active[0]
    before = [part[row].clone() for part in (site.ground.height, site.ground.clearance, site.ground.region)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        site.survey(row)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = [part[row] for part in (site.ground.height, site.ground.clearance, site.ground.region)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    stands = site.ground.standing(row, SMALLEST_REGION)
    assert sorted(site.standing[row, : len(stands)].tolist()) == stands.tolist()
    region = site.ground.region[row][site.standing[row].long()]
    for first, count in site.goal_starts[row].tolist():
        assert region[first : first + count].unique().numel() == 1
    finder = Pathfinder(site.ground, row)
    assert finder.is_navigable(site.fields.goal[row]).all()
    site.close()


def test_episodes_are_drawn_and_played():
    finder = Pathfinder(ground_on("cuda", prepare("house:7@0")))
    drawn = sample_episodes(finder, 70, 0)
    np.testing.assert_allclose(check_episodes(finder, drawn).starts, drawn.starts, atol=1e-5)
    episodes = {drawn.name: drawn}
    site = Site(["house:7@0"], 8, 1, 16, torch.device("cuda"), 0, 0, Body(), 0.1, None, "auto", 1.0, episodes)
    row = site.pool.active[0]
    assert site.episode_count[row] == 16
    far = Pathfinder(site.ground, row).distances(site.episode_start[row, :, :3], site.fields).diagonal()
    assert ((far >= 0.99) & (far <= 30.1)).all()
    site.close()
