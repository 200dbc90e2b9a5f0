"""The graph guard runs on a CPU the code that a GPU records as CUDA graphs, and finds code that breaks in a recording.

    with Guard() as guard:
        train()
    print(*guard.findings, sep="\\n")

Every enabled `Graphed` that is created inside becomes a `Region`. Like a graph it runs `WARM_UP_CALLS` times without a
recording. The next call is recorded: each torch operation and each Warp launch is written to a tape, with its Python
values and the addresses of its tensors. Every later call is compared with the tape. Kinds of findings:

    host read       a value of a tensor is read on the host: item, tolist, numpy, bool, nonzero, a mask as index
    Python data     a tensor is created from Python or NumPy data: a copy from the host
    move            a tensor moves between devices, or is created on the CPU because `device` is missing
    moved address   a tensor from outside has another address than in the recording
    frozen value    a Python value differs from the recorded one, or other operations run: a graph replays the first

In a region `is_cuda` is True, so that code takes the branch of a GPU. NumPy memory represents host memory
(`torch.from_numpy`), `.to(device)` copies it, and torch.compile is off. Branches on `device.type`, streams and events
are not checked. With `Guard(replay=True)` calls after the recording run the tape instead of the function, and
`is_cuda` is unchanged: a training must then give the same numbers as without a guard.
"""

import bisect
import contextlib
import ctypes
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import warp as wp
from torch.distributed.distributed_c10d import Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.core import graph
from shoal.core.launch import CpuLaunch, Plan

EXCEPTIONS = {
    ("shoal/core/spaces.py", "check_range"): "the range of actions is checked only on a CPU",
}
"""File and function that may read values on the host -> reason. On a GPU they do not run inside a graph."""

READS = """item tolist numpy __array__ __bool__ __float__ __int__ __index__ __complex__ __contains__ __repr__ __str__
__format__ __reduce_ex__ __dlpack__ is_nonzero equal allclose nonzero argwhere unique masked_select""".split()
"""Functions of torch that read values on the host."""

PYTHON_DATA = "tensor as_tensor asarray new_tensor from_numpy frombuffer lift_fresh".split()

FACTORIES = "zeros ones full empty arange linspace logspace eye rand randn randint randperm scalar_tensor tril_indices"
FACTORIES = {getattr(torch, name) for name in FACTORIES.split()}
"""Functions that create a tensor on the CPU by default."""

LIBRARIES = tuple(str(Path(str(module.__file__)).parent) + os.sep for module in (torch, wp, np))
OUTSIDE = (*LIBRARIES, __file__, contextlib.__file__, str(graph.__file__), "<")
"""Files and folders whose frames a finding skips."""

LIFT = torch.ops.aten.lift_fresh.default
"""The operation that torch calls with a tensor that it has created from Python data."""

ROOT = str(Path(__file__).resolve().parent.parent) + os.sep


@dataclass(frozen=True)
class Finding:
    """One thing that a recording would refuse or freeze, and its file and line."""

    kind: str
    place: str
    """file:line"""
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.kind}: {self.text}"


class Location(NamedTuple):
    """Address and layout of an argument."""

    own: int | None
    """Number of the allocation inside the region; None: allocated before."""
    address: int
    """In bytes; for an allocation inside the region, from its start."""
    layout: tuple
    name: str = ""


class Entry(NamedTuple):
    """One operation or launch of a recording."""

    name: str
    values: tuple[tuple[str, Any], ...]
    """Python values among the arguments, by name."""
    tensors: tuple[Location, ...]
    place: str


