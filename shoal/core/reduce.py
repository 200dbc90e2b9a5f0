"""Reductions over the processes of a run: sums, means, maxima and pooled moments.

The base class is for a single process: it does nothing and costs nothing.
"""

from typing import Any

import torch
import torch.distributed as dist


class Reducer:
    """Reductions of a process that trains alone."""

    rank = 0
    """Rank of this process."""
    size = 1
    """Number of processes (world size)."""
    recordable = True
    """Whether a reduction can be part of a CUDA graph."""

    def add(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all processes."""

    def average(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its mean over all processes."""

    def maximum(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its elementwise maximum over all processes."""

    def pooled(
        self, count: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts, means and variances over the data of all processes, from those of this process.

        One count may apply to all means.
        """
        return count, mean, var

    def __deepcopy__(self, memo: Any) -> "Reducer":
        return self


ALONE = Reducer()


class GroupReducer(Reducer):
    """Reductions over several processes. Every process must make the same calls in the same order."""

    def __init__(self, group: Any, rank: int, size: int, through_host: bool):
        """`group` is a torch process group. With `through_host`, tensors of a GPU are reduced in host memory."""
        self.group, self.rank, self.size = group, rank, size
        self.through_host = through_host
        self.recordable = not through_host

    def add(self, tensor: torch.Tensor) -> None:
        self._reduce(tensor, dist.ReduceOp.SUM)

    def average(self, tensor: torch.Tensor) -> None:
        self._reduce(tensor, dist.ReduceOp.SUM)
        tensor.div_(self.size)

    def maximum(self, tensor: torch.Tensor) -> None:
        self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: torch.Tensor, operation: Any) -> None:
        if self.through_host and tensor.is_cuda:
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            host.copy_(tensor)  # sync: processes that share a GPU need it
            dist.all_reduce(host, operation, self.group)
            tensor.copy_(host)
        else:
            dist.all_reduce(tensor, operation, self.group)

    def pooled(
        self, count: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """With the weight s_i = n_i / sum n of process i: m = sum s_i m_i,  v = sum s_i (v_i + (m_i - m)^2)."""
        own = torch.cat([part.double().flatten() for part in (count, mean, var)])
        rows = torch.zeros(self.size, own.numel(), dtype=torch.float64, device=own.device)
        rows[self.rank] = own
        self.add(rows)  # each row is zero in all processes but one: the sum gathers the rows
        counts, means, variances = rows.split([count.numel(), mean.numel(), var.numel()], dim=1)
        total = counts.sum(dim=0)
        share = counts / total.clamp(min=1.0)
        pooled_mean = (share * means).sum(dim=0)
        pooled_var = (share * (variances + (means - pooled_mean).square())).sum(dim=0)
        return (
            total.to(count.dtype).view_as(count),
            pooled_mean.to(mean.dtype).view_as(mean),
            pooled_var.to(var.dtype).view_as(var),
        )
