"""Memory of the host that a GPU reads and writes as if it were its own."""

from typing import Any

import torch


class _Bytes:
    """Page-locked bytes of the host under the address by which a GPU knows them, as CUDA's array interface has it."""

    def __init__(self, count: int):
        self.memory = torch.zeros(count, dtype=torch.uint8, pin_memory=True)
        self.__cuda_array_interface__: dict[str, Any] = dict(
            shape=(count,), typestr="|u1", data=(self.memory.data_ptr(), False), version=3
        )


def mapped(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that torch and Warp take for a tensor of the GPU, in the host's memory: each access crosses the bus.

    For what is large and read in pieces, as observations of a replay are.
    """
    count = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return torch.as_tensor(_Bytes(count), device=device).view(dtype).view(shape)
