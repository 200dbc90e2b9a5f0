"""Images against analytic answers, Embree and NumPy."""

import math

import numpy as np
import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.render.renderer import Renderer
from shoal.scene.load import load_scene
from shoal.scene.memory import SceneMemory
from shoal.scene.pack import pack_scene
from shoal.scene.scene import Material
from tests.render.views import level_pose, rays
from tests.scene.shapes import box, make_scene, quad, soup, textured_wall


@pytest.mark.parametrize("size", [(64, 64), (37, 50), (1, 1), (130, 6)])
def test_depth_in_a_box_room_is_analytic(size):
    low, high = np.array([-3.0, -2.0, 0.0]), np.array([4.0, 2.5, 2.6])
    poses = torch.cat(
        [level_pose(0.5, -0.3, 1.25, yaw) for yaw in (0.0, 0.4, 2.0, -1.3, math.pi)]
        + [level_pose(-1, 1, 0.8, 1.0, pitch) for pitch in (-0.9, 0.5, 1.5)]
    )
    renderer = Renderer(make_scene(box(low, high)), len(poses), size, ["depth"], hfov=80.0)
    depth = renderer.render(poses)["depth"]
    for pose, image in zip(poses, depth, strict=True):
        direction = rays(pose, *size, hfov=80.0)
        origin = pose[:3].numpy()
        with np.errstate(divide="ignore"):
            expected = np.maximum((low - origin) / direction, (high - origin) / direction).min(-1)
        np.testing.assert_allclose(image[..., 0].numpy(), expected, rtol=1e-5)


def test_axes_of_the_camera():
    """Labeled walls around the camera, which faces each in turn."""
    walls = {
        0.0: quad((2, 1, -1), (2, -1, -1), (2, -1, 1), (2, 1, 1)),
        math.pi / 2: quad((-1, 2, -1), (1, 2, -1), (1, 2, 1), (-1, 2, 1)),
        math.pi: quad((-2, -1, -1), (-2, 1, -1), (-2, 1, 1), (-2, -1, 1)),
    }
    scene = make_scene(np.concatenate(list(walls.values())), semantic=np.repeat(np.arange(3, dtype=np.int32), 2) + 1,
                       labels=("none", "ahead", "left", "behind"))  # fmt: skip
    renderer = Renderer(scene, 3, (9, 9), ["semantic"])
    image = renderer.render(torch.cat([level_pose(yaw=yaw) for yaw in walls]))["semantic"]
    assert [int(view[4, 4]) for view in image] == [1, 2, 3]
    # After a turn to the left, the wall ahead is at the right of the image.
    renderer.render(torch.cat([level_pose(yaw=0.7)] * 3))
    assert renderer.images["semantic"][0, 4, 7] == 1
    assert renderer.images["semantic"][0, 4, 1] == 2
    # After a turn upwards, it is lower.
    renderer.render(torch.cat([level_pose(pitch=0.7)] * 3))
    assert renderer.images["semantic"][0, 7, 4] == 1
    assert renderer.images["semantic"][0, 1, 4] == 0


@pytest.mark.parametrize("count", [1, 3, 60, 4000])
def test_random_rays_agree_with_embree(count):
    """Depth, triangle and normal of thousands of rays with random poses, against Embree."""
    rtcore_scene = pytest.importorskip("embreex.rtcore_scene")
    from embreex.mesh_construction import TriangleMesh

    corners = soup(count, seed=count)
    embree = rtcore_scene.EmbreeScene()
    TriangleMesh(embree, corners)
    rng = np.random.default_rng(1)
    turns = rng.normal(size=(12, 4))
    poses = torch.from_numpy(
        np.concatenate([rng.uniform(-4, 4, (12, 3)), turns / np.linalg.norm(turns, axis=1)[:, None]], 1)
    )
    poses = poses.float()
    renderer = Renderer(make_scene(corners), 12, (24, 20), ["depth", "instance", "normal"], hfov=100.0)
    images = renderer.render(poses)
    differ = 0
    for v, pose in enumerate(poses):
        directions = rays(pose, 24, 20, hfov=100.0).reshape(-1, 3).astype(np.float32)
        origins = np.repeat(pose[None, :3].numpy(), len(directions), 0)
        answer = embree.run(origins, directions, query="INTERSECT", output=True)
        hit = answer["primID"] >= 0
        instance = images["instance"][v].reshape(-1).numpy()
        same = instance == np.where(hit, answer["primID"] + 1, 0)
        differ += (~same).sum()
        both = same & hit
        np.testing.assert_allclose(
            images["depth"][v].reshape(-1).numpy()[both], answer["tfar"][both], rtol=2e-4, atol=1e-4
        )
        np.testing.assert_array_equal(images["depth"][v].reshape(-1).numpy()[same & ~hit], 1000.0)
        edges = corners[answer["primID"][both]]
        normal = np.cross(edges[:, 1] - edges[:, 0], edges[:, 2] - edges[:, 0])
        normal /= np.linalg.norm(normal, axis=1, keepdims=True)
        normal *= -np.sign((normal * directions[both]).sum(1, keepdims=True))
        np.testing.assert_allclose(images["normal"][v].reshape(-1, 3).numpy()[both], normal, atol=1e-4)
    # Rays along edges may hit either triangle.
    assert differ <= 12 * 24 * 20 * 2e-3


