"""A short form of `make soak`: kills at random moments, and what a process keeps after each run."""

import gc
import os
import threading
from dataclasses import replace
from itertools import pairwise
from random import Random

import shoal
from shoal.algos.registry import LEARNERS
from tests.soak.cells import CELLS
from tests.soak.kills import kill_and_resume, train_whole
from tests.soak.leaks import Look, growth


def test_a_killed_run_resumes_and_ends_as_an_uninterrupted_one(tmp_path):
    cell = replace(CELLS["ppo"], steps=100_000)
    seconds = train_whole(cell, tmp_path / "whole")
    found = kill_and_resume(cell, tmp_path / "whole", seconds, tmp_path / "run", 1, Random(0))
    assert not found.problems
    assert found.equal


def test_runs_leave_no_descriptors_and_threads_behind(tmp_path):
    small = dict(num_envs=8, rollout_steps=8, total_steps=128, eval_episodes=2, quiet=True, device="cpu", compile="off")
    kept = []
    for number in range(4):
        for world, more in {
            "cartpole": dict(algo="appo"),
            "pendulum": dict(algo="sac", batch_size=16, learning_starts=16, buffer_size=256),
            "gym:CartPole-v1": dict(world_config=dict(vec_backend="processes", num_workers=1)),
        }.items():
            shoal.train(world, run_dir=tmp_path / f"{world[:4]}{number}", **(small | more))
        gc.collect()
        kept.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert any(after <= before for before, after in pairwise(kept[1:])), kept  # a leak grows with every round


def test_growth_is_seen():
    flat = [Look(memory=10**9 + i % 5, descriptors=50, threads=9, processes=2) for i in range(60)]
    assert not growth(flat)
    for change in (
        lambda look, i: setattr(look, "memory", 10**9 + i * 2 * 10**6),
        lambda look, i: setattr(look, "descriptors", 50 + i // 10),
        lambda look, i: setattr(look, "threads", 9 + i // 30),
        lambda look, i: setattr(look, "processes", 2 + (i > 45)),
    ):
        looks = [Look(**vars(look)) for look in flat]
        for i, look in enumerate(looks):
            change(look, i)
        assert len(growth(looks)) == 1
    assert growth(flat[:3])


def test_cells_cover_every_algorithm_and_schedule():
    text = " ".join(f"{name} {cell.flags}" for name, cell in CELLS.items())
    assert all(f"--algo {algo}" in text for algo in LEARNERS)
    assert all(word in text for word in ("lockstep", "alternating", "first-come", "--asynchronous", "--processes 2"))
