"""Geodesic distance against exact shortest paths."""

import numpy as np
import pytest
import torch

from shoal.nav.geodesic import MM_PER_METER, UNREACHABLE, FieldMemory
from tests.nav.rooms import BLOCKS, pathfinder, room, shortest_length


def test_distances_equal_exact_path_lengths():
    finder = pathfinder(room(boxes=BLOCKS))
    places, goals = finder.random(36, 1), finder.random(12, 2)
    found = finder.geodesic(places, goals).numpy()
    errors = []
    for i in range(36):
        g = i % 12
        true = shortest_length(places[i, :2].numpy(), goals[g, :2].numpy(), BLOCKS, 0.1)
        straight = float((places[i] - goals[g]).norm())
        assert found[i, g] >= straight - 1e-5
        assert np.isinf(true) == np.isinf(found[i, g])
        if 1.0 < true < np.inf:
            errors.append(found[i, g] / true - 1)
    errors = np.array(errors)
    assert len(errors) > 24
    assert np.abs(errors).mean() < 0.02
    assert errors.min() > -0.015
    assert errors.max() < 0.05


def test_distance_around_a_corner_in_closed_form():
    """An L: the way bends at one corner, around a circle of the agent's radius."""
    finder = pathfinder(room((8.0, 8.0), boxes=[(4.0, 4.0, 8.0, 8.0, 2.6)]))
    start, goal = torch.tensor([[3.0, 7.0, 0.0]]), torch.tensor([[7.0, 3.0, 0.0]])
    corner, r = np.array([4.0, 4.0]), 0.1
    far = np.linalg.norm(start[0, :2].numpy() - corner)
    between = np.arccos(np.dot(start[0, :2].numpy() - corner, goal[0, :2].numpy() - corner) / far**2)
    # Two tangents of the circle and the arc between them, on the side that looks away from the block.
    arc = 2 * np.pi - (2 * np.pi - between) - 2 * np.arccos(r / far)
    true = 2 * np.sqrt(far**2 - r**2) + r * max(0.0, arc)
    found = finder.geodesic(start, goal).item()
    assert abs(found / true - 1) < 0.03  # at the scheme's worst angle


@pytest.mark.parametrize("degrees", [15, 30, 44])
@pytest.mark.parametrize("turned", [False, True])
def test_slopes_count_with_their_true_length(degrees, turned):
    """A ramp, along x or rising along the diagonal: the field itself, before it is held above the straight way."""
    rise = np.tan(np.radians(degrees))
    up = np.array([np.sqrt(0.5), np.sqrt(0.5)]) if turned else np.array([1.0, 0.0])
    side = 8.0
    corners = [(x, y, rise * float(np.dot(up, (x, y)))) for x, y in ((0, 0), (side, 0), (side, side), (0, side))]
    finder = pathfinder(np.array([[corners[i] for i in three] for three in ((0, 1, 2), (0, 2, 3))]))
    foot = np.array([1.55, 1.55]) if turned else np.array([0.75, 4.05])
    fields = FieldMemory(finder.ground, 1)
    fields.solve(0, torch.tensor([[*foot, rise * np.dot(up, foot)]], dtype=torch.float32))
    width, depth, _ = finder.ground.surveys[0].dims
    meters = (fields.field[0, 0].int() & UNREACHABLE).numpy()[: width * depth].reshape(depth, width) / MM_PER_METER
    column, row = (foot / 0.1).astype(int) + 1
    step = (1, 1) if turned else (0, 1)
    near, far = (meters[row + k * step[0], column + k * step[1]] for k in (5, 50))
    assert (far - near) / (45 * 0.1 * np.hypot(*step)) == pytest.approx(np.hypot(1.0, rise), rel=2e-3)


def test_visible_goals_are_exact_and_walls_block():
    finder = pathfinder(room(boxes=[(5.0, 0.0, 5.4, 8.0, 2.6)]))
    goals = torch.tensor([[2.03, 4.07, 0.0]])
    near = torch.tensor([[2.03, 4.07, 0.0], [2.1, 4.2, 0.0], [2.5, 4.5, 0.0], [1.4, 3.6, 0.0]])
    torch.testing.assert_close(finder.geodesic(near, goals)[:, 0], (near - goals).norm(dim=1), atol=1e-5, rtol=0)
    assert torch.isinf(finder.geodesic(torch.tensor([[8.0, 4.0, 0.0]]), goals)).all()
    assert torch.isinf(finder.geodesic(torch.tensor([[5.2, 4.0, 0.0]]), goals)).all()


def test_walking_to_the_goal_reduces_the_distance_equally():
    """Down the field's slope in small steps: the sum of what is gained is the way that was walked."""
    finder = pathfinder(room(boxes=BLOCKS))
    goal = torch.tensor([[9.0, 1.0, 0.0]])
    place = torch.tensor([[1.0, 7.0, 0.0]])
    start = finder.geodesic(place, goal).item()
    walked = 0.0
    angles = torch.arange(32) * (2 * np.pi / 32)
    for _ in range(140):
        around, _ = finder.step(place.expand(32, 3).contiguous(), torch.stack([angles.cos(), angles.sin()], 1) * 0.1)
        best = finder.geodesic(around, goal)[:, 0].argmin()
        walked += float((around[best] - place[0]).norm())
        place = around[best : best + 1].clone()
        if float((place - goal).norm()) < 0.15:
            break
    assert float((place - goal).norm()) < 0.15
    assert abs(walked / start - 1) < 0.05