class Guard:
    """Guards every `Graphed` that is created in its context."""

    def __init__(self, replay: bool = False):
        self.replay = replay
        self.findings: list[Finding] = []
        self.regions: list[Region] = []
        self._here = threading.local()
        self._host: dict[int, StorageWeakRef] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Guard":
        stack = self._stack
        stack.enter_context(patch.object(graph, "recorder", self._guarded))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for owner, name, make in (
            (Plan, "__call__", self._plan_call),
            (ThreadPoolExecutor, "map", self._pool_map),
            (torch, "from_numpy", self._from_numpy),
            (torch.Tensor, "to", self._to),
            (wp, "launch", self._launch),
        ):
            stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))
        for owner, names, kind, what in (
            (wp.array, "numpy list", "host read", "reads values on the host"),
            (wp, "synchronize synchronize_device synchronize_stream", "host read", "waits for the device"),
            (
                wp,
                "zeros ones full empty zeros_like empty_like clone",
                "moved address",
                "allocates memory in Warp",
            ),
            (wp, "from_numpy copy", "move", "copies on Warp's stream"),
            (torch, "to_dlpack", "host read", "gives a tensor to code that no recording sees"),
            (torch.utils.dlpack, "to_dlpack", "host read", "gives a tensor to code that no recording sees"),
        ):
            for name in names.split():
                refused = self._refused(getattr(owner, name), kind, f"{_name(owner)}.{name} {what}")
                stack.enter_context(patch.object(owner, name, refused))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @property
    def recorded(self) -> "list[Region]":
        """The regions that were recorded and called again."""
        return [region for region in self.regions if region.compared]

    @property
    def operations(self) -> int:
        """Torch operations and Warp launches in all recordings."""
        return sum(len(region.tape) for region in self.regions)

    @property
    def region(self) -> "Region | None":
        """The region that this thread runs."""
        return getattr(self._here, "region", None)

    @contextlib.contextmanager
    def inside(self, region: "Region") -> Iterator[None]:
        """Run a region in this thread."""
        if self.region is not None:
            self.find("frozen value", "a graph is recorded inside another graph")
        before, self._here.region = self.region, region
        try:
            yield
        finally:
            self._here.region = before

    def find(self, kind: str, text: str, place: str | None = None) -> None:
        """Add a finding, once per kind and line."""
        found = Finding(kind, place or _place(), text)
        if not any((other.kind, other.place) == (found.kind, found.place) for other in self.findings):
            self.findings.append(found)

    def refuse(self, kind: str, text: str) -> None:
        """Add a finding if this is a recording and the code is no exception."""
        if self.region is not None and self.region.strict and not _excepted():
            self.find(kind, text)

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor represents host memory."""
        reference = self._host.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()

    # --- replacements of functions -----------------------------------------------------------------------------------

    def _guarded(self, function: Callable[[], None]) -> Callable[[], None]:
        self.regions.append(Region(self, function))
        return self.regions[-1]

    def _plan_call(self, original: Callable) -> Callable:
        def call(plan: Plan) -> None:
            for step in plan.steps:
                part = Plan(plan.device, plan.num_envs)
                part.steps = [step]
                region = self.region
                if region is not None and isinstance(step, list):
                    region.launches([launch for share in step for launch in share], lambda part=part: original(part))
                original(part)

        return call

    def _pool_map(self, original: Callable) -> Callable:
        def call(pool: ThreadPoolExecutor, function: Callable, *given: Any, **named: Any) -> Any:
            # Only a CPU splits work between threads, and a region is tracked in one thread.
            return original(pool, function, *given, **named) if self.region is None else map(function, *given)

        return call

    def _from_numpy(self, original: Callable) -> Callable:
        def call(array: np.ndarray) -> torch.Tensor:
            self.refuse("Python data", "torch.from_numpy creates a tensor on the host")
            made = original(array)
            self._host = {key: ref for key, ref in self._host.items() if not ref.expired()}
            self._host[made.untyped_storage()._cdata] = StorageWeakRef(made.untyped_storage())
            return made

        return call

    def _to(self, original: Callable) -> Callable:
        def call(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
            result = original(tensor, *given, **named)
            device = any(isinstance(value, (str, torch.device)) for value in (*given, *named.values()))
            if not device or not self.is_host(tensor):
                return result
            if not named.get("non_blocking"):
                self.refuse("move", "a copy from the host waits for it; give non_blocking=True and pinned memory")
            if not self.is_host(result):
                return result
            made = torch.empty(result.shape, dtype=result.dtype, device=result.device)
            return made.copy_(result, non_blocking=True)

        return call

    def _launch(self, original: Callable) -> Callable:
        def call(kernel: Any, dim: Any, inputs: Any = (), *given: Any, **named: Any) -> Any:
            region = self.region
            if region is not None and not named.get("record_cmd"):
                if "stream" not in named:
                    self.refuse("move", f"kernel {kernel.key} runs on Warp's stream; give stream=")
                with torch._C.DisableTorchFunction():
                    region.direct_launch(kernel, dim, inputs, lambda: original(kernel, dim, inputs, *given, **named))
            return original(kernel, dim, inputs, *given, **named)

        return call

    def _refused(self, original: Callable, kind: str, text: str) -> Callable:
        def call(*given: Any, **named: Any) -> Any:
            if not _called_by_library():
                self.refuse(kind, text)
            return original(*given, **named)

        return call


@dataclass
class Region:
    """A function that a GPU would record."""

    guard: Guard
    function: Callable[[], None]
    calls: int = 0
    tape: list[Entry] = field(default_factory=list)
    compared: int = 0
    """Calls after the recording."""

    def __post_init__(self):
        function = inspect.unwrap(self.function)
        code = getattr(function, "__code__", None) or type(function).__call__.__code__
        self.place = f"{_short(code.co_filename)}:{code.co_firstlineno}"
        self._operations, self._functions = _Operations(self), _Functions(self)
        self._kept: list[Any] = []
        """Objects of the recording, kept alive so that their addresses are not reused."""
        self._steps: list[Callable[[], Any]] = []
        """Calls that replace the function, with `Guard(replay=True)`."""
        self._begin()

    def _begin(self) -> None:
        self._next = 0
        self._differs = False
        self._own: dict[int, int] = {}
        """Allocations of this call: torch's number of the storage -> index of the allocation."""
        self._storages: list[Any] = []
        self._ranges: list[tuple[int, int, int]] = []
        """First and last address of each allocation, and its index, sorted."""

    @property
    def strict(self) -> bool:
        """Whether it is recorded now or has been."""
        return self.calls > graph.WARM_UP_CALLS

    @property
    def recording(self) -> bool:
        return self.calls == graph.WARM_UP_CALLS + 1

    def __call__(self) -> None:
        self.calls += 1
        if self.strict and not self.recording:
            self.compared += 1
            if self.guard.replay:
                self._replay()
                return
        self._begin()
        with self.guard.inside(self), self._operations, self._functions:
            self.function()
        if self.strict and not self.recording and not self._differs and self._next < len(self.tape):
            rest = self.tape[self._next]
            self.guard.find("frozen value", f"{rest.name} was recorded, but is no longer called", rest.place)
        if not (self.recording and self.guard.replay):
            self._begin()

    def _replay(self) -> None:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for step in self._steps:
                step()

    # --- the tape ----------------------------------------------------------------------------------------------------

    def _note(self, name: str, values: tuple, tensors: tuple[Location, ...]) -> None:
        if not self.strict or self._differs:
            return
        if self.recording:
            self.tape.append(Entry(name, values, tensors, _place()))
            return
        self._next += 1
        if self._next > len(self.tape):
            self._differ("frozen value", f"{name} is called, but was not when the graph was recorded")
            return
        then = self.tape[self._next - 1]
        if (values, tensors) != (then.values, then.tensors) and name == then.name and _excepted():
            return
        if name != then.name:
            text = f"{name} is called, but {then.name} was recorded at {then.place}: a graph cannot branch"
            self._differ("frozen value", text)
        elif values != then.values:
            pairs = zip(values, then.values, strict=False)
            now, old = next((pair for pair in pairs if pair[0] != pair[1]), (("", len(values)), ("", len(then.values))))
            what = f"{now[0]} = {now[1]!r}, but {old[1]!r} was recorded"
            self._differ("frozen value", f"{name} gets {what}: a graph replays the first; keep it in a tensor")
        elif tensors != then.tensors:
            number, now, old = next(
                (i, a, b) for i, (a, b) in enumerate(zip(tensors, then.tensors, strict=True)) if a != b
            )
            what = f"argument {now.name or number} of {name}"
            if now.layout != old.layout:
                self._differ("frozen value", f"{what} is {now.layout}, but {old.layout} was recorded")
            else:
                text = (
                    f"{what} has another address than in the recording; a graph keeps the old one: update it in place"
                )
                self._differ("moved address", text)

    def _differ(self, kind: str, text: str) -> None:
        """Add the first difference of a call; the rest of the call is not comparable."""
        self._differs = True
        self.guard.find(kind, text)

    def locate(self, tensor: torch.Tensor, name: str = "") -> Location:
        """Address and layout of a tensor."""
        storage = tensor.untyped_storage()
        layout = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))
        own = self._own.get(storage._cdata)
        if own is not None:
            return Location(own, tensor.storage_offset() * tensor.element_size(), layout, name)
        if self.recording:
            self._kept.append(storage)
        return Location(None, tensor.data_ptr(), layout, name)

    def _locate_address(self, address: int, layout: tuple, name: str) -> Location:
        place = bisect.bisect_right(self._ranges, (address, sys.maxsize, 0)) - 1
        if place >= 0 and address < self._ranges[place][1]:
            start, _, own = self._ranges[place]
            return Location(own, address - start, layout, name)
        return Location(None, address, layout, name)

    def add_allocation(self, tensor: torch.Tensor) -> None:
        """Add a tensor that was allocated inside."""
        storage = tensor.untyped_storage()
        self._own[storage._cdata] = len(self._own)
        self._storages.append(storage)
        start = storage.data_ptr()
        bisect.insort(self._ranges, (start, start + max(1, storage.nbytes()), self._own[storage._cdata]))

    # --- operations and launches -------------------------------------------------------------------------------------

    def operation(self, function: Any, given: tuple, named: dict[str, Any]) -> Any:
        """Check, record and run one operation of torch."""
        tensors = list(_tensors((given, named)))
        if self.strict:
            self._check(function, given, named, tensors)
            if function is LIFT:
                self.add_allocation(tensors[0])
            else:
                self._note(_name(function), _values(given, named), tuple(self.locate(tensor) for tensor in tensors))
        result = function(*given, **named)
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        fresh = []
        for tensor in _tensors(result):
            key = tensor.untyped_storage()._cdata
            if key not in known and key not in self._own:
                self.add_allocation(tensor)
                fresh.append(tensor)
        if self.recording and self.guard.replay and not function.is_view:
            self._steps.append(lambda: _repeat(function, given, named, fresh, result))
        return result

    def _check(self, function: Any, given: tuple, named: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        name, refuse = _name(function), self.guard.refuse
        if name.startswith(("index.", "index_put", "_unsafe_index")):
            masks = [index for index in given[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            number = name.startswith("index_put") and given[2].numel() == 1 and len(masks) == 1  # becomes masked_fill
            if masks and not number:
                refuse("host read", f"a mask is the index of {name}, whose shape depends on values; use torch.where")
        elif torch.Tag.data_dependent_output in function.tags or torch.Tag.dynamic_output_shape in function.tags:
            refuse("host read", f"{name} reads values on the host; keep them on the device")
        elif function is LIFT and not self._functions.assigns_number:
            refuse("Python data", "a tensor is created from Python data: a copy from the host; create it beforehand")
        host = [self.guard.is_host(tensor) for tensor in tensors]
        if any(host) and not function.is_view:
            if not name.startswith("copy_") or all(host):
                refuse("move", f"{name} reads or writes host memory; copy it to the device first")
            elif not (len(given) > 2 and given[2]) and not named.get("non_blocking"):
                refuse("move", "a copy between host and device waits for it; give non_blocking=True")

    def launches(self, launches: list[CpuLaunch], run: Callable[[], None]) -> None:
        """Record the launches of a plan."""
        if self.strict:
            for launch in launches:
                self._note_launch(launch)
        if self.recording:
            self._kept += launches
            self._steps.append(run)

    def _note_launch(self, launch: CpuLaunch) -> None:
        kernel, packed = launch._command.kernel, launch._arguments._obj
        names = [argument.label for argument in kernel.adj.args]
        size = tuple(launch._bounds._obj.shape)
        values: list[tuple[str, Any]] = [("size", size)]
        tensors: list[Location] = []
        for name, (key, _) in zip(names, packed._fields_, strict=False):
            self._unpack(name, getattr(packed, key), values, tensors)
        self._note(f"kernel {kernel.key}", tuple(values), tuple(tensors))

    def _unpack(self, name: str, value: Any, values: list, tensors: list[Location]) -> None:
        """Python values and arrays of one argument of a kernel."""
        if type(value).__name__ == "array_t":
            dims = value.ndim
            layout = ("array", tuple(value.shape[:dims]), tuple(value.strides[:dims]))
            tensors.append(self._locate_address(value.data, layout, name))
        elif isinstance(value, ctypes.Structure):
            for part, *_ in value._fields_:
                self._unpack(f"{name}.{part}", getattr(value, part), values, tensors)
        elif isinstance(value, ctypes.Array):
            values.append((name, tuple(bytes(value))))
        else:
            values.append((name, _value(getattr(value, "value", value))))

    def direct_launch(self, kernel: Any, dim: Any, inputs: Any, run: Callable[[], None]) -> None:
        """Record a launch outside of plans."""
        values: list[tuple[str, Any]] = [("size", _value(dim))]
        tensors: list[Location] = []
        for argument, value in zip(kernel.adj.args, inputs, strict=False):
            if isinstance(value, wp.array):
                layout = ("array", tuple(value.shape), tuple(value.strides))
                tensors.append(self._locate_address(value.ptr or 0, layout, argument.label))
            elif isinstance(value, torch.Tensor):
                tensors.append(self.locate(value, argument.label))
            else:
                values.append((argument.label, _value(value)))
        self._note(f"kernel {kernel.key}", tuple(values), tuple(tensors))
        if self.recording:
            self._kept.append(inputs)
            self._steps.append(run)

    def address_read(self, tensor: torch.Tensor) -> None:
        """Record that Python reads a tensor's address."""
        self._note("data_ptr", (), (self.locate(tensor),))


class _Operations(TorchDispatchMode):
    """Intercepts every operation of torch, also in backward passes."""

    def __init__(self, region: Region):
        super().__init__()
        self.region = region

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self.region.operation(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Intercepts calls that are no operations: reads through Python's protocols, devices, addresses."""

    def __init__(self, region: Region):
        super().__init__()
        self.region = region
        self.assigns_number = False
        """Whether a Python number is assigned to elements: on a GPU it is an argument, not a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        named, guard = kwargs or {}, self.region.guard
        name = getattr(func, "__name__", "")
        if name == "__get__":
            if func.__self__ is torch.Tensor.is_cuda and not guard.replay and not _called_by_library():
                return not guard.is_host(args[0])
            return func(*args, **named)
        if self.region.strict:
            self._check(func, name, args, named)
        result = func(*args, **named) if name != "__setitem__" else self._assign(*args)
        if name == "data_ptr" and not _called_by_library():  # Warp's own reads appear in its launches
            self.region.address_read(args[0])
        return result

    def _assign(self, tensor: torch.Tensor, index: Any, value: Any) -> None:
        self.assigns_number = isinstance(value, (int, float)) and not _lists(index)
        if self.assigns_number:
            self.region._note("assignment", (("number", _value(value)),), ())
        try:
            torch.Tensor.__setitem__(tensor, index, value)
        finally:
            self.assigns_number = False

    def _check(self, func: Any, name: str, args: tuple, named: dict[str, Any]) -> None:
        refuse = self.region.guard.refuse
        given = (*args, *named.values())
        if name in READS:
            refuse("host read", f"{name} reads values on the host; keep them on the device")
        elif name in PYTHON_DATA and not (args and isinstance(args[0], torch.Tensor) and name.startswith("as")):
            refuse(
                "Python data", f"{name} creates a tensor from Python data: a copy from the host; create it beforehand"
            )
        elif name in ("cpu", "cuda", "pin_memory"):
            refuse("move", f"{name} moves a tensor to another device")
        elif named.get("pin_memory"):
            refuse("move", f"{name} creates a tensor in pinned host memory")
        elif func in FACTORIES and named.get("device") is None and named.get("out") is None:
            refuse("move", f"torch.{name} creates a tensor on the CPU; give device=")
        elif any(isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda") for value in given):
            refuse("move", f"{name} names a device; give that of the tensors")


def _repeat(function: Any, given: tuple, named: dict[str, Any], fresh: list[torch.Tensor], result: Any) -> None:
    """Run an operation of a tape again; its results go to the memory of the recording."""
    again = function(*given, **named)
    for old, new in zip(_tensors(result), _tensors(again), strict=True):
        if any(old is tensor for tensor in fresh):
            old.copy_(new)
    for part in again if isinstance(again, tuple) else ():
        if isinstance(part, torch.ScriptObject):  # a sum over processes in progress
            Work.unbox(part).wait()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _tensors(part)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _values(given: tuple, named: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    pairs = [*((f"argument {i}", value) for i, value in enumerate(given)), *named.items()]
    return tuple((name, _value(value)) for name, value in pairs if not isinstance(value, torch.Tensor))


def _value(value: Any) -> Any:
    """A Python value in a comparable form; for objects, the name of the type."""
    if isinstance(value, (list, tuple)):
        return tuple(_value(part) for part in value)
    if isinstance(value, float):
        return value if value == value else "nan"
    if value is None or isinstance(value, (bool, int, str, torch.dtype, torch.device, torch.layout, np.generic)):
        return value
    return type(value).__name__


def _lists(index: Any) -> bool:
    """Whether an index holds lists or arrays, which become tensors."""
    return any(isinstance(part, (list, np.ndarray)) for part in (index if isinstance(index, tuple) else (index,)))


@cache
def _name(function: Any) -> str:
    if isinstance(function, torch._ops.OpOverload):
        return str(function).removeprefix("aten.").removesuffix(".default")
    return getattr(function, "__name__", str(function)).removeprefix("warp.")


def _short(file: str) -> str:
    return file.removeprefix(ROOT)


def _frames() -> Iterator[Any]:
    """The frames of code outside torch, Warp and the guard, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(OUTSIDE):
            yield frame
        frame = frame.f_back


def _place() -> str:
    """File and line of a finding."""
    for frame in _frames():
        return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
    return "unknown"


def _excepted() -> bool:
    return any((_short(frame.f_code.co_filename), frame.f_code.co_name) in EXCEPTIONS for frame in _frames())


def _called_by_library() -> bool:
    """Whether torch or Warp called a function that the guard replaces."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(LIBRARIES)
