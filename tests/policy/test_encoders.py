"""Choice of the encoder, and vectors of several parts against their separate encoders."""

import math

import pytest
import torch

from shoal.core import Box, Discrete, Group, ShoalError
from shoal.policy import MLP, ActorCritic, ImpalaResNet, MultiInput, NatureCNN, SEResNet9, choose_encoder

CAMERA, MAP = (40, 44, 3), (2, 36, 36)
PARTS = (("camera", CAMERA), ("speed", (3,)), ("map", MAP), ("grid", (1, 5, 5)), ("goal", (2,)))
SIZE = sum(math.prod(shape) for _, shape in PARTS)


def group_with(shape, parts=(), dtype=torch.float32, stack=1) -> Group:
    return Group("g", Box(shape, parts=parts, dtype=dtype), Discrete(3), stack=stack)


def chosen(name: str, group: Group):
    torch.manual_seed(0)
    return choose_encoder(name, group, (16, 8), "tanh")(group.policy_observation.shape)


@pytest.mark.parametrize(
    ("name", "group", "kind"),
    [
        ("auto", group_with(4), MLP),
        ("auto", group_with((4, 84, 84)), NatureCNN),
        ("auto", group_with((36, 36, 3)), NatureCNN),
        ("auto", group_with((1, 36, 36), stack=4), NatureCNN),
        ("auto", group_with((20, 36, 3), stack=4), MLP),
        ("auto", group_with((3, 35, 36)), MLP),
        ("auto", group_with((7, 7, 3), dtype=torch.uint8), MLP),
        ("auto", group_with((84, 84)), MLP),
        ("auto", group_with(SIZE, PARTS), MultiInput),
        ("auto", group_with(28, PARTS[1:2] + PARTS[3:4]), MLP),
        ("mlp", group_with((4, 84, 84)), MLP),
        ("mlp", group_with(SIZE, PARTS), MLP),
        ("nature", group_with((4, 84, 84)), NatureCNN),
        ("impala", group_with((3, 7, 7)), ImpalaResNet),
        ("impala", group_with(SIZE, PARTS), MultiInput),
        ("se-resnet9-small", group_with((40, 44, 3), dtype=torch.uint8), SEResNet9),
        ("se-resnet9-small", group_with((16, 16, 1), stack=2), SEResNet9),
        ("se-resnet9", group_with(SIZE, PARTS), SEResNet9),
        ("se-resnet9", group_with(28, PARTS[1:2] + PARTS[3:4]), SEResNet9),  # blind
    ],
)
def test_the_encoder_suits_the_observation(name, group, kind):
    assert type(chosen(name, group)) is kind


@pytest.mark.parametrize(
    ("name", "group", "says"),
    [
        ("natur", group_with(4), "no encoder 'natur'; did you mean 'nature'"),
        ("xyz", group_with(4), "no encoder 'xyz'; choose one of: FILE.py:NAME, auto, impala, mlp, nature, se-resnet9"),
        ("nature", group_with(4), r"--encoder nature is for images, but group 'g' observes \(4,\); use --encoder mlp"),
        ("impala", group_with((84, 84)), r"--encoder impala is for images.*\(84, 84\)"),
        ("nature", group_with(3, PARTS[1:2]), r"--encoder nature is for images.*\(3,\)"),
        ("nature", group_with((3, 20, 20)), "at least 36 x 36"),
        ("se-resnet9", group_with(4), r"--encoder se-resnet9 is for images.*\(4,\)"),
    ],
)
def test_unsuitable_encoders_are_refused(name, group, says):
    with pytest.raises(ShoalError, match=says):
        chosen(name, group)


@pytest.mark.parametrize(("name", "cnn"), [("auto", NatureCNN), ("impala", ImpalaResNet)])
def test_several_parts_equal_their_encoders(name, cnn):
    encoder = chosen(name, group_with(SIZE, PARTS))
    given = {part: 255.0 * torch.rand(4, *shape) for part, shape in PARTS}
    flat = torch.cat([value.flatten(1) for value in given.values()], dim=1)
    camera, chart = encoder.cnns
    assert type(camera) is type(chart) is cnn
    rest = torch.cat([given[part].flatten(1) for part in ("speed", "grid", "goal")], dim=1)
    expected = [camera(given["camera"].permute(0, 3, 1, 2) / 255.0), chart(given["map"] / 255.0), encoder.mlp(rest)]
    torch.testing.assert_close(encoder(flat), torch.cat(expected, dim=1))


