"""The cache folder, and environment variables that Shoal's programs set. Importing shoal sets none."""

import contextlib
import os
import sys
from pathlib import Path


def cache_root() -> Path:
    """Shoal's folder among the caches of this platform."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "shoal"


def program_defaults() -> dict[str, str]:
    """Environment variables that Shoal's programs set if the user has not.

    GOMP_SPINCOUNT: waiting threads of torch would spin for milliseconds and take cores from environments and other
    programs. TORCHINDUCTOR_CACHE_DIR, a private folder: torch's default is a fixed name in the shared temporary folder,
    which another user can create first.
    """
    found = {"GOMP_SPINCOUNT": "2000"}
    compiled = cache_root() / "torch"
    with contextlib.suppress(OSError):  # then torch's default applies
        compiled.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(compiled, os.W_OK):
            found["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
    return found


def set_program_defaults() -> None:
    """Set the program defaults in this process. Call this before torch is imported: torch reads them then."""
    for name, value in program_defaults().items():
        os.environ.setdefault(name, value)
