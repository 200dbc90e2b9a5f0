"""Scores: intervals, scenes, printed and written output."""

import json
import math

import pytest
import torch

import shoal
from shoal.cli import main
from shoal.core.errors import ShoalError
from shoal.core.wrappers import FrameStack, TimeLimit
from shoal.runs.evaluation import SCENES_SHOWN, Evaluation, Score, _evaluation, confidence, student
from tests.helpers import Counting

SMALL = dict(num_envs=16, rollout_steps=8, eval_episodes=2, quiet=True, device="cpu", log_every_seconds=0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return shoal.train("cartpole", total_steps=512, run_dir=tmp_path_factory.mktemp("runs") / "run", **SMALL)


@pytest.mark.parametrize(("freedom", "true"), [(1, 12.7062), (4, 2.7764), (9, 2.2622), (10, 2.2281), (30, 2.0423)])
def test_quantiles_of_student(freedom, true):
    assert student(freedom) == pytest.approx(true, abs=1e-4)


def test_student_comes_to_the_normal_distribution():
    assert student(10**6) == pytest.approx(1.96, abs=1e-4)
    values = [student(n) for n in range(1, 200)]
    assert values == sorted(values, reverse=True)


def test_wilson_for_zeros_and_ones():
    """8 of 10: 0.490 to 0.943; none of 20: 0 to 0.161 (Wilson 1927; Brown, Cai and DasGupta 2001)."""
    low, high = confidence(torch.tensor([1.0] * 8 + [0.0] * 2))
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert confidence(torch.zeros(20)) == (0.0, pytest.approx(0.1611, abs=1e-4))
    assert confidence(torch.ones(1)) == (pytest.approx(0.2065, abs=1e-4), 1.0)


def test_student_for_other_figures():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    half = 3.182446 * math.sqrt(5 / 3) / 2
    assert confidence(values) == (pytest.approx(2.5 - half), pytest.approx(2.5 + half))
    assert confidence(torch.tensor([3.0])) is None


@pytest.mark.parametrize("kind", ["normal", "share"])
def test_intervals_hold_the_true_mean_in_95_of_100(kind):
    rng = torch.Generator().manual_seed(0)
    normal, share = torch.randn(4000, 5, generator=rng), torch.rand(4000, 60, generator=rng) < 0.3
    draws = normal if kind == "normal" else share
    true = 0.0 if kind == "normal" else 0.3
    inside = [low <= true <= high for low, high in (confidence(row) for row in draws)]
    assert 0.93 < sum(inside) / len(inside) < 0.97


def scored(scenes: int) -> Evaluation:
    """Four episodes in each scene; in scene k, `k % 5` of them succeed."""
    rows = []
    for env in range(4 * scenes):
        success = float(env % 4 < env // 4 % 5)
        reports = dict(success=success, path=float(env))
        rows.append(
            dict(env=env, length=7, scene=f"scene{env // 4:02d}", returns=dict(agent=2 * success), reports=reports)
        )
    return _evaluation(rows)


def test_scores_by_scene_are_those_of_its_episodes():
    found = scored(3)
    assert list(found.by_scene) == ["scene00", "scene01", "scene02"]
    score = found.by_scene["scene01"]
    assert score["success"].mean == 0.25
    assert score["success"].interval == confidence(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert score["path"].mean == 5.5
    bumps = [("a", 0.0), ("a", 0.0), ("b", 0.0), ("b", 7.0)]
    calm = _evaluation([dict(length=1, scene=scene, returns={}, reports=dict(bumps=count)) for scene, count in bumps])
    assert calm.by_scene["a"]["bumps"].interval == (0.0, 0.0), "a count, not a rate"
    assert found.reports["success"].episodes == 12


def test_the_worst_scenes_are_printed():
    lines = scored(26).lines()
    assert lines[0].startswith("mean ")
    assert lines[1].startswith("success  0.481 [0.387, 0.576]")
    first = lines.index("26 scenes, lowest success first:")
    assert lines[first + 1].split() == ["scene", "episodes", "success", "path"]
    assert [line.split()[0] for line in lines[first + 2 : first + 5]] == ["scene00", "scene05", "scene10"]
    assert len(lines) == first + 2 + SCENES_SHOWN + 1
    assert lines[-1] == "and 6 more"
    assert max(map(len, lines)) < 100
    assert len(scored(1).lines()) == 3, "one scene is all there is"


def test_lines_of_a_world_without_reports():
    (line,) = Evaluation({"cart": Score(12.0, 3.0, 9, 12.0, (10.0, 14.0))}, {}).lines()
    assert line == "mean 12.00 [10.00, 14.00]  std 3.00  episodes 9  mean length 12.0"
    (line,) = Evaluation({"cart": Score(12.0, 0.0, 1, 12.0)}, {}).brief()
    assert line == "mean 12.00  std 0.00  episodes 1  mean length 12.0"


def test_everything_is_written(tmp_path):
    found = scored(2)
    rows = json.loads(found.save(tmp_path / "new" / "a.json").read_text())
    assert rows["groups"]["agent"]["mean"] == found["agent"].mean
    assert rows["scenes"]["scene01"]["success"]["interval"] == list(found.by_scene["scene01"]["success"].interval)
    assert rows["episodes"][5] == dict(
        env=5, length=7, scene="scene01", returns=dict(agent=0.0), reports=dict(success=0.0, path=5.0)
    )
    with pytest.raises(ShoalError, match=r"ends in \.json, got 'a\.txt'"):
        found.save(tmp_path / "a.txt")


def test_wrappers_pass_scenes_and_maps_through():
    class Placed(Counting):
        def scenes_of_envs(self):
            return ["here", "there"]

        def trajectory_recorder(self, envs):
            return envs

    world = FrameStack(TimeLimit(Placed(2), 3), 2)
    assert world.scenes_of_envs() == ["here", "there"]
    assert world.trajectory_recorder(5) == 5
    assert TimeLimit(Counting(2), 3).scenes_of_envs() is None


def test_watch_is_called_at_every_step(run):
    seen = []
    found = run.evaluate(3, watch=lambda world, going: seen.append(going.clone()))
    assert seen[0].all()
    lengths = torch.stack(seen).sum(0).tolist()
    assert lengths == [row["length"] for row in found.episodes]
    assert not found.by_scene


def test_a_world_without_maps_refuses(run, capsys, tmp_path):
    words = ["eval", str(run.path), "--device", "cpu"]
    assert main([*words, "--maps", "2"]) == 2
    assert "The world 'cartpole' has no maps" in capsys.readouterr().err
    assert main([*words, "--maps", "0"]) == 2
    assert "--maps must be at least 1" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path / "a.txt")]) == 2
    assert ".json" in capsys.readouterr().err
    assert main([*words, "--episodes", "3", "--out", str(tmp_path / "a.json")]) == 0
    assert len(json.loads((tmp_path / "a.json").read_text())["episodes"]) == 3
