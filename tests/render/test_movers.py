"""Moving objects: each shape against an independent answer, visibility by env."""

import math

import numpy as np
import pytest
import torch

from shoal.render.movers import BOX, CAPSULE, CYLINDER, MESH, NONE, SPHERE, Movers
from shoal.render.renderer import Renderer
from tests.render.views import level_pose, rays
from tests.scene.shapes import box, make_scene, soup

FAR_ROOM = make_scene(box((-50, -50, -50), (50, 50, 50)))


def one_thing(kind, position, size, rotation=(0, 0, 0, 1), scenes=FAR_ROOM, outputs=("depth", "normal")):
    movers = Movers.make(1, 1, "cpu")
    movers.kind.fill_(kind)
    movers.position[:] = torch.tensor(position)
    movers.size[:] = torch.tensor(size)
    movers.rotation[:] = torch.nn.functional.normalize(torch.tensor(rotation, dtype=torch.float32), dim=0)
    movers.semantic.fill_(7)
    movers.instance.fill_(9)
    return Renderer(scenes, 1, (48, 48), outputs, movers=movers)


def turned(rotation, points):
    x, y, z, w = np.array(rotation) / np.linalg.norm(rotation)
    axis = np.array([x, y, z])
    return points + 2 * np.cross(axis, np.cross(axis, points) + w * points)


def inside(kind, size, p):
    """Whether points in a shape's frame are inside it, by definition."""
    a, b, c = size
    x, y, z = np.moveaxis(p, -1, 0)
    if kind == BOX:
        return (abs(x) <= a) & (abs(y) <= b) & (abs(z) <= c)
    if kind == SPHERE:
        return (x / a) ** 2 + (y / b) ** 2 + (z / c) ** 2 <= 1
    if kind == CYLINDER:
        return ((x / a) ** 2 + (y / b) ** 2 <= 1) & (abs(z) <= c)
    return x**2 + y**2 + (z - np.clip(z, -c, c)) ** 2 <= a**2


@pytest.mark.parametrize("kind", [BOX, SPHERE, CYLINDER, CAPSULE])
@pytest.mark.parametrize("rotation", [(0, 0, 0, 1), (0.3, -0.5, 0.2, 0.9), (0, 1, 0, 1)])
def test_shapes_equal_ray_marching(kind, rotation):
    """Each ray is followed in small steps until the shape's definition holds."""
    position, size = (3.0, 0.3, -0.2), (0.7, 0.5, 0.9)
    renderer = one_thing(kind, position, size, rotation)
    images = renderer.render(level_pose())
    depth = images["depth"][0, ..., 0].numpy()
    steps = np.linspace(1.0, 6.0, 2001)
    direction = rays(level_pose()[0], 48, 48)
    points = direction[:, :, None] * steps[None, None, :, None] - np.array(position)
    back = np.array(rotation, float) * np.array([-1, -1, -1, 1])
    within = inside(kind, size, turned(back, points))
    met = within.any(-1)
    first = steps[within.argmax(-1)]
    hit = depth < 40
    assert (met != hit).mean() < 0.01, "outlines differ by more than a few grazing pixels"
    both = met & hit
    assert both.sum() > 50
    assert (
        np.abs(depth[both] - first[both]).max() < 0.005 or np.percentile(np.abs(depth[both] - first[both]), 99) < 0.004
    )
    # The surface positions of neighboring pixels also give the normal.
    normal = images["normal"][0].numpy()
    place = direction * depth[..., None]
    across = np.cross(place[2:, 1:-1] - place[:-2, 1:-1], place[1:-1, 2:] - place[1:-1, :-2])
    across /= np.linalg.norm(across, axis=-1, keepdims=True)
    smooth = both[1:-1, 1:-1] & both[2:, 1:-1] & both[:-2, 1:-1] & both[1:-1, 2:] & both[1:-1, :-2]
    agreement = np.abs((across * normal[1:-1, 1:-1]).sum(-1))[smooth]
    assert np.median(agreement) > 0.999
    assert ((normal * direction).sum(-1)[hit] <= 1e-6).all(), "normals face the camera"


