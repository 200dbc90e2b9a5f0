"""Kernels once with Warp's bounds checks: in release mode an index out of range goes unnoticed."""

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


LOOK_AT_OTHERS = ("tag-grid", "tag-continuous", "pandemic")
"""Worlds whose kernels compute indices; compiling the others for this takes as long."""


def run(*words):
    return subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True)


@pytest.mark.parametrize(
    "name", [name if name in LOOK_AT_OTHERS else pytest.param(name, marks=pytest.mark.slow) for name in KERNEL_WORLDS]
)
def test_no_kernel_leaves_its_arrays(name):
    result = run(name)
    assert result.stdout.strip() == "fine", result.stderr


def test_the_check_would_notice(tmp_path):
    """A kernel that does leave its array must not come through."""
    good = Path(pendulum.__file__).read_text()
    bad = tmp_path / "bad.py"
    bad.write_text(good.replace("reward[env] = -(", "reward[env + 100] = -("))
    assert bad.read_text() != good
    assert run(f"{bad}:Pendulum").stdout.strip() != "fine"
