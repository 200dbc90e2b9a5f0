"""The cart-pole workloads that Shoal states figures for, beside peers measured on the same card.

python bench/workloads.py                     all rows, one JSON line each, and a table
python bench/workloads.py --curve             rollout and training over 64 to 1,000,000 envs
python bench/workloads.py --out bench/results/cartpole_h200.jsonl
"""

import argparse
import json
from pathlib import Path

from shoal.run import bench
from shoal.run.config import make_job

PPO = dict(algo="ppo", rollout=32, epochs=4, minibatches=4, hidden=(64, 64), activation="tanh", shared=False)
A2C = dict(algo="a2c", rollout=100, hidden=(32, 32), activation="relu", shared=True)

ROWS = {
    "a2c_10000": (dict(num_envs=10_000, **A2C), 64e6, "WarpDrive 6.4 M"),
    "ppo_4096": (dict(num_envs=4096, **PPO), 22e6, "PureJaxRL 27.9 M"),
    "ppo_16384": (dict(num_envs=16_384, **PPO), 40e6, "PureJaxRL 55.4 M"),
    "stepping_1048576": (dict(num_envs=1_048_576), 10e9, "gymnax 22.8 G"),
}


def run_rows(names, seconds, device):
    rows = []
    for name in names:
        settings, goal, peer = ROWS[name]
        job = make_job("cartpole", total_steps=1e12, device=device, **settings)
        if name.startswith("stepping"):
            row = bench.bench_stepping(job, settings["num_envs"], seconds)
        else:
            row = bench.bench_training(job, seconds)
        row = dict(workload=name, goal=goal, peer=peer, **row)
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def run_curve(seconds, device):
    rows = []
    for exponent in range(6, 21, 2):
        envs = 2**exponent if exponent < 20 else 1_000_000
        job = make_job("cartpole", total_steps=1e12, device=device, num_envs=envs, **PPO)
        rows.append(bench.bench_stepping(job, envs, seconds / 2))
        rows.append(bench.bench_training(job, seconds))
        for row in rows[-2:]:
            print(json.dumps(row), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"which rows (default: all): {', '.join(ROWS)}")
    parser.add_argument("--seconds", type=float, default=3.0, help="time per figure")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--curve", action="store_true", help="measure over a range of env counts instead")
    parser.add_argument("--out", type=Path, help="also write the JSON lines to this file")
    options = parser.parse_args()
    if options.curve:
        rows = run_curve(options.seconds, options.device)
    else:
        rows = run_rows(options.rows or list(ROWS), options.seconds, options.device)
        for row in rows:
            rollout = row.get("rollout_only")
            beside = f"  rollout only {rollout / 1e6:8.1f} M" if rollout else ""
            print(
                f"{row['workload']:18} {row['steps_per_second'] / 1e6:10.1f} M env steps/s{beside}"
                f"   goal {row['goal'] / 1e6:.0f} M   peer: {row['peer']}"
            )
    if options.out:
        bench.save(rows, options.out)


if __name__ == "__main__":
    main()
