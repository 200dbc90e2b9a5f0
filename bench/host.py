"""Host worlds against the vector envs of Gymnasium, Stable-Baselines3 and ale-py, in one run, with ratios.

    python bench/host.py                    everything, about ten minutes on two cores
    python bench/host.py --only stepping    stepping with random actions
    python bench/host.py --only atari       ale-py's vector env, called directly and through Shoal
    python bench/host.py --only training    PPO end to end against Stable-Baselines3
    python bench/host.py --only device      with a GPU: acting, learning, and stepping alone
    python bench/host.py --only appo        with a GPU: APPO by envs, rollout length and env slices
    python bench/host.py --out bench/results/host_2_cores.jsonl

Peers run alternately for short times and medians are compared. End to end, both sides have the same network, envs,
rollout length, epochs and mini-batch size.
"""

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from peers import alternating_rates  # imports Shoal before torch: see shoal/__init__.py

from shoal.core.launch import cpu_threads
from shoal.core.world_loading import world_class
from shoal.runs.jobs import make_job
from shoal.tools import bench
from shoal.training.make_trainer import make_trainer
from shoal.training.trainer import Trainer

STEPS = 10
"""Steps of all envs in one call."""

ENVS = 64


def gymnasium_stepper(name, kind, envs):
    import gymnasium as gym

    makers = [partial(gym.make, name) for _ in range(envs)]
    vector = gym.vector.AsyncVectorEnv(makers) if kind == "async" else gym.vector.SyncVectorEnv(makers)
    vector.reset(seed=0)
    actions = _actions(vector.single_action_space.n, envs)
    return _stepper(vector.step, actions, envs)


def stable_baselines_stepper(name, envs):
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv

    # With fork, its processes start in a second instead of minutes, at the same speed.
    vector = make_vec_env(name, n_envs=envs, vec_env_cls=SubprocVecEnv, vec_env_kwargs=dict(start_method="fork"))
    vector.reset()
    actions = _actions(vector.action_space.n, envs)
    return _stepper(vector.step, actions, envs)


def _stepper(step, actions, envs):
    """A function to time, and its number of env steps."""

    def call():
        for action in actions:
            step(action)

    return call, STEPS * envs


def _actions(choices, envs):
    """Actions [STEPS, envs], equal for all peers, since the length of games depends on them."""
    return list(np.random.default_rng(0).integers(0, choices, (STEPS, envs)))


def shoal_stepper(name, envs, **settings):
    import torch

    cls = world_class(name)
    world = cls(envs, "cpu", cls.Config(desync_steps=0, env_schedule="lockstep", **settings))
    world.reset(0)
    actions = [torch.from_numpy(row).int()[:, None] for row in _actions(world.groups[0].action.n, envs)]
    return _stepper(world.step, actions, envs)


def ale_stepper(game, envs, threads):
    from ale_py.vector_env import AtariVectorEnv

    vector = AtariVectorEnv(game, envs, num_threads=threads, autoreset_mode="SameStep", stack_num=1)
    vector.reset(seed=0)
    actions = _actions(vector.single_action_space.n, envs)
    return _stepper(vector.step, actions, envs)


def rows_of(kind, what, rates, ratios):
    """A row per peer, and one per ratio of Shoal's speed to a peer's."""
    rows = [dict(bench=kind, what=what, peer=name, steps_per_second=round(value)) for name, value in rates.items()]
    for ours, peer in ratios:
        rows.append(dict(bench=kind, what=what, ratio=f"{ours} / {peer}", value=round(rates[ours] / rates[peer], 2)))
    return rows


