"""Networks: torsos, heads for the three kinds of action space, running normalisation."""

from shoal.policy.actor_critic import ActorCritic, mlp_torso
from shoal.policy.heads import CategoricalHead, GaussianHead, make_head
from shoal.policy.mlp import ACTIVATIONS, MLP, Torso
from shoal.policy.normalise import RunningMoments

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "ActorCritic",
    "CategoricalHead",
    "GaussianHead",
    "RunningMoments",
    "Torso",
    "make_head",
    "mlp_torso",
]
