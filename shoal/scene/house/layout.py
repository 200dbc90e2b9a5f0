"""Furnishing of rooms: one function for each kind of room."""

import numpy as np

from shoal.scene.house.plan import CIRCULATION, Plan, Wall, Zone
from shoal.scene.house.shell import LINING
from shoal.scene.house.space import Item, Space, facing

MAX_IN_CABIN = {
    "armchair": 1, "bookshelf": 1, "chair": 2, "plant": 1, "wall_cupboard": 2,
    "books": 0, "clock": 0, "fruit": 0, "table_lamp": 0, "tableware": 0, "vase": 0,
}  # fmt: skip
"""Maximum items of a kind in a cabin's room, to limit its triangles. None of these carries other items."""


def furnish(plan: Plan) -> list[Item]:
    """All furniture of a building with its poses; independent of the detail."""
    rng = np.random.Generator(np.random.Philox(key=np.array([plan.seed, 2], np.uint64)))
    spaces = [Space(plan, number, rng) for number in range(len(plan.rooms))]
    _door_leaves(plan, spaces, rng)
    for space in spaces:
        for zone in space.room.zones:
            _ARRANGE[zone.kind](space, zone)
        _windows_and_pictures(space)
    return [
        item
        for space in spaces
        for item in (_limit_for_cabin(space.items) if plan.building == "cabin" else space.items)
    ]


def _limit_for_cabin(items: list[Item]) -> list[Item]:
    """The items without those beyond MAX_IN_CABIN."""
    kept: list[Item] = []
    for item in items:
        if sum(other.kind == item.kind for other in kept) < MAX_IN_CABIN.get(item.kind, len(items)):
            kept.append(item)
    return kept


def _area(zone: Zone) -> float:
    x0, y0, x1, y1 = zone.rect
    return (x1 - x0) * (y1 - y0)


def _door_leaves(plan: Plan, spaces: list[Space], rng: np.random.Generator) -> None:
    """Place open door leaves, each in one of its two rooms and clear of other doorways; some doorways have none."""
    style = int(rng.integers(1 << 31))
    for door in plan.doors:
        side, end, some = int(rng.integers(2)), int(rng.integers(2)), rng.random()
        if some > 0.75:
            continue
        space = spaces[door.rooms[side]]
        wall = next(wall for wall in space.walls if door in space.holes[wall])
        width = door.high - door.low - 2 * LINING
        u = door.low - 0.008 if end == 0 else door.high + 0.008
        out = wall.at + wall.sign * (0.03 + width / 2)
        x, y = (out, u) if wall.axis == 0 else (u, out)
        # A leaf is 4 cm thick, and 17 cm with the knobs on both sides.
        size, yaw = (0.17, width, door.top - 0.02), facing(wall)
        rect = np.array([Item("door_leaf", size, x, y, 0.0, yaw, style, 0).rect])
        kept = space.doorways
        space.doorways = {other: rect for other, rect in kept.items() if other != door}
        fit = space.fits(rect)[0] and space.stays_connected(rect.tolist())
        space.doorways = kept
        if fit:
            space.put("door_leaf", size, x, y, yaw, style=style)


def _within(rect, x: float, y: float) -> bool:
    return rect[0] <= x <= rect[2] and rect[1] <= y <= rect[3]


def _place_on(
    space: Space, item: Item, kind: str, size, right: float = 0.0, ahead: float = 0.0, turn: float = 0.0
) -> Item:
    """Place an object on top of a piece."""
    x, y = item.beside(right, ahead)
    return space.put(kind, size, x, y, item.yaw + turn, z=item.size[2] + 0.001, solid=False)


def _rug(space: Space, x: float, y: float, yaw: float, width: float, depth: float) -> None:
    rect = np.array([Item("rug", (width, depth, 0), x, y, 0, yaw, 0, 0).rect])
    x0, y0, x1, y1 = rect[0]
    inside = sum(
        max(0.0, min(x1, d) - max(x0, a)) * max(0.0, min(y1, e) - max(y0, b)) for a, b, d, e in space.room.rects
    )
    clear = all(
        item.kind != "rug" or item.rect[2] < x0 or item.rect[0] > x1 or item.rect[3] < y0 or item.rect[1] > y1
        for item in space.items
    )
    if inside > (x1 - x0) * (y1 - y0) - 1e-6 and clear:
        space.put("rug", (width, depth, 0.012), x, y, yaw, solid=False)


