"""Triangulation of polygons with any number of corners."""

import numpy as np

from shoal.core.errors import ShoalError

MAX_EAR_CORNERS = 2000
"""Corners. Ear clipping takes quadratic time, so larger polygons are triangulated as if they were convex."""

MAX_EAR_WORK = 2 * 10**8
"""Sum of squared corner counts of all concave polygons of a file; ear clipping then takes about 20 s."""

EAR_WORK = 4000
"""Fixed cost of one clipping step, in the same unit, for all polygons of equal corner count together."""

BLOCK = 2**14
"""Corners processed at a time, so that their arrays stay in the CPU cache."""


def triangulate(name: str, corners: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Triangulate faces: convex ones as fans, concave ones by ear clipping.

    Args:
        name: The file's name, for the error message.
        corners: float64 [C, 3], meters, the corner positions of all faces, one face after another.
        counts: int64 [F], the number of corners of each face; faces of fewer than three give no triangle.

    Returns:
        int64 [T, 3], indices into `corners`, and int64 [T], the face of each triangle.

    Raises:
        ShoalError: If the concave faces would take minutes.
    """
    counts = np.asarray(counts, dtype=np.int64)
    starts = np.cumsum(counts) - counts
    if len(counts) and (counts == 3).all():
        return np.arange(3 * len(counts)).reshape(-1, 3), np.arange(len(counts))
    parts, faces = [np.zeros((0, 3), np.int64)], [np.zeros(0, np.int64)]
    work = 0
    by_count = np.argsort(counts, kind="stable")
    sizes, first_of = np.unique(counts[by_count], return_index=True)
    for count, which in zip(sizes.tolist(), np.split(by_count, first_of[1:]), strict=True):
        if count < 3:
            continue
        first = starts[which]
        fan = np.stack([np.zeros(count - 2, np.int64), np.arange(1, count - 1), np.arange(2, count)], 1)
        cut = np.broadcast_to(fan, (len(which), count - 2, 3)).copy()
        if 3 < count <= MAX_EAR_CORNERS:
            polygons = corners[first[:, None] + np.arange(count)]
            turns = _corner_turns(polygons)
            concave = np.flatnonzero((turns < -1e-9 * np.abs(turns).max(1, keepdims=True)).any(1))
            if count == 4:  # quads are common; a fan from the concave corner is exact
                cut[concave] = (fan + turns[concave].argmin(1)[:, None, None]) % 4
            elif len(concave):
                work += count * (count * len(concave) + EAR_WORK)
                if work > MAX_EAR_WORK:
                    raise ShoalError(
                        f"{name} has too many concave faces with many corners (such as {count:,}) to triangulate; "
                        "triangulate it in the program that exported it."
                    )
                for block in np.array_split(concave, -(-count * len(concave) // BLOCK)):
                    cut[block] = _clip_ears(polygons[block])
        parts.append((cut + first[:, None, None]).reshape(-1, 3))
        faces.append(np.repeat(which, count - 2))
    face = np.concatenate(faces)
    order = np.argsort(face, kind="stable")
    return np.concatenate(parts)[order], face[order]


def _normal(polygons: np.ndarray) -> np.ndarray:
    """Newell normals [..., 3] of polygons [..., N, 3]: sums of cross products, with length twice the area."""
    around = polygons - polygons[..., :1, :]
    return np.cross(around, np.roll(around, -1, -2)).sum(-2)


def _corner_turns(polygons: np.ndarray) -> np.ndarray:
    """[F, N]: signed turn of each corner of polygons [F, N, 3], relative to their normal; negative if concave."""
    edges = np.roll(polygons, -1, 1) - polygons
    return (np.cross(np.roll(edges, 1, 1), edges) * _normal(polygons)[:, None]).sum(-1)


def _clip_ears(polygons: np.ndarray) -> np.ndarray:
    """int64 [P, N - 2, 3]: the triangles of concave polygons [P, N, 3], by ear clipping in 2-D."""
    total, count = polygons.shape[:2]
    normal = _normal(polygons)
    drop = np.abs(normal).argmax(1)  # project along the axis of the largest area
    keep = np.array([(1, 2), (2, 0), (0, 1)])[drop]
    x, y = np.take_along_axis(polygons, keep[:, None], 2).transpose(2, 0, 1).copy()
    y *= np.where(normal[np.arange(total), drop] > 0, 1.0, -1.0)[:, None]

    rows = np.arange(total)
    remaining = np.ones((total, count), bool)
    before, after = (np.tile(np.roll(np.arange(count), shift), (total, 1)) for shift in (1, -1))
    sides = np.stack([np.roll(x, 1, 1), np.roll(y, 1, 1), x, y, np.roll(x, -1, 1), np.roll(y, -1, 1)])
    """[6, P, N]: the triangle of each corner and its two neighbors, as x and y of the three points."""
    turns = np.empty((total, count))
    inside = np.empty((total, count), np.int64)
    """[P, N]: the number of remaining corners inside that triangle."""

    def update(at: np.ndarray) -> None:
        """Compute turn and inside count of one corner per polygon."""
        triangle = sides[:, rows, at]
        ax, ay, bx, by, cx, cy = triangle
        turns[rows, at] = (bx - ax) * (cy - by) - (by - ay) * (cx - bx)
        inside[rows, at] = (_within(x, y, triangle[:, :, None]) & remaining).sum(1)

    for corner in range(count):
        update(np.full(total, corner))
    triangles = np.empty((total, count - 2, 3), np.int64)
    for step in range(count - 3):
        ears = remaining & (turns > 0) & (inside == 0)
        found = ears.any(1)
        # A polygon without an ear intersects itself: any triangulation is valid.
        sharpest = np.where(np.where(found[:, None], ears, remaining), turns, -np.inf).argmax(1)
        at = np.where(found & (count - step >= 64), ears.argmax(1), sharpest)
        one, two = before[rows, at], after[rows, at]
        triangles[:, step] = np.stack([one, at, two], 1)
        remaining[rows, at] = False
        inside -= _within(x[rows, at][:, None], y[rows, at][:, None], sides)
        after[rows, one], before[rows, two] = two, one
        sides[4:, rows, one] = sides[2:4, rows, two]
        sides[:2, rows, two] = sides[2:4, rows, one]
        update(one)
        update(two)
    triangles[:, -1] = np.nonzero(remaining)[1].reshape(total, 3)
    return triangles


def _within(x: np.ndarray, y: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """bool [P, N]: which points lie in triangles [6, ...], except points equal to a corner, which block no ear."""
    ax, ay, bx, by, cx, cy = triangles
    inside = (bx - ax) * (y - ay) - (by - ay) * (x - ax) >= 0
    inside &= (cx - bx) * (y - by) - (cy - by) * (x - bx) >= 0
    inside &= (ax - cx) * (y - cy) - (ay - cy) * (x - cx) >= 0
    found = np.nonzero(inside)  # few
    x, y, ax, ay, bx, by, cx, cy = (np.broadcast_to(v, inside.shape)[found] for v in (x, y, *triangles))
    inside[found] = ~(((x == ax) & (y == ay)) | ((x == bx) & (y == by)) | ((x == cx) & (y == cy)))
    return inside
