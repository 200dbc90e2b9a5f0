"""Viewpoints, contact sheets, and the commands that show scenes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shoal.cli import main
from shoal.core.errors import ShoalError
from shoal.render.renderer import Renderer
from shoal.render.sheet import draw_sheet, parse_size, save_sheet
from shoal.render.viewpoints import find_viewpoints
from shoal.scene.memory import SceneMemory
from shoal.scene.pack import pack_scene
from shoal.scene.sources import prepare
from tests.scene.shapes import box, make_scene

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path_factory.getbasetemp() / "scenes"))


def test_indoor_viewpoints_are_on_the_floor_away_from_walls():
    corners = np.concatenate([box((0, 0, -1), (8, 5, 2)), box((3, 0, -1), (3.5, 5, 0.5))])
    memory = SceneMemory.holding([pack_scene(make_scene(corners))], "cpu")
    poses = find_viewpoints(memory, 0, 12)
    x, y, z = poses[:, :3].unbind(1)
    on_floor, on_block = (z - 0.25).abs() < 1e-3, (z - 1.75).abs() < 1e-3
    assert (on_floor | on_block).all()
    assert ((x - 3.25).abs() > 0.64)[on_floor].all()
    assert (torch.stack([x, y, 8 - x, 5 - y]) > 0.39).all()


def test_viewpoints_around_an_object():
    memory = SceneMemory.holding([pack_scene(make_scene(box((-1, -1, 0), (1, 1, 1))))], "cpu")
    poses = find_viewpoints(memory, 0, 6)
    assert (poses[:, :2].norm(dim=1) > 1.5).all()
    image = Renderer(memory, 6, (9, 9), ["depth"]).render(poses)["depth"]
    assert (image[:, 4, 4, 0] < 10).all(), "the object is in the center of every image"
    assert (image[:, 0, 0, 0] > 100).all(), "and all of it is in view"


@pytest.mark.parametrize("name", ["house:7@0", "house:9001@0"])
def test_contact_sheets_equal_golden_images(name):
    """Images that a person has checked. Rewrite them with `shoal scene render`, and check again."""
    sheet = np.asarray(draw_sheet(prepare(name), 8, (96, 72))).astype(int)
    golden = np.asarray(Image.open(GOLDEN / f"{name.replace(':', '_')}.png").convert("RGB")).astype(int)
    assert sheet.shape == golden.shape
    # Processors round differently: a ray along an edge may hit the other triangle.
    assert np.mean(np.abs(sheet - golden).max(-1) > 8) < 0.005


def test_scene_render_writes_a_picture(tmp_path, capsys):
    out = tmp_path / "deep" / "sheet.png"
    assert main(["scene", "render", "house:7@0", "--views", "3", "--size", "32x24", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert Image.open(out).size == (3 * (32 + 6) + 6, 2 * 24 + 8 + 6 + 22)


def test_scene_info_lists_contents(capsys):
    assert main(["scene", "info", "house:7@0"]) == 0
    printed = capsys.readouterr().out
    for word in ("triangles", "wall", "textures", "MB"):
        assert word in printed


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["scene", "rendr", "house:7"], "did you mean 'scene render'"),
        (["scene", "info", "nowhere.glb"], "There is no file nowhere.glb"),
        (["scene", "render", "house:7@0", "--size", "big"], "192x144"),
        (["scene", "render", "house:7@0", "--out", "sheet.doc", "--size", "8"], ".png, .jpg or .jpeg"),
        (["scene", "render", "house:7@0", "--views", "0"], "at least one view"),
        (["bench", "render", "--movers", "-1"], "--movers"),
        (["bench", "render", "--scene", "house:7@0", "--outputs", "dept"], "did you mean 'depth'"),
    ],
)
def test_bad_arguments_exit_with_2(words, reason, capsys):
    assert main(words) == 2
    assert reason in capsys.readouterr().err


def test_bench_render_prints_a_table(capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    words = ["bench", "render", "--scene", "house:7@0", "--views", "2", "--size", "16", "--seconds", "0.01"]
    assert main([*words, "--movers", "2", "--outputs", "depth", "rgb", "--out", str(out), "--device", "cpu"]) == 0
    assert "images/s" in capsys.readouterr().out
    assert '"views": 2' in out.read_text()


def test_parsing_of_sizes():
    assert parse_size("64") == (64, 64)
    assert parse_size("32X20") == (32, 20)
    with pytest.raises(ShoalError, match="WIDTHxHEIGHT"):
        parse_size("a x b")
    with pytest.raises(ShoalError, match="cannot be written"):
        save_sheet(Image.new("RGB", (1, 1)), "/proc/none/sheet.png")
