"""Shoal against Gymnasium and Stable-Baselines3 on cart-pole, in one run, with ratios.

    python bench/peers.py                 everything, about three minutes on two cores
    python bench/peers.py --only stepping
    python bench/peers.py --only dqn      Q-learning: rates, and env steps until the score is 475; six minutes more
    python bench/peers.py --out bench/results/peers_2_cores.jsonl

Timings vary between runs, so peers alternate for short times and medians are compared. End to end, both sides use
the same network (two tanh layers of 64, separate for policy and value), 4 epochs and the same mini-batch size. In
Q-learning both draw 8 samples from the replay per env step; the other settings are those of RL Baselines3 Zoo for
Stable-Baselines3, and the world's preset for Shoal.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import numpy as np

from shoal.core.world_loading import world_class
from shoal.runs.evaluation import evaluate
from shoal.runs.jobs import make_job
from shoal.tools import bench
from shoal.training.trainer import Trainer

SLICES = 7
DRAWN = 8
"""Samples that Q-learners draw per env step."""

SOLVED = 475
EVAL_INTERVAL = 2_560
"""Env steps between two evaluations."""

MAX_STEPS = 200 * 1_024
STEPS = 64
"""Steps of Shoal's threads between two barriers."""


def rate(call, steps, seconds):
    """Env steps per second of `call`, which takes `steps` env steps, over about `seconds`."""
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


def alternating_rates(candidates, seconds):
    """Median rate of each candidate. They alternate, so that other load on the machine affects all."""
    for call, _ in candidates.values():
        call()
    rates = {name: [] for name in candidates}
    for _ in range(SLICES):
        for name, (call, steps) in candidates.items():
            rates[name].append(rate(call, steps, seconds))
    return {name: statistics.median(values) for name, values in rates.items()}


def stepping(seconds):
    candidates = {"gymnasium SyncVectorEnv, 16 envs": gymnasium_stepper("sync", 16)}
    for envs in (1024, 4096, 16_384, 65_536):
        candidates[f"gymnasium NumPy vector, {envs} envs"] = gymnasium_stepper("vector_entry_point", envs)
    for envs in (32_768, 65_536, 131_072):
        candidates[f"shoal, {envs} envs"] = shoal_stepper(envs)
    rates = alternating_rates(candidates, seconds)
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


def shoal_trainer(envs, rollout, num_minibatches):
    settings = dict(hidden=(64, 64), activation="tanh", shared_encoder=False, epochs=4, num_minibatches=num_minibatches)
    settings["normalize_reward"] = False  # as in Stable-Baselines3
    sizes = dict(num_envs=envs, rollout_steps=rollout, total_steps=1e9)
    job = make_job("cartpole", device="cpu", compile="on", **sizes, **settings)
    trainer = Trainer(job)
    for _ in range(3):
        trainer.iterate()
    return trainer.iterate, envs * rollout


