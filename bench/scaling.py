"""Throughput against the number of processes: predicted from one process, and measured on this machine.

    python bench/scaling.py             the tables of docs/distributed.md, for trainings on H200s
    python bench/scaling.py --iteration 0.142 --steps 32768 --updates 8 --gradient 44e6      for another training
    python bench/scaling.py --check     one and two gloo processes on this machine, and the prediction
    python bench/scaling.py --check --out bench/results/scaling_2_cores.jsonl
    python bench/scaling.py --check --device cuda --processes 2 4      several that share one GPU

An iteration of W processes, each with the same number of envs, takes

    t(W) = compute + updates a(W, gradient) + others a(W, 0)
    a(W, b) = 2 (W - 1) / W b / bandwidth + 2 ceil(log2 W) latency

seconds: a large sum uses a ring, a small one a tree. Throughput is W steps / t(W).
Processes that share one GPU alternate on it: `compute` is then W times that of one.
"""

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from shoal.config.job import Job
from shoal.core.launch_info import STORE
from shoal.core.temporary import TemporaryFolder
from shoal.runs.jobs import make_job
from shoal.runs.launching import LOOPBACK
from shoal.runs.progress import si
from shoal.tools.bench import machine, save
from shoal.training.processes import Communicator, join_processes
from shoal.training.trainer import Trainer

COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Training:
    """One iteration of one process."""

    name: str
    iteration: float
    """Seconds, without other processes."""
    steps: int
    """Env steps."""
    updates: int
    """Number of averaged gradients."""
    gradient: float
    """Bytes of a gradient."""
    others: int
    """Number of other sums over all processes, of a few numbers each."""


@dataclass(frozen=True)
class Links:
    """Network between processes."""

    name: str
    per_machine: int
    """Processes per machine."""
    bandwidth_within: float
    """Bytes per second between processes of a machine."""
    bandwidth_between: float
    """Bytes per second between machines, in each direction."""
    latency_within: float
    """Seconds per hop."""
    latency_between: float

    def seconds(self, count: int, size: float) -> float:
        """Seconds of a sum of `size` bytes over `count` processes."""
        if count == 1:
            return 0.0
        within = count <= self.per_machine
        bandwidth = self.bandwidth_within if within else min(self.bandwidth_within, self.bandwidth_between)
        hops = 2 * math.ceil(math.log2(min(count, self.per_machine))) * self.latency_within
        if not within:
            hops += 2 * math.ceil(math.log2(count / self.per_machine)) * self.latency_between
        return 2 * (count - 1) / count * size / bandwidth + hops


TRAININGS = [
    Training("pointnav, PPO, 1,024 envs a GPU, 11 M parameters", 0.1422, 32_768, 8, 44e6, 6),
    Training("tag-grid, PPO, 20,000 envs a GPU", 0.02237, 2_000_000, 8, 20e3, 6),
    Training("tag-grid, A2C, 2,000 envs a GPU", 0.003085, 200_000, 1, 20e3, 4),
]
"""Iteration times are those of bench/results, on one H200."""

LINKS = [
    Links("NVLink, 8 GPUs a machine, 8 x 400 Gb/s between machines", 8, 300e9, 300e9, 4e-6, 12e-6),
    Links("NVLink, 8 GPUs a machine, 100 Gb/s between machines", 8, 300e9, 12e9, 4e-6, 25e-6),
]
"""Vendors' specifications, rounded down; none is measured."""


def predict(training: Training, links: Links, count: int) -> dict[str, Any]:
    """One row of the table."""
    communication = training.updates * links.seconds(count, training.gradient) + training.others * links.seconds(
        count, 0
    )
    seconds = training.iteration + communication
    return dict(
        bench="scaling",
        figure="predicted",
        training=training.name,
        links=links.name,
        processes=count,
        communication_ms=round(1e3 * communication, 3),
        iteration_ms=round(1e3 * seconds, 3),
        steps_per_second=round(count * training.steps / seconds),
        efficiency=round(training.iteration / seconds, 3),
    )


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    head = None
    for row in rows:
        if (row["training"], row["links"]) != head:
            head = row["training"], row["links"]
            print(f"\n{head[0]}; {head[1]}\n processes  communication     iteration   env steps/s  efficiency")
        print(
            f"{row['processes']:>10} {row['communication_ms']:>11.2f} ms {row['iteration_ms']:>10.2f} ms "
            f"{si(row['steps_per_second']):>13} {100 * row['efficiency']:>9.0f} %"
        )


# --- measurements -------------------------------------------------------------------------------------------------

SETTINGS = dict(
    algo="ppo", rollout_steps=32, hidden=(64, 64), epochs=2, num_minibatches=2, threads=1, quiet=True, cuda_graphs=False
)
"""Without graphs, also for one process: a graph cannot contain sums through the host."""
WORLD, BLOCKS, ITERATIONS = "cartpole", 6, 8
ENVS = {"cpu": 2048, "cuda": 2**17}
"""Envs per process; enough to keep a GPU busy."""


def measured_job(device: str, count: int) -> Job:
    """The training of `count` processes."""
    return make_job(WORLD, **SETTINGS, device=device, num_envs=ENVS[device] * count, total_steps=10**9, eval_episodes=0)


