import numpy as np
import pytest
from gymnasium import spaces

from shoal.core.errors import ShoalError
from shoal.host.packing import ContinuousPart, DiscretePart, pack_action, pack_observation

OBSERVATIONS = [
    spaces.Discrete(5),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([3, 1, 4]),
    spaces.MultiBinary(6),
    spaces.Dict(b=spaces.Box(-1, 1, (2, 3)), a=spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(3)))),
    spaces.Tuple((spaces.Box(0, 255, (4, 4, 3), np.uint8), spaces.Box(-np.inf, np.inf, ()))),
]


@pytest.mark.parametrize("space", OBSERVATIONS, ids=str)
def test_packed_observations_equal_gymnasium_s_flatten(space):
    packed = pack_observation(space)
    space.seed(3)
    for _ in range(20):
        value = space.sample()
        row = np.full(packed.shape, np.nan, packed.dtype)
        packed.write(value, row)
        np.testing.assert_allclose(row, np.asarray(spaces.flatten(space, value), np.float32))
    assert sum(int(np.prod(shape)) for _, shape in packed.parts) in (0, packed.shape[0])


def test_boxes_keep_their_shape_and_uint8_its_dtype():
    image, vector, scalar = (
        pack_observation(s)
        for s in (spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Box(-2, 3, (4,), np.float64), spaces.Box(-1, 1, ()))
    )
    assert (image.shape, image.dtype) == ((8, 8, 3), "uint8")
    assert (vector.shape, vector.dtype, vector.low, vector.high) == ((4,), "float32", -2.0, 3.0)
    assert scalar.shape == (1,)


ACTIONS = [
    spaces.Discrete(4),
    spaces.Discrete(4, start=7),
    spaces.MultiDiscrete([2, 5]),
    spaces.MultiDiscrete([[2, 5], [3, 3]]),
    spaces.MultiBinary(3),
    spaces.Box(-2.0, 2.0, (2, 2)),
    spaces.Box(np.array([0.0, -5.0]), np.array([1.0, 5.0])),
    spaces.Box(np.array([0.0, -np.inf]), np.array([np.inf, np.inf])),
    spaces.Dict(a=spaces.Discrete(3), b=spaces.MultiDiscrete([2, 2])),
    spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.Discrete(2, start=1), spaces.Dict(x=spaces.MultiBinary(2)))),
]


@pytest.mark.parametrize("space", ACTIONS, ids=str)
def test_every_row_is_an_action_of_the_space(space):
    packed = pack_action(space)
    rows = packed.draw(np.random.default_rng(1), 50)
    assert rows.shape == (50, *packed.shape)
    assert rows.dtype == packed.dtype
    for row in rows:
        assert space.contains(packed.read(row)), packed.read(row)


def test_actions_reach_all_bounds_and_choices():
    packed = pack_action(spaces.Box(np.array([0.0, -5.0]), np.array([1.0, 5.0])))
    assert packed.parts == (ContinuousPart((2,), -1.0, 1.0),)
    np.testing.assert_allclose(packed.read(np.array([1.0, -1.0], np.float32)), [1.0, -5.0])
    multi = pack_action(spaces.MultiDiscrete([2, 5]))
    assert multi.parts == (DiscretePart((2, 5)),)
    assert {tuple(multi.read(row)) for row in multi.draw(np.random.default_rng(0), 300)} == {
        (a, b) for a in range(2) for b in range(5)
    }


def test_unsupported_spaces_are_refused_by_name():
    with pytest.raises(ShoalError, match="Text"):
        pack_observation(spaces.Dict(words=spaces.Text(5)))
    with pytest.raises(ShoalError, match="Sequence"):
        pack_action(spaces.Sequence(spaces.Discrete(2)))
