"""Adam and Lamb on one flat parameter vector, with gradient reduction and clipping."""

from collections.abc import Callable

import torch
from torch import nn

ROW = 512
"""Elements per row. With per-parameter steps, each parameter is padded to whole rows."""

ALIGNMENT = 4
"""Otherwise parameters are padded to this many elements (16 bytes), as compiled vector loads need."""

MAX_WEIGHT_NORM = 10.0
"""Upper bound of a parameter's norm in Lamb."""

TRUST = (0.01, 100.0)
"""Bounds of Lamb's trust ratio."""


class Adam:
    """Adam (Kingma & Ba 2015) with gradient clipping, without reads on the host.

    The parameters become views of one vector. A step with a gradient that is not finite, or a `go` flag of 0, changes
    nothing, so that steps of a CUDA graph can be skipped.

    Weight decay is decoupled (Loshchilov & Hutter 2019) and applies to parameters with two or more axes, not to biases,
    norms and scalars.
    """

    scales_per_parameter = False
    """Whether the step is scaled per parameter."""

    def __init__(
        self,
        module: nn.Module,
        eps: float,
        max_norm: float,
        compiled: bool,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        device = self.parameters[0].device
        self.per_parameter = self.scales_per_parameter or weight_decay > 0
        """Whether the step needs to know which elements belong to which parameter."""
        self.row = ROW if self.per_parameter else ALIGNMENT
        rows = [-(-p.numel() // self.row) for p in self.parameters]
        pairs = list(zip(rows, self.parameters, strict=True))
        self._gaps = [torch.zeros(n * self.row - p.numel(), device=device) for n, p in pairs]
        self.flat = self.flatten([p.detach() for p in self.parameters])
        offset = 0
        for n, p in pairs:
            p.data = self.flat[offset : offset + p.numel()].view_as(p)
            offset += n * self.row
        self.first = torch.zeros_like(self.flat)
        self.second = torch.zeros_like(self.flat)
        self.steps = torch.zeros((), device=device)
        self.lr = torch.zeros((), device=device)
        self.bad_steps = torch.zeros((), device=device)
        """Number of steps skipped because the gradient was not finite."""
        self.eps, self.max_norm, self.betas, self.weight_decay = eps, max_norm, betas, weight_decay
        if self.per_parameter:
            self._index_rows(rows)
        self.reduce: Callable[[torch.Tensor], None] | None = None
        """Averages the gradient over processes in place (None: one process).

        The mean over processes of each loss is the loss of all samples."""
        self._apply: Callable = torch.compile(self._apply_eager, dynamic=False) if compiled else self._apply_eager

    def _index_rows(self, rows: list[int]) -> None:
        """Index which rows belong to which parameter, to sum norms per row in a fixed order without a loop."""
        device, count = self.flat.device, torch.tensor(rows)
        self.owner = torch.repeat_interleave(torch.arange(len(rows)), count).to(device)
        """int64 [rows]: index of the row's parameter."""
        place = torch.arange(max(rows)).expand(len(rows), -1)
        self.row_mask = (place < count[:, None]).to(device)
        """bool [parameters, max rows]: whether the entry of `row_index` is a row of the parameter."""
        self.row_index = torch.where(place < count[:, None], place + (count.cumsum(0) - count)[:, None], 0).to(device)
        """int64 [parameters, max rows]: rows of the parameter."""
        self.is_weight = torch.tensor([p.ndim > 1 for p in self.parameters], device=device)
        """bool [parameters]: whether it has two or more axes."""

    def flatten(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """Concatenate one tensor per parameter to a vector, with padding."""
        pairs = zip(pieces, self._gaps, strict=True)
        return torch.cat([part for piece, gap in pairs for part in (piece.reshape(-1), gap) if part.numel()])

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """The gradient of `loss` as one vector; gradients of parts of a batch can be added."""
        return self.flatten(list(torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)))

    def step(self, gradient: torch.Tensor, go: torch.Tensor) -> torch.Tensor:
        """Take one step and return the gradient's norm before clipping."""
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
        root = torch.sqrt(self.second / (1.0 - torch.pow(b2, steps))) + self.eps
        if not self.per_parameter:
            size = self.lr * go / (1.0 - torch.pow(b1, steps))
            self.flat.sub_(size * self.first / root)
        else:
            step = self.first / ((1.0 - torch.pow(b1, steps)) * root)
            self.flat.sub_(self.lr * go * self._scaled_step(step.view(-1, self.row)).view(-1))
        return norm

    def _scaled_step(self, step: torch.Tensor) -> torch.Tensor:
        """Adam's step [rows, ROW] with weight decay: u = m / (sqrt(v) + eps) + d w."""
        decay = self.is_weight[self.owner].unsqueeze(-1) * self.weight_decay
        return step + decay * self.flat.view_as(step)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"first": self.first, "second": self.second, "steps": self.steps, "bad_steps": self.bad_steps}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


class Lamb(Adam):
    """Lamb (You et al. 2020), for large batches: the step of each parameter is scaled to the norm of its weights.

    w <- w - lr r u with r = min(|w|, 10) / |u|, clipped to [0.01, 100]. Biases, norms, scalars and all-zero weights
    (such as initial residual branches) take Adam's step: r = 1.
    """

    scales_per_parameter = True

    def _scaled_step(self, step: torch.Tensor) -> torch.Tensor:
        step = super()._scaled_step(step)
        length, weight = self._norms(step), self._norms(self.flat.view_as(step))
        ratio = (weight.clamp(max=MAX_WEIGHT_NORM) / length).clamp(*TRUST)
        ratio = torch.where(self.is_weight & (weight > 0) & (length > 0), ratio, 1.0)
        return ratio[self.owner].unsqueeze(-1) * step

    def _norms(self, x: torch.Tensor) -> torch.Tensor:
        """Norm of each parameter's rows of x [rows, ROW]."""
        squares = x.square().sum(dim=1)
        return torch.where(self.row_mask, squares[self.row_index], 0.0).sum(dim=1).sqrt()


OPTIMIZERS: dict[str, type[Adam]] = {"adam": Adam, "lamb": Lamb}
"""Name on the command line -> optimizer."""
