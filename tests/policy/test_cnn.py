"""The Nature CNN and the IMPALA ResNet: parameter counts, layouts, dtypes, activation counts and learning."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.core import Box, Discrete, Group, ShoalError
from shoal.policy import ActorCritic, ImpalaResNet, NatureCNN, choose_encoder
from shoal.policy.cnn import Conv, image_size

ATARI = (4, 84, 84)
BOTH = pytest.mark.parametrize("make", [NatureCNN, ImpalaResNet])


def built(make, shape, **settings) -> nn.Module:
    torch.manual_seed(0)
    return make(shape, **settings)


def images(shape, batch=3, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, *shape), dtype=torch.uint8, generator=generator)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def convolution(inputs: int, outputs: int, side: int) -> int:
    return inputs * outputs * side * side + outputs


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_nature_has_the_parameters_of_the_paper():
    by_hand = convolution(4, 32, 8) + convolution(32, 64, 4) + convolution(64, 64, 3) + (64 * 7 * 7 + 1) * 512
    assert by_hand == 1_684_128
    assert count(NatureCNN(ATARI)) == by_hand
    assert NatureCNN(ATARI)(images(ATARI)).shape == (3, 512)


@pytest.mark.parametrize("width", [1, 2])
def test_impala_has_the_parameters_of_the_paper(width):
    """Height and width shrink from 84 to 42, 21 and 11."""
    by_hand, before = 0, 4
    for channels in (16 * width, 32 * width, 32 * width):
        by_hand += convolution(before, channels, 3) + 4 * convolution(channels, channels, 3)
        before = channels
    by_hand += (32 * width * 11 * 11 + 1) * 256
    assert width > 1 or by_hand == 1_089_232
    assert count(ImpalaResNet(ATARI, width=width)) == by_hand
    assert ImpalaResNet(ATARI, width=width)(images(ATARI)).shape == (3, 256)


@pytest.mark.parametrize(
    ("shape", "frames", "size"),
    [
        ((3, 84, 96), 1, (3, 84, 96)),
        ((84, 96, 3), 1, (3, 84, 96)),
        ((84, 96, 1), 1, (1, 84, 96)),
        ((84, 96, 2), 1, (84, 96, 2)),
        ((3, 84, 3), 1, (3, 84, 3)),
        ((4, 84, 84), 4, (4, 84, 84)),
        ((168, 96, 3), 2, (6, 84, 96)),
    ],
)
def test_channels_are_found(shape, frames, size):
    assert image_size(shape, frames) == size


# --- against the layers written out -----------------------------------------------------------------------------------


def weights(module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    parameters = list(module.parameters())
    for p in parameters:  # nonzero biases, so that a missing one is detected
        nn.init.normal_(p, std=0.05)
    return list(zip(parameters[::2], parameters[1::2], strict=True))


def test_nature_equals_its_layers():
    cnn, seen = NatureCNN(ATARI), images(ATARI)
    first, second, third, last = weights(cnn)
    x = F.relu(F.conv2d(seen.float() / 255.0, *first, stride=4))
    x = F.relu(F.conv2d(x, *second, stride=2))
    x = F.relu(F.conv2d(x, *third))
    torch.testing.assert_close(cnn(seen), F.relu(F.linear(x.reshape(3, -1), *last)))


def test_impala_equals_its_layers():
    shape = (3, 20, 24)
    cnn, seen = ImpalaResNet(shape), images(shape)
    layers = iter(weights(cnn))
    x = seen.float() / 255.0
    for _ in range(3):
        x = F.max_pool2d(F.conv2d(x, *next(layers), padding=1), 3, 2, padding=1)
        for _ in range(2):
            inner = F.conv2d(F.relu(x), *next(layers), padding=1)
            x = x + F.conv2d(F.relu(inner), *next(layers), padding=1)
    assert x.shape == (3, 32, 3, 3)
    torch.testing.assert_close(cnn(seen), F.relu(F.linear(F.relu(x).reshape(3, -1), *next(layers))))


@BOTH
def test_orthogonal_initialization(make):
    """Rows or columns of each layer's weights are orthogonal with equal norm, biases zero, features about 1."""
    cnn = built(make, ATARI)
    for layer in cnn.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            w = layer.weight.detach().double().flatten(1)
            gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
            torch.testing.assert_close(gram, gram[0, 0] * torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=1e-5)
            assert not layer.bias.any()
            if make is NatureCNN:
                assert math.isclose(float(gram[0, 0]), 2.0, abs_tol=1e-4)
    assert 0.1 < float(cnn(images(ATARI)).detach().square().mean()) < 5.0


# --- layouts and types ------------------------------------------------------------------------------------------------


@BOTH
def test_bytes_are_scaled_and_floats_are_not(make):
    cnn, seen = built(make, ATARI), images(ATARI)
    torch.testing.assert_close(cnn(seen), cnn(seen.float() / 255.0))
    assert not torch.allclose(cnn(seen), cnn(seen.float()))


@BOTH
def test_input_images_are_not_modified(make):
    for seen in (images(ATARI), images(ATARI).float()):
        before = seen.clone()
        built(make, ATARI)(seen)
        assert torch.equal(seen, before)


