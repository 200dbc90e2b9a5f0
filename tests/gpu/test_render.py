"""Rendering on a GPU: equal to the CPU, in graphs, and during scene swaps."""

import time

import pytest
import torch

from shoal.core.graph import Graphed
from shoal.render.movers import Movers
from shoal.render.renderer import Renderer
from shoal.render.viewpoints import find_viewpoints
from shoal.scene.memory import SceneMemory
from shoal.scene.pool import ScenePool
from shoal.scene.sources import prepare

ALL = ("depth", "rgb", "semantic", "instance", "normal")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path_factory.getbasetemp() / "scenes"))


def agree(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    """Images agree, except for one in a thousand rays, along edges."""
    same = (one["depth"].cpu() - two["depth"].cpu()).abs() <= 1e-4 * one["depth"].cpu().clamp(min=1.0)
    assert same.float().mean() > 0.999
    for name in ("semantic", "instance"):
        assert (one[name].cpu() == two[name].cpu()).float().mean() > 0.998
    for name, step in (("rgb", 2), ("normal", 1e-3)):
        close = (one[name].cpu().float() - two[name].cpu().float()).abs().amax(-1) <= step
        assert close.float().mean() > 0.998, name


def scattered(poses: torch.Tensor, device: str) -> Movers:
    rng = torch.Generator().manual_seed(3)
    movers = Movers.make(len(poses), 6, device)
    movers.kind.copy_(torch.randint(1, 5, movers.kind.shape, generator=rng))
    movers.kind[:, 5] = 16 + 1
    movers.position.copy_(poses[:, None, :3].cpu() + torch.randn(*movers.kind.shape, 3, generator=rng))
    movers.size.copy_(torch.rand(*movers.kind.shape, 3, generator=rng) * 0.3 + 0.05)
    movers.size[:, 5] = 0.05
    movers.rotation.copy_(torch.nn.functional.normalize(torch.randn(movers.rotation.shape, generator=rng), dim=-1))
    return movers


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("moving", [False, True])
def test_cpu_and_gpu_render_the_same(moving):
    scenes = [prepare("house:7@0"), prepare("house:8@0")]
    memories = {device: SceneMemory.holding(scenes, device) for device in ("cpu", "cuda")}
    poses = find_viewpoints(memories["cpu"], 0, 24)
    images = {}
    for device, memory in memories.items():
        movers = scattered(poses, device) if moving else None
        renderer = Renderer(memory, 24, (60, 44), ALL, movers=movers)
        images[device] = renderer.render(poses.to(device))
    agree(images["cpu"], images["cuda"])


def test_a_graph_renders_like_the_eager_path():
    memory = SceneMemory.holding([prepare("house:7@0"), prepare("house:8@0")], "cuda")
    poses = find_viewpoints(memory, 0, 32)
    renderer = Renderer(memory, 32, (64, 64), ALL, movers=scattered(poses, "cuda"))
    plain = {name: image.clone() for name, image in renderer.render(poses).items()}
    call = Graphed(lambda: renderer.render() and None, memory.device)
    for _ in range(4):
        for image in renderer.images.values():
            image.zero_()
        call()
    assert all(torch.equal(plain[name], image) for name, image in renderer.images.items())
    # Poses are read at each replay.
    renderer.position[:, 2] += 0.2
    call()
    assert not torch.equal(plain["depth"], renderer.images["depth"])


def test_scenes_are_swapped_while_envs_render():
    pool = ScenePool([f"house:{seed}@0" for seed in range(12)], envs=64, resident=4, device="cuda", workers=2)
    try:
        renderer = Renderer(pool.memory, 64, (8, 8), ["depth", "instance"])
        renderer.position[:] = torch.tensor([4.0, 4.0, 1.25])
        known: dict[str, torch.Tensor] = {}
        deadline = time.time() + 90
        while pool.swaps < 10 and time.time() < deadline:
            pool.poll()
            pool.move(torch.rand(64, device="cuda") < 0.2)
            depth = renderer.render(scene=pool.row)["depth"].cpu()
            for env, row in enumerate(pool.row.tolist()):
                name = pool.memory.scene(row).name
                assert torch.equal(known.setdefault(name, depth[env].clone()), depth[env]), name
        assert pool.swaps >= 10
        assert len(known) > 8
    finally:
        pool.close()
