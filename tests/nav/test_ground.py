"""Walkable ground of simple rooms against exact answers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.nav.ground import Body, GroundMemory
from shoal.nav.regions import MARGIN_FRACTION
from shoal.scene.cache import read_arrays, save_arrays
from shoal.scene.memory import SceneMemory
from shoal.scene.pack import pack_scene
from shoal.scene.sources import from_arrays, prepare, to_arrays
from tests.nav.rooms import box_distance, pathfinder, room, write_obj
from tests.scene.shapes import box, make_scene, quad

BLOCKS = [(3.0, 2.0, 5.0, 4.0, 1.0), (7.0, 0.0, 7.3, 5.0, 2.6)]


def test_points_are_navigable_outside_the_radius():
    """Points within half a cell of the limit are not checked."""
    finder = pathfinder(room(boxes=BLOCKS))
    rng = np.random.default_rng(0)
    places = np.c_[rng.uniform(0, 10, 3000), rng.uniform(0, 8, 3000), np.zeros(3000)]
    inside = box_distance(places[:, :2], BLOCKS)
    walls = np.minimum(np.minimum(places[:, 0], 10 - places[:, 0]), np.minimum(places[:, 1], 8 - places[:, 1]))
    true = np.minimum(inside, walls)
    found = finder.is_navigable(torch.from_numpy(places).float()).numpy()
    assert found[true > 0.15].all()
    solid = inside == 0  # inside a block up to the ceiling there is floor too, but it is not connected
    assert not found[(true < 0.05) & ~solid].any()
    main = finder.region(torch.from_numpy(places).float()).numpy() == finder.main_region
    assert not main[solid].any()
    distance = finder.obstacle_distance(torch.from_numpy(places).float()).numpy()
    clear = true > 0.15
    np.testing.assert_allclose(distance[clear], np.minimum(true[clear], 1.0), rtol=0.12, atol=0.06)


def test_low_steps_are_walkable_and_low_ceilings_are_not():
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


@pytest.mark.parametrize("thickness", [0.0, 0.1, 0.3])
def test_walls_block_at_any_offset_to_the_grid(thickness):
    """At 2.95 its face goes through cell centers."""
    for face in np.linspace(2.9, 3.0, 11):
        finder = pathfinder(np.concatenate([room((6.0, 4.0)), box((face, 0, 0), (face + thickness, 4, 2.6))]))
        place = torch.tensor([[face - 0.4, 2.03, 0.0]], dtype=torch.float32)
        for _ in range(6):
            place, _ = finder.step(place, torch.tensor([[0.25, 0.0]]))
        assert place[0, 0] < face - 0.09, face
        beyond = finder.geodesic(torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[5.0, 2.0, 0.0]]))
        assert torch.isinf(beyond).all(), face


def test_too_large_cells_are_refused():
    with pytest.raises(ShoalError, match=r"below 0\.198, twice the agent's radius"):
        pathfinder(room(), cell_size=0.2)
    with pytest.raises(ShoalError, match=r"below 0\.098"):
        pathfinder(room(), Body(radius=0.05))


@pytest.mark.parametrize(("rise", "walkable"), [(1.5, True), (4.0, False)])
def test_slopes(rise, walkable):
    """A ramp over 3 m under a high ceiling: 27 degrees is walkable, 53 is not."""
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
    """Two levels with stairs between them and a hole in the upper floor above the stairs."""
    top, length = steps * rise, steps * run
    parts = [box((0, 0, -0.1), (10, 4, 0)), box((0, 0, top + 2.5), (10, 4, top + 2.6))]
    parts += [box((2 + k * run, 1, 0), (2 + length, 3, (k + 1) * rise)) for k in range(steps)]
    parts += [box((2 + length, 0, top - 0.2), (10, 4, top)), box((0, 0, top - 0.2), (2 + length, 1, top))]
    return np.concatenate(parts), top, length


def test_stairs_connect_levels():
    corners, top, length = stairs()
    finder = pathfinder(corners, levels=4)
    below, above = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[9.0, 2.0, top]])
    assert finder.region(below).item() == finder.region(above).item() >= 0
    under = torch.tensor([[9.0, 2.0, 0.0]])
    assert finder.is_navigable(under).all(), "there is a room under the upper floor"
    way = finder.geodesic(below, above)[0, 0].item()
    slant = 1.0 + np.hypot(top, length) + (9.0 - 2.0 - length)
    assert slant * 0.97 < way < slant * 1.12


def test_roofs_are_not_walkable():
    finder = pathfinder(room(), levels=4)
    assert not finder.is_navigable(torch.tensor([[5.0, 4.0, 2.6]])).any()
    assert abs(float(finder.ground.surveys[0].area.max()) - 9.8 * 7.8) < 3.0


def test_ground_without_a_roof_is_walkable():
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
    stopped, _ = finder.step(start, along, allow_sliding=False)
    assert stopped[0, 0] < slid[0, 0]
    free, blocked = finder.step(torch.tensor([[5.0, 4.0, 0.0]]), along)
    assert not blocked.any()
    torch.testing.assert_close(free[0, :2], torch.tensor([5.0, 4.0]) + along[0])


def test_random_walks_stay_in_their_region():
    """Long random walks stay on navigable points of the region where they began."""
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


def test_nearest_and_random_points():
    finder = pathfinder(room(boxes=BLOCKS))
    inside = torch.tensor([[4.0, 2.2, 0.0], [1.0, 1.0, 0.0]])
    near = finder.nearest(inside)
    assert finder.is_navigable(near).all()
    assert torch.equal(near[1], inside[1])
    assert torch.equal(finder.nearest(inside.double()), near)
    assert 0.2 < float((near[0] - inside[0]).norm()) < 0.5
    drawn = finder.random(2000, 5)
    assert finder.is_navigable(drawn).all()
    assert torch.equal(drawn, finder.random(2000, 5))
    left = float((drawn[:, 0] < 5).float().mean())
    assert 0.35 < left < 0.65
    width, depth = finder.topdown_view().size
    assert 102 <= width <= 103
    assert 82 <= depth <= 83


def test_a_scene_without_floor_is_refused():
    wall = quad((0, 0, 0), (4, 0, 0), (4, 0, 3), (0, 0, 3))
    finder = pathfinder(wall)
    with pytest.raises(ShoalError, match="no walkable floor"):
        finder.random(3)
    with pytest.raises(ShoalError, match="no walkable floor"):
        _ = finder.main_region


# --- regions ---------------------------------------------------------------------------------------------------------


RING = [(0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1)]
"""Row and column offsets of the 8 neighbors, in order around a cell."""


def flood_fill(ground: GroundMemory) -> np.ndarray:
    """The regions of row 0, by a flood fill from every cell in turn."""
    found, body = ground.surveys[0], ground.body
    width, depth, levels = found.dims
    height = found.height.astype(np.float64).reshape(levels, depth, width)
    clear = found.clearance.astype(np.float64).reshape(height.shape)
    stands = (found.clearance >= np.float32(body.radius - 1e-3)).reshape(height.shape)
    margin = (found.clearance >= np.float32(body.radius - MARGIN_FRACTION * ground.cell_size)).reshape(
        height.shape
    ) & ~stands

    def beside(cell: tuple, v: int, u: int) -> tuple | None:
        _, y, x = cell
        if not (0 <= y + v < depth and 0 <= x + u < width):
            return None
        rise = np.abs(height[:, y + v, x + u] - height[cell])
        other = (levels - 1 - int(rise[::-1].argmin()), y + v, x + u)  # the last of equal ones, as the kernel
        return other if rise.min() <= body.max_step_height + 1e-3 else None

    def crosses(cell: tuple, other: tuple, v: int, u: int) -> bool:
        sides = [beside(cell, v, 0), beside(cell, 0, u)]
        if any(side and stands[side] for side in sides):
            return True
        c, d = (clear[side] if side else 0.0 for side in sides)
        a, b = clear[cell], clear[other]
        return (a * b - c * d) / (a + b - c - d) >= body.radius - 1e-3

    steps: dict[tuple, set[tuple]] = {}
    for at in np.argwhere(stands | margin):
        cell = tuple(at)
        ring = [beside(cell, v, u) for v, u in RING]
        free = [other is not None and bool(stands[other]) for other in ring]
        if margin[cell]:
            broken = [
                k for k in range(8) if free[k] and not (free[k - 1] and _level(height, ring[k - 1], ring[k], body))
            ]
            if len(broken) != 1 and not all(free):
                continue
        steps.setdefault(cell, set())
        for (v, u), other, is_free in zip(RING, ring, free, strict=True):
            if is_free and (margin[cell] or not (v and u) or crosses(cell, other, v, u)):
                steps[cell].add(other)
                steps.setdefault(other, set()).add(cell)
    region = np.full(height.shape, -1)
    for cell in sorted(steps):
        reached = [] if region[cell] >= 0 else [cell]
        number = np.ravel_multi_index(cell, height.shape)
        while reached:
            at = reached.pop()
            if region[at] < 0:
                region[at] = number
                reached += steps[at]
    return region.reshape(-1)


def _level(height: np.ndarray, one: tuple, two: tuple, body: Body) -> bool:
    return abs(height[one] - height[two]) <= body.max_step_height + 1e-3


@pytest.mark.parametrize("seed", range(6))
def test_regions_equal_a_flood_fill(seed):
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, (9, 7), (12, 2))
    high = low + rng.uniform(0.1, 3.0, (12, 2)) * np.where(rng.random((12, 1)) < 0.5, (1, 0.1), (0.1, 1))
    boxes = [(*a, *np.minimum(b, (10, 8)), rng.choice([0.15, 0.3, 1.0, 2.6])) for a, b in zip(low, high, strict=True)]
    ground = pathfinder(room(boxes=boxes), cell_size=0.19, levels=2).ground
    np.testing.assert_array_equal(ground.surveys[0].region, flood_fill(ground))


def lattice_parts(finder, size: tuple[float, float], step: float = 0.01) -> np.ndarray:
    """int [row, column]: connected parts of the navigable points on a fine lattice, by a flood fill; 0 elsewhere."""
    x, y = np.meshgrid(np.arange(0, size[0], step), np.arange(0, size[1], step))
    places = np.stack([x, y, np.zeros_like(x)], -1).reshape(-1, 3).astype(np.float32)
    free = finder.is_navigable(torch.from_numpy(places)).numpy().reshape(x.shape)
    part = np.zeros(free.shape, int)
    for start in zip(*np.nonzero(free), strict=True):
        reached = [start] if not part[start] else []
        number = part.max() + 1
        while reached:
            at = reached.pop()
            if not part[at]:
                part[at] = number
                around = [(at[0] + v, at[1] + u) for v, u in RING]
                reached += [p for p in around if 0 <= p[0] < part.shape[0] and 0 <= p[1] < part.shape[1] and free[p]]
    return part


@pytest.mark.parametrize("width", [0.08, 0.14, 0.18, 0.22, 0.3])
@pytest.mark.parametrize("off", [0.0, 0.03, 0.07])
def test_a_gap_connects_rooms_only_if_an_agent_fits(width, off):
    low, high = 1.0 + off - width / 2, 1.0 + off + width / 2
    finder = pathfinder(room((3.0, 2.0), boxes=[(1.4, 0.0, 1.6, low, 2.6), (1.4, high, 1.6, 2.0, 2.6)]))
    part = lattice_parts(finder, (3.0, 2.0))
    places = torch.tensor([[0.7, 1.0, 0.0], [2.3, 1.0, 0.0]])
    passes = bool(part[100, 70] == part[100, 230])
    one, two = finder.region(places).tolist()
    assert (one == two) == passes
    far = float(finder.geodesic(places[:1], places[1:]))
    assert np.isfinite(far) == passes
    if width in (0.08, 0.3):  # at any offset to the grid
        assert passes == (width == 0.3)


def test_paths_do_not_lead_through_narrow_gaps():
    """Two rooms with a door and a slit far from it: the path leads through the door."""
    boxes = [(2.9, 0.0, 3.1, 0.93, 2.6), (2.9, 1.07, 3.1, 3.0, 2.6)]
    finder = pathfinder(room((6.0, 4.0), boxes=boxes))
    places = torch.tensor([[2.5, 1.0, 0.0], [3.5, 1.0, 0.0]])
    far = float(finder.geodesic(places[:1], places[1:]))
    over_corners = 2 * np.hypot(0.4, 2.0) + 0.2
    assert over_corners < far < 1.1 * over_corners
    path = finder.shortest_path(places[0], places[1])
    assert path is not None
    assert path[:, 1].max() > 3.0


def test_regions_over_stairs_equal_a_flood_fill():
    ground = pathfinder(stairs()[0], levels=4).ground
    np.testing.assert_array_equal(ground.surveys[0].region, flood_fill(ground))


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.fixture
def scene(tmp_path, monkeypatch):
    """A room from a file, and an empty cache."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return prepare(write_obj(tmp_path / "room.obj", room((4.0, 3.0), boxes=[(1.0, 1.0, 2.0, 1.5, 1.0)])), up="z")


