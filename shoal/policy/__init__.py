"""Policies: encoders, RNNs, heads for each kind of action space, running normalization."""

from shoal.policy.actor_critic import ActorCritic, mlp_encoder
from shoal.policy.base import Policy
from shoal.policy.cnn import ImpalaResNet, NatureCNN
from shoal.policy.continuous_q import ContinuousQPolicy
from shoal.policy.encoders import MultiInput, choose_encoder
from shoal.policy.heads import CategoricalHead, GaussianHead, MixedHead, make_head
from shoal.policy.mlp import ACTIVATIONS, MLP, Encoder
from shoal.policy.normalize import RunningMoments
from shoal.policy.q import QPolicy
from shoal.policy.recurrent import RNN, rnn_maker
from shoal.policy.se_resnet import SEResNet9

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "RNN",
    "ActorCritic",
    "CategoricalHead",
    "ContinuousQPolicy",
    "Encoder",
    "GaussianHead",
    "ImpalaResNet",
    "MixedHead",
    "MultiInput",
    "NatureCNN",
    "Policy",
    "QPolicy",
    "RunningMoments",
    "SEResNet9",
    "choose_encoder",
    "make_head",
    "mlp_encoder",
    "rnn_maker",
]
