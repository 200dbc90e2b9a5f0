"""Kernels generated around Warp functions: parameters are bound by name, consecutive calls are fused.

Parameters of an author's `@wp.func` are found by name: `env` (and `agent`) is the index, `rng` the random numbers of
that env and step, every other name an array of the store or a setting. All calls between two torch functions are one
launch. On a GPU, one thread runs an env with single agents; up to 32 agents share some lanes of a warp, more agents
share a block of threads. A barrier follows each call, so that a call may read what an earlier call wrote for other
agents. On a CPU the functions run in plain counted loops over a slice of the envs, which the compiler vectorizes.
"""

import linecache
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
import warp as wp

from shoal.core.errors import ShoalError, unknown
from shoal.core.random import Random, random_at
from shoal.core.store import Field

ENVS_PER_BLOCK = 4096
"""Envs per task of a CPU launch: few enough for their arrays to stay in the cache."""

WARP = 32
"""Threads of a GPU warp. Up to this many agents share a warp or a part of one."""

THREADS_PER_BLOCK = 128
"""Maximum threads per env. With 1,000 agents 256 threads are as fast; 512 and 1,024 are slower."""

RNG_SOURCES = ("seed", "env_id", "episode", "step_count")
"""Arrays that the parameter `rng` is built from."""


@dataclass(frozen=True)
class Call:
    """One function of a step: where and when it runs.

    `agents` > 0 runs it once per agent of an env. `when` names a flag array that must be set for the env. `names`
    redirects parameters: {"observation": "final_observation"} binds another array. Consecutive calls with the same
    non-empty `no_barrier_group` access disjoint data: a GPU needs no barrier between them.
    """

    function: Any
    agents: int = 0
    when: str = ""
    names: dict[str, str] = field(default_factory=dict)
    no_barrier_group: str = ""

    def parameters(self) -> dict[str, Any]:
        """Warp types of the parameters by name, without the indices."""
        return {k: v for k, v in self.function.input_types.items() if k not in ("env", "agent")}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a generated kernel: the name of its array or setting, and the author's annotation."""

    source: str
    annotation: Any

    @property
    def is_array(self) -> bool:
        return is_array(self.annotation)


@dataclass(frozen=True)
class Broadcast:
    """An array that every env reads as a whole (a counter, a table): it is not sliced over CPU threads."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Program:
    """A generated kernel and its parameters, in order. On a GPU, `threads` > 0 threads share an env."""

    kernel: Any
    parameters: tuple[Parameter, ...]
    agents: int = 0
    threads: int = 0
    block: int = 256


def is_array(annotation: Any) -> bool:
    """Whether an annotation is an array, in either of Warp's spellings: wp.array[float], wp.array(dtype=float)."""
    return isinstance(annotation, (wp.array, type(wp.array[float])))


def check_call(call: Call, provided: dict[str, Any], owner: str) -> None:
    """Refuse a parameter that nothing provides or whose type does not fit, before anything runs."""
    function = call.function
    if not isinstance(function, wp.Function):
        raise ShoalError(f"{owner}: {function!r} must be a Warp function; decorate it with @wp.func.")
    inputs = list(function.input_types)
    if inputs[:1] != ["env"]:
        raise ShoalError(f"{owner}.{function.key}: the first parameter must be `env: int`.")
    for name, annotation in call.parameters().items():
        if name == "rng":
            if annotation is not Random:
                raise ShoalError(f"{owner}.{function.key}: `rng` must be annotated `rng: Random`.")
            continue
        source = call.names.get(name, name)
        if source not in provided:
            problem = unknown("array or setting", name, [*provided, "rng"])
            raise ShoalError(f"{owner}.{function.key}: nothing provides the parameter {name!r}. {problem}")
        value = provided[source]
        if isinstance(value, str):
            raise ShoalError(
                f"{owner}.{function.key}: the parameter {name!r} is a setting of text, which a Warp function cannot "
                "read; remove the parameter or use a number."
            )
        if is_array(annotation) != isinstance(value, (torch.Tensor, Broadcast)):
            kind, remedy = ("an array", "wp.array")
            if is_array(annotation):
                kind, remedy = "a number (a setting)", "float, int or bool"
            raise ShoalError(
                f"{owner}.{function.key}: the world provides {kind} for the parameter {name!r}; annotate it as "
                f"{remedy}, not {annotation}."
            )
        if is_array(annotation):
            fit_shape(f"{owner}.{function.key}: {name!r}", value, annotation)
        elif isinstance(value, float) and annotation not in (float, wp.float32):
            raise ShoalError(
                f"{owner}.{function.key}: the parameter {name!r} is annotated {annotation.__name__}, but the setting "
                f"is {value}; annotate it as float."
            )


