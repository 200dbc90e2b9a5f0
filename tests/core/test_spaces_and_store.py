"""Spaces refuse invalid values; the store owns named arrays that torch and Warp share."""

import math

import numpy as np
import pytest
import torch
import warp as wp

from shoal.core import Box, Discrete, Field, Group, Mixed, MultiDiscrete, ShoalError, Store
from shoal.core.errors import unknown
from shoal.core.launch import init_warp
from shoal.core.spaces import check_range, check_tensor
from shoal.core.store import warp_view

CPU = torch.device("cpu")


def store(num_envs: int = 3) -> Store:
    return Store(num_envs, CPU)


# --- spaces ---------------------------------------------------------------------------------------------------------


def test_shapes_and_types():
    assert (Discrete(3).shape, Discrete(3).dtype) == ((), torch.int32)
    assert (MultiDiscrete([2, 5]).shape, MultiDiscrete([2, 5]).dtype) == ((2,), torch.int32)
    assert (Box(4).shape, Box((2, 3)).shape, Box((2, 3)).size) == ((4,), (2, 3), 6)
    mixed = Mixed([Discrete(3), Box((2, 2)), MultiDiscrete((2, 4))])
    assert (mixed.shape, mixed.dtype, mixed.widths) == ((7,), torch.float32, (1, 4, 2))
    assert [part.tolist() for part in mixed.split(torch.arange(7))] == [[0], [1, 2, 3, 4], [5, 6]]
    assert Box(1, -1.0, 1.0).bounded
    assert not Box(1, 0.0, math.inf).bounded
    assert not Box(1).bounded


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Discrete(0), "n=0"),
        (lambda: MultiDiscrete(()), r"nvec=\(\)"),
        (lambda: MultiDiscrete((3, 0)), r"nvec=\(3, 0\)"),
        (lambda: Discrete(2**20 + 1), "up to 1,048,576 choices"),
        (lambda: MultiDiscrete((2**19, 2**19 + 1)), "up to 1,048,576 choices in all"),
        (lambda: Box(()), "shape"),
        (lambda: Box((2, 0)), r"\(2, 0\)"),
        (lambda: Box(1, 1.0, 1.0), "low=1.0, high=1.0"),
        (lambda: Box(1, math.nan, 1.0), "low=nan"),
        (lambda: Box(5, parts=(("a", (2, 2)), ("b", (2,)))), r"\(6,\), got \(5,\)"),
        (lambda: Box((2, 3), parts=(("a", (6,)),)), r"\(6,\), got \(2, 3\)"),
        (lambda: Box(2, parts=(("a", (2,)),), kinds=dict(b="choice")), "no part of a Box with a kind: 'b'"),
        (lambda: Box(2, parts=(("a", (2,)),), kinds=dict(a="chioce")), "kind of part 'a'.*did you mean 'choice'"),
        (lambda: Box(2, parts=(("a", (2,)),), kinds=dict(a="depth")), r"'a'.*distances.*\(2,\).*\(height, width, 1\)"),
        (lambda: Mixed(()), "at least one part"),
        (lambda: Mixed((Discrete(2), Mixed((Box(1),)))), "consists of Discrete.*got Mixed"),
        (lambda: Group("bird", Box(1), Mixed((Discrete(2), Box(1))), masked=True), "'bird' has a Mixed.*mask"),
        (lambda: Group("bird", Box(1), Discrete(2), agents=0), "'bird'.*0"),
        (lambda: Group("bird", Box(1), Box(1), masked=True), "'bird'.*mask"),
    ],
)
def test_bad_spaces_are_refused(make, says):
    with pytest.raises(ShoalError, match=says):
        make()


def test_choices_are_the_width_of_the_mask():
    assert Group("a", Box(1), Discrete(4)).choices == 4
    assert Group("a", Box(1), MultiDiscrete((4, 3))).choices == 7
    assert Group("a", Box(1), Box(2)).choices == 0
    assert Group("a", Box(1), Mixed((Discrete(3), Box(2)))).choices == 0


def test_kinds_of_parts():
    parts = (("image", (4, 4, 1)), ("last", (3,)), ("speed", (1,)))
    box = Box(20, parts=parts, kinds=dict(image="depth", last="choice"))
    assert box == Box(20, parts=parts, kinds=(("image", "depth"), ("last", "choice")))
    assert [box.kind(name) for name, _ in parts] == ["depth", "choice", "plain"]
    assert Group("g", box, Discrete(2), stack=2).policy_observation.kind("last") == "choice"


def test_parts_are_kept_and_repeated_in_a_stack():
    parts = (("image", (2, 3)), ("speed", (1,)))
    box = Box(7, parts=[["image", [2, 3]], ["speed", [1]]])
    assert box.parts == parts
    assert hash(box) == hash(Box(7, parts=parts))
    assert Group("a", box, Discrete(2), stack=2).policy_observation == Box(14, parts=parts + parts)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (np.zeros((3, 1), np.int32), "torch tensor.*ndarray"),
        (torch.zeros(3, dtype=torch.int32), r"shape \(3, 1\).*\(3,\)"),
        (torch.zeros(3, 1), "int32.*float32"),
        (torch.zeros(3, 1, dtype=torch.int64), "int32.*int64"),
        (torch.zeros(3, 1, dtype=torch.int32, device="meta"), "cpu.*meta"),
    ],
)
def test_wrong_tensors_are_named(tensor, says):
    with pytest.raises(ShoalError, match=f"The thing.*{says}"):
        check_tensor("The thing", tensor, Discrete(2), (3, 1), CPU)


