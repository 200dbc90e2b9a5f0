"""Page-locked host memory that a GPU reads and writes directly."""

from typing import Any

import torch


class _Bytes:
    """Page-locked host bytes with CUDA's array interface, under the GPU's address."""

    def __init__(self, count: int):
        self.memory = torch.zeros(count, dtype=torch.uint8, pin_memory=True)
        self.__cuda_array_interface__: dict[str, Any] = dict(
            shape=(count,), typestr="|u1", data=(self.memory.data_ptr(), False), version=3
        )


def mapped(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in host memory that torch and Warp treat as a tensor of the GPU. Each access crosses the bus.

    For large tensors that are read in pieces, such as the observations of a replay buffer.
    """
    count = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return torch.as_tensor(_Bytes(count), device=device).view(dtype).view(shape)
