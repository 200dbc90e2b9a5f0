"""One of the processes that `shoal train --processes N` starts: `python -m shoal.runs.process_main`."""

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
from shoal.core.launch_info import follows
from shoal.core.streams import standard_streams
from shoal.core.user_code import UserCode
from shoal.runs.interrupts import end_signals
from shoal.runs.launching import LOST, STOPPED, TRUST, Outcome
from shoal.runs.session import Stopped
from shoal.runs.start import continue_run
from shoal.training.processes import Lost, Told


def work(path: str, outcome: str, *flags: str) -> int:
    """One of the processes that `launch` starts. Bad input is noted and exits with 0: to start again would not help."""
    plain_warnings()
    file = Path(outcome)
    threading.Thread(target=_watch, args=(file, os.getppid()), daemon=True).start()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, end_signals())
        with UserCode("Training failed"):
            continue_run(path, TRUST in flags)
    except Told:
        return 0
    except Lost:
        return 0 if file.exists() else LOST
    except (ShoalError, Stopped) as end:
        if follows():  # the leader may have more to say
            _until(file.exists, 3.0)
        _note(file, Outcome(end.exit_code, str(end), isinstance(end, Stopped)))
    except KeyboardInterrupt:
        _note(file, Outcome(130, STOPPED))
    except Exception as error:
        problem = shortage(error)
        if problem is None:
            raise
        _note(file, Outcome(1, problem))
    return 0


def _note(file: Path, outcome: Outcome) -> None:
    """Write down how it ended, unless another process has."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as whole:
        json.dump(vars(outcome), whole)
    with contextlib.suppress(FileExistsError):
        os.link(whole.name, file)


def _watch(outcome: Path, parent: int) -> None:
    """End this process if another one has noted the end while this one waits for it, or if the launcher is gone."""
    while os.getppid() == parent:
        if outcome.exists():
            time.sleep(5.0)
            os._exit(0)
        time.sleep(0.25)
    os._exit(1)


def _until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.05)


if __name__ == "__main__":
    with standard_streams():
        code = work(*sys.argv[1:])
    sys.exit(code)
