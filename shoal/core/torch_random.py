"""Random tensors for worlds written with torch: the numbers that a kernel's `rng` draws."""

from functools import cache

import torch
import warp as wp

from shoal.core import kernels
from shoal.core.kernel_cache import load_kernel
from shoal.core.launch import torch_stream
from shoal.core.random import draw_kernel
from shoal.core.store import Store

DRAW_BLOCK = 256
"""Threads per block."""


def draw(
    store: Store, shape: tuple[int, ...], stream: int, gaussian: bool, low: float = 0.0, high: float = 1.0
) -> torch.Tensor:
    """Normal numbers, or uniform ones in [low, high): float32 [num_envs, *shape]. Element i uses `stream` + i."""
    out = torch.empty(store.num_envs, *shape, device=store.device)
    flat = out.view(store.num_envs, -1)
    device = str(store.device)
    sources = [wp.from_torch(store[n], dtype=wp.uint64 if n == "seed" else wp.int32) for n in kernels.RNG_SOURCES]
    inputs = [*sources, stream, gaussian, low, high, wp.from_torch(flat)]
    warp_stream = torch_stream(store.device) if store.device.type == "cuda" else None
    _load_draw_kernel(device)
    wp.launch(draw_kernel, flat.shape, inputs, device=device, stream=warp_stream, block_dim=DRAW_BLOCK)
    return out


@cache
def _load_draw_kernel(device: str) -> None:
    load_kernel(draw_kernel, device, DRAW_BLOCK)
