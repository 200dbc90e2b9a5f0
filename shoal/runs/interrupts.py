"""Signals that stop a run: after the first it finishes the iteration and saves, a second one stops it at once."""

import contextlib
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.core.streams import print_error
from shoal.core.temporary import close_all

DUPLICATE_WINDOW = 1.0
"""Seconds after the first signal in which others count as duplicates: a terminal and a parent may both send one."""

_listening = False
"""Whether a thread of this process ends it at a second signal."""


def end_signals() -> list[signal.Signals]:
    """The signals that stop a run; without SIGHUP if it is ignored, as under nohup."""
    found = [signal.SIGINT, signal.SIGTERM]
    return found if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*found, signal.SIGHUP]


class StopRequests:
    """Tells a second stop signal from the first and its duplicates."""

    def __init__(self):
        self._first: float | None = None

    def add(self, number: int, second: str) -> bool:
        """Whether this is the second request; the first prints a line that ends with `second`."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            print_error(f"shoal: {signal.Signals(number).name} received, ending after this iteration; {second}")
        return now - self._first > DUPLICATE_WINDOW


def is_listening() -> bool:
    """Whether a thread of this process ends it at a second signal."""
    return _listening


@contextmanager
def ended_at_second_signal() -> Iterator[None]:
    """End this process at a second signal at once, without saving, even if its main thread is in native code.

    Only for the command line: a Python program that calls `shoal.train` must not be ended.
    """
    global _listening
    if threading.current_thread() is not threading.main_thread():  # signals arrive there only
        yield
        return
    inner, outer = os.pipe()
    os.set_blocking(outer, False)
    before = signal.set_wakeup_fd(outer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(inner,), daemon=True)
    thread.start()
    _listening = True
    try:
        yield
    finally:
        _listening = False
        signal.set_wakeup_fd(before)
        os.close(outer)
        thread.join()
        os.close(inner)


def _listen(descriptor: int) -> None:
    """Read signal numbers until the other end of the pipe is closed."""
    requests = StopRequests()
    while found := os.read(descriptor, 1):
        if found[0] in end_signals() and requests.add(found[0], "a second signal stops at once, without saving."):
            _exit_now(found[0])


def _exit_now(number: int) -> None:
    """Exit, after killing child processes and removing temporary folders."""
    print_error(f"shoal: stopped at once by {signal.Signals(number).name}; only the last checkpoint is kept.")
    kill_descendants()
    close_all()
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # the live progress hides the cursor
    os._exit(128 + number)


def kill_descendants() -> None:
    """Kill all descendants of this process. Needs /proc."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = stat.read_bytes().rpartition(b")")[2].split()[1]
            children[int(parent)].append(int(stat.parent.name))
    found = list(children[os.getpid()])
    for process in found:
        found += children[process]
    for process in found:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