def _lamp(space: Space, zone: Zone, hanging: bool) -> None:
    x0, y0, x1, y1 = zone.rect
    height = space.plan.height
    tables = [
        item
        for item in space.items
        if item.kind == "table" and item.size[2] > 0.6 and _within(zone.rect, item.x, item.y)
    ]
    x, y = (tables[0].x, tables[0].y) if tables else ((x0 + x1) / 2, (y0 + y1) / 2)
    if hanging:
        space.put("pendant", (0.45, 0.45, 0.55), x, y, 0.0, z=height - 0.55, solid=False)
    else:
        space.put("flush_lamp", (0.36, 0.36, 0.1), x, y, 0.0, z=height - 0.1, solid=False)


def _plants(space: Space, zone: Zone, count: int) -> None:
    for _ in range(count):
        high = float(space.rng.uniform(0.7, 1.6))
        wide = min(0.7, 0.3 + 0.28 * high)
        space.place_at_wall(zone, "plant", (wide, wide, high), ahead=0.1, corner=2.0)


def _pictures(space: Space, count: int) -> None:
    for _ in range(count):
        wall = space.walls[int(space.rng.integers(len(space.walls)))]
        width, height = float(space.rng.uniform(0.35, 0.9)), float(space.rng.uniform(0.35, 0.7))
        u = float(space.rng.uniform(wall.low, wall.high))
        # The center of a picture is at eye height.
        space.hang("picture", (width, 0.03, height), 1.62 - height / 2, wall, u)


def _windows_and_pictures(space: Space) -> None:
    """Radiators under windows, curtains beside them, and pictures on free walls."""
    kind = space.room.kind
    style, wide = space.style(), float(space.rng.uniform(0.24, 0.34))
    for wall in space.walls:
        for window in space.windows(wall):
            middle = (window.low + window.high) / 2
            if window.bottom >= 0.75 and space.rng.random() < 0.7:
                _radiator(
                    space, wall, middle, min(1.2, window.high - window.low - 0.1), min(0.65, window.bottom - 0.15)
                )
            if kind not in ("bath", "kitchen", "corridor"):
                for u in (window.low - 0.11 - wide / 2, window.high + 0.11 + wide / 2):
                    _curtain(space, wall, u, wide, window.top + 0.14, window.bottom, style)
    if kind not in ("bath", "storage"):
        _pictures(space, (6 if kind in CIRCULATION else 2) + int(space.room.area / 6))
        if kind in ("kitchen", "study", "corridor"):
            wall = space.walls[int(space.rng.integers(len(space.walls)))]
            space.hang("clock", (0.3, 0.05, 0.3), 1.8, wall, (wall.low + wall.high) / 2)


def _radiator(space: Space, wall: Wall, u: float, width: float, height: float) -> None:
    depth = 0.12
    off = wall.at + wall.sign * (depth / 2 + 0.005)
    x, y = (off, u) if wall.axis == 0 else (u, off)
    space.try_place("radiator", (width, depth, height), x, y, facing(wall))


def _curtain(space: Space, wall: Wall, u: float, width: float, top: float, sill: float, style: int) -> None:
    """Hang a curtain to the floor if that is free, else to the sill."""
    for bottom in (0.03, max(0.3, sill - 0.15)):
        if space.hang("curtain", (width, 0.1, top - bottom), bottom, wall, u, solid=True, style=style):
            return


def _living(space: Space, zone: Zone) -> None:
    rng = space.rng
    television = _television(space, zone)
    if television is not None:
        _sofa(space, television)
    if not any(item.kind == "sofa" for item in space.items):
        sofa = space.place_at_wall(zone, "sofa", (float(rng.uniform(1.6, 2.0)), 0.88, 0.84), ahead=0.8, corner=-0.5)
        if sofa is not None:
            x, y = sofa.beside(0.0, 0.95)
            space.try_place("table", (0.9, 0.55, 0.42), x, y, sofa.yaw)
    for _ in range(1 + (_area(zone) > 20)):
        space.place_at_wall(
            zone, "bookshelf", (float(rng.uniform(0.8, 1.3)), 0.3, float(rng.uniform(1.7, 2.1))), corner=0.7
        )
    if rng.random() < 0.6:
        board = space.place_at_wall(zone, "sideboard", (float(rng.uniform(1.2, 1.7)), 0.42, 0.8), ahead=0.5)
        if board is not None:
            _place_on(space, board, "table_lamp", (0.26, 0.26, 0.42), -0.4)
            _place_on(space, board, "vase", (0.24, 0.24, 0.45), 0.35)
    if _area(zone) > 26 and not any(other.kind == "dining" for other in space.room.zones):
        _dining_table(space, zone, 4)
    space.place_at_wall(zone, "floor_lamp", (0.4, 0.4, 1.65), ahead=0.0, corner=1.5)
    _plants(space, zone, 2)
    _lamp(space, zone, rng.random() < 0.6)


