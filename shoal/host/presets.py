"""Tuned settings of environments; all others start from `VECTOR`, Atari games from `ATARI`."""

from typing import Any

ATARI_Q = dict(
    rollout_steps=4,
    lr=2.5e-4,
    batch_size=256,
    replay_ratio=32.0,
    n_step=3,
    target_update_interval=500,
    learning_starts=50_000,
)
"""DQN and Rainbow on Atari: an update per 8 env steps, a new target network every 4,000."""

ATARI: dict[str, dict[str, Any]] = {
    "common": dict(
        total_steps=10_000_000,
        rollout_steps=64,
        shared_encoder=True,
        activation="relu",
        eval_episodes=32,
        eval_stochastic=True,
        lr=1e-3,
        gamma=0.99,
        gae_lambda=0.95,
        ent_coef=0.01,
    ),
    "cpu": dict(num_envs=16),
    "gpu": dict(num_envs=64, world=dict(env_schedule="alternating")),
    "ppo": dict(epochs=4, num_minibatches=8, clip_range=0.2),
    "a2c": dict(rollout_steps=8, lr=7e-4),
    "appo_gpu": dict(num_envs=256, rollout_steps=16, world=dict(env_schedule="alternating", pin_threads=True)),
    "impala": dict(rollout_steps=16),
    "dqn": dict(ATARI_Q, double_q=True, exploration_final_eps=0.01, exploration_fraction=0.1),
    "rainbow": ATARI_Q,
    "r2d2": dict(lr=2.5e-4, rollout_steps=40, batch_size=1280, replay_ratio=4.0, learning_starts=50_000),
    **{f"{algo}_cpu": dict(buffer_size=200_000) for algo in ("dqn", "rainbow", "r2d2")},
    **{f"{algo}_gpu": dict(buffer_size=1_000_000) for algo in ("dqn", "rainbow", "r2d2")},
}

Q: dict[str, dict[str, Any]] = {
    "dqn": dict(rollout_steps=4, lr=1e-3, lr_schedule="linear", n_step=3, double_q=True),
    "rainbow": dict(rollout_steps=4, lr=5e-4, lr_schedule="linear"),
    "r2d2": dict(rollout_steps=20, burn_in=20, sequence_length=40, batch_size=640, lr=5e-4),
    "ddpg": dict(rollout_steps=4, hidden=(256, 256), activation="relu"),
}
"""Off-policy algorithms on vector observations."""

VECTOR: dict[str, dict[str, Any]] = {
    "common": dict(total_steps=1_000_000, num_envs=32, rollout_steps=128, eval_episodes=32),
    "ppo": dict(lr=1e-3, epochs=4, num_minibatches=8),
    **Q,
}

CARTPOLE: dict[str, dict[str, Any]] = {
    "common": dict(total_steps=300_000, num_envs=32, rollout_steps=64, eval_episodes=100),
    "ppo": dict(lr=2.5e-3, gamma=0.98, gae_lambda=0.8, epochs=8, num_minibatches=4),
    **Q,
    "dqn": dict(
        Q["dqn"],
        total_steps=100_000,
        normalize_obs=True,
        huber_delta=None,
        target_update_interval=25,
        learning_starts=5_000,
    ),
}

LUNAR_LANDER: dict[str, dict[str, Any]] = {
    "common": dict(total_steps=1_500_000, num_envs=32, rollout_steps=128, hidden=(64, 64), eval_episodes=64),
    "ppo": dict(lr=1.5e-3, gamma=0.999, gae_lambda=0.98, ent_coef=0.01, epochs=6, num_minibatches=8),
    **Q,
}

MUJOCO: dict[str, dict[str, Any]] = {
    "common": dict(
        total_steps=1_000_000,
        num_envs=16,
        rollout_steps=128,
        hidden=(64, 64),
        normalize_obs=True,
        log_std_init=-0.5,
        eval_episodes=16,
    ),
    "ppo": dict(normalize_reward=True, lr=1e-3, epochs=10, num_minibatches=16),
    "ddpg": dict(
        rollout_steps=2, lr=1e-3, hidden=(256, 256), activation="relu", learning_starts=10_000, replay_ratio=32.0
    ),
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
"""Name of a Gymnasium environment without its version -> settings."""


def presets_of(kind: str, env_name: str) -> dict[str, dict[str, Any]]:
    """The tuned settings of an environment, by section."""
    if kind == "ale":
        return ATARI
    name = env_name.rpartition("/")[2].rpartition("-v")[0]
    return BY_NAME.get(name, VECTOR)
