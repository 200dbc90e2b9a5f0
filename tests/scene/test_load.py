"""Loaded scenes against the content of their files, or against trimesh."""

import base64
import json

import numpy as np
import pytest
import trimesh
from PIL import Image

from shoal.scene.load import load_scene
from shoal.scene.parsed import label
from shoal.scene.polygons import triangulate
from shoal.scene.scene import check_scene
from tests.scene.meshes import (
    BLUE,
    FACES,
    FOUR,
    GREEN,
    RED,
    SQUARE,
    WHITE,
    Gltf,
    corner_points,
    picture_bytes,
    seen,
    square_glb,
)

TRIANGLE = "v 0 0 0\nv 1 0 0\nv 0 1 0\n"


# --- Transforms -------------------------------------------------------------------------------------------------------


def test_nested_nodes_place_their_meshes(tmp_path):
    file = Gltf()
    mesh = file.mesh(points=[[1, 0, 0], [2, 0, 0], [1, 3, 0]], faces=np.array([0, 1, 2], np.uint8))
    half = 0.5**0.5
    file.append("nodes", {"children": [1], "translation": [10, 0, 0], "rotation": [0, half, 0, half]})
    file.append("nodes", {"mesh": mesh, "scale": [2, 2, 2], "translation": [0, 0, 1]})
    scene = load_scene(file.save(tmp_path / "a.glb"))
    # (1, 0, 0) scaled (2, 0, 0), moved (2, 0, 1), rotated about y (1, 0, -2), moved (11, 0, -2); then z up.
    np.testing.assert_allclose(scene.corners[0], [[11, 2, 0], [11, 4, 0], [11, 2, 6]], atol=1e-6)


def test_a_matrix_is_written_column_by_column(tmp_path):
    file = square_glb()
    file.tree["nodes"] = [{"mesh": 0, "matrix": [2, 0, 0, 0, 0, 3, 0, 0, 0, 0, 4, 0, 5, 6, 7, 1]}]
    scene = load_scene(file.save(tmp_path / "a.glb"))
    np.testing.assert_allclose(scene.bounds, [[5, -7, 6], [7, -7, 9]])


def test_only_the_default_scene_is_read_and_a_mesh_may_be_placed_twice(tmp_path):
    file = square_glb()
    file.tree["nodes"] = [{"mesh": 0}, {"mesh": 0, "translation": [4, 0, 0]}, {"mesh": 0, "translation": [8, 0, 0]}]
    file.tree["scenes"] = [{"nodes": [0]}, {"nodes": [1, 2]}]
    file.tree["scene"] = 1
    scene = load_scene(file.save(tmp_path / "a.glb"))
    assert scene.bounds[:, 0].tolist() == [4, 9]
    assert scene.instance.tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize(("ending", "auto"), [(".glb", "y"), (".obj", "y"), (".ply", "z")])
def test_up_and_scale(tmp_path, ending, auto):
    trimesh.Trimesh([[1, 2, 3], [4, 2, 3], [1, 7, 3]], [[0, 1, 2]], process=False).export(tmp_path / f"a{ending}")
    as_y = [[1, -3, 2], [4, -3, 2], [1, -3, 7]]
    as_z = [[1, 2, 3], [4, 2, 3], [1, 7, 3]]
    np.testing.assert_array_equal(load_scene(tmp_path / f"a{ending}", up="y").corners[0], as_y)
    np.testing.assert_array_equal(load_scene(tmp_path / f"a{ending}", up="z").corners[0], as_z)
    scaled = load_scene(tmp_path / f"a{ending}", scale=0.25).corners[0]
    np.testing.assert_array_equal(scaled, np.array(as_y if auto == "y" else as_z) / 4)


def test_the_same_triangles_as_trimesh(tmp_path):
    scene_graph = trimesh.Scene()
    turned = trimesh.transformations.rotation_matrix(0.7, [1, 2, 3], [4, 5, 6])
    scene_graph.add_geometry(trimesh.creation.box((1, 2, 3)), node_name="box", transform=turned)
    scene_graph.add_geometry(trimesh.creation.icosphere(2), node_name="ball", parent_node_name="box", transform=turned)
    for name in ("a.glb", "a.gltf", "a.obj", "a.ply"):
        scene_graph.export(tmp_path / name)
        oracle = scene_graph.to_mesh()
        scene = load_scene(tmp_path / name, up="z")
        triangles = np.asarray(oracle.triangles, np.float64).round(4)
        rows = np.sort(triangles.view([("", np.float64)] * 3), axis=1).view(np.float64).reshape(-1, 9)
        np.testing.assert_allclose(corner_points(scene), np.unique(rows, axis=0), atol=2e-4)


