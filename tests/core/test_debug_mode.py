"""Kernels with Warp's bounds checks: in release mode an index out of range is silent."""

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.core.registry import KERNEL_WORLDS
from shoal.worlds import pendulum

RUN = """
import sys
import warp as wp

wp.config.mode = "debug"
from shoal.runs.jobs import make_job
from shoal.training.trainer import Trainer

name, settings = sys.argv[1], dict(num_envs=13, rollout_steps=7, num_minibatches=1, total_steps=1e6, device="cpu")
trainer = Trainer(make_job(name, time_limit=5, **settings))
for _ in range(3):
    trainer.iterate()
print("fine")
"""


COMPUTED_INDICES = ("tag-grid", "tag-continuous", "pandemic")
"""Worlds whose kernels compute indices. The others take as long to compile, so their tests are slow ones."""


def run(*words):
    return subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True)


@pytest.mark.parametrize(
    "name", [name if name in COMPUTED_INDICES else pytest.param(name, marks=pytest.mark.slow) for name in KERNEL_WORLDS]
)
def test_no_index_is_out_of_range(name):
    result = run(name)
    assert result.stdout.strip() == "fine", result.stderr


def test_an_index_out_of_range_is_detected(tmp_path):
    good = Path(pendulum.__file__).read_text()
    bad = tmp_path / "bad.py"
    bad.write_text(good.replace("reward[env] = -(", "reward[env + 100] = -("))
    assert bad.read_text() != good
    assert run(f"{bad}:Pendulum").stdout.strip() != "fine"