@pytest.mark.parametrize("form", ["glb", "obj", "ply"])
def test_loaded_meshes_agree_with_embree(form, tmp_path):
    """Meshes written by trimesh and read by Shoal, with the same rays in Embree."""
    import trimesh
    from embreex.mesh_construction import TriangleMesh
    from embreex.rtcore_scene import EmbreeScene

    bodies = [
        trimesh.creation.icosphere(subdivisions=3, radius=0.8).apply_translation((2.5, 0.3, 0.2)),
        trimesh.creation.torus(1.2, 0.3).apply_translation((-2.0, 1.0, 0.0)),
        trimesh.creation.capsule(height=1.5, radius=0.4).apply_translation((0.0, -2.5, -0.5)),
        trimesh.creation.box((12.0, 12.0, 6.0)),
    ]
    whole = trimesh.util.concatenate(bodies)
    whole.export(tmp_path / f"bodies.{form}")
    scene = load_scene(tmp_path / f"bodies.{form}", up="z")
    embree = EmbreeScene()
    TriangleMesh(embree, np.ascontiguousarray(whole.triangles, np.float32))
    poses = torch.cat([level_pose(0.1, 0.2, 0.3, yaw, pitch) for yaw in (0.0, 1.3, 2.6, 4.4) for pitch in (-0.6, 0.2)])
    depth = Renderer(scene, len(poses), (40, 30), ["depth"]).render(poses)["depth"]
    for pose, image in zip(poses, depth, strict=True):
        directions = rays(pose, 40, 30).reshape(-1, 3).astype(np.float32)
        origins = np.repeat(pose[None, :3].numpy(), len(directions), 0)
        answer = embree.run(origins, directions, query="INTERSECT", output=True)
        close = np.isclose(image.reshape(-1).numpy(), answer["tfar"], rtol=1e-4)
        assert close.mean() > 0.998


@pytest.mark.parametrize("away", [0.0, 30.0, 3000.0])
def test_closed_surfaces_have_no_gaps_far_from_the_origin(away):
    """No ray escapes from inside a sphere of many triangles, at the origin or at map coordinates."""
    import trimesh

    ball = trimesh.creation.icosphere(subdivisions=5, radius=1.0)
    offset = np.round(np.array([away, 0.7 * away, 0.3 * away]))
    scene = make_scene((ball.triangles + offset).astype(np.float32))
    poses = torch.cat(
        [level_pose(*offset.tolist(), yaw=yaw, pitch=pitch) for yaw in (0.1, 2.0) for pitch in (0.3, -1.0)]
    )
    depth = Renderer(scene, 4, (128, 128), ["depth"]).render(poses)["depth"]
    assert (depth < 1.01).float().mean() > 1 - 5e-5


def test_holes_in_the_plane_of_a_wall_show_the_wall():
    """A texture with holes in the plane of a wall: the wall is visible through them in either order."""
    corners = np.array([[[2, 2, -2], [2, -2, -2], [2, 0, 2]]], np.float32)
    clear = np.zeros((2, 2, 4), np.uint8)
    for order in ((0, 1), (1, 0)):
        materials = [Material("clear", texture=0, cutoff=0.5), Material("wall")]
        scene = make_scene(
            np.repeat(corners, 2, 0), material=np.array(order, np.int32), materials=tuple(materials), textures=(clear,)
        )
        image = Renderer(scene, 1, (9, 9), ["depth"]).render(level_pose())["depth"]
        assert image[0, 4, 4] == 2.0


def test_too_large_numbers_become_255_in_uint8():
    scene = make_scene(box((-1, -1, -1), (1, 1, 1)), instance=np.full(12, 300, np.int32))
    assert (Renderer(scene, 1, (4, 4), {"instance": torch.uint8}).render(level_pose())["instance"] == 255).all()


def test_assignment_copies_in_place():
    scenes = [make_scene(box((-d, -d, -d), (d, d, d))) for d in (1.0, 2.0)]
    renderer = Renderer(scenes, 1, (3, 3), "depth")
    renderer.scene = torch.tensor([1])
    renderer.position = torch.tensor([[0.5, 0.0, 0.0]])
    assert renderer.render()["depth"][0, 1, 1] == 1.5