# --- Textures and colors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize("where", ["inside", "beside", "data"])
def test_gltf_images_are_upright(tmp_path, form, where):
    file = Gltf()
    # The file's v points down: the corner (0, 0) shows the top left.
    uv = file.accessor(np.array([[0, 1], [1, 1], [1, 0], [0, 0]], np.float32))
    data = picture_bytes(np.kron(FOUR, np.ones((8, 8, 1), np.uint8)), form)
    file.texture(data)
    file.mesh(material={"pbrMetallicRoughness": {"baseColorTexture": {"index": 0}}}, TEXCOORD_0=uv)
    file.append("nodes", {"mesh": 0})
    if where == "inside":
        path = file.save(tmp_path / "a.glb")
    else:
        (tmp_path / "four colors.bin").write_bytes(data)
        uri = "four%20colors.bin" if where == "beside" else "data:image/x;base64," + base64.b64encode(data).decode()
        file.tree["images"] = [{"uri": uri}]
        path = file.save_apart(tmp_path / "a.gltf")
    scene = load_scene(path)
    # Triangle 0 has the corners bottom left, bottom right, top right; triangle 1 bottom left, top right, top left.
    near = 0.9
    rest = (1 - near) / 2
    np.testing.assert_allclose(seen(scene, 0, (near, rest, rest)), BLUE, atol=3)
    np.testing.assert_allclose(seen(scene, 0, (rest, near, rest)), WHITE, atol=3)
    np.testing.assert_allclose(seen(scene, 0, (rest, rest, near)), GREEN, atol=3)
    np.testing.assert_allclose(seen(scene, 1, (rest, rest, near)), RED, atol=3)
    assert len(scene.textures) == 1
    assert scene.uv[1, 2].tolist() == [0, 1]


def test_the_same_uv_as_trimesh(tmp_path):
    uv = np.random.default_rng(0).random((4, 2))
    mesh = trimesh.Trimesh(SQUARE, FACES, process=False)
    mesh.visual = trimesh.visual.TextureVisuals(uv=uv, image=Image.fromarray(FOUR))
    for name in ("a.glb", "a.obj"):
        mesh.export(tmp_path / name)
        scene = load_scene(tmp_path / name)
        np.testing.assert_allclose(scene.uv, uv[FACES], atol=1e-6)
        np.testing.assert_array_equal(scene.textures[0], FOUR)


def test_gltf_colors_are_converted_from_linear_to_srgb(tmp_path):
    half = 0.21404114  # sRGB 0.5
    file = Gltf()
    colors = file.accessor(np.array([[half, 1, 0, 1]] * 4, np.float32))
    bytes_ = file.accessor(np.array([[255, 0, 128]] * 4, np.uint8), normalized=True)
    file.mesh(material={"name": "paint", "pbrMetallicRoughness": {"baseColorFactor": [half, 1, 0, 1]}}, COLOR_0=colors)
    file.mesh(COLOR_0=bytes_)
    file.tree["nodes"] = [{"mesh": 0}, {"mesh": 1}]
    file.tree["scenes"] = [{"nodes": [0, 1]}]
    scene = load_scene(file.save(tmp_path / "a.glb"))
    np.testing.assert_allclose(scene.materials[0].color, [0.5, 1, 0, 1], atol=1e-6)
    assert scene.materials[0].name == "paint"
    assert scene.colors[0, 0].tolist() == [128, 255, 0, 255]
    assert scene.colors[2, 0].tolist() == [255, 0, 188, 255]


