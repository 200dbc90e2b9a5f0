"""Faces of any number of corners, cut into triangles."""

import numpy as np

from shoal.core.errors import ShoalError

MANY = 2000
"""Corners. Ears are looked for in quadratic time, so larger polygons are cut as if they were convex."""

LARGEST_WORK = 2 * 10**8
"""Sum of the squared numbers of corners of the polygons whose ears are looked for, about 20 s."""

STEP_WORK = 4000
"""What an ear costs on top, for all polygons with as many corners together."""

BLOCK = 2**14
"""Corners that are worked on at a time, so that their arrays stay in the cache."""


def triangulate(name: str, corners: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which corners form triangles: int64 [T, 3] into the corners, and int64 [T], the face each comes from.

    `corners`, float64 [C, 3], are the positions face after face; `counts`, int64 [F], how many each face has. Convex
    faces become fans, others lose one ear after the other. Faces of fewer than three corners vanish. `name` is the
    file's, for the refusal of faces that would take minutes.
    """
    counts = np.asarray(counts, dtype=np.int64)
    starts = np.cumsum(counts) - counts
    if len(counts) and (counts == 3).all():
        return np.arange(3 * len(counts)).reshape(-1, 3), np.arange(len(counts))
    picks, faces = [np.zeros((0, 3), np.int64)], [np.zeros(0, np.int64)]
    work = 0
    by_count = np.argsort(counts, kind="stable")
    numbers, first_of = np.unique(counts[by_count], return_index=True)
    for count, which in zip(numbers.tolist(), np.split(by_count, first_of[1:]), strict=True):
        if count < 3:
            continue
        first = starts[which]
        fan = np.stack([np.zeros(count - 2, np.int64), np.arange(1, count - 1), np.arange(2, count)], 1)
        cut = np.broadcast_to(fan, (len(which), count - 2, 3)).copy()
        if 3 < count <= MANY:
            polygons = corners[first[:, None] + np.arange(count)]
            turns = _turns(polygons)
            dents = np.flatnonzero((turns < -1e-9 * np.abs(turns).max(1, keepdims=True)).any(1))
            if count == 4:  # a fan from the dent is right, and there are many
                cut[dents] = (fan + turns[dents].argmin(1)[:, None, None]) % 4
            elif len(dents):
                work += count * (count * len(dents) + STEP_WORK)
                if work > LARGEST_WORK:
                    raise ShoalError(
                        f"{name} has too many faces with dents and many corners, such as {count:,}, to cut them into "
                        "triangles; triangulate it in the program that it comes from."
                    )
                for some in np.array_split(dents, -(-count * len(dents) // BLOCK)):
                    cut[some] = _ears(polygons[some])
        picks.append((cut + first[:, None, None]).reshape(-1, 3))
        faces.append(np.repeat(which, count - 2))
    face = np.concatenate(faces)
    order = np.argsort(face, kind="stable")
    return np.concatenate(picks)[order], face[order]


def _normal(polygons: np.ndarray) -> np.ndarray:
    """Newell's: the sum of the corners' cross products, twice the area long. [..., N, 3] to [..., 3]."""
    around = polygons - polygons[..., :1, :]
    return np.cross(around, np.roll(around, -1, -2)).sum(-2)


def _turns(polygons: np.ndarray) -> np.ndarray:
    """[F, N]: how much each corner of [F, N, 3] turns the way the whole polygon does; negative in a dent."""
    edges = np.roll(polygons, -1, 1) - polygons
    return (np.cross(np.roll(edges, 1, 1), edges) * _normal(polygons)[:, None]).sum(-1)


def _ears(polygons: np.ndarray) -> np.ndarray:
    """int64 [P, N - 2, 3]: the triangles of polygons [P, N, 3] that are not convex."""
    many, count = polygons.shape[:2]
    normal = _normal(polygons)
    drop = np.abs(normal).argmax(1)  # look along the axis that shows most of it
    keep = np.array([(1, 2), (2, 0), (0, 1)])[drop]
    x, y = np.take_along_axis(polygons, keep[:, None], 2).transpose(2, 0, 1).copy()
    y *= np.where(normal[np.arange(many), drop] > 0, 1.0, -1.0)[:, None]

    rows = np.arange(many)
    left = np.ones((many, count), bool)
    before, after = (np.tile(np.roll(np.arange(count), shift), (many, 1)) for shift in (1, -1))
    sides = np.stack([np.roll(x, 1, 1), np.roll(y, 1, 1), x, y, np.roll(x, -1, 1), np.roll(y, -1, 1)])
    """[6, P, N]: the triangle of each corner with its two neighbors."""
    turns = np.empty((many, count))
    inside = np.empty((many, count), np.int64)
    """How many of the corners that are left lie in that triangle."""

    def look(at: np.ndarray) -> None:
        """Turn and corners inside, of one corner of each polygon."""
        triangle = sides[:, rows, at]
        ax, ay, bx, by, cx, cy = triangle
        turns[rows, at] = (bx - ax) * (cy - by) - (by - ay) * (cx - bx)
        inside[rows, at] = (_within(x, y, triangle[:, :, None]) & left).sum(1)

    for corner in range(count):
        look(np.full(many, corner))
    triangles = np.empty((many, count - 2, 3), np.int64)
    for step in range(count - 3):
        ears = left & (turns > 0) & (inside == 0)
        found = ears.any(1)
        # Where there is none, the polygon crosses itself: any cut is as good as another.
        sharpest = np.where(np.where(found[:, None], ears, left), turns, -np.inf).argmax(1)
        at = np.where(found & (count - step >= 64), ears.argmax(1), sharpest)
        one, two = before[rows, at], after[rows, at]
        triangles[:, step] = np.stack([one, at, two], 1)
        left[rows, at] = False
        inside -= _within(x[rows, at][:, None], y[rows, at][:, None], sides)
        after[rows, one], before[rows, two] = two, one
        sides[4:, rows, one] = sides[2:4, rows, two]
        sides[:2, rows, two] = sides[2:4, rows, one]
        look(one)
        look(two)
    triangles[:, -1] = np.nonzero(left)[1].reshape(many, 3)
    return triangles


def _within(x: np.ndarray, y: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """bool [P, N]: which points lie in triangles [6, ...]; not those at the place of a corner, which block no ear."""
    ax, ay, bx, by, cx, cy = triangles
    inside = (bx - ax) * (y - ay) - (by - ay) * (x - ax) >= 0
    inside &= (cx - bx) * (y - by) - (cy - by) * (x - bx) >= 0
    inside &= (ax - cx) * (y - cy) - (ay - cy) * (x - cx) >= 0
    found = np.nonzero(inside)  # few
    x, y, ax, ay, bx, by, cx, cy = (np.broadcast_to(v, inside.shape)[found] for v in (x, y, *triangles))
    inside[found] = ~(((x == ax) & (y == ay)) | ((x == bx) & (y == by)) | ((x == cx) & (y == cy)))
    return inside
