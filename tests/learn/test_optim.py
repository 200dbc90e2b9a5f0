"""Adam on one flat vector against torch's, Lamb against a slow reference, and skipped steps."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from shoal.learn.optim import ROW, Adam, Lamb

ON, OFF = torch.ones(()), torch.zeros(())
BOTH = pytest.mark.parametrize("kind", [Adam, Lamb])


def network(seed=0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(module: nn.Module, step: int) -> torch.Tensor:
    torch.manual_seed(100 + step)
    x, y = torch.randn(32, 4), 5.0 * torch.randn(32, 2)
    return (module(x) - y).square().mean()


def make(module, lr=0.01, max_norm=1.0, kind=Adam, weight_decay=0.0) -> Adam:
    adam = kind(module, 1e-5, max_norm, compiled=False, weight_decay=weight_decay)
    adam.lr.fill_(lr)
    return adam


@pytest.mark.parametrize("max_norm", [0.3, 1e6], ids=["clipped", "free"])
def test_twenty_steps_equal_torch(max_norm):
    mine, theirs = network(), network()
    adam = make(mine, max_norm=max_norm)
    reference = torch.optim.Adam(theirs.parameters(), lr=0.01, eps=1e-5)
    clipped = False
    for step in range(20):
        lr = 0.01 * (1 - step / 40)
        adam.lr.fill_(lr)
        reference.param_groups[0]["lr"] = lr
        norm = adam.step(adam.gradient(loss_of(mine, step)), ON)
        reference.zero_grad()
        loss_of(theirs, step).backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        reference.step()
        torch.testing.assert_close(norm, expected)
        clipped |= bool(expected > max_norm)
    assert clipped == (max_norm < 1)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def snapshot(module, adam) -> list[torch.Tensor]:
    return [t.clone() for t in (*module.parameters(), adam.first, adam.second, adam.steps)]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@BOTH
def test_a_gradient_that_is_not_finite_changes_nothing(poison, kind):
    module = network()
    adam = make(module, kind=kind)
    adam.step(adam.gradient(loss_of(module, 0)), ON)
    before = snapshot(module, adam)
    adam.step(adam.gradient(loss_of(module, 1) + poison * module[0].weight[0, 0]), ON)
    for one, other in zip(before, snapshot(module, adam), strict=True):
        assert torch.equal(one, other)
    assert float(adam.bad_steps) == 1.0


@BOTH
def test_a_step_with_go_zero_changes_nothing(kind):
    module = network()
    adam = make(module, kind=kind)
    adam.step(adam.gradient(loss_of(module, 0)), ON)
    before = snapshot(module, adam)
    assert adam.step(adam.gradient(loss_of(module, 1)), OFF) > 0
    adam.step(adam.gradient(float("nan") * loss_of(module, 1)), OFF)
    for one, other in zip(before, snapshot(module, adam), strict=True):
        assert torch.equal(one, other)
    assert float(adam.bad_steps) == 0.0


@BOTH
def test_skipped_steps_do_not_affect_later_ones(kind):
    """Refused and skipped steps in between do not change the result of the others."""
    plain, disturbed = network(), network()
    one, other = make(plain, kind=kind), make(disturbed, kind=kind)
    for step in range(6):
        one.step(one.gradient(loss_of(plain, step)), ON)
        other.step(other.gradient(float("inf") * loss_of(disturbed, step)), ON)
        other.step(other.gradient(loss_of(disturbed, step + 50)), OFF)
        other.step(other.gradient(loss_of(disturbed, step)), ON)
    assert torch.equal(one.flat, other.flat)


@BOTH
def test_parameters_are_views_of_the_vector_with_the_same_values(kind):
    module, original = network(), network()
    adam = make(module, kind=kind)
    for one, other in zip(module.parameters(), original.parameters(), strict=True):
        assert torch.equal(one, other)
    adam.flat.zero_()
    assert not any(p.any() for p in module.parameters())


@BOTH
def test_frozen_parameters_do_not_change(kind):
    module = network()
    module[0].weight.requires_grad_(False)
    kept = module[0].weight.clone()
    adam = make(module, kind=kind)
    adam.step(adam.gradient(loss_of(module, 0)), ON)
    assert torch.equal(module[0].weight, kept)
    assert not torch.equal(module[2].weight, network()[2].weight)


def test_an_unused_parameter_does_not_change():
    """As in torch.optim, for networks with unused parts."""
    module = network()
    module.add_module("spare", nn.Linear(2, 2))
    kept = module.spare.weight.clone()
    adam = make(module)
    adam.step(adam.gradient((module[2](module[1](module[0](torch.ones(3, 4))))).sum()), ON)
    assert torch.equal(module.spare.weight, kept)
    assert not torch.equal(module[2].weight, network()[2].weight)


@BOTH
def test_the_gradient_is_reduced_before_it_is_clipped(kind):
    """A reduction that doubles the gradient gives the step of the doubled loss."""
    mine, theirs = network(), network()
    adam, reference = make(mine, max_norm=0.5, kind=kind), make(theirs, max_norm=0.5, kind=kind)
    adam.reduce = lambda gradient: gradient.mul_(2.0)
    for step in range(3):
        found = adam.step(adam.gradient(loss_of(mine, step)), ON)
        torch.testing.assert_close(found, reference.step(reference.gradient(2.0 * loss_of(theirs, step)), ON))
    torch.testing.assert_close(adam.flat, reference.flat)


@BOTH
def test_a_saved_state_continues_bit_for_bit(kind):
    module = network()
    adam = make(module, kind=kind)
    for step in range(3):
        adam.step(adam.gradient(loss_of(module, step)), ON)
    other = copy.deepcopy(module)
    resumed = make(other, kind=kind)
    resumed.load_state_dict({name: t.clone() for name, t in adam.state_dict().items()})
    for step in range(3, 6):
        adam.step(adam.gradient(loss_of(module, step)), ON)
        resumed.step(resumed.gradient(loss_of(other, step)), ON)
    assert torch.equal(adam.flat, resumed.flat)


# --- weights and other parameters -----------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of all ranks and of sizes around a row: scalars, biases, a norm, weights large, small and zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(()))
        self.first = nn.Linear(4, 300)
        self.norm = nn.LayerNorm(300)
        self.zero = nn.Linear(300, ROW // 64)
        self.last = nn.Linear(8, 64, bias=False)
        self.conv = nn.Conv2d(1, 2, 3)
        with torch.no_grad():
            self.zero.weight.zero_()
            self.last.weight.mul_(40.0)
            self.conv.weight.mul_(1e-4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(self.zero(self.norm(self.first(x) * self.scale)).tanh())
        return self.conv(x.view(-1, 1, 8, 8)).flatten(1)


def odd_loss(module: nn.Module, step: int) -> torch.Tensor:
    torch.manual_seed(100 + step)
    return (module(torch.randn(16, 4)) - 3.0 * torch.randn(16, 72)).square().mean()


def lamb_reference(parameters, state, gradients, step: int, lr: float, decay: float, max_norm: float) -> list[float]:
    """One step of Lamb in float64, one parameter after the other; returns the trust ratios."""
    norm = np.sqrt(sum((g**2).sum() for g in gradients))
    ratios = []
    for p, (m, v), g in zip(parameters, state, gradients, strict=True):
        g = g * min(1.0, max_norm / (norm + 1e-6))
        m += 0.1 * (g - m)
        v += 0.001 * (g**2 - v)
        u = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-5)
        ratio = 1.0
        if p.ndim > 1:
            u = u + decay * p
            if (p**2).sum() > 0 and (u**2).sum() > 0:
                ratio = min(np.sqrt((p**2).sum()), 10.0) / np.sqrt((u**2).sum())
                ratio = min(max(ratio, 0.01), 100.0)
        p -= lr * ratio * u
        ratios.append(ratio)
    return ratios


def test_lamb_equals_its_reference():
    """Covers all bounds: the minimum ratio, a clipped weight norm, and zero weights."""
    module = Odd()
    lamb = make(module, kind=Lamb, weight_decay=0.01)
    references = [p.detach().double().numpy().copy() for p in module.parameters()]
    state = [(np.zeros_like(p), np.zeros_like(p)) for p in references]
    names, seen = [name for name, _ in module.named_parameters()], {}
    longest = 0.0
    for step in range(1, 16):
        lamb.lr.fill_(0.02 / step)
        gradients = torch.autograd.grad(odd_loss(module, step), list(module.parameters()))
        lamb.step(lamb.gradient(odd_loss(module, step)), ON)
        longest = max(longest, np.sqrt((references[names.index("last.weight")] ** 2).sum()))
        found = lamb_reference(references, state, [g.double().numpy() for g in gradients], step, 0.02 / step, 0.01, 1.0)
        for name, ratio in zip(names, found, strict=True):
            seen.setdefault(name, []).append(ratio)
        for (name, p), reference in zip(module.named_parameters(), references, strict=True):
            torch.testing.assert_close(p.detach().double(), torch.as_tensor(reference), rtol=2e-3, atol=2e-5, msg=name)
    assert seen["zero.weight"][0] == 1.0 != seen["zero.weight"][1]
    assert seen["conv.weight"][0] == 0.01
    assert longest > 10.0
    assert set(seen["scale"] + seen["norm.weight"] + seen["first.bias"]) == {1.0}


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_weight_decay_equals_that_of_torch(decay):
    """Decoupled, and only for parameters with two or more axes."""
    mine, theirs = Odd(), Odd()
    adam = make(mine, weight_decay=decay)
    assert all(p.data_ptr() % 16 == 0 for p in adam.parameters)
    groups = [
        dict(params=[p for p in theirs.parameters() if p.ndim > 1], weight_decay=decay),
        dict(params=[p for p in theirs.parameters() if p.ndim < 2], weight_decay=0.0),
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, eps=1e-5)
    for step in range(10):
        adam.step(adam.gradient(odd_loss(mine, step)), ON)
        reference.zero_grad()
        odd_loss(theirs, step).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        reference.step()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_padding_stays_zero():
    module = Odd()
    lamb = make(module, kind=Lamb, weight_decay=0.01)
    assert lamb.flat.numel() % ROW == 0
    for step in range(3):
        lamb.step(lamb.gradient(odd_loss(module, step)), ON)
    numbers = sum(p.numel() for p in module.parameters())
    for vector in (lamb.flat, lamb.first, lamb.second):
        assert int((vector != 0).sum()) <= numbers
    total = torch.stack([p.detach().double().square().sum() for p in module.parameters()]).sum()
    torch.testing.assert_close(lamb.flat.double().square().sum(), total)


def test_a_compiled_step_of_lamb_equals_an_eager_one():
    results = []
    for compiled in (False, True):
        module = Odd()
        lamb = Lamb(module, 1e-5, 1.0, compiled, weight_decay=0.01)
        lamb.lr.fill_(0.01)
        for step in range(3):
            lamb.step(lamb.gradient(odd_loss(module, step)), ON)
        results.append(lamb.flat.clone())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
