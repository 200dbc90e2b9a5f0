"""Readers take time proportional to a file's size: files designed to be slow load or raise an error in seconds.

At these sizes quadratic work takes minutes, so the deadline detects it. One file of each kind is read in every run of
the tests, the others only in the slow ones.
"""

import gzip
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal.core.errors import ShoalError
from shoal.nav.episode_files import read_episodes
from shoal.scene.files import Source
from shoal.scene.load import content_key, load_scene
from tests.scene.meshes import SQUARE, Gltf, picture_bytes

pytestmark = pytest.mark.timeout(60)

MANY = 30_000
LONG = "a" * 200_000
TRIANGLE = "v 0 0 0\nv 1 0 0\nv 0 1 0\nvt 0 0\n"


def kinds(files: dict, *quick: str) -> list:
    """The names of files as parameters of a test, all but the quick ones slow."""
    return [pytest.param(kind, marks=[] if kind in quick else pytest.mark.slow) for kind in files]


def gltf(**lists: list | Callable[[Gltf], list]) -> Gltf:
    """A square as mesh 0 (positions are accessor 0, indices accessor 1), placed once, with other lists in the file."""
    file = Gltf()
    file.mesh()
    file.append("nodes", {"mesh": 0})
    for kind, items in lists.items():
        file.tree[kind] = items(file) if callable(items) else items
    return file


def placed(nodes: list[dict], **more) -> Gltf:
    """A file whose scene contains all nodes."""
    return gltf(nodes=nodes, scenes=[{"nodes": list(range(len(nodes)))}], **more)


def primitive(**more) -> dict:
    return {"attributes": {"POSITION": 0}, "indices": 1, **more}


def textured(images: Callable[[Gltf], list]) -> Gltf:
    """A material and a primitive for each image."""
    return gltf(
        images=images,
        textures=[{"source": i} for i in range(MANY)],
        materials=[{"pbrMetallicRoughness": {"baseColorTexture": {"index": i}}} for i in range(MANY)],
        meshes=[{"primitives": [primitive(material=i) for i in range(MANY)]}],
    )


def one_large_picture(file: Gltf, alpha: int = 254) -> list[dict]:
    view = file.view(picture_bytes(np.full((2000, 2000, 4), alpha, np.uint8)))
    return [{"bufferView": view, "mimeType": "image/png"}] * MANY


def blended(file: Gltf) -> list[dict]:
    file.texture(picture_bytes(np.full((1000, 1000, 4), 255, np.uint8)))
    texture = {"baseColorTexture": {"index": 0}}
    return [{"alphaMode": "BLEND", "pbrMetallicRoughness": texture} for _ in range(MANY)]


def sparse(file: Gltf) -> list[dict]:
    """Many accessors of one entry, each with MANY sparse replacements from the same bytes."""
    zeros, values = file.view(bytes(MANY)), file.view(bytes(12 * MANY))
    change = dict(count=MANY, indices=dict(bufferView=zeros, componentType=5121), values=dict(bufferView=values))
    one = dict(componentType=5126, type="VEC3", count=1, sparse=change)
    return [*file.tree["accessors"], *[one] * MANY]


def with_extensions(file: Gltf) -> list[dict]:
    first, *others = file.tree["bufferViews"]
    return [{**first, "extensions": dict.fromkeys(map(str, range(MANY)), 0)}, *others]