def training(seconds):
    samples, num_minibatches = 16_384, 4
    minibatch = samples // num_minibatches
    candidates = {
        "stable-baselines3 PPO, 8 envs": stable_baselines(samples, minibatch),
        "shoal PPO, 512 envs": shoal_trainer(512, samples // 512, num_minibatches),
        "shoal PPO, 1024 envs": shoal_trainer(1024, samples // 1024, num_minibatches),
    }
    rates = alternating_rates(candidates, seconds)
    rows = [
        dict(bench="training", peer=name, steps_per_second=round(value), epochs=4, minibatch=minibatch)
        for name, value in rates.items()
    ]
    peer = rates["stable-baselines3 PPO, 8 envs"]
    best = max(v for k, v in rates.items() if k.startswith("shoal"))
    rows.append(dict(bench="training", ratio="shoal / stable-baselines3", value=round(best / peer, 1)))
    return rows


def stable_baselines_dqn(seed):
    """A model with the settings of RL Baselines3 Zoo, except the network and the number of samples."""
    import torch
    from stable_baselines3 import DQN

    return DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=100_000,
        learning_starts=1_000,
        gamma=0.99,
        target_update_interval=10,
        train_freq=256,
        gradient_steps=256 * DRAWN // 64,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs=dict(net_arch=[64, 64], activation_fn=torch.nn.Tanh),
        seed=seed,
        device="cpu",
    )


def shoal_dqn(seed, steps=MAX_STEPS):
    settings = dict(hidden=(64, 64), activation="tanh", replay_ratio=float(DRAWN), total_steps=steps, seed=seed)
    return Trainer(make_job("cartpole", algo="dqn", device="cpu", **settings))


def solved_after(seed, peer):
    """Env steps until 20 greedy episodes, played every `EVAL_INTERVAL` steps, have a mean of 475."""
    from stable_baselines3.common.callbacks import BaseCallback

    game = make_job("cartpole", device="cpu", num_envs=20)
    if peer == "shoal":
        trainer = shoal_dqn(seed)
        for _ in range(MAX_STEPS // EVAL_INTERVAL):
            goal = trainer.steps + EVAL_INTERVAL
            while trainer.steps < goal:
                trainer.iterate()
            if evaluate(game, trainer.policies, 20).mean >= SOLVED:
                return trainer.steps
        return None

    from stable_baselines3.common.evaluation import evaluate_policy

    found = []

    class Check(BaseCallback):
        def _on_step(self):
            if self.num_timesteps % EVAL_INTERVAL == 0:
                mean, _ = evaluate_policy(self.model, self.model.get_env(), 20, warn=False)
                found.extend([self.num_timesteps] if mean >= SOLVED else [])
            return not found

    stable_baselines_dqn(seed).learn(MAX_STEPS, Check())
    return found[0] if found else None


def q_learning(seconds):
    model = stable_baselines_dqn(0)
    model.learn(4_096)
    trainer = shoal_dqn(0, 10**9)
    while trainer.steps < 20_000:
        trainer.iterate()
    candidates = {
        "stable-baselines3 DQN": ((lambda: model.learn(1_024, reset_num_timesteps=False)), 1_024),
        "shoal DQN": (trainer.iterate, trainer.job.run.steps_per_iteration),
    }
    rates = alternating_rates(candidates, seconds)
    rows = [dict(bench="dqn", peer=name, steps_per_second=round(rate)) for name, rate in rates.items()]
    ratio = rates["shoal DQN"] / rates["stable-baselines3 DQN"]
    rows.append(dict(bench="dqn", ratio="shoal / stable-baselines3", value=round(ratio, 1)))
    medians = {}
    for peer in ("stable-baselines3", "shoal"):
        after = [solved_after(seed, peer) for seed in (1, 2, 3)]
        medians[peer] = statistics.median(steps or math.inf for steps in after)
        rows.append(dict(bench="dqn", solved=peer, env_steps=after))
    ratio = medians["shoal"] / medians["stable-baselines3"]
    rows.append(dict(bench="dqn", ratio="env steps to 475, shoal / stable-baselines3", value=round(ratio, 2)))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["stepping", "training", "dqn"])
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per measurement")
    parser.add_argument("--out", type=Path, help="also write the JSON lines to this file")
    options = parser.parse_args()
    rows = []
    for name, measure in dict(stepping=stepping, training=training, dqn=q_learning).items():
        if options.only in (None, name):
            rows += measure(options.seconds if name == "stepping" else options.seconds * 2)
    where = bench.machine(world_class("cartpole")(1, "cpu").device)
    rows = [{**row, **where} for row in rows]
    for row in rows:
        print(json.dumps(row))
    print()
    for row in rows:
        if "solved" in row:
            print(f"{row['bench']:9} {row['solved']:36} {row['env_steps']} env steps to {SOLVED}")
        elif "peer" in row:
            print(f"{row['bench']:9} {row['peer']:36} {row['steps_per_second']:>14,} env steps/s")
        else:
            print(f"{row['bench']:9} {row['ratio']:36} {row['value']:>14} times")
    if options.out:
        bench.save(rows, options.out)


if __name__ == "__main__":
    main()
