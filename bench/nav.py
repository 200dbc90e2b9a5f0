"""Navigation end to end: frames per second and microseconds per phase; Lamb against Adam at large batches.

python bench/nav.py                          rows of the table, one JSON line each
python bench/nav.py depth_1024 rgb_1024      some of them
python bench/nav.py --compare --frames 16e6  Lamb and Adam at 1,024 and 8,192 envs, equal frames
python bench/nav.py --compare --frames 16e6 --envs 8192 --num-minibatches 32   as many updates as with 1,024 envs
python bench/nav.py --out bench/results/nav_h200.jsonl
"""

import argparse
import gc
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

from shoal.config.job import Job
from shoal.core.graph import Graphed
from shoal.core.world import World
from shoal.core.world_loading import world_class
from shoal.runs.jobs import make_job
from shoal.tools.bench import machine, measure, save
from shoal.training.trainer import Trainer

PAPER = dict(epochs=1, num_minibatches=2, optimizer="lamb", lr=5e-4, lr_scaling="sqrt", normalize_advantage=False)
"""Settings of the paper on large batch simulation: one epoch."""
OURS: dict = {}
"""Shoal's settings: two epochs."""
SCENES = dict(scenes_in_memory=16, scene_swap_interval=8)

ROWS = {
    # name: envs, settings of the algorithm, of the world, goal in frames per second
    "depth_1024": (1024, PAPER, dict(image="depth", **SCENES), 150e3),
    "depth_2048": (2048, PAPER, dict(image="depth", **SCENES), None),
    "depth_4096": (4096, PAPER, dict(image="depth", **SCENES), None),
    "rgb_1024": (1024, PAPER, dict(image="rgb", **SCENES), 110e3),
    "rgbd_1024": (1024, PAPER, dict(image="rgbd", **SCENES), None),
    "blind_1024": (1024, PAPER, dict(image="none", **SCENES), None),
    "depth_1024_ours": (1024, OURS, dict(image="depth"), None),
}
COMPARED = {
    "lamb": dict(optimizer="lamb", lr=5e-4, lr_scaling="sqrt", lr_reference_batch=256),
    "adam": dict(optimizer="adam", lr=6e-4, lr_scaling="sqrt", lr_reference_batch=8192),
}
"""Learning rates for mini-batches of `lr_reference_batch` samples, then scaled: the paper's for Lamb, Shoal's for Adam.
Both use two epochs of four mini-batches, not the paper's one of two: with one epoch of four, Lamb with 1,024 envs
reached one goal in fifty after 10 million frames."""
CURVE = ("rollout/success", "rollout/spl", "rollout/soft_spl", "rollout/ep_rew_mean")


def stepping(world: World, actions: torch.Tensor, seconds: float) -> float:
    """Seconds per step of all envs with recorded actions, without a policy."""
    out = world.outputs

    def play() -> None:
        for row in actions:
            world.step(row, into=out)

    return measure(Graphed(play, world.device), world.device, seconds) / len(actions)


def measure_row(name: str, device: str, warm: float, seconds: float) -> dict:
    envs, settings, config, goal = ROWS[name]
    job = make_job("pointnav", device=device, num_envs=envs, total_steps=1e9, world_config=config, **settings)
    start = time.perf_counter()
    trainer = Trainer(job)
    trainer.iterate()
    began = time.perf_counter()
    while time.perf_counter() - began < warm:  # an untrained policy stops at every fourth step
        trainer.iterate()
        torch.cuda.synchronize()
    trained = trainer.steps
    trainer.read_metrics()
    frames, world = job.run.steps_per_iteration, trainer.world
    both = measure(trainer.iterate, world.device, seconds)
    length = trainer.read_metrics()["rollout/ep_len_mean"]
    learn = measure(trainer.update, world.device, seconds / 2)
    collect = measure(trainer.collect, world.device, seconds / 2)
    actions = trainer.collector.rollouts["agent"].action.clone()
    step = stepping(world, actions, seconds / 2) / envs
    simulate = step
    if config["image"] != "none":
        blind_world = world_class("pointnav")(envs, device, replace(job.world_config, image="none"))
        blind_world.reset(1)
        simulate = stepping(blind_world, actions, seconds / 2) / envs
        blind_world.close()
    memory = world.nav_scenes.pool.memory
    triangles = [scene.triangles for row in range(memory.rows) if (scene := memory.scene(row))]
    row = dict(
        figure=name,
        envs=envs,
        image=config["image"],
        goal=goal,
        frames_per_second=round(frames / both),
        simulate_us=round(simulate * 1e6, 3),
        render_us=round((step - simulate) * 1e6, 3),
        infer_us=round((collect / frames - step) * 1e6, 3),
        learn_us=round(learn / frames * 1e6, 3),
        rest_us=round((both - collect - learn) / frames * 1e6, 3),
        episode_length=round(length, 1),
        frames_trained=trained,
        scenes=len(triangles),
        triangles_mean=round(mean(triangles)),
        scenes_loaded=world.nav_scenes.pool.loaded,
        start_up_seconds=round(began - start, 1),
        gigabytes=round(torch.cuda.max_memory_allocated() / 1e9, 1),
        **machine(world.device),
    )
    world.close()
    return row


def compared(device: str, frames: float, envs: list[int], num_minibatches: int) -> list[tuple[str, Job]]:
    jobs = []
    for count in envs:
        for name, settings in COMPARED.items():
            settings = settings | dict(num_envs=count, num_minibatches=num_minibatches, total_steps=frames)
            jobs.append((f"{name}_{count}", make_job("pointnav", device=device, **settings)))
    return jobs


def learn_row(name: str, job: Job, points: int = 20) -> dict:
    """Metrics of one training over its frames."""
    trainer = Trainer(job)
    curve, every = [], max(1, job.run.iterations // points)
    start = time.perf_counter()
    while not trainer.done:
        trainer.iterate()
        if trainer.iteration % every == 0:
            found = trainer.read_metrics()
            curve.append([trainer.steps, *(round(found.get(key, 0.0), 4) for key in CURVE)])
            print(name, curve[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
    row = dict(
        figure=f"compare_{name}",
        envs=job.run.num_envs,
        optimizer=job.learn.optimizer,
        num_minibatches=job.learn.num_minibatches,
        peak_lr=trainer.learners["agent"].peak_lr,
        frames=trainer.steps,
        **dict(zip(("success", "spl", "soft_spl", "reward"), curve[-1][1:], strict=True)),
        curve=curve,
        seconds=round(time.perf_counter() - start, 1),
        **machine(trainer.world.device),
    )
    trainer.world.close()
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"names of rows (default: all): {', '.join(ROWS)}")
    parser.add_argument("--compare", action="store_true", help="compare Lamb and Adam")
    parser.add_argument("--frames", type=float, default=10e6, help="frames of each compared training")
    parser.add_argument("--envs", type=int, nargs="+", default=[1024, 8192], help="compared numbers of envs")
    parser.add_argument("--num-minibatches", type=int, default=4, help="mini-batches per epoch of compared trainings")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds of training before a row is measured")
    parser.add_argument("--seconds", type=float, default=4.0, help="time per figure")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="also write the JSON lines to this file")
    options = parser.parse_args()
    if options.compare:
        todo = [
            (learn_row, pair)
            for pair in compared(options.device, options.frames, options.envs, options.num_minibatches)
        ]
    else:
        todo = [
            (measure_row, (name, options.device, options.warm, options.seconds)) for name in options.rows or list(ROWS)
        ]
    rows = []
    for run, arguments in todo:
        rows.append(run(*arguments))
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            save(rows, options.out)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
