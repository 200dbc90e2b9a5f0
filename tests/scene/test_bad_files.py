"""Every kind of broken file raises one sentence that names the file and the reason."""

import base64
import json
import os
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

import shoal.scene.files
import shoal.scene.gltf
import shoal.scene.gltf_file
import shoal.scene.parsed
import shoal.scene.polygons
from shoal.core.errors import ShoalError
from shoal.scene.load import load_scene
from tests.scene.meshes import FACES, FOUR, SQUARE, Gltf, picture_bytes, square_glb

OBJ = "v 0 0 0\nv 1 0 0\nv 0 1 0\n"
PLY = (
    "ply\nformat ascii 1.0\nelement vertex 3\nproperty float x\nproperty float y\nproperty float z\n"
    "element face 1\nproperty list uchar int vertex_indices\nend_header\n"
)
PLY_BODY = "0 0 0\n1 0 0\n0 1 0\n3 0 1 2\n"


def refused(path, *words: str, **settings) -> str:
    """The error message of `load_scene`, which must contain all the words."""
    with pytest.raises(ShoalError) as caught:
        load_scene(path, **settings)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert "\n" not in message
    return message


def written(path, content: str | bytes):
    """Write a file and return its path."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# --- Any kind of file ------------------------------------------------------------------------------------------------


def test_missing_files_and_files_that_are_not_meshes(tmp_path):
    refused(tmp_path / "none.glb", "There is no file", "none.glb")
    refused(tmp_path, "is a folder")
    refused(written(tmp_path / "a.stl", "solid"), "a.stl", "'.stl'", ".glb, .gltf, .obj, .ply")
    refused(written(tmp_path / "a", "x"), "unknown extension")
    refused("a\0b.glb")
    refused("x" * 5000 + ".glb")
    os.mkfifo(tmp_path / "pipe.glb")
    refused(tmp_path / "pipe.glb", "not a regular file")


@pytest.mark.parametrize("ending", ["glb", "gltf", "obj", "ply"])
def test_empty_and_text_files(tmp_path, ending):
    refused(written(tmp_path / f"a.{ending}", ""), f"a.{ending}", "is empty")
    refused(written(tmp_path / f"b.{ending}", "Dear all,\nthis is a letter.\n"), f"b.{ending}", "not")
    refused(written(tmp_path / f"c.{ending}", bytes(range(256)) * 40), f"c.{ending}", "not")


@pytest.mark.parametrize("settings", [{"up": "x"}, {"scale": 0}, {"scale": -1.0}, {"scale": float("nan")}])
def test_bad_settings(tmp_path, settings):
    key, value = next(iter(settings.items()))
    refused(
        written(tmp_path / "a.obj", OBJ + "f 1 2 3\n"), "up axis" if key == "up" else "scale", repr(value), **settings
    )


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_vertices_that_are_not_finite(tmp_path, value):
    points = SQUARE.copy()
    points[2, 1] = float(value)
    file = Gltf()
    file.mesh(points)
    file.append("nodes", {"mesh": 0})
    refused(file.save(tmp_path / "a.glb"), "a.glb: vertex 2 is not finite", value)
    refused(
        written(tmp_path / "a.obj", OBJ.replace("v 1 0 0", f"v 1 {value} 0") + "f 1 2 3\n"), "vertex 1 is not finite"
    )
    refused(written(tmp_path / "a.ply", PLY + PLY_BODY.replace("1 0 0", f"1 {value} 0")), "vertex 1 is not finite")


def test_texture_coordinates_that_are_not_finite(tmp_path):
    refused(written(tmp_path / "a.obj", OBJ + "vt nan 0\nf 1/1 2/1 3/1\n"), "texture coordinates", "not finite")


def test_huge_coordinates(tmp_path):
    path = written(tmp_path / "a.obj", "v 0 0 0\nv 3e6 0 0\nv 0 1e6 0\nf 1 2 3\n")
    refused(path, "3e+06", "more than 10000 m across", "--scale")
    assert load_scene(path, scale=0.001).bounds[1, 0] == 3000
    refused(written(tmp_path / "b.obj", "v 0 0 0\nv 1e300 0 0\nv 0 1e300 0\nf 1 2 3\n"), "1e+300")


def test_triangles_that_all_lack_an_area(tmp_path):
    refused(written(tmp_path / "a.obj", OBJ + "f 1 1 2\nf 2 2 2\n"), "none of its 2 triangles has an area")
    refused(written(tmp_path / "b.obj", "v 0 0 0\nv 1 1 1\nv 2 2 2\nf 1 2 3\n"), "has an area")


def test_too_many_triangles_or_bytes(tmp_path, monkeypatch):
    glb = square_glb().save(tmp_path / "a.glb")
    obj = written(tmp_path / "a.obj", OBJ + "f 1 2 3\nf 3 2 1\n")
    ply = written(tmp_path / "a.ply", PLY.replace("face 1", "face 9") + PLY_BODY)
    monkeypatch.setattr(shoal.scene.parsed, "MAX_TRIANGLES", 1)
    for path in (glb, obj, ply):
        refused(path, "triangles; at most 1 are read")
    monkeypatch.setattr(shoal.scene.files, "MAX_FILE_BYTES", 20)
    refused(obj, "bytes; at most 20")


def test_a_small_file_that_places_one_mesh_many_times(tmp_path, monkeypatch):
    file = square_glb()
    file.tree["nodes"] = [{"mesh": 0}] * 30
    file.tree["scenes"] = [{"nodes": list(range(30))}]
    monkeypatch.setattr(shoal.scene.parsed, "MAX_TRIANGLES", 50)
    refused(file.save(tmp_path / "a.glb"), "60 triangles; at most 50")


def test_limits_of_gltf(tmp_path, monkeypatch):
    """Each limit is enforced; here the limits are small."""
    two = square_glb()
    two.tree["nodes"] = [{"mesh": 0}] * 2
    two.tree["scenes"] = [{"nodes": [0, 1]}]
    path = two.save(tmp_path / "a.glb")
    monkeypatch.setattr(shoal.scene.gltf, "free_memory", lambda device: 1000)
    refused(path, "a.glb takes about 0.0 GB of memory to read")
    monkeypatch.undo()
    monkeypatch.setattr(shoal.scene.gltf_file, "MAX_ITEMS", 1)
    refused(path, "a.glb has 2 'nodes'; at most 1 are read")
    one = square_glb()
    del one.tree["accessors"][0]["bufferView"]
    monkeypatch.setattr(shoal.scene.gltf_file, "MAX_ITEMS", 3)
    monkeypatch.setattr(shoal.scene.gltf, "MAX_PRIMITIVES", 3)
    refused(one.save(tmp_path / "b.glb"), "accessor 0 declares 4 entries without data; at most 3 are read")
    two.tree["meshes"][0]["primitives"] *= 2
    refused(two.save(tmp_path / "c.glb"), "c.glb places 4 primitives; at most 3 are read")


def test_too_many_corners_of_concave_faces(tmp_path, monkeypatch):
    star = "v 0 0 0\nv 2 0 0\nv 1 0.2 0\nv 2 2 0\nv 0 2 0\nf 1 2 3 4 5\n"
    path = written(tmp_path / "a.obj", star)
    assert len(load_scene(path).triangles) == 3
    monkeypatch.setattr(shoal.scene.polygons, "MAX_EAR_WORK", 1000)
    refused(path, "a.obj has too many concave faces with many corners (such as 5)", "triangulate it")


# --- glTF ------------------------------------------------------------------------------------------------------------


def test_truncated_glb(tmp_path):
    data = square_glb().bytes()
    refused(written(tmp_path / "a.glb", data[:10]), "a.glb is truncated")
    refused(written(tmp_path / "b.glb", data[: len(data) // 2]), "b.glb is truncated", f"{len(data):,} bytes")
    short = data[:8] + struct.pack("<I", 60) + data[12:60]
    refused(written(tmp_path / "c.glb", short), "goes beyond its end")


def test_other_versions_and_json(tmp_path):
    data = square_glb().bytes()
    refused(written(tmp_path / "a.glb", data[:4] + struct.pack("<I", 1) + data[8:]), "version 1")
    refused(written(tmp_path / "a.gltf", '{"asset": {"version": "1.0"}}'), "version '1.0'")
    refused(written(tmp_path / "b.gltf", '{"asset": {"version": "2.0"'), "JSON cannot be read")
    refused(written(tmp_path / "c.gltf", '{"name": 3}'), "not glTF", "asset")
    refused(written(tmp_path / "d.gltf", "[" * 100_000), "JSON cannot be read")
    refused(written(tmp_path / "e.gltf", '{"asset": {"version": "2.0"}}'), "holds no triangles")


def _changed(tmp_path, change) -> object:
    file = square_glb()
    change(file)
    return file.save(tmp_path / "a.glb")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.tree["accessors"][1].update(count=600), ("accessor 1 needs", "truncated or damaged")),
        (lambda f: f.tree["accessors"][1].update(count=-3), ("count of accessor 1", "-3")),
        (lambda f: f.tree["accessors"][1].update(count=5), ("not three per triangle",)),
        (lambda f: f.tree["accessors"][0].update(count=10**15), ("accessor 0 declares", "triangles")),
        (lambda f: f.tree["accessors"][0].update(count=2), ("refers to vertex 3", "2 vertices")),
        (lambda f: f.tree["accessors"][0].update(type="VEC7"), ("accessor 0", "VEC7")),
        (lambda f: f.tree["accessors"][0].update(componentType=9), ("unknown component type 9",)),
        (lambda f: f.tree["accessors"][1].update(componentType=5122), ("unsigned",)),
        (lambda f: f.tree["bufferViews"][0].update(byteLength=10**6), ("buffer view 0", "truncated or damaged")),
        (lambda f: f.tree["bufferViews"][0].update(byteOffset=-4), ("offset of buffer view 0", "-4")),
        (lambda f: f.tree["bufferViews"][0].update(buffer=3), ("'buffers'", "3")),
        (lambda f: f.tree["bufferViews"][0].update(byteStride=4), ("accessor 0 needs",)),
        (lambda f: f.tree["nodes"][0].update(mesh=9), ("index 9 of its 'meshes'", "there are 1")),
        (lambda f: f.tree["nodes"][0].update(mesh=-1), ("index -1 of its 'meshes'",)),
        (lambda f: f.tree["nodes"][0].update(children=[0]), ("two parents",)),
        (lambda f: f.tree["nodes"][0].update(matrix=[1, 2]), ("matrix of node 0", "16 finite numbers")),
        (lambda f: f.tree["nodes"][0].update(rotation=[0, 0, 0, 0]), ("rotation of node 0 is zero",)),
        (lambda f: f.tree["nodes"][0].update(scale=[0, 0, 0]), ("has an area",)),
        (lambda f: f.tree["meshes"][0].update(primitives=None), ("no list of primitives",)),
        (lambda f: f.tree["meshes"][0]["primitives"][0].update(material=4), ("index 4 of its 'materials'",)),
        (
            lambda f: f.tree["meshes"][0]["primitives"][0]["attributes"].update(COLOR_0=1),
            ("accessor 1", "incompatible"),
        ),
        (lambda f: f.tree.update(nodes="none"), ("'nodes' is not a list",)),
        (lambda f: f.tree.update(scenes=[{"nodes": 5}]), ("could not be read as glTF",)),
    ],
)
def test_damaged_gltf(tmp_path, change, words):
    message = refused(_changed(tmp_path, change), "a.glb")
    assert any(word in message for word in words), message


def test_index_out_of_range_in_glb(tmp_path):
    file = Gltf()
    file.mesh(faces=np.array([0, 1, 9], np.uint16))
    file.append("nodes", {"mesh": 0})
    refused(file.save(tmp_path / "a.glb"), "accessor 1 refers to vertex 9", "4 vertices")


@pytest.mark.parametrize(
    ("extension", "word"),
    [
        ("KHR_draco_mesh_compression", "Draco"),
        ("EXT_meshopt_compression", "meshopt"),
        ("KHR_texture_basisu", "KTX2"),
        ("ACME_teapots", "not supported"),
    ],
)
def test_required_extensions_are_refused_by_name(tmp_path, extension, word):
    message = refused(_changed(tmp_path, lambda f: f.tree.update(extensionsRequired=[extension])), extension, word)
    if "compression" in extension:
        assert "gltf-transform" in message


def test_draco_without_a_fallback(tmp_path):
    def change(file):
        file.tree["meshes"][0]["primitives"][0]["extensions"] = {"KHR_draco_mesh_compression": {"bufferView": 0}}
        for accessor in file.tree["accessors"]:
            del accessor["bufferView"]

    refused(_changed(tmp_path, change), "KHR_draco_mesh_compression", "gltf-transform")


def _textured(tmp_path, picture: bytes | str, name: str = "a.gltf"):
    """A .gltf with one image, given as bytes or as a URI."""
    file = Gltf()
    uv = file.accessor(np.zeros((4, 2), np.float32))
    if isinstance(picture, bytes):
        file.texture(picture)
    else:
        file.append("images", {"uri": picture})
        file.append("textures", {"source": 0})
    file.mesh(material={"pbrMetallicRoughness": {"baseColorTexture": {"index": 0}}}, TEXCOORD_0=uv)
    file.append("nodes", {"mesh": 0})
    return file.save_apart(tmp_path / name)


def test_damaged_and_missing_images_and_buffers(tmp_path):
    refused(_textured(tmp_path, "data:image/png;base64,!!!"), "image 0", "not")
    refused(_textured(tmp_path, "data:image/png,abc"), "not base64")
    path = square_glb().save_apart(tmp_path / "b.gltf")
    path.with_suffix(".bin").write_bytes(b"short")
    refused(path, "buffer 0 declares", "truncated")
    path.with_suffix(".bin").unlink()
    refused(path, "buffer 'b.bin' is missing")


def _png_claiming(width: int, height: int) -> bytes:
    """A small PNG file that declares this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )


