"""Procedural houses and cabins: the same for the same seed, closed, labeled, and every room can be reached."""

import hashlib
import subprocess
import sys
from collections import deque

import numpy as np
import pytest
from embreex import rtcore_scene
from embreex.mesh_construction import TriangleMesh

from shoal.core.errors import ShoalError
from shoal.nav.ground import GroundMemory
from shoal.nav.queries import Pathfinder
from shoal.scene import SceneMemory
from shoal.scene.house import HOUSES, KINDS, LABELS, TEST, TRAIN, house_plan, is_test, make_house
from shoal.scene.house.layout import furnish
from shoal.scene.house.plan import Plan
from shoal.scene.house.sketch import BUILDING_AREA
from shoal.scene.house.space import regions
from shoal.scene.house.style import Style, house_palette
from shoal.scene.house.textures import SurfaceType
from shoal.scene.pack import pack_scene
from shoal.scene.scene import Scene, check_scene

CELL = 0.05
AGENT = 0.2


def digest(scene: Scene) -> str:
    text = hashlib.sha256()
    for array in (
        scene.vertices,
        scene.triangles,
        scene.uv,
        scene.colors,
        scene.material,
        scene.semantic,
        scene.instance,
    ):
        text.update(array.tobytes())
    for texture in scene.textures:
        text.update(texture.tobytes())
    return text.hexdigest()


def solid_points(scene: Scene) -> np.ndarray:
    """float32 [N, 2]: points 4.5 cm apart on all surfaces between 0.2 and 1.5 m above the floor."""
    corners = scene.corners
    z = corners[:, :, 2]
    corners = corners[(z.max(1) > 0.2) & (z.min(1) < 1.5)]
    edges = np.linalg.norm(corners - np.roll(corners, 1, axis=1), axis=2).max(1)
    counts = np.maximum(1, np.ceil(edges / 0.045)).astype(int)
    found = []
    for count in np.unique(counts):
        i, j = np.meshgrid(np.arange(count + 1), np.arange(count + 1), indexing="ij")
        i, j = i[i + j <= count] / count, j[i + j <= count] / count
        weights = np.stack([1 - i - j, i, j], -1).astype(np.float32)
        points = (weights @ corners[counts == count]).reshape(-1, 3)
        found.append(points[(points[:, 2] > 0.2) & (points[:, 2] < 1.5), :2])
    return np.concatenate(found)


def occupied(points: np.ndarray, plan: Plan) -> np.ndarray:
    """bool [X, Y]: cells that contain a point."""
    x0, y0, x1, y1 = plan.bounds
    grid = np.zeros((int((x1 - x0) / CELL) + 2, int((y1 - y0) / CELL) + 2), bool)
    cells = np.clip(((points - (x0, y0)) / CELL).astype(int), 0, np.array(grid.shape) - 1)
    grid[cells[:, 0], cells[:, 1]] = True
    return grid


def passable(grid: np.ndarray) -> np.ndarray:
    """bool [X, Y]: cells where a disc of the agent's radius is free of obstacles."""
    reach = round(AGENT / CELL)
    padded = np.pad(grid, reach, constant_values=True)
    hit = np.zeros_like(grid)
    for i in range(-reach, reach + 1):
        for j in range(-reach, reach + 1):
            if np.hypot(i, j) <= reach:
                hit |= padded[reach + i : reach + i + grid.shape[0], reach + j : reach + j + grid.shape[1]]
    return ~hit


def room_numbers(plan: Plan, shape: tuple[int, ...]) -> np.ndarray:
    numbers = np.full(shape, -1)
    x = plan.bounds[0] + (np.arange(shape[0]) + 0.5) * CELL
    y = plan.bounds[1] + (np.arange(shape[1]) + 0.5) * CELL
    for number, room in enumerate(plan.rooms):
        for x0, y0, x1, y1 in room.rects:
            numbers[((x > x0) & (x < x1))[:, None] & ((y > y0) & (y < y1))[None]] = number
    return numbers


def reached_from(free: np.ndarray, start: tuple[int, int]) -> np.ndarray:
    seen = np.zeros_like(free)
    seen[start] = True
    queue = deque([start])
    width, depth = free.shape
    rows, marks = free.tolist(), seen.tolist()
    while queue:
        i, j = queue.popleft()
        for a, b in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
            if 0 <= a < width and 0 <= b < depth and rows[a][b] and not marks[a][b]:
                marks[a][b] = True
                queue.append((a, b))
    return np.array(marks)


