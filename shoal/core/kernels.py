"""From an author's Warp functions to kernels: binding by parameter name, and fusing what can run together.

An author writes `@wp.func` functions whose parameters name what they need: `env` (and `agent`) is the index, `rng` the
random numbers of that env and step, every other name an array of the store or a field of the config. Shoal generates
the kernels around them, one launch for all calls between two torch functions. On a GPU a thread owns an env of single
agents; several agents share a few lanes of a warp, many a block of threads. These meet after each call, so that a call
may read what the one before it wrote for other agents. On a CPU the same functions stand in plain counted loops over a
slice of the envs, which the compiler vectorizes.
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
"""Envs that one task of a CPU launch covers: few enough that their arrays stay in the cache."""

WARP = 32
"""Threads of a GPU that run in step; up to so many agents share a warp, or a part of one."""

THREADS_PER_BLOCK = 128
"""The most threads that share an env: with 1,000 agents 256 are as fast, 512 and 1,024 were slower."""

RNG_SOURCES = ("seed", "env_id", "episode", "step_count")
"""The arrays that the parameter `rng` is made of."""


@dataclass(frozen=True)
class Call:
    """One function of a step, where it runs and when.

    `agents` > 0 runs it once per agent of an env; `when` names a flag array that must be set for the env.
    `names` redirects parameters: {"observation": "final_observation"} makes a function write somewhere else.
    Neighbors of the same `together` touch nothing of one another's: a GPU need not wait between them.
    """

    function: Any
    agents: int = 0
    when: str = ""
    names: dict[str, str] = field(default_factory=dict)
    together: str = ""

    def parameters(self) -> dict[str, Any]:
        """Parameter name -> Warp type, less the indices."""
        return {k: v for k, v in self.function.input_types.items() if k not in ("env", "agent")}


@dataclass(frozen=True)
class Parameter:
    """One argument of a generated kernel: the array or setting it is bound to, and the type the author wrote."""

    source: str
    annotation: Any

    @property
    def is_array(self) -> bool:
        return is_array(self.annotation)


@dataclass(frozen=True)
class Broadcast:
    """An array that every row reads as a whole (a counter, a table): it is not sliced over the threads."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Program:
    """A generated kernel and what to launch it with, in order. On a GPU `threads` > 0 of them share an env."""

    kernel: Any
    parameters: tuple[Parameter, ...]
    agents: int = 0
    threads: int = 0
    block: int = 256


def is_array(annotation: Any) -> bool:
    """Whether a parameter's type is an array, in either of Warp's spellings: wp.array[float], wp.array(dtype=float)."""
    return isinstance(annotation, (wp.array, type(wp.array[float])))


def check_call(call: Call, provided: dict[str, Any], owner: str) -> None:
    """Refuse, before anything runs, a parameter that nothing provides or whose type does not fit."""
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
            raise ShoalError(f"{owner}.{function.key}: {name!r} is text, which a Warp function cannot read.")
        if is_array(annotation) != isinstance(value, (torch.Tensor, Broadcast)):
            kind = "a setting" if not isinstance(value, (torch.Tensor, Broadcast)) else "an array"
            raise ShoalError(f"{owner}.{function.key}: {name!r} is {kind}, but it is annotated {annotation}.")
        if is_array(annotation):
            fit_shape(f"{owner}.{function.key}: {name!r}", value, annotation)
        elif isinstance(value, float) and annotation not in (float, wp.float32):
            raise ShoalError(f"{owner}.{function.key}: {name!r} is {value}, but it is annotated {annotation.__name__}.")


def fit_shape(what: str, array: torch.Tensor | Broadcast, annotation: Any) -> torch.Tensor:
    """The tensor with the number of dimensions that a parameter's type asks for.

    A group of one agent may be written without its agent dimension, and a trailing dimension may be a Warp vector.
    """
    tensor = array.tensor if isinstance(array, Broadcast) else array
    element = Field(annotation.dtype)
    wanted = annotation.ndim + len(element.inner)
    view = tensor
    if tensor.ndim == wanted + 1 and tensor.shape[1] == 1 and tensor is array:
        view = tensor.squeeze(1)
    fits = view.ndim == wanted and tuple(view.shape[annotation.ndim :]) == element.inner
    if not fits or element.torch_type != tensor.dtype:
        raise ShoalError(
            f"{what} has shape {tuple(tensor.shape)} and type {tensor.dtype}, "
            f"which does not fit its annotation ({annotation.ndim}-D array of {annotation.dtype.__name__})."
        )
    return view


