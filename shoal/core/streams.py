"""Standard streams that may be closed, full or without a reader: text that cannot be written is dropped."""

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast


class Output:
    """A text stream whose writes never fail: text that cannot be written is dropped, and `error` is the reason."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.error: OSError | None = None
        """The last error, except a pipe without a reader."""

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    def end(self) -> None:
        """Write or drop the buffered text: the interpreter flushes at its exit and must not fail there."""
        self.flush()
        if self.error is not None:
            self._discard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._discard()
        except OSError as error:
            self.error = error

    def _discard(self) -> None:
        """Redirect the descriptor to /dev/null, for buffered and later text."""
        with contextlib.suppress(OSError):  # a stream without a descriptor buffers nothing
            descriptor = self._stream.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)


def open_descriptors() -> None:
    """Open closed standard descriptors on /dev/null: a file that is opened later would take their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number


@contextmanager
def standard_streams() -> Iterator[Output]:
    """Replace stdout and stderr by streams whose writes never fail, and yield stdout; no descriptor stays closed."""
    open_descriptors()
    before = sys.stdin, sys.stdout, sys.stderr
    out, errors = (Output(stream or os.fdopen(i, "w", closefd=False)) for i, stream in enumerate(before[1:], 1))
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, errors)
    try:
        yield out
    finally:
        out.end()
        errors.end()
        sys.stdin, sys.stdout, sys.stderr = before


def print_error(text: str) -> None:
    """Print a line on stderr if it can be written."""
    if sys.stderr is not None:
        print(text, file=Output(sys.stderr), flush=True)
