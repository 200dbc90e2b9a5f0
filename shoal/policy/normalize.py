"""Running means and variances of observations, and of returns for reward scaling."""

import torch
from torch import nn

from shoal.core.reduce import ALONE, Reducer


class RunningMoments(nn.Module):
    """Mean and variance of all samples so far, per element of `shape`."""

    mean: torch.Tensor
    var: torch.Tensor
    count: torch.Tensor
    reducer: Reducer = ALONE
    """Processes that merge at the same time; their batches count as one."""

    def __init__(self, shape: tuple[int, ...] = ()):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def merge(self, batch: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Update with a batch [n, *shape], in place and without reading on the host (Chan et al. 1983).

        Rows of `weight` [n] 0 are ignored. Counts are float64.
        """
        batch = batch.float()
        if weight is None:
            n = torch.full_like(self.count, batch.shape[0])
            mean = batch.mean(dim=0)
            var = (batch - mean).square().mean(dim=0)
        else:
            w = weight.float().view(-1, *[1] * (batch.ndim - 1))
            n = weight.sum(dtype=torch.float64)
            safe = n.clamp(min=1.0).float()
            mean = (batch * w).sum(dim=0) / safe
            var = ((batch - mean).square() * w).sum(dim=0) / safe
        n, mean, var = self.reducer.pooled(n, mean, var)
        total = (self.count + n).clamp(min=1.0)
        share = (n / total).float()
        shift = mean - self.mean
        self.var.copy_(self.var * (1.0 - share) + var * share + shift.square() * share * (1.0 - share))
        self.mean.add_(shift * share)
        self.count.add_(n)

    def scale(self) -> torch.Tensor:
        """One over the standard deviation."""
        return torch.rsqrt(self.var + 1e-8)


def share_buffers(module: nn.Module, other: nn.Module) -> None:
    """Let a module use the running moments and other persistent buffers of a module of the same structure."""
    for own, theirs in zip(module.modules(), other.modules(), strict=True):
        for name, buffer in theirs.named_buffers(recurse=False):
            if name in theirs.state_dict():  # persistent, so not noise
                own.register_buffer(name, buffer)