def stepping(seconds):
    rows = []
    for name in ("CartPole-v1", "LunarLander-v3"):
        candidates = {
            "SyncVectorEnv": gymnasium_stepper(name, "sync", ENVS),
            "AsyncVectorEnv": gymnasium_stepper(name, "async", ENVS),
            "SubprocVecEnv": stable_baselines_stepper(name, ENVS),
            "shoal": shoal_stepper(f"gym:{name}", ENVS, vec_backend="processes"),
        }
        if name == "CartPole-v1":
            candidates["shoal, native batch"] = shoal_stepper(f"gym:{name}", ENVS, vec_backend="native")
        rates = alternating_rates(candidates, seconds)
        peers = ("SyncVectorEnv", "AsyncVectorEnv", "SubprocVecEnv")
        rows += rows_of("stepping", f"{name}, {ENVS} envs", rates, [("shoal", peer) for peer in peers])
    return rows


def atari(seconds):
    rows = []
    for game in ("pong", "breakout"):
        candidates = {
            "ale-py": ale_stepper(game, ENVS, cpu_threads()),
            "shoal": shoal_stepper(f"ale:{game}", ENVS, terminal_on_life_loss=False),
        }
        rates = alternating_rates(candidates, seconds)
        rows += rows_of("atari", f"{game}, {ENVS} envs", rates, [("shoal", "ale-py")])
    return rows


def stable_baselines(name, envs, rollout_steps, num_minibatches, epochs, atari):
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack

    samples = envs * rollout_steps
    if atari:
        import ale_py  # noqa: F401  (registers the games)

        forked = dict(start_method="fork")
        vector = make_atari_env(name, n_envs=envs, vec_env_cls=SubprocVecEnv, vec_env_kwargs=forked)
        vector = VecFrameStack(vector, 4)
        policy, network = "CnnPolicy", {}
    else:
        vector = make_vec_env(name, n_envs=envs)  # in this process, the fastest for cheap envs
        policy = "MlpPolicy"
        network = dict(net_arch=dict(pi=[64, 64], vf=[64, 64]), activation_fn=torch.nn.Tanh)
    model = PPO(
        policy,
        vector,
        n_steps=rollout_steps,
        batch_size=samples // num_minibatches,
        n_epochs=epochs,
        policy_kwargs=network,
        device="cpu",
        verbose=0,
    )
    return (lambda: model.learn(samples, reset_num_timesteps=False)), samples


def shoal_trainer(name, envs, rollout_steps, num_minibatches, epochs, **settings):
    job = make_job(
        name,
        device="cpu",
        num_envs=envs,
        rollout_steps=rollout_steps,
        num_minibatches=num_minibatches,
        epochs=epochs,
        total_steps=1e9,
        **settings,
    )
    trainer = Trainer(job)
    for _ in range(2):
        trainer.iterate()
    return trainer.iterate, envs * rollout_steps


def training(seconds):
    rows = []
    lander = dict(envs=16, rollout_steps=256, num_minibatches=8, epochs=4)
    plain = dict(hidden=(64, 64), activation="tanh", shared_encoder=False, normalize_reward=False)
    candidates = {
        "stable-baselines3": stable_baselines("LunarLander-v3", atari=False, **lander),
        "shoal": shoal_trainer("gym:LunarLander-v3", compile="on", **plain, **lander),
    }
    rates = alternating_rates(candidates, seconds)
    rows += rows_of("training", "LunarLander-v3, 16 envs, PPO", rates, [("shoal", "stable-baselines3")])
    pong = dict(envs=16, rollout_steps=64, num_minibatches=4, epochs=4)
    candidates = {
        "stable-baselines3": stable_baselines("PongNoFrameskip-v4", atari=True, **pong),
        "shoal": shoal_trainer("ale:pong", compile="on", **pong),
    }
    rates = alternating_rates(candidates, seconds)
    rows += rows_of("training", "Pong, 16 envs, PPO", rates, [("shoal", "stable-baselines3")])
    return rows


