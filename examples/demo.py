"""The demo: train cart-pole on the machine it finds, evaluate it, draw the learning curve, record the agent."""

import shoal
from shoal.view.plot import plot_runs
from shoal.view.video import record


def main(**settings) -> None:
    """Train, evaluate, draw and record; then say where everything is. Settings are those of `shoal train`."""
    run = shoal.train("cartpole", **settings)
    score = run.evaluate(episodes=100)["cart"]
    curve = plot_runs([run.path])
    video = record(run, steps=300)
    print(f"\nThe pole stands for {score.mean:.0f} of 500 steps (mean of {score.episodes} episodes).")
    print(f"  learning curve  {curve}")
    print(f"  recording       {video}")
    print(f"  run folder      {run.path}")
    print("\nTry next:")
    print("  .venv/bin/shoal train pendulum      another world; `.venv/bin/shoal list` shows them all")
    print(f"  .venv/bin/shoal eval {run.path}")
    print("  .venv/bin/shoal bench cartpole      how fast this machine is")


if __name__ == "__main__":
    main()
