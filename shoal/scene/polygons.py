"""Faces of any number of corners, cut into triangles."""

import numpy as np

MANY = 2000
"""Corners. Ears are looked for in quadratic time, so larger polygons are cut as if they were convex."""


def triangulate(corners: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which corners form triangles: int64 [T, 3] into the corners, and int64 [T], the face each comes from.

    `corners`, float64 [C, 3], are the positions face after face; `counts`, int64 [F], how many each face has. Convex
    faces become fans, others lose one ear after the other. Faces of fewer than three corners vanish.
    """
    counts = np.asarray(counts, dtype=np.int64)
    starts = np.cumsum(counts) - counts
    if len(counts) and (counts == 3).all():
        return np.arange(3 * len(counts)).reshape(-1, 3), np.arange(len(counts))
    picks, faces = [np.zeros((0, 3), np.int64)], [np.zeros(0, np.int64)]
    for count in np.unique(counts[counts >= 3]):
        which = np.flatnonzero(counts == count)
        first = starts[which]
        fan = np.stack([np.zeros(count - 2, np.int64), np.arange(1, count - 1), np.arange(2, count)], 1)
        cut = np.broadcast_to(fan, (len(which), count - 2, 3)).copy()
        if 3 < count <= MANY:
            turns = _turns(corners[first[:, None] + np.arange(count)])
            dents = np.flatnonzero((turns < -1e-9 * np.abs(turns).max(1, keepdims=True)).any(1))
            if count == 4:  # a fan from the dent is right, and there are many
                cut[dents] = (fan + turns[dents].argmin(1)[:, None, None]) % 4
            else:
                for i in dents:
                    cut[i] = _ears(corners[first[i] : first[i] + count])
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


def _ears(polygon: np.ndarray) -> np.ndarray:
    """int64 [N - 2, 3]: the triangles of one polygon [N, 3] that is not convex."""
    normal = _normal(polygon)
    drop = int(np.abs(normal).argmax())  # look along the axis that shows most of it
    keep = [(1, 2), (2, 0), (0, 1)][drop]
    flat = polygon[:, keep] * ([1.0, 1.0] if normal[drop] > 0 else [1.0, -1.0])
    left = list(range(len(polygon)))
    triangles = []
    while len(left) > 3:
        points = flat[left]
        before, after = np.roll(points, 1, 0), np.roll(points, -1, 0)
        turns = _cross(points - before, after - points)
        for i in np.argsort(-turns, kind="stable") if len(left) < 64 else np.flatnonzero(turns > 0):
            if turns[i] <= 0:
                continue
            a, b, c = before[i], points[i], after[i]
            inside = (
                (_cross(b - a, points - a) >= 0) & (_cross(c - b, points - b) >= 0) & (_cross(a - c, points - c) >= 0)
            )
            # The ear's own corners, and others at the same place, do not stand in its way.
            inside &= ~((points == a).all(1) | (points == b).all(1) | (points == c).all(1))
            if not inside.any():
                break
        else:
            i = int(np.argmax(turns))  # it crosses itself: any cut is as good as another
        triangles.append((left[i - 1], left[i], left[(i + 1) % len(left)]))
        del left[i]
    triangles.append(tuple(left))
    return np.array(triangles, dtype=np.int64)


def _cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
