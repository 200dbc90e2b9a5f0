"""The settings of a job's world."""

import json
from dataclasses import replace

import pytest

from shoal.config.parse import job_from_flags
from shoal.config.resolve import job_from_settings
from shoal.core.errors import ShoalError
from shoal.core.world_loading import world_class
from shoal.runs.config_file import job_to_json, load_job

ROCKET = """
from dataclasses import dataclass
from typing import Annotated

import torch

from shoal.core import Bounds, Box, Discrete, Field, Group, KernelWorld


class Rocket(KernelWorld):
    @dataclass(frozen=True)
    class Config:
        engines: Annotated[int, Bounds(ge=1)] = 1
        thrust: Annotated[float, Bounds(gt=0, le=100)] = 20.0

    state = dict(height=Field(float))
    groups = (Group("rocket", observation=Box(1), action=Discrete(2)),)

    def step(self, s):
        s.height += 1.0

    def reset(self, s):
        return dict(height=torch.zeros_like(s.height))

    def observe(self, s):
        return s.height[:, None]
"""


@pytest.fixture
def rocket(tmp_path):
    file = tmp_path / "rocket.py"
    file.write_text(ROCKET)
    return f"{file}:Rocket"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("engines", 0, "--world.engines must be at least 1, got 0."),
        ("thrust", 101, "--world.thrust must be above 0 and at most 100, got 101.0."),
    ],
)
def test_bounds_of_a_users_world_are_checked_on_every_way_in(rocket, tmp_path, name, value, message):
    cls = world_class(rocket)
    job = job_from_settings(rocket, device="cpu")
    parts = json.loads(job_to_json(job))
    parts["world_config"][name] = value
    (tmp_path / "config.json").write_text(json.dumps(parts))
    ways = [
        lambda: job_from_flags(rocket, [f"--world.{name}", str(value), "--device", "cpu"]),
        lambda: job_from_flags(rocket, [f"--{name}", str(value), "--device", "cpu"]),
        lambda: job_from_settings(rocket, device="cpu", world_config={name: value}),
        lambda: replace(job, world_config=replace(job.world_config, **{name: value})),
        lambda: cls(4, config=cls.Config(**{name: value})),
    ]
    for way in ways:
        with pytest.raises(ShoalError) as caught:
            way()
        assert str(caught.value) == message
    with pytest.raises(ShoalError) as caught:
        load_job(tmp_path, trust=True)
    assert str(caught.value) == f"{tmp_path}/config.json: {message}"


def test_whole_numbers_become_floats(rocket):
    cls = world_class(rocket)
    assert isinstance(cls(4, config=cls.Config(thrust=20)).config.thrust, float)


def test_bounds_of_bundled_worlds_are_named():
    with pytest.raises(ShoalError, match=r"^--world\.num-taggers must be between 1 and 1048575, got 0\.$"):
        job_from_flags("tag-grid", ["--num-taggers", "0"])
    with pytest.raises(ShoalError, match=r"^--world\.max-steps must be at least 1, got 0\.$"):
        job_from_settings("cartpole", world_config=dict(max_steps=0))
    with pytest.raises(ShoalError, match=r"^--max-depth must be above 0 and below 1000, got 0\.0\.$"):
        job_from_flags("pointnav", ["--max-depth", "0"])