@pytest.mark.parametrize(
    ("mode", "alpha", "cutoff"),
    [
        ({}, 0, 0.0),
        ({"alphaMode": "OPAQUE"}, 0, 0.0),
        ({"alphaMode": "MASK"}, 0, 0.5),
        ({"alphaMode": "MASK", "alphaCutoff": 0.25}, 0, 0.25),
        ({"alphaMode": "MASK", "alphaCutoff": 1e308}, 0, 2.0),
        ({"alphaMode": "BLEND"}, 0, 0.5),
        ({"alphaMode": "BLEND"}, 255, 0.0),
    ],
)
def test_gltf_cut_outs(tmp_path, mode, alpha, cutoff):
    picture = FOUR.copy()
    picture[0, 0, 3] = alpha
    file = Gltf()
    file.texture(picture_bytes(picture))
    uv = file.accessor(np.zeros((4, 2), np.float32))
    file.mesh(material={"pbrMetallicRoughness": {"baseColorTexture": {"index": 0}}, **mode}, TEXCOORD_0=uv)
    file.append("nodes", {"mesh": 0})
    scene = load_scene(file.save(tmp_path / "a.glb"))
    assert scene.materials[0].cutoff == cutoff
    assert scene.textures[0][0, 0, 3] == alpha


def test_gltf_blending_by_color_alone(tmp_path):
    glass = square_glb({"alphaMode": "BLEND", "pbrMetallicRoughness": {"baseColorFactor": [1, 1, 1, 0.3]}})
    scene = load_scene(glass.save(tmp_path / "a.glb"))
    assert scene.materials[0].cutoff == 0.5
    assert scene.materials[0].color[3] == 0.3
    file = Gltf()
    faint = file.accessor(np.array([[1, 1, 1, 0.2]] * 4, np.float32))
    file.mesh(material={"alphaMode": "BLEND"}, COLOR_0=faint)
    file.append("nodes", {"mesh": 0})
    assert load_scene(file.save(tmp_path / "b.glb")).materials[0].cutoff == 0.5


def test_gltf_texture_transform_and_second_uv(tmp_path):
    file = Gltf()
    file.texture(picture_bytes(FOUR))
    uv = file.accessor(np.array([[0, 0], [1, 0], [1, 1], [0, 1]], np.float32))
    move = {"offset": [0.5, 0.25], "rotation": np.pi / 2, "scale": [2, 3], "texCoord": 1}
    info = {"index": 0, "extensions": {"KHR_texture_transform": move}}
    file.mesh(material={"pbrMetallicRoughness": {"baseColorTexture": info}}, TEXCOORD_1=uv)
    file.append("nodes", {"mesh": 0})
    file.tree["extensionsRequired"] = ["KHR_texture_transform"]
    scene = load_scene(file.save(tmp_path / "a.glb"))
    # (1, 0) scaled (2, 0); rotated by 90 degrees counterclockwise with v down (0, -2); moved (0.5, -1.75); v up 2.75.
    np.testing.assert_allclose(scene.uv[0, 1], [0.5, 2.75], atol=1e-6)
    np.testing.assert_allclose(scene.uv[0, 2], [3.5, 2.75], atol=1e-6)


def test_images_of_other_modes(tmp_path):
    deep = np.array([[0, 0x8000, 0xFFFF]], np.uint16)
    palette = Image.fromarray(FOUR[..., :3]).quantize(4)
    palette.info["transparency"] = palette.getpixel((0, 0))
    palette.save(tmp_path / "palette.png")
    Image.fromarray(deep).save(tmp_path / "deep.png")
    Image.fromarray(np.full((2, 2, 4), 0, np.uint8), "CMYK").save(tmp_path / "print.jpg")
    names = ["palette.png", "deep.png", "print.jpg"]
    (tmp_path / "a.mtl").write_text("".join(f"newmtl {n}\nmap_Kd {n}\n" for n in names))
    faces = "".join(f"usemtl {n}\nf 1/1 2/1 3/1\n" for n in names)
    (tmp_path / "a.obj").write_text("mtllib a.mtl\n" + TRIANGLE + "vt 0 0\n" + faces)
    first, second, third = load_scene(tmp_path / "a.obj").textures
    assert first[0, 0, 3] == 0
    assert first[0, 1].tolist() == list(GREEN)
    assert second[0, :, 0].tolist() == [0, 128, 255]
    assert third[0, 0].tolist() == list(WHITE)


def test_specular_glossiness_materials(tmp_path):
    gloss = {"diffuseFactor": [1, 0, 0, 1]}
    file = square_glb({"extensions": {"KHR_materials_pbrSpecularGlossiness": gloss}})
    assert load_scene(file.save(tmp_path / "a.glb")).materials[0].color == (1, 0, 0, 1)


