"""Presets of worlds."""

import pytest

from shoal.algos.registry import LEARNERS
from shoal.config.resolve import read_preset
from shoal.core.errors import ShoalError
from shoal.core.registry import WORLDS
from shoal.core.world_loading import world_class
from shoal.runs.jobs import make_job


def test_every_preset_names_only_settings():
    for name in WORLDS:
        for algo in LEARNERS:
            for device in ("cpu", "cuda"):
                read_preset(world_class(name), algo, device)


@pytest.mark.parametrize(
    ("preset", "says"),
    [
        (dict(comon=dict(lr=1)), "section in the preset of CartPole: 'comon'; did you mean 'common'"),
        (
            dict(ppo_gpu=dict(rolout=8)),
            "setting in the preset 'ppo_gpu' of CartPole: 'rolout'; did you mean 'rollout_steps'",
        ),
        (dict(cpu=dict(world=dict(nope=1))), "setting of the world in the preset 'cpu' of CartPole: 'nope'"),
    ],
)
def test_a_preset_with_an_unknown_name_is_refused(preset, says, monkeypatch):
    monkeypatch.setattr(world_class("cartpole"), "settings", preset)
    with pytest.raises(ShoalError, match=says):
        make_job("cartpole", device="cpu")
