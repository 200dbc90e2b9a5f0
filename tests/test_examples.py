"""The examples are run as they stand, and the documented world is as short as promised."""

import runpy
from pathlib import Path

import torch

import shoal
from shoal.worlds import load_object

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = dict(total_steps=2048, num_envs=32, rollout=8, eval_episodes=4, device="cpu")
    runpy.run_path(str(EXAMPLES / "demo.py"))["main"](**small)
    out = capsys.readouterr().out
    for word in ("learning curve", "recording", "Try next"):
        assert word in out
    assert list(tmp_path.glob("runs/*/curve.png"))
    assert list(tmp_path.glob("runs/*/videos/*.mp4"))


def test_a_world_takes_less_than_80_lines():
    for name in ("rocket.py", "rocket_torch.py"):
        assert len((EXAMPLES / name).read_text().splitlines()) < 80


def test_the_documentation_shows_the_examples_as_they_are():
    docs = EXAMPLES.parent / "docs"
    shown = {"new_world.md": ["rocket.py", "rocket_torch.py"], "learning.md": ["own_network.py"]}
    for page, names in shown.items():
        for name in names:
            assert f"```python\n{(EXAMPLES / name).read_text()}```" in (docs / page).read_text()


def test_both_rockets_fly_alike():
    """Written as kernels or with torch: the same world, random numbers included."""
    worlds = [load_object(f"{EXAMPLES / name}:Rocket", "world")(64) for name in ("rocket.py", "rocket_torch.py")]
    for world in worlds:
        world.reset(3)
    for step in range(120):
        action = ((torch.arange(64) + step) % 3 == 0).int().view(64, 1)
        a, b = (world.step(action) for world in worlds)
        torch.testing.assert_close(a.groups["rocket"].observation, b.groups["rocket"].observation)
        torch.testing.assert_close(a.groups["rocket"].reward, b.groups["rocket"].reward)
        assert torch.equal(a.terminated, b.terminated)
    assert int(worlds[0].statistics().episodes.sum()) > 0


def test_the_rocket_learns_to_land(tmp_path):
    """With its own settings: an impact below 5 m/s on average, fuel included."""
    run = shoal.train(f"{EXAMPLES / 'rocket.py'}:Rocket", run_dir=tmp_path / "run", device="cpu", quiet=True)
    assert run.evaluate(episodes=50)["rocket"].mean > 5.0
