"""Settings that are known to learn, by environment; everything else starts from those of its kind."""

from typing import Any

ATARI: dict[str, dict[str, Any]] = {
    "common": dict(
        total_steps=10_000_000,
        rollout=64,
        shared=True,
        activation="relu",
        eval_episodes=32,
        eval_sample=True,
        lr=1e-3,
        gamma=0.99,
        lam=0.95,
        entropy=0.01,
    ),
    "cpu": dict(num_envs=16),
    "gpu": dict(num_envs=64, world=dict(schedule="alternating")),
    "ppo": dict(epochs=4, minibatches=8, clip=0.2),
    "a2c": dict(rollout=8, lr=7e-4),
}

VECTOR: dict[str, dict[str, Any]] = {
    "common": dict(total_steps=1_000_000, num_envs=32, rollout=128, eval_episodes=32),
    "ppo": dict(lr=1e-3, epochs=4, minibatches=8),
}

CARTPOLE: dict[str, dict[str, Any]] = {
    "common": dict(total_steps=300_000, num_envs=32, rollout=64, eval_episodes=100),
    "ppo": dict(lr=2.5e-3, gamma=0.98, lam=0.8, epochs=8, minibatches=4),
}

LUNAR_LANDER: dict[str, dict[str, Any]] = {
    "common": dict(total_steps=1_500_000, num_envs=32, rollout=128, hidden=(64, 64), eval_episodes=64),
    "ppo": dict(lr=1.5e-3, gamma=0.999, lam=0.98, entropy=0.01, epochs=6, minibatches=8),
}

MUJOCO: dict[str, dict[str, Any]] = {
    "common": dict(
        total_steps=1_000_000,
        num_envs=16,
        rollout=128,
        hidden=(64, 64),
        normalise_observation=True,
        log_std=-0.5,
        eval_episodes=16,
    ),
    "ppo": dict(normalise_reward=True, lr=1e-3, epochs=10, minibatches=16),
}

BY_NAME = {
    "CartPole": CARTPOLE,
    "LunarLander": LUNAR_LANDER,
    "HalfCheetah": MUJOCO,
    "Hopper": MUJOCO,
    "Walker2d": MUJOCO,
    "Ant": MUJOCO,
    "Swimmer": MUJOCO,
    "Humanoid": MUJOCO,
}
"""Name of a Gymnasium environment, without its version -> settings."""


def settings_of(kind: str, env_name: str) -> dict[str, dict[str, Any]]:
    """The sections of settings that a world of this environment ships."""
    if kind == "ale":
        return ATARI
    name = env_name.rpartition("/")[2].rpartition("-v")[0]
    return BY_NAME.get(name, VECTOR)
