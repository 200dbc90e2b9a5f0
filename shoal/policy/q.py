"""Q-networks of discrete actions: an encoder and, for each choice, a Q-value or a distribution of returns."""

import math
from typing import no_type_check

import torch
import warp as wp
from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.kernels import Broadcast
from shoal.core.launch import Plan, bind
from shoal.core.random import philox, unit_normal, vec4u
from shoal.core.spaces import Discrete, MultiDiscrete
from shoal.core.world import Group
from shoal.policy.base import Policy
from shoal.policy.heads import MASKED, inverse_cumulative
from shoal.policy.mlp import Encoder, orthogonal, wide_linear
from shoal.policy.recurrent import RNNMaker

SIGMA_INIT = 0.5
"""Initial standard deviation of noisy weights, times sqrt(inputs) (Fortunato et al. 2018)."""

NOISE_STREAM = wp.constant(wp.uint32(1 << 31))
"""Random stream, distinct from those of worlds and of action noise."""


@wp.func
@no_type_check
def factor_noise(
    env: int, seed: int, stream: int, counter: wp.array[int], index: wp.array[int], noise: wp.array[float]
):
    """f(x) = sign(x) sqrt(|x|) of a normal x; the noise of a weight is a product of two such numbers."""
    where = vec4u(wp.uint32(index[env]), wp.uint32(counter[0]), wp.uint32(stream), NOISE_STREAM)
    words = philox(where, wp.uint64(seed))
    x = unit_normal(words[0], words[1])
    noise[env] = wp.sign(x) * wp.sqrt(wp.abs(x))


