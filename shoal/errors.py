"""The one error that is meant for the person at the keyboard, checks that raise it, and how warnings are shown."""

import difflib
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class ShoalError(Exception):
    """Bad input: one sentence that names the thing, the value and the remedy. The command line exits with 2."""

    exit_code = 2


NEVER_BEGAN = "stopped before the work began; nothing was saved."


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Writes a file or a folder; where that cannot be done, it says so by name."""
    try:
        yield
    except OSError as error:
        raise ShoalError(f"{path} cannot be written: {error.strerror or error}.") from None


def make_folder(path: Path | str) -> Path:
    """A folder for files that are to come, made if it is not there."""
    with writing(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def temporary_folder() -> Path:
    """The folder for temporary files; refuses where none can be written."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        raise ShoalError("No folder for temporary files can be written; set TMPDIR to a folder with room.") from None


def new_file(path: Path | str, endings: tuple[str, ...], what: str) -> Path:
    """Where a file is to be written, in a folder that is there; refuses other endings, and what cannot be a file."""
    path = Path(path)
    if path.suffix.lower() not in endings:
        raise ShoalError(f"{what} ends in {any_of(endings)}, got {path.name!r}.")
    make_folder(path.parent)
    if path.is_dir():
        raise ShoalError(f"{path} cannot be written: it is a folder.")
    return path


def excerpt(text: Any, limit: int = 100) -> str:
    """`text` for a message: at most `limit` characters, control codes escaped, on one line."""
    shown = str(text)
    cut = shown if len(shown) <= limit else f"{shown[:limit]}…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)


def any_of(names: Sequence[str]) -> str:
    """Names as a choice: "a, b or c"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def require(name: str, value: Any, good: bool, rule: str) -> None:
    """Refuse a setting that breaks a rule, by the name of its flag."""
    if not good:
        raise ShoalError(f"--{name} must be {rule}, got {value}.")


def missing(kind: str, path: Path) -> str:
    """What to say of a path that leads nowhere."""
    return f"There is no {kind} {path}" + ("." if path.is_absolute() else f" in {Path.cwd()}.")


_usual = warnings.formatwarning


def plain_warnings() -> None:
    """Show warnings that are meant for the person at the keyboard without the line of code that gave them."""
    warnings.formatwarning = _as_told


def _as_told(message: Any, category: type[Warning], *place: Any) -> str:
    return f"warning: {message}\n" if category is UserWarning else _usual(message, category, *place)


LISTED = 20
"""Names that an error lists."""


def unknown(kind: str, name: str, known: Iterable[str]) -> ShoalError:
    """An error for a name that does not exist: with a name that resembles it, if there is one, or with a list."""
    names, name = sorted(known), excerpt(name)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        remedy = f"did you mean {near[0]!r}?"
    elif names:
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        remedy = f"choose one of: {', '.join(names[:LISTED])}{more}."
    else:
        remedy = "there is none to choose from."
    return ShoalError(f"There is no {kind} {name!r}; {remedy}")
