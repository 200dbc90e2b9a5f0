"""The store: the single owner of every array of a world. torch and Warp use the same memory."""

from dataclasses import dataclass
from typing import Any

import torch
import warp as wp

from shoal.core.errors import ShoalError
from shoal.core.limits import available_memory

TORCH_TYPES: dict[Any, torch.dtype] = {
    float: torch.float32,
    int: torch.int32,
    bool: torch.bool,
    wp.float32: torch.float32,
    wp.float16: torch.float16,
    wp.int32: torch.int32,
    wp.int64: torch.int64,
    wp.uint64: torch.int64,  # the same bits; torch has no arithmetic for unsigned 64-bit integers
    wp.uint8: torch.uint8,
    wp.uint16: torch.int16,  # the same bits
    wp.bool: torch.bool,
}

SHARE = {"cpu": 0.5, "cuda": 0.88}
"""Fraction of the free memory that a run may plan with; allocators and libraries need the rest."""


@dataclass(frozen=True)
class Field:
    """One array: `dtype` of an element (a scalar or a Warp vector), `shape` per env, unit and meaning."""

    dtype: Any = float
    shape: tuple[int, ...] = ()
    unit: str = ""
    doc: str = ""

    @property
    def scalar(self) -> Any:
        """The Warp or Python scalar type of an element."""
        return getattr(self.dtype, "_wp_scalar_type_", self.dtype)

    @property
    def inner(self) -> tuple[int, ...]:
        """The shape of one element: () for scalars, (2,) for wp.vec2."""
        return tuple(getattr(self.dtype, "_shape_", ()))

    @property
    def torch_type(self) -> torch.dtype:
        if self.scalar not in TORCH_TYPES:
            raise ShoalError(f"A field cannot hold {self.dtype}; use float, int, bool or a Warp vector of them.")
        return TORCH_TYPES[self.scalar]


class Store:
    """Named arrays `[num_envs, *shape]` on one device. Reading `store.name` gives the torch tensor."""

    def __init__(self, num_envs: int, device: torch.device):
        self.num_envs = num_envs
        self.device = device
        self.fields: dict[str, Field] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, name: str, field: Field) -> torch.Tensor:
        """Allocate one array of zeros. A name can be used once."""
        if name in self.fields:
            raise ShoalError(f"The store already holds an array named {name!r}; choose another name.")
        if not name.isidentifier() or hasattr(type(self), name) or name in vars(self) or name == "config":
            raise ShoalError(
                f"{name!r} cannot name an array: use a plain identifier that is no attribute of the store."
            )
        shape = (self.num_envs, *field.shape, *field.inner)
        self.fields[name] = field
        self.tensors[name] = torch.zeros(shape, dtype=field.torch_type, device=self.device)
        return self.tensors[name]

    def __getattr__(self, name: str) -> torch.Tensor:
        tensors = self.__dict__.get("tensors", {})
        if name in tensors:
            return tensors[name]
        raise AttributeError(f"the store holds no array named {name!r}; it has: {', '.join(tensors)}")

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    @property
    def bytes_per_env(self) -> int:
        return sum(t.nbytes for t in self.tensors.values()) // self.num_envs

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every array, by name: the whole state of the world."""
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Overwrite every array in place. If names or shapes differ, nothing is changed."""
        bad = [n for n, t in self.tensors.items() if n not in state or state[n].shape != t.shape]
        if bad:
            raise ShoalError(f"The saved state does not fit this world's arrays: {', '.join(bad)}.")
        for name, tensor in self.tensors.items():
            tensor.copy_(state[name])


def warp_view(tensor: torch.Tensor, annotation: Any) -> wp.array:
    """A Warp array over the tensor's memory, with the element type of a kernel's parameter."""
    return wp.from_torch(tensor.detach(), dtype=annotation.dtype, requires_grad=False)


def free_memory(device: str | torch.device) -> int:
    """Bytes on a device that a run may plan with."""
    device = torch.device(device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    return int(SHARE[device.type] * free)


def full_device(device: str | torch.device) -> torch.device:
    """The device with its index: for torch, "cuda" and "cuda:0" differ."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