def test_a_mesh_moves_like_its_triangles():
    """A rotated, scaled and shifted mesh gives the same image as a scene that contains the moved triangles."""
    corners = soup(60, 3, spread=0.5, size=0.2)
    rotation, scale, shift = (0.2, 0.4, -0.3, 0.8), (1.5, 0.6, 1.1), (3.0, 0.2, -0.1)
    renderer = one_thing(MESH + 1, shift, scale, rotation, [FAR_ROOM, make_scene(corners)], ("depth", "normal", "rgb"))
    moving = renderer.render(level_pose())
    moved = turned(rotation, corners * np.array(scale)) + np.array(shift)
    fixed = make_scene(np.concatenate([FAR_ROOM.corners, moved.astype(np.float32)]))
    still = Renderer(fixed, 1, (48, 48), ("depth", "normal", "rgb")).render(level_pose())
    near = still["depth"] < 40
    assert near.float().mean() > 0.05
    same = (moving["depth"] - still["depth"]).abs() < 1e-3
    assert same.float().mean() > 0.998
    assert (moving["normal"] - still["normal"]).abs().amax(-1, keepdim=True)[same & near].max() < 2e-3
    assert (moving["rgb"].int() - still["rgb"].int()).abs().amax(-1, keepdim=True)[same].max() <= 1


def test_ids_and_color_of_an_object():
    renderer = one_thing(SPHERE, (2.0, 0.0, 0.0), (0.5, 0.5, 0.5), outputs=("semantic", "instance", "rgb"))
    renderer.movers.color[:] = torch.tensor([1.0, 0.0, 0.0])
    images = renderer.render(level_pose())
    assert images["semantic"][0, 24, 24] == 7
    assert images["instance"][0, 24, 24] == 9
    red, green, blue = images["rgb"][0, 24, 24].tolist()
    assert red > 100
    assert green == blue == 0
    assert images["instance"][0, 0, 0] > 0


def test_objects_are_visible_in_their_env_only_and_move():
    movers = Movers.make(3, 4, "cpu")
    movers.kind[1, 2] = BOX
    movers.position[1, 2] = torch.tensor([2.0, 0.0, 0.0])
    movers.size[1, 2] = 0.5
    renderer = Renderer(FAR_ROOM, 3, (9, 9), ["depth"], movers=movers)
    poses = torch.cat([level_pose()] * 3)
    assert renderer.render(poses)["depth"][:, 4, 4, 0].tolist() == [50.0, 1.5, 50.0]
    movers.position[1, 2, 0] = 5.0
    assert renderer.render(poses)["depth"][:, 4, 4, 0].tolist() == [50.0, 4.5, 50.0]
    movers.kind[1, 2] = NONE
    assert renderer.render(poses)["depth"][:, 4, 4, 0].tolist() == [50.0, 50.0, 50.0]


