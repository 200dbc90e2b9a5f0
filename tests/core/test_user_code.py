"""Mistakes in the user's files: one sentence each, with the file and the line to look at."""

import json
import re
import signal
from contextlib import closing
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch

from shoal.cli import COMMANDS, main
from shoal.core.user_code import MAX_EXCERPT, UserCode, UserCodeError, text_of
from shoal.core.world_loading import world_class
from shoal.training.trainer import InvalidDataError

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


class Mistake(NamedTuple):
    """A piece of a file that is replaced, the line that the message names, what it says, and the exit code."""

    good: str
    bad: str
    line: str | None
    says: str
    code: int = 2


WORLDS = {
    "syntax": Mistake("arrays.x += 1.0", "arrays.x += (1.0", "arrays.x += (1.0", "SyntaxError: '(' was never closed"),
    "import": Mistake("import torch\n", "import torch\nimport torhc\n", "import torhc", "No module named 'torhc'"),
    "name at import": Mistake("observation=Box(1)", "observation=Bocks(1)", "Bocks(1)", "name 'Bocks' is not defined"),
    "exit at import": Mistake("import torch\n", "import torch\nexit(3)\n", "exit(3)", "SystemExit: 3"),
    "interrupt": Mistake("import torch\n", "raise KeyboardInterrupt\n", "raise KeyboardInterrupt", "KeyboardInterrupt"),
    "empty box": Mistake("Box(1)", "Box((0,))", "Box((0,))", "positive sizes, got (0,)"),
    "no dataclass": Mistake("@dataclass(frozen=True)", "", None, "Config must be a dataclass"),
    "bad hint": Mistake("max_steps: int", "max_steps: 'Many'", "@dataclass", "name 'Many' is not defined"),
    "constructor": Mistake(
        "    state =",
        "    def __init__(self, *given):\n        self.size = 1 / 0\n\n    state =",
        "1 / 0",
        "cannot be built: ZeroDivisionError",
    ),
    "no field": Mistake("Field(float)", "5", "class Ball", "cannot be built"),
    "no groups": Mistake("groups = (", "teams = (", None, "declares no groups"),
    "groups": Mistake("groups = (", "groups = lambda config: (config.size, ", "config.size", "no attribute 'size'"),
    "no step": Mistake("def step(", "def stepp(", "class Ball", "has no `step`"),
    "wrong name": Mistake(
        "def step(self, arrays):\n        arrays.x += 1.0",
        "@wp.func\n    def step(env: int, xx: wp.array[float]):\n        xx[env] = 1.0",
        "@wp.func",
        "did you mean 'x'",
    ),
    "does not compile": Mistake(
        "def step(self, arrays):\n        arrays.x += 1.0",
        "@wp.func\n    def step(env: int, x: wp.array[float]):\n        x[env] = 1",
        "x[env] = 1",
        "does not compile",
    ),
    "step": Mistake(
        "arrays.x += 1.0", "arrays.x += torch.zeros(3)", "torch.zeros(3)", "Ball.step failed: RuntimeError", 1
    ),
    "reset": Mistake("torch.zeros_like(arrays.x)", "arrays.y", "arrays.y", "Ball.reset failed: AttributeError"),
    "reset returns": Mistake("return dict(x=torch.zeros_like(arrays.x))", "pass", "def reset", "must return a dict"),
    "reset's name": Mistake("return dict(x=", "return dict(xx=", "def reset", "'xx'; did you mean 'x'"),
    "observe": Mistake(
        "arrays.x.unsqueeze(-1)", "arrays.x @ arrays.y", "arrays.x @ arrays.y", "Ball.observe failed: AttributeError"
    ),
    "observe's shape": Mistake(
        "arrays.x.unsqueeze(-1)", "arrays.x[:3]", "def observe", "Ball.observe failed: RuntimeError: shape"
    ),
}

