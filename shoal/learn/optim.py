"""Adam and Lamb over one flat vector: one gradient to reduce, to clip and to apply, wherever it came from."""

from collections.abc import Callable

import torch
from torch import nn

ROW = 512
"""Where norms or weight decay tell parameters apart, each of them fills whole rows of this many numbers."""

ALIGNED = 4
"""Elsewhere it fills a multiple of 16 bytes: compiled code that reads four numbers at once may read any parameter."""

LARGEST_NORM = 10.0
"""Lamb counts the norm of a parameter as at most this."""

TRUST = (0.01, 100.0)
"""Bounds of Lamb's trust ratio."""


class Adam:
    """Adam (Kingma & Ba 2015) with gradient clipping, on the device and without reading anything on the host.

    The parameters become views of one vector. A step whose gradient is not finite, or whose `go` flag is 0, changes
    nothing: so it can be recorded in a graph and still be skipped.

    Weight decay is decoupled (Loshchilov & Hutter 2019) and for weights alone: for what has two axes or more, not for
    biases, norms and scalars.
    """

    by_parameter = False
    """Whether the size of a step depends on the parameter it is for."""

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
        self.apart = self.by_parameter or weight_decay > 0
        """Whether parameters are told apart."""
        self.row = ROW if self.apart else ALIGNED
        rows = [-(-p.numel() // self.row) for p in self.parameters]
        pairs = list(zip(rows, self.parameters, strict=True))
        self._gaps = [torch.zeros(n * self.row - p.numel(), device=device) for n, p in pairs]
        self.flat = self.joined([p.detach() for p in self.parameters])
        offset = 0
        for n, p in pairs:
            p.data = self.flat[offset : offset + p.numel()].view_as(p)
            offset += n * self.row
        self.first = torch.zeros_like(self.flat)
        self.second = torch.zeros_like(self.flat)
        self.steps = torch.zeros((), device=device)
        self.lr = torch.zeros((), device=device)
        self.bad_steps = torch.zeros((), device=device)
        """Steps refused because the gradient was not finite."""
        self.eps, self.max_norm, self.betas, self.weight_decay = eps, max_norm, betas, weight_decay
        if self.apart:
            self._tell_apart(rows)
        self.reduce: Callable[[torch.Tensor], None] | None = None
        """Averages the gradient over processes, in place; the one place where that happens.

        Losses are made so that their mean over the processes is the loss of all samples."""
        self._apply: Callable = torch.compile(self._apply_eager, dynamic=False) if compiled else self._apply_eager

    def _tell_apart(self, rows: list[int]) -> None:
        """Which rows belong to which parameter: so norms are sums of sums of rows, in a fixed order, and no loop."""
        device, count = self.flat.device, torch.tensor(rows)
        self.owner = torch.repeat_interleave(torch.arange(len(rows)), count).to(device)
        """[rows]: whose row it is."""
        place = torch.arange(max(rows)).expand(len(rows), -1)
        self.inside = (place < count[:, None]).to(device)
        """[parameters, most rows of one]: whether the parameter has so many."""
        self.table = torch.where(place < count[:, None], place + (count.cumsum(0) - count)[:, None], 0).to(device)
        """[parameters, most rows of one]: its rows."""
        self.is_weight = torch.tensor([p.ndim > 1 for p in self.parameters], device=device)
        """[parameters]: whether it is neither a bias nor a norm nor a scalar."""

    def joined(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """One for each parameter, as one vector."""
        pairs = zip(pieces, self._gaps, strict=True)
        return torch.cat([part for piece, gap in pairs for part in (piece.reshape(-1), gap) if part.numel()])

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """The gradient of `loss` as one vector; those of several parts of a batch add up."""
        return self.joined(list(torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)))

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
        root = torch.sqrt(self.second / (1.0 - torch.pow(b2, steps))) + self.eps
        if not self.apart:
            size = self.lr * go / (1.0 - torch.pow(b1, steps))
            self.flat.sub_(size * self.first / root)
        else:
            step = self.first / ((1.0 - torch.pow(b1, steps)) * root)
            self.flat.sub_(self.lr * go * self._shaped(step.view(-1, self.row)).view(-1))
        return norm

    def _shaped(self, step: torch.Tensor) -> torch.Tensor:
        """Adam's step [rows, ROW] as it is to be taken: u = m / (sqrt(v) + eps) + d w, the decay d for weights."""
        decay = self.is_weight[self.owner].unsqueeze(-1) * self.weight_decay
        return step + decay * self.flat.view_as(step)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"first": self.first, "second": self.second, "steps": self.steps, "bad_steps": self.bad_steps}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


class Lamb(Adam):
    """Lamb (You et al. 2020), for large batches: a step is as long as the weights that it changes.

    r = min(|w|, 10) / |u|, between 0.01 and 100, for each parameter; w falls by lr r u. Biases, norms and scalars, and
    weights that are all zero, as residual branches begin, take the plain step of Adam: r = 1.
    """

    by_parameter = True

    def _shaped(self, step: torch.Tensor) -> torch.Tensor:
        step = super()._shaped(step)
        length, weight = self._norms(step), self._norms(self.flat.view_as(step))
        ratio = (weight.clamp(max=LARGEST_NORM) / length).clamp(*TRUST)
        ratio = torch.where(self.is_weight & (weight > 0) & (length > 0), ratio, 1.0)
        return ratio[self.owner].unsqueeze(-1) * step

    def _norms(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of each parameter's part of x [rows, ROW]."""
        squares = x.square().sum(dim=1)
        return torch.where(self.inside, squares[self.table], 0.0).sum(dim=1).sqrt()


OPTIMIZERS: dict[str, type[Adam]] = {"adam": Adam, "lamb": Lamb}
"""Name on the command line -> optimizer."""
