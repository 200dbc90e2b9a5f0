"""Rollouts, returns, losses and learners. Nothing here knows a world."""

from shoal.learn.a2c import A2C, A2CConfig
from shoal.learn.policy_gradient import PolicyGradient, PolicyGradientConfig
from shoal.learn.ppo import PPO, PPOConfig
from shoal.learn.rollout import Rollout

LEARNERS: dict[str, tuple[type[PolicyGradientConfig], type[PolicyGradient]]] = {
    "a2c": (A2CConfig, A2C),
    "ppo": (PPOConfig, PPO),
}
"""Name on the command line -> settings and learner."""

__all__ = [
    "A2C",
    "LEARNERS",
    "PPO",
    "A2CConfig",
    "PPOConfig",
    "PolicyGradient",
    "PolicyGradientConfig",
    "Rollout",
]
