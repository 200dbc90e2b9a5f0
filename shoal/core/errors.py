"""ShoalError, the error for bad input; checks that raise it; the format of warnings."""

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
    """Bad input: one sentence that names the thing, the value and the remedy. The command line exits with code 2."""

    exit_code = 2

    def __init__(self, message: str):
        super().__init__(_escaped(message))


NEVER_BEGAN = "stopped before the work began; nothing was saved."


class FileError(ShoalError):
    """A file or folder cannot be read or written."""


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """While reading a file or folder: turn an OSError into a FileError with its path."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}.") from None


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """While writing a file or folder: turn an OSError into a FileError with its path."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}.") from None


def require_utf8(path: Path | str, what: str) -> None:
    """Refuse a path that is not valid UTF-8 or has a null character. `what` names it in the message."""
    try:
        valid = b"\0" not in str(path).encode()
    except UnicodeEncodeError:
        valid = False
    if not valid:
        raise ShoalError(f"The path of {what} must be valid UTF-8, got {excerpt(path)!r}.")


def make_folder(path: Path | str) -> Path:
    """Create a folder and its parents where they are missing, and return its path."""
    with writing(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def temporary_folder() -> Path:
    """The folder for temporary files; refuses if none is writable."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        raise ShoalError("No folder for temporary files is writable; set TMPDIR to a writable folder.") from None


def new_file(path: Path | str, endings: tuple[str, ...], what: str) -> Path:
    """The path of a file to be written; creates its folder. Refuses other endings, and a path that is a folder."""
    path = Path(path)
    require_utf8(path, what[0].lower() + what[1:])
    if path.suffix.lower() not in endings:
        raise ShoalError(f"{what} ends in {any_of(endings)}, got {path.name!r}.")
    make_folder(path.parent)
    if path.is_dir():
        raise ShoalError(f"{path} cannot be written: it is a folder.")
    return path


def excerpt(text: Any, limit: int = 100) -> str:
    """`text` for a message: the first `limit` characters on one line, with control codes escaped."""
    line = str(text)
    return _escaped(line if len(line) <= limit else f"{line[:limit]}…", "")


def _escaped(text: str, kept: str = "\n") -> str:
    """`text` with control codes escaped: a terminal would execute them."""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def any_of(names: Sequence[str]) -> str:
    """Names as a choice: `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def require(name: str, value: Any, valid: bool, rule: str) -> None:
    """Refuse a setting that is not `valid`. The message names its flag and the rule."""
    if not valid:
        raise ShoalError(f"--{name} must be {rule}, got {value}.")


def describe_exit(code: int) -> str:
    """A clause on how a process ended, from its exit code as in Python's `subprocess`: negative for a signal."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def missing(kind: str, path: Path) -> str:
    """The message for a path that does not exist."""
    return f"There is no {kind} {path}" + ("." if path.is_absolute() else f" in {Path.cwd()}.")


_default_format = warnings.formatwarning


def plain_warnings() -> None:
    """Show UserWarnings without the line of code that raised them."""
    warnings.formatwarning = _format_warning


def _format_warning(message: Any, category: type[Warning], *location: Any) -> str:
    return f"warning: {message}\n" if category is UserWarning else _default_format(message, category, *location)


_FILE_LIMITS = (errno.EMFILE, errno.ENFILE)
_MEMORY = re.compile(r"can't allocate memory|not enough memory|Cannot allocate memory|failed to map segment")
"""Messages of torch and of the dynamic loader when the system refuses memory."""


def shortage(error: BaseException | None) -> str | None:
    """One sentence if the system refused memory, files or processes, itself or as a cause; None for other errors."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number in _FILE_LIMITS:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"No more files can be opened (the limit is {limit}): raise it (ulimit -n 4096), or lower "
                "--num-workers."
            )
        if number == errno.EAGAIN or "can't start new thread" in str(error):
            limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
            known = "that of the system" if limit == resource.RLIM_INFINITY else limit
            return (
                f"No more processes or threads can be started (the limit is {known}): raise it (ulimit -u), or lower "
                "--num-workers or --threads."
            )
        if number == errno.ENOMEM or isinstance(error, MemoryError) or _MEMORY.search(str(error)):
            return (
                "This process has reached its memory limit: lower --num-envs, --rollout-steps or --buffer-size, or "
                "raise the limit (ulimit -v, or that of the container)."
            )
        error = error.__cause__
    return None


LISTED = 20
"""Maximum number of names that an error lists."""


def unknown(kind: str, name: str, known: Iterable[str]) -> ShoalError:
    """The error for an unknown name. It suggests a similar name, or lists the known ones."""
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
