"""The demo: train taggers and runners against each other, evaluate, plot and record them."""

import sys

import torch

import shoal
from shoal.runs.session import Stopped
from shoal.view.plot import plot_runs
from shoal.view.video import record

CPU_STEPS = 300_000
"""Enough to learn chasing and fleeing: about two minutes on two cores."""


def main(**settings) -> None:
    """Train, evaluate, plot and record, then print where the files are. Settings are those of `shoal train`."""
    if not torch.cuda.is_available():
        settings = {"total_steps": CPU_STEPS, **settings}
    run = shoal.train("tag-continuous", **settings)
    config = run.job.world_config
    tagged = {
        "random taggers, random runners": ["tagger", "runner"],
        "trained taggers, random runners": ["runner"],
        "random taggers, trained runners": ["tagger"],
        "trained taggers, trained runners": [],
    }
    print(f"\nRunners tagged of {config.num_runners} by {config.num_taggers} taggers in {config.max_steps} steps:")
    for label, random in tagged.items():
        score = shoal.load_run(run.path, random=random).evaluate(episodes=50).reports["tagged"]
        print(f"  {label:34} {score.mean:5.1f}")
    curve = plot_runs([run.path])
    video = record(run, steps=300, stochastic=True)
    sheet = record(run, run.path / "videos" / "sheet.png", steps=30, stochastic=True)
    print(f"\n  learning curve  {curve}")
    print(f"  recording       {video}")
    print(f"  sixteen games   {sheet}")
    print(f"  run folder      {run.path}")
    print("\nTry next:")
    print("  .venv/bin/shoal train cartpole      another world; `.venv/bin/shoal list` shows them all")
    print(f"  .venv/bin/shoal eval {run.path} --random runner")
    print("  .venv/bin/shoal bench tag-grid      how fast this machine is")


if __name__ == "__main__":
    try:
        main()
    except Stopped as stop:
        print(f"demo: {stop}", file=sys.stderr)
        sys.exit(stop.exit_code)