def reach_by_room(points: np.ndarray, plan: Plan) -> list[tuple[str, float, float]]:
    """Name, square meters free, and the share of them that can be reached from the first door."""
    free = passable(occupied(points, plan))
    numbers = room_numbers(plan, free.shape)
    door = plan.doors[0]
    middle = (door.low + door.high) / 2
    x, y = (door.at, middle) if door.axis == 0 else (middle, door.at)
    start = int((x - plan.bounds[0]) / CELL), int((y - plan.bounds[1]) / CELL)
    assert free[start], "the first doorway is blocked"
    linked = regions(free)
    seen = linked == linked[start]
    report = []
    for number, room in enumerate(plan.rooms):
        own = free & (numbers == number)
        report.append((room.name, own.sum() * CELL**2, float((own & seen).sum() / max(1, own.sum()))))
    return report


def caster(scene: Scene):
    tree = rtcore_scene.EmbreeScene()
    TriangleMesh(tree, np.ascontiguousarray(scene.corners))
    return lambda origins, directions: tree.run(
        np.ascontiguousarray(origins, np.float32), np.ascontiguousarray(directions, np.float32), output=True
    )


@pytest.fixture(scope="module")
def points(coarse, usual) -> list[np.ndarray]:
    return [solid_points(scene) for scene, _ in (*coarse, *usual)]


@pytest.fixture(scope="module")
def coarse() -> list[tuple[Scene, Plan]]:
    return [(make_house(seed, 0.0), house_plan(seed)) for seed in (*range(8), *range(9_000, 9_008))]


@pytest.fixture(scope="module")
def usual() -> list[tuple[Scene, Plan]]:
    return [(make_house(seed), house_plan(seed)) for seed in (3, 9_123)]


@pytest.fixture(scope="module")
def cabins() -> list[tuple[Scene, Plan]]:
    return [(make_house(seed, 0.0, "cabin"), house_plan(seed, "cabin")) for seed in (*range(5), *range(9_000, 9_005))]


def test_a_house_is_the_same_in_another_process():
    code = (
        "from tests.scene.test_house import *; print(digest(make_house(5, 0.3)), digest(make_house(5, 0.3, 'cabin')))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert other == [digest(make_house(5, 0.3)), digest(make_house(5, 0.3, "cabin"))]


def test_seeds_differ_and_details_share_the_plan():
    assert digest(make_house(1, 0.0)) != digest(make_house(2, 0.0))
    for seed in (7,):
        coarse, usual = make_house(seed, 0.0), make_house(seed, 1.0)
        count = int(coarse.instance.max())
        assert count == usual.instance.max()
        boxes = []
        for scene in (coarse, usual):
            starts = np.searchsorted(scene.instance, np.arange(1, count + 1))
            boxes.append(
                [np.minimum.reduceat(scene.corners.min(1), starts), np.maximum.reduceat(scene.corners.max(1), starts)]
            )
            boxes[-1].append(scene.semantic[starts])
        assert np.abs((boxes[0][0] + boxes[0][1]) - (boxes[1][0] + boxes[1][1])).max() < 0.6, "an object is elsewhere"
        np.testing.assert_array_equal(boxes[0][2], boxes[1][2])
        for texture, other in zip(coarse.textures, usual.textures, strict=True):
            np.testing.assert_array_equal(texture, other)


def test_detail_sets_the_number_of_triangles(coarse, usual, cabins):
    for scene, _ in coarse:
        assert 2_000 < len(scene.triangles) < 25_000, scene.name
    for scene, _ in usual:
        assert 100_000 < len(scene.triangles) < 250_000, scene.name
    assert len(make_house(4, 2.0).triangles) > 300_000
    for scene, _ in cabins:
        assert 800 < len(scene.triangles) < 3_500, scene.name
    assert 8_000 < len(make_house(4, 1.0, "cabin").triangles) < 45_000


def test_a_bad_seed_or_detail_is_named():
    with pytest.raises(ShoalError, match="-1"):
        make_house(-1)
    with pytest.raises(ShoalError, match=r"0\.5"):
        house_plan(0.5)  # type: ignore[arg-type]
    with pytest.raises(ShoalError, match="detail"):
        make_house(0, -0.1)
    with pytest.raises(ShoalError, match="A cabin's seed must be an integer of at least 0, not -1"):
        make_house(-1, 0.0, "cabin")
    with pytest.raises(ShoalError, match="did you mean 'cabin'"):
        make_house(1, 0.0, "cabn")
    assert make_house(123_456_789, 0.0).name == "house:123456789"
    assert make_house(7, 0.0, "cabin").name == "cabin:7"


def test_train_and_test_seeds_are_disjoint():
    assert not set(TRAIN) & set(TEST)
    assert len(TRAIN) + len(TEST) == HOUSES
    assert is_test(9_500)
    assert not is_test(8_999)
    assert not is_test(HOUSES)


def test_scenes_are_valid_and_labeled(coarse, usual, cabins):
    for scene, plan in (*coarse, *usual, *cabins):
        check_scene(scene)
        assert scene.labels == LABELS
        assert (scene.semantic > 0).all()
        assert (scene.instance > 0).all()
        x0, y0, x1, y1 = plan.bounds
        low, high = scene.bounds
        assert (low > np.array([x0, y0, 0]) - 0.06).all(), scene.name
        assert (high < np.array([x1, y1, plan.height + 0.25]) + 0.06).all(), scene.name
        assert sum(texture.nbytes for texture in scene.textures) < 4e6
        corners = scene.corners
        area = np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1)
        assert (area > 0).all(), "a triangle has no area"


