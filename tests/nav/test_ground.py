"""Walkable ground against what is known of simple rooms."""

import numpy as np
import pytest
import torch

from shoal.errors import ShoalError
from shoal.nav.ground import Body
from tests.nav.rooms import box_distance, pathfinder, room
from tests.scene.shapes import box, quad

BLOCKS = [(3.0, 2.0, 5.0, 4.0, 1.0), (7.0, 0.0, 7.3, 5.0, 2.6)]


def test_a_place_is_navigable_if_it_keeps_its_distance():
    """Except within half a cell of the limit, where the grid may say either."""
    finder = pathfinder(room(boxes=BLOCKS))
    rng = np.random.default_rng(0)
    places = np.c_[rng.uniform(0, 10, 3000), rng.uniform(0, 8, 3000), np.zeros(3000)]
    inside = box_distance(places[:, :2], BLOCKS)
    walls = np.minimum(np.minimum(places[:, 0], 10 - places[:, 0]), np.minimum(places[:, 1], 8 - places[:, 1]))
    true = np.minimum(inside, walls)
    found = finder.is_navigable(torch.from_numpy(places).float()).numpy()
    assert found[true > 0.15].all()
    solid = inside == 0  # within a block that reaches the ceiling there is a floor too, which nobody can come to
    assert not found[(true < 0.05) & ~solid].any()
    main = finder.region(torch.from_numpy(places).float()).numpy() == finder.main_region
    assert not main[solid].any()
    distance = finder.obstacle_distance(torch.from_numpy(places).float()).numpy()
    clear = true > 0.15
    np.testing.assert_allclose(distance[clear], np.minimum(true[clear], 1.0), rtol=0.12, atol=0.06)


def test_low_things_can_be_climbed_and_low_ceilings_not_passed():
    step = room(boxes=[(4.0, 0.0, 6.0, 8.0, 0.15)])
    finder = pathfinder(step)
    ends = torch.tensor([[1.0, 4.0, 0.0], [9.0, 4.0, 0.0], [5.0, 4.0, 0.15]])
    assert len(set(finder.region(ends).tolist())) == 1
    assert finder.is_navigable(ends).all()
    high = pathfinder(room(boxes=[(4.0, 0.0, 6.0, 8.0, 0.4)]))
    assert len(set(high.region(ends[:2]).tolist())) == 2
    beam = np.concatenate([room(), box((4.0, 0.0, 1.2), (6.0, 8.0, 2.6))])
    assert not pathfinder(beam).is_navigable(torch.tensor([[5.0, 4.0, 0.0]])).any()
    short = pathfinder(beam, Body(height=1.0))
    assert short.is_navigable(torch.tensor([[5.0, 4.0, 0.0]])).all()


@pytest.mark.parametrize(("rise", "walkable"), [(1.5, True), (4.0, False)])
def test_slopes(rise, walkable):
    """A ramp over 3 m, under a high ceiling: 27 degrees can be walked, 53 cannot."""
    floor = [quad((0, 0, 0), (3, 0, 0), (3, 4, 0), (0, 4, 0)), quad((3, 0, 0), (6, 0, rise), (6, 4, rise), (3, 4, 0))]
    top = [
        quad((6, 0, rise), (9, 0, rise), (9, 4, rise), (6, 4, rise)),
        quad((0, 0, 9), (9, 0, 9), (9, 4, 9), (0, 4, 9)),
    ]
    finder = pathfinder(np.concatenate(floor + top))
    ends = finder.region(torch.tensor([[1.0, 2.0, 0.0], [8.0, 2.0, rise]]))
    assert (ends >= 0).all()
    assert (ends[0] == ends[1]) == walkable


def stairs(steps=15, rise=0.18, run=0.28):
    """Two storeys, a flight of stairs between them, and a hole in the upper floor above it."""
    top, length = steps * rise, steps * run
    parts = [box((0, 0, -0.1), (10, 4, 0)), box((0, 0, top + 2.5), (10, 4, top + 2.6))]
    parts += [box((2 + k * run, 1, 0), (2 + length, 3, (k + 1) * rise)) for k in range(steps)]
    parts += [box((2 + length, 0, top - 0.2), (10, 4, top)), box((0, 0, top - 0.2), (2 + length, 1, top))]
    return np.concatenate(parts), top, length