def _television(space: Space, zone: Zone) -> Item | None:
    width = float(space.rng.uniform(1.2, 1.8))
    stand = space.place_at_wall(zone, "sideboard", (width, 0.42, 0.5), ahead=2.2, corner=-0.8)
    if stand is not None:
        wide = min(width - 0.1, float(space.rng.uniform(0.9, 1.35)))
        _place_on(space, stand, "television", (wide, 0.2, wide * 0.6), 0.0, -0.04)
    return stand


def _sofa(space: Space, stand: Item) -> None:
    """A sofa that faces the television, a low table on a rug between them, and armchairs."""
    rng = space.rng
    width = float(rng.uniform(1.8, 2.3))
    style, seat = space.style(), None
    for far, wide in ((3.1, width), (2.7, width), (2.5, 1.7), (3.5, width), (2.3, 1.6)):
        x, y = stand.beside(0.0, far)
        seat = space.try_place("sofa", (wide, 0.9, 0.84), x, y, stand.yaw + np.pi, style=style)
        if seat is not None:
            break
    if seat is None:
        return
    x, y = seat.beside(0.0, 1.05)
    low = space.try_place("table", (float(rng.uniform(0.9, 1.2)), 0.55, 0.42), x, y, seat.yaw)
    if low is not None:
        _place_on(space, low, "fruit" if rng.random() < 0.5 else "vase", (0.28, 0.28, 0.3), -0.2)
        _place_on(space, low, "books", (0.26, 0.2, 0.09), 0.22, turn=0.3)
        _rug(space, *seat.beside(0.0, 1.0), seat.yaw, 2.2, 1.6)
    for side in (-1, 1):
        x, y = seat.beside(side * (seat.size[0] / 2 + 0.45), 1.15)
        if rng.random() < 0.65:
            space.try_place("armchair", (0.8, 0.82, 0.82), x, y, seat.yaw + side * np.pi / 2, style=style)
        elif rng.random() < 0.5:
            x, y = seat.beside(side * (seat.size[0] / 2 + 0.3), 0.0)
            end = space.try_place("nightstand", (0.42, 0.42, 0.5), x, y, seat.yaw)
            if end is not None:
                _place_on(space, end, "table_lamp", (0.26, 0.26, 0.42))


def _dining_table(space: Space, zone: Zone, seats: int) -> bool:
    """A table with chairs and tableware."""
    rng = space.rng
    square = rng.random() < 0.35
    width, depth = (1.05, 1.05) if square else ((1.5, 0.9) if seats <= 4 else (1.9, 0.95))
    if seats <= 2:
        width, depth = 0.8, 0.8
    for shrink in (1.0, 0.8):
        place = space.free_middle(zone, width * shrink + 1.1, depth + 1.1)
        if place is not None:
            break
    else:
        return False
    x, y, yaw = place
    width *= shrink
    table = space.try_place("table", (width, depth, 0.74), x, y, yaw)
    if table is None:
        return False
    style, size = space.style(), (0.44, 0.48, float(rng.uniform(0.86, 0.98)))
    per_side = 1 if width < 1.2 else (2 if width < 1.8 else 3)
    spots = [
        (u, s * (depth / 2 + 0.15), 0.0 if s < 0 else np.pi)
        for s in (-1, 1)
        for u in (np.arange(per_side) - (per_side - 1) / 2) * 0.58
    ]
    if square or seats > 4:
        spots += [(s * (width / 2 + 0.15), 0.0, np.pi / 2 * s) for s in (-1, 1)]
    for u, v, turn in spots:
        a, b = table.beside(u, v)
        space.try_place("chair", size, a, b, yaw + turn, ignore=[table.rect], style=style)
    _place_on(space, table, "tableware", (width, depth, 0.14))
    if rng.random() < 0.4:
        _rug(space, x, y, yaw, width + 1.2, depth + 1.2)
    return True


