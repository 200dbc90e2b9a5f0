"""The cache: the second load equals the first, any change is noticed, and no fault of the cache stops a load."""

import os
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import shoal.scene.sources
from shoal.cli import main
from shoal.core.errors import ShoalError
from shoal.scene.cache import DamagedError, cache_folder, cached, read_arrays, save_arrays, trim
from shoal.scene.load import load_scene
from shoal.scene.pack import pack_scene
from shoal.scene.sources import expand, open_scene, prepare
from tests.damage import DAMAGES
from tests.scene.meshes import FOUR, square_glb

ARRAYS = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.zeros((0, 3), np.float32), "c": np.float64([1.5])}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def chair(tmp_path):
    """An .obj with everything it refers to."""
    Image.fromarray(FOUR).save(tmp_path / "four.png")
    (tmp_path / "a.mtl").write_text("newmtl m\nKd 1 0.5 0\nd 0.9\nmap_Kd four.png\n")
    path = tmp_path / "chair.obj"
    path.write_text("mtllib a.mtl\nv 0 0 0\nv 1 0 0\nv 0 1 0\nvt 0 0\no chair_1\nusemtl m\nf 1/1 2/1 3/1\nf 1 1 2\n")
    return path


def same(a, b) -> bool:
    """Whether two packed scenes are equal in every bit."""
    rest = [
        (p.name, p.section_starts, p.labels, p.triangles, p.has_cutouts, p.notes, p.bounds.tolist()) for p in (a, b)
    ]
    return rest[0] == rest[1] and torch.equal(a.words.view(torch.int32), b.words.view(torch.int32))


@pytest.fixture
def builds(monkeypatch):
    """The calls that build a scene from its file."""
    calls = []
    real = shoal.scene.sources.build
    monkeypatch.setattr(shoal.scene.sources, "build", lambda *given: calls.append(given) or real(*given))
    return calls


def test_the_second_load_equals_the_first_and_reads_no_mesh(folder, chair, builds):
    first = prepare(str(chair))
    second = prepare(str(chair))
    assert len(builds) == 1
    assert same(first, second)
    assert same(first, pack_scene(load_scene(chair)))
    assert second.notes
    assert len(list(folder.iterdir())) == 1


def test_every_input_of_the_scene_changes_the_entry(folder, chair, builds):
    def count(**settings) -> int:
        prepare(str(chair), **settings)
        return len(builds)

    assert count() == 1
    assert count(scale=0.01) == 2
    assert count(up="z") == 3
    assert count(up="y") == 3, "auto means y for .obj"
    (chair.parent / "a.mtl").write_text((chair.parent / "a.mtl").read_text().replace("0.5", "0.25"))
    assert count() == 4
    Image.fromarray(FOUR[::-1]).save(chair.parent / "four.png")
    assert count() == 5
    chair.write_text(chair.read_text() + "# end\n")
    assert count() == 6
    (chair.parent / "a.mtl").rename(chair.parent / "b.mtl")
    assert count() == 7
    assert count() == 7


def test_the_files_of_a_gltf_count_too(folder, tmp_path, builds):
    path = square_glb().save_apart(tmp_path / "a.gltf")
    prepare(str(path))
    binary = bytearray(path.with_suffix(".bin").read_bytes())
    binary[12:16] = np.float32(9).tobytes()
    path.with_suffix(".bin").write_bytes(binary)
    assert prepare(str(path)).bounds[1, 0] == 9
    assert len(builds) == 2


def test_unused_textures_may_be_missing(folder, chair):
    with (chair.parent / "a.mtl").open("a") as file:
        file.write("newmtl unused\nmap_Kd gone.png\nnewmtl far\nmap_Kd https://example.org/a.png\n")
    assert same(prepare(str(chair)), pack_scene(load_scene(chair)))