def test_images_that_cannot_be_decoded(tmp_path):
    good = picture_bytes(np.random.default_rng(0).integers(0, 255, (64, 64, 4), np.uint8))
    refused(_textured(tmp_path, good[: len(good) // 2]), "image 0", "is damaged")
    refused(_textured(tmp_path, picture_bytes(FOUR, "JPEG")[:200]), "image 0")
    refused(_textured(tmp_path, b"Dear all, this is no image."), "image 0", "not a readable image", "PNG, JPEG")
    refused(_textured(tmp_path, b"\xabKTX 20\xbb\r\n\x1a\n" + bytes(80)), "image 0", "KTX2")
    refused(_textured(tmp_path, _png_claiming(60_000, 60_000)), "image 0", "at most", "shrink")
    refused(_textured(tmp_path, _png_claiming(13_000, 13_000)), "13000 x 13000", "at most")
    (tmp_path / "broken.png").write_bytes(good[:100])
    refused(_textured(tmp_path, "broken.png"), "'broken.png'", "damaged")


def test_too_many_pixels_in_all(tmp_path, monkeypatch):
    monkeypatch.setattr(shoal.scene.files, "MAX_TOTAL_PIXELS", 3)
    refused(_textured(tmp_path, picture_bytes(FOUR)), "more than 3 pixels in all")


# --- OBJ -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OBJ, ("holds no triangles", "3 vertices, 0 faces")),
        ("f 1 2 3\n", ("no vertices",)),
        (OBJ + "f 1 2 9\n", ("line 4", "vertex 9", "there are 3")),
        (OBJ + "f 0 1 2\n", ("line 4", "vertex 0", "counted from 1")),
        (OBJ + "f 1 2 -4\n", ("line 4", "vertex -4")),
        (OBJ + "vt 0 0\nf 1/1 2/1 3/2\n", ("line 5", "texture coordinate 2", "there are 1")),
        (OBJ + "f 1 2 three\n", ("line 4", "f 1 2 three", "not a face")),
        (OBJ + "f 1/2/3 4 5/6\n", ("not a face",)),
        (OBJ + "f 1 2 3.5\n", ("not a face",)),
        (OBJ + "f 1 2 99999999999999999999999\n", ("a.obj",)),
        ("v 0 zero 0\n" + OBJ + "f 1 2 3\n", ("v 0 zero 0", "something other than numbers")),
        ("v 0 0\n" + OBJ + "f 1 2 3\n", ("v 0 0", "2 numbers instead of 3")),
        (OBJ + "f 1 2\n", ("no triangles",)),
        (OBJ + "f 1 2 \x1b[31m\n", (r"'f 1 2 \x1b[31m' is not a face",)),
        (OBJ + "f " + "1" * 200 + "x\n", ("not a face",)),
    ],
)
def test_damaged_obj(tmp_path, text, words):
    refused(written(tmp_path / "a.obj", text), "a.obj", *words)


def test_obj_textures_that_are_damaged(tmp_path):
    path = written(tmp_path / "a.obj", "mtllib a.mtl\n" + OBJ + "vt 0 0\nusemtl m\nf 1/1 2/1 3/1\n")
    written(tmp_path / "a.mtl", "newmtl m\nmap_Kd maps/wood.jpg\nnewmtl other\nmap_Kd unused.jpg\n")
    (tmp_path / "maps").mkdir()
    written(tmp_path / "maps" / "wood.jpg", "no picture")
    refused(path, "'maps/wood.jpg'", "not a readable image")
    Image.fromarray(FOUR[..., :3]).save(tmp_path / "maps" / "wood.jpg")
    assert load_scene(path).textures[0].shape == (2, 2, 4)


@pytest.mark.parametrize("reference", ["gone.png", "../gone.png", "https://example.org/a.png", "x" * 5000])
@pytest.mark.parametrize("ending", ["gltf", "obj", "ply"])
def test_missing_textures_are_a_warning_or_strictly_an_error(tmp_path, ending, reference):
    written(tmp_path / "a.mtl", f"newmtl m\nKd 0 1 0\nmap_Kd {reference}\n")
    if ending == "gltf":
        path = _textured(tmp_path, reference)
    elif ending == "obj":
        path = written(tmp_path / "a.obj", "mtllib a.mtl\n" + OBJ + "vt 0 0\nusemtl m\nf 1/1 2/1 3/1\n")
    else:
        head = PLY.replace("element vertex", f"comment TextureFile {reference}\nelement vertex")
        head = head.replace("float z", "float z\nproperty float u\nproperty float v")
        path = written(tmp_path / "a.ply", head + "0 0 0 0 0\n1 0 0 0 0\n0 1 0 0 0\n3 0 1 2\n")
    with pytest.warns(UserWarning, match=rf"a\.{ending}: textures are missing .*{re.escape(reference[:50])}"):
        scene = load_scene(path)
    assert scene.missing == (reference,)
    assert scene.materials[scene.material[0]].texture == -1
    if ending == "obj":
        assert scene.materials[0].color == (0, 1, 0, 1)
    refused(path, f"a.{ending}: its texture", reference[:50], strict=True)


# --- PLY -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ply\nformat ascii 1.0\nelement vertex 3\n", ("header has no end",)),
        (PLY.replace("format ascii 1.0\n", "") + PLY_BODY, ("names no format",)),
        (PLY.replace("float x", "floot x") + PLY_BODY, ("property floot x",)),
        (PLY.replace("element vertex 3", "element vertex many") + PLY_BODY, ("element vertex many",)),
        (PLY.replace("element vertex 3\n", "") + PLY_BODY, ("property float x",)),
        (PLY.replace("property float z\n", "") + PLY_BODY, ("x, y and z",)),
        (PLY.replace("vertex 3", "vertex 9999999999") + PLY_BODY, ("9,999,999,999",)),
        (PLY + PLY_BODY[:12], ("is truncated",)),
        (PLY + "0 0 0\n1 0 0\n0 1 0\n3 0 1\n", ("truncated or damaged", "length 3")),
        (PLY + PLY_BODY.replace("3 0 1 2", "3 0 1 7"), ("vertex 7", "there are 3")),
        (PLY + PLY_BODY.replace("3 0 1 2", "3 0 1 -1"), ("vertex -1",)),
        (PLY + PLY_BODY.replace("3 0 1 2", "-3 0 1 2"), ("length -3",)),
        (PLY + PLY_BODY.replace("1 0 0", "1 one 0"), ("something other than numbers",)),
        (PLY.replace("face 1", "face 0") + PLY_BODY, ("holds no triangles", "point cloud")),
        (PLY.replace("ply\n", "plx\n") + PLY_BODY, ("begins with", "plx")),
    ],
)
def test_damaged_ply(tmp_path, text, words):
    refused(written(tmp_path / "a.ply", text), "a.ply", *words)