def iterations(device: str, processes: Communicator) -> dict[str, float]:
    """Seconds of an iteration, the best of several blocks, and its number of sums over all processes."""
    trainer = Trainer(measured_job(device, processes.size), processes)
    learner = next(iter(trainer.learners.values()))
    sums: list[int] = []
    reducer: Any = processes.reducer
    if processes.size > 1:
        plain = reducer._reduce

        def counted(tensor: torch.Tensor, operation: Any) -> None:
            sums.append(tensor.nbytes)
            plain(tensor, operation)

        reducer._reduce = counted
    trainer.iterate()
    sums.clear()
    trainer.iterate()
    made = list(sums)
    best = math.inf
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(ITERATIONS):
            trainer.iterate()
            processes.decide(0)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / ITERATIONS)
    gradient = learner.optimizer.flat.nbytes
    updates = sum(size >= gradient for size in made)
    found = dict(seconds=best, gradient=float(gradient), updates=updates, others=len(made) - updates + 1)
    if processes.size > 1:
        found["large"] = _one_sum(reducer, torch.zeros(gradient // 4, device=device))
        found["small"] = _one_sum(reducer, torch.zeros(16, device=device))
    return found


def _one_sum(reducer: Any, tensor: torch.Tensor) -> float:
    """Seconds of one sum over all processes, the best of several blocks."""
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            reducer.add(tensor)
        best = min(best, (time.perf_counter() - start) / 20)
    return best


def _work(device: str, rank: int, count: int, store: str, answers: Any) -> None:
    if device == "cpu":  # one core per process
        os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[rank]])
        torch.set_num_threads(1)
    if count == 1:
        answers.put(iterations(device, Communicator()))
        return
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count))
    os.environ.update({STORE: store, "GLOO_SOCKET_IFNAME": LOOPBACK})
    with join_processes(measured_job(device, count)) as (_, processes):
        found = iterations(device, processes)
        if rank == 0:
            answers.put(found)


def _measured(device: str, count: int) -> dict[str, float]:
    """The result of process 0 of `count`."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with TemporaryFolder("scaling") as folder:
        given = count, str(folder / "store"), answers
        made = [context.Process(target=_work, args=(device, rank, *given)) for rank in range(count)]
        for process in made:
            process.start()
        found = answers.get(timeout=600)
        for process in made:
            process.join()
    return found


def check(device: str, counts: list[int]) -> list[dict[str, Any]]:
    """Measure one process and several, with equally many envs each, on one core each or one GPU, and predict."""
    alone = _measured(device, 1)["seconds"]
    steps = ENVS[device] * SETTINGS["rollout_steps"]

    def row(figure: str, count: int, seconds: float, **more: float) -> dict[str, Any]:
        rate = count * steps / seconds
        return dict(figure=figure, processes=count, iteration_ms=1e3 * seconds, steps_per_second=rate, **more)

    rows = [row("measured", 1, alone)]
    for count in counts:
        found = _measured(device, count)
        communication = found["updates"] * found["large"] + found["others"] * found["small"]
        predicted = row(
            "predicted",
            count,
            alone * (count if device == "cuda" else 1) + communication,
            updates=found["updates"],
            others=found["others"],
            gradient_bytes=found["gradient"],
            sum_of_a_gradient_us=1e6 * found["large"],
            sum_of_few_numbers_us=1e6 * found["small"],
        )
        rows += [predicted, row("measured", count, found["seconds"])]
    common = dict(bench="scaling", world=WORLD, envs_per_process=ENVS[device], **machine(torch.device(device)))
    return [{**each, **common} for each in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="measure one process and several on this machine")
    parser.add_argument("--device", choices=ENVS, default="cpu", help="device of measurements (default: cpu)")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[2], help="measured numbers of processes (default: 2)"
    )
    parser.add_argument("--iteration", type=float, help="seconds of an iteration of one process")
    parser.add_argument("--steps", type=int, help="env steps of an iteration")
    parser.add_argument("--updates", type=int, default=1, help="gradients averaged per iteration (default: 1)")
    parser.add_argument("--gradient", type=float, default=1e5, help="bytes of a gradient (default: 1e5)")
    parser.add_argument(
        "--others", type=int, default=6, help="other sums over all processes per iteration (default: 6)"
    )
    parser.add_argument("--per-machine", type=int, default=8, help="processes per machine (default: 8)")
    parser.add_argument("--bandwidth", type=float, default=300e9, help="bytes/s within a machine (default: 300e9)")
    parser.add_argument("--network", type=float, default=300e9, help="bytes/s between machines (default: 300e9)")
    parser.add_argument(
        "--latency", type=float, nargs=2, default=(4e-6, 12e-6), help="seconds per hop, within and between"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.check:
        rows = check(options.device, options.processes)
        for row in rows:
            print(json.dumps(row), flush=True)
        for predicted, measured in zip(rows[1::2], rows[2::2], strict=True):
            said, was = predicted["iteration_ms"], measured["iteration_ms"]
            print(
                f"{predicted['processes']} processes: predicted {said:.1f} ms, measured {was:.1f} ms: "
                f"{100 * (was / said - 1):+.0f} %"
            )
    else:
        trainings, links = TRAININGS, LINKS
        if options.iteration is not None:
            o = options
            trainings = [Training("as given", o.iteration, o.steps or 1, o.updates, o.gradient, o.others)]
            links = [Links("as given", o.per_machine, o.bandwidth, o.network, *o.latency)]
        rows = [predict(training, link, count) for training in trainings for link in links for count in COUNTS]
        show(rows)
    if options.out:
        save(rows, options.out)


if __name__ == "__main__":
    main()
