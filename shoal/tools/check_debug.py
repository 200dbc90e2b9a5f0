"""Find indices out of range by stepping a world in Warp's debug mode; release mode ignores them.

The steps run in another process (this module as a program), since such an index aborts the process.
"""

import ast
import importlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import warp as wp

from shoal.core.children import python_command
from shoal.core.kernel_world import KernelWorld
from shoal.core.kernels import Call
from shoal.core.launch import init_warp
from shoal.core.world_loading import world_class
from shoal.tools.check_rules import Arrays, Finding, draw_noise, error_line, step_rows, to_actions

ENVS = 13
SECONDS = 5.0
"""Time limit of the steps after compiling; debug mode is slow."""
LIMIT = 300.0
"""Seconds after which the process, compiling included, counts as hung."""


def check_indices(world: str | type[KernelWorld], config: Any, steps: int, seed: int) -> Finding:
    """Step a world in debug mode, on the CPU if Warp can compile for it, and report indices out of range."""
    name = world if isinstance(world, str) else _address(world)
    if not name:
        return Finding("note", f"indices: left out, since another process cannot import {_qualified_name(world)}")
    init_warp()
    settings = repr({f.name: getattr(config, f.name) for f in fields(config)})
    words = [name, settings, "cpu" if wp.is_cpu_available() else "cuda", str(steps), str(seed)]
    code, output, problem = _step_in_process([*words, ""])
    if code == 0:
        return Finding("ok", f"indices: none is out of range ({output} steps of {ENVS} envs in Warp's debug mode)")
    if "ssertion" in problem:
        _, output, _ = _step_in_process([*words, "announce"])  # again, function by function, to find the one
        return Finding("FAIL", f"indices: an index is out of range in {output or 'the world'} ({problem})")
    if code == 1:
        return Finding("FAIL", f"the world raised {problem}")
    end = signal.Signals(-code).name if code < 0 else f"code {code}"
    return Finding("FAIL", f"indices: Warp's debug mode ended with {end} ({problem})")


def _qualified_name(cls: type | str) -> str:
    return cls if isinstance(cls, str) else cls.__qualname__


def _address(cls: type[KernelWorld]) -> str:
    """A class as `FILE.py:NAME` or `module:NAME`; "" if it is not at a module's top level."""
    if "." in cls.__qualname__:
        return ""
    own = cls.__module__ == "__main__" or cls.__module__.startswith("shoal_user_")
    place = getattr(sys.modules[cls.__module__], "__file__", None) if own else cls.__module__
    return f"{place}:{cls.__qualname__}" if place else ""


def _class_at(address: str) -> type[KernelWorld]:
    """The class of a world's name or of an address from `_address`."""
    module, _, name = address.rpartition(":")
    if not module or module.endswith(".py"):
        return world_class(address)
    return getattr(importlib.import_module(module), name)


def _step_in_process(words: list[str]) -> tuple[int, str, str]:
    """Run this module; returns its exit code, its last line of output, and the line that names the error."""
    command = python_command("shoal.tools.check_debug", *words)
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return 124, "", f"it did not end within {LIMIT:.0f} s"
    output, errors = result.stdout.strip().splitlines(), result.stderr.strip().splitlines()
    problem = next((line for line in errors if "ssertion" in line), errors[-1] if errors else "no message")
    return result.returncode, output[-1] if output else "", problem


def announced(cls: Any, say: Callable[[str], None]) -> Any:
    """A subclass that launches each of the author's Warp functions as a separate kernel and announces it."""

    class Announced(cls):
        def _plan(self, stages: list, routes: Arrays) -> Any:
            separate: list[Any] = []
            for stage in stages:
                if isinstance(stage, Call) and not stage.function.module.name.startswith("shoal.core"):
                    separate.append(lambda arrays, key=stage.function.key: say(key))
                separate.append(stage)
            return super()._plan(separate, routes)

    return Announced


def main(name: str, settings: str, device: str, steps: str, seed: str, announce: str) -> None:
    """Step in debug mode; print the number of steps or, with `announce`, every function and step before it runs."""
    wp.config.mode = "debug"
    cls = _class_at(name)
    step = 0

    def say(function: str) -> None:
        wp.synchronize()  # sync: the last name printed is then the failing function's
        print(f"`{function}` at " + (f"step {step}" if step else "reset"), flush=True)

    try:
        world = (announced(cls, say) if announce else cls)(ENVS, device, cls.Config(**ast.literal_eval(settings)))
        world.reset(int(seed))
        generator = torch.Generator().manual_seed(int(seed))
        end = float("inf")
        while step < int(steps) and time.perf_counter() < end:
            step += 1
            step_rows(world, to_actions(world, draw_noise(world, generator), world.outputs))
            end = end if step > 1 else time.perf_counter() + SECONDS  # the first step compiles
        wp.synchronize()
    except Exception as error:
        sys.exit(f"{error_line(error, cls)}, at " + (f"step {step}" if step else "reset"))
    print(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
