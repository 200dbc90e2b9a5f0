"""Actor-critic policies: encoders, normalization, values, initialization."""

import numpy as np
import pytest
import torch
from torch import nn

from shoal.core import Box, Discrete, Group, ShoalError
from shoal.policy import ActorCritic, mlp_encoder
from shoal.policy.mlp import MLP

GROUP = Group("g", observation=Box(4), action=Discrete(3))


def make(shared_encoder=False, normalize=False, encoder=None, group=GROUP) -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic(group, encoder or mlp_encoder((16, 8), "tanh"), shared_encoder, normalize, 0.0)


def test_layers_are_applied_in_order():
    """The MLP equals its layers written out."""
    mlp = MLP((4,), (16, 8), "relu")
    x = torch.randn(10, 4)
    first, second = (m for m in mlp.layers if isinstance(m, nn.Linear))
    expected = np.maximum(x.numpy() @ first.weight.detach().numpy().T, 0.0)
    expected = np.maximum(expected @ second.weight.detach().numpy().T, 0.0)
    np.testing.assert_allclose(mlp(x).detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shared_encoder", [True, False])
def test_shapes_and_equal_values_of_both_methods(shared_encoder):
    policy = make(shared_encoder)
    x = torch.randn(10, 4)
    params, value = policy.distribution_and_value(x)
    assert (tuple(params.shape), tuple(value.shape)) == ((10, 3), (10,))
    torch.testing.assert_close(params, policy.distribution(x))
    torch.testing.assert_close(value, policy.value(x))


def test_only_a_shared_encoder_gets_gradients_of_the_value():
    for shared_encoder in (True, False):
        policy = make(shared_encoder)
        policy.value(torch.randn(10, 4)).sum().backward()
        touched = any(p.grad is not None and p.grad.any() for p in policy.policy_encoder.parameters())
        assert touched == shared_encoder


def test_orthogonal_initialization():
    """Rows or columns of a layer's weights are orthogonal with the usual gains; biases are zero."""
    policy = make()
    layers = [m for m in policy.policy_encoder.modules() if isinstance(m, nn.Linear)]
    gains = [(layer, np.sqrt(2.0)) for layer in layers] + [(policy.head.linear, 0.01), (policy.value_head, 1.0)]
    for layer, gain in gains:
        w = layer.weight.detach().double()
        gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=1e-5 * gain)
        assert not layer.bias.any()


def test_the_initial_policy_is_nearly_uniform():
    probs = make().distribution(torch.randn(100, 4)).softmax(-1)
    torch.testing.assert_close(probs, torch.full_like(probs, 1 / 3), rtol=0, atol=0.02)


def test_normalization_shifts_scales_and_clips():
    """A normalizing policy equals a plain one with the same weights on normalized observations."""
    plain, normalizing = make(), make(normalize=True)
    normalizing.load_state_dict(plain.state_dict())
    seen = torch.randn(500, 4) * torch.tensor([0.1, 1.0, 10.0, 100.0]) + torch.tensor([5.0, -5.0, 0.0, 50.0])
    normalizing.moments.merge(seen)
    x = seen[:20].clone()
    x[0] = 1e6
    data = seen.double()
    expected = ((x.double() - data.mean(0)) / data.std(0, correction=0)).clamp(-10.0, 10.0).float()
    torch.testing.assert_close(normalizing.value(x), plain.value(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normalizing.distribution(x), plain.distribution(expected), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain.value(x), plain.value(expected))


def test_initial_moments_do_not_change_observations():
    """Initial moments are mean 0 and variance 1, so observations change only by clipping."""
    plain, normalizing = make(), make(normalize=True)
    x = torch.randn(10, 4)
    torch.testing.assert_close(normalizing.value(x), plain.value(x))


def test_bytes_are_converted_to_floats():
    policy = make()
    x = torch.randint(0, 255, (6, 4), dtype=torch.uint8)
    torch.testing.assert_close(policy.value(x), policy.value(x.float()))


class Pooled(nn.Module):
    """A user's encoder: images to eight features."""

    def __init__(self, shape):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 8, 3)

    def forward(self, x):
        return self.conv(x).relu().mean(dim=(2, 3))


def test_a_user_s_encoder():
    policy = make(encoder=Pooled, group=Group("g", observation=Box((2, 6, 6)), action=Discrete(3)))
    params, value = policy.distribution_and_value(torch.randn(5, 2, 6, 6))
    assert (tuple(params.shape), tuple(value.shape)) == ((5, 3), (5,))
    assert policy.policy_encoder is not policy.value_encoder
    assert policy.head.linear.in_features == 8


@pytest.mark.parametrize(
    ("encoder", "says"),
    [
        (lambda shape: nn.Unflatten(1, (2, 2)), r"\[batch, 4\].*\[batch, features\].*\(2, 2, 2\)"),
        (lambda shape: nn.Flatten(0), r"\[batch, features\].*\(8,\)"),
        (lambda shape: nn.LSTM(4, 8), r"\[batch, features\].*tuple"),
    ],
    ids=["too many axes", "no batch", "a tuple"],
)
def test_an_encoder_with_the_wrong_output_is_refused(encoder, says):
    with pytest.raises(ShoalError, match=says):
        make(encoder=encoder)


def test_a_mask_reaches_the_head():
    group = Group("g", observation=Box(4), action=Discrete(3), masked=True)
    mask = torch.tensor([[True, False, True]]).expand(7, 3)
    policy, x = make(group=group), torch.randn(7, 4)
    for params in (policy.distribution(x, mask), policy.distribution_and_value(x, mask)[0]):
        assert (params.softmax(-1)[:, 1] == 0).all()
        assert (params.softmax(-1)[:, 0] > 0).all()
