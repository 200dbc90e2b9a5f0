"""Adam over one flat vector: one gradient to reduce, to clip and to apply, wherever it came from."""

from collections.abc import Callable

import torch
from torch import nn


class Adam:
    """Adam (Kingma & Ba 2015) with gradient clipping, on the device and without reading anything on the host.

    The parameters become views of one vector. A step whose gradient is not finite, or whose `go` flag is 0, changes
    nothing: so it can be recorded in a graph and still be skipped.
    """

    def __init__(self, module: nn.Module, eps: float, max_norm: float, compiled: bool, betas=(0.9, 0.999)):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.parameters]).contiguous()
        offset = 0
        for p in self.parameters:
            p.data = self.flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        self.first = torch.zeros_like(self.flat)
        self.second = torch.zeros_like(self.flat)
        self.steps = torch.zeros((), device=self.flat.device)
        self.lr = torch.zeros((), device=self.flat.device)
        self.bad_steps = torch.zeros((), device=self.flat.device)
        """Steps refused because the gradient was not finite."""
        self.eps, self.max_norm, self.betas = eps, max_norm, betas
        self.reduce: Callable[[torch.Tensor], None] | None = None
        """Averages the gradient over processes, in place; the one place where that happens."""
        self._apply: Callable = torch.compile(self._apply_eager, dynamic=False) if compiled else self._apply_eager

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """The gradient of `loss` as one vector; those of several parts of a batch add up."""
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([g.reshape(-1) for g in gradients])

    def step(self, gradient: torch.Tensor, go: torch.Tensor) -> torch.Tensor:
        """One step down the gradient; returns its norm before clipping."""
        if self.reduce is not None:
            self.reduce(gradient)
        return self._apply(gradient, go)

    @torch.no_grad()
    def _apply_eager(self, gradient: torch.Tensor, go: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(gradient)
        finite = torch.isfinite(norm)
        self.bad_steps.add_(torch.where(finite, 0.0, go))
        go = torch.where(finite, go, 0.0)
        g = torch.where(finite, gradient * (self.max_norm / (norm + 1e-6)).clamp(max=1.0), 0.0)
        b1, b2 = self.betas
        self.steps.add_(go)
        self.first.add_((g - self.first) * ((1.0 - b1) * go))
        self.second.add_((g * g - self.second) * ((1.0 - b2) * go))
        steps = self.steps.clamp(min=1.0)
        size = self.lr * go / (1.0 - torch.pow(b1, steps))
        root = torch.sqrt(self.second / (1.0 - torch.pow(b2, steps))) + self.eps
        self.flat.sub_(size * self.first / root)
        return norm

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"first": self.first, "second": self.second, "steps": self.steps, "bad_steps": self.bad_steps}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
