"""What the processes of a run compute together: sums, means, the largest, and moments of what each of them has seen.

Whoever needs the others asks a `Reducer`; nothing else calls torch.distributed. The plain one is for a process that is
alone: it has nothing to do, and costs nothing.
"""

from typing import Any

import torch
import torch.distributed as dist


class Reducer:
    """A process that trains alone."""

    rank = 0
    """Which process this is, from 0."""
    size = 1
    """How many there are."""
    recordable = True
    """Whether what it does can be part of a CUDA graph."""

    def add(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all processes."""

    def average(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its mean over all processes."""

    def maximum(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the largest that a process has."""

    def pooled(
        self, count: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts, means and variances of what all processes have, from those of this one.

        There may be one count for all means.
        """
        return count, mean, var

    def __deepcopy__(self, memo: Any) -> "Reducer":
        return self


ALONE = Reducer()


class GroupReducer(Reducer):
    """One of several processes. Every process must make the same calls in the same order."""

    def __init__(self, group: Any, rank: int, size: int, through_host: bool):
        """`group` is torch's; with `through_host`, tensors of a GPU are summed in the memory of the CPU."""
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
            host.copy_(tensor)  # sync: processes that share a GPU cannot do without
            dist.all_reduce(host, operation, self.group)
            tensor.copy_(host)
        else:
            dist.all_reduce(tensor, operation, self.group)

    def pooled(
        self, count: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """With the share s_i = n_i / sum n of each: m = sum s_i m_i,  v = sum s_i (v_i + (m_i - m)^2)."""
        own = torch.cat([part.double().flatten() for part in (count, mean, var)])
        each = torch.zeros(self.size, own.numel(), dtype=torch.float64, device=own.device)
        each[self.rank] = own
        self.add(each)  # all but one process have zeros in a row: so everybody gets all rows
        counts, means, vars = each.split([count.numel(), mean.numel(), var.numel()], dim=1)
        total = counts.sum(dim=0)
        share = counts / total.clamp(min=1.0)
        whole = (share * means).sum(dim=0)
        spread = (share * (vars + (means - whole).square())).sum(dim=0)
        return (
            total.to(count.dtype).view_as(count),
            whole.to(mean.dtype).view_as(mean),
            spread.to(var.dtype).view_as(var),
        )