def device(seconds):
    """With a GPU: env steps/s of rollouts and training by schedule, and of stepping alone."""
    calls, trainers = {"ale-py alone": ale_stepper("pong", ENVS, cpu_threads())}, []
    for env_schedule in ("lockstep", "alternating", "first-come"):
        job = make_job("ale:pong", num_envs=ENVS, total_steps=1e9, world_config=dict(env_schedule=env_schedule))
        trainers.append(trainer := Trainer(job))
        for _ in range(4):
            trainer.iterate()
        steps = job.run.steps_per_iteration
        calls[f"rollouts, {env_schedule}"] = (trainer.collect, steps)
        calls[f"PPO, {env_schedule}"] = (trainer.iterate, steps)
    candidates = {name: (Busy(call), steps) for name, (call, steps) in calls.items()}
    rates = alternating_rates(candidates, seconds)
    peers = [(name, "ale-py alone") for name in candidates if name != "ale-py alone"]
    rows = rows_of("device", f"pong, {ENVS} envs", rates, [*peers, ("PPO, alternating", "PPO, lockstep")])
    for row in rows:
        if "peer" in row:
            row["busy_cores"] = candidates[row["peer"]][0].share()
    for trainer in trainers:
        trainer.close()
    return rows


def appo(seconds):
    """With a GPU: env steps/s of APPO, and the fraction of the cores in use."""
    rows = []
    for envs, rollout, slices in ((256, 16, 2), (512, 16, 2), (512, 16, 3)):
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            rows.append(fresh.submit(appo_row, envs, rollout, slices, 15 * seconds).result())
    return rows


def appo_row(envs, rollout, slices, seconds):
    """Measure one setting in a separate process, without threads and memory of other trainings."""
    job = make_job(
        "ale:pong",
        algo="appo",
        num_envs=envs,
        rollout_steps=rollout,
        num_minibatches=envs * rollout // 512,
        total_steps=1e9,
        world_config=dict(num_env_slices=slices),
    )
    trainer = make_trainer(job)
    for _ in range(12):
        trainer.iterate()
    trainer.read_metrics()
    busy, steps, start = Busy(trainer.iterate), 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        busy()
        steps += job.run.steps_per_iteration
    waits = trainer.read_metrics()["time/actor_waits"]
    trainer.close()
    return dict(
        bench="appo",
        what=f"pong, {envs} envs",
        peer=f"APPO, rollouts of {rollout}, {slices} env slices",
        steps_per_second=round(steps / spent),
        busy_cores=busy.share(),
        actor_waits=round(waits, 3),
    )


class Busy:
    """Calls a function, waits for the GPU, and measures the fraction of the cores in use."""

    def __init__(self, call):
        self.call, self.cpu, self.wall = call, 0.0, 0.0

    def __call__(self):
        import torch

        cpu, wall = time.process_time(), time.perf_counter()
        self.call()
        torch.cuda.synchronize()
        self.cpu += time.process_time() - cpu
        self.wall += time.perf_counter() - wall

    def share(self):
        """CPU time of this process in all calls, as a fraction of all cores' time."""
        return round(self.cpu / self.wall / cpu_threads(), 3)


PARTS = {"stepping": stepping, "atari": atari, "training": training, "device": device, "appo": appo}
ON_GPU = ("device", "appo")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--seconds", type=float, default=1.0, help="time of one measurement")
    parser.add_argument("--out", type=Path, help="also write the JSON lines to this file")
    options = parser.parse_args()
    where = bench.machine(world_class("cartpole")(1, "cuda" if options.only in ON_GPU else "cpu").device)
    rows = []
    for name, part in PARTS.items():
        if name == options.only or (options.only is None and name not in ON_GPU):
            for row in part(options.seconds):
                rows.append({**row, **where})
                value = f"{row['steps_per_second']:,} env steps/s" if "peer" in row else f"{row['value']} times"
                print(f"{row['bench']:9} {row['what']:32} {row.get('peer') or row['ratio']:36} {value}", flush=True)
            if options.out:
                bench.save(rows, options.out)
    print("\n".join(json.dumps(row) for row in rows))


if __name__ == "__main__":
    main()