GLTF: dict[str, Callable[[], Gltf]] = {
    "flat nodes": lambda: placed([{"mesh": 0, "translation": [0, 0, i / MANY]} for i in range(3 * MANY)]),
    "nested nodes": lambda: gltf(nodes=[{"mesh": 0, "children": [i + 1]} for i in range(MANY)] + [{"mesh": 0}]),
    "a cycle": lambda: gltf(nodes=[{"children": [(i + 1) % MANY]} for i in range(MANY)]),
    "a shared child": lambda: placed([{"children": [MANY]} for _ in range(MANY)]),
    "too many nodes": lambda: gltf(nodes=[{}] * 1_000_001),
    "a long name": lambda: placed([{"mesh": 0, "name": "1 " * MANY}] + [{"mesh": 0}] * MANY),
    "a long name of a mesh": lambda: placed(
        [{"mesh": 0}] * MANY, meshes=[{"name": "_1" * 10 * MANY, "primitives": [primitive()]}]
    ),
    "a name that is a list": lambda: placed(
        [{"mesh": 0}] * MANY, meshes=[{"name": [0] * MANY, "primitives": [primitive()]}]
    ),
    "many meshes": lambda: placed(
        [{"mesh": i} for i in range(MANY)], meshes=[{"primitives": [primitive()]} for _ in range(MANY)]
    ),
    "points that are placed often": lambda: placed(
        [{"mesh": 0}] * MANY, meshes=[{"primitives": [primitive(mode=0)] * MANY + [primitive()]}]
    ),
    "parts that are placed often": lambda: placed([{"mesh": 0}] * MANY, meshes=[{"primitives": [primitive()] * MANY}]),
    "triangles without coordinates": lambda: gltf(
        images=lambda file: [{"bufferView": file.view(picture_bytes(np.zeros((2, 2, 4), np.uint8)))}],
        textures=[{"source": 0}],
        materials=[{"pbrMetallicRoughness": {"baseColorTexture": {"index": 0}}}] * MANY,
        meshes=[{"primitives": [primitive(material=i) for i in range(MANY)]}],
    ),
    "one picture in many images": lambda: textured(one_large_picture),
    "one picture that blends": lambda: gltf(
        materials=blended, meshes=[{"primitives": [primitive(material=i) for i in range(MANY)]}]
    ),
    "missing pictures": lambda: textured(lambda _: [{"uri": f"{i}.png"} for i in range(MANY)]),
    "an extension for all": lambda: gltf(
        bufferViews=with_extensions,
        accessors=lambda file: [dict(file.tree["accessors"][i % 2]) for i in range(2 * MANY)],
        meshes=[
            {"primitives": [primitive(indices=2 * i + 1, attributes={"POSITION": 2 * i}) for i in range(MANY)]},
        ],
    ),
    "sparse accessors": lambda: gltf(
        accessors=sparse, meshes=[{"primitives": [{"attributes": {"POSITION": 2 + i}} for i in range(MANY)]}]
    ),
    "vertices without data": lambda: gltf(
        accessors=[dict(componentType=5126, type="VEC3", count=10**8)], meshes=[{"primitives": [primitive(indices=0)]}]
    ),
    "one buffer of many": lambda: gltf(
        accessors=[dict(componentType=5126, type="VEC3", count=3, bufferView=i) for i in range(MANY)],
        meshes=[{"primitives": [{"attributes": {"POSITION": i}} for i in range(MANY)]}],
        bufferViews=[dict(buffer=0, byteOffset=0, byteLength=36)] * MANY,
    ),
    "numbers that are a list": lambda: gltf(nodes=[{"mesh": 0, "translation": [0] * MANY}]),
}


@pytest.mark.parametrize(
    "kind",
    kinds(GLTF, "nested nodes", "a cycle", "parts that are placed often", "sparse accessors", "one buffer of many"),
)
def test_gltf(tmp_path, kind):
    reads(GLTF[kind]().save(tmp_path / "a.glb"))


def test_one_large_file_of_many_references(tmp_path):
    (tmp_path / "b.bin").write_bytes(SQUARE.tobytes() + bytes(2 * 10**7))
    for i in range(200):
        (tmp_path / f"another-{i}").touch()
    buffers = [dict(byteLength=48, uri="./" * (i % 100) + "b.bin") for i in range(2000)]
    buffers += [dict(byteLength=48, uri=f"{i}.BIN") for i in range(MANY)]
    file = gltf(buffers=buffers)
    file.binary = b""
    reads(file.save(tmp_path / "a.glb"))


