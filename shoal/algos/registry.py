"""Registry of the algorithms."""

from collections.abc import Callable

from shoal.algos.a2c import A2C, A2CConfig, A3CConfig, IMPALAConfig
from shoal.algos.continuous_q import ContinuousQ, DDPGConfig, SACConfig, TD3Config
from shoal.algos.dqn import QConfig, QLearner, R2D2Config, RainbowConfig
from shoal.algos.off_policy import OffPolicy, OffPolicyConfig
from shoal.algos.policy_gradient import PolicyGradient, PolicyGradientConfig
from shoal.algos.ppo import PPO, APPOConfig, PPOConfig
from shoal.core.errors import ShoalError, any_of
from shoal.core.world import Group
from shoal.learn.learner import Learner, LearnerConfig
from shoal.learn.rollout import Rollout

LEARNERS: dict[str, tuple[type[LearnerConfig], Callable[..., Learner]]] = {
    "a2c": (A2CConfig, A2C),
    "a3c": (A3CConfig, A2C),
    "appo": (APPOConfig, PPO),
    "ddpg": (DDPGConfig, ContinuousQ),
    "dqn": (QConfig, QLearner),
    "impala": (IMPALAConfig, A2C),
    "ppo": (PPOConfig, PPO),
    "r2d2": (R2D2Config, QLearner),
    "rainbow": (RainbowConfig, QLearner),
    "sac": (SACConfig, ContinuousQ),
    "td3": (TD3Config, ContinuousQ),
}
"""Name on the command line -> classes of settings and learner."""


def check_group(config: LearnerConfig, group: Group) -> None:
    """Refuse a group that an algorithm does not support, and name those that do."""
    if reason := config.unsupported(group):
        others = [name for name, (other, _) in LEARNERS.items() if not other.unsupported(group)]
        raise ShoalError(f"{reason}; use --algo {any_of(others)}.")


__all__ = [
    "A2C",
    "LEARNERS",
    "PPO",
    "A2CConfig",
    "A3CConfig",
    "APPOConfig",
    "ContinuousQ",
    "DDPGConfig",
    "IMPALAConfig",
    "Learner",
    "LearnerConfig",
    "OffPolicy",
    "OffPolicyConfig",
    "PPOConfig",
    "PolicyGradient",
    "PolicyGradientConfig",
    "QConfig",
    "QLearner",
    "R2D2Config",
    "RainbowConfig",
    "Rollout",
    "SACConfig",
    "TD3Config",
    "check_group",
]
