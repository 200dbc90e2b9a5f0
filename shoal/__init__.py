"""Shoal trains reinforcement-learning agents at the speed of the hardware.

    import shoal

    run = shoal.train("cartpole", total_steps=1e6)
    print(run.evaluate(episodes=100)["cart"])

Authors of worlds import from `shoal.core`. What stands here is loaded when it is first used.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# Threads of torch that wait for each other give their core away soon. By default they spin for milliseconds, which
# starves whoever else wants the core: worker processes, other programs. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

if TYPE_CHECKING:
    from shoal.api import Run, load_run, resume, train

__version__ = "0.1.0"
__all__ = ["Run", "load_run", "resume", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("shoal.api"), name)
    raise AttributeError(f"shoal has no {name!r}; it offers: {', '.join(__all__)}")
