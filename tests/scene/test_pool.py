"""The pool: scenes are swapped while envs keep stepping, within the limit, in order, and without blocking."""

import os
import signal
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.nav.pointnav import PointNav
from shoal.render.renderer import Renderer
from shoal.scene.pool import SPARE_ROWS, ScenePool
from shoal.scene.prefetch import ScenePrefetcher, ScenePreload


def write_box(path, half: float, extra: int = 0) -> str:
    """A cube of the given half side in meters around the origin, with `extra` triangles far away to use more memory."""
    h = half
    corners = [(x, y, z) for x in (-h, h) for y in (-h, h) for z in (-h, h)]
    faces = ["1 2 4 3", "5 6 8 7", "1 2 6 5", "3 4 8 7", "1 3 7 5", "2 4 8 6"]
    lines = [f"v {x} {y} {z}" for x, y, z in corners] + [f"f {face}" for face in faces]
    for k in range(extra):
        lines += [f"v 500 {k} 0", f"v 500 {k} 1", f"v 501 {k} 0", "f -3 -2 -1"]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def rooms(tmp_path, monkeypatch):
    """Eight rooms of different sizes, half sides 1 to 8 m."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return [write_box(tmp_path / f"room{k}.obj", float(k)) for k in range(1, 9)]


def half_side(pool, row) -> float:
    return -float(pool.memory.scene(row).bounds[0, 0])


def seen(pool) -> list[float]:
    """Rendered distance to the wall in each env, in meters."""
    renderer = Renderer(pool.memory, len(pool.row), (3, 3), ["depth"])
    return renderer.render(scene=pool.row)["depth"][:, 1, 1, 0].tolist()


def test_scenes_are_swapped_and_envs_move_only_at_the_end_of_an_episode(rooms):
    pool = ScenePool(rooms, envs=12, resident=3, workers=1)
    try:
        visited = set()
        rng = torch.Generator().manual_seed(0)
        deadline = time.time() + 60
        while pool.swaps < 10 and time.time() < deadline:
            before = pool.row.clone()
            sizes = [half_side(pool, r) for r in before.tolist()]
            assert np.allclose(seen(pool), sizes), "an env does not see its scene while others are loaded"
            ended = torch.rand(12, generator=rng) < 0.3
            pool.move(ended)
            assert torch.equal(pool.row[~ended], before[~ended])
            assert set(pool.row[ended].tolist()) <= set(pool.active)
            pool.poll()
            resident = [r for r in range(pool.memory.rows) if pool.memory.scene(r)]
            assert len(resident) <= 3 + SPARE_ROWS
            assert pool.memory.used <= pool.memory.limit
            visited |= set(sizes)
        assert pool.swaps >= 10
        assert len(visited) == 8, "not all scenes were used"
    finally:
        pool.close()


def test_the_first_scenes_are_those_of_the_seed(rooms):
    def first(seed):
        pool = ScenePool(rooms, envs=4, resident=3, seed=seed, swap_interval=0, workers=2)
        pool.close()
        return [half_side(pool, r) for r in range(3)]

    once = first(1)
    assert once == first(1)
    assert once != first(2)


def test_scenes_keep_their_order_if_workers_finish_out_of_order():
    """Six workers of random speed and a consumer at irregular intervals."""
    rng = np.random.default_rng(0)

    class Fake(ScenePrefetcher):
        def _start_process(self):
            return SimpleNamespace(poll=lambda: None, kill=lambda: None, wait=lambda: None)

        def _request(self, process, source, path):
            time.sleep(float(rng.random()) * 2e-3)
            return source

    for _ in range(10):
        prefetcher = Fake(map(str, range(60)), "auto", 1.0, workers=6)
        found = []
        for k in range(40):
            found.append(prefetcher.get(wait=True))
            time.sleep(4e-3 if k % 3 == 0 else 0.0)
        prefetcher.close()
        assert found == [str(k) for k in range(40)]


def test_a_tight_limit_is_kept(tmp_path, monkeypatch):
    """Memory for three scenes: the oldest must be retired before the next is uploaded."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    rooms = [write_box(tmp_path / f"r{k}.obj", float(k), extra=200) for k in range(1, 7)]
    probe = ScenePool(rooms, envs=3, resident=3, swap_interval=0)
    size = probe.memory.used
    pool = ScenePool(rooms, envs=6, resident=3, limit=int(size * 1.05), workers=1)
    try:
        deadline = time.time() + 60
        while pool.swaps < 4 and time.time() < deadline:
            pool.poll()
            pool.move(torch.rand(6) < 0.5)
            assert pool.memory.used <= pool.memory.limit
            assert pool.active
            assert np.allclose(seen(pool), [half_side(pool, r) for r in pool.row.tolist()])
        assert pool.swaps >= 4
    finally:
        pool.close()


