"""Indices out of range: silent in Warp's release mode, found by a walk in its debug mode.

The walk has a process of its own, since such an index ends it. It is made by running this module.
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
from shoal.tools.check_rules import Arrays, Finding, draw, take, to_actions, told

ENVS = 13
SECONDS = 5.0
"""Debug mode is slow: after this time it has seen enough."""
LIMIT = 300.0
"""Seconds after which a walk, compiling included, is taken for an endless one."""


def check_indices(world: str | type[KernelWorld], config: Any, steps: int, seed: int) -> Finding:
    """Walk in debug mode, on the CPU where Warp can compile for it."""
    name = world if isinstance(world, str) else _address(world)
    if not name:
        return Finding("note", f"indices: left out, since another process cannot import {world.__qualname__}")
    init_warp()
    settings = repr({f.name: getattr(config, f.name) for f in fields(config)})
    words = [name, settings, "cpu" if wp.is_cpu_available() else "cuda", str(steps), str(seed)]
    code, spoken, problem = _walk_elsewhere([*words, ""])
    if code == 0:
        return Finding("ok", f"indices: none is out of range ({spoken} steps of {ENVS} envs in Warp's debug mode)")
    if "ssertion" in problem:
        _, spoken, _ = _walk_elsewhere([*words, "spell"])  # once more, function by function: which one is it?
        return Finding("FAIL", f"indices: an index is out of range in {spoken or 'the world'} ({problem})")
    if code == 1:
        return Finding("FAIL", f"the world raised {problem}")
    end = signal.Signals(-code).name if code < 0 else f"code {code}"
    return Finding("FAIL", f"indices: a walk in Warp's debug mode ended with {end} ({problem})")


def _address(cls: type[KernelWorld]) -> str:
    """A class as `FILE.py:NAME` or `module:NAME`; "" if it is not at the top of a module."""
    if "." in cls.__qualname__:
        return ""
    own = cls.__module__ == "__main__" or cls.__module__.startswith("shoal_user_")
    place = getattr(sys.modules[cls.__module__], "__file__", None) if own else cls.__module__
    return f"{place}:{cls.__qualname__}" if place else ""


def _class_at(address: str) -> type[KernelWorld]:
    """The class at an address: a world's name, or what `_address` gave in the process that asks."""
    module, _, name = address.rpartition(":")
    if not module or module.endswith(".py"):
        return world_class(address)
    return getattr(importlib.import_module(module), name)


def _walk_elsewhere(words: list[str]) -> tuple[int, str, str]:
    """Exit code of such a walk, the last line it wrote, and the line that says what went wrong."""
    command = python_command("shoal.tools.check_debug", *words)
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return 124, "", f"it had not come to its end after {LIMIT:.0f} s"
    spoken, complaint = result.stdout.strip().splitlines(), result.stderr.strip().splitlines()
    problem = next((line for line in complaint if "ssertion" in line), complaint[-1] if complaint else "no message")
    return result.returncode, spoken[-1] if spoken else "", problem


def spelled(cls: Any, say: Callable[[str], None]) -> Any:
    """The world with each of the author's Warp functions as a kernel of its own, announced before it runs."""

    class Spelled(cls):
        def _plan(self, stages: list, routes: Arrays) -> Any:
            apart: list[Any] = []
            for stage in stages:
                if isinstance(stage, Call) and not stage.function.module.name.startswith("shoal.core"):
                    apart.append(lambda arrays, key=stage.function.key: say(key))
                apart.append(stage)
            return super()._plan(apart, routes)

    return Spelled


def main(name: str, settings: str, device: str, steps: str, seed: str, spell: str) -> None:
    """Walk in debug mode and say how many steps it took, or (`spell`) at which function and step it is."""
    wp.config.mode = "debug"
    cls = _class_at(name)
    step = 0

    def say(function: str) -> None:
        wp.synchronize()  # a GPU works behind: wait, so that the last name said is that of the culprit
        print(f"`{function}` at " + (f"step {step}" if step else "reset"), flush=True)

    try:
        world = (spelled(cls, say) if spell else cls)(ENVS, device, cls.Config(**ast.literal_eval(settings)))
        world.reset(int(seed))
        generator = torch.Generator().manual_seed(int(seed))
        end = float("inf")
        while step < int(steps) and time.perf_counter() < end:
            step += 1
            take(world, to_actions(world, draw(world, generator), world.outputs))
            end = end if step > 1 else time.perf_counter() + SECONDS  # the first step compiles
        wp.synchronize()
    except Exception as error:
        sys.exit(f"{told(error, cls)}, at " + (f"step {step}" if step else "reset"))
    print(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