def fit_shape(label: str, array: torch.Tensor | Broadcast, annotation: Any) -> torch.Tensor:
    """The tensor with the number of dimensions of a parameter's annotation. `label` starts an error message.

    For a group of one agent the annotation may omit the agent dimension. A trailing dimension may be a Warp vector.
    """
    tensor = array.tensor if isinstance(array, Broadcast) else array
    element = Field(annotation.dtype)
    dimensions = annotation.ndim + len(element.inner)
    view = tensor
    if tensor.ndim == dimensions + 1 and tensor.shape[1] == 1 and tensor is array:
        view = tensor.squeeze(1)
    fits = view.ndim == dimensions and tuple(view.shape[annotation.ndim :]) == element.inner
    if not fits or element.torch_type != tensor.dtype:
        raise ShoalError(
            f"{label} has shape {tuple(tensor.shape)} and type {tensor.dtype}, "
            f"which does not fit its annotation ({annotation.ndim}-D array of {annotation.dtype.__name__})."
        )
    return view


def build(name: str, calls: list[Call], on_cpu: bool) -> Program:
    """The kernel for a list of consecutive calls."""
    agents = max(call.agents for call in calls)
    if on_cpu:
        return _generate(f"{name}_cpu", calls, _cpu_body, agents=agents)
    if len(calls) == 1 and agents:
        return _generate(f"{name}_each", calls, _each_body, threads=agents)
    if agents <= 1:
        return _generate(f"{name}_thread", calls, _thread_body)
    if agents <= WARP:
        lanes = 1 << (agents - 1).bit_length()
        return _generate(f"{name}_lanes", calls, partial(_shared_body, lanes, f"sync_lanes({lanes})"), threads=lanes)
    block = min(THREADS_PER_BLOCK, -(-agents // WARP) * WARP)
    body = partial(_shared_body, block, "meet_block()")
    return _generate(f"{name}_block", calls, body, threads=block, block=block)


def _generate(name: str, calls: list[Call], body: Callable[..., list[str]], **shape: int) -> Program:
    parameters: dict[tuple[str, str], tuple[str, Parameter]] = {}

    def argument(source: str, annotation: Any) -> str:
        key = (source, str(annotation) if not is_array(annotation) else _array_key(annotation))
        if key not in parameters:
            parameters[key] = (f"p{len(parameters)}_{source}", Parameter(source, annotation))
        return parameters[key][0]

    lines = body(calls, argument)
    names = {f"f{i}_{call.function.key}": call.function for i, call in enumerate(calls)}
    types = {f"T_{local}": p.annotation for local, p in parameters.values()}
    signature = ", ".join(["count: int", *(f"{local}: T_{local}" for local, _ in parameters.values())])
    source = f"def {name}({signature}):\n" + "\n".join(f"    {line}" for line in lines) + "\n"
    kernel = _compile(
        name,
        source,
        {"wp": wp, "random_at": random_at, "meet_block": meet_block, "sync_lanes": sync_lanes, **names, **types},
    )
    return Program(kernel, tuple(p for _, p in parameters.values()), **shape)


def _array_key(annotation: Any) -> str:
    return f"{annotation.dtype}/{annotation.ndim}"


_KERNELS: dict[tuple, Any] = {}

WARP_LOCK = threading.RLock()
"""Held while Warp creates, compiles or loads a kernel, which only one thread may do at a time."""


def _compile(name: str, source: str, names: dict[str, Any]) -> Any:
    """A Warp kernel from generated source, cached by the source and the functions it calls."""
    key = (source, *(id(value) for value in names.values() if isinstance(value, wp.Function)))
    with WARP_LOCK:
        if key not in _KERNELS:
            _KERNELS[key] = _make_kernel(name, source, names)
        return _KERNELS[key]


def _make_kernel(name: str, source: str, names: dict[str, Any]) -> Any:
    filename = f"<shoal {name} {len(_KERNELS)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = dict(names)
    exec(compile(source, filename, "exec"), scope)
    options = {
        "enable_backward": False,
        # No fused multiply-add: CPU and GPU then round alike.
        "fuse_fp": False,
        "optimization_level": 3,
        # Many arrays in one loop: let the compiler check more pairs for overlap before it gives up vectorizing.
        "cpu_compiler_flags": "-march=native -mllvm=-inline-threshold=9000"
        " -mllvm=-inline-cold-callsite-threshold=3000 -mllvm=-runtime-memory-check-threshold=512",
    }
    return wp.kernel(scope[name], module="unique", module_options=options)


def _call_text(index: int, call: Call, argument: Callable[[str, Any], str]) -> str:
    arguments = []
    inputs: dict[str, Any] = call.function.input_types
    for name, annotation in inputs.items():
        if name in ("env", "agent"):
            arguments.append(name)
        elif name == "rng":
            types = (wp.array(dtype=wp.uint64), *(wp.array(dtype=int),) * 3)
            parts = [f"{argument(s, t)}[env]" for s, t in zip(RNG_SOURCES, types, strict=True)]
            arguments.append(f"random_at({', '.join(parts)})")
        else:
            arguments.append(argument(call.names.get(name, name), annotation))
    return f"f{index}_{call.function.key}({', '.join(arguments)})"


def _guard(when: str, argument: Callable[[str, Any], str]) -> str:
    return f"if {argument(when, wp.array(dtype=wp.bool))}[env]:"


@wp.func_native("""
#if defined(__CUDA_ARCH__)
__syncthreads();
#endif
""")
def meet_block():
    """Barrier of all threads of a block; earlier writes are visible to all of them."""
    ...


@wp.func_native("""
#if defined(__CUDA_ARCH__)
unsigned first = (threadIdx.x & 31u) & ~(unsigned(lanes) - 1u);
__syncwarp((lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1u) << first);
#endif
""")
def sync_lanes(lanes: int):
    """Barrier of the lanes of a warp that share an env."""
    ...


def _each_body(calls: list[Call], argument: Callable[[str, Any], str]) -> list[str]:
    """One thread per agent, for a single call."""
    lines = ["env, agent = wp.tid()"]
    if calls[0].when:
        lines.append(_guard(calls[0].when, argument))
    return [*lines, ("    " if calls[0].when else "") + _call_text(0, calls[0], argument)]


def _thread_body(calls: list[Call], argument: Callable[[str, Any], str]) -> list[str]:
    """One thread per env, which loops over the agents."""
    lines = ["env = wp.tid()"]
    for when, run in groupby(enumerate(calls), key=lambda item: item[1].when):
        pad = ""
        if when:
            lines.append(_guard(when, argument))
            pad = "    "
        for i, call in run:
            lines += _over_agents(pad, call.agents, [_call_text(i, call, argument)])
    return lines


def _shared_body(threads: int, barrier: str, calls: list[Call], argument: Callable[[str, Any], str]) -> list[str]:
    """Several threads per env: the first runs the calls per env; the calls per agent are spread over all."""
    lines = ["env, lane = wp.tid()"]
    for when, run in groupby(enumerate(calls), key=lambda item: item[1].when):
        pad = ""
        if when:
            lines.append(_guard(when, argument))
            pad = "    "
        for key, part in groupby(run, key=_barrier_key):
            if key == "env":
                lines.append(f"{pad}if lane == 0:")
                lines += [f"{pad}    {_call_text(i, call, argument)}" for i, call in part]
            else:
                for i, call in part:
                    lines += [f"{pad}agent = int(lane)", f"{pad}while agent < {call.agents}:"]
                    lines += [f"{pad}    {_call_text(i, call, argument)}", f"{pad}    agent += {threads}"]
            lines.append(f"{pad}{barrier}")
    return lines


def _barrier_key(item: tuple[int, Call]) -> Any:
    """Consecutive calls with the same key run without a barrier between them."""
    index, call = item
    return "env" if not call.agents else call.no_barrier_group or index


def _over_agents(pad: str, agents: int, body: list[str]) -> list[str]:
    """The body: once, or per agent in a loop."""
    if not agents:
        return [pad + line for line in body]
    head = [f"{pad}agent = int(0)", f"{pad}while agent < {agents}:"]
    return [*head, *(f"{pad}    {line}" for line in body), f"{pad}    agent += 1"]


def _cpu_body(calls: list[Call], argument: Callable[[str, Any], str]) -> list[str]:
    # One task is a block of envs, few enough to stay in the cache from one loop to the next. The compiler vectorizes a
    # loop only if it can prove every index to be non-negative (Warp wraps negative ones): hence the test of `first`.
    lines = [f"first = wp.tid() * {ENVS_PER_BLOCK}", f"last = wp.min(first + {ENVS_PER_BLOCK}, count)"]
    lines.append("if first < 0:")
    lines.append("    return")
    for (when, agents), run in groupby(enumerate(calls), key=lambda item: (item[1].when, item[1].agents)):
        calls_here = list(run)
        # Each per-agent call has a separate loop: it may read what the previous call wrote for other agents.
        for part in [[c] for c in calls_here] if agents else [calls_here]:
            if when:
                lines += _flagged_loop(argument(when, wp.array(dtype=wp.bool)))
                pad = " " * 16
            else:
                lines += ["env = int(first)", "while env < last:"]
                pad = " " * 4
            lines += _over_agents(pad, agents, [_call_text(i, call, argument) for i, call in part])
            lines += ["            env += 1", "    group += 8"] if when else ["    env += 1"]
    return lines


def _flagged_loop(flag: str) -> list[str]:
    """The head of a loop over the few envs whose flag is set. It tests eight flags at a time."""
    eight = " or ".join(f"{flag}[group + {i}]" for i in range(8))
    return [
        "group = int(first)",
        "while group < last:",
        "    stop = wp.min(group + 8, last)",
        "    some = bool(True)",
        "    if group + 8 <= last:",
        f"        some = {eight}",
        "    if some:",
        "        env = int(group)",
        "        while env < stop:",
        f"            if {flag}[env]:",
    ]
