"""Shoal trains reinforcement-learning agents at the speed of the hardware.

    import shoal

    run = shoal.train("cartpole", total_steps=1e6)
    print(run.evaluate(episodes=100)["cart"])

Authors of worlds import from `shoal.core`. The names of this module are loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.api import Run, load_run, resume, train

__version__ = "0.1.0"
__all__ = ["Run", "load_run", "resume", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("shoal.api"), name)
    raise AttributeError(f"shoal has no {name!r}; it offers: {', '.join(__all__)}")
