"""Scene memory: scenes within a limit, and reuse of freed gaps."""

import numpy as np
import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.render.renderer import Renderer
from shoal.scene.memory import SceneMemory
from shoal.scene.pack import pack_scene
from tests.scene.shapes import box, make_scene, soup


def room(half: float, extra: int = 0):
    corners = box((-half,) * 3, (half,) * 3)
    if extra:
        corners = np.concatenate([corners, soup(extra) + np.float32(100)])
    return pack_scene(make_scene(corners, name=f"room {half}"))


def test_gaps_are_reused_and_neighbors_stay_intact():
    small, large = [room(k) for k in (1.0, 2.0, 3.0)], room(4.0, extra=40)
    memory = SceneMemory(sum(p.nbytes for p in small) + large.nbytes // 2, 4, "cpu")
    for row, scene in enumerate(small):
        memory.put(row, scene)
    assert memory.find_gap(large) is None
    with pytest.raises(ShoalError, match=r"room 4\.0 needs .* MB"):
        memory.put(3, large)
    assert memory.scene(3) is None
    memory.remove(1)
    assert memory.find_gap(small[0]) == len(small[0].words), "not the lowest gap that fits"
    memory.put(3, room(5.0))
    depth = Renderer(memory, 3, (3, 3), ["depth"]).render(scene=torch.tensor([0, 2, 3]))["depth"][:, 1, 1, 0]
    assert depth.tolist() == [1.0, 3.0, 5.0]


def test_rows_return_their_scenes():
    scenes = [room(1.0), room(2.0)]
    memory = SceneMemory.holding(scenes, "cpu")
    assert memory.used == memory.limit == sum(scene.nbytes for scene in scenes)
    assert [memory.scene(row).name for row in range(2)] == ["room 1.0", "room 2.0"]
    with pytest.raises(ShoalError, match=r"holds room 1\.0; remove that scene first"):
        memory.reserve(0, scenes[1])
    memory.remove(0)
    with pytest.raises(ShoalError, match="is empty"):
        memory.slot(0)


def test_a_packed_scene_is_checked_first():
    broken = make_scene(soup(3))
    broken.triangles[1, 1] = 99
    with pytest.raises(ShoalError, match="out of range"):
        pack_scene(broken)
    flat = np.repeat(np.array([[[0, 0, 0], [1, 1, 1], [2, 2, 2]]], np.float32), 3, 0)
    with pytest.raises(ShoalError, match="none of its 3 triangles has an area"):
        pack_scene(make_scene(flat))


def test_large_textures_are_halved():
    texture = np.zeros((300, 500, 4), np.uint8)
    texture[..., 0] = 200
    from tests.scene.shapes import textured_wall

    whole, halved = (pack_scene(textured_wall(texture), max_texture_size=largest) for largest in (1024, 128))
    assert halved.nbytes < whole.nbytes / 10
    image = Renderer(halved, 1, (8, 8), ["rgb"], light=False).render()["rgb"]
    assert image[0, 4, 4].tolist() == [200, 0, 0]