def _dining(space: Space, zone: Zone) -> None:
    _dining_table(space, zone, 6 if _area(zone) > 13 else 4)
    board = space.place_at_wall(zone, "sideboard", (1.4, 0.42, 0.85), ahead=0.5)
    if board is not None:
        _place_on(space, board, "vase", (0.26, 0.26, 0.5), 0.3)
        _place_on(space, board, "fruit", (0.3, 0.3, 0.16), -0.3)
    space.place_at_wall(zone, "bookshelf", (0.9, 0.3, 1.9), corner=0.7)
    _plants(space, zone, 2)
    _lamp(space, zone, True)


def _kitchen(space: Space, zone: Zone) -> None:
    rng = space.rng
    runs = _counter(space, zone, ["fridge", "counter", "stove", "counter", "kitchen_sink", "counter", "counter"])
    if runs and rng.random() < 0.7:
        _counter(space, zone, ["counter", "counter", "counter"])
    if _area(zone) > 8.5 and not any(other.kind == "dining" for other in space.room.zones):
        _dining_table(space, zone, 4 if _area(zone) > 12 else 2)
    space.place_at_wall(zone, "bin", (0.3, 0.3, 0.6), ahead=0.1, corner=1.0)
    _plants(space, zone, 1)
    _lamp(space, zone, rng.random() < 0.5)


def _counter(space: Space, zone: Zone, units: list[str]) -> bool:
    """Kitchen units side by side along the wall with the most space, with cupboards above them."""
    module, depth, height = 0.6, 0.6, 0.9
    options: dict[Wall, list[tuple[float, float, float, Wall, float]]] = {}
    for place in space.wall_spots(zone, (module, depth, height), ahead=0.75):
        options.setdefault(place[3], []).append(place)
    best: tuple[int, Wall, list[float]] | None = None
    for wall, places in options.items():
        along = [place[1] if wall.axis == 0 else place[0] for place in places]
        for start in along[:8]:
            # Units are placed at multiples of their width from `start`.
            lattice = [start]
            while min(abs(u - lattice[-1] - module) for u in along) < 0.02 and len(lattice) < len(units):
                lattice.append(lattice[-1] + module)
            if best is None or len(lattice) > best[0]:
                best = (len(lattice), wall, lattice)
    if best is None or best[0] < 2:
        return False
    count, wall, lattice = best
    if count < 5 and "stove" in units:
        units = ["stove", "kitchen_sink", "counter", "fridge"] if count > 2 else ["stove", "kitchen_sink"]
    units = units[:count] if space.rng.random() < 0.5 else units[:count][::-1]
    style, placed = space.style(), []
    for unit, u in zip(units, lattice, strict=False):
        size = (0.6, 0.6, height)
        if unit == "fridge":
            size = (0.6, 0.64, 1.8)
            if any(o.low - 0.3 < u < o.high + 0.3 for o in space.windows(wall)):
                unit, size = "counter", (0.6, 0.6, height)
        off = wall.at + wall.sign * (size[1] / 2 + 0.005)
        x, y = (off, u) if wall.axis == 0 else (u, off)
        item = space.try_place(unit, size, x, y, facing(wall), style=style)
        if item is None:
            continue
        placed.append(item)
        if unit == "stove":
            space.hang("hood", (0.6, 0.45, space.plan.height - 1.66), 1.65, wall, u)
        elif unit != "fridge":
            space.hang("wall_cupboard", (0.595, 0.34, 0.62), 1.52, wall, u, style=style, gap=0.0)
        if unit == "counter" and space.rng.random() < 0.6:
            decoration, size = (
                ("fruit", (0.28, 0.28, 0.16)),
                ("books", (0.24, 0.18, 0.12)),
                ("vase", (0.2, 0.2, 0.4)),
            )[int(space.rng.integers(3))]
            _place_on(space, item, decoration, size)
    return len(placed) > 1