@BOTH
def test_the_layout_in_memory_does_not_matter(make):
    """Weights and images with channels last in memory, as on a GPU, give the same result as contiguous ones."""
    cnn, other, seen = built(make, ATARI), built(make, ATARI), images(ATARI)
    other.to(memory_format=torch.channels_last)
    assert other[1].weight.is_contiguous(memory_format=torch.channels_last)
    expected = cnn(seen)
    torch.testing.assert_close(other(seen.contiguous(memory_format=torch.channels_last)), expected)
    torch.testing.assert_close(cnn(seen.contiguous(memory_format=torch.channels_last)), expected)


@BOTH
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_channels_last_images(make, channels):
    cnn, other = built(make, (channels, 40, 48)), built(make, (40, 48, channels))
    seen = images((channels, 40, 48))
    torch.testing.assert_close(other(seen.permute(0, 2, 3, 1).contiguous()), cnn(seen))


@BOTH
def test_a_stack_of_images_with_channels_last(make):
    """Frames are stacked along the height; the CNN moves them to the channels."""
    cnn, other = built(make, (6, 40, 48)), built(make, (80, 48, 3), frames=2)
    seen = images((6, 40, 48))
    joined = torch.cat([frame.permute(0, 2, 3, 1) for frame in seen.split(3, dim=1)], dim=1)
    assert joined.shape == (3, 80, 48, 3)
    torch.testing.assert_close(other(joined), cnn(seen))


@BOTH
def test_bf16_inside(make):
    cnn, seen = built(make, ATARI), images(ATARI)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        short = cnn(seen)
    assert short.dtype == torch.bfloat16
    torch.testing.assert_close(short.float(), cnn(seen), rtol=0.1, atol=0.1)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 35, 84), (84, 35, 3)])
def test_images_too_small_for_nature_are_refused(shape):
    with pytest.raises(ShoalError, match=r"at least 36 x 36 pixels, got (35 x 84|84 x 35).*--encoder impala"):
        NatureCNN(shape)


def test_the_smallest_images():
    assert NatureCNN((1, 36, 36))(images((1, 36, 36))).shape == (3, 512)
    assert ImpalaResNet((2, 1, 5))(images((2, 1, 5))).shape == (3, 256)


# --- learning ---------------------------------------------------------------------------------------------------------


@BOTH
def test_learning_reaches_every_parameter(make):
    """A few steps suffice to distinguish four images, and every weight has a gradient."""
    cnn, seen, labels = built(make, (3, 36, 36)), images((3, 36, 36), batch=4), torch.arange(4)
    head = nn.Linear(512 if make is NatureCNN else 256, 4)
    adam = torch.optim.Adam([*cnn.parameters(), *head.parameters()], lr=1e-3)
    for step in range(30):
        loss = F.cross_entropy(head(cnn(seen)), labels)
        adam.zero_grad()
        loss.backward()
        if step == 0:
            assert all(p.grad is not None and p.grad.any() for p in cnn.parameters())
        adam.step()
    assert float(loss.detach()) < 0.1


# --- in a policy ------------------------------------------------------------------------------------------------------


def policy(
    name="auto", normalize=False, shared_encoder=True, dtype=torch.uint8, shape=ATARI, **settings
) -> ActorCritic:
    torch.manual_seed(0)
    low, high = (0, 255) if dtype == torch.uint8 else (-math.inf, math.inf)
    group = Group("g", Box(shape, low, high, dtype=dtype), Discrete(3), **settings)
    return ActorCritic(group, choose_encoder(name, group, (8,), "tanh"), shared_encoder, normalize, 0.0)


@pytest.mark.parametrize("shared_encoder", [True, False])
def test_a_policy_of_images(shared_encoder):
    made, seen = policy(shared_encoder=shared_encoder), images(ATARI)
    params, value = made.distribution_and_value(seen)
    assert (params.shape, value.shape) == ((3, 3), (3,))
    torch.testing.assert_close(made.head(made.policy_encoder(seen.float() / 255.0)), params)


def test_bytes_reach_the_encoder_unchanged():
    made, given = policy(), []
    made.policy_encoder.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    seen = images(ATARI)
    made.distribution_and_value(seen)
    assert given[0] is seen


def test_images_of_bytes_are_not_normalized_and_other_observations_are():
    assert not policy(normalize=True).normalize
    assert policy(normalize=True, dtype=torch.float32).normalize
    assert policy("mlp", normalize=True).normalize
    assert policy(normalize=True, shape=(128,)).normalize


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_the_activation_count_matches_autograd(name):
    """The count is an upper bound within a small factor, also on the meta device."""
    made, seen, kept = policy(name), images(ATARI, batch=1), {}
    weights = {p.data_ptr() for p in made.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made.distribution_and_value(seen)
    saved = sum(kept.values()) / 4
    assert saved <= made.activations() <= 3 * saved
    with torch.device("meta"):
        assert policy(name).activations() == made.activations()


def test_folded_convolutions_equal_plain_ones():
    layer = Conv(4, 32, 8, stride=4)
    image = torch.rand(3, 4, 84, 84)
    assert layer.can_fold(image)
    torch.testing.assert_close(layer.folded(image), layer(image))
    assert not layer.can_fold(image[..., 1:])
    assert not Conv(32, 64, 4, stride=2).can_fold(torch.rand(3, 32, 20, 20))
    assert not Conv(4, 16, 3, padding=1).can_fold(image)