def test_plans_are_varied_and_of_the_promised_size():
    plans = [house_plan(seed) for seed in range(40)]
    for plan in plans:
        assert BUILDING_AREA["house"][0] <= plan.area <= BUILDING_AREA["house"][1]
        assert 4 <= len(plan.rooms) <= 12
        kinds = [zone.kind for room in plan.rooms for zone in room.zones]
        assert {"living", "kitchen", "bath", "bedroom"} <= set(kinds)
        assert {"hall", "corridor"} & set(kinds)
        for door in plan.doors:
            assert 0.8 - 1e-6 <= door.high - door.low - 0.04 <= 1.0 + 1e-6
            assert 2.0 <= door.top <= 2.1
        linked = {0}
        for _ in plan.rooms:
            linked |= {room for door in plan.doors if linked & set(door.rooms) for room in door.rooms}
        assert len(linked) == len(plan.rooms)
    assert len({len(plan.rooms) for plan in plans}) > 4
    assert max(plan.area for plan in plans) > 1.8 * min(plan.area for plan in plans)


def test_cabins_have_one_room_or_two_with_a_door_between_them():
    plans = [house_plan(seed, "cabin") for seed in range(60)]
    for plan in plans:
        assert all(12.0 <= room.area <= 30.0 for room in plan.rooms)
        assert len(plan.doors) == len(plan.rooms) - 1
        assert all(set(door.rooms) == {0, 1} and door.high - door.low > 0.8 for door in plan.doors)
        entrance, *more = [opening for opening in plan.openings if opening.kind == "entrance"]
        assert not more
        assert set(entrance.rooms) == {-1, 0}
        windows = [opening for opening in plan.openings if opening.kind == "window"]
        assert {max(window.rooms) for window in windows} == set(range(len(plan.rooms)))
    assert 0.3 < np.mean([len(plan.rooms) == 2 for plan in plans]) < 0.7
    kinds = {room.kind for plan in plans for room in plan.rooms}
    assert kinds == {"living", "dining", "kitchen", "bedroom", "study"}


def test_the_floor_of_a_cabin_is_connected(cabins):
    for scene, plan in cabins:
        packed = pack_scene(scene)
        ground = GroundMemory(SceneMemory.holding([packed], "cpu"), GroundMemory.cells_needed(packed.bounds, 0.1))
        finder = Pathfinder(ground)
        cells = finder.navigable_points.numpy()
        main = (ground.region[0, ground.navigable_cells(0)] == finder.main_region).numpy()
        low = cells[:, 2] < 0.2  # What lies higher is furniture.
        rooms = np.where(low, [plan.room_at(x, y) for x, y, _ in cells], -1)
        share = main[rooms >= 0].mean()
        assert share > 0.7, f"{scene.name}: only {share:.0%} of the floor is connected"
        assert (main & (rooms >= 0)).sum() * ground.cell_size**2 > 5.0, scene.name
        assert set(rooms[main & (rooms >= 0)]) == set(range(len(plan.rooms))), f"{scene.name}: a room is shut"