def reads(path: Path) -> None:
    """Load a file and compute its cache key; an error must be one short sentence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of missing textures
        check(lambda: load_scene(path))
    check(lambda: content_key(Source(path), "auto", 1.0, 1))


def check(action: Callable[[], object]) -> None:
    """A ShoalError of the action must be one short sentence."""
    message = ""
    try:
        action()
    except ShoalError as error:
        message = str(error)
    assert len(message) < 1000
    assert "\n" not in message


def materials(count: int, line: str) -> str:
    return "".join(f"newmtl m{i}\n{line.format(i=i)}\n" for i in range(count))


def faces_of(count: int) -> str:
    return "".join(f"usemtl m{i}\nf 1/1 2/1 3/1\n" for i in range(count))


def star(corners: int, first: int) -> str:
    """A concave polygon: its corners, and the face that starts at vertex `first`."""
    angle = np.linspace(0, 2 * np.pi, corners, endpoint=False)
    reach = np.random.default_rng(corners).uniform(0.1, 1.0, corners)
    points = zip(reach * np.cos(angle), reach * np.sin(angle), strict=True)
    face = " ".join(str(first + i) for i in range(corners))
    return "".join(f"v {x:.4f} {y:.4f} 0\n" for x, y in points) + f"f {face}\n"


OBJ: dict[str, Callable[[], tuple[str, str]]] = {
    "materials with options": lambda: (TRIANGLE + faces_of(MANY), materials(MANY, "map_Kd -s 2 2 -o 1 1 big.png")),
    "materials of one picture": lambda: (TRIANGLE + faces_of(MANY), materials(MANY, "map_Kd big.png")),
    "materials of one mask": lambda: (TRIANGLE + faces_of(MANY), materials(MANY, "map_Kd {i}.png\nmap_d big.png")),
    "switches in a long group": lambda: (
        TRIANGLE + "".join(f"g {LONG}\nusemtl m{i}\nf 1 2 3\n" for i in range(9)) + f"g {LONG}\n" + faces_of(MANY),
        "",
    ),
    "a long line of options": lambda: (TRIANGLE + faces_of(1), "newmtl m0\nmap_Kd " + "-a b " * 5 * MANY + "big.png\n"),
    "many names of one library": lambda: (
        "".join(f"mtllib {'./' * i}a.mtl\n" for i in range(1, 1000)) + TRIANGLE + faces_of(9),
        materials(MANY, "Kd 1 0 0"),
    ),
    "libraries that are missing": lambda: (
        "".join(f"mtllib {i}.mtl\n" for i in range(MANY)) + TRIANGLE + faces_of(9),
        "",
    ),
    "a star of 2,000": lambda: (star(2000, 1), ""),
    "many stars": lambda: ("".join(star(2000, 1 + 2000 * i) for i in range(100)), ""),
    "polygons of all lengths": lambda: (
        TRIANGLE + "".join("f" + " 1 2 3" * i + "\n" for i in range(1, 300)) + "f 1 2 3 1\n" * 5 * MANY,
        "",
    ),
    "one face with a fault at its end": lambda: (TRIANGLE + "f " + "1 " * 10 * MANY + "x\n", ""),
    "one long number": lambda: (TRIANGLE + "v 0 0 0." + "0" * 10**6 + "\n" + "v 1 1 1\n" * MANY + "f 1 2 3\n", ""),
}


@pytest.mark.parametrize("kind", kinds(OBJ, "many stars", "one long number", "switches in a long group"))
def test_obj(tmp_path, kind):
    text, library = OBJ[kind]()
    (tmp_path / "big.png").write_bytes(picture_bytes(np.full((1500, 1500, 4), 255, np.uint8)))
    (tmp_path / "a.mtl").write_text(library)
    (tmp_path / "a.obj").write_text("mtllib a.mtl\n" + text)
    reads(tmp_path / "a.obj")


POINTS = "element vertex 3\nproperty float x\nproperty float y\nproperty float z\n"
FACES = "element face {}\nproperty list uchar int vertex_indices\n"
PLACES = "0 0 0\n1 0 0\n0 1 0\n"
ONE = PLACES + "3 0 1 2\n"

PLY: dict[str, Callable[[], tuple[str, str | bytes]]] = {
    "many elements": lambda: ("".join(f"element e{i} 0\n" for i in range(MANY)) + POINTS + FACES.format(1), ONE),
    "many properties": lambda: (POINTS + "property float p\n" * MANY + FACES.format(1), "0 " * 3 * MANY),
    "elements without properties": lambda: ("element e 150000000\n" * MANY + POINTS + FACES.format(1), ONE),
    "lists of different lengths": lambda: (
        POINTS + FACES.format(MANY),
        PLACES + "".join(f"{3 + i % 5}" + " 0 1 2 0 1 2 0"[: 2 * (3 + i % 5)] + "\n" for i in range(MANY)),
    ),
    "one long list": lambda: (
        POINTS + FACES.format(2).replace("uchar", "int"), ONE + f"{9 * MANY} " + "0 1 2 " * 3 * MANY
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLY)
@pytest.mark.parametrize("order", ["ascii", "binary_little_endian"])
def test_ply(tmp_path, kind, order):
    head, body = PLY[kind]()
    (tmp_path / "a.ply").write_text(f"ply\nformat {order} 1.0\n{head}end_header\n{body}")
    reads(tmp_path / "a.ply")


EPISODE = dict(
    episode_id="0",
    scene_id="a.glb",
    start_position=[0, 0, 0],
    start_rotation=[0, 0, 0, 1],
    goals=[dict(position=[0, 0, 0])],
)

EPISODES: dict[str, Callable[[], list]] = {
    "many scenes": lambda: [{**EPISODE, "scene_id": f"{i}.glb"} for i in range(MANY)],
    "one long id": lambda: [{**EPISODE, "episode_id": LONG}] + [EPISODE] * MANY,
    "an id that is a list": lambda: [{**EPISODE, "episode_id": [0] * MANY}] + [EPISODE] * MANY,
    "one long scene": lambda: [{**EPISODE, "scene_id": "/" * MANY + "a.glb"}] + [EPISODE] * MANY,
}


@pytest.mark.parametrize("kind", kinds(EPISODES, "one long id"))
def test_episodes(tmp_path, kind):
    file = tmp_path / "a.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"episodes": EPISODES[kind]()}).encode()))
    check(lambda: read_episodes(file))