def test_arrays_and_metadata_round_trip(tmp_path):
    save_arrays(tmp_path / "deep" / "x.safetensors", ARRAYS, {"word": "ü", "list": [1, 2.5, None]})
    arrays, meta = read_arrays(tmp_path / "deep" / "x.safetensors")
    assert meta == {"word": "ü", "list": [1, 2.5, None]}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "none.safetensors")


def test_any_flipped_or_missing_byte_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    save_arrays(path, ARRAYS, {"word": "x"})
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            arrays, meta = read_arrays(path)
        except DamagedError:
            continue
        # A few bytes, such as the padding of the header, carry no information.
        assert meta == {"word": "x"}
        assert all(np.array_equal(arrays[k], ARRAYS[k]) for k in ARRAYS)
    for cut in (0, 1, 7, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:cut])
        with pytest.raises(DamagedError):
            read_arrays(path)


@pytest.mark.parametrize("damage", [*DAMAGES, "another entry"])
def test_a_damaged_entry_is_computed_again_with_a_warning(folder, chair, damage):
    first = prepare(str(chair))
    (entry,) = folder.iterdir()
    if damage == "another entry":
        save_arrays(entry, ARRAYS, {"word": "not a scene"})
    else:
        DAMAGES[damage](entry)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second = prepare(str(chair))
    assert [f"{entry} is damaged" in str(warning.message) for warning in caught] == [True] * (damage != "missing")
    assert same(first, second)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(first, prepare(str(chair))), "the next load is clean"


@pytest.mark.parametrize("kind", ["file", "sealed"])
def test_a_folder_that_cannot_be_written_only_warns(tmp_path, chair, monkeypatch, kind):
    (tmp_path / "file").write_text("in the way")
    if kind == "sealed":  # root may write anywhere, so the error is simulated
        real = os.replace
        monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / ("file" if kind == "file" else "sealed")))
    with pytest.warns(UserWarning, match="cannot be written"):
        scene = prepare(str(chair))
    assert scene.triangles == 1
    if kind == "sealed":
        monkeypatch.setattr(os, "replace", real)
        assert list((tmp_path / "sealed").iterdir()) == [], "the temporary file is gone"


