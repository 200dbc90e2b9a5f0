"""Kinds of damage to a file on disk, for tests of readers."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def flip(path: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Damage that replaces the file by something else."""

    def damage(path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        make(path)

    return damage


CONTENTS = {
    "flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n{}"),
    "text": lambda path: path.write_text("[1, 2]"),
}
"""Damage to the content of a file."""

DAMAGES = CONTENTS | {
    "missing": replace_by(lambda path: None),
    "a folder": replace_by(lambda path: (path / "inside").mkdir(parents=True)),
    "a pipe": replace_by(os.mkfifo),
    "a dangling link": replace_by(lambda path: path.symlink_to("nowhere")),
    "an endless device": replace_by(lambda path: path.symlink_to("/dev/zero")),
}


def places_of(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every element of a JSON value, as keys and indices."""
    yield before
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places_of(part, (*before, key))
