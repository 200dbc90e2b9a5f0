"""Python processes that this one starts: they import from the same folders as this one, and from no others.

`python -m` would search the current folder first. That may be a run folder of somebody else, with a `torch.py` in it.
"""

import os
import sys


def python_command(module: str, *words: str) -> list[str]:
    """The command that executes a module of Shoal as a program, in an interpreter with the `sys.path` of this one."""
    path = [os.path.abspath(folder) for folder in sys.path]  # "" is the current folder
    begin = f"import runpy, sys; sys.path[:] = {path!r}"
    return [sys.executable, "-P", "-c", f"{begin}; runpy.run_module({module!r}, None, '__main__', True)", *words]
