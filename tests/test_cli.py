"""The command line as a person meets it."""

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import main

ROOT = Path(__file__).parents[1]


def shoal(*words, **options):
    return subprocess.run([sys.executable, "-m", "shoal", *words], capture_output=True, text=True, **options)


def test_help_needs_neither_torch_nor_warp():
    code = (
        "import sys; from shoal.cli import main; main(['--help']); print({'torch', 'warp', 'tyro'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "shoal train WORLD" in result.stdout
    assert result.stdout.strip().endswith("set()")


def test_list_names_every_world(capsys):
    assert main(["list"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} >= {"cartpole", "pendulum", "acrobot"}


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["train", "cartpol"], "did you mean 'cartpole'"),
        (["trian", "cartpole"], "did you mean 'train'"),
        (["train", "cartpole", "--algo", "pppo"], "did you mean 'ppo'"),
        (["train", "cartpole", "--num-envs", "0"], "--num-envs must be between 1 and 2147483647, got 0"),
        (["train", "cartpole", "--num-minibatches", "3"], "does not divide into 3 mini-batches"),
        (["train", "cartpole", "--device", "tpu"], "There is no device 'tpu'"),
        (["train", "cartpole", "--lr", "-1"], "--lr must be above 0"),
        (
            ["train", "cartpole", "--world.max-steps", "0", "--run-dir", "{tmp}/run"],
            "--world.max-steps must be at least 1, got 0",
        ),
        (
            ["train", "cartpole", "--encoder", "transformer", "--run-dir", "{tmp}/run"],
            "choose one of: FILE.py:NAME, auto, impala, mlp, nature",
        ),
        (["train", "nowhere.py:World"], "There is no file"),
        (["train", "cartpole", "--num-envs", "1e9", "--run-dir", "{tmp}/run"], "1,000,000,000 envs take"),
        (["train", "cartpole", "--log-every-seconds", "-1"], "--log-every-seconds must be at least 0, got -1.0"),
        (
            ["train", "gym:CartPole-v1", "--num-env-slices", "255"],
            "--num-env-slices must be between 2 and 254, got 255",
        ),
        (["bench", "cartpole", "--seconds", "0"], "--seconds must be above 0"),
        (["train", "--seed", "1"], "wants the world first"),
        (["eval", "{tmp}/none"], "There is no run folder"),
        (["resume", "{tmp}"], "is not a run"),
    ],
)
def test_bad_input_exits_2_with_one_sentence(words, answer, tmp_path, capsys):
    assert main([word.replace("{tmp}", str(tmp_path)) for word in words]) == 2
    error = capsys.readouterr().err
    assert answer in error


def test_a_name_that_a_file_lacks_gets_its_classes_and_functions(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("from pathlib import Path\n\nclass MyEnv: ...\ndef make_env(): ...\ndef _helper(): ...\n")
    assert main(["train", f"{file}:Nope"]) == 2
    assert f"There is no world in {file} named 'Nope'; choose one of: MyEnv, make_env." in capsys.readouterr().err


def test_an_unwritable_file_is_refused_and_scores_are_printed(tmp_path, capsys):
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    quick = ["--total-steps", "1000", "--num-envs", "8", "--eval-episodes", "0", "--quiet"]
    assert main(["train", "cartpole", *quick, "--run-dir", run]) == 0
    assert main(["train", "acrobot", *quick, "--target-kl", "none", "--run-dir", other]) == 0
    (tmp_path / "file").touch()
    (tmp_path / "folder.json").mkdir()
    capsys.readouterr()
    for words, answer in [
        (["eval", run, "--episodes", "2", "--out", f"{tmp_path}/folder.json"], "it is a folder"),
        (["eval", run, "--episodes", "2", "--out", f"{tmp_path}/file/x.json"], "cannot be written"),
        (["eval", run, "--seed", "-1"], "--seed must be between"),
        (["eval", run, "--load-policy", f"cart={other}"], "cannot play for cart"),
        (["record", run, "--out", f"{tmp_path}/file/x.png"], "cannot be written"),
        (["plot", run, "--out", f"{tmp_path}/x.txt"], "A picture ends in .png"),
        (["plot", run, "--out", f"{tmp_path}/file/x.png"], "cannot be written"),
    ]:
        assert main(words) == 2
        assert answer in capsys.readouterr().err
    full = Path("/dev/full")  # can be opened, but nothing fits
    if full.exists():
        (tmp_path / "full.json").symlink_to(full)
        assert main(["eval", run, "--episodes", "2", "--out", f"{tmp_path}/full.json"]) == 2
        printed = capsys.readouterr()
        assert "cannot be written" in printed.err
        assert printed.out.startswith("mean ")


@pytest.mark.parametrize("flag", [["--num-env", "3"], ["--total-steps", "many"]])
def test_bad_flags_exit_2(flag):
    result = shoal("train", "cartpole", *flag)
    assert result.returncode == 2
    assert flag[0] in result.stderr


def test_train_then_eval_then_resume_from_the_command_line(tmp_path):
    small = ["--num-envs", "16", "--rollout-steps", "8", "--eval-episodes", "2", "--device", "cpu"]
    run = str(tmp_path / "run")
    trained = shoal("train", "cartpole", "--total-steps", "512", "--run-dir", run, *small, check=True)
    assert f"results: {run}" in trained.stdout
    evaluated = shoal("eval", run, "--episodes", "5", "--device", "cpu", check=True)
    line = evaluated.stdout.strip()
    assert line.startswith("mean ")
    assert "std " in line
    assert "episodes 5" in line
    shoal("resume", run, "--total-steps", "1024", check=True)
    again = shoal("resume", run)
    assert again.returncode == 2
    assert "give a larger --total-steps" in again.stderr


def test_a_users_world_and_network(tmp_path):
    world = f"{ROOT}/examples/rocket.py:Rocket"
    network = f"{ROOT}/examples/own_network.py:Residual"
    small = [
        "--total-steps",
        "512",
        "--num-envs",
        "16",
        "--rollout-steps",
        "8",
        "--eval-episodes",
        "2",
        "--device",
        "cpu",
        "--world.thrust",
        "25",
    ]
    run = str(tmp_path / "run")
    shoal("train", world, "--encoder", network, "--run-dir", run, *small, check=True)
    assert shoal("eval", run, "--episodes", "2", check=True).stdout.startswith("mean ")