def test_agents_see_each_other_but_not_themselves():
    """Two agents of one env, each a capsule around its camera, face each other."""
    movers = Movers.make(1, 2, "cpu")
    movers.kind.fill_(CAPSULE)
    movers.position[0] = torch.tensor([[0.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
    movers.size[:] = torch.tensor([0.2, 0.0, 0.5])
    movers.instance[0] = torch.tensor([1, 2])
    renderer = Renderer(FAR_ROOM, 2, (9, 9), ["depth", "instance"], movers=movers)
    renderer.env.zero_()
    renderer.hidden.copy_(torch.arange(2))
    images = renderer.render(torch.cat([level_pose(), level_pose(3.0, yaw=math.pi)]))
    assert images["instance"][:, 4, 4, 0].tolist() == [2, 1]
    np.testing.assert_allclose(images["depth"][:, 4, 4, 0], 2.8, rtol=1e-5)


def test_culling_changes_nothing():
    """Many objects all around: the depth is the minimum over the depths of each object alone."""
    rng = np.random.default_rng(0)
    count = 30
    movers = Movers.make(1, count, "cpu")
    movers.kind[0] = torch.from_numpy(rng.choice([BOX, SPHERE, CYLINDER, CAPSULE], count))
    movers.position[0] = torch.from_numpy(rng.uniform(-4, 4, (count, 3))).float()
    movers.size[0] = torch.from_numpy(rng.uniform(0.1, 0.8, (count, 3))).float()
    poses = torch.cat([level_pose(yaw=y, pitch=p) for y in (0.0, 1.5, 3.0, 4.5) for p in (-1.0, 0.0, 1.2)])
    far_away = (movers.position[0].norm(dim=1) - movers.size[0].norm(dim=1) * 2) > 0.1
    movers.kind[0, ~far_away] = NONE
    assert int((movers.kind > 0).sum()) > 10
    renderer = Renderer(FAR_ROOM, len(poses), (24, 24), ["depth"], movers=movers, hfov=70.0)
    renderer.env.zero_()
    together = renderer.render(poses)["depth"].clone()
    kinds = movers.kind.clone()
    least = torch.full_like(together, 1000.0)
    for k in range(count):
        movers.kind[0] = NONE
        movers.kind[0, k] = kinds[0, k]
        least = torch.minimum(least, renderer.render(poses)["depth"])
    assert torch.equal(together, least)


def test_unknown_kinds_and_envs_show_nothing():
    movers = Movers.make(1, 3, "cpu")
    movers.position[:] = torch.tensor([2.0, 0.0, 0.0])
    movers.kind[0] = torch.tensor([MESH + 5, MESH + 10**6, -3])
    renderer = Renderer(FAR_ROOM, 2, (3, 3), ["depth", "rgb"], movers=movers)
    renderer.env.copy_(torch.tensor([0, 77]))
    assert (renderer.render()["depth"][:, 1, 1, 0] == 50.0).all()


def test_flat_and_mirrored_objects():
    """Flat objects are visible, a negative scale mirrors a mesh, and quaternions are normalized."""
    flat = one_thing(BOX, (3.0, 0.0, 0.0), (0.0, 1.0, 1.0)).render(level_pose())["depth"][0, ..., 0]
    expected = rays(level_pose()[0], 48, 48)[..., 1:] * 3.0
    shown = (np.abs(expected) <= 1.0).all(-1)
    np.testing.assert_allclose(flat.numpy()[shown], 3.0, rtol=1e-4)
    assert (flat.numpy()[~shown] > 40).all()
    half = make_scene(box((0, 0, -1), (1, 2, 1)))
    images = [
        one_thing(MESH + 1, (5.0, 0.0, 0.0), (1.0, side, 1.0), scenes=[FAR_ROOM, half]).render(level_pose())["depth"]
        for side in (1.0, -1.0)
    ]
    assert torch.equal(images[0] < 40, (images[1] < 40).flip(2))
    turned_far = one_thing(BOX, (3.0, 0.0, 0.0), (0.2, 1.0, 0.5), (0.0, 0.0, 0.6, 1.7))
    twice = turned_far.render(level_pose())["depth"].clone()
    turned_far.movers.rotation.mul_(3.0)
    pose = level_pose()
    pose[:, 3:] *= 2.0
    assert torch.allclose(turned_far.render(pose)["depth"], twice, rtol=1e-5)


def test_a_camera_inside_a_capsule_sees_only_the_capsule():
    thing = one_thing(CAPSULE, (0.0, 0.0, 0.0), (0.5, 0.5, 1.0))
    for pitch in (-1.2, 0.0, 1.5):
        assert (thing.render(level_pose(pitch=pitch))["depth"] < 3).all()