# --- glTF accessors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "indices", "triangles"),
    [(5, [0, 1, 3, 2], [[0, 1, 3], [1, 3, 2]]), (6, [0, 1, 2, 3], [[0, 1, 2], [0, 2, 3]]), (6, None, None)],
)
def test_strips_and_fans(tmp_path, mode, indices, triangles):
    file = Gltf()
    file.mesh(faces=None if indices is None else np.array(indices, np.uint32), mode=mode)
    file.append("nodes", {"mesh": 0})
    scene = load_scene(file.save(tmp_path / "a.glb"), up="z")
    np.testing.assert_array_equal(scene.corners, SQUARE[triangles or [[0, 1, 2], [0, 2, 3]]])


def test_points_and_lines_are_skipped_with_a_note(tmp_path):
    file = Gltf()
    file.mesh()
    file.mesh(mode=1)
    file.tree["nodes"] = [{"mesh": 0}, {"mesh": 1}]
    file.tree["scenes"] = [{"nodes": [0, 1]}]
    scene = load_scene(file.save(tmp_path / "a.glb"))
    assert len(scene.triangles) == 2
    assert "points or lines" in scene.notes[0]


def test_strided_sparse_and_normalized_accessors(tmp_path):
    file = Gltf()
    rows = np.zeros(4, [("position", "<f4", 3), ("uv", "<u2", 2)])
    rows["position"] = SQUARE
    rows["uv"] = [[0, 65535], [65535, 65535], [65535, 0], [0, 0]]
    view = file.view(rows.tobytes(), byteStride=rows.dtype.itemsize)
    where, values = file.view(np.array([2], np.uint8).tobytes()), file.view(np.array([[5, 6, 7]], "<f4").tobytes())
    sparse = {
        "count": 1,
        "indices": {"bufferView": where, "componentType": 5121},
        "values": {"bufferView": values},
    }
    position = dict(bufferView=view, componentType=5126, count=4, type="VEC3", sparse=sparse)
    uv = dict(bufferView=view, byteOffset=12, componentType=5123, count=4, type="VEC2", normalized=True)
    file.tree["accessors"] = [position, uv]
    file.texture(picture_bytes(FOUR))
    file.append("materials", {"pbrMetallicRoughness": {"baseColorTexture": {"index": 0}}})
    faces = file.accessor(FACES.reshape(-1))
    primitive = {"attributes": {"POSITION": 0, "TEXCOORD_0": 1}, "indices": faces, "material": 0}
    file.append("meshes", {"primitives": [primitive]})
    file.append("nodes", {"mesh": 0})
    scene = load_scene(file.save(tmp_path / "a.glb"), up="z")
    np.testing.assert_array_equal(scene.corners[0], [[0, 0, 0], [1, 0, 0], [5, 6, 7]])
    np.testing.assert_allclose(scene.uv[0], [[0, 0], [1, 0], [1, 1]])


# --- Labels ----------------------------------------------------------------------------------------------------------


def test_labels_and_instances_of_nodes(tmp_path):
    file = Gltf()
    file.mesh(name="Table_Mesh")
    file.tree["nodes"] = [
        {"name": "chair_12", "mesh": 0},
        {"name": "Chair.013", "mesh": 0},
        {"mesh": 0},
        {"name": "lamp", "children": [4]},
        {"name": "node_7", "mesh": 1},
    ]
    file.mesh(name="mesh_3")
    file.tree["scenes"] = [{"nodes": [0, 1, 2, 3]}]
    scene = load_scene(file.save(tmp_path / "a.glb"))
    assert scene.labels == ("unlabeled", "chair", "lamp", "table_mesh")
    assert [scene.labels[i] for i in scene.semantic[::2]] == ["chair", "chair", "table_mesh", "lamp"]
    assert scene.instance[::2].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("chair_12",), "chair"),
        (("Chair.001",), "chair"),
        (("dining chair (2)",), "dining chair"),
        (("sofa_3.001",), "sofa"),
        (("wall-2-17",), "wall"),
        (("mesh_3", "Node 12", "Bed"), "bed"),
        (("12", ""), ""),
        (("tv2",), "tv"),
    ],
)
def test_names_are_cleaned(names, expected):
    assert label(*names) == expected


# --- OBJ -------------------------------------------------------------------------------------------------------------


