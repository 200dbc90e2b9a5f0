"""Benchmarks of the renderer: images per second, and step times while scenes are swapped."""

import math
import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import torch

from shoal.config.options import BenchRenderOptions
from shoal.core.errors import ShoalError
from shoal.core.graph import Graphed
from shoal.core.machine import pick_device
from shoal.render.kernel import DEFAULT_TYPES
from shoal.render.movers import Movers
from shoal.render.renderer import Renderer, check_settings, heading
from shoal.render.sheet import parse_size
from shoal.render.viewpoints import find_viewpoints
from shoal.runs.progress import si
from shoal.scene.memory import SceneMemory
from shoal.scene.pack import PackedScene
from shoal.scene.pool import ScenePool
from shoal.scene.sources import expand, prepare
from shoal.tools.bench import machine, measure, save

MAX_VIEWPOINTS = 4096
"""Maximum number of distinct viewpoints per scene; more views share them."""

MAX_SCENES = 256
"""Maximum number of scenes of a measurement; all are in memory at once."""

MAX_DEPTH = 10.0
"""Far end [m] of the depth range."""


def place_views(memory: SceneMemory, views: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Poses [views, 7] at free viewpoints, and rows [views]: view i is in scene i modulo the number of scenes."""
    rows = torch.arange(views, device=memory.device) % memory.rows
    poses = torch.empty(views, 7, device=memory.device)
    for row in range(memory.rows):
        count = int((rows == row).sum())
        if count:
            here = find_viewpoints(memory, row, min(count, MAX_VIEWPOINTS))
            turns = torch.randperm(count, generator=torch.Generator().manual_seed(row)) % len(here)
            poses[rows == row] = here[turns.to(here.device)]
    return poses, rows


def scatter_movers(poses: torch.Tensor, per_env: int) -> Movers:
    """Boxes, balls, cylinders and capsules of 5 to 25 cm, around each camera with a standard deviation of 3 m."""
    views, device = len(poses), poses.device
    rng = torch.Generator().manual_seed(0)
    movers = Movers.make(views, per_env, device)
    movers.kind.copy_(torch.randint(1, 5, (views, per_env), generator=rng))
    spread = torch.tensor([3.0, 3.0, 0.5])
    around = torch.randn(views, per_env, 3, generator=rng) * spread
    movers.position.copy_(poses[:, None, :3] + around.to(device))
    movers.size.copy_(torch.rand(views, per_env, 3, generator=rng) * 0.2 + 0.05)
    return movers


def bench_render(
    scenes: Sequence[PackedScene],
    views: int,
    size: tuple[int, int],
    outputs: Sequence[str],
    device: str,
    movers: int = 0,
    seconds: float = 1.0,
    graph: bool = True,
) -> dict[str, Any]:
    """Images per second of all views rendered together, each at a free viewpoint of a scene."""
    memory = SceneMemory.holding(list(scenes), device)
    poses, rows = place_views(memory, views)
    scattered = scatter_movers(poses, movers) if movers else None
    renderer = Renderer(memory, views, size, outputs, max_depth=MAX_DEPTH, movers=scattered)
    renderer.render(poses, rows)

    def render() -> None:
        renderer.render()

    call = Graphed(render, memory.device, graph)
    per_call = measure(call, memory.device, seconds)
    images = views / per_call
    return dict(
        bench="render",
        scenes=len(scenes),
        triangles=round(sum(s.triangles for s in scenes) / len(scenes)),
        views=views,
        width=size[0],
        height=size[1],
        outputs=list(outputs),
        movers=movers,
        images_per_second=round(images),
        rays_per_second=round(images * size[0] * size[1]),
        ms=round(per_call * 1e3, 4),
        scene_megabytes=round(memory.used / 1e6, 1),
        **machine(memory.device),
    )


def bench_pool(
    sources: str | Sequence[str], envs: int, resident: int, device: str, every: float, seconds: float
) -> dict[str, Any]:
    """Step times (one 64 x 64 depth image per env) while scenes are swapped every `every` seconds.

    Episodes last 25 steps on average.
    """
    pool = ScenePool(sources, envs, resident, device=device)
    try:
        renderer = Renderer(pool.memory, envs, (64, 64), ["depth"], max_depth=MAX_DEPTH)
        # The scene of a row changes with swaps, so the viewpoints are drawn once, at eye height, whatever the scene.
        pool.swap_interval = 10**9
        renderer.position[:, :2] = torch.rand(envs, 2, device=pool.device) * 8.0 + 1.0
        renderer.position[:, 2] = 1.25
        renderer.rotation = heading(torch.rand(envs, device=pool.device) * 2.0 * math.pi)

        def step() -> None:
            pool.move(torch.rand(envs, device=pool.device) < 0.04)
            renderer.render(scene=pool.row)

        once = measure(step, pool.device, 1.0)
        pool.swap_interval = max(1, int(every / once))
        swaps, before, times = pool.swaps, pool.loaded, []
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            begin = time.perf_counter()
            pool.poll()
            step()
            if pool.device.type == "cuda":
                torch.cuda.synchronize(pool.device)
            times.append(time.perf_counter() - begin)
        times.sort()
        median, late = times[len(times) // 2], times[int(len(times) * 0.99)]
        return dict(
            bench="pool",
            envs=envs,
            resident=resident,
            seconds=seconds,
            swaps=pool.swaps - swaps,
            loaded=pool.loaded - before,
            median_ms=round(median * 1e3, 3),
            late_ms=round(late * 1e3, 3),
            late_over_median=round(late / median, 3),
            longest_ms=round(times[-1] * 1e3, 3),
            limit_megabytes=round(pool.memory.limit / 1e6, 1),
            used_megabytes=round(pool.memory.used / 1e6, 1),
            scenes_held=sum(pool.memory.scene(row) is not None for row in range(pool.memory.rows)),
            **machine(pool.device),
        )
    finally:
        pool.close()


def bench_render_command(options: BenchRenderOptions) -> int:
    """`shoal bench render`: images per second over a range of view counts."""
    device, size = pick_device(options.device), parse_size(options.size)
    counts = list(options.views) or ([256, 1024, 4096, 16_384] if device.startswith("cuda") else [16, 64, 256])
    sources = expand(options.scene)
    if len(sources) > MAX_SCENES:
        raise ShoalError(f"--scene names {len(sources):,} scenes; name at most {MAX_SCENES}, such as house:0-15.")
    check_settings(1, size, {name: DEFAULT_TYPES.get(name) for name in options.outputs}, 90.0, MAX_DEPTH, None)
    packed = [prepare(source, device=device) for source in sources]
    names = ", ".join(f"{p.name} ({p.triangles:,} triangles)" for p in islice(packed, 4))
    more = f" and {len(packed) - 4} more" if len(packed) > 4 else ""
    print(f"{names}{more}; {' + '.join(options.outputs)}, {options.size}")
    print(f"{'views':>9}  {'images/s':>9}  {'rays/s':>9}  {'ms':>8}")
    rows = []
    for count in counts:
        scenes = list(islice(cycle(packed), min(count, len(packed))))
        row = bench_render(scenes, count, size, options.outputs, device, options.movers, options.seconds)
        rows.append(row)
        figures = si(row["images_per_second"]), si(row["rays_per_second"])
        print(f"{count:>9}  {figures[0]:>9}  {figures[1]:>9}  {row['ms']:>8.3f}", flush=True)
    if options.out:
        save(rows, options.out)
        print(f"written: {options.out}")
    return 0
