"""Mistakes in the user's files: one sentence each, with the file and the line to look at."""

import re
import textwrap
from dataclasses import dataclass

import pytest

from shoal.cli import main
from shoal.errors import ShoalError
from shoal.user_code import LONGEST, UserCode, UserCodeError

WORLD = """
from dataclasses import dataclass
import torch
import warp as wp
from shoal.core import Box, Discrete, Field, Group, KernelWorld

class Ball(KernelWorld):
    @dataclass(frozen=True)
    class Config:
        max_steps: int = 20

    state = dict(x=Field(float))
    groups = (Group("ball", observation=Box(1), action=Discrete(2)),)

    def step(self, arrays):
        arrays.x += 1.0

    def reset(self, arrays):
        return dict(x=torch.zeros_like(arrays.x))

    def observe(self, arrays):
        return arrays.x.unsqueeze(-1)
"""

ENV = """
import sys
import gymnasium as gym
import numpy as np
from gymnasium import spaces

class Ball(gym.Env):
    def __init__(self):
        self.observation_space = spaces.Box(-1.0, 1.0, (2,))
        self.action_space = spaces.Discrete(2)
        self.time = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(2, np.float32), 1.0, self.time == 5, False, {}
"""

NETWORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.calls = 0

    def forward(self, seen):
        self.calls += 1
        return self.layer(seen)