class NoisyLinear(nn.Linear):
    """A linear layer with noisy weights w + s f(b) f(a)^T, where the whole batch shares the noise.

    Factorized noise (Fortunato et al. 2018): a has one number per input, b one per output.
    """

    noise: torch.Tensor

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        sigma = SIGMA_INIT / math.sqrt(inputs)
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma))
        self.register_buffer("noise", torch.zeros(inputs + outputs), persistent=False)

    def perturbed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias with the current noise."""
        before, after = self.noise.split([self.in_features, self.out_features])
        return self.weight + self.weight_sigma * torch.outer(after, before), self.bias + self.bias_sigma * after


class QHead(nn.Module):
    """Maps features to Q-values and epsilon-greedy actions.

    Part i of an action is one of `nvec[i]` choices. Each part has separate Q-values, trained on the same rewards
    (branching, Tavakoli et al. 2018). Actions of a `flat` head (one part) have no last axis.

    A Q-value is one number or a distribution: `atoms` probabilities on a support from `v_min` to `v_max` (Bellemare et
    al. 2017), or `quantiles` (Dabney et al. 2018). A `dueling` head adds a value shared by all choices (Wang et al.
    2016); a `noisy` head uses a NoisyLinear layer.
    """

    gaussian_noise = False
    eval_epsilon = 0.001
    """Random-action rate of a stochastic evaluation."""
    support: torch.Tensor
    """float32 [width]: weights whose weighted sum is the Q-value; for atoms, the support."""
    odds: torch.Tensor
    """float32 [choices]: unnormalized probabilities of random actions, within each part."""

    def __init__(
        self,
        features: int,
        nvec: tuple[int, ...],
        flat: bool,
        dueling: bool = False,
        noisy: bool = False,
        atoms: int = 1,
        v_min: float = -10.0,
        v_max: float = 10.0,
        quantiles: int = 0,
        odds: tuple[float, ...] = (),
    ):
        super().__init__()
        self.nvec, self.flat, self.choices = nvec, flat, sum(nvec)
        self.noise_width = 1 + len(nvec)
        self.dueling, self.atoms, self.quantiles = dueling, atoms, quantiles
        self.width = quantiles or atoms
        """Outputs per choice."""
        outputs = (self.choices + dueling) * self.width
        self.linear = NoisyLinear(features, outputs) if noisy else orthogonal(nn.Linear(features, outputs), 0.01)
        support = torch.linspace(v_min, v_max, atoms) if atoms > 1 else torch.full((self.width,), 1.0 / self.width)
        self.register_buffer("support", support, persistent=False)
        self.register_buffer("odds", torch.tensor(odds or [1.0] * self.choices), persistent=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Outputs [batch, choices, width] per choice: logits of atoms, quantiles, or the Q-value."""
        layer = self.linear
        weight, bias = layer.perturbed() if isinstance(layer, NoisyLinear) else (layer.weight, layer.bias)
        raw = wide_linear(features, weight, bias).unflatten(-1, (-1, self.width))
        if not self.dueling:
            return raw
        # Q = V + A - mean(A), with the mean over the choices of each part.
        advantage, value = raw.split([self.choices, 1], dim=-2)
        parts = [part - part.mean(dim=-2, keepdim=True) for part in advantage.split(self.nvec, dim=-2)]
        return value + torch.cat(parts, dim=-2)

    def q_values(self, q_logits: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Q-values [batch, choices], the means of the distributions; `MASKED` for masked choices."""
        mean = ((q_logits.softmax(dim=-1) if self.atoms > 1 else q_logits) * self.support).sum(dim=-1)
        return mean if mask is None else torch.where(mask, mean, MASKED)

    def greedy_choices(self, q_values: torch.Tensor) -> torch.Tensor:
        """Choices [batch, parts] of the highest Q-values [batch, choices]."""
        return torch.stack([part.argmax(dim=-1) for part in q_values.split(self.nvec, dim=-1)], dim=-1)

    def explore(self, noise: torch.Tensor, rate: torch.Tensor | float) -> None:
        """Prepare noise [..., lanes, width] for `sample`, in place; `rate` is the probability of a random action."""
        noise[..., 0].add_(rate)

    def sample(self, params: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Epsilon-greedy actions by Q-values, and zeros instead of log-probabilities, which are unused.

        Noise is uniform in [0, 1) except for its first column (`explore`): where that is 1 or more, all parts of the
        action are sampled from the allowed choices, by their odds.
        """
        random_choices = []
        for i, allowed in enumerate(torch.where(params > MASKED, self.odds, 0.0).split(self.nvec, dim=-1)):
            random_choices.append(inverse_cumulative(allowed, noise[..., 1 + i : 2 + i]))
        action = torch.where(noise[..., :1] >= 1.0, torch.cat(random_choices, dim=-1), self.greedy_choices(params))
        return self._to_action(action), torch.zeros_like(noise[..., 0])

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        """Greedy actions."""
        return self._to_action(self.greedy_choices(params))

    def to_world(self, action: torch.Tensor) -> torch.Tensor:
        """The action in the world's units."""
        return action

    def _to_action(self, action: torch.Tensor) -> torch.Tensor:
        return (action.squeeze(-1) if self.flat else action).to(torch.int32)


class QPolicy(Policy):
    """Maps observations [batch, *shape] to Q-values [batch, choices]; `head` are settings of the QHead.

    With an RNN, `step` acts and `sequence` learns. The recurrent state [batch, state_size] is zero at an episode's
    start.
    """

    head: QHead
    explores = True

    def __init__(self, group: Group, encoder: Encoder, normalize: bool, rnn: RNNMaker | None = None, **head):
        if reason := unsupported_actions(group):
            raise ShoalError(f"{reason}.")
        super().__init__(group, encoder, normalize, rnn)
        action = group.action
        if isinstance(action, Discrete):
            self.head = QHead(self.features, (action.n,), flat=True, odds=action.odds, **head)
        else:
            assert isinstance(action, MultiDiscrete)
            self.head = QHead(self.features, action.nvec, flat=False, **head)

    def q_logits(self, observation: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        """Outputs of the head [batch, choices, width]; with an RNN, given the recurrent state [batch, state_size]."""
        features = self.policy_encoder(self._preprocess(observation))
        if state is not None:
            assert self.rnn is not None
            features, _ = self.rnn.step(features, state)
        return self.head(features)

    def sequence(
        self, observation: torch.Tensor, state: torch.Tensor, ended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Unroll the RNN over sequences [T, n, *shape] from the state [n, S].

        The state is reset to zero after steps where `ended` [T, n] is set.

        Returns:
            Outputs of the head [T, n, choices, width], and the states [T, n, S] after each step, before resets.
        """
        assert self.rnn is not None
        features, states = self.rnn.unroll(self._features(observation), state, ended)
        return self.head(features), states

    def final_state(self, observation: torch.Tensor, state: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        """The state [n, S] after sequences [T, n, *shape]."""
        assert self.rnn is not None
        _, states = self.rnn.unroll(self._features(observation), state, ended)
        return states[-1].masked_fill(ended[-1].unsqueeze(-1), 0.0)

    def _features(self, observation: torch.Tensor) -> torch.Tensor:
        """Features [T, n, *] of observations [T, n, *shape]."""
        return self.policy_encoder(self._preprocess(observation.flatten(0, 1))).unflatten(0, observation.shape[:2])

    def distribution(self, observation: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Q-values [batch, choices]."""
        return self.head.q_values(self.q_logits(observation), mask)

    def step(
        self, observation: torch.Tensor, state: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q-values, zeros instead of state values, which are unused, and the next state."""
        assert self.rnn is not None
        features, after = self.rnn.step(self.policy_encoder(self._preprocess(observation)), state)
        return self.head.q_values(self.head(features), mask), torch.zeros_like(after[:, 0]), after

    def noise_plan(self, seed: int, stream: int, counter: torch.Tensor) -> Plan | None:
        if not isinstance(self.head.linear, NoisyLinear):
            return None
        noise = self.head.linear.noise
        index = torch.arange(noise.numel(), dtype=torch.int32, device=noise.device)
        arguments = dict(seed=seed & 0x7FFFFFFF, stream=stream, counter=Broadcast(counter), index=index, noise=noise)
        return bind("noisy", factor_noise, noise.device, noise.numel(), arguments)

    def zero_noise(self) -> None:
        if isinstance(self.head.linear, NoisyLinear):
            self.head.linear.noise.zero_()


def unsupported_actions(group: Group) -> str:
    """The reason why Q-learning does not support a group's actions ("": it does)."""
    if isinstance(group.action, (Discrete, MultiDiscrete)):
        return ""
    return (
        f"Q-learning needs Discrete or MultiDiscrete actions, but group {group.name!r} uses "
        f"{type(group.action).__name__}"
    )
