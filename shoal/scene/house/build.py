"""Procedural houses: `house:SEED` is a furnished home of several rooms, `cabin:SEED` one or two rooms of such a home.

A seed gives the same house in every process. Seeds 0 to 8,999 are the training set, 9,000 to 9,999 the test set;
any other seed works too.
"""

from collections.abc import Callable

import numpy as np

from shoal.core.errors import ShoalError, unknown
from shoal.scene.house import decor, fixtures, furniture
from shoal.scene.house.layout import furnish
from shoal.scene.house.plan import Plan
from shoal.scene.house.plan import house_plan as _plan
from shoal.scene.house.shapes import Mesh, normals
from shoal.scene.house.shell import door_leaf, shell
from shoal.scene.house.sketch import BUILDINGS
from shoal.scene.house.space import Item
from shoal.scene.house.style import Palette, Style, house_palette
from shoal.scene.house.textures import SIZE, SurfaceType, house_materials
from shoal.scene.scene import Scene, check_scene

HOUSES = 10_000
"""Number of houses, and of cabins, in the training and test sets together: seeds 0 to 9,999."""
TRAIN = range(9_000)
"""Seeds of the training set, for houses and cabins."""
TEST = range(9_000, HOUSES)
"""Seeds of the test set, for houses and cabins; no training run uses them."""

_FINENESS = ((0.0, 0.02), (0.25, 0.33), (1.0, 0.77), (2.0, 1.36), (3.0, 1.9), (4.0, 2.4))
"""(detail, fineness) for a house of 120 m² and for any cabin; interpolated linearly."""


def _door_leaf(size, style: Style) -> Mesh:
    tint = (0.93, 0.92, 0.89) if style.pick(3) else style.wood()
    _, width, height = size
    leaf = door_leaf((width, 0.04, height), tint, style.fine)
    return leaf.moved((0, 0, 0), np.pi / 2).moved((0, -width / 2, 0))


KINDS: dict[str, tuple[Callable[..., Mesh], str]] = {
    "armchair": (furniture.sofa, "armchair"),
    "basin": (fixtures.basin, "sink"),
    "basket": (fixtures.basket, "container"),
    "bathtub": (fixtures.bathtub, "bathtub"),
    "bed": (furniture.bed, "bed"),
    "bin": (fixtures.bin_, "container"),
    "books": (decor.books, "clutter"),
    "bookshelf": (furniture.bookshelf, "shelf"),
    "chair": (furniture.chair, "chair"),
    "clock": (decor.clock, "clock"),
    "coat_rack": (furniture.coat_rack, "coat rack"),
    "counter": (fixtures.counter, "counter"),
    "curtain": (decor.curtain, "curtain"),
    "desk": (furniture.desk, "table"),
    "door_leaf": (_door_leaf, "door"),
    "dresser": (furniture.dresser, "cabinet"),
    "floor_lamp": (decor.floor_lamp, "lamp"),
    "flush_lamp": (decor.flush_lamp, "lamp"),
    "fridge": (fixtures.fridge, "fridge"),
    "fruit": (decor.fruit, "clutter"),
    "hood": (fixtures.hood, "hood"),
    "kitchen_sink": (fixtures.kitchen_sink, "sink"),
    "laptop": (decor.laptop, "clutter"),
    "mirror": (decor.mirror, "mirror"),
    "nightstand": (furniture.nightstand, "cabinet"),
    "office_chair": (furniture.office_chair, "chair"),
    "pendant": (decor.pendant, "lamp"),
    "picture": (decor.picture, "picture"),
    "plant": (decor.plant, "plant"),
    "radiator": (fixtures.radiator, "radiator"),
    "rug": (decor.rug, "rug"),
    "shower": (fixtures.shower, "shower"),
    "sideboard": (furniture.sideboard, "cabinet"),
    "sofa": (furniture.sofa, "sofa"),
    "storage_shelf": (furniture.storage_shelf, "shelf"),
    "stove": (fixtures.stove, "stove"),
    "table": (furniture.table, "table"),
    "table_lamp": (decor.table_lamp, "lamp"),
    "tableware": (decor.tableware, "clutter"),
    "television": (decor.television, "television"),
    "toilet": (fixtures.toilet, "toilet"),
    "towel_rail": (fixtures.towel_rail, "towel"),
    "vase": (decor.vase, "clutter"),
    "wall_cupboard": (fixtures.wall_cupboard, "cabinet"),
    "wardrobe": (furniture.wardrobe, "cabinet"),
    "washing_machine": (fixtures.washing_machine, "washing machine"),
}
"""Kinds of furniture: the function that builds the mesh, and the semantic label."""

LABELS = (
    "unlabeled", "floor", "ceiling", "wall", "door", "window",
    *sorted({label for _, label in KINDS.values()} - {"door"}),
)  # fmt: skip
"""Semantic labels of all houses, in the order of their indices."""


def is_test(seed: int) -> bool:
    """Whether a seed belongs to the test set."""
    return seed in TEST


