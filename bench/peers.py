"""Shoal beside Gymnasium and Stable-Baselines3 on cart-pole, in one run, with ratios.

    python bench/peers.py                 everything, about three minutes on two cores
    python bench/peers.py --only stepping
    python bench/peers.py --out bench/results/peers_2_cores.jsonl

Timings vary from run to run; peers take turns in short slices and the medians are compared. End to end, both sides use
the same network (two tanh layers of 64, separate for policy and value), 4 epochs and the same mini-batch size.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from shoal.run import bench
from shoal.run.config import make_job
from shoal.run.trainer import Trainer
from shoal.worlds import world_class

SLICES = 7
STEPS = 64
"""Steps that Shoal's threads take between two meetings."""


def rate(call, steps, seconds):
    """Env steps per second of `call`, which makes `steps`, over about `seconds`."""
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        call()
        done += steps
    return done / (time.perf_counter() - start)


def gymnasium_stepper(kind, envs):
    import gymnasium as gym

    vector = gym.make_vec("CartPole-v1", num_envs=envs, vectorization_mode=kind)
    vector.reset(seed=0)
    random = np.random.default_rng(0)

    def call():
        for _ in range(20):
            vector.step(random.integers(0, 2, envs))

    return call, 20 * envs


def shoal_stepper(envs):
    world = world_class("cartpole")(envs, "cpu")
    world.reset(0)
    actions, draw = bench.random_actions(world, STEPS)
    play = world.play(actions)

    def call():
        draw()
        play()

    return call, STEPS * envs


def take_turns(contestants, seconds):
    """Median rate of each contestant; they take turns, so that a slow minute of the machine hits all of them."""
    for call, _ in contestants.values():
        call()
    rates = {name: [] for name in contestants}
    for _ in range(SLICES):
        for name, (call, steps) in contestants.items():
            rates[name].append(rate(call, steps, seconds))
    return {name: statistics.median(values) for name, values in rates.items()}


def stepping(seconds):
    contestants = {"gymnasium SyncVectorEnv, 16 envs": gymnasium_stepper("sync", 16)}
    for envs in (1024, 4096, 16_384, 65_536):
        contestants[f"gymnasium NumPy vector, {envs} envs"] = gymnasium_stepper("vector_entry_point", envs)
    for envs in (32_768, 65_536, 98_304):
        contestants[f"shoal, {envs} envs"] = shoal_stepper(envs)
    rates = take_turns(contestants, seconds)
    best = {kind: max(v for k, v in rates.items() if kind in k) for kind in ("Sync", "NumPy", "shoal")}
    rows = [dict(bench="stepping", peer=name, steps_per_second=round(value)) for name, value in rates.items()]
    rows.append(dict(bench="stepping", ratio="shoal / SyncVectorEnv", value=round(best["shoal"] / best["Sync"], 1)))
    rows.append(dict(bench="stepping", ratio="shoal / NumPy vector", value=round(best["shoal"] / best["NumPy"], 1)))
    return rows


def stable_baselines(samples, minibatch):
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    envs = make_vec_env("CartPole-v1", n_envs=8)
    network = dict(net_arch=dict(pi=[64, 64], vf=[64, 64]), activation_fn=torch.nn.Tanh)
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=samples // 8,
        batch_size=minibatch,
        n_epochs=4,
        policy_kwargs=network,
        device="cpu",
        verbose=0,
    )
    return (lambda: model.learn(samples, reset_num_timesteps=False)), samples


def shoal_trainer(envs, rollout, minibatches):
    settings = dict(hidden=(64, 64), activation="tanh", shared=False, epochs=4, minibatches=minibatches)
    settings["normalise_reward"] = False  # as in Stable-Baselines3
    job = make_job("cartpole", device="cpu", num_envs=envs, rollout=rollout, total_steps=1e9, compile="on", **settings)
    trainer = Trainer(job)
    for _ in range(3):
        trainer.iterate()
    return trainer.iterate, envs * rollout


def training(seconds):
    samples, minibatches = 16_384, 4
    minibatch = samples // minibatches
    contestants = {
        "stable-baselines3 PPO, 8 envs": stable_baselines(samples, minibatch),
        "shoal PPO, 512 envs": shoal_trainer(512, samples // 512, minibatches),
        "shoal PPO, 1024 envs": shoal_trainer(1024, samples // 1024, minibatches),
    }
    rates = take_turns(contestants, seconds)
    rows = [
        dict(bench="training", peer=name, steps_per_second=round(value), epochs=4, minibatch=minibatch)
        for name, value in rates.items()
    ]
    peer = rates["stable-baselines3 PPO, 8 envs"]
    best = max(v for k, v in rates.items() if k.startswith("shoal"))
    rows.append(dict(bench="training", ratio="shoal / stable-baselines3", value=round(best / peer, 1)))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["stepping", "training"])
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one slice")
    parser.add_argument("--out", type=Path, help="also write the JSON lines to this file")
    options = parser.parse_args()
    rows = []
    if options.only != "training":
        rows += stepping(options.seconds)
    if options.only != "stepping":
        rows += training(options.seconds * 2)
    where = bench.machine(world_class("cartpole")(1, "cpu").device)
    rows = [{**row, **where} for row in rows]
    for row in rows:
        print(json.dumps(row))
    print()
    for row in rows:
        if "peer" in row:
            print(f"{row['bench']:9} {row['peer']:36} {row['steps_per_second']:>14,} env steps/s")
        else:
            print(f"{row['bench']:9} {row['ratio']:36} {row['value']:>14} times")
    if options.out:
        bench.save(rows, options.out)


if __name__ == "__main__":
    main()
