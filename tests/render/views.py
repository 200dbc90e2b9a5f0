"""Camera poses and their rays."""

import math

import numpy as np
import torch

from shoal.render.renderer import heading


def level_pose(x=0.0, y=0.0, z=0.0, yaw=0.0, pitch=0.0):
    """One camera pose [1, 7]."""
    return torch.cat([torch.tensor([x, y, z]), heading(torch.tensor(yaw), pitch)])[None]


def rays(pose, width, height, hfov=90.0):
    """Directions [height, width, 3] by definition: through the pixel centers of a plane at distance 1."""
    wide = math.tan(math.radians(hfov) / 2)
    left = wide * (1 - (np.arange(width) + 0.5) * 2 / width)
    up = wide * height / width * (1 - (np.arange(height) + 0.5) * 2 / height)
    local = np.stack(np.broadcast_arrays(1.0, left[None, :], up[:, None]), -1)
    x, y, z, w = pose[3:].double().numpy()
    turn = np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )
    return local @ turn.T
