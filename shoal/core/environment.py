"""Folders for caches, and environment variables of the programs of Shoal. Importing shoal sets none."""

import contextlib
import os
import sys
from pathlib import Path


def cache_root() -> Path:
    """The folder where this platform keeps what can be made again."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "shoal"


def program_defaults() -> dict[str, str]:
    """Variables that a program of Shoal sets where the user has not.

    Threads of torch spin for milliseconds when they wait for each other, which keeps cores from environments and other
    programs. Code that torch compiles goes to a private folder: its default is a name in the folder for temporary files
    that another user can take first.
    """
    found = {"GOMP_SPINCOUNT": "2000"}
    compiled = cache_root() / "torch"
    with contextlib.suppress(OSError):  # torch's own default then
        compiled.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(compiled, os.W_OK):
            found["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
    return found


def set_program_defaults() -> None:
    """Set these variables in this process; before torch is imported, which reads them."""
    for name, value in program_defaults().items():
        os.environ.setdefault(name, value)