def _bedroom(space: Space, zone: Zone) -> None:
    rng = space.rng
    area = _area(zone)
    width = float(rng.choice([1.4, 1.6, 1.8] if area > 10.5 else [0.9, 0.9, 1.4]))
    bed = None
    for wide, room in ((width, 1.0), (width, 0.5), (0.9, 0.0)):
        bed = space.place_at_wall(
            zone, "bed", (wide, 2.05, float(rng.uniform(0.9, 1.15))), ahead=0.45, corner=-0.6 if room else 1.0
        )
        if bed is not None:
            break
    if bed is not None:
        style, lamp = space.style(), space.style()
        for side in (-1, 1):
            x, y = bed.beside(side * (bed.size[0] / 2 + 0.26), -bed.size[1] / 2 + 0.2)
            stand = space.try_place("nightstand", (0.44, 0.38, 0.5), x, y, bed.yaw, style=style)
            if stand is not None:
                top = stand.beside(0.0, 0.0)
                space.put("table_lamp", (0.24, 0.24, 0.4), *top, stand.yaw, z=0.501, solid=False, style=lamp)
        if rng.random() < 0.6:
            _rug(space, *bed.beside(0.0, 0.75), bed.yaw, bed.size[0] + 0.9, 1.5)
    space.place_at_wall(zone, "wardrobe", (float(rng.choice([1.0, 1.5, 1.9])), 0.6, 2.08), ahead=0.6, corner=0.6)
    if rng.random() < 0.7:
        chest = space.place_at_wall(zone, "dresser", (float(rng.choice([0.8, 1.2])), 0.45, 0.85), ahead=0.5)
        if chest is not None:
            _place_on(space, chest, "books", (0.26, 0.2, 0.1), -0.2)
            _place_on(space, chest, "vase", (0.2, 0.2, 0.38), 0.2)
    if area > 11 and rng.random() < 0.6:
        _desk(space, zone)
    if area > 13 and rng.random() < 0.5:
        space.place_at_wall(zone, "armchair", (0.78, 0.8, 0.8), ahead=0.3, corner=1.0)
    if rng.random() < 0.5:
        space.place_at_wall(zone, "bookshelf", (0.8, 0.28, 1.7), corner=0.5)
    _plants(space, zone, 1)
    _lamp(space, zone, rng.random() < 0.5)


def _desk(space: Space, zone: Zone) -> bool:
    rng = space.rng
    desk = space.place_at_wall(zone, "desk", (float(rng.uniform(1.15, 1.6)), 0.65, 0.74), ahead=0.75)
    if desk is None:
        return False
    _place_on(space, desk, "laptop", (0.34, 0.36, 0.25), -0.15)
    _place_on(space, desk, "table_lamp", (0.22, 0.22, 0.42), 0.4, -0.1)
    _place_on(space, desk, "books", (0.26, 0.2, 0.12), -desk.size[0] / 2 + 0.18, -0.1)
    x, y = desk.beside(-0.15, desk.size[1] / 2 + 0.2)
    space.try_place("office_chair", (0.6, 0.6, 1.0), x, y, desk.yaw + np.pi, ignore=[desk.rect])
    return True


def _study(space: Space, zone: Zone) -> None:
    rng = space.rng
    _desk(space, zone)
    for _ in range(3):
        space.place_at_wall(zone, "bookshelf", (float(rng.choice([0.8, 1.0, 1.3])), 0.3, 2.05), corner=0.5)
    if rng.random() < 0.6:
        space.place_at_wall(zone, "armchair", (0.8, 0.82, 0.85), ahead=0.4, corner=1.0)
        space.place_at_wall(zone, "floor_lamp", (0.36, 0.36, 1.6), ahead=0.0, corner=1.0)
    x0, y0, x1, y1 = zone.rect
    _rug(space, (x0 + x1) / 2, (y0 + y1) / 2, 0.0, min(2.0, x1 - x0 - 0.8), min(1.5, y1 - y0 - 0.8))
    _plants(space, zone, 1)
    _lamp(space, zone, rng.random() < 0.5)