def test_obj_groups_materials_and_textures(tmp_path):
    Image.fromarray(FOUR).save(tmp_path / "four colors.png")
    (tmp_path / "a b.mtl").write_text(
        "newmtl red\nKd 1 0 0\n\nnewmtl four\n\tKd 0 0 0\n  map_Kd -s 2 2 1 -o 0.5 0 -clamp on four colors.png\n"
    )
    (tmp_path / "more.mtl").write_text("newmtl glass\nKd 0 0 1\nd 0.3\nnewmtl dim\nTr 0.25\n")
    (tmp_path / "a.obj").write_text(
        "# mtllib none.mtl\nmtllib a b.mtl\nmtllib more.mtl\n"
        "v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\nvt 0 0\nvt 1 0\nvt 1 1\nvt 0 1\nvn 0 0 1\n"
        "o Chair_1\nusemtl red\nf 1 2 3\n"
        "o Chair_2\nusemtl four\nf 1/1/1 2/2/1 3/3/1 4/4/1 # a quad\nf 1//1 2//1 3//1\n"
        "g legs\nusemtl glass\nf 1/1 2/2 3/3 \\\n 4/4\nusemtl dim\nf 1 2 3\n"
    )
    scene = load_scene(tmp_path / "a.obj")
    assert [m.name for m in scene.materials] == ["red", "four", "glass", "dim"]
    assert scene.material.tolist() == [0, 1, 1, 1, 2, 2, 3]
    assert scene.instance.tolist() == [1, 2, 2, 2, 3, 3, 3]
    assert [scene.labels[i] for i in scene.semantic] == ["chair"] * 7
    assert scene.materials[0].color == (1, 0, 0, 1)
    assert scene.materials[1].color == (1, 1, 1, 1), "black with a texture means the texture alone"
    assert scene.materials[2] == scene.materials[2].__class__("glass", (0, 0, 1, 0.3), -1, 0.5)
    assert scene.materials[3].color == (1, 1, 1, 0.75)
    np.testing.assert_allclose(scene.uv[1], [[0.5, 0], [2.5, 0], [2.5, 2]])
    np.testing.assert_array_equal(scene.textures[0], FOUR)
    assert any("texture coordinates" in note for note in scene.notes)
    assert any("glass" in note for note in scene.notes)


def test_obj_images_are_upright(tmp_path):
    Image.fromarray(FOUR).save(tmp_path / "Four.PNG")
    (tmp_path / "a.mtl").write_text("newmtl m\nmap_Kd C:\\textures\\four.png\n")
    (tmp_path / "a.obj").write_text(
        "mtllib a.mtl\n"
        + TRIANGLE
        + "vt 0.1 0.9\nvt 0.2 0.9\nvt 0.1 0.8\nvt 0.1 0.1\nusemtl m\nf 1/1 2/2 3/3\nf 1/4 2/4 3/4\n"
    )
    scene = load_scene(tmp_path / "a.obj")
    np.testing.assert_allclose(seen(scene, 0), RED)
    np.testing.assert_allclose(seen(scene, 1), BLUE)


def test_obj_negative_indices_are_relative_to_their_line(tmp_path):
    (tmp_path / "a.obj").write_text(
        TRIANGLE + "vt 0 0\nf -3/-1 -2/-1 -1/-1\nv 5 0 0\nv 6 0 0\nv 5 1 0\nvt 1 1\nf -3/-1 -2/-2 -1/2\n"
    )
    scene = load_scene(tmp_path / "a.obj", up="z")
    np.testing.assert_array_equal(scene.corners[:, 0], [[0, 0, 0], [5, 0, 0]])
    np.testing.assert_array_equal(scene.uv[1], [[1, 1], [0, 0], [1, 1]])


def test_obj_vertex_colors_tabs_and_windows_lines(tmp_path):
    (tmp_path / "a.obj").write_bytes(b"v\t0 0 0 1 0 0\r\n v 1 0 0 0 1 0\r\nv 0 1 0 0 0 1\r\nf\t1 2\t3\r\n")
    scene = load_scene(tmp_path / "a.obj")
    assert scene.colors[0].tolist() == [list(RED), list(GREEN), list(BLUE)]


