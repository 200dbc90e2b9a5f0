"""What Shoal leaves alone in the program that imports it."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import torch

import shoal
from shoal.runs.jobs import make_job
from shoal.training.build import make_policies, make_world

IMPORT = """
import json, os
before = dict(os.environ)
import shoal
first = dict(os.environ)
import shoal.api, shoal.core, shoal.tools.bench
print(json.dumps([first == before, sorted(name for name in os.environ if os.environ[name] != before.get(name))]))
"""

BY_LIBRARIES = {"PYGAME_HIDE_SUPPORT_PROMPT", "TORCHINDUCTOR_CACHE_DIR"}
"""Variables that Gymnasium and torch's compiler set."""


def states():
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, keys.tolist(), *rest), torch.get_rng_state().tolist()


def test_importing_shoal_sets_nothing_in_the_environment():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    nothing, names = json.loads(done.stdout)
    assert nothing
    assert set(names) <= BY_LIBRARIES


def test_the_command_line_keeps_the_users_environment():
    command = "import os, shoal.cli; shoal.cli.main(['--version']); print(os.environ['GOMP_SPINCOUNT'])"
    for given, found in ((None, "2000"), ("7", "7")):
        env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        env |= {} if given is None else {"GOMP_SPINCOUNT": given}
        done = subprocess.run([sys.executable, "-c", command], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split()[-1] == found


def test_making_a_policy_leaves_random_states_alone():
    job = make_job("cartpole", num_envs=4, device="cpu")
    world = make_world(job)
    before = states()
    weights = [
        torch.cat([tensor.flatten() for tensor in make_policies(job, world)["cart"].state_dict().values()])
        for _ in range(2)
    ]
    assert states() == before
    assert torch.equal(*weights)


def test_training_leaves_random_states_alone(tmp_path):
    before = states()
    sizes = dict(num_envs=4, rollout_steps=8, total_steps=64, eval_episodes=1)
    shoal.train("cartpole", run_dir=tmp_path / "run", device="cpu", quiet=True, **sizes)
    assert states() == before