@pytest.fixture
def computed(monkeypatch):
    """Calls that compute ground by casting rays."""
    calls, real = [], GroundMemory._compute
    monkeypatch.setattr(GroundMemory, "_compute", lambda *given: calls.append(given) or real(*given))
    return calls


def survey(scene, body=None, cell_size=0.1, levels=1) -> GroundMemory:
    memory = SceneMemory.holding([scene], "cpu")
    ground = GroundMemory(memory, GroundMemory.cells_needed(scene.bounds, cell_size) * levels + 7, body, cell_size)
    for part in (ground.height, ground.clearance, ground.region):
        part.fill_(5)  # leftovers of another scene
    ground.survey(0)
    return ground


def same(one: GroundMemory, two: GroundMemory) -> bool:
    """Whether two grounds are equal in every bit, on the device and on the host."""
    names = ("height", "clearance", "region", "origin", "dims")
    device = all(torch.equal(getattr(one, n).view(torch.int32), getattr(two, n).view(torch.int32)) for n in names)
    a, b = vars(one.surveys[0]), vars(two.surveys[0])
    return device and all(np.array_equal(a[n], b[n]) and np.asarray(a[n]).dtype == np.asarray(b[n]).dtype for n in a)


def entries(tmp_path):
    return sorted((tmp_path / "cache").glob("ground-*"))