"""


@dataclass
class Mistake:
    """A line of a file that is replaced, the line that the message names, and what it says."""

    name: str
    file: str
    good: str
    bad: str
    line: str | None
    says: str
    code: int = 2


WORLDS = [
    Mistake(
        "syntax", WORLD, "arrays.x += 1.0", "arrays.x += (1.0", "arrays.x += (1.0", "SyntaxError: '(' was never closed"
    ),
    Mistake(
        "import", WORLD, "import torch\n", "import torch\nimport torhc\n", "import torhc", "No module named 'torhc'"
    ),
    Mistake(
        "name at import", WORLD, "observation=Box(1)", "observation=Bocks(1)", "Bocks(1)", "name 'Bocks' is not defined"
    ),
    Mistake("exit at import", WORLD, "import torch\n", "import torch\nexit(3)\n", "exit(3)", "SystemExit: 3"),
    Mistake(
        "interrupt",
        WORLD,
        "import torch\n",
        "raise KeyboardInterrupt\n",
        "raise KeyboardInterrupt",
        "KeyboardInterrupt",
    ),
    Mistake("empty box", WORLD, "Box(1)", "Box((0,))", "Box((0,))", "positive sizes, got (0,)"),
    Mistake("no dataclass", WORLD, "@dataclass(frozen=True)", "", None, "Config must be a dataclass"),
    Mistake("bad hint", WORLD, "max_steps: int", "max_steps: 'Many'", "@dataclass", "name 'Many' is not defined"),
    Mistake(
        "constructor",
        WORLD,
        "    state =",
        "    def __init__(self, *given):\n        self.size = 1 / 0\n\n    state =",
        "1 / 0",
        "cannot be made: ZeroDivisionError",
    ),
    Mistake("no field", WORLD, "Field(float)", "5", "class Ball", "cannot be made"),
    Mistake("no groups", WORLD, "groups = (", "teams = (", None, "declares no groups"),
    Mistake(
        "groups", WORLD, "groups = (", "groups = lambda config: (config.size, ", "config.size", "no attribute 'size'"
    ),
    Mistake("no step", WORLD, "def step(", "def stepp(", "class Ball", "has no `step`"),
    Mistake(
        "wrong name",
        WORLD,
        "def step(self, arrays):\n        arrays.x += 1.0",
        "@wp.func\n    def step(env: int, xx: wp.array[float]):\n        xx[env] = 1.0",
        "@wp.func",
        "did you mean 'x'",
    ),
    Mistake(
        "does not compile",
        WORLD,
        "def step(self, arrays):\n        arrays.x += 1.0",
        "@wp.func\n    def step(env: int, x: wp.array[float]):\n        x[env] = 1",
        "x[env] = 1",
        "does not compile",
    ),
    Mistake(
        "step",
        WORLD,
        "arrays.x += 1.0",
        "arrays.x += torch.zeros(3)",
        "torch.zeros(3)",
        "Ball.step failed: RuntimeError",
        1,
    ),
    Mistake("reset", WORLD, "torch.zeros_like(arrays.x)", "arrays.y", "arrays.y", "Ball.reset failed: AttributeError"),
    Mistake(
        "reset returns", WORLD, "return dict(x=torch.zeros_like(arrays.x))", "pass", "def reset", "must return a dict"
    ),
    Mistake("reset's name", WORLD, "return dict(x=", "return dict(xx=", "def reset", "'xx'; did you mean 'x'"),
    Mistake(
        "observe",
        WORLD,
        "arrays.x.unsqueeze(-1)",
        "arrays.x @ arrays.y",
        "arrays.x @ arrays.y",
        "Ball.observe failed: AttributeError",
    ),
    Mistake(
        "observe's shape",
        WORLD,
        "arrays.x.unsqueeze(-1)",
        "arrays.x[:3]",
        "def observe",
        "Ball.observe failed: RuntimeError: shape",
    ),
]

ENVS = [
    Mistake("syntax", ENV, "self.time += 1", "self.time +=", "self.time +=", "SyntaxError: invalid syntax"),
    Mistake("import", ENV, "import sys\n", "import syss\n", "import syss", "No module named 'syss'"),
    Mistake(
        "constructor",
        ENV,
        "self.time = 0\n\n    def",
        "self.time = no_time\n\n    def",
        "no_time",
        "cannot be made: NameError",
    ),
    Mistake("number", ENV, "class Ball(gym.Env)", "Ball = 5\nclass Other(gym.Env)", None, "is a int; name a World"),
    Mistake(
        "no env",
        ENV,
        "class Ball(gym.Env)",
        "class Ball:\n    pass\nclass Other(gym.Env)",
        "class Ball",
        "no reset and no step",
    ),
    Mistake("no space", ENV, "self.action_space =", "self.actions =", "class Ball", "it has no action_space"),
    Mistake(
        "arguments",
        ENV,
        "def __init__(self)",
        "def __init__(self, size)",
        "class Ball",
        "missing 1 required positional argument: 'size'",
    ),
    Mistake("empty box", ENV, "(2,))", "(0,))", "class Ball", "must hold at least one number"),
    Mistake(
        "empty action", ENV, "spaces.Discrete(2)", "spaces.Box(-1.0, 1.0, (0,))", "class Ball", "An action must hold"
    ),
    Mistake("odd space", ENV, "spaces.Discrete(2)", "spaces.Text(3)", "class Ball", "type Text"),
    Mistake(
        "reset",
        ENV,
        "np.zeros(2, np.float32), {}\n\n    def",
        "np.zeros(too), {}\n\n    def",
        "np.zeros(too)",
        "NameError: name 'too' is not defined in env 0 (seed",
        1,
    ),
    Mistake(
        "reset returns",
        ENV,
        "np.zeros(2, np.float32), {}\n\n    def",
        "np.zeros(3)\n\n    def",
        "def reset",
        "too many values to unpack (expected 2) in env",
        1,
    ),
    Mistake(
        "step", ENV, "self.time += 1", "self.time += 1 / 0", "1 / 0", "ZeroDivisionError: division by zero in env", 1
    ),
    Mistake(
        "step's shape",
        ENV,
        "return np.zeros(2, np.float32), 1.0",
        "return np.zeros(3), 1.0",
        "def step",
        "could not broadcast",
        1,
    ),
    Mistake("step returns", ENV, ", False, {}", ", {}", "def step", "not enough values to unpack", 1),
    Mistake("reward", ENV, "1.0, self.time == 5", "{}, self.time == 5", "def step", "TypeError", 1),
    Mistake("exit", ENV, "self.time += 1", "sys.exit(4)", "sys.exit(4)", "SystemExit: 4 in env", 1),
    Mistake(
        "interrupt",
        ENV,
        "self.time += 1",
        "raise KeyboardInterrupt",
        "raise KeyboardInterrupt",
        "KeyboardInterrupt in env",
        1,
    ),
    Mistake(
        "text", ENV, "self.time += 1", 'raise ValueError("\\x1b[2J" * 5000)', "raise ValueError", "\\x1b[2J\\x1b", 1
    ),
]

NETWORKS = [
    Mistake("syntax", NETWORK, "self.calls = 0", "self.calls = = 0", "self.calls = = 0", "SyntaxError"),
    Mistake("import", NETWORK, "import torch\n", "import torhc\n", "import torhc", "No module named 'torhc'"),
    Mistake("constructor", NETWORK, "nn.Linear(4, 8)", "nn.Lines(4, 8)", "nn.Lines", "cannot be used: AttributeError"),
    Mistake("not a network", NETWORK, "class Net(nn.Module)", "Net = 5\nclass Other(nn.Module)", None, "'int' object is not callable"),
    Mistake("function", NETWORK, "class Net(nn.Module)", "def Net(shape):\n    return torch.tanh\nclass Other(nn.Module)", "def Net", "must be a torch.nn.Module"),
    Mistake("shapes", NETWORK, "nn.Linear(4, 8)", "nn.Linear(5, 8)", "self.layer(seen)", "cannot be used: RuntimeError"),
    Mistake("output", NETWORK, "return self.layer(seen)", "return self.layer(seen).sum()", "class Net", "gave () of torch.float32"),
    Mistake("batch", NETWORK, "return self.layer(seen)", "return self.layer(seen).reshape(1, -1)", "class Net", "a batch of 2 gave (1, 16)"),
    Mistake("nothing", NETWORK, "return self.layer(seen)", "self.layer(seen)", "class Net", "gave NoneType"),
    Mistake("later", NETWORK, "self.calls += 1", "self.calls += 1\n        assert self.calls < 200, 'too late'", "assert self.calls", "Training failed: AssertionError: too late", 1),
]  # fmt: skip


def check(mistake, tmp_path, capfd, words):
    """Train with the mistake; one sentence names it, with file and line."""
    assert mistake.file.count(mistake.good) == 1
    text = mistake.file.replace(mistake.good, mistake.bad)
    file = tmp_path / "mine.py"
    file.write_text(text)
    sizes = ["--num-envs", "8", "--rollout", "16", "--minibatches", "2", "--eval-episodes", "0", "--device", "cpu"]
    flags = [*sizes, "--total-steps", "4096", "--quiet", "--run-dir", str(tmp_path / "run")]
    assert main(["train", *(word.replace("FILE", str(file)) for word in words), *flags]) == mistake.code
    told = capfd.readouterr().err
    assert told.count("\n") == 1, told
    assert "Traceback" not in told
    assert mistake.says in told
    assert str(file) in told
    assert len(told) < 2 * LONGEST  # escaped codes are longer
    if mistake.line:
        lines = [number for number, line in enumerate(text.splitlines(), 1) if mistake.line in line]
        assert [int(found) for found in re.findall(rf"{file}:(\d+)", told)] == lines, told


def named(mistakes):
    return [pytest.param(mistake, id=mistake.name) for mistake in mistakes]


@pytest.mark.parametrize("mistake", named(WORLDS))
def test_a_mistake_in_a_world_is_one_sentence(mistake, tmp_path, capfd):
    check(mistake, tmp_path, capfd, ["FILE:Ball"])


@pytest.mark.parametrize("mistake", named(ENVS))
def test_a_mistake_in_an_env_is_one_sentence(mistake, tmp_path, capfd):
    check(mistake, tmp_path, capfd, ["FILE:Ball", "--batch", "serial"])


@pytest.mark.parametrize("mistake", named(m for m in ENVS if m.code == 1))
def test_a_mistake_in_an_env_of_a_worker_is_one_sentence(mistake, tmp_path, capfd):
    check(mistake, tmp_path, capfd, ["FILE:Ball", "--batch", "processes", "--workers", "1", "--restarts", "0"])


@pytest.mark.parametrize("mistake", named(NETWORKS))
def test_a_mistake_in_a_network_is_one_sentence(mistake, tmp_path, capfd):
    check(mistake, tmp_path, capfd, ["cartpole", "--policy", "FILE:Net"])
