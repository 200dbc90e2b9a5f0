"""Launches, recorded once with all arguments and replayed cheaply on torch's stream or over CPU threads."""

import contextlib
import ctypes
import os
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import warp as wp

from shoal.core.errors import ShoalError, excerpt
from shoal.core.kernel_cache import PARSE_ERROR, load_kernel
from shoal.core.kernels import ENVS_PER_BLOCK, WARP_LOCK, Broadcast, Call, Program, build, fit_shape
from shoal.core.store import warp_view
from shoal.core.streams import open_descriptors
from shoal.core.temporary import TemporaryFolder
from shoal.core.user_code import MAX_EXCERPT

ENVS_PER_THREAD = 4096
"""Single-agent envs per CPU thread below which another thread costs more than it gains."""

SLICES_PER_THREAD = 8
"""Slices of the envs per CPU thread. A small slice stays in the cache over several steps, and a delayed thread takes
fewer slices."""

AGENT_WEIGHT = 16
"""Work of one agent of a multi-agent env, in single-agent envs: its functions loop over other agents."""


@cache
def init_warp() -> None:
    """Initialize Warp quietly, with a writable kernel cache. Safe to call more than once."""
    wp.config.log_level = wp.LOG_ERROR
    open_descriptors()
    with contextlib.nullcontext() if torch.cuda.is_available() else _silenced():
        try:
            wp.init()
            with tempfile.TemporaryFile(dir=wp.config.kernel_cache_dir):
                return
        except OSError as problem:
            error = problem
            elsewhere = TemporaryFolder("kernels").path
            wp.config.kernel_cache_dir = str(elsewhere)
            wp.init()
    warnings.warn(f"Warp's kernel cache cannot be written ({error}); kernels go to {elsewhere}.", stacklevel=2)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Discard stderr: without a GPU Warp's native library warns of the missing driver, which is no problem."""
    saved, silent = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(silent, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(silent)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, cpu_threads() - 1), thread_name_prefix="shoal")


def cpu_threads() -> int:
    """Number of CPU threads for the envs: the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def wait_for_stream(device: torch.device) -> None:
    """Wait for the current stream of a GPU without spinning, so that the core is free for other threads."""
    done = torch.cuda.Event(blocking=True)
    done.record(torch.cuda.current_stream(device))
    done.synchronize()


@cache
def _warp_stream(handle: int, index: int) -> Any:
    return wp.Stream(wp.get_device(f"cuda:{index}"), cuda_stream=handle)


def torch_stream(device: torch.device) -> Any:
    """Torch's current stream as a Warp stream, so that torch's CUDA graphs record Warp's launches too."""
    stream = torch.cuda.current_stream(device)
    return _warp_stream(stream.cuda_stream, stream.device.index)


Shares = list[list["CpuLaunch"]]
"""Recorded launches, one list per slice of the envs."""


