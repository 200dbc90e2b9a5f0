"""Rollouts, returns, losses and learners. Nothing here knows a world."""

from collections.abc import Callable

from shoal.learn.a2c import A2C, A2CConfig
from shoal.learn.learner import Learner, LearnerConfig
from shoal.learn.off_policy import OffPolicy, OffPolicyConfig
from shoal.learn.policy_gradient import PolicyGradient, PolicyGradientConfig
from shoal.learn.ppo import PPO, PPOConfig
from shoal.learn.q import QConfig, QLearner, RainbowConfig
from shoal.learn.rollout import Rollout

LEARNERS: dict[str, tuple[type[LearnerConfig], Callable[..., Learner]]] = {
    "a2c": (A2CConfig, A2C),
    "dqn": (QConfig, QLearner),
    "ppo": (PPOConfig, PPO),
    "rainbow": (RainbowConfig, QLearner),
}
"""Name on the command line -> settings and learner."""

__all__ = [
    "A2C",
    "LEARNERS",
    "PPO",
    "A2CConfig",
    "Learner",
    "LearnerConfig",
    "OffPolicy",
    "OffPolicyConfig",
    "PPOConfig",
    "PolicyGradient",
    "PolicyGradientConfig",
    "QConfig",
    "QLearner",
    "RainbowConfig",
    "Rollout",
]
