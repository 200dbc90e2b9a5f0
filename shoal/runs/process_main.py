"""Entry point of each process of `shoal train --processes N`: `python -m shoal.runs.process_main`."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from shoal.core.errors import ShoalError, plain_warnings, shortage
from shoal.core.launch_info import is_follower
from shoal.core.streams import standard_streams
from shoal.core.user_code import UserCode
from shoal.runs.interrupts import end_signals
from shoal.runs.launching import PEER_LOST, STOPPED, TRUST, Outcome
from shoal.runs.session import Stopped
from shoal.runs.start import continue_run
from shoal.training.processes import LeaderError, PeerLost


def work(path: str, outcome: str, *flags: str) -> int:
    """Train as one process of a launch; returns the exit code.

    Errors that a restart would repeat are written to the outcome file, with exit code 0.
    """
    plain_warnings()
    file = Path(outcome)
    threading.Thread(target=_watch, args=(file, os.getppid()), daemon=True).start()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, end_signals())
        with UserCode("Training failed"):
            continue_run(path, TRUST in flags)
    except LeaderError:
        return 0
    except PeerLost:
        return 0 if file.exists() else PEER_LOST
    except (ShoalError, Stopped) as end:
        if is_follower():  # the leader's message is more complete
            _wait_for(file.exists, 3.0)
        _write_outcome(file, Outcome(end.exit_code, str(end), isinstance(end, Stopped)))
    except KeyboardInterrupt:
        _write_outcome(file, Outcome(130, STOPPED))
    except Exception as error:
        problem = shortage(error)
        if problem is None:
            raise
        _write_outcome(file, Outcome(1, problem))
    return 0


def _write_outcome(file: Path, outcome: Outcome) -> None:
    """Write the outcome, unless another process has."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
        json.dump(vars(outcome), temporary)
    with contextlib.suppress(FileExistsError):
        os.link(temporary.name, file)


def _watch(outcome: Path, parent: int) -> None:
    """Exit 5 s after another process has written the outcome, or at once if the launcher is gone."""
    while os.getppid() == parent:
        if outcome.exists():
            time.sleep(5.0)
            os._exit(0)
        time.sleep(0.25)
    os._exit(1)


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.05)


if __name__ == "__main__":
    with standard_streams():
        code = work(*sys.argv[1:])
    sys.exit(code)