def build(name: str, calls: list[Call], on_cpu: bool) -> Program:
    """The kernel for a list of calls that follow one another."""
    most = max(call.agents for call in calls)
    if on_cpu:
        return _generate(f"{name}_cpu", calls, _cpu_body, agents=most)
    if len(calls) == 1 and most:
        return _generate(f"{name}_each", calls, _each_body, threads=most)
    if most <= 1:
        return _generate(f"{name}_thread", calls, _thread_body)
    if most <= WARP:
        lanes = 1 << (most - 1).bit_length()
        return _generate(f"{name}_lanes", calls, partial(_shared_body, lanes, f"sync_lanes({lanes})"), threads=lanes)
    block = min(THREADS_PER_BLOCK, -(-most // WARP) * WARP)
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

LOADING = threading.RLock()
"""Held while Warp makes, compiles or loads a kernel: it can do so for one thread at a time."""


def _compile(name: str, source: str, names: dict[str, Any]) -> Any:
    """A Warp kernel from generated source; the same source over the same functions is the same kernel."""
    key = (source, *(id(value) for value in names.values() if isinstance(value, wp.Function)))
    with LOADING:
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
    for name, annotation in call.function.input_types.items():
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
    """All threads of a block meet; what they have written is seen by each other."""
    ...


@wp.func_native("""
#if defined(__CUDA_ARCH__)
unsigned first = (threadIdx.x & 31u) & ~(unsigned(lanes) - 1u);
__syncwarp((lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1u) << first);
#endif
""")
def sync_lanes(lanes: int):
    """The lanes of a warp that share an env meet."""
    ...


def _each_body(calls: list[Call], argument: Callable[[str, Any], str]) -> list[str]:
    """One thread per agent, for a call that stands alone."""
    lines = ["env, agent = wp.tid()"]
    if calls[0].when:
        lines.append(_guard(calls[0].when, argument))
    return [*lines, ("    " if calls[0].when else "") + _call_text(0, calls[0], argument)]


def _thread_body(calls: list[Call], argument: Callable[[str, Any], str]) -> list[str]:
    """One thread per env: it goes through the agents by itself."""
    lines = ["env = wp.tid()"]
    for when, run in groupby(enumerate(calls), key=lambda item: item[1].when):
        pad = ""
        if when:
            lines.append(_guard(when, argument))
            pad = "    "
        for i, call in run:
            lines += _over_agents(pad, call.agents, [_call_text(i, call, argument)])
    return lines


def _shared_body(threads: int, meet: str, calls: list[Call], argument: Callable[[str, Any], str]) -> list[str]:
    """Several threads per env: the first one runs what is per env, all of them share what is per agent."""
    lines = ["env, lane = wp.tid()"]
    for when, run in groupby(enumerate(calls), key=lambda item: item[1].when):
        pad = ""
        if when:
            lines.append(_guard(when, argument))
            pad = "    "
        for key, part in groupby(run, key=_meeting):
            if key == "env":
                lines.append(f"{pad}if lane == 0:")
                lines += [f"{pad}    {_call_text(i, call, argument)}" for i, call in part]
            else:
                for i, call in part:
                    lines += [f"{pad}agent = int(lane)", f"{pad}while agent < {call.agents}:"]
                    lines += [f"{pad}    {_call_text(i, call, argument)}", f"{pad}    agent += {threads}"]
            lines.append(f"{pad}{meet}")
    return lines


def _meeting(item: tuple[int, Call]) -> Any:
    """Neighboring calls of the same key run without waiting for one another."""
    index, call = item
    return "env" if not call.agents else call.together or index


def _over_agents(pad: str, agents: int, body: list[str]) -> list[str]:
    """The body, once or (per agent) in a loop over the agents."""
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
        # Each per-agent call has a loop of its own: it may read what the call before it wrote for other agents.
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
    """The head of a loop over the few envs whose flag is set, looking at eight flags at a time."""
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
