"""The workloads of Shoal's figures, with the figures of peers on the same GPU.

python bench/workloads.py                     all rows, one JSON line each, and a table
python bench/workloads.py tag_grid_5x2000     one of them
python bench/workloads.py --curve envs        cart-pole over 64 to 1,000,000 envs
python bench/workloads.py --curve agents      tag-grid over 5 to 1,000 agents and 10 to 100,000 envs
python bench/workloads.py --out bench/results/cartpole_h200.jsonl
"""

import argparse
import gc
import json
from pathlib import Path

import torch

from shoal.core.errors import ShoalError
from shoal.runs.jobs import make_job
from shoal.tools import bench
from shoal.training.memory_estimate import estimate

PPO = dict(
    algo="ppo", rollout_steps=32, epochs=4, num_minibatches=4, hidden=(64, 64), activation="tanh", shared_encoder=False
)
A2C = dict(algo="a2c", rollout_steps=100, hidden=(32, 32), activation="relu", shared_encoder=True)
GRID = dict(hidden=(32, 32), activation="relu", shared_encoder=True, one_policy=True)
BOARD = dict(size=100, max_steps=100, random_start=False)
GRID_A2C = dict(algo="a2c", rollout_steps=100, lr=1e-3, gamma=0.98, ent_coef=0.05, max_grad_norm=3.0, **GRID)
GRID_PPO = dict(algo="ppo", rollout_steps=100, epochs=2, num_minibatches=4, **GRID)
SQUARE = dict(num_envs=100, rollout_steps=250, hidden=(256, 256), activation="relu", shared_encoder=True)
SQUARE_A2C = dict(
    algo="a2c", lr=1e-3, gamma=0.98, ent_coef=0.05, max_grad_norm=0.5, group_settings="runner.lr=5e-3", **SQUARE
)
SQUARE_PPO = dict(algo="ppo", epochs=2, num_minibatches=4, **SQUARE)
HUNDRED = dict(num_taggers=10, num_runners=100, max_steps=500, egocentric=False)
THOUSAND = dict(num_taggers=999, full_observation=False, **BOARD)

ROWS = {
    "cartpole_a2c_10000": ("cartpole", dict(num_envs=10_000, **A2C), {}, 64e6, "WarpDrive 6.4 M"),
    "cartpole_ppo_4096": ("cartpole", dict(num_envs=4096, **PPO), {}, 22e6, "PureJaxRL 27.9 M"),
    "cartpole_ppo_16384": ("cartpole", dict(num_envs=16_384, **PPO), {}, 40e6, "PureJaxRL 55.4 M"),
    "cartpole_stepping_1048576": ("cartpole", dict(num_envs=1_048_576), {}, 10e9, "gymnax 22.8 G"),
    "tag_grid_5x2000": ("tag-grid", dict(num_envs=2000, **GRID_A2C), BOARD, 25e6, "WarpDrive 1.26 M"),
    "tag_grid_5x2000_ppo": ("tag-grid", dict(num_envs=2000, **GRID_PPO), BOARD, None, "-"),
    "tag_grid_5x20000": ("tag-grid", dict(num_envs=20_000, **GRID_A2C), BOARD, 80e6, "WarpDrive 10.7 M"),
    "tag_grid_5x20000_ppo": ("tag-grid", dict(num_envs=20_000, **GRID_PPO), BOARD, None, "-"),
    "tag_continuous_110x100": ("tag-continuous", SQUARE_A2C, HUNDRED, 475e3, "WarpDrive 31.6 k"),
    "tag_continuous_110x100_ppo": ("tag-continuous", SQUARE_PPO, HUNDRED, None, "-"),
    "tag_grid_1000x2000": ("tag-grid", dict(num_envs=2000, **GRID_A2C), THOUSAND, 1.5e6, "WarpDrive out of memory"),
    "tag_grid_1000x2000_ppo": ("tag-grid", dict(num_envs=2000, **GRID_PPO), THOUSAND, None, "-"),
}


def job_of(world, settings, config, device):
    return make_job(world, total_steps=1e12, device=device, world_config=config, **settings)


def run_rows(names, seconds, device, out):
    rows = []
    for name in names:
        world, settings, config, goal, peer = ROWS[name]
        job = job_of(world, settings, config, device)
        if "stepping" in name:
            row = bench.bench_stepping(job, settings["num_envs"], seconds)
        else:
            row = bench.bench_training(job, seconds)
        row = dict(workload=name, goal=goal, peer=peer, **row)
        rows.append(row)
        _note(rows, 1, out)
    return rows


def curve_over_envs(seconds, device, out):
    rows = []
    for exponent in range(6, 21, 2):
        envs = 2**exponent if exponent < 20 else 1_000_000
        job = job_of("cartpole", dict(num_envs=envs, **PPO), {}, device)
        rows += [bench.bench_stepping(job, envs, seconds / 2), bench.bench_training(job, seconds)]
        _note(rows, 2, out)
    return rows


def curve_over_agents(seconds, device, out):
    """Tag-grid with six-float observations; if envs do not fit in memory, the row has the number that fits."""
    rows = []
    for agents in (5, 1000, 100):
        for envs in (10, 1000, 100_000, 100, 10_000):
            config = dict(num_taggers=agents - 1, full_observation=False, **BOARD)
            job = job_of("tag-grid", dict(num_envs=envs, **GRID_A2C), config, device)
            memory = estimate(job)
            if envs > memory.fits:
                row = dict(bench="full", world="tag-grid", num_envs=envs, agents_per_env=agents, fits=memory.fits)
            else:
                try:
                    row = bench.bench_training(job, seconds)
                except (torch.cuda.OutOfMemoryError, ShoalError) as error:
                    row = dict(bench="full", world="tag-grid", num_envs=envs, agents_per_env=agents, error=str(error))
            rows.append(row)
            _note(rows, 1, out)
    return rows


def _note(rows, new, out):
    """Print and write new rows, and free memory before the next measurement."""
    for row in rows[-new:]:
        print(json.dumps(row), flush=True)
    if out:
        bench.save(rows, out)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"names of rows (default: all): {', '.join(ROWS)}")
    parser.add_argument("--seconds", type=float, default=3.0, help="time per figure")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--curve", choices=("envs", "agents"), help="measure over a range of envs or agents")
    parser.add_argument("--out", type=Path, help="also write the JSON lines to this file")
    options = parser.parse_args()
    if options.curve:
        run = curve_over_envs if options.curve == "envs" else curve_over_agents
        rows = run(options.seconds, options.device, options.out)
    else:
        rows = run_rows(options.rows or list(ROWS), options.seconds, options.device, options.out)
        for row in rows:
            rollout, goal = row.get("rollout_only"), row["goal"]
            rollout_only = f"  rollout only {rollout / 1e6:8.2f} M" if rollout else ""
            print(
                f"{row['workload']:26} {row['steps_per_second'] / 1e6:10.2f} M env steps/s{rollout_only}"
                f"   goal {'-' if goal is None else f'{goal / 1e6:g} M'}   peer: {row['peer']}"
            )
    if options.out and options.curve:
        from shoal.view.plot import plot_bench

        plot_bench(rows, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
