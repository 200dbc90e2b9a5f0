"""Run commands in forks of one process that has loaded torch: seconds faster than new programs."""

import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["shoal.runs.session", "shoal.view.video", "shoal.view.plot", "tests.commands"])


def _no_reader(descriptor: int) -> None:
    inner, outer = os.pipe()
    os.close(inner)
    os.dup2(outer, descriptor)


def _full(descriptor: int) -> None:
    os.dup2(os.open("/dev/full", os.O_RDWR), descriptor)


ENDS: dict[str, Callable[[int], None]] = {"no reader": _no_reader, "full": _full, "closed": os.close}
"""Kinds of standard descriptors that cannot be written."""


def start(words: list[str], folder: Path, **options: Any) -> BaseProcess:
    """Start one command in `folder`. As in Python, its exit code is 120 if a stream could not be flushed at the end."""
    return _start([words], folder, **options)


def run(commands: list[list[str]], folder: Path, **options: Any) -> list[int]:
    """Run commands one after the other in one process; returns their exit codes."""
    process = _start(commands, folder, **options)
    process.join(100)
    if process.exitcode is None:
        process.kill()
    return json.loads((folder / "codes").read_text())


def _start(
    commands: list[list[str]],
    folder: Path,
    ends: Mapping[int, str] | None = None,
    limits: Mapping[int, int] | None = None,
    before: Callable[[], object] | None = None,
) -> BaseProcess:
    """`ends` gives the target of standard descriptors: one of ENDS or a file (default: out and err).

    `limits` are soft limits by their numbers in `resource`, RLIMIT_AS in addition to the memory mapped at the start;
    `before` is called first.
    """
    given = (commands, folder, {1: "out", 2: "err"} | dict(ends or {}), limits or {}, before)
    process = _forks.Process(target=_run, args=given)
    process.start()
    return process


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def _run(commands, folder, ends, limits, before) -> None:
    os.chdir(folder)
    if before is not None:
        before()
    for number, limit in limits.items():
        if number == resource.RLIMIT_AS:
            limit += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))
    codes = [_run_one(words, ends) for words in commands]
    Path("codes").write_text(json.dumps(codes))
    sys.exit(codes[-1])


def _run_one(words, ends) -> int:
    from shoal.cli import main

    for descriptor, end in ends.items():
        if end in ENDS:
            ENDS[end](descriptor)
        else:
            os.dup2(os.open(end, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    for i, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, None if ends.get(i) == "closed" else os.fdopen(i, "w" if i else "r", closefd=False))
    code = main(words)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            code = 120
    return code