def test_truncated_binary_ply(tmp_path):
    head = PLY.replace("ascii", "binary_little_endian").encode()
    body = SQUARE[:3].tobytes() + b"\x03" + np.array([0, 1, 2], "<i4").tobytes()
    assert len(load_scene(written(tmp_path / "a.ply", head + body)).triangles) == 1
    refused(written(tmp_path / "b.ply", head + body[:20]), "is truncated", "3 of 'vertex'")
    refused(written(tmp_path / "c.ply", head + body[:-2]), "truncated or damaged", "'face'")


# --- Random damage ---------------------------------------------------------------------------------------------------


def _good_files() -> dict[str, bytes]:
    file = Gltf()
    uv = file.accessor(np.zeros((4, 2), np.float32))
    file.texture(picture_bytes(FOUR))
    material = {"alphaMode": "BLEND", "pbrMetallicRoughness": {"baseColorTexture": {"index": 0}}}
    file.mesh(material=material, TEXCOORD_0=uv, COLOR_0=file.accessor(np.full((4, 4), 200, np.uint8), normalized=True))
    file.tree["nodes"] = [{"children": [1], "rotation": [0, 0, 0, 1]}, {"mesh": 0, "scale": [1, 2, 3]}]
    ply = PLY.replace("ascii", "binary_little_endian").replace("face 1", "face 2").encode()
    ply += (
        SQUARE[:3].tobytes() + b"\x03" + np.array([0, 1, 2], "<i4").tobytes() + b"\x03" + bytes(FACES.astype("<i4")[0])
    )
    inside = "data:application/octet-stream;base64," + base64.b64encode(file.binary).decode()
    tree = {**file.tree, "buffers": [{"byteLength": len(file.binary), "uri": inside}]}
    obj = (
        "mtllib a.mtl\n"
        + OBJ
        + "vt 0 0\nvt 1 1\no thing\nusemtl m\nf 1/1 2/2 3/1\nf -3 -2 -1\ng b\nf 1//1 2//1 3//1 1//1\n"
    )
    return {
        "a.glb": file.bytes(),
        "a.gltf": json.dumps(tree).encode(),
        "a.obj": obj.encode(),
        "a.ply": ply,
        "b.ply": (PLY + PLY_BODY).encode(),
    }


@pytest.mark.parametrize("name", ["a.glb", "a.gltf", "a.obj", "a.ply", "b.ply"])
def test_random_damage_is_refused_or_harmless(tmp_path, name):
    data = _good_files()[name]
    written(tmp_path / "a.mtl", "newmtl m\nKd 1 0 0\nd 0.5\n")
    rng = np.random.default_rng(1)
    broken = [data[:cut] for cut in range(1, len(data), max(1, len(data) // 60))]
    for _ in range(400):
        copy = bytearray(data)
        for place in rng.integers(0, len(data), rng.integers(1, 4)):
            copy[place] = rng.choice([rng.integers(256), copy[place] ^ (1 << rng.integers(8)), ord("9"), ord("-")])
        broken.append(bytes(copy))
    outcomes = []
    for content in broken:
        path = written(tmp_path / name, content)
        try:
            scene = load_scene(path)
        except ShoalError as error:
            outcomes.append(str(error))
        else:
            assert scene.triangles.max() < len(scene.vertices)
            assert np.isfinite(scene.vertices).all()
            outcomes.append("")
    assert any(outcomes)
    assert not all(outcomes)
