"""Optional libraries: the extra of the package that installs each, and the error for a missing one."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shoal.core.errors import ShoalError

EXTRAS = {
    "Box2D": "box2d",
    "ale_py": "atari",
    "envpool": "envpool",
    "mujoco": "mujoco",
    "pettingzoo": "multi",
    "pygame": "gym",
}
"""Module -> extra that installs it."""


def import_extra(module: str) -> Any:
    """Import an optional module."""
    with needs_extras("This world"):
        return importlib.import_module(module)


@contextmanager
def needs_extras(name: str) -> Iterator[None]:
    """Turn the error of a missing library into one sentence: `name` needs it, and how to install it."""
    try:
        yield
    except Exception as error:
        module = missing_module(error)
        if module is None:
            raise
        remedy = f"pip install 'shoal[{EXTRAS[module]}]'" if module in EXTRAS else "install it with pip"
        raise ShoalError(f"{name} needs {module}, which is not installed: {remedy}.") from None


def missing_module(error: BaseException | None) -> str | None:
    """The missing library that an error or its cause names (the cause of Gymnasium's DependencyNotInstalled)."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name.partition(".")[0]
        error = error.__cause__
    return None