@pytest.mark.parametrize("levels", [1, 3])
def test_cached_ground_equals_computed_ground(scene, computed, tmp_path, levels):
    fresh = survey(replace(scene, key=""), levels=levels)
    assert entries(tmp_path) == [], "a scene built in memory is not cached"
    first, second = survey(scene, levels=levels), survey(scene, levels=levels)
    assert len(computed) == 2
    assert len(entries(tmp_path)) == 1
    assert same(first, fresh)
    assert same(second, fresh)
    np.testing.assert_array_equal(second.navigable_cells(0), fresh.navigable_cells(0))


def test_every_setting_of_the_ground_changes_the_cache_entry(scene, computed):
    for count, settings in enumerate(
        [{}, dict(body=Body(radius=0.2)), dict(body=Body(max_slope=30.0)), dict(cell_size=0.15), dict(levels=2)],
        start=1,
    ):
        survey(scene, **settings)
        survey(scene, **settings)
        assert len(computed) == count
    survey(replace(scene, key="another"))
    assert len(computed) == count + 1


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other", "short"])
def test_a_damaged_cache_entry_is_recomputed(scene, computed, tmp_path, damage):
    first = survey(scene)
    (entry,) = entries(tmp_path)
    data = entry.read_bytes()
    if damage == "other":
        save_arrays(entry, {"a": np.zeros(3)}, {})
    elif damage == "short":
        save_arrays(entry, {name: array[:-1] for name, array in read_arrays(entry)[0].items()}, {})
    else:
        flipped = data[:-20] + bytes([data[-20] ^ 255]) + data[-19:]
        entry.write_bytes(dict(flip=flipped, cut=data[: len(data) // 2], empty=b"")[damage])
    with pytest.warns(UserWarning, match="damaged"):
        second = survey(scene)
    assert len(computed) == 2
    assert same(first, second)
    assert same(first, survey(scene))
    assert len(computed) == 2


def test_a_scene_keeps_its_key_when_sent_from_a_worker(scene):
    assert scene.key
    assert from_arrays(*to_arrays(scene)).key == scene.key
    assert pack_scene(make_scene(room())).key == ""
