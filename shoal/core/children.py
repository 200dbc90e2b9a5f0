"""Commands that start Python child processes with the import path of this process.

`python -m` would search the current folder first, which may be a run folder of another user with a `torch.py` in it.
"""

import os
import sys


def python_command(module: str, *words: str) -> list[str]:
    """The command that runs a module of Shoal as a program, with the `sys.path` of this process."""
    path = [os.path.abspath(folder) for folder in sys.path]  # "" is the current folder
    setup = f"import runpy, sys; sys.path[:] = {path!r}"
    return [sys.executable, "-P", "-c", f"{setup}; runpy.run_module({module!r}, None, '__main__', True)", *words]