def bilinear(texture, u, v):
    """Texture lookup at the finest level in NumPy: repeated, v up, bilinear between pixel centers."""
    height, width = texture.shape[:2]
    x, y = (u % 1) * width - 0.5, (1 - v % 1) * height - 0.5
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    a, b = (x - left)[..., None], (y - top)[..., None]

    def at(i, j):
        return texture[j % height, i % width].astype(np.float64)

    return (at(left, top) * (1 - a) + at(left + 1, top) * a) * (1 - b) + (
        at(left, top + 1) * (1 - a) + at(left + 1, top + 1) * a
    ) * b


@pytest.mark.parametrize("repeat", [1.0, 2.5])
def test_textures_equal_a_numpy_version(repeat):
    texture = np.random.default_rng(3).integers(0, 256, (8, 6, 4), dtype=np.uint8)
    renderer = Renderer(
        textured_wall(texture, repeat), 1, (96, 96), {"rgb": torch.float32, "depth": torch.float32}, light=False
    )
    image = renderer.render(level_pose())["rgb"][0].numpy()
    direction = rays(level_pose()[0], 96, 96)
    y, z = 2 * direction[..., 1], 2 * direction[..., 2]
    expected = bilinear(texture, (2 - y) / 4 * repeat, (z + 2) / 4 * repeat)[..., :3] / 255
    inside = (abs(y) < 1.98) & (abs(z) < 1.98)
    np.testing.assert_allclose(image[inside], expected[inside], atol=2e-4)


def test_textures_are_upright():
    texture = np.zeros((2, 2, 4), np.uint8)
    texture[..., 3] = 255
    texture[0, 0, 0], texture[0, 1, 1], texture[1, 0, 2] = 255, 255, 255  # red, green above; blue, black below
    image = Renderer(textured_wall(texture), 1, (2, 2), ["rgb"], light=False).render(level_pose())["rgb"][0]
    assert image.tolist() == [[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [0, 0, 0]]]


def test_far_textures_use_a_coarser_mipmap_level():
    """A chessboard with squares far smaller than a pixel is uniformly gray."""
    board = (np.indices((256, 256)).sum(0) % 2 * 255).astype(np.uint8)
    texture = np.dstack([board] * 3 + [np.full_like(board, 255)])
    renderer = Renderer(textured_wall(texture, repeat=4.0), 1, (16, 16), ["rgb"], light=False)
    image = renderer.render(level_pose())["rgb"].int()
    assert ((image - 128).abs() <= 1).all()


def test_holes_are_seen_through():
    """The left half of the near wall is transparent: the far wall shows there, at its depth."""
    texture = np.full((4, 4, 4), 255, np.uint8)
    texture[:, :2, 3] = 0
    near, far = textured_wall(texture, cutoff=0.5, distance=2.0), textured_wall(texture, distance=2.0)
    corners = np.concatenate([near.corners, far.corners + np.array([1, 0, 0], np.float32)])
    both = make_scene(
        corners,
        uv=np.concatenate([near.uv, far.uv]),
        material=np.array([0, 0, 1, 1], np.int32),
        materials=(near.materials[0], Material("plain", (1.0, 0.0, 0.0, 1.0))),
        textures=near.textures,
    )
    images = Renderer(both, 1, (32, 32), ["depth", "rgb", "instance"], light=False).render(level_pose())
    depth = images["depth"][0, ..., 0]
    assert (depth[8:24, 6:13] == 3.0).all()
    assert (depth[8:24, 19:] == 2.0).all()
    assert images["rgb"][0, 16, 8].tolist() == [255, 0, 0]
    assert images["rgb"][0, 16, 24].tolist() == [255, 255, 255]


def test_vertex_colors_are_interpolated():
    colors = np.zeros((1, 3, 4), np.uint8)
    colors[0] = [[255, 0, 0, 255], [0, 255, 0, 255], [0, 0, 255, 255]]
    corners = np.array([[[2, 2, -1], [2, -2, -1], [2, 0, 2]]], np.float32)
    renderer = Renderer(make_scene(corners, colors=colors), 1, (33, 33), {"rgb": torch.float32}, light=False)
    image = renderer.render(level_pose())["rgb"][0, 16, 16]
    np.testing.assert_allclose(image.numpy(), [1 / 3, 1 / 3, 1 / 3], atol=1e-3)


@pytest.mark.parametrize("kind", [torch.float16, torch.uint8])
def test_dtypes_hold_the_same_image(kind):
    scene = make_scene(soup(200, 5))
    poses = torch.cat([level_pose(yaw=k) for k in (0.0, 1.0, 2.0)])
    exact = Renderer(
        scene, 3, (20, 20), {"depth": torch.float32, "rgb": torch.float32, "normal": torch.float32}, max_depth=5.0
    )
    rough = Renderer(scene, 3, (20, 20), {"depth": kind, "rgb": kind, "normal": kind}, max_depth=5.0)
    exact.render(poses), rough.render(poses)
    scale = {"depth": 255 / 5, "rgb": 255, "normal": 127.5} if kind == torch.uint8 else dict.fromkeys(exact.images, 1)
    shift = {"normal": 127.5} if kind == torch.uint8 else {}
    for name, image in exact.images.items():
        expected = image * scale[name] + shift.get(name, 0)
        assert rough.images[name].dtype == kind
        assert (rough.images[name].float() - expected).abs().max() < (0.51 if kind == torch.uint8 else 5e-3)


