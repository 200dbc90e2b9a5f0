"""Adam over one flat vector against torch's, and the steps that must not happen."""

import copy

import pytest
import torch
from torch import nn

from shoal.learn.optim import Adam

ON, OFF = torch.ones(()), torch.zeros(())


def network(seed=0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(module: nn.Module, step: int) -> torch.Tensor:
    torch.manual_seed(100 + step)
    x, y = torch.randn(32, 4), 5.0 * torch.randn(32, 2)
    return (module(x) - y).square().mean()


def make(module, lr=0.01, max_norm=1.0) -> Adam:
    adam = Adam(module, 1e-5, max_norm, compiled=False)
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
def test_a_gradient_that_is_not_finite_changes_nothing(poison):
    module = network()
    adam = make(module)
    adam.step(adam.gradient(loss_of(module, 0)), ON)
    before = snapshot(module, adam)
    adam.step(adam.gradient(loss_of(module, 1) + poison * module[0].weight[0, 0]), ON)
    for one, other in zip(before, snapshot(module, adam), strict=True):
        assert torch.equal(one, other)
    assert float(adam.bad_steps) == 1.0


def test_a_step_without_go_changes_nothing():
    module = network()
    adam = make(module)
    adam.step(adam.gradient(loss_of(module, 0)), ON)
    before = snapshot(module, adam)
    assert adam.step(adam.gradient(loss_of(module, 1)), OFF) > 0
    adam.step(adam.gradient(float("nan") * loss_of(module, 1)), OFF)
    for one, other in zip(before, snapshot(module, adam), strict=True):
        assert torch.equal(one, other)
    assert float(adam.bad_steps) == 0.0


def test_skipped_steps_leave_no_trace():
    """With bad and forbidden steps in between, the walk is that of the good ones alone."""
    plain, disturbed = network(), network()
    one, other = make(plain), make(disturbed)
    for step in range(6):
        one.step(one.gradient(loss_of(plain, step)), ON)
        other.step(other.gradient(float("inf") * loss_of(disturbed, step)), ON)
        other.step(other.gradient(loss_of(disturbed, step + 50)), OFF)
        other.step(other.gradient(loss_of(disturbed, step)), ON)
    assert torch.equal(one.flat, other.flat)


def test_the_module_sees_the_vector_and_keeps_its_numbers():
    module, original = network(), network()
    adam = make(module)
    for one, other in zip(module.parameters(), original.parameters(), strict=True):
        assert torch.equal(one, other)
    adam.flat.zero_()
    assert not any(p.any() for p in module.parameters())


def test_frozen_parameters_stay():
    module = network()
    module[0].weight.requires_grad_(False)
    kept = module[0].weight.clone()
    adam = make(module)
    adam.step(adam.gradient(loss_of(module, 0)), ON)
    assert torch.equal(module[0].weight, kept)
    assert not torch.equal(module[2].weight, network()[2].weight)


def test_a_parameter_that_the_loss_does_not_use_stays():
    """As with torch.optim: a network may have parts that are not in play."""
    module = network()
    module.add_module("spare", nn.Linear(2, 2))
    kept = module.spare.weight.clone()
    adam = make(module)
    adam.step(adam.gradient((module[2](module[1](module[0](torch.ones(3, 4))))).sum()), ON)
    assert torch.equal(module.spare.weight, kept)
    assert not torch.equal(module[2].weight, network()[2].weight)


def test_the_gradient_is_reduced_before_it_is_clipped():
    """Averaging over processes comes first: a reduction that doubles gives the step of the doubled loss."""
    mine, theirs = network(), network()
    adam, reference = make(mine, max_norm=0.5), make(theirs, max_norm=0.5)
    adam.reduce = lambda gradient: gradient.mul_(2.0)
    for step in range(3):
        found = adam.step(adam.gradient(loss_of(mine, step)), ON)
        torch.testing.assert_close(found, reference.step(reference.gradient(2.0 * loss_of(theirs, step)), ON))
    torch.testing.assert_close(adam.flat, reference.flat)


def test_a_saved_state_continues_bit_for_bit():
    module = network()
    adam = make(module)
    for step in range(3):
        adam.step(adam.gradient(loss_of(module, step)), ON)
    other = copy.deepcopy(module)
    resumed = make(other)
    resumed.load_state_dict({name: t.clone() for name, t in adam.state_dict().items()})
    for step in range(3, 6):
        adam.step(adam.gradient(loss_of(module, step)), ON)
        resumed.step(resumed.gradient(loss_of(other, step)), ON)
    assert torch.equal(adam.flat, resumed.flat)
