"""Networks: torsos, recurrent cores, heads for the kinds of action space, running normalization."""

from shoal.policy.actor_critic import ActorCritic, mlp_torso
from shoal.policy.base import Policy
from shoal.policy.cnn import ImpalaResNet, NatureCNN
from shoal.policy.continuous_q import ContinuousQPolicy
from shoal.policy.core import Core, core_maker
from shoal.policy.heads import CategoricalHead, GaussianHead, MixedHead, make_head
from shoal.policy.inputs import MultiInput, choose_torso
from shoal.policy.mlp import ACTIVATIONS, MLP, Torso
from shoal.policy.normalize import RunningMoments
from shoal.policy.q import QPolicy
from shoal.policy.se_resnet import SEResNet9

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "ActorCritic",
    "CategoricalHead",
    "ContinuousQPolicy",
    "Core",
    "GaussianHead",
    "ImpalaResNet",
    "MixedHead",
    "MultiInput",
    "NatureCNN",
    "Policy",
    "QPolicy",
    "RunningMoments",
    "SEResNet9",
    "Torso",
    "choose_torso",
    "core_maker",
    "make_head",
    "mlp_torso",
]
