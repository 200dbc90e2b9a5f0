"""Learning itself: short trainings with fixed seeds that must reach a stated score."""

import pytest

import shoal

QUIET = dict(quiet=True, device="cpu")


def test_ppo_balances_the_pole(tmp_path):
    run = shoal.train("cartpole", seed=1, total_steps=6e5, run_dir=tmp_path / "run", **QUIET)
    assert run.evaluate(episodes=50)["cart"].mean >= 475


def test_a2c_balances_the_pole(tmp_path):
    run = shoal.train("cartpole", algo="a2c", seed=1, run_dir=tmp_path / "run", **QUIET)
    assert run.evaluate(episodes=50)["cart"].mean >= 400


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("world", "score"),
    [("pendulum", -250), ("acrobot", -100), ("mountain-car-continuous", 90), ("mountain-car", -120)],
)
def test_tuned_settings_solve(world, score, seed, tmp_path):
    run = shoal.train(world, seed=seed, run_dir=tmp_path / "run", **QUIET)
    (result,) = run.evaluate(episodes=100).values()
    assert result.mean >= score
