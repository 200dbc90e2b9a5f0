"""Training from Python: `shoal.train`, `shoal.resume`, `shoal.load_run`."""

from typing import Any

from shoal.runs.jobs import make_job
from shoal.runs.run import Run, load_run
from shoal.runs.start import resume, train_job

__all__ = ["Run", "load_run", "resume", "train"]


def train(world: str, **settings: Any) -> Run:
    """Train on a world and return the run: `shoal.train("cartpole", total_steps=1e6)`.

    Args:
        world: Name of a bundled world, `FILE.py:NAME`, or an environment of another library such as `gym:Ant-v5`.
        settings: Settings of the command line, with underscores; `world_config=dict(...)` holds the world's settings.
    """
    return train_job(make_job(world, **settings))
