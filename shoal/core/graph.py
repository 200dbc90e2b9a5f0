"""CUDA graphs: a function without arguments is recorded after two calls, then replayed."""

import gc
from collections.abc import Callable

import torch

WARM_UP_CALLS = 2
"""Eager calls before the recording: they compile, load modules and allocate. Their results count."""

recorder: Callable[[Callable[[], None]], Callable[[], None]] | None = None
"""Wraps each function that a GPU would record, when its `Graphed` is created. Only bench/graph_guard.py sets it."""


def records(device: torch.device) -> bool:
    """Whether functions are recorded: on a GPU, and on a CPU under the graph guard."""
    return device.type == "cuda" or recorder is not None


class Graphed:
    """Calls `function`; on a GPU, replays it as one CUDA graph once warm. Results are the same either way."""

    def __init__(
        self,
        function: Callable[[], None],
        device: torch.device,
        enabled: bool = True,
        pool: "torch.cuda._POOL_HANDLE | None" = None,
    ):
        """Graphs that never run at the same time can share a memory `pool` (torch.cuda.graph_pool_handle)."""
        self.function = recorder(function) if recorder is not None and enabled else function
        self.device = device
        self.pool = pool
        self.enabled = enabled and device.type == "cuda"
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    @property
    def warm(self) -> bool:
        """Whether compilation and recording are over. Until then no other thread may use the device."""
        return self.calls > WARM_UP_CALLS

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        self._call_or_record()
        self.calls += 1

    def _call_or_record(self) -> None:
        if not self.enabled:
            self.function()
            return
        if self.calls < WARM_UP_CALLS:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                self.function()
            torch.cuda.current_stream(self.device).wait_stream(side)
            return
        self.graph = torch.cuda.CUDAGraph()
        # A garbage collection during the recording could free device memory or a graph, which would spoil it.
        # (A collection before the recording would take 0.5 s per graph once torch has compiled.)
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(self.graph, self.pool, capture_error_mode="thread_local"):
                self.function()
        finally:
            if collecting:
                gc.enable()
        self.graph.replay()
