"""Benchmarks: stepping alone, rollouts alone, and end to end, over a range of env counts."""

import json
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, no_type_check

import torch
import warp as wp

from shoal.config.job import Job
from shoal.config.options import BenchOptions, parse_known_options
from shoal.core.errors import make_folder, writing
from shoal.core.graph import WARM_UP_CALLS, Graphed
from shoal.core.kernels import Broadcast
from shoal.core.launch import Plan, bind, cpu_threads
from shoal.core.machine import commit, processor
from shoal.core.random import philox, unit_float, vec4u
from shoal.core.spaces import Box, Discrete, Mixed
from shoal.core.world import World
from shoal.core.world_loading import world_class
from shoal.runs.jobs import parse_job
from shoal.runs.progress import si
from shoal.training.trainer import Trainer
from shoal.view.plot import plot_bench

STEPS_PER_CALL = 32


@wp.func
@no_type_check
def random_choices(
    env: int,
    n: int,
    block: int,
    counter: wp.array[int],
    index: wp.array[int],
    a: wp.array[int],
    b: wp.array[int],
    c: wp.array[int],
    d: wp.array[int],
    e: wp.array[int],
    f: wp.array[int],
    g: wp.array[int],
    h: wp.array[int],
):
    """Uniform choices out of n for eight rows of actions, from sixteen bits each of one Philox draw."""
    words = philox(vec4u(wp.uint32(index[env]), wp.uint32(counter[0]), wp.uint32(block), wp.uint32(n)), wp.uint64(1))
    a[env] = pick(words[0] >> wp.uint32(16), n)
    b[env] = pick(words[0] & wp.uint32(0xFFFF), n)
    c[env] = pick(words[1] >> wp.uint32(16), n)
    d[env] = pick(words[1] & wp.uint32(0xFFFF), n)
    e[env] = pick(words[2] >> wp.uint32(16), n)
    f[env] = pick(words[2] & wp.uint32(0xFFFF), n)
    g[env] = pick(words[3] >> wp.uint32(16), n)
    h[env] = pick(words[3] & wp.uint32(0xFFFF), n)


@wp.func
@no_type_check
def pick(bits: wp.uint32, n: int):
    """A choice out of n from sixteen random bits."""
    return int((bits * wp.uint32(n)) >> wp.uint32(16))


@wp.func
@no_type_check
def random_floats(
    env: int,
    low: float,
    high: float,
    block: int,
    counter: wp.array[int],
    index: wp.array[int],
    a: wp.array[float],
    b: wp.array[float],
    c: wp.array[float],
    d: wp.array[float],
):
    """Uniform numbers in [low, high) for four rows of actions, from one Philox draw."""
    words = philox(vec4u(wp.uint32(index[env]), wp.uint32(counter[0]), wp.uint32(block), wp.uint32(0)), wp.uint64(1))
    a[env] = low + (high - low) * unit_float(words[0])
    b[env] = low + (high - low) * unit_float(words[1])
    c[env] = low + (high - low) * unit_float(words[2])
    d[env] = low + (high - low) * unit_float(words[3])