def test_storeys_are_joined_by_stairs():
    corners, top, length = stairs()
    finder = pathfinder(corners, storeys=4)
    below, above = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[9.0, 2.0, top]])
    assert finder.region(below).item() == finder.region(above).item() >= 0
    under = torch.tensor([[9.0, 2.0, 0.0]])
    assert finder.is_navigable(under).all(), "under the upper floor there is a room too"
    way = finder.geodesic(below, above)[0, 0].item()
    slant = 1.0 + np.hypot(top, length) + (9.0 - 2.0 - length)
    assert slant * 0.97 < way < slant * 1.12


def test_roofs_are_not_walked_on():
    finder = pathfinder(room(), storeys=4)
    assert not finder.is_navigable(torch.tensor([[5.0, 4.0, 2.6]])).any()
    assert abs(float(finder.ground.area[0].max()) - 9.8 * 7.8) < 3.0


def test_open_ground_has_no_roof_and_is_walked_on():
    finder = pathfinder(np.concatenate([quad((0, 0, 0), (6, 0, 0), (6, 6, 0), (0, 6, 0)), box((2, 2, 0), (3, 3, 1))]))
    assert finder.is_navigable(torch.tensor([[1.0, 1.0, 0.0]])).all()
    assert not finder.is_navigable(torch.tensor([[2.5, 2.5, 0.0], [5.99, 3.0, 0.0]])).any()


def test_steps_slide_along_walls_or_stop():
    finder = pathfinder(room())
    start = torch.tensor([[5.0, 7.8, 0.0]])
    along = torch.tensor([[0.25 * np.cos(0.6), 0.25 * np.sin(0.6)]], dtype=torch.float32)
    slid, blocked = finder.step(start, along)
    assert blocked.all()
    assert slid[0, 0] - 5.0 > 0.15
    assert abs(float(slid[0, 1]) - 7.9) < 0.06
    stopped, _ = finder.step(start, along, slide=False)
    assert stopped[0, 0] < slid[0, 0]
    free, blocked = finder.step(torch.tensor([[5.0, 4.0, 0.0]]), along)
    assert not blocked.any()
    torch.testing.assert_close(free[0, :2], torch.tensor([5.0, 4.0]) + along[0])


def test_walkers_never_leave_the_floor_or_pass_a_wall():
    """Long random walks: everybody stays where they can stand, in the region where they began."""
    finder = pathfinder(room(boxes=[*BLOCKS, (0.0, 5.5, 6.0, 5.6, 2.6)]))
    places = finder.random(300, 3, finder.main_region)
    region = finder.region(places)
    rng = torch.Generator().manual_seed(0)
    for _ in range(60):
        yaw = torch.rand(300, generator=rng) * 6.2832
        places, _ = finder.step(places, torch.stack([yaw.cos(), yaw.sin()], 1) * 0.25)
        assert finder.is_navigable(places).all()
        assert torch.equal(finder.region(places), region)
    true = box_distance(places[:, :2].numpy(), BLOCKS)
    assert true.min() > 0.04


def test_nearest_and_random_places():
    finder = pathfinder(room(boxes=BLOCKS))
    inside = torch.tensor([[4.0, 2.2, 0.0], [1.0, 1.0, 0.0]])
    near = finder.nearest(inside)
    assert finder.is_navigable(near).all()
    assert torch.equal(near[1], inside[1])
    assert 0.2 < float((near[0] - inside[0]).norm()) < 0.5
    drawn = finder.random(2000, 5)
    assert finder.is_navigable(drawn).all()
    assert torch.equal(drawn, finder.random(2000, 5))
    left = float((drawn[:, 0] < 5).float().mean())
    assert 0.35 < left < 0.65
    width, depth = finder.picture().size
    assert 102 <= width <= 103
    assert 82 <= depth <= 83


def test_a_scene_without_floor_is_refused():
    wall = quad((0, 0, 0), (4, 0, 0), (4, 0, 3), (0, 0, 3))
    finder = pathfinder(wall)
    with pytest.raises(ShoalError, match="no walkable floor"):
        finder.random(3)
    with pytest.raises(ShoalError, match="no walkable floor"):
        _ = finder.main_region
