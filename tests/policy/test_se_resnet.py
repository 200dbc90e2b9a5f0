"""SE-ResNet9: parameter counts, the network against its layers written out, depth, colors, other parts."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.core import Box, Discrete, Group, ShoalError
from shoal.policy import ActorCritic, SEResNet9, choose_encoder, rnn_maker
from shoal.policy.se_resnet import DEPTH_BINS, SIZES, Block

SMALL = SIZES["se-resnet9-small"]
DEPTH, RGB = ("depth", (64, 64, 1)), ("rgb", (64, 64, 3))
GOAL, LAST = ("goal", (3,)), ("last", (5,))


def space(*parts, dtype=torch.float16, **kinds) -> Box:
    found = {name: kind for name, kind in dict(depth="depth", last="choice", **kinds).items() if name in dict(parts)}
    return Box(sum(math.prod(shape) for _, shape in parts), dtype=dtype, parts=parts, kinds=found)


def made(seen: Box, name="se-resnet9-small", rnn=None, normalize=False, shared_encoder=True, **group) -> ActorCritic:
    torch.manual_seed(0)
    g = Group("g", seen, Discrete(4), **group)
    return ActorCritic(g, choose_encoder(name, g, (8,), "tanh"), shared_encoder, normalize, 0.0, rnn)


def encoder(seen: Box, frames=1, sizes=SMALL, randomized=True) -> SEResNet9:
    """With `randomized`, weights that start at zero are randomized, so that errors in their use are detected."""
    torch.manual_seed(0)
    net = SEResNet9(seen, frames, sizes)
    if randomized:
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.05 * torch.randn_like(p))
    return net


def count(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_the_policy_of_the_paper_has_its_parameters():
    policy = made(space(DEPTH, GOAL, LAST), "se-resnet9", rnn_maker("lstm", 512, 2))
    assert count(policy) == 10_988_085
    net = policy.policy_encoder
    (network,) = net.networks
    convolutions = [m for m in network.blocks.modules() if isinstance(m, nn.Conv2d)]
    excitation = [m for m in network.blocks.modules() if isinstance(m, nn.Linear)]
    assert [count(m) for m in (network.stem, network.compress)] == [11_264, 1_179_904]
    assert count(network.last, network.norm) == 525_312
    assert count(*convolutions) == 4_890_624
    assert count(*excitation) == 43_520 + 1_020
    assert sum(block.shifts.numel() + block.scale.numel() for block in network.blocks) == 20
    assert [count(layer) for layer in net.embeddings] == [128, 160]
    assert policy.rnn is not None
    assert count(policy.rnn) == 4_333_568
    assert count(policy.head) + count(policy.value_head) == 2_052 + 513
    assert net(torch.rand(2, 4104)).shape == (2, 576)


@pytest.mark.parametrize(("parts", "planes"), [((DEPTH,), 11), ((RGB,), 3), ((RGB, DEPTH), 14)])
def test_channels_of_the_first_layer(parts, planes):
    (network,) = SEResNet9(space(*parts)).networks
    assert network.stem.weight.shape == (64, 16 * planes)


@pytest.mark.parametrize(
    ("shape", "left", "features"),
    [((64, 64, 1), (256, 2, 2), 512), ((32, 32, 3), (1024, 1, 1), 512), ((84, 84, 1), (112, 3, 3), 512)],
)
def test_other_sizes_of_images(shape, left, features):
    net = SEResNet9(Box(shape, 0, 10))
    (network,) = net.networks
    assert network.last.in_features == math.prod(left)
    assert network.compress.out_channels == left[0]
    assert net(torch.rand(2, *shape)).shape == (2, features)


def test_the_small_network():
    policy = made(space(DEPTH, GOAL, LAST), rnn=rnn_maker("lstm", 128))
    assert count(policy) < 400_000
    assert policy.policy_encoder(torch.rand(2, 4104)).shape == (2, 128 + 64)


@pytest.mark.parametrize("shape", [(66, 64, 1), (64, 90, 3)])
def test_sides_that_are_not_multiples_of_four_are_refused(shape):
    with pytest.raises(ShoalError, match=rf"multiples of 4, got {shape[0]} x {shape[1]}.*impala"):
        SEResNet9(Box(shape, 0, 10))


# --- against the layers written out -----------------------------------------------------------------------------------


def by_hand(net: SEResNet9, planes: torch.Tensor) -> torch.Tensor:
    """Features of planes [batch, planes, height, width], with convolutions of the usual layout."""
    (network,) = net.networks
    n, c, height, width = planes.shape
    x = planes.reshape(n, c, height // 4, 4, width // 4, 4).permute(0, 3, 5, 1, 2, 4)
    x = x.reshape(n, 16 * c, height // 4, width // 4)
    x = F.relu(F.conv2d(x, network.stem.weight[:, :, None, None]))
    for i, block in enumerate(network.blocks):
        a, b, c, d = block.shifts
        stride = 2 if i else 1
        y = F.relu(F.conv2d(x + a, block.first.weight, stride=stride, padding=1) + b)
        y = block.scale * F.conv2d(y + c, block.second.weight, padding=1) + d
        weight = torch.sigmoid(block.excite(F.relu(block.squeeze(y.mean(dim=(2, 3))))))
        past = x
        if block.shortcut is not None:
            past = x + a if stride == 1 else F.avg_pool2d(x + a, 3, 2, padding=1)
            past = F.conv2d(past, block.shortcut.weight)
        x = F.relu(past + y * weight[:, :, None, None])
    x = F.relu(F.conv2d(x, network.compress.weight, network.compress.bias, padding=1)).reshape(n, -1)
    return F.relu(
        F.layer_norm(x @ network.last.weight.T, (len(network.last.weight),)) * network.norm.weight + network.norm.bias
    )


def depth_planes(depth: np.ndarray, far: float = 10.0) -> torch.Tensor:
    """Planes [batch, 11, height, width] of depth [batch, height, width], pixel by pixel."""
    planes = np.zeros((depth.shape[0], 1 + DEPTH_BINS, *depth.shape[1:]), np.float32)
    for n, y, x in np.ndindex(*depth.shape):
        share = min(max(float(depth[n, y, x]), 0.0), far) / far
        planes[n, 0, y, x] = share
        planes[n, 1 + min(int(np.floor(np.float32(share) * np.float32(10))), 9), y, x] = 1.0
    return torch.as_tensor(planes)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_depth_and_other_parts_equal_the_layers(sizes):
    net = encoder(space(DEPTH, GOAL, LAST), sizes=sizes)
    depth, goal = 12.0 * torch.rand(2, 64, 64), torch.randn(2, 3)
    last = F.one_hot(torch.tensor([0, 4]), 5).float()
    expected = [
        by_hand(net, depth_planes(depth.numpy())),
        goal @ net.embeddings[0].weight.T + net.embeddings[0].bias,
        net.embeddings[1].weight.T[[0, 4]],
    ]
    found = net(torch.cat([depth.flatten(1), goal, last], dim=1))
    torch.testing.assert_close(found, torch.cat(expected, dim=1), rtol=1e-3, atol=1e-4)


def test_colors_and_depth_are_concatenated():
    net = encoder(space(GOAL, RGB, DEPTH))
    goal, rgb, depth = torch.randn(2, 3), torch.randint(0, 256, (2, 64, 64, 3)), 12.0 * torch.rand(2, 64, 64)
    net.update_normalizer(torch.cat([goal, rgb.float().flatten(1), depth.flatten(1)], dim=1))
    shares = rgb.double().numpy() / 255.0
    colors = (shares - shares.mean((0, 1, 2))) / np.sqrt(np.maximum(shares.var((0, 1, 2)), 0.01))
    planes = torch.cat([torch.as_tensor(colors).float().permute(0, 3, 1, 2), depth_planes(depth.numpy())], dim=1)
    found = net(torch.cat([goal, rgb.float().flatten(1), depth.flatten(1)], dim=1))
    expected = torch.cat([by_hand(net, planes), net.embeddings[0](goal)], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_each_image_size_has_a_network():
    parts = (("eye", (32, 32, 3)), ("depth", (16, 16, 1)), ("other", (3, 32, 32)))
    net = encoder(space(*parts))
    assert [network.stem.in_features for network in net.networks] == [16 * 6, 16 * 11]
    assert net(torch.rand(2, 3 * 1024 + 256 + 3 * 1024)).shape == (2, 256)


# --- depth --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meters", "share", "bin"),
    [(0.0, 0.0, 0), (0.99, 0.099, 0), (1.0, 0.1, 1), (5.5, 0.55, 5), (9.75, 0.975, 9), (10.0, 1.0, 9), (40.0, 1.0, 9)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_depth_bins(meters, share, bin, dtype):
    net = encoder(Box((16, 16, 1), 0.0, math.inf, dtype=dtype))
    picture = net.pictures["0"]
    planes = picture(torch.full((1, 256), meters, dtype=dtype))
    assert planes.shape == (1, 16, 16, 11)
    torch.testing.assert_close(planes[..., 0], torch.full((1, 16, 16), share), rtol=0, atol=1e-3)
    assert planes[0, 3, 5, 1:].tolist() == [float(i == bin) for i in range(DEPTH_BINS)]


def test_depth_is_clipped_at_a_closer_bound():
    net = encoder(Box((16, 16, 1), 0.0, 2.0))
    depth = 2.0 * torch.rand(2, 16, 16)
    torch.testing.assert_close(
        net(depth.unsqueeze(-1)), by_hand(net, depth_planes(depth.numpy(), 2.0)), rtol=1e-3, atol=1e-4
    )


def test_depth_is_not_normalized():
    """Alone or among other parts, even if the policy normalizes."""
    alone = made(Box((64, 64, 1), 0.0, 10.0), normalize=True)
    assert not alone.normalize
    assert not alone.has_moments
    plain, normalizing = (made(space(DEPTH, GOAL, LAST, dtype=torch.float32), normalize=n) for n in (False, True))
    seen = torch.cat([10.0 * torch.rand(30, 4096), 5.0 + torch.randn(30, 3), torch.eye(5)[torch.arange(30) % 5]], 1)
    normalizing.update_normalizer(seen)
    expected = seen.clone()
    expected[:, 4096:4099] = (seen[:, 4096:4099] - seen[:, 4096:4099].mean(0)) / seen[:, 4096:4099].std(0, correction=0)
    torch.testing.assert_close(normalizing.value(seen), plain.value(expected), rtol=1e-3, atol=1e-4)


# --- colors ----------------------------------------------------------------------------------------------------------


def colors(batch=6, seed=0) -> torch.Tensor:
    torch.manual_seed(seed)
    return (torch.randint(0, 256, (batch, 16, 16, 3)) * torch.tensor([1.0, 0.3, 0.0])).to(torch.uint8)


def test_running_moments_of_colors():
    """Per channel over all pixels; samples of weight 0 are ignored; nearly constant colors are not amplified."""
    policy = made(Box((16, 16, 3), 0, 255, dtype=torch.uint8))
    assert policy.as_bytes
    assert policy.has_moments
    first, second, counts = colors(), colors(seed=1), torch.tensor([1, 0, 1, 1, 0, 0]).bool()
    policy.update_normalizer(first)
    policy.update_normalizer(second, counts)
    moments = policy.policy_encoder.pictures["0"].moments
    everything = torch.cat([first, second[counts]]).double().numpy() / 255.0
    np.testing.assert_allclose(moments.mean, everything.mean((0, 1, 2)), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(moments.var, everything.var((0, 1, 2)), rtol=1e-4, atol=1e-7)
    planes = policy.policy_encoder.pictures["0"](colors(seed=2).flatten(1))
    assert planes[..., 0].std() == pytest.approx(1.0, abs=0.05)
    assert not planes[..., 2].any()


def test_moments_are_saved_with_the_policy():
    one, other = (made(Box((16, 16, 3), 0, 255, dtype=torch.uint8), shared_encoder=False) for _ in range(2))
    before = one.value(colors())
    one.update_normalizer(colors())
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.value(colors()), other.value(colors()))
    assert not torch.equal(one.value(colors()), before)


@pytest.mark.parametrize("kind", ["bytes", "depth"])
def test_channels_first_or_last(kind):
    channels, dtype = (3, torch.uint8) if kind == "bytes" else (1, torch.float32)
    last = encoder(Box((32, 16, channels), 0, 255, dtype=dtype))
    first = encoder(Box((channels, 32, 16), 0, 255, dtype=dtype))
    image = torch.randint(0, 12, (2, 32, 16, channels)).to(dtype)
    torch.testing.assert_close(last(image), first(image.permute(0, 3, 1, 2).contiguous()))


@pytest.mark.parametrize("parts", [False, True])
def test_stacked_frames_are_concatenated(parts):
    """The planes of the older observation come first."""
    seen = space(("depth", (16, 16, 1)), GOAL) if parts else Box((16, 16, 1), 0, 10)
    group = Group("g", seen, Discrete(4), stack=2)
    torch.manual_seed(0)
    net = choose_encoder("se-resnet9-small", group, (8,), "tanh")(group.policy_observation.shape)
    assert net.networks[0].stem.in_features == 16 * 22
    old, new, goal = 10.0 * torch.rand(2, 16, 16), 10.0 * torch.rand(2, 16, 16), torch.randn(2, 6)
    planes = torch.cat([depth_planes(old.numpy()), depth_planes(new.numpy())], dim=1)
    if parts:
        found = net(torch.cat([old.flatten(1), goal[:, :3], new.flatten(1), goal[:, 3:]], dim=1))
        assert found.shape == (2, 128 + 64)
        found = found[:, :128]
    else:
        found = net(torch.cat([old, new], dim=1).unsqueeze(-1))
    torch.testing.assert_close(found, by_hand(net, planes), rtol=1e-3, atol=1e-4)


# --- initialization and gradients -------------------------------------------------------------------------------------


def views(batch: int, side: int, patches: int, channels: int) -> torch.Tensor:
    """Images of a few uniform patches up to 10, since noise per pixel would average out."""
    patch = torch.ones(side // patches, side // patches)
    return torch.kron(10.0 * torch.rand(batch, channels, patches, patches), patch).permute(0, 2, 3, 1)


def test_residual_branches_start_at_zero():
    torch.manual_seed(0)
    block, x = Block(16, 16, 1, 8, 4), torch.rand(2, 16, 8, 8)
    assert torch.equal(block(x), x)
    assert float(block.first.weight.detach().std()) == pytest.approx(math.sqrt(2 / (9 * 16 * 4)), rel=0.1)


@pytest.mark.parametrize("name", SIZES)
def test_initial_features_have_unit_scale(name):
    """The scale of the signal is preserved through the blocks."""
    net = encoder(Box((64, 64, 1), 0, 10), sizes=SIZES[name], randomized=False)
    found = []
    for layer in (net.networks[0].blocks[0], net.networks[0].blocks):
        layer.register_forward_hook(lambda *given: found.append(float(given[-1].detach().square().mean())))
    net(views(4, 64, 4, 1))
    assert 0.1 < found[1] / found[0] < 2.0


def test_learning_reaches_every_parameter():
    """A few steps suffice to distinguish four images; residual branches contribute from the second step."""
    net = encoder(space(("depth", (16, 16, 1)), ("rgb", (16, 16, 3)), GOAL, LAST), randomized=False)
    depth, rgb, labels = views(4, 16, 2, 1), 25.0 * views(4, 16, 2, 3), torch.arange(4)
    seen = torch.cat([depth.flatten(1), rgb.flatten(1), torch.rand(4, 8)], dim=1)
    head = nn.Linear(128 + 64, 4)
    adam = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=2e-3)
    for step in range(30):
        loss = F.cross_entropy(head(net(seen)), labels)
        adam.zero_grad()
        loss.backward()
        if step == 2:
            assert all(p.grad is not None and p.grad.any() for p in net.parameters())
        adam.step()
    assert float(loss.detach()) < 0.1


def test_bf16_inside():
    policy = made(space(DEPTH, GOAL, LAST), rnn=rnn_maker("lstm", 16, 2))
    seen, state = torch.rand(3, 4104).half(), torch.zeros(3, policy.state_size)
    exact = policy.step(seen, state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        short = policy.step(seen, state)
    assert [x.dtype for x in short] == [torch.float32] * 3
    for one, other in zip(short, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.02)


def test_it_compiles_to_one_graph():
    policy = made(space(DEPTH, RGB, GOAL, LAST))
    seen = 10.0 * torch.rand(4, 4096 + 3 * 4096 + 8)
    compiled = torch.compile(policy.distribution_and_value, fullgraph=True, dynamic=False, backend="eager")
    for one, other in zip(compiled(seen), policy.distribution_and_value(seen), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", SIZES)
def test_the_activation_count_matches_autograd(name):
    policy, kept = made(space(DEPTH, GOAL, LAST), name), {}
    weights = {p.data_ptr() for p in policy.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.distribution_and_value(torch.rand(1, 4104))
    saved = sum(kept.values()) / 4
    assert saved <= policy.activations() <= 3 * saved
    with torch.device("meta"):
        assert made(space(DEPTH, GOAL, LAST), name).activations() == policy.activations()