def house_plan(seed: int, building: str = "house") -> Plan:
    """The floor plan of a house or cabin: rooms, walls, doors and windows."""
    if building not in BUILDINGS:
        raise unknown("building", building, BUILDINGS)
    if seed != int(seed) or not 0 <= seed < 1 << 63:
        raise ShoalError(
            f"A {building}'s seed must be an integer of at least 0, not {seed!r}; 0 to {HOUSES - 1} are those of "
            "the training and test sets."
        )
    return _plan(int(seed), building)


def make_house(seed: int, detail: float = 1.0, building: str = "house") -> Scene:
    """Generate a house or cabin.

    Args:
        seed: An integer of at least 0; 0 to 9,999 are those of the training and test sets.
        detail: 0 to 4; a house has about 10,000 triangles at 0, 165,000 at 1, over 350,000 at 2, over 650,000 at 3.
            A cabin has fewer.
        building: "house" or "cabin".

    Raises:
        ShoalError: If the seed or detail is out of range.
    """
    plan = house_plan(seed, building)
    if not 0.0 <= detail <= 4.0:
        raise ShoalError(f"The detail of a {building} must be from 0 to 4, not {detail!r}; 1 is the default.")
    items = furnish(plan)
    fine = _fineness(detail, plan)
    rng = _rng(plan.seed, 3)
    palette = house_palette(rng)
    parts = shell(plan, rng, fine)
    meshes: dict[tuple, Mesh] = {}
    for item in items:
        key = (item.kind, item.size, item.style)
        if key not in meshes:
            meshes[key] = _item_mesh(item, fine, palette)
        parts.append((KINDS[item.kind][1], meshes[key].moved((item.x, item.y, item.z), item.yaw)))
    return check_scene(_assemble(plan, parts))


def _rng(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))


def _fineness(detail: float, plan: Plan) -> float:
    details, values = zip(*_FINENESS, strict=True)
    fine = float(np.interp(detail, details, values))
    # The triangle count grows as area^0.93 fine^1.65; this exponent makes it nearly independent of the area.
    return fine * (120.0 / plan.area) ** 0.45 if plan.building == "house" else fine


def _item_mesh(item: Item, fine: float, palette: Palette) -> Mesh:
    # Streams of items lie above those of plans, rooms and shells.
    return KINDS[item.kind][0](item.size, Style(_rng(item.style, 1 << 32), fine, palette))


def _assemble(plan: Plan, parts: list[tuple[str, Mesh]]) -> Scene:
    counts = [len(mesh.triangles) for _, mesh in parts]
    starts = np.cumsum([0] + [len(mesh.vertices) for _, mesh in parts[:-1]]).astype(np.int32)
    surface = np.concatenate([mesh.surface for _, mesh in parts])
    scale = np.array([1.0 / SIZE.get(one, 1.0) for one in SurfaceType], np.float32)
    tint = np.concatenate([mesh.tint for _, mesh in parts])
    # White wood is painted and has no grain.
    surface[(surface == SurfaceType.WOOD) & (tint.min(1) > 0.8)] = SurfaceType.PLAIN
    vertices = np.concatenate([mesh.vertices for _, mesh in parts]).astype(np.float32)
    triangles = np.concatenate([mesh.triangles for _, mesh in parts]) + np.repeat(starts, counts)[:, None]
    uv = np.concatenate([mesh.uv for _, mesh in parts]) * scale[surface][:, None, None]
    semantic = np.repeat([LABELS.index(label) for label, _ in parts], counts)
    instance = np.repeat(np.arange(1, len(parts) + 1), counts)
    normal = normals(vertices[triangles])
    # Grids that end in a point have degenerate triangles there.
    keep = np.einsum("td,td->t", normal, normal) > 1e-16
    triangles, surface = triangles[keep].astype(np.int32), surface[keep].astype(np.int32)
    materials, textures = house_materials(plan.seed, np.unique(surface).tolist())
    return Scene(
        name=f"{plan.building}:{plan.seed}",
        vertices=vertices,
        triangles=triangles,
        uv=uv[keep],
        colors=_shaded_colors(vertices[triangles], normal[keep], tint[keep], surface),
        material=surface,
        semantic=semantic[keep].astype(np.int32),
        instance=instance[keep].astype(np.int32),
        materials=materials,
        textures=textures,
        labels=LABELS,
    )


def _shaded_colors(corners: np.ndarray, normal: np.ndarray, tint: np.ndarray, surface: np.ndarray) -> np.ndarray:
    """Vertex colors, uint8 [T, 3, 4], with baked soft daylight: darker on walls than on tops, and near the floor."""
    normal = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    light = 1.0 - normal**2 @ np.array([0.07, 0.14, 0.0], np.float32)
    height = corners[:, :, 2]
    light = light[:, None] * (
        0.84 + 0.16 * np.clip(height / 0.9, 0, 1) ** 0.5 * (1 - 0.1 * np.clip(height - 1.8, 0, 1))
    )
    # Floors are bright although they are low, and the view behind windows is unshaded.
    light[(height < 0.02).all(1)] = 0.97
    light[surface == SurfaceType.VIEW] = 1.0
    colors = np.full((*light.shape, 4), 255, np.uint8)
    colors[..., :3] = np.clip(tint[:, None] * light[..., None] * 255 + 0.5, 0, 255)
    return colors
