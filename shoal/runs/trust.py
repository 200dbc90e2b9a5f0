"""The user code that a run needs, and whether it may be executed.

A run folder is data. Most runs name only bundled worlds and networks, or environments of installed packages. A run that
needs a user's file records it in config.json with its SHA-256, signed with this user's key. Without a valid signature,
or if the file has changed, nothing is imported unless the user says --trust.

This module reads names and files; it imports no user code.
"""

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import sys
import warnings
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.registry import HOST_KINDS, kind_of_world
from shoal.core.user_files import full_path, source_sha256

KEY_BYTES = 32

ENV_PLUGINS = "gymnasium.envs"
"""Entry point group of packages that register environments with Gymnasium."""

MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def needed_code(world: str, policies: Iterable[str]) -> dict[str, Path | None]:
    """Map each name in `world` and `policies` that refers to user code to its source file; None if not found."""
    found: dict[str, Path | None] = {}
    kind = kind_of_world(world)
    if kind == "file":
        found[world] = _source_file(world)
    elif kind in HOST_KINDS and (module := _module_to_import(kind, world.partition(":")[2])) is not None:
        found[world] = _module_file(module)
    found.update({policy: _source_file(policy) for policy in policies if ":" in policy})
    return found


def record_code(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The part of config.json about user code: files, SHA-256 and this user's signature."""
    code = [
        {"reference": reference, "file": str(file), "sha256": source_sha256(file)}
        for reference, file in sorted(needed_code(parts["world"], _policies(parts)).items())
        if file is not None
    ]
    if not code:
        return {"code": []}
    try:
        return {"code": code, "signature": _sign(parts, code, _user_key(create=True))}
    except OSError as error:
        warnings.warn(f"This run cannot be signed ({error}); opening it will need --trust.", stacklevel=2)
        return {"code": code}


def check_code(path: Path, parts: Mapping[str, Any], trust: bool) -> None:
    """Raise ShoalError if a run needs code that is neither signed by this user nor trusted."""
    needed = needed_code(parts["world"], _policies(parts))
    if not needed or trust:
        return
    recorded = _recorded_hashes(path, parts)
    changed = []
    for reference, file in sorted(needed.items()):
        if file is None or not file.is_file():
            raise ShoalError(f"{path.parent} needs {reference}, whose source is not found.")
        before, now = recorded.get(reference), source_sha256(file)
        if before != now:
            was = "is not recorded in config.json" if before is None else f"differs since training (was {before[:12]}…)"
            changed.append(f"{reference} (in {file}: its SHA-256 {now[:12]}… {was})")
    if changed:
        raise ShoalError(f"{path.parent} would execute {', '.join(changed)}: read it, then give --trust to run it.")
    if not _is_signed(parts):
        listed = ", ".join(f"{reference} (in {file})" for reference, file in sorted(needed.items()))
        raise ShoalError(
            f"{path.parent} would execute {listed}, and you have not trained it on this machine: read the code, then "
            "give --trust to run it."
        )


def _recorded_hashes(path: Path, parts: Mapping[str, Any]) -> dict[str, str]:
    """Reference -> SHA-256, as recorded in config.json."""
    try:
        return {str(entry["reference"]): str(entry["sha256"]) for entry in parts.get("code", [])}
    except (KeyError, TypeError, AttributeError):
        raise ShoalError(f"{path}: code must be a list of objects with reference, file and sha256.") from None


def _policies(parts: Mapping[str, Any]) -> list[str]:
    """All values of the setting `encoder`: the run's and the groups'."""
    groups = [entry.partition("=") for entry in parts["multi_agent"].get("group_settings", ())]
    own = [value for name, _, value in groups if name.rpartition(".")[2] == "encoder"]
    return [full_path(policy) for policy in (parts["policy"].get("encoder", "auto"), *own)]


def _source_file(reference: str) -> Path:
    place = full_path(reference).rpartition(":")[0]
    if not place.endswith(".py"):
        raise ShoalError(f"{reference!r} is no reference to code: write FILE.py:NAME.")
    return Path(place)


def _module_to_import(kind: str, name: str) -> str | None:
    """The module that an environment's name would import; None if an installed package registered it."""
    if kind == "gym" and ":" in name:
        module = name.partition(":")[0]
        registered = {entry.module.partition(".")[0] for entry in entry_points(group=ENV_PLUGINS)}
        return None if module.partition(".")[0] in registered else module
    if kind == "zoo":
        own = name if name.startswith("pettingzoo.") else f"pettingzoo.{name}"
        return None if _module_file(own) is not None else name
    return None


def _module_file(module: str) -> Path | None:
    """The source file of a module, found without importing it or its packages."""
    if not MODULE_NAME.fullmatch(module):
        return None
    place, found = None, None
    for end in [*(match.start() for match in re.finditer(r"\.", module)), len(module)]:
        specs = (finder.find_spec(module[:end], place) for finder in sys.meta_path)
        found = next((spec for spec in specs if spec is not None), None)
        if found is None:
            return None
        place = found.submodule_search_locations
    return Path(found.origin) if found is not None and found.has_location and found.origin else None


# --- signing ---------------------------------------------------------------------------------------------------------


def _sign(parts: Mapping[str, Any], code: list[dict[str, str]], key: bytes) -> str:
    """HMAC-SHA256 over the code and all settings that reach it."""
    signed = {
        "world": parts["world"],
        "world_config": parts["world_config"],
        "policies": _policies(parts),
        "code": code,
    }
    return hmac.new(key, json.dumps(signed, sort_keys=True, default=str).encode(), hashlib.sha256).hexdigest()


def _is_signed(parts: Mapping[str, Any]) -> bool:
    try:
        good = _sign(parts, parts["code"], _user_key(create=False))
    except (OSError, KeyError):
        return False
    return hmac.compare_digest(good.encode(), str(parts.get("signature", "")).encode())


def key_path() -> Path:
    """Path of this user's key."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path("~/.local/state").expanduser()) / "shoal" / "signing.key"


def _user_key(create: bool) -> bytes:
    """This user's key on this machine; with `create`, it is created on first use, with mode 600."""
    path = key_path()
    if create and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".signing.{os.getpid()}.{secrets.token_hex(4)}")
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(handle, secrets.token_bytes(KEY_BYTES))
            os.fsync(handle)
            with contextlib.suppress(FileExistsError):  # another process was first: use its key
                os.link(fresh, path)
        finally:
            os.close(handle)
            fresh.unlink()
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} is not a file that its owner alone can read; remove it or chmod 600 it")
        key = os.read(handle, KEY_BYTES + 1)
    finally:
        os.close(handle)
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} is damaged; remove it")
    return key
