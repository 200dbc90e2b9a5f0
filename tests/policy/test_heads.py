"""Heads against torch.distributions; sampling frequencies against probabilities."""

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, Normal

from shoal.core import Box, Discrete, Mixed, MultiDiscrete
from shoal.core.errors import ShoalError
from shoal.policy import CategoricalHead, GaussianHead, MixedHead, make_head

JUST_BELOW_ONE = 1.0 - 2.0**-24


def parameters(head, batch: int = 200, seed: int = 0, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Parameters of clearly nonuniform distributions."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in head.parameters():
            p.normal_()
        return head(2.0 * torch.randn(batch, 5), mask)


def categorical(params: torch.Tensor, nvec: tuple[int, ...]) -> list[Categorical]:
    return [Categorical(logits=part) for part in params.split(nvec, dim=-1)]


def test_every_space_has_its_head():
    assert isinstance(make_head(Discrete(3), 5, 0.0), CategoricalHead)
    assert isinstance(make_head(MultiDiscrete((3, 2)), 5, 0.0), CategoricalHead)
    assert isinstance(make_head(Box(3), 5, 0.0), GaussianHead)
    assert isinstance(make_head(Mixed((Box(3), Discrete(2))), 5, 0.0), MixedHead)


@pytest.mark.parametrize("space", [Discrete(4), MultiDiscrete((4,)), MultiDiscrete((2, 5, 3))], ids=str)
def test_choices_equal_torch(space):
    """Log-probability, entropy and mode, of sampled actions."""
    head = make_head(space, 5, 0.0)
    nvec = (space.n,) if isinstance(space, Discrete) else space.nvec
    params = parameters(head)
    action, log_prob = head.sample(params, torch.rand(200, head.noise_width))
    assert tuple(action.shape) == (200, *space.shape)
    assert action.dtype == space.dtype
    references = categorical(params, nvec)
    columns = action.view(200, len(nvec)).long()
    expected = sum(reference.log_prob(columns[:, i]) for i, reference in enumerate(references))
    evaluated, entropy = head.log_prob_and_entropy(params, action)
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(evaluated, expected)
    torch.testing.assert_close(entropy, sum(reference.entropy() for reference in references))
    modes = torch.stack([reference.probs.argmax(-1) for reference in references], dim=-1).view_as(action)
    np.testing.assert_array_equal(head.mode(params), modes)
    np.testing.assert_array_equal(head.to_world(action), action)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
def test_gaussian_equals_torch(shape):
    head = make_head(Box(shape), 5, -0.5)
    params = parameters(head)
    noise = torch.randn(200, head.noise_width)
    action, log_prob = head.sample(params, noise)
    assert tuple(action.shape) == (200, *shape)
    mean, log_std = params.chunk(2, dim=-1)
    reference = Independent(Normal(mean, log_std.exp()), 1)
    evaluated, entropy = head.log_prob_and_entropy(params, action)
    torch.testing.assert_close(action.flatten(1), mean + log_std.exp() * noise)
    torch.testing.assert_close(log_prob, reference.log_prob(action.flatten(1)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(evaluated, reference.log_prob(action.flatten(1)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, reference.entropy())
    torch.testing.assert_close(head.mode(params).flatten(1), mean)


def test_the_initial_log_std_does_not_depend_on_the_features():
    params = make_head(Box(2), 5, -0.7)(torch.randn(10, 5))
    assert (params[:, 2:] == -0.7).all()


def test_frequencies_are_the_probabilities():
    """With noise on a fine grid, each choice's frequency is its probability within one cell of the grid."""
    head = make_head(MultiDiscrete((3, 6)), 5, 0.0)
    params = parameters(head, batch=20)
    cells = 10_000
    grid = ((torch.arange(cells) + 0.5) / cells)[:, None]
    for row, references in zip(params, zip(*(t.probs for t in categorical(params, (3, 6))), strict=True), strict=True):
        action, _ = head.sample(row.expand(cells, -1), grid.expand(-1, 2))
        for part, probs in enumerate(references):
            share = torch.bincount(action[:, part].long(), minlength=len(probs)) / cells
            torch.testing.assert_close(share, probs, rtol=0, atol=1.5 / cells)


def test_parts_use_independent_noise():
    """Independent noise gives independent choices: joint frequencies are products."""
    head = make_head(MultiDiscrete((2, 2)), 5, 0.0)
    row = parameters(head, batch=1)
    axis = (torch.arange(200) + 0.5) / 200
    noise = torch.cartesian_prod(axis, axis)
    action, _ = head.sample(row.expand(len(noise), -1), noise)
    joint = torch.bincount(action[:, 0].long() * 2 + action[:, 1].long(), minlength=4).view(2, 2) / len(noise)
    first, second = (t.probs[0] for t in categorical(row, (2, 2)))
    torch.testing.assert_close(joint, first[:, None] * second[None], rtol=0, atol=0.02)


def test_masked_choices_are_never_taken():
    """All masks of six choices with at least one allowed, with noise over its whole range."""
    masks = torch.tensor([[bool(m >> k & 1) for k in range(6)] for m in range(1, 64)])
    head = make_head(Discrete(6), 5, 0.0)
    noise = torch.cat([torch.tensor([0.0, 2.0**-24, 0.5, JUST_BELOW_ONE]), torch.rand(60)])
    for seed in range(10):
        params = parameters(head, batch=63, seed=seed, mask=masks)
        assert ((params.softmax(-1) == 0) | masks).all()
        for level in noise:
            action, log_prob = head.sample(params, level.expand(63, 1))
            assert masks.gather(1, action[:, None].long()).all()
            assert torch.isfinite(log_prob).all()
        assert masks.gather(1, head.mode(params)[:, None].long()).all()


def test_a_mask_gives_the_distribution_of_the_allowed_choices():
    """Log-probabilities and entropy are those of a smaller categorical distribution."""
    head = make_head(Discrete(4), 5, 0.0)
    keep = [0, 2]
    mask = torch.tensor([True, False, True, False]).expand(50, 4)
    params = parameters(head, 50, mask=mask)
    reference = Categorical(logits=params[:, keep])
    for choice in keep:
        log_prob, entropy = head.log_prob_and_entropy(params, torch.full((50,), choice))
        torch.testing.assert_close(log_prob, reference.log_prob(torch.tensor(keep.index(choice))))
        torch.testing.assert_close(entropy, reference.entropy())


def test_a_mask_over_several_parts():
    """The mask's columns are the parts one after another."""
    head = make_head(MultiDiscrete((2, 3)), 5, 0.0)
    mask = torch.tensor([True, False, False, True, True]).expand(100, 5)
    action, _ = head.sample(parameters(head, 100, mask=mask), torch.rand(100, 2))
    assert (action[:, 0] == 0).all()
    assert set(action[:, 1].tolist()) == {1, 2}


def test_gradients_do_not_flow_to_masked_choices():
    head = make_head(Discrete(3), 5, 0.0)
    mask = torch.tensor([True, True, False]).expand(8, 3)
    log_prob, entropy = head.log_prob_and_entropy(head(torch.randn(8, 5), mask), torch.zeros(8))
    (log_prob.sum() + entropy.sum()).backward()
    assert torch.isfinite(head.linear.weight.grad).all()
    assert head.linear.weight.grad[0].any()
    assert not head.linear.weight.grad[2].any()


@pytest.mark.parametrize(
    ("space", "shown"),
    [
        (Box(5, -2.0, 6.0), [-2.0, -2.0, 2.0, 6.0, 6.0]),
        (Box(5), [-3.0, -1.0, 0.0, 1.0, 3.0]),
        (Box(5, low=-2.0), [-2.0, -1.0, 0.0, 1.0, 3.0]),
        (Box(5, high=0.5), [-3.0, -1.0, 0.0, 0.5, 0.5]),
    ],
    ids=["bounded", "free", "from below", "from above"],
)
def test_the_world_receives_scaled_and_clipped_actions(space, shown):
    action = torch.tensor([[-3.0, -1.0, 0.0, 1.0, 3.0]])
    assert make_head(space, 5, 0.0).to_world(action).tolist() == [shown]


@pytest.mark.parametrize("space", [Discrete(3), MultiDiscrete((2, 3)), Box(2), Mixed((Discrete(3), Box(2)))], ids=str)
def test_log_probability_follows_the_gradient(space):
    """Gradient ascent on an action's log-probability increases it."""
    head = make_head(space, 5, 0.0)
    features = torch.randn(16, 5)
    action, before = head.sample(head(features), torch.rand(16, head.noise_width))
    head.log_prob_and_entropy(head(features), action.detach())[0].sum().backward()
    with torch.no_grad():
        for p in head.parameters():
            p.add_(1e-3 * p.grad)
    after = head.log_prob_and_entropy(head(features), action)[0]
    assert after.sum() > before.sum()


# --- choices and numbers together -------------------------------------------------------------------------------------

MIXED = Mixed((Discrete(3), Box((2, 2), -2.0, 6.0), MultiDiscrete((2, 4)), Box(1)))
"""Columns of an action: 0 | 1 2 3 4 | 5 6 | 7; logits and means: 3 | 4 | 2 + 4 | 1."""


def references_of(head: MixedHead, features: torch.Tensor) -> tuple[list[Categorical], list[Normal]]:
    """The distributions of MIXED, from the layer's outputs."""
    raw = torch.nn.functional.linear(features, head.linear.weight, head.linear.bias)
    first, square, second, third, single = raw.split((3, 4, 2, 4, 1), dim=-1)
    choices = [Categorical(logits=logits) for logits in (first, second, third)]
    spreads = [head.parts[1].log_std.exp(), head.parts[3].log_std.exp()]
    return choices, [Normal(mean, spread) for mean, spread in zip((square, single), spreads, strict=True)]


def mixed_head(batch: int = 300) -> tuple[MixedHead, torch.Tensor]:
    head, features = make_head(MIXED, 5, -0.5), 2.0 * torch.randn(batch, 5)
    parameters(head)
    return head, features


@torch.no_grad()
def test_mixed_equals_torch():
    """Log-probability, entropy and mode are those of torch's distributions of the parts, added up."""
    head, features = mixed_head()
    params = head(features)
    assert (head.noise_width, head.gaussian_noise) == (8, True)
    noise = torch.randn(300, 8)
    action, log_prob = head.sample(params, noise)
    assert (tuple(action.shape), action.dtype) == ((300, 8), torch.float32)
    choices, (square, single) = references_of(head, features)
    expected = square.log_prob(action[:, 1:5]).sum(-1) + single.log_prob(action[:, 7:]).sum(-1)
    entropy = square.entropy().sum(-1) + single.entropy().sum(-1)
    for reference, column in zip(choices, (0, 5, 6), strict=True):
        expected = expected + reference.log_prob(action[:, column].long())
        entropy = entropy + reference.entropy()
        np.testing.assert_array_equal(action[:, column], action[:, column].round())
        np.testing.assert_array_equal(head.mode(params)[:, column], reference.probs.argmax(-1))
    evaluated, actual = head.log_prob_and_entropy(params, action)
    for found in (log_prob, evaluated):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual, entropy)
    torch.testing.assert_close(action[:, 1:5], square.mean + square.stddev * noise[:, 1:5])
    torch.testing.assert_close(head.mode(params)[:, 1:5], square.mean)


@torch.no_grad()
def test_the_frequencies_of_mixed_choices_are_their_probabilities():
    """With noise on a grid of quantiles of the normal distribution."""
    head, features = mixed_head(batch=1)
    cells = 20_000
    grid = torch.special.ndtri(((torch.arange(cells) + 0.5) / cells).double()).float()
    action, _ = head.sample(head(features).expand(cells, -1), grid[:, None].expand(-1, 8))
    for reference, column in zip(references_of(head, features)[0], (0, 5, 6), strict=True):
        share = torch.bincount(action[:, column].long(), minlength=reference.probs.shape[1]) / cells
        torch.testing.assert_close(share, reference.probs[0], rtol=0, atol=2.0 / cells)


@torch.no_grad()
def test_extreme_mixed_noise_gives_a_valid_choice():
    head, features = mixed_head(batch=50)
    for far in (-40.0, -6.0, 6.0, 40.0):
        action, log_prob = head.sample(head(features), torch.full((50, 8), far))
        assert ((action[:, [0, 5, 6]] >= 0) & (action[:, [0, 5, 6]] < torch.tensor([3, 2, 4]))).all()
        assert torch.isfinite(log_prob).all()
    many = make_head(Mixed((Discrete(20), Box(1))), 5, 0.0)
    action, _ = many.sample(parameters(many, 50), torch.full((50, 2), 40.0))
    assert (action[:, 0] < 20).all()


def test_the_world_receives_unchanged_choices_and_scaled_numbers():
    action = torch.tensor([[2.0, -3.0, 0.0, 0.5, 3.0, 1.0, 3.0, 9.0]])
    shown = [[2.0, -2.0, 2.0, 4.0, 6.0, 1.0, 3.0, 9.0]]
    assert make_head(MIXED, 5, 0.0).to_world(action).tolist() == shown


def test_gradients_reach_every_parameter_of_a_mixed_head():
    head = make_head(MIXED, 5, 0.0)
    features = torch.randn(16, 5)
    action, _ = head.sample(head(features), torch.randn(16, 8))
    log_prob, entropy = head.log_prob_and_entropy(head(features), action.detach())
    (log_prob.sum() + entropy.sum()).backward()
    assert {name for name, _ in head.named_parameters()} == {
        "linear.weight",
        "linear.bias",
        "parts.1.log_std",
        "parts.3.log_std",
    }
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())


@pytest.mark.parametrize("mixed", [False, True])
def test_initial_probabilities_are_the_odds(mixed):
    space = Discrete(4, odds=(0.03, 1.0, 1.0, 2.0))
    head = make_head(Mixed((space, Box((2,)))) if mixed else space, 16, 0.0)
    logits = head(torch.randn(200, 16)).detach()[:, :4]
    wanted = torch.tensor(space.odds) / sum(space.odds)
    torch.testing.assert_close(logits.softmax(-1).mean(0), wanted, atol=0.01, rtol=0)
    for odds in ((1.0, 2.0), (0.0, 1.0, 1.0, 1.0)):
        with pytest.raises(ShoalError, match="odds above 0 for each of its 4 choices"):
            Discrete(4, odds=odds)