def test_two_processes_write_one_entry_at_once(folder, chair):
    program = (
        "import sys, shoal.scene.cache as c, numpy as np\n"
        "from shoal.scene.sources import prepare\n"
        "path = c.cache_folder() / 'shared.safetensors'\n"
        "for i in range(60):\n"
        "    c.save_arrays(path, {'a': np.full(20_000, i)}, {'i': i})\n"
        "    arrays, meta = c.read_arrays(path)\n"
        "    assert (arrays['a'] == meta['i']).all()\n"
        f"assert (prepare({str(chair)!r}).triangles) == 1\n"
    )
    both = [subprocess.Popen([sys.executable, "-W", "error", "-c", program], env=dict(os.environ)) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(list(folder.iterdir())) == 2


def test_the_least_recently_used_entries_are_removed(folder):
    for i in range(4):
        save_arrays(folder / f"{i}.safetensors", {"a": np.zeros(1000, np.uint8)}, {})
        os.utime(folder / f"{i}.safetensors", (i, i))
    key_one = cached("1", lambda: pytest.fail("it is there"), lambda x: ({}, {}), lambda arrays, meta: arrays["a"])
    assert len(key_one) == 1000  # now the most recently used
    leftover = folder / ".writing-old.safetensors"
    leftover.write_bytes(b"x")
    os.utime(leftover, (time.time() - 1e6,) * 2)
    size = (folder / "0.safetensors").stat().st_size
    trim(folder, spare=folder / "0.safetensors", limit=2 * size + 10)
    assert sorted(p.name for p in folder.iterdir()) == ["0.safetensors", "1.safetensors"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("SHOAL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / "shoal" / "scenes"
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("house:", "needs a seed"),
        ("house", "needs a seed"),
        ("house:-3", "'-3'"),
        ("house:seven", "'seven'"),
        ("hous:7", "did you mean 'house'"),
        ("cabn:7", "did you mean 'cabin'"),
        ("cabin:abc", "A cabin needs a seed.*cabin:7, not 'abc'"),
        ("cabin:7@x", "detail of a cabin.*cabin:7@2, not 'x'"),
        ("cabin:7@9", "detail of a cabin must be from 0 to 4, not 9.0"),
        ("cabin:9-1", "many cabins.*cabin:7"),
        ("cabin:train", "many cabins.*cabin:7"),
        ("https://example.org/a.glb", "download the file"),
        ("", "has no name"),
        ("nowhere/a.glb", "There is no file"),
    ],
)
def test_invalid_scene_names(source, words, folder):
    with pytest.raises(ShoalError, match=words):
        open_scene(source)


def test_houses_are_generated_once(folder, monkeypatch):
    first = prepare("house:7@0")
    assert open_scene("house:7@0").triangles.shape[0] >= first.triangles > 1000
    cabin = prepare("cabin:7@0")
    assert not same(first, cabin)
    monkeypatch.setattr(shoal.scene.sources, "make_house", lambda *_, **__: pytest.fail("it is there"))
    assert same(first, prepare("house:7@0"))
    assert same(cabin, prepare("cabin:7@0"))
    with pytest.raises(ShoalError, match="'fine'"):
        prepare("house:7@fine")


def test_several_scenes_at_once(tmp_path, chair):
    assert expand("house:3-5") == ["house:3", "house:4", "house:5"]
    assert expand(["house:8@2", str(chair)]) == ["house:8@2", str(chair)]
    train, test = expand("house:train@0"), expand("house:test@0")
    assert len(train) + len(test) == 10_000
    assert not set(train) & set(test)
    assert expand("cabin:3-5") == ["cabin:3", "cabin:4", "cabin:5"]
    assert expand(["cabin:train@0", "cabin:test@0"]) == [name.replace("house", "cabin") for name in train + test]
    assert expand(str(tmp_path)) == [str(chair)]
    for bad, words in (
        ("house:5-3", "house:5-3 is empty"),
        ("cabin:9-1", "cabin:9-1 is empty"),
        ("cabin:0-9999999", "1,000,000 cabins"),
        ([], "No scene"),
        (str(tmp_path / "none"), "There is no file"),
    ):
        with pytest.raises(ShoalError, match=words):
            prepare(expand(bad)[0])
    (tmp_path / "bare").mkdir()
    with pytest.raises(ShoalError, match="holds no mesh files"):
        expand(str(tmp_path / "bare"))


def test_a_missing_texture_is_reported_with_and_without_the_cache_until_it_exists(folder, chair, builds):
    (chair.parent / "four.png").rename(chair.parent / "later")
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"chair\.obj: textures are missing \('four\.png'\)"):
            assert prepare(str(chair)).missing == ("four.png",)
    assert len(builds) == 1
    with pytest.raises(ShoalError, match=r"chair\.obj: its texture 'four\.png' is missing; put it beside the file"):
        prepare(str(chair), strict=True)
    (chair.parent / "later").rename(chair.parent / "four.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(prepare(str(chair), strict=True), pack_scene(load_scene(chair, strict=True)))


def test_scene_commands_refuse_missing_textures_if_strict(folder, chair, tmp_path, monkeypatch, capsys):
    (chair.parent / "four.png").unlink()
    monkeypatch.chdir(tmp_path)
    for words in (["info"], ["render", "--views", "1", "--size", "8x8", "--device", "cpu"]):
        with pytest.warns(UserWarning, match="textures are missing"):
            assert main(["scene", *words, str(chair)]) == 0
        assert main(["scene", *words, str(chair), "--strict"]) == 2
        assert "its texture 'four.png' is missing" in capsys.readouterr().err
    assert main(["scene", "episodes", str(chair), "--device", "cpu", "--strict"]) == 2
    assert "its texture 'four.png' is missing" in capsys.readouterr().err