def test_depth_parts():
    """Depth is divided by 10 m or a closer bound; other images are bytes."""
    parts = (("depth", (36, 36, 1)), ("gray", (36, 36, 1)))
    for high, end in ((math.inf, 10.0), (255.0, 10.0), (4.0, 4.0)):
        group = Group("g", Box(2 * 1296, 0.0, high, parts=parts, kinds=dict(depth="depth")), Discrete(3))
        encoder = chosen("auto", group)
        depth, gray = 12.0 * torch.rand(4, 1, 36, 36), 255.0 * torch.rand(4, 1, 36, 36)
        expected = [encoder.cnns[0](depth.clamp(max=end) / end), encoder.cnns[1](gray / 255.0)]
        found = encoder(torch.cat([depth.flatten(1), gray.flatten(1)], dim=1))
        torch.testing.assert_close(found, torch.cat(expected, dim=1))


def test_only_image_parts():
    encoder = chosen("auto", group_with(math.prod(MAP), (("map", MAP),)))
    image = 255.0 * torch.rand(4, *MAP)
    assert encoder.mlp is None
    torch.testing.assert_close(encoder(image.flatten(1)), encoder.cnns[0](image / 255.0))


def test_frames_of_one_part_are_joined_along_their_channels():
    """A stack of two holds all parts of the older observation, then all of the newer."""
    encoder = chosen("auto", group_with(SIZE, PARTS, stack=2))
    old, new = ({part: 255.0 * torch.rand(4, *shape) for part, shape in PARTS} for _ in range(2))
    flat = torch.cat([value.flatten(1) for given in (old, new) for value in given.values()], dim=1)
    camera = torch.cat([given["camera"].permute(0, 3, 1, 2) for given in (old, new)], dim=1) / 255.0
    chart = torch.cat([old["map"], new["map"]], dim=1) / 255.0
    rest = [given[part].flatten(1) for given in (old, new) for part in ("speed", "grid", "goal")]
    expected = [encoder.cnns[0](camera), encoder.cnns[1](chart), encoder.mlp(torch.cat(rest, dim=1))]
    torch.testing.assert_close(encoder(flat), torch.cat(expected, dim=1))


def make(group: Group, normalize: bool) -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic(group, choose_encoder("auto", group, (16, 8), "tanh"), True, normalize, 0.0)


def test_pixels_among_the_parts_are_not_normalized():
    """A normalizing policy equals a plain one on normalized numbers and unchanged pixels."""
    group = group_with(SIZE, PARTS)
    plain, normalizing = make(group, False), make(group, True)
    seen = 255.0 * torch.rand(50, SIZE)
    normalizing.moments.merge(seen)
    expected = ((seen - seen.mean(0)) / seen.std(0, correction=0)).clamp(-10.0, 10.0)
    start = 0
    for name, shape in PARTS:
        end = start + math.prod(shape)
        if name in ("camera", "map"):
            expected[:, start:end] = seen[:, start:end]
        start = end
    torch.testing.assert_close(normalizing.value(seen), plain.value(expected), rtol=1e-3, atol=1e-3)


def test_gradients_reach_every_part():
    policy = make(group_with(SIZE, PARTS), False)
    params, value = policy.distribution_and_value(255.0 * torch.rand(8, SIZE))
    (params.square().sum() + value.sum()).backward()
    assert all(p.grad is not None and p.grad.any() for p in policy.parameters())


def test_the_activation_count_is_the_sum_of_the_parts():
    """An MLP counts the same beside CNNs as alone, also on the meta device."""
    policy = make(group_with(SIZE, PARTS), False)
    alone = 0
    for shape in (CAMERA, MAP, (3 + 25 + 2,)):
        part = make(group_with(shape), False)
        alone += part.activations() - 4  # three choices and a value
    assert part.activations() - 4 == 2 * (16 + 8)
    assert policy.activations() == alone + 4
    with torch.device("meta"):
        assert make(group_with(SIZE, PARTS), False).activations() == policy.activations()
