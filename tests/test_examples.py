"""The examples are run as they stand, and the documented world is as short as promised."""

import re
import runpy
import textwrap
from pathlib import Path

import torch

import shoal
from shoal.cli import main
from shoal.core.user_files import load_object

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = dict(num_taggers=2, num_runners=6, max_steps=20)
    small = dict(total_steps=512, num_envs=8, rollout_steps=8, eval_episodes=4, device="cpu", world_config=sizes)
    runpy.run_path(str(EXAMPLES / "demo.py"))["main"](**small)
    out = capsys.readouterr().out
    for word in ("learning curve", "recording", "Try next"):
        assert word in out
    assert list(tmp_path.glob("runs/*/curve.png"))
    assert list(tmp_path.glob("runs/*/videos/*.mp4"))


def test_looking_around(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "scenes"))
    runpy.run_path(str(EXAMPLES / "look_around.py"))
    assert "images per second" in capsys.readouterr().out
    assert (tmp_path / "look_around.png").stat().st_size > 10_000


def test_a_world_takes_less_than_80_lines():
    for name in ("rocket.py", "rocket_torch.py"):
        assert len((EXAMPLES / name).read_text().splitlines()) < 80


def test_the_documentation_shows_the_examples_as_they_are():
    docs = EXAMPLES.parent / "docs"
    shown = {"new_world.md": ["rocket.py", "rocket_torch.py"], "learning.md": ["own_network.py"]}
    for page, names in shown.items():
        for name in names:
            assert f"```python\n{(EXAMPLES / name).read_text()}```" in (docs / page).read_text()


TUTORIAL = (EXAMPLES.parent / "docs" / "multi_agent.md").read_text()


def test_the_tutorial_is_the_example_in_pieces():
    """Every block of code on the page is a part of shark.py, and together they are all of it."""
    rest = (EXAMPLES / "shark.py").read_text()
    for block in re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL):
        part = block if block in rest else textwrap.indent(block, "    ")  # of the class
        assert rest.count(part) == 1
        rest = rest.replace(part, "")
    assert not rest.strip()


def test_the_commands_of_the_tutorial_run(tmp_path, monkeypatch):
    """In order, each unchanged but shorter."""
    monkeypatch.chdir(tmp_path)
    train = "--total-steps 1024 --num-envs 16 --rollout-steps 16 --eval-episodes 2 --device cpu --quiet --run-dir"
    shorter = {
        "check": ["--steps", "30", "--no-debug", "--device", "cpu"],
        "eval": ["--episodes", "2", "--device", "cpu"],
        "record": ["--steps", "3", "--envs", "2", "--device", "cpu"],
    }
    seen = set()
    for line in re.findall(r"^shoal (.*)$", TUTORIAL, re.MULTILINE):
        words = line.replace("examples", str(EXAMPLES)).replace("RUN", str(tmp_path / "run1")).split()
        seen.add(words[0])
        run = tmp_path / f"run{sum(path.is_dir() for path in tmp_path.iterdir()) + 1}"
        assert main([*words, *(shorter.get(words[0]) or [*train.split(), str(run)])]) == 0, line
    assert seen == {"check", "train", "eval", "record"}
    assert (tmp_path / "sea.png").is_file()


def test_sharks_learn_to_hunt(tmp_path):
    """Fish that do not learn, a tenth of the tutorial's steps: sharks eat over twice as many as at random (5 of 20)."""
    world = f"{EXAMPLES / 'shark.py'}:Shark"
    small = dict(total_steps=10_000, eval_episodes=0, device="cpu", quiet=True)
    run = shoal.train(world, freeze_groups="fish", run_dir=tmp_path / "run", **small)
    assert run.evaluate(episodes=20).reports["eaten"].mean > 11.0


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
