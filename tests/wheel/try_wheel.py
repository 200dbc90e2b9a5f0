"""Test the installed package, without extras, from an unrelated folder; `make test-wheel` runs this."""

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import shoal
from shoal.cli import main
from shoal.core.extras import EXTRAS

COMMAND = Path(sys.executable).with_name("shoal")

POINTNAV = (
    "train pointnav --run-dir nav --num-envs 8 --rollout-steps 16 --num-minibatches 1 --total-steps 256 "
    "--eval-episodes 2 --quiet --scenes cabin:0 --eval-scenes cabin:1"
)

WORKS = {
    "train cartpole --run-dir cart --total-steps 20000 --eval-episodes 10 --quiet": "cart/config.json",
    "eval cart --episodes 10 --out scores.json": "scores.json",
    "plot cart --out curve.png": "curve.png",
    "record cart --steps 20 --out cart.mp4": "cart.mp4",
    "resume cart --total-steps 60000 --quiet": "cart/checkpoints",
    POINTNAV: "nav/config.json",
    "record nav --envs 2 --steps 5 --out nav.mp4": "nav.mp4",
    "train gym:CartPole-v1 --run-dir gym --num-envs 8 --total-steps 4000 --eval-episodes 5 --quiet": "gym/config.json",
    "eval gym --episodes 5": "gym/config.json",
    "scene render cabin:7 --views 4 --out sheet.png": "sheet.png",
}
"""Command -> a file that exists afterwards."""

NEEDS = {
    "train gym:LunarLander-v3": "box2d",
    "train gym:HalfCheetah-v5": "mujoco",
    "train gym:ALE/Pong-v5": "atari",
    "train ale:pong": "atari",
    "train zoo:sisl.pursuit_v5": "multi",
    "train envpool:Pong-v5": "envpool",
    "record gym --steps 5 --out gym.mp4": "gym",
}
"""Command -> the extra that it needs."""


def run(words: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    started = time.monotonic()
    done = subprocess.run([COMMAND, *words.split()], env=env, capture_output=True, text=True, timeout=300)
    print(f"{time.monotonic() - started:5.1f} s  exit code {done.returncode}  shoal {words}", flush=True)
    return done


def try_all() -> None:
    assert Path(shoal.__file__).is_relative_to(sys.prefix), f"{shoal.__file__} is not the installed package"
    there = [module for module in EXTRAS if importlib.util.find_spec(module)]
    assert not there, f"this environment has extras: {there}"
    assert set(NEEDS.values()) == set(EXTRAS.values()), "NEEDS must have a command for every extra"
    for words, file in WORKS.items():
        done = run(words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert Path(file).exists(), f"shoal {words} has not written {file}"
    for words, extra in NEEDS.items():
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            code = main(words.split())
        print(f"exit code {code}  shoal {words}: {errors.getvalue()}", end="", flush=True)
        wanted = rf"shoal: .+ needs \w+, which is not installed: pip install 'shoal\[{extra}\]'\.\n"
        assert code == 2, errors.getvalue()
        assert re.fullmatch(wanted, errors.getvalue()), errors.getvalue()
    assert not Path("gym.mp4").exists(), "a failed recording has left a file"


with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
    try_all()
