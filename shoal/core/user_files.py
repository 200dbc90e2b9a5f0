"""Python files of the user: `FILE.py:NAME`."""

import hashlib
import importlib.util
import sys
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FunctionType
from typing import Any

from shoal.core.errors import ShoalError, excerpt, unknown
from shoal.core.user_code import UserCode


def full_path(name: str) -> str:
    """`FILE.py:NAME` with an absolute path, so that a run finds the file from any folder; other names unchanged."""
    place, colon, attribute = name.rpartition(":")
    return f"{Path(place).resolve()}{colon}{attribute}" if place.endswith(".py") else name


class _UserFile(SourceFileLoader):
    """Executes the source, never a compiled copy beside it, and records its SHA-256."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        _EXECUTED[Path(path)] = hashlib.sha256(source).hexdigest()
        return self.source_to_code(source, path)


_EXECUTED: dict[Path, str] = {}
"""SHA-256 of the user's files that this process executed."""


def source_sha256(file: Path) -> str:
    """SHA-256 of a user's file: of the executed source, else of the file as it is now."""
    return _EXECUTED.get(file) or hashlib.sha256(file.read_bytes()).hexdigest()


@cache
def load_object(path: str, kind: str) -> Any:
    """The object `FILE.py:NAME`. A file is executed once."""
    place, _, attribute = path.rpartition(":")
    if not place.endswith(".py"):
        raise ShoalError(f"The {kind} {path!r} cannot be loaded: write it as FILE.py:NAME.")
    file = Path(place).resolve()
    if not file.is_file():
        raise ShoalError(f"There is no file {place!r} to load the {kind} {attribute!r} from.")
    name = f"shoal_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file, loader=_UserFile(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Warp looks a function's module up there
    with UserCode(f"{excerpt(place)} cannot be imported", str(file)):
        spec.loader.exec_module(module)
    if not hasattr(module, attribute):
        kinds = (type, FunctionType)
        own = [n for n, v in vars(module).items() if isinstance(v, kinds) and v.__module__ == name and n[0] != "_"]
        raise unknown(f"{kind} in {place} named", attribute, own)
    return getattr(module, attribute)
