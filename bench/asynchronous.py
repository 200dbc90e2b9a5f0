"""Asynchronous against synchronous training, with envs whose steps are slow and take unequal time.

    python bench/asynchronous.py                     about seven minutes on two cores
    python bench/asynchronous.py --hidden 64 64      a smaller network, whose updates are faster
    python bench/asynchronous.py --out bench/results/asynchronous_2_cores.jsonl

The env is Gymnasium's CartPole-v1 whose steps wait for 2 to 8 ms, 5 on average, as if for another program. All variants
have the same envs, workers, network, epochs, mini-batches and number of steps. They run one after the other, and one
evaluation scores all. Rates are env steps per second of training time.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from shoal.runs.evaluation import evaluate
from shoal.runs.jobs import make_job
from shoal.tools import bench
from shoal.training.build import by_group
from shoal.training.make_trainer import make_trainer

SLOW = Path(__file__).with_name("slow_cart_pole.py")

SIDES = {
    "lockstep": dict(algo="ppo", env_schedule="lockstep"),
    "first-come": dict(algo="ppo", env_schedule="first-come"),
    "asynchronous": dict(algo="appo", env_schedule="lockstep"),
    "asynchronous, first-come": dict(algo="appo", env_schedule="first-come"),
}
HIDDEN = (256, 256)
SETTINGS = dict(num_envs=16, rollout_steps=128, lr=5e-4, epochs=20, num_minibatches=4, gamma=0.98, threads=1)
"""Learning takes about two thirds of the time of acting."""


def train(side, steps, seed, hidden):
    """Env steps/s of one training, and the score of its policy."""
    settings = dict(SIDES[side])
    world = dict(env_schedule=settings.pop("env_schedule"), num_workers=SETTINGS["num_envs"])
    job = make_job(
        f"{SLOW}:make", seed=seed, total_steps=steps, world_config=world, hidden=hidden, **SETTINGS, **settings
    )
    trainer = make_trainer(job)
    try:
        trainer.iterate()  # the first one compiles
        start, before = time.perf_counter(), trainer.steps
        while not trainer.done:
            trainer.iterate()
        rate = (trainer.steps - before) / (time.perf_counter() - start)
        with trainer.paused():
            fast = make_job("cartpole", device="cpu", num_envs=50)
            score = evaluate(fast, {"cart": next(iter(by_group(job, trainer.acting_policies).values()))}, 100).mean
    finally:
        trainer.close()
    return rate, score


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=float, default=60_000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--hidden", type=int, nargs="+", default=list(HIDDEN), help="widths of the hidden layers")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {side: [] for side in SIDES}
    for seed in range(1, given.seeds + 1):
        for side in SIDES:
            rate, score = train(side, int(given.steps), seed, tuple(given.hidden))
            found[side].append((rate, score))
            print(f"{side}, seed {seed}: {rate:,.0f} env steps/s, score {score:.1f}", flush=True)
    rows = [
        dict(
            bench="asynchronous",
            side=side,
            hidden=given.hidden,
            steps_per_second=round(statistics.median(rate for rate, _ in runs)),
            scores=[round(score, 1) for _, score in runs],
        )
        for side, runs in found.items()
    ]
    slow = rows[0]["steps_per_second"]
    rows += [
        dict(
            bench="asynchronous",
            ratio=f"{row['side']} / lockstep",
            hidden=given.hidden,
            value=round(row["steps_per_second"] / slow, 2),
        )
        for row in rows[1:]
    ]
    rows = [{**row, **bench.machine(torch.device("cpu"))} for row in rows]
    for row in rows:
        print(json.dumps(row))
    if given.out:
        bench.save(rows, given.out)


if __name__ == "__main__":
    main()