def test_a_right_tensor_passes():
    check_tensor("The thing", torch.zeros(3, 1, 2, dtype=torch.int32), MultiDiscrete((2, 2)), (3, 1), CPU)
    check_range("The thing", torch.tensor([[[1, 4]]], dtype=torch.int32), MultiDiscrete((2, 5)))
    mixed = Mixed((Box(1), Discrete(5)))
    check_tensor("The thing", torch.zeros(3, 1, 2), mixed, (3, 1), CPU)
    check_range("The thing", torch.tensor([[-0.5, 4.0]]), mixed)


@pytest.mark.parametrize(
    ("space", "values", "says"),
    [
        (Discrete(3), [0, 2, 3], r"3 at index \(2,\)"),
        (Discrete(3), [0, -1, 2], r"-1 at index \(1,\)"),
        (MultiDiscrete((2, 5)), [[1, 4], [4, 1]], r"4 at index \(1, 0\)"),
        (Box(1), [[0.0], [math.nan]], r"finite, got nan at index \(1, 0\)"),
        (Box(1), [[math.inf], [0.0]], r"finite, got inf at index \(0, 0\)"),
        (Mixed((Box(1), Discrete(3))), [[9.0, 2.0], [0.0, 3.0]], r"part 1.*3\.0 at index \(1, 0\)"),
        (Mixed((Box(1), MultiDiscrete((3, 3)))), [[9.0, 2.0, 0.5]], r"part 1.*0\.5 at index \(0, 1\)"),
        (Mixed((Box(1), Discrete(3))), [[math.nan, 2.0]], r"part 0.*finite, got nan"),
    ],
)
def test_values_out_of_range_are_named(space, values, says):
    with pytest.raises(ShoalError, match=f"The thing.*{says}"):
        check_range("The thing", torch.tensor(values, dtype=space.dtype), space)


def test_unknown_names_suggest_the_nearest():
    assert "did you mean 'cartpole'?" in str(unknown("world", "cart-pole", ["acrobot", "cartpole"]))
    far = str(unknown("world", "zzz", ["cartpole", "acrobot"]))
    assert "'zzz'" in far
    assert "acrobot, cartpole" in far


# --- store ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "shape", "dtype"),
    [
        (Field(), (3,), torch.float32),
        (Field(int, (2,)), (3, 2), torch.int32),
        (Field(wp.vec3, (2,)), (3, 2, 3), torch.float32),
        (Field(wp.mat22), (3, 2, 2), torch.float32),
        (Field(bool), (3,), torch.bool),
        (Field(wp.uint8, (4,)), (3, 4), torch.uint8),
        (Field(wp.int64), (3,), torch.int64),
    ],
)
def test_arrays_have_shape_and_type_and_start_at_zero(field, shape, dtype):
    s = store()
    tensor = s.add("thing", field)
    assert tuple(tensor.shape) == shape
    assert tensor.dtype == dtype
    assert not tensor.any()
    assert s.thing is tensor
    assert s["thing"] is tensor
    assert "thing" in s


def test_a_name_can_be_used_once():
    s = store()
    s.add("speed", Field())
    with pytest.raises(ShoalError, match="'speed'"):
        s.add("speed", Field(int))


@pytest.mark.parametrize("name", ["two words", "3d", "add", "state_dict", "num_envs", "device", "fields", "tensors"])
def test_a_name_that_cannot_be_read_back_is_refused(name):
    """The name is no identifier, or already an attribute of the store."""
    with pytest.raises(ShoalError, match=name):
        store().add(name, Field())


def test_a_type_that_cannot_be_held_is_named():
    with pytest.raises(ShoalError, match="str"):
        store().add("label", Field(str))


def test_an_unknown_array_is_named():
    s = store()
    s.add("speed", Field())
    with pytest.raises(AttributeError, match=r"'sped'.*speed"):
        _ = s.sped


def test_bytes_per_env():
    s = store()
    s.add("a", Field(wp.vec3))
    s.add("b", Field(bool, (5,)))
    assert s.bytes_per_env == 3 * 4 + 5


def test_warp_and_torch_see_the_same_memory():
    init_warp()
    s = store()
    tensor = s.add("position", Field(wp.vec2))
    view = warp_view(tensor, wp.array(dtype=wp.vec2))
    assert view.shape == (3,)
    tensor[1, 0] = 7.0
    assert view.numpy()[1].tolist() == [7.0, 0.0]
    view.fill_(wp.vec2(1.0, 2.0))
    assert tensor.tolist() == [[1.0, 2.0]] * 3


def two_arrays() -> Store:
    s = store()
    s.add("a", Field(float))
    s.add("b", Field(int, (2,)))
    return s


def test_state_goes_to_another_store_in_place():
    one, other = two_arrays(), two_arrays()
    one.a.copy_(torch.tensor([1.0, 2.0, 3.0]))
    one.b.fill_(4)
    kept = other.a
    other.load_state_dict(one.state_dict())
    assert other.a is kept
    assert other.a.tolist() == [1.0, 2.0, 3.0]
    assert (other.b == 4).all()
    one.a.zero_()
    assert other.a.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"a": torch.ones(3)}, id="an array is missing"),
        pytest.param({"a": torch.ones(3), "b": torch.ones(1, 2, dtype=torch.int32)}, id="other number of envs"),
        pytest.param({"a": torch.ones(3), "b": torch.ones(3, 3, dtype=torch.int32)}, id="other shape"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(state):
    """The error names the array, and nothing is loaded in part."""
    s = two_arrays()
    with pytest.raises(ShoalError, match=r"\bb\b"):
        s.load_state_dict(state)
    assert not s.a.any()