class Plan:
    """A recorded sequence of kernel launches and torch functions, with all arguments bound.

    Calling it runs them on their arrays in place.
    """

    def __init__(self, device: torch.device, num_envs: int):
        self.device = device
        self.num_envs = num_envs
        self.steps: list[Callable[[], None] | Shares] = []

    @classmethod
    def joined(cls, plans: "list[Plan]") -> "Plan":
        """Several plans over the same envs as one. CPU threads do not wait for one another between them."""
        joined = cls(plans[0].device, plans[0].num_envs)
        for plan in plans:
            for step in plan.steps:
                last = joined.steps[-1] if joined.steps else None
                if isinstance(step, list) and isinstance(last, list) and len(step) == len(last):
                    joined.steps[-1] = [mine + more for mine, more in zip(last, step, strict=True)]
                else:
                    joined.steps.append(step)
        return joined

    def add_function(self, function: Callable[[], None]) -> None:
        """Append a torch function of the whole batch."""
        self.steps.append(function)

    def add_program(self, program: Program, arguments: dict[str, Any]) -> None:
        """Append a generated kernel, bound to arrays and settings by name."""
        if self.device.type == "cuda":
            self._add_cuda(program, arguments)
        else:
            self._add_cpu(program, arguments)

    def _bind(self, program: Program, arguments: dict[str, Any], rows: slice) -> list[Any]:
        values: list[Any] = [rows.stop - rows.start]
        for parameter in program.parameters:
            value = arguments[parameter.source]
            if isinstance(value, Broadcast):
                value = warp_view(value.tensor, parameter.annotation)
            elif parameter.is_array:
                value = warp_view(fit_shape(parameter.source, value, parameter.annotation)[rows], parameter.annotation)
            values.append(value)
        return values

    def _add_cuda(self, program: Program, arguments: dict[str, Any]) -> None:
        dim = (self.num_envs, program.threads) if program.threads else self.num_envs
        inputs = self._bind(program, arguments, slice(0, self.num_envs))
        command = _record(program, dim, inputs, str(self.device))
        self.steps.append(lambda: command.launch(torch_stream(self.device)))

    def _add_cpu(self, program: Program, arguments: dict[str, Any]) -> None:
        work = self.num_envs * (AGENT_WEIGHT * program.agents if program.agents > 1 else 1)
        slices = max(1, min(SLICES_PER_THREAD * cpu_threads(), self.num_envs, work // ENVS_PER_THREAD))
        if wp.config.mode == "debug":  # code that Warp compiles for debugging crashes in other threads than the first
            slices = 1
        bounds = [self.num_envs * i // slices for i in range(slices + 1)]
        shares: Shares = []
        for start, stop in pairwise(bounds):
            inputs = self._bind(program, arguments, slice(start, stop))
            blocks = -(-(stop - start) // ENVS_PER_BLOCK)
            shares.append([CpuLaunch(_record(program, blocks, inputs, "cpu"))])
        self.steps.append(shares)

    def add_kernel(self, kernel: Any, count: int, inputs: list[Any], unit: int, block: int) -> None:
        """Append a kernel of `count` threads.

        On a GPU it is one launch. On a CPU the range is split into one chunk per core, in multiples of `unit`, and each
        chunk is a launch. The kernel's first parameter is the chunk's first index (0 on a GPU); add it to `wp.tid()`.
        """
        units = -(-count // unit)
        threads = 1 if self.device.type == "cuda" or wp.config.mode == "debug" else min(cpu_threads(), units)
        bounds = [min(count, units * i // threads * unit) for i in range(threads + 1)]
        device = str(self.device)
        with WARP_LOCK:
            load_kernel(kernel, device, block)
            commands: list[Any] = [
                wp.launch(kernel, stop - start, [start, *inputs], device=device, record_cmd=True, block_dim=block)
                for start, stop in pairwise(bounds)
            ]
        if self.device.type == "cuda":
            self.steps.append(lambda: commands[0].launch(torch_stream(self.device)))
        else:
            self.steps.append([[CpuLaunch(command)] for command in commands])

    def __call__(self) -> None:
        for step in self.steps:
            if isinstance(step, list):
                _run_shares(step)
            else:
                step()


def _record(program: Program, dim: Any, inputs: list[Any], device: str) -> Any:
    """A recorded launch with its arguments. Warp compiles here; what it refuses is an error of the world's author."""
    try:
        with WARP_LOCK:
            load_kernel(program.kernel, device, program.block)
            return wp.launch(program.kernel, dim, inputs, device=device, record_cmd=True, block_dim=program.block)
    except OSError as error:
        raise ShoalError(f"A kernel cannot be compiled: {error}; set WARP_CACHE_PATH to a writable folder.") from error
    except Exception as error:
        # Warp names each function from the generated kernel down to the author's line; only the last part is shown.
        reason = str(error).rpartition(PARSE_ERROR)[2] or repr(error)
        line = " ".join(reason.replace(";", " ").split())
        raise ShoalError(f"A function of the world does not compile: {excerpt(line, MAX_EXCERPT)}") from error


class CpuLaunch:
    """A recorded CPU launch with its arguments packed once: 1 us per launch. Warp packs at every launch: 16 us."""

    def __init__(self, command: Any):
        bounds, *arguments = command.params
        layout = type(
            "Arguments", (ctypes.Structure,), {"_fields_": [(f"a{i}", type(a)) for i, a in enumerate(arguments)]}
        )
        self._command = command  # keeps the arrays alive
        self._forward = command.hooks.forward
        self._bounds, self._arguments = ctypes.byref(bounds), ctypes.byref(layout(*arguments))

    def __call__(self) -> None:
        self._forward(self._bounds, self._arguments)


def _run_share(launches: list[CpuLaunch]) -> None:
    for launch in launches:
        launch()


def _run_shares(shares: Shares) -> None:
    """Run all slices on one thread per core; each thread takes the next slice when it has finished one."""
    if len(shares) == 1:
        _run_share(shares[0])
        return
    remaining = deque(shares)
    waiting = [_threads().submit(_run_remaining, remaining) for _ in range(min(len(shares), cpu_threads()) - 1)]
    _run_remaining(remaining)
    for task in waiting:
        task.result()


def _run_remaining(remaining: deque[list[CpuLaunch]]) -> None:
    while True:
        try:
            share = remaining.popleft()
        except IndexError:
            return
        _run_share(share)


def bind(name: str, function: Any, device: torch.device, rows: int, arguments: dict[str, Any], agents: int = 0) -> Plan:
    """A plan that runs one Warp function for each row (and `agent`); its first parameter `env` is the row.

    On a CPU `env` counts within the thread's slice. A function that needs the row's index reads it from an array.
    """
    init_warp()
    plan = Plan(device, rows)
    plan.add_program(build(name, [Call(function, agents=agents)], device.type == "cpu"), arguments)
    return plan