def test_regions_match_a_breadth_first_search():
    rng = np.random.default_rng(1)
    for _ in range(20):
        free = rng.random((17, 70)) < 0.65
        free[8, 30] = True
        numbers = regions(free)
        np.testing.assert_array_equal(numbers == numbers[8, 30], reached_from(free, (8, 30)))


def test_every_room_can_be_reached(coarse, usual, points):
    for (scene, plan), solid in zip((*coarse, *usual), points, strict=True):
        report = reach_by_room(solid, plan)
        for name, free, share in report:
            assert free > 0.5, f"{scene.name}: {name} has {free:.2f} square meters of free floor"
            # A nook may be cut off, such as the inside of a shower.
            assert share > 0.7, f"{scene.name}: only {share:.0%} of {name} can be reached"
        total = sum(free for _, free, _ in report)
        assert sum(free * share for _, free, share in report) > 0.98 * total, scene.name


def test_doorways_are_clear(coarse, usual, cabins, points):
    solids = [*points, *(solid_points(scene) for scene, _ in cabins)]
    for (scene, plan), solid in zip((*coarse, *usual, *cabins), solids, strict=True):
        for door in plan.doors:
            across, along = np.abs(solid[:, door.axis] - door.at), solid[:, 1 - door.axis]
            # Within the frame, and 0.6 m on both sides of the wall.
            inside = (across < 0.66) & (along > door.low + 0.021) & (along < door.high - 0.021)
            assert not inside.any(), f"{scene.name}: a door is blocked at {solid[inside][:1]}"


def test_floors_cover_the_rooms_and_no_ray_escapes(coarse, usual, cabins):
    rng = np.random.default_rng(0)
    solid = np.isin(LABELS, ["floor"])
    for scene, plan in (*coarse[::3], *usual[:1], *cabins[::2]):
        cast = caster(scene)
        points = []
        for room in plan.rooms:
            for x0, y0, x1, y1 in room.rects:
                points.append(rng.uniform((x0, y0, 0.02), (x1, y1, 0.02), (20, 3)))
        low = np.concatenate(points)
        # From 2 cm above the floor, where only rugs and the feet of furniture are lower.
        hit = cast(low, np.tile([0.0, 0.0, -1.0], (len(low), 1)))["primID"]
        assert (hit >= 0).all()
        assert solid[scene.semantic[hit]].mean() > 0.6
        assert not np.isin(scene.semantic[hit], [LABELS.index(label) for label in ("ceiling", "window")]).any()
        eyes = np.repeat(low + [0, 0, 1.23], 60, axis=0)
        directions = rng.normal(size=eyes.shape)
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        assert (cast(eyes, directions)["primID"] >= 0).all(), f"a ray leaves {scene.name}"


def test_items_stay_within_their_size_and_every_kind_is_used():
    rng = np.random.Generator(np.random.Philox(7))
    seen = {}
    for seed in range(14):
        for item in furnish(house_plan(seed)):
            seen.setdefault(item.kind, item)
    assert set(seen) == set(KINDS)
    for kind, item in seen.items():
        for fine in (0.02, 1.0):
            mesh = KINDS[kind][0](
                item.size, Style(np.random.Generator(np.random.Philox(item.style)), fine, house_palette(rng))
            )
            low, high = mesh.bounds
            half = np.array([item.size[0] / 2, item.size[1] / 2])
            assert (low[:2] > -half - 0.021).all(), (kind, fine, low, item.size)
            assert (high[:2] < half + 0.021).all(), (kind, fine, high, item.size)
            assert low[2] > -0.011, (kind, fine, low)
            tap = 0.3 if kind in ("basin", "bathtub", "kitchen_sink", "stove") else 0.05  # Or a pot.
            assert high[2] < item.size[2] + tap, (kind, fine, high, item.size)


def test_leaves_are_cut_out():
    scene = make_house(0, 0.0)
    leaf = scene.materials[SurfaceType.LEAF]
    assert leaf.cutoff > 0
    alpha = scene.textures[leaf.texture][..., 3]
    assert (alpha == 0).any()
    assert (alpha == 255).any()