def test_each_view_has_its_scene_and_field_of_view():
    scenes = [make_scene(box((-d, -d, -d), (d, d, d))) for d in (1.0, 2.0, 3.0)]
    renderer = Renderer(scenes, 6, (16, 16), ["depth"])
    rows = torch.tensor([2, 0, 1, 1, 0, 2])
    renderer.slope[3:] = math.tan(math.radians(20))
    depth = renderer.render(torch.cat([level_pose()] * 6), rows)["depth"]
    assert torch.allclose(depth[:, 8, 8, 0], rows.float() + 1)
    renderer.render(torch.cat([level_pose(yaw=math.pi / 4)] * 6))
    narrow, wide = depth[4, 8, 0, 0], depth[1, 8, 0, 0]
    assert narrow > wide * 1.2


def test_a_view_does_not_depend_on_the_batch():
    scene = make_scene(soup(500, 7))
    turns = torch.linspace(0, 6, 40)
    poses = torch.cat([level_pose(yaw=float(t)) for t in turns])
    many = Renderer(scene, 40, (16, 12), ["depth", "rgb"]).render(poses)
    one = Renderer(scene, 1, (16, 12), ["depth", "rgb"])
    for k in (0, 17, 39):
        alone = one.render(poses[k : k + 1])
        assert all(torch.equal(alone[name][0], many[name][k]) for name in many)


def test_depth_is_clamped_and_a_miss_has_maximum_depth():
    scene = make_scene(quad((6, 1, -1), (6, -1, -1), (6, -1, 1), (6, 1, 1)))
    assert (Renderer(scene, 1, (8, 8), ["depth"], max_depth=4.0).render(level_pose())["depth"] == 4.0).all()
    near = Renderer(scene, 1, (9, 9), ["depth", "rgb"], max_depth=10.0).render(level_pose())
    assert near["depth"][0, 4, 4] == 6.0
    assert near["depth"][0, 0, 0] == 10.0
    # Hits beyond the maximum depth still have a color.
    clamped = Renderer(scene, 1, (9, 9), ["depth", "rgb"], max_depth=4.0).render(level_pose())
    assert torch.equal(clamped["rgb"], near["rgb"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(views=0), "at least one view"),
        (dict(size=(0, 4)), "at least one view"),
        (dict(outputs=["dept"]), "did you mean 'depth'"),
        (dict(outputs=[]), "at least one output"),
        (dict(outputs={"depth": torch.int32}), "cannot be torch.int32"),
        (dict(hfov=0.0), "field of view"),
        (dict(max_depth=-1.0), "max_depth"),
        (dict(views=600_000), "2^31"),
    ],
)
def test_bad_settings_are_named(change, words):
    given = dict(views=1, size=(64, 64), outputs=["depth"])
    with pytest.raises(ShoalError, match=words.replace("^", r"\^")):
        Renderer(make_scene(soup(3)), **{**given, **change})


def test_bad_poses_are_named():
    renderer = Renderer(make_scene(soup(3)), 2, (8, 8), ["depth"])
    with pytest.raises(ShoalError, match=r"\(2, 7\), not \(1, 7\)"):
        renderer.render(level_pose())


def test_rows_without_a_scene_show_nothing():
    """Rows that are out of range or empty are not read."""
    memory = SceneMemory(10**6, 3, "cpu")
    memory.put(1, pack_scene(make_scene(box((-1, -1, -1), (1, 1, 1)))))
    renderer = Renderer(memory, 5, (4, 4), ["depth", "rgb", "instance", "normal"])
    images = renderer.render(torch.cat([level_pose()] * 5), torch.tensor([0, 1, 2, -7, 10**6]))
    assert images["depth"][:, 2, 2, 0].tolist() == [1000.0, 1.0, 1000.0, 1000.0, 1000.0]
    assert (images["instance"][[0, 2, 3, 4]] == 0).all()
    memory.remove(1)
    assert (renderer.render()["depth"] == 1000.0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_poses_that_are_not_finite_show_nothing(bad):
    renderer = Renderer(make_scene(box((-1, -1, -1), (1, 1, 1))), 2, (4, 4), ["depth"])
    poses = torch.cat([level_pose(), level_pose(bad)])
    depth = renderer.render(poses)["depth"]
    assert (depth[0] < 3).all()
    assert (depth[1] == 1000.0).all()