ENVS = {
    "syntax": Mistake("self.time += 1", "self.time +=", "self.time +=", "SyntaxError: invalid syntax"),
    "import": Mistake("import sys\n", "import syss\n", "import syss", "No module named 'syss'"),
    "constructor": Mistake(
        "self.time = 0\n\n    def", "self.time = no_time\n\n    def", "no_time", "cannot be built: NameError"
    ),
    "number": Mistake("class Ball(gym.Env)", "Ball = 5\nclass Other(gym.Env)", None, "is of type int; name a World"),
    "no env": Mistake(
        "class Ball(gym.Env)", "class Ball:\n    pass\nclass Other(gym.Env)", "class Ball", "no reset and no step"
    ),
    "no space": Mistake("self.action_space =", "self.actions =", "class Ball", "it has no action_space"),
    "arguments": Mistake(
        "def __init__(self)", "def __init__(self, size)", "class Ball", "missing 1 required positional argument: 'size'"
    ),
    "empty box": Mistake("(2,))", "(0,))", "class Ball", "must hold at least one number"),
    "empty action": Mistake("spaces.Discrete(2)", "spaces.Box(-1.0, 1.0, (0,))", "class Ball", "An action must hold"),
    "odd space": Mistake("spaces.Discrete(2)", "spaces.Text(3)", "class Ball", "type Text"),
    "reset": Mistake(
        "np.zeros(2, np.float32), {}\n\n    def",
        "np.zeros(too), {}\n\n    def",
        "np.zeros(too)",
        "NameError: name 'too' is not defined in env 0 (seed",
        1,
    ),
    "reset returns": Mistake(
        "np.zeros(2, np.float32), {}\n\n    def",
        "np.zeros(3)\n\n    def",
        "def reset",
        "too many values to unpack (expected 2) in env",
        1,
    ),
    "step": Mistake("self.time += 1", "self.time += 1 / 0", "1 / 0", "ZeroDivisionError: division by zero in env", 1),
    "step's shape": Mistake(
        "return np.zeros(2, np.float32), 1.0", "return np.zeros(3), 1.0", "def step", "could not broadcast", 1
    ),
    "step returns": Mistake(", False, {}", ", {}", "def step", "not enough values to unpack", 1),
    "reward": Mistake("1.0, self.time == 5", "{}, self.time == 5", "def step", "TypeError", 1),
    "exit": Mistake("self.time += 1", "sys.exit(4)", "sys.exit(4)", "SystemExit: 4 in env", 1),
    "interrupt": Mistake(
        "self.time += 1", "raise KeyboardInterrupt", "raise KeyboardInterrupt", "KeyboardInterrupt in env", 1
    ),
    "text": Mistake("self.time += 1", 'raise ValueError("\\x1b[2J" * 5000)', "raise ValueError", "\\x1b[2J\\x1b", 1),
}

NETWORKS = {
    "syntax": Mistake("self.calls = 0", "self.calls = = 0", "self.calls = = 0", "SyntaxError"),
    "import": Mistake("import torch\n", "import torhc\n", "import torhc", "No module named 'torhc'"),
    "constructor": Mistake("nn.Linear(4, 8)", "nn.Lines(4, 8)", "nn.Lines", "cannot be used: AttributeError"),
    "not a network": Mistake(
        "class Net(nn.Module)", "Net = 5\nclass Other(nn.Module)", None, "'int' object is not callable"
    ),
    "function": Mistake(
        "class Net(nn.Module)",
        "def Net(shape):\n    return torch.tanh\nclass Other(nn.Module)",
        "def Net",
        "must be a torch.nn.Module",
    ),
    "shapes": Mistake("nn.Linear(4, 8)", "nn.Linear(5, 8)", "self.layer(seen)", "cannot be used: RuntimeError"),
    "output": Mistake(
        "return self.layer(seen)", "return self.layer(seen).sum()", "class Net", "gave () of torch.float32"
    ),
    "batch": Mistake(
        "return self.layer(seen)", "return self.layer(seen).reshape(1, -1)", "class Net", "a batch of 2 gave (1, 16)"
    ),
    "nothing": Mistake("return self.layer(seen)", "self.layer(seen)", "class Net", "gave NoneType"),
    "later": Mistake(
        "self.calls += 1",
        "self.calls += 1\n        assert self.calls < 200, 'too late'",
        "assert self.calls",
        "Training failed: AssertionError: too late",
        1,
    ),
}


def check(file, mistake, tmp_path, capfd, words):
    """Train with a mistake in a file; one sentence names it, with file and line."""
    assert file.count(mistake.good) == 1
    text = file.replace(mistake.good, mistake.bad)
    place = tmp_path / "mine.py"
    place.write_text(text)
    sizes = [
        "--num-envs",
        "8",
        "--rollout-steps",
        "16",
        "--num-minibatches",
        "2",
        "--eval-episodes",
        "0",
        "--device",
        "cpu",
    ]
    flags = [*sizes, "--total-steps", "4096", "--quiet", "--run-dir", str(tmp_path / "run")]
    assert main(["train", *(word.replace("FILE", str(place)) for word in words), *flags]) == mistake.code
    output = capfd.readouterr().err
    assert output.count("\n") == 1, output
    assert "Traceback" not in output
    assert mistake.says in output
    assert str(place) in output
    if mistake.line:
        lines = [number for number, line in enumerate(text.splitlines(), 1) if mistake.line in line]
        assert [int(found) for found in re.findall(rf"{place}:(\d+)", output)] == lines, output


@pytest.mark.parametrize("name", WORLDS)
def test_a_mistake_in_a_world_is_one_sentence(name, tmp_path, capfd):
    check(WORLD, WORLDS[name], tmp_path, capfd, ["FILE:Ball"])