def test_memory_is_compacted_if_no_gap_fits(tmp_path, monkeypatch):
    """Scenes of different sizes under a limit that fits two of the largest: each of them is loaded eventually."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    rooms = [write_box(tmp_path / f"r{k}.obj", float(k), extra=80 + 40 * k) for k in range(1, 8)]
    with ScenePool(rooms[-2:], envs=2, resident=2, swap_interval=0) as probe:
        limit = probe.memory.used + 16
    with ScenePool(rooms, envs=4, resident=2, limit=limit, workers=1) as pool:
        visited = set()
        deadline = time.time() + 60
        while len(visited) < 7 and time.time() < deadline:
            pool.poll()
            pool.move(torch.ones(4, dtype=torch.bool))
            sizes = [half_side(pool, r) for r in pool.row.tolist()]
            assert np.allclose(seen(pool), sizes)
            visited |= set(sizes)
        assert len(visited) == 7


def test_close_ends_every_worker(rooms):
    pool = ScenePool(rooms, envs=2, resident=2, workers=4)
    while len(pool._prefetcher._processes) < 4:
        time.sleep(0.05)
    processes = list(pool._prefetcher._processes)
    folder = pool._prefetcher._folder.path
    pool.close()
    assert all(process.poll() is not None for process in processes)
    assert not folder.exists()
    pool.close()
    pool.poll()
    with pytest.raises(ShoalError, match="at least one worker"):
        ScenePool(rooms, envs=2, workers=-1)


def test_an_env_that_never_ends_keeps_its_scene(rooms):
    pool = ScenePool(rooms, envs=2, resident=2, workers=1)
    try:
        stays = half_side(pool, int(pool.row[0]))
        start = time.time()
        while time.time() - start < 3:
            pool.poll()
            pool.move(torch.tensor([False, True]))
            assert seen(pool)[0] == pytest.approx(stays)
    finally:
        pool.close()


def test_bad_scenes_are_an_error_at_the_start_and_skipped_later(rooms, tmp_path):
    bad = tmp_path / "bad.obj"
    bad.write_text("v 0 0 nan\nv 1 0 0\nv 0 1 0\nf 1 2 3\n")
    with pytest.raises(ShoalError, match=r"bad\.obj"):
        ScenePool([str(bad)], envs=2, resident=1)
    with pytest.raises(ShoalError, match="more than the limit"):
        ScenePool(rooms, envs=2, resident=2, limit=1000)
    with pytest.raises(ShoalError, match="at least one env"):
        ScenePool(rooms, envs=0)
    for seed in range(50):  # an order in which the bad one is not among the first two
        if (np.random.default_rng(seed).permutation(9) == 8).argmax() == 3:
            break
    pool = ScenePool([*rooms, str(bad)], envs=2, resident=2, seed=seed, workers=1)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            deadline = time.time() + 60
            while pool.swaps < 4 and time.time() < deadline:
                pool.poll()
                pool.move(torch.tensor([True, True]))
        assert sum("bad.obj" in str(w.message) for w in caught) == 1
        assert pool.swaps >= 4
    finally:
        pool.close()


def test_missing_textures_are_a_warning_or_strictly_an_error(tmp_path, rooms):
    (tmp_path / "a.mtl").write_text("newmtl m\nmap_Kd gone.png\n")
    bare = tmp_path / "bare.obj"
    bare.write_text("mtllib a.mtl\nv 0 0 0\nv 1 0 0\nv 0 1 0\nusemtl m\nf 1 2 3\n")
    with pytest.warns(UserWarning, match=r"bare\.obj: textures are missing \('gone\.png'\)"):
        ScenePool([str(bare)], envs=2, resident=1).close()
    config = PointNav.Config(scenes=str(bare), strict=True)
    with pytest.raises(ShoalError, match=r"bare\.obj: its texture 'gone\.png' is missing"):
        PointNav(2, "cpu", config).reset(0)


def test_a_scene_rejected_before_use_is_skipped(rooms):
    def only_small(row):
        if half_side(pool, row) > 5:
            raise ShoalError(f"{pool.memory.scene(row).name} is too large.")

    with ScenePool(rooms, envs=2, resident=2, workers=1) as pool:
        pool.before_use = only_small
        first = {half_side(pool, row) for row in pool.active}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            deadline = time.time() + 60
            while (pool.swaps < 6 or not caught) and time.time() < deadline:
                pool.poll()
                pool.move(torch.tensor([True, True]))
                assert {half_side(pool, row) for row in pool.row.tolist()} <= first | {1.0, 2.0, 3.0, 4.0, 5.0}
        assert any("too large" in str(w.message) for w in caught)
        assert pool.swaps >= 6


def test_a_rejected_scene_is_not_uploaded(rooms):
    """Neither the first time, if `before_upload` rejects it, nor again after `before_use` has rejected it."""
    checked, uploaded = [], []

    def only_small(scene):
        checked.append(scene.name)
        if -scene.bounds[0, 0] > 5:
            raise ShoalError(f"{scene.name} is too large.")

    def not_the_fifth(row):
        uploaded.append(pool.memory.scene(row).name)
        if half_side(pool, row) == 5:
            raise ShoalError(f"{uploaded[-1]} is rejected.")

    with ScenePool(rooms, envs=2, resident=2, workers=1) as pool:
        pool.before_upload, pool.before_use = only_small, not_the_fifth
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deadline = time.time() + 60
            while pool.swaps < 12 and time.time() < deadline:
                pool.poll()
                pool.move(torch.tensor([True, True]))
        assert pool.swaps >= 12
    large = {name for name in checked if int(name[4]) > 5}
    assert large
    assert not large & set(uploaded)
    assert max(checked.count(name) for name in large) == 1
    assert sum(name.startswith("room5") for name in uploaded) <= 1


def test_a_pool_without_swaps_allocates_no_spare_memory(rooms):
    with ScenePool(rooms, envs=2, resident=3, swap_interval=0, workers=1) as pool:
        assert (pool.memory.rows, pool.memory.used) == (3, pool.memory.limit)


def test_a_worker_that_is_killed_is_replaced(rooms):
    pool = ScenePool(rooms, envs=2, resident=2, workers=1)
    try:
        while not pool._prefetcher._processes:
            time.sleep(0.05)
        pool._prefetcher._processes[0].kill()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deadline = time.time() + 60
            while pool.swaps < 5 and time.time() < deadline:
                pool.poll()
                pool.move(torch.tensor([True, True]))
        assert pool.swaps >= 5
    finally:
        pool.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_the_program(rooms, how):
    program = (
        "import time\n"
        "from shoal.scene.pool import SPARE_ROWS, ScenePool\n"
        f"pool = ScenePool({rooms!r}, envs=2, resident=2, workers=1)\n"
        "while not pool._prefetcher._processes: time.sleep(0.05)\n"
        "print(pool._prefetcher._processes[0].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    worker = int(process.stdout.readline())
    process.send_signal(how)
    process.wait(20)
    deadline = time.time() + 20
    while time.time() < deadline:
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the worker is still alive")


def test_a_closed_preload_leaves_no_process(tmp_path, monkeypatch):
    """`close` returns before the hundred houses are prepared, and no process is left."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    preload = ScenePreload([f"house:{k}" for k in range(100)], "auto", 1.0, 2)
    workers = preload._prefetcher._processes
    deadline = time.time() + 60
    while len(workers) < 2 and time.time() < deadline:
        time.sleep(0.01)
    preload.close()
    preload.wait()
    assert [process.poll() is None for process in workers] == [False, False]
