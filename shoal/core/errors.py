"""The one error that is meant for the person at the keyboard, checks that raise it, and how warnings are shown."""

import difflib
import errno
import re
import resource
import signal
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class ShoalError(Exception):
    """Bad input: one sentence that names the thing, the value and the remedy. The command line exits with 2."""

    exit_code = 2

    def __init__(self, message: str):
        super().__init__(_escaped(message))


NEVER_BEGAN = "stopped before the work began; nothing was saved."


class FileError(ShoalError):
    """A file or folder cannot be read or written."""


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Read a file or folder; an OSError becomes a FileError with its path."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}.") from None


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Write a file or folder; an OSError becomes a FileError with its path."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}.") from None


def require_utf8(path: Path | str, what: str) -> None:
    """Refuse a path that messages and texts cannot hold, or that has a null character."""
    try:
        good = b"\0" not in str(path).encode()
    except UnicodeEncodeError:
        good = False
    if not good:
        raise ShoalError(f"The path of {what} must be valid UTF-8, got {excerpt(path)!r}.")


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
    require_utf8(path, what[0].lower() + what[1:])
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
    return _escaped(cut, "")


def _escaped(text: str, kept: str = "\n") -> str:
    """`text` with control codes escaped, so that a terminal only shows it."""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def any_of(names: Sequence[str]) -> str:
    """Names as a choice: "a, b or c"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def require(name: str, value: Any, good: bool, rule: str) -> None:
    """Refuse a setting that breaks a rule, by the name of its flag."""
    if not good:
        raise ShoalError(f"--{name} must be {rule}, got {value}.")


def how_it_ended(code: int) -> str:
    """What to say of a process with this exit code, as Python's `subprocess` gives it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended by itself with exit code {code}"


def missing(kind: str, path: Path) -> str:
    """What to say of a path that leads nowhere."""
    return f"There is no {kind} {path}" + ("." if path.is_absolute() else f" in {Path.cwd()}.")


_usual = warnings.formatwarning


def plain_warnings() -> None:
    """Show warnings that are meant for the person at the keyboard without the line of code that gave them."""
    warnings.formatwarning = _as_told


def _as_told(message: Any, category: type[Warning], *place: Any) -> str:
    return f"warning: {message}\n" if category is UserWarning else _usual(message, category, *place)


_FILES = (errno.EMFILE, errno.ENFILE)
_MEMORY = re.compile(r"can't allocate memory|not enough memory|Cannot allocate memory|failed to map segment")
"""What torch and the loader of libraries say."""


def shortage(error: BaseException | None) -> str | None:
    """One sentence if the system has refused memory, files or processes; None for other errors."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number in _FILES:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"No more files can be opened (the limit is {limit}): raise it (ulimit -n 4096), or lower "
                "--num-workers."
            )
        if number == errno.EAGAIN or "can't start new thread" in str(error):
            limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
            shown = "that of the system" if limit == resource.RLIM_INFINITY else limit
            return (
                f"No more processes or threads can be started (the limit is {shown}): raise it (ulimit -u), or lower "
                "--num-workers or --threads."
            )
        if number == errno.ENOMEM or isinstance(error, MemoryError) or _MEMORY.search(str(error)):
            return (
                "The memory that this process may have is full: lower --num-envs, --rollout-steps or --buffer-size, or raise "
                "its limit (ulimit -v, or that of its container)."
            )
        error = error.__cause__
    return None


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