def _bath(space: Space, zone: Zone) -> None:
    rng = space.rng
    corner: list[tuple] = [("shower", (0.88, 0.88, 2.05), 0.3), ("shower", (0.8, 0.8, 2.05), 0.1)]
    if rng.random() < 0.6:
        corner.insert(0, ("bathtub", (1.65, 0.74, 0.56), 0.4))
    for kind, size, ahead in corner:
        if space.place_at_wall(zone, kind, size, ahead=ahead, corner=1.5):
            break
    space.place_at_wall(zone, "toilet", (0.38, 0.66, 0.8), ahead=0.35, gap=0.12)
    basin = None
    for wide in (float(rng.choice([0.7, 0.9, 1.1])), 0.55):
        basin = basin or space.place_at_wall(zone, "basin", (wide, 0.46, 0.85), ahead=0.4, gap=0.08)
    if basin is not None:
        _mirror_over(space, basin, min(0.8, basin.size[0] - 0.05), 0.75, 1.15)
    if rng.random() < 0.5:
        space.place_at_wall(zone, "washing_machine", (0.6, 0.6, 0.85), ahead=0.4, corner=0.6)
    space.place_at_wall(zone, "basket", (0.38, 0.38, 0.5), ahead=0.0, corner=1.0)
    for _ in range(3):
        wall = space.walls[int(rng.integers(len(space.walls)))]
        if space.hang("towel_rail", (0.5, 0.09, 0.75), 0.85, wall, float(rng.uniform(wall.low, wall.high)), solid=True):
            break
    x0, y0, x1, y1 = zone.rect
    _rug(space, (x0 + x1) / 2, (y0 + y1) / 2, 0.0, 0.75, 0.5)
    _lamp(space, zone, False)


def _mirror_over(space: Space, item: Item, width: float, height: float, bottom: float) -> None:
    back = item.beside(0.0, -item.size[1] / 2)
    for wall in space.walls:
        across, along = (back[0], back[1]) if wall.axis == 0 else (back[1], back[0])
        if abs(across - wall.at) < 0.05 and wall.low < along < wall.high:
            space.hang("mirror", (width, 0.03, height), bottom, wall, along)


def _circulation(space: Space, zone: Zone) -> None:
    rng = space.rng
    x0, y0, x1, y1 = zone.rect
    wide, long = sorted((x1 - x0, y1 - y0))
    depth = 0.3 if wide < 1.6 else 0.38
    chest = space.place_at_wall(zone, "sideboard", (float(rng.uniform(0.7, 1.0)), depth, 0.8), ahead=0.6)
    if chest is not None:
        _place_on(space, chest, "vase", (0.2, 0.2, 0.4), 0.2)
        _mirror_over(space, chest, 0.55, 0.8, 1.28)
    if wide > 1.5:
        space.place_at_wall(zone, "coat_rack", (0.44, 0.44, 1.75), ahead=0.2, corner=1.5)
        _plants(space, zone, 1)
    if wide > 2.2:
        space.place_at_wall(zone, "bookshelf", (0.8, 0.28, 1.8), ahead=0.6, corner=0.4)
        space.place_at_wall(zone, "armchair", (0.75, 0.78, 0.8), ahead=0.5, corner=1.0)
    if rng.random() < 0.7:
        _rug(
            space,
            (x0 + x1) / 2,
            (y0 + y1) / 2,
            0.0 if x1 - x0 > y1 - y0 else np.pi / 2,
            min(0.6 * long, 4.0),
            min(0.75, 0.55 * wide),
        )
    for part in range(max(1, int(long / 4))):
        t = (part + 0.5) / max(1, int(long / 4))
        x, y = (x0 + t * (x1 - x0), (y0 + y1) / 2) if x1 - x0 > y1 - y0 else ((x0 + x1) / 2, y0 + t * (y1 - y0))
        space.put("flush_lamp", (0.32, 0.32, 0.1), x, y, 0.0, z=space.plan.height - 0.1, solid=False)


def _storage(space: Space, zone: Zone) -> None:
    rng = space.rng
    for _ in range(3):
        space.place_at_wall(
            zone, "storage_shelf", (float(rng.choice([0.8, 1.0, 1.3])), 0.4, 1.9), ahead=0.4, corner=0.6
        )
    if rng.random() < 0.6:
        space.place_at_wall(zone, "washing_machine", (0.6, 0.6, 0.85), ahead=0.5, corner=0.6)
    space.place_at_wall(zone, "basket", (0.4, 0.4, 0.55), ahead=0.1, corner=1.0)
    space.place_at_wall(zone, "bin", (0.3, 0.3, 0.6), ahead=0.1, corner=1.0)
    _lamp(space, zone, False)


_ARRANGE = {
    "living": _living,
    "dining": _dining,
    "kitchen": _kitchen,
    "bedroom": _bedroom,
    "study": _study,
    "bath": _bath,
    "hall": _circulation,
    "corridor": _circulation,
    "storage": _storage,
}