def random_actions(world: World, steps: int = STEPS_PER_CALL) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Random actions for every group, and a function that redraws them.

    Args:
        steps: Number of rows, a multiple of eight.

    Returns:
        Group -> actions [steps, env, agent, ...], and the function.
    """
    counter = torch.zeros(1, dtype=torch.int32, device=world.device)
    actions, plans, whole_numbers = {}, [], []
    for group in world.groups:
        space = group.action
        shape = (steps, world.num_envs, group.agents, *space.shape)
        actions[group.name] = torch.zeros(shape, dtype=space.dtype, device=world.device)
        if isinstance(space, Box):
            parts = [(random_floats, "abcd", _range(space), actions[group.name].flatten(1))]
        elif isinstance(space, Mixed):
            parts = []
            for part, columns in zip(space.parts, space.split(actions[group.name]), strict=True):
                for i, column in enumerate(columns.unbind(-1)):
                    if isinstance(part, Box):
                        limits = _range(part)
                    else:
                        limits = dict(low=0.0, high=float(part.n if isinstance(part, Discrete) else part.nvec[i]))
                        whole_numbers.append(column)
                    parts.append((random_floats, "abcd", limits, column.flatten(1)))
        else:
            nvec = (space.n,) if isinstance(space, Discrete) else space.nvec
            columns = actions[group.name].view(steps, -1, len(nvec)).unbind(2)
            parts = [(random_choices, "abcdefgh", dict(n=n), column) for n, column in zip(nvec, columns, strict=True)]
        for function, letters, limits, rows in parts:
            index = torch.arange(rows.shape[1], dtype=torch.int32, device=world.device)
            for drawn in rows.split(len(letters)):
                arguments = dict(block=len(plans), counter=Broadcast(counter), index=index, **limits)
                arguments.update(zip(letters, drawn, strict=True))
                plans.append(bind("actions", function, world.device, rows.shape[1], arguments))

    def draw() -> None:
        for plan in joined:
            plan()
        for column in whole_numbers:
            column.floor_()
        counter.add_(1)

    joined = [Plan.joined(list(same)) for _, same in groupby(plans, key=lambda plan: plan.num_envs)]
    return actions, draw


def _range(space: Box) -> dict[str, float]:
    """Bounds of random actions for a Box; -1 and 1 if it is unbounded."""
    return dict(low=space.low, high=space.high) if space.bounded else dict(low=-1.0, high=1.0)


def measure(call: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Seconds per call after warm-up, the median over seven slices of the time."""
    for _ in range(WARM_UP_CALLS + 2):
        call()
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    once = time.perf_counter() - start
    per_slice = max(1, int(seconds / 7.0 / max(once, 1e-7)))
    slices = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(per_slice):
            call()
        _wait(device)
        slices.append((time.perf_counter() - start) / per_slice)
    return sorted(slices)[len(slices) // 2]


def bench_stepping(job: Job, num_envs: int, seconds: float) -> dict[str, Any]:
    """Env steps per second with random actions drawn on the device, without a policy."""
    world = world_class(job.world)(num_envs, job.hardware.device, job.world_config)
    world.reset(job.run.seed)
    actions, draw = random_actions(world)
    play = world.play(actions)

    def run() -> None:
        draw()
        play()

    call = Graphed(run, world.device, job.hardware.cuda_graphs)
    per_call = measure(call, world.device, seconds)
    steps = num_envs * STEPS_PER_CALL / per_call
    return _row(job, "stepping", num_envs, world, steps_per_second=steps)


def bench_training(job: Job, seconds: float) -> dict[str, Any]:
    """Env steps per second of rollouts alone and end to end, and the time until the graphs are recorded."""
    start = time.perf_counter()
    trainer = Trainer(job)
    for _ in range(WARM_UP_CALLS + 1):
        trainer.iterate()
    _wait(trainer.world.device)
    start_up = time.perf_counter() - start
    rollout = measure(trainer.collect, trainer.world.device, seconds / 2.0)
    both = measure(trainer.iterate, trainer.world.device, seconds)
    update = measure(trainer.update, trainer.world.device, seconds / 2.0)
    steps = job.run.steps_per_iteration
    return _row(
        job,
        "training",
        job.run.num_envs,
        trainer.world,
        steps_per_second=steps / both,
        rollout_only=steps / rollout,
        rollout_ms=rollout * 1e3,
        update_ms=update * 1e3,
        iteration_ms=both * 1e3,
        start_up_seconds=start_up,
    )


def _row(job: Job, kind: str, num_envs: int, world: World, **figures: float) -> dict[str, Any]:
    agents = sum(g.agents for g in world.groups)
    settings: dict[str, Any] = {}
    if kind == "training":
        settings = dict(
            algo=job.run.algo,
            rollout_steps=job.run.rollout_steps,
            hidden=list(job.policy.hidden),
            activation=job.policy.activation,
            shared_encoder=job.policy.shared_encoder,
            compile=job.hardware.compile,
            precision=job.hardware.precision,
            epochs=getattr(job.learn, "epochs", 1),
            num_minibatches=getattr(job.learn, "num_minibatches", 1),
        )
    return dict(
        bench=kind,
        world=job.world,
        num_envs=num_envs,
        agents_per_env=agents,
        **{k: round(v, 3) if v < 1000 else round(v) for k, v in figures.items()},
        agent_steps_per_second=round(figures["steps_per_second"] * agents),
        **settings,
        **machine(world.device),
    )


def machine(device: torch.device) -> dict[str, Any]:
    """Device, versions and commit of a measurement."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{processor()} x {cpu_threads()}"
    return dict(device=name, torch=torch.__version__, warp=wp.__version__, commit=commit())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def save(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows as JSON lines."""
    make_folder(path.parent)
    with writing(path):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def bench_command(world: str, flags: list[str]) -> int:
    """`shoal bench WORLD`: print stepping, rollouts and training over env counts, as a table and as JSON lines."""
    options, rest = parse_known_options(BenchOptions, f"bench {world}", flags)
    if options.out:
        make_folder(options.out.parent)
    job = parse_job(world, rest, "shoal bench")
    gpu = job.hardware.device.startswith("cuda")
    counts = list(options.envs) or ([1024, 4096, 16_384, 65_536] if gpu else [256, 1024, 4096])
    jobs = [job.change(num_envs=count) for count in counts]
    for sized in jobs:
        sized.check_samples()
    print(f"{'envs':>9}  {'stepping alone':>14}  {'rollout only':>12}  {'end to end':>10}   env steps/s")
    rows = []
    for count, sized in zip(counts, jobs, strict=True):
        pair = [bench_stepping(sized, count, options.seconds), bench_training(sized, options.seconds)]
        figures = [pair[0]["steps_per_second"], pair[1]["rollout_only"], pair[1]["steps_per_second"]]
        print(f"{count:>9}  {si(figures[0]):>14}  {si(figures[1]):>12}  {si(figures[2]):>10}", flush=True)
        rows += pair
    for row in rows:
        print(json.dumps(row))
    if options.out:
        save(rows, options.out)
        print(f"written: {options.out} and {plot_bench(rows, options.out.with_suffix('.png'))}")
    return 0
