"""Speed of the renderer: goals, curves over triangles, views and resolution, scene swaps, and CPU threads.

python bench/render.py                       all figures for this device: JSON lines and a table
python bench/render.py --only goals          goals | curves | pool | threads
python bench/render.py --out bench/results/render_h200.jsonl
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from shoal.core.machine import pick_device
from shoal.scene.pack import pack_scene
from shoal.scene.scene import Scene
from shoal.scene.sources import expand, open_scene, prepare
from shoal.tools.bench import save
from shoal.tools.bench_render import bench_pool, bench_render

BIG = "house:7@2"
SIXTEEN = "house:100-115"

GOALS = {
    # name: scenes, views, size, outputs, moving objects, goal in images per second
    "depth": (BIG, 4096, 64, ["depth"], 0, 750e3),
    "rgb and depth": (BIG, 4096, 64, ["depth", "rgb"], 0, 450e3),
    "16 scenes": (SIXTEEN, 4096, 64, ["depth"], 0, 400e3),
    "128 x 128": (BIG, 4096, 128, ["depth"], 0, 190e3),
    "50 moving things": (BIG, 4096, 64, ["depth"], 50, 400e3),
    "16 scenes, rgb and depth": (SIXTEEN, 4096, 64, ["depth", "rgb"], 0, None),
    "all outputs": (BIG, 4096, 64, ["depth", "rgb", "semantic", "instance", "normal"], 0, None),
}
VIEWS = [64, 256, 1024, 4096, 16_384]
SIZES = [32, 64, 128, 256]
TRIANGLES = [("house:7@0", 0), ("house:7@0.25", 0), ("house:7", 0), (BIG, 0), (BIG, 1), (BIG, 2)]
"""A house, and how often its triangles are split into four."""


def split_in_four(scene: Scene) -> Scene:
    """The same surfaces with four times as many triangles."""
    corners = scene.corners
    middle = (corners + np.roll(corners, -1, 1)) / 2
    uv_middle = (scene.uv + np.roll(scene.uv, -1, 1)) / 2

    def four(a, b):
        parts = [np.stack([a[:, k], b[:, k], b[:, k - 1]], 1) for k in range(3)]
        return np.concatenate([*parts, b]).astype(a.dtype)

    points = four(corners, middle)
    return replace(
        scene,
        vertices=points.reshape(-1, 3),
        triangles=np.arange(3 * len(points), dtype=np.int32).reshape(-1, 3),
        uv=four(scene.uv, uv_middle),
        colors=np.tile(scene.colors, (4, 1, 1)),
        **{name: np.tile(getattr(scene, name), 4) for name in ("material", "semantic", "instance")},
    )


def goals(device, seconds):
    for name, (source, views, size, outputs, movers, goal) in GOALS.items():
        scenes = [prepare(s, device=device) for s in expand(source)]
        if device == "cpu":
            views //= 64
        row = bench_render(scenes, views, (size, size), outputs, device, movers, seconds)
        yield dict(figure=name, goal=goal if device != "cpu" else None, **row)


def curves(device, seconds):
    gpu = device != "cpu"
    big = prepare(BIG, device=device)
    for views in VIEWS if gpu else [4, 16, 64]:
        yield dict(curve="views", **bench_render([big], views, (64, 64), ["depth"], device, 0, seconds))
    for size in SIZES:
        views = 4096 if gpu else 16
        yield dict(curve="size", **bench_render([big], views, (size, size), ["depth"], device, 0, seconds))
    for source, cuts in TRIANGLES if gpu else TRIANGLES[:3]:
        if cuts:
            scene = open_scene(source)
            for _ in range(cuts):
                scene = split_in_four(scene)
            packed = pack_scene(scene, device)
        else:
            packed = prepare(source, device=device)
        views = 4096 if gpu else 16
        yield dict(curve="triangles", **bench_render([packed], views, (64, 64), ["depth"], device, 0, seconds))


def pool(device, seconds):
    envs = 4096 if device != "cpu" else 32
    yield bench_pool("house:100-149", envs, 16 if device != "cpu" else 3, device, 1.0, 20.0 * min(1.0, seconds))


def threads(device, seconds):
    """Images per second on one core and on all cores, alternating, each in a new process."""
    cores = sorted(os.sched_getaffinity(0))
    for _ in range(2):
        for use in (cores[:1], cores):
            command = [sys.executable, __file__, "--one", "--cores", ",".join(map(str, use)), "--seconds", str(seconds)]
            found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            yield dict(threads=len(use), **json.loads(found))


def one(seconds):
    row = bench_render([prepare("house:7")], 64, (64, 64), ["depth"], "cpu", 0, seconds)
    print(json.dumps(row))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["goals", "curves", "pool", "threads"], default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=1.0, help="time per figure")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cores", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
        torch.set_num_threads(1)
        return one(options.seconds)
    device = pick_device(options.device)
    parts = options.only or (["goals", "curves", "pool"] if device != "cpu" else ["goals", "pool", "threads"])
    rows = []
    for part in parts:
        for row in globals()[part](device, options.seconds):
            rows.append(row)
            print(json.dumps(row), flush=True)
    for row in rows:
        if row["bench"] == "pool":
            print(
                f"pool: {row['swaps']} swaps, 99th percentile {row['late_over_median']} x median {row['median_ms']} ms"
            )
            continue
        name = row.get("figure") or row.get("curve") or f"{row.get('threads')} threads"
        goal = f" (goal {row['goal']:,.0f})" if row.get("goal") else ""
        what = f"{row['triangles']:>10,} triangles {row['views']:>6} x {row['width']}²"
        print(f"{name:>26} {what} {row['images_per_second']:>12,} images/s{goal}")
    if options.out:
        save(rows, options.out)
        if any("curve" in row for row in rows):
            from shoal.view.plot import plot_render

            print(plot_render(rows, options.out.with_suffix(".png")))
    return None


if __name__ == "__main__":
    main()
