"""Throughput of the replay buffer: appending rollouts, drawing samples and updating priorities.

    python bench/replay.py                   sizes for this device; one JSON line per figure, then a table
    python bench/replay.py --batch 4096      another batch
    python bench/replay.py --out bench/results/replay_h200.jsonl

`samples_per_second` includes the draw, its gathers and the update of its priorities.
"""

import argparse
import json
from pathlib import Path

import torch

from shoal.core import Box, Discrete, Group
from shoal.core.graph import Graphed
from shoal.core.machine import pick_device
from shoal.learn.replay import Replay
from shoal.learn.rollout import Rollout, allocate
from shoal.tools.bench import machine, measure, save

ROWS = {
    # name: observation, stacked frames, prioritized
    "vectors, uniform": (Box(4), 1, False),
    "vectors, by priority": (Box(4), 1, True),
    "images of 84 x 84 x 4, by priority": (Box((1, 84, 84), 0, 255, dtype=torch.uint8), 4, True),
}


def random_rollout(observation: Box, stack: int, envs: int, steps: int, device: torch.device) -> Rollout:
    """Episodes of about 200 steps, half of them truncated."""
    group = Group("g", observation, Discrete(4), stack=stack)
    rollout = allocate([group], steps, envs, 1, device)
    if rollout.observation.dtype == torch.uint8:
        rollout.observation.random_(0, 255)
    else:
        rollout.observation.normal_()
    rollout.reward.normal_()
    rollout.action.random_(0, 4)
    rollout.terminated.bernoulli_(1 / 400)
    rollout.truncated.bernoulli_(1 / 400)
    if rollout.age is not None:
        rollout.age.fill_(stack - 1)
    return rollout


def bench_replay(name: str, transitions: int, envs: int, batch: int, seconds: float, device: torch.device) -> dict:
    """Measure one figure."""
    observation, stack, prioritized = ROWS[name]
    steps = 16
    rollout = random_rollout(observation, stack, envs, steps, device)
    replay = Replay(rollout, transitions // envs, 3, 0.99, prioritized=prioritized)
    for _ in range(-(-transitions // (envs * steps)) + 1):
        replay.append()
    errors = torch.rand(batch, device=device)

    def draw() -> None:
        replay.update_priorities(replay.sample(batch, 0.5).index, errors)

    for _ in range(20):  # priorities of all sizes
        errors.exponential_()
        draw()
    draw_time = measure(Graphed(draw, device), device, seconds)
    append_time = measure(Graphed(replay.append, device), device, seconds)
    return dict(
        bench="replay",
        figure=name,
        transitions=replay.steps * envs,
        batch=batch,
        samples_per_second=round(batch / draw_time),
        taken_in_per_second=round(rollout.samples / append_time),
        bytes=replay.nbytes,
        **machine(device),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, help="samples per draw")
    parser.add_argument("--transitions", type=int, help="size of the replay; an eighth for images")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per figure")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(pick_device(options.device))
    gpu = device.type == "cuda"
    transitions = options.transitions or (4_000_000 if gpu else 200_000)
    batch = options.batch or (65_536 if gpu else 4096)
    rows = []
    for name, (_, stack, _) in ROWS.items():
        images = stack > 1
        size, envs = (transitions // 8, 256) if images else (transitions, 4096 if gpu else 256)
        row = bench_replay(name, size, envs, batch // 8 if images else batch, options.seconds, device)
        rows.append(row)
        print(json.dumps(row), flush=True)
    for row in rows:
        line = f"{row['figure']:>36} {row['transitions']:>10,} transitions, batch {row['batch']:>6,}"
        print(f"{line} {row['samples_per_second']:>12,} samples/s, {row['taken_in_per_second']:>12,} appended/s")
    if options.out:
        save(rows, options.out)


if __name__ == "__main__":
    main()