@pytest.mark.parametrize("name", ENVS)
def test_a_mistake_in_an_env_is_one_sentence(name, tmp_path, capfd):
    check(ENV, ENVS[name], tmp_path, capfd, ["FILE:Ball", "--vec-backend", "serial", "--env-schedule", "lockstep"])


@pytest.mark.parametrize("name", ["reset", "step returns", "exit", "interrupt"])
def test_a_mistake_in_an_env_of_a_worker_is_one_sentence(name, tmp_path, capfd):
    check(
        ENV,
        ENVS[name],
        tmp_path,
        capfd,
        ["FILE:Ball", "--vec-backend", "processes", "--num-workers", "1", "--max-worker-restarts", "0"],
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_a_mistake_in_a_network_is_one_sentence(name, tmp_path, capfd):
    check(NETWORK, NETWORKS[name], tmp_path, capfd, ["cartpole", "--encoder", "FILE:Net"])


class Batch(gym.vector.VectorEnv):
    """A native batch that raises in its fifth step."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
    single_observation_space = gym.spaces.Box(-1.0, 1.0, (4,))
    single_action_space = gym.spaces.Discrete(2)

    def __init__(self, num_envs):
        self.num_envs, self.time = num_envs, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 4), np.float32), {}

    def step(self, actions):
        self.time += 1
        if self.time == 5:
            raise ValueError("too late")
        ends = np.zeros(self.num_envs, bool)
        return np.zeros((self.num_envs, 4), np.float32), np.zeros(self.num_envs), ends, ends, {}


def test_a_mistake_in_a_native_batch_is_one_sentence():
    gym.register("Batch-v0", "gymnasium.envs.classic_control:CartPoleEnv", vector_entry_point=Batch)
    cls = world_class("gym:Batch-v0")
    actions = torch.zeros(4, 1, dtype=torch.int32)
    with closing(cls(4, "cpu", cls.Config(desync_steps=0, env_schedule="lockstep"))) as world:
        world.reset(0)
        for _ in range(4):
            world.step(actions)
        with pytest.raises(UserCodeError) as caught:
            world.step(actions)
    assert caught.value.exit_code == 1
    assert re.fullmatch(
        rf"The native batch Batch failed: ValueError: too late \({__file__}:\d+ in step\)\.", str(caught.value)
    )


def test_mistakes_after_training_are_one_sentence_too(tmp_path, capfd):
    place, run = tmp_path / "mine.py", str(tmp_path / "run")
    render = "    render_mode = 'rgb_array'\n\n    def render(self):\n        raise OSError('no screen')\n"
    place.write_text(ENV + render)
    flags = [
        "--total-steps",
        "64",
        "--num-envs",
        "4",
        "--rollout-steps",
        "16",
        "--num-minibatches",
        "2",
        "--eval-episodes",
        "0",
    ]
    assert main(["train", f"{place}:Ball", "--vec-backend", "serial", "--quiet", *flags, "--run-dir", run]) == 0
    assert main(["record", run, "--envs", "1", "--steps", "1", "--out", str(tmp_path / "x.png")]) == 2
    line = len(place.read_text().splitlines())
    says = f"shoal: A picture of env 0 failed: OSError: no screen ({place}:{line} in render).\n"
    assert capfd.readouterr().err == says


def test_the_exception_is_the_cause_and_the_location_is_the_users():
    with pytest.raises(UserCodeError) as caught, UserCode("It failed"):
        invert()
    assert str(caught.value).startswith("It failed: LinAlgError: ")
    assert str(caught.value).endswith(f" ({__file__}:{invert.__code__.co_firstlineno + 1} in invert).")
    assert isinstance(caught.value.__cause__, np.linalg.LinAlgError)


def invert():
    np.linalg.inv(np.zeros((2, 2)))  # raises in NumPy's frames


def test_a_fault_of_shoal_keeps_its_traceback(monkeypatch):
    monkeypatch.setitem(COMMANDS, "list", json.loads)
    with pytest.raises(TypeError, match="JSON object must be"):
        main(["list"])


def test_other_errors_of_shoal_pass_unchanged():
    error = InvalidDataError("It is bad.", {})
    with pytest.raises(InvalidDataError) as caught, UserCode("It failed", "name"):
        raise error
    assert caught.value is error


def test_long_texts_and_control_codes_are_cut_and_escaped():
    class Odd(Exception):
        def __str__(self):
            raise ValueError

    assert len(text_of(ValueError("x" * 10_000))) < MAX_EXCERPT + 20
    assert text_of(ValueError("\x1b[2J\n")) == "ValueError: \\x1b[2J"
    assert text_of(Odd()) == "Odd"


def test_ctrl_c_is_not_the_users_error():
    def interrupted():
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), UserCode("It failed", interrupted):
        interrupted()
    with pytest.raises(UserCodeError, match="It failed: KeyboardInterrupt"), UserCode("It failed"):
        raise KeyboardInterrupt