@pytest.mark.parametrize("with_picture", [True, False])
def test_obj_masks_cut_out(tmp_path, with_picture):
    mask = np.array([[0, 255]], np.uint8)
    Image.fromarray(mask).save(tmp_path / "mask.png")
    Image.fromarray(FOUR).save(tmp_path / "four.png")
    (tmp_path / "a.mtl").write_text("newmtl m\nmap_d mask.png\n" + "map_Kd four.png\n" * with_picture)
    (tmp_path / "a.obj").write_text("mtllib a.mtl\n" + TRIANGLE + "vt 0 0\nusemtl m\nf 1/1 2/1 3/1\n")
    scene = load_scene(tmp_path / "a.obj")
    assert scene.materials[0].cutoff == 0.5
    texture = scene.textures[0]
    assert (texture[:, 0, 3] == 0).all()
    assert (texture[:, -1, 3] == 255).all()
    assert tuple(texture[0, -1, :3]) == (GREEN[:3] if with_picture else WHITE[:3])


def test_obj_png_alpha_cuts_out(tmp_path):
    picture = FOUR.copy()
    picture[1, 1, 3] = 10
    Image.fromarray(picture).save(tmp_path / "leaf.png")
    (tmp_path / "a.mtl").write_text("newmtl m\nmap_Kd leaf.png\n")
    (tmp_path / "a.obj").write_text("mtllib a.mtl\n" + TRIANGLE + "vt 0 0\nusemtl m\nf 1/1 2/1 3/1\n")
    assert load_scene(tmp_path / "a.obj").materials[0].cutoff == 0.5


def test_obj_without_its_material_file_loads_with_a_note(tmp_path):
    (tmp_path / "a.obj").write_text("mtllib gone.mtl\n" + TRIANGLE + "usemtl m\nf 1 2 3\n")
    scene = load_scene(tmp_path / "a.obj")
    assert "gone.mtl" in scene.notes[0]
    assert scene.materials[0].color == (1, 1, 1, 1)


# --- PLY -------------------------------------------------------------------------------------------------------------

_PLY = """ply
format {form} 1.0
comment written by hand
element vertex 4
property float x
property float y
property float z
property uchar red
property uchar green
property uchar blue
property uchar alpha
element face 2
property list uchar int vertex_indices
property int object_id
property int category_id
end_header
"""


@pytest.mark.parametrize("form", ["ascii", "binary_little_endian", "binary_big_endian"])
@pytest.mark.parametrize("faces", [[[0, 1, 2], [0, 2, 3]], [[0, 1, 2, 3], [2, 1, 0]]])
def test_ply_colors_polygons_and_ids(tmp_path, form, faces):
    colors = [RED, GREEN, BLUE, (1, 2, 3, 4)]
    ids = [(7, 40), (9, -1)]
    body = b""
    if form == "ascii":
        rows = [" ".join(map(str, [*p, *c])) for p, c in zip(SQUARE, colors, strict=True)]
        rows += [f"{len(f)} {' '.join(map(str, f))} {a} {b}" for f, (a, b) in zip(faces, ids, strict=True)]
        body = "\n".join(rows).encode()
    else:
        order = "<" if "little" in form else ">"
        for point, color in zip(SQUARE, colors, strict=True):
            body += point.astype(order + "f4").tobytes() + bytes(color)
        for face, pair in zip(faces, ids, strict=True):
            body += bytes([len(face)]) + np.array([*face, *pair], order + "i4").tobytes()
    (tmp_path / "a.ply").write_bytes(_PLY.format(form=form).encode() + body)
    scene = load_scene(tmp_path / "a.ply")
    np.testing.assert_array_equal(scene.corners[0], SQUARE[:3])
    assert scene.colors[0].tolist() == [list(c) for c in colors[:3]]
    assert scene.colors[1, 2].tolist() == list(colors[3])
    quads = len(faces[0]) == 4
    assert scene.instance.tolist() == ([8, 8, 10] if quads else [8, 10])
    assert [scene.labels[i] for i in scene.semantic] == ["category 40"] * (1 + quads) + ["unlabeled"]


@pytest.mark.parametrize("encoding", ["ascii", "binary"])
def test_ply_written_by_trimesh(tmp_path, encoding):
    ball = trimesh.creation.icosphere(2)
    ball.visual.vertex_colors = np.random.default_rng(0).integers(0, 255, (len(ball.vertices), 4), np.uint8)
    ball.export(tmp_path / "a.ply", encoding=encoding)
    scene = load_scene(tmp_path / "a.ply")
    np.testing.assert_allclose(scene.corners, ball.triangles, atol=1e-6)
    np.testing.assert_array_equal(scene.colors, ball.visual.vertex_colors[ball.faces])


