"""Compiled kernels on disk: their SHA-256 is checked before they run, and they are compiled again if the check fails.

Warp trusts its cache: a truncated file fails at every start, a flipped byte runs as machine code. Shoal therefore
writes a checksum file beside each binary, and lets Warp compile only in a private folder. The compiled files are then
moved into the cache, the checksums last, so that another process never loads an incomplete entry.
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
from typing import Any, cast

import warp as wp
from warp._src import context as warp_context

from shoal.core.errors import excerpt, temporary_folder
from shoal.core.kernels import WARP_LOCK
from shoal.core.temporary import TemporaryFolder

CHECKSUMS = ".sha256"
"""Ending of the checksum file of a binary: JSON, file name -> SHA-256."""

PARSE_ERROR = "Error while parsing function"
"""Start of Warp's message about a function that it cannot translate; the function's name follows."""


def load_kernel(kernel: Any, device: str, block_dim: int) -> None:
    """Load a kernel's module from the cache if its checksums match; compile it otherwise.

    A damaged entry is replaced with a warning. An error of the compiler is raised unchanged.
    """
    with WARP_LOCK:
        module, target = kernel.module, wp.get_device(device)
        block_dim = 1 if target.is_cpu else block_dim
        loaded = module.execs.get((target.context, block_dim))
        if loaded is not None and loaded.module_hash == module.get_module_hash(block_dim):
            return
        assert wp.config.kernel_cache_dir is not None  # set by wp.init
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
    """The damage of a module's folder in the cache: None if intact, "" if there are no checksums to compare."""
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
    """The bytes of a regular file. Refuses pipes and devices, whose reading may never end."""
    if not path.is_file():
        raise FileNotFoundError(0, "it is not a file", str(path))
    return path.read_bytes()


def _compile(module: Any, target: Any, block_dim: int, entry: Path, binary: str) -> None:
    """Compile in a private folder of the cache and publish; in the temporary folder, with a warning, if that fails."""
    cache = entry.parent
    try:
        with TemporaryFolder("kernels", [cache, temporary_folder()]) as folder:
            _load_from(folder, module, target, block_dim)
            if folder.parent == cache:
                _publish(folder / entry.name, entry, binary)
                return
            problem = "no folder can be created there"
    except Exception as error:  # Warp raises bare exceptions
        if PARSE_ERROR in str(error):  # it would fail in any folder
            raise
        problem = error.strerror if isinstance(error, OSError) else excerpt(error)
        module.mark_modified()  # Warp would raise the recorded error again
        with TemporaryFolder("kernels") as folder:
            _load_from(folder, module, target, block_dim)
    text = f"Warp's kernel cache {cache} cannot be written ({problem}); kernels are compiled elsewhere."
    warnings.warn(text, stacklevel=4)


@cache
def _headers() -> TemporaryFolder:
    """A folder for the headers that Warp's compiler prepares. Unlike Warp's own it is removed after a kill too."""
    return TemporaryFolder("headers")


def _load_from(folder: Path, module: Any, target: Any, block_dim: int) -> None:
    """Load a module with `folder` as Warp's cache."""
    headers = SimpleNamespace(name=str(_headers().path))  # Warp reads only the name
    warp_context.runtime._pch_dirs[threading.get_ident()] = cast(Any, headers)
    cache = wp.config.kernel_cache_dir
    wp.config.kernel_cache_dir = str(folder)
    try:
        module.load(target, block_dim)
    finally:
        wp.config.kernel_cache_dir = cache


def _publish(compiled: Path, entry: Path, binary: str) -> None:
    """Move a compiled module into the cache, replacing what is there; its checksums come last."""
    names = [binary, f"{entry.name}.meta"]
    digests = {name: hashlib.sha256((compiled / name).read_bytes()).hexdigest() for name in names}
    sums = compiled / f"{binary}{CHECKSUMS}"
    sums.write_text(json.dumps(digests) + "\n")
    if not entry.is_dir():
        entry.unlink(missing_ok=True)
    entry.mkdir(exist_ok=True)
    others = [path for path in compiled.iterdir() if path != sums]
    for path in [*others, sums]:
        target = entry / path.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        os.replace(path, target)
