"""Calls of the user's code: an exception becomes one sentence with the user's file, line and function.

Worker processes import this module, so it imports no torch.
"""

import dis
import inspect
import site
import sysconfig
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any

from shoal.core.errors import ShoalError, excerpt

MAX_EXCERPT = 2000
"""Maximum number of characters of an exception's text in a message."""

FULL_GPU = "OutOfMemoryError"
"""Torch's out-of-memory exception, by name since workers import no torch. The run reports how many envs fit."""

SHOAL = str(Path(__file__).parents[1])

LIBRARIES = {
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
}
"""Folders of installed packages."""


class UserCodeError(ShoalError):
    """The user's code raised; its exception is the cause."""


class UserCode:
    """A context in which the user's code runs: its exceptions become a UserCodeError.

        with UserCode("ball.py:Ball cannot be built", Ball):
            world = Ball(8)

    raises "ball.py:Ball cannot be built: ValueError: no such luck (/home/me/ball.py:12 in __init__)." The location
    is the innermost running line of the user's code, else the definition of `home`, the class or function that was
    called. An exception of Shoal's own code passes unchanged, and so do Ctrl-C and a full GPU.
    """

    def __init__(
        self, failed: str, home: Any = None, passes: tuple[type[BaseException], ...] = (), exit_code: int | None = None
    ):
        """`failed` is the start of the sentence. Exceptions of the classes `passes` pass unchanged."""
        self.failed, self.home, self.passes, self.exit_code = failed, home, passes, exit_code

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, self.passes) or type(error).__name__ == FULL_GPU or not is_fault(error):
            return
        location = location_of(error, self.home)
        problem: UserCodeError | None = None
        if isinstance(error, UserCodeError):
            problem = error
        elif type(error) is ShoalError and location:
            problem = UserCodeError(f"{location}: {error}")
        elif not isinstance(error, ShoalError) and (_user_frame(error) or _is_foreign(self.home)):
            problem = UserCodeError(f"{self.failed}: {describe(error, self.home)}.")
        if problem is not None and self.exit_code is not None:
            problem.exit_code = self.exit_code
        if problem is not None and problem is not error:
            raise problem from error


def describe(error: BaseException, home: Any = None) -> str:
    """Type, text and location of an exception of the user's code, on one line."""
    location = location_of(error, home)
    return text_of(error) + (f" ({location})" if location else "")


def text_of(error: BaseException) -> str:
    """Type and text of an exception, on one line; a ShoalError is a sentence already."""
    if isinstance(error, ShoalError):
        return str(error).rstrip(".")
    try:
        text = str(error.msg if isinstance(error, SyntaxError) else error)
    except Exception:  # the user's __str__
        text = ""
    return ": ".join(part for part in (type(error).__name__, excerpt(text.strip().rstrip("."), MAX_EXCERPT)) if part)


def location_of(error: BaseException, home: Any = None) -> str:
    """`FILE:LINE in FUNCTION`: the innermost running line of the user's code, else where `home` is defined, else ""."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{excerpt(error.filename, MAX_EXCERPT)}:{error.lineno}"
    file, line, function = _user_frame(error) or _definition(home)
    return f"{excerpt(file, MAX_EXCERPT)}:{line} in {function}" if file else ""


def is_fault(error: BaseException) -> bool:
    """Whether the code raised this itself; False for Ctrl-C, which interrupts any line."""
    if not isinstance(error, KeyboardInterrupt):
        return isinstance(error, (Exception, SystemExit))
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or _is_shoal_file(last.tb_frame.f_code.co_filename):
        return False
    return last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _user_frame(error: BaseException) -> tuple[str, int, str] | None:
    """File, line and function of the innermost frame that is neither Shoal's nor an installed package's."""
    found = None
    for frame, line in walk_tb(error.__traceback__):
        if _is_user_frame(frame):
            found = frame.f_code.co_filename, line, frame.f_code.co_name
    return found


def _is_user_frame(frame: FrameType) -> bool:
    file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
    generated = file.startswith("<") or module.startswith("torch.")  # torch compiles into the temporary folder
    return not generated and not _is_shoal_file(file) and not any(_is_in(file, folder) for folder in LIBRARIES)


def _is_shoal_file(file: str) -> bool:
    return _is_in(file, SHOAL)


def _is_in(file: str, folder: str) -> bool:
    return Path(file).is_relative_to(folder)


def _definition(home: Any) -> tuple[str, int, str]:
    """File, line and name of a class or function of the user's; empty without source code."""
    home = inspect.unwrap(getattr(home, "func", home))  # of a Warp function
    try:
        file, line = inspect.getsourcefile(home) or "", inspect.getsourcelines(home)[1]
    except (OSError, TypeError, SyntaxError):
        return "", 0, ""
    name = getattr(home, "__qualname__", "")
    return (file, line, name) if name and not _is_shoal_file(file) else ("", 0, "")


def _is_foreign(home: Any) -> bool:
    """Whether `home` is not Shoal's."""
    home = getattr(home, "func", home)
    return home is not None and not f"{getattr(home, '__module__', '')}.".startswith("shoal.")