def test_ply_textures_face_colors_and_fractions(tmp_path):
    Image.fromarray(FOUR).save(tmp_path / "four.png")
    (tmp_path / "a.ply").write_text(
        "ply\nformat ascii 1.0\ncomment TextureFile four.png\nelement vertex 3\nproperty float x\nproperty float y\n"
        "property float z\nelement face 1\nproperty list uchar int vertex_index\nproperty list uchar float texcoord\n"
        "property float red\nproperty float green\nproperty float blue\nend_header\n"
        "0 0 0\n1 0 0\n0 1 0\n3 0 1 2 6 0 0 1 0 0.25 0.75 1 0.5 0\n"
    )
    scene = load_scene(tmp_path / "a.ply")
    np.testing.assert_array_equal(scene.uv[0], [[0, 0], [1, 0], [0.25, 0.75]])
    assert scene.colors[0, 0].tolist() == [255, 128, 0, 255]
    np.testing.assert_array_equal(scene.textures[0], FOUR)


# --- Triangles -------------------------------------------------------------------------------------------------------


def test_triangles_without_an_area_are_skipped_and_counted(tmp_path):
    (tmp_path / "a.obj").write_text(TRIANGLE + "v 2 0 0\nf 1 2 3\nf 1 2 4\nf 1 1 2\nf 1 2\n")
    scene = load_scene(tmp_path / "a.obj")
    assert len(scene.triangles) == 1
    assert len(scene.vertices) == 4
    assert "2 of 3 triangles" in scene.notes[-1]
    assert "1 faces of fewer" in scene.notes[0]
    check_scene(scene)


def test_triangulated_polygons_keep_their_area():
    rng = np.random.default_rng(3)
    for count in (4, 5, 8, 13, 40):
        for _ in range(10):
            angle = np.sort(rng.random(count)) * 2 * np.pi
            if np.diff(angle, append=angle[0] + 2 * np.pi).max() > np.pi:
                continue  # not a star about its middle
            flat = np.stack([np.cos(angle), np.sin(angle)], 1) * rng.uniform(0.2, 1, (count, 1))
            area = 0.5 * (flat[:, 0] * np.roll(flat[:, 1], -1) - flat[:, 1] * np.roll(flat[:, 0], -1)).sum()
            turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
            corners = np.pad(flat, ((0, 0), (0, 1))) @ turn + rng.normal(size=3)
            picks, face = triangulate("a.obj", corners, np.array([count]))
            a, b, c = (corners[picks[:, i]] for i in range(3))
            assert picks.shape == (count - 2, 3)
            assert (face == 0).all()
            assert 0.5 * np.linalg.norm(np.cross(b - a, c - a), axis=1).sum() == pytest.approx(area)


def test_a_concave_quad_is_cut_at_its_concave_corner():
    arrow = np.array([[0, 0, 0], [4, 0, 0], [1, 1, 0], [0, 4, 0]], float)
    for start in range(4):
        corners = np.roll(arrow, start, 0)
        picks, _ = triangulate("a.obj", corners, np.array([4]))
        a, b, c = (corners[picks[:, i]] for i in range(3))
        assert 0.5 * np.cross(b - a, c - a)[:, 2].sum() == pytest.approx(4)
        assert (np.cross(b - a, c - a)[:, 2] > 0).all()


def test_a_comb_is_triangulated():
    comb = np.array(
        [[x, y, 0] for x, y in [(0, 0), (6, 0), (6, 3), (5, 3), (5, 1), (3, 1), (3, 3), (2, 3), (2, 1), (0, 1)]]
    )
    picks, _ = triangulate("a.obj", comb.astype(float), np.array([10]))
    a, b, c = (comb[picks[:, i]] for i in range(3))
    assert 0.5 * np.abs(np.cross(b - a, c - a)[:, 2]).sum() == pytest.approx(6 + 2 + 2)


def test_gltf_with_embedded_buffers(tmp_path):
    file = square_glb()
    data = "data:application/octet-stream;base64," + base64.b64encode(file.binary).decode()
    file.tree["buffers"] = [{"byteLength": len(file.binary), "uri": data}]
    (tmp_path / "a.gltf").write_text(json.dumps(file.tree))
    assert len(load_scene(tmp_path / "a.gltf").triangles) == 2
