"""Compiled kernels on disk: checked by SHA-256 before they run, compiled again where the check fails.

Warp trusts what its cache holds: a truncated file fails at every start, a flipped byte runs as machine code. Shoal
therefore writes a checksum file beside each binary, and lets Warp compile in a private folder only. What was compiled
there is moved into the cache, the checksums last, so that other processes never take half an entry for a whole one.
"""

import hashlib
import json
import os
import shutil
import threading
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import warp as wp

from shoal.core.errors import excerpt, temporary_folder
from shoal.core.kernels import LOADING
from shoal.core.temporary import TemporaryFolder

CHECKSUMS = ".sha256"
"""Ending of the checksum file of a binary: JSON, file name -> SHA-256."""

PARSE_ERROR = "Error while parsing function"
"""What Warp writes before the name of a function that it cannot translate."""


def load_kernel(kernel: Any, device: str, block_dim: int) -> None:
    """Load a kernel's module: from the cache if its checksums fit, else compiled.

    Damage in the cache is a warning, and the entry is replaced. An error of the compiler is raised unchanged.
    """
    with LOADING:
        module, target = kernel.module, wp.get_device(device)
        block_dim = 1 if target.is_cpu else block_dim
        loaded = module.execs.get((target.context, block_dim))
        if loaded is not None and loaded.module_hash == module.get_module_hash(block_dim):
            return
        entry = Path(wp.config.kernel_cache_dir) / module.get_module_identifier(block_dim)
        binary = module._get_compile_output_name(target, block_dim=block_dim)
        problem = find_damage(entry, binary)
        if problem is None:
            try:
                module.load(target, block_dim)
                return
            except Exception as error:  # Warp raises bare exceptions
                problem = f"{entry / binary} cannot be loaded: {excerpt(error)}"
        _compile(module, target, block_dim, entry, binary)
        if problem:
            warnings.warn(f"Warp's kernel cache was damaged ({problem}); the kernel was compiled again.", stacklevel=3)


def find_damage(entry: Path, binary: str) -> str | None:
    """What is wrong with a module's folder in the cache: None if nothing is, "" if it holds no checksums to compare."""
    sums = entry / f"{binary}{CHECKSUMS}"
    try:
        if not os.path.lexists(sums):
            return f"{entry} is not a folder" if os.path.lexists(entry) and not entry.is_dir() else ""
        expected = json.loads(_read(sums))
        if not isinstance(expected, dict) or binary not in expected:
            return f"{sums} holds no checksums"
        for name, digest in expected.items():
            if hashlib.sha256(_read(entry / name)).hexdigest() != digest:
                return f"the SHA-256 of {entry / name} has changed"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    except (ValueError, RecursionError):
        return f"{sums} holds no checksums"
    return None


def _read(path: Path) -> bytes:
    """The bytes of a regular file; a pipe or a device would never end."""
    if not path.is_file():
        raise FileNotFoundError(0, "it is not a file", str(path))
    return path.read_bytes()


def _compile(module: Any, target: Any, block_dim: int, entry: Path, binary: str) -> None:
    """Compile in a private folder of the cache and publish, or else in the temporary folder, with a warning."""
    cache = entry.parent
    try:
        with TemporaryFolder("kernels", [cache, temporary_folder()]) as folder:
            _load_from(folder, module, target, block_dim)
            if folder.parent == cache:
                _publish(folder / entry.name, entry, binary)
                return
            problem = "no folder can be made there"
    except Exception as error:  # Warp raises bare exceptions
        if PARSE_ERROR in str(error):  # no other folder would change that
            raise
        problem = error.strerror if isinstance(error, OSError) else excerpt(error)
        module.mark_modified()  # Warp would raise the recorded error again
        with TemporaryFolder("kernels") as folder:
            _load_from(folder, module, target, block_dim)
    text = f"Warp's kernel cache {cache} cannot be written ({problem}); kernels are compiled elsewhere."
    warnings.warn(text, stacklevel=4)


@cache
def _headers() -> TemporaryFolder:
    """A folder for the headers that Warp's compiler prepares: unlike Warp's own, it is removed after kills too."""
    return TemporaryFolder("headers")


def _load_from(place: Path, module: Any, target: Any, block_dim: int) -> None:
    """Load a module with another folder as Warp's cache."""
    wp._src.context.runtime._pch_dirs[threading.get_ident()] = SimpleNamespace(name=str(_headers().path))
    shared = wp.config.kernel_cache_dir
    wp.config.kernel_cache_dir = str(place)
    try:
        module.load(target, block_dim)
    finally:
        wp.config.kernel_cache_dir = shared


def _publish(made: Path, entry: Path, binary: str) -> None:
    """Move a compiled module into the cache, over whatever is there; its checksums come last."""
    names = [binary, f"{entry.name}.meta"]
    digests = {name: hashlib.sha256((made / name).read_bytes()).hexdigest() for name in names}
    sums = made / f"{binary}{CHECKSUMS}"
    sums.write_text(json.dumps(digests) + "\n")
    if not entry.is_dir():
        entry.unlink(missing_ok=True)
    entry.mkdir(exist_ok=True)
    others = [path for path in made.iterdir() if path != sums]
    for path in [*others, sums]:
        place = entry / path.name
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        os.replace(path, place)
