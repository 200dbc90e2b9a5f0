"""The policy of the Q-learners: a encoder and, for every choice, what it is worth: a number or a distribution."""

import math

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

SPREAD = 0.5
"""First spread of noisy weights, divided by the root of the number of inputs (Fortunato et al. 2018)."""

STREAM = wp.constant(wp.uint32(1 << 31))
"""Away from the streams of worlds and of action noise."""


@wp.func
def factor_noise(
    env: int, seed: int, stream: int, counter: wp.array[int], place: wp.array[int], noise: wp.array[float]
):
    """f(x) = sign(x) sqrt(|x|) of a normal x: products of two such numbers are the noise of weights."""
    where = vec4u(wp.uint32(place[env]), wp.uint32(counter[0]), wp.uint32(stream), STREAM)
    words = philox(where, wp.uint64(seed))
    x = unit_normal(words[0], words[1])
    noise[env] = wp.sign(x) * wp.sqrt(wp.abs(x))


class NoisyLinear(nn.Linear):
    """A linear layer whose weights are normal, w + s (f(a) f(b)^T), with the same noise for a whole batch.

    Factorised noise (Fortunato et al. 2018): one number per input and one per output.
    """

    noise: torch.Tensor

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        spread = SPREAD / math.sqrt(inputs)
        self.weight_spread = nn.Parameter(torch.full((outputs, inputs), spread))
        self.bias_spread = nn.Parameter(torch.full((outputs,), spread))
        self.register_buffer("noise", torch.zeros(inputs + outputs), persistent=False)

    def drawn(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias with the noise that is there now."""
        before, after = self.noise.split([self.in_features, self.out_features])
        return self.weight + self.weight_spread * torch.outer(after, before), self.bias + self.bias_spread * after


class QHead(nn.Module):
    """From features to what each choice is worth, and to actions: mostly the best, now and then any that is allowed.

    Part i of an action is one out of `nvec[i]`; each part has values of its own, which learn from the same rewards
    (branching, Tavakoli et al. 2018). A `flat` head has one part, and its actions no last axis.

    The worth of a choice is one number, or a distribution: `atoms` probabilities of the numbers from `v_min` to `v_max`
    (Bellemare et al. 2017), or `quantiles` (Dabney et al. 2018). A `dueling` head has a value that all choices share
    (Wang et al. 2016); a `noisy` one a NoisyLinear for its layer.
    """

    gaussian_noise = False
    played_rate = 0.001
    """How often it acts at random where actions are drawn in an evaluation."""
    support: torch.Tensor
    """[width]: what the mean of a distribution weighs its numbers by; for atoms, the numbers themselves."""
    odds: torch.Tensor
    """[choices]: how likely each is where agents act at random, compared with the others of its part."""

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
        """Numbers per choice."""
        outputs = (self.choices + dueling) * self.width
        self.linear = NoisyLinear(features, outputs) if noisy else orthogonal(nn.Linear(features, outputs), 0.01)
        support = torch.linspace(v_min, v_max, atoms) if atoms > 1 else torch.full((self.width,), 1.0 / self.width)
        self.register_buffer("support", support, persistent=False)
        self.register_buffer("odds", torch.tensor(odds or [1.0] * self.choices), persistent=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The numbers [batch, choices, width] that tell what each choice is worth; of atoms, logits."""
        layer = self.linear
        weight, bias = layer.drawn() if isinstance(layer, NoisyLinear) else (layer.weight, layer.bias)
        raw = wide_linear(features, weight, bias).unflatten(-1, (-1, self.width))
        if not self.dueling:
            return raw
        # Q = V + A - mean A, where the mean is over the choices of each part.
        advantage, value = raw.split([self.choices, 1], dim=-2)
        parts = [part - part.mean(dim=-2, keepdim=True) for part in advantage.split(self.nvec, dim=-2)]
        return value + torch.cat(parts, dim=-2)

    def q_values(self, numbers: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Q-values [batch, choices]: the means of the distributions; of choices that are not allowed, the least."""
        mean = ((numbers.softmax(dim=-1) if self.atoms > 1 else numbers) * self.support).sum(dim=-1)
        return mean if mask is None else torch.where(mask, mean, MASKED)

    def best(self, worth: torch.Tensor) -> torch.Tensor:
        """The best choices [batch, parts] by Q-values [batch, choices]."""
        return torch.stack([part.argmax(dim=-1) for part in worth.split(self.nvec, dim=-1)], dim=-1)

    def explore(self, noise: torch.Tensor, rate: torch.Tensor | float) -> None:
        """Let agents act at random at a rate: fresh noise [..., lanes, width] becomes what `sample` takes."""
        noise[..., 0].add_(rate)

    def sample(self, params: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions by Q-values, and zeros for their log-probabilities, which nobody needs.

        Noise is uniform in [0, 1), but for its first column (`explore`): where that has reached 1, all parts of the
        action are drawn among what is allowed, by their odds.
        """
        drawn = []
        for i, allowed in enumerate(torch.where(params > MASKED, self.odds, 0.0).split(self.nvec, dim=-1)):
            drawn.append(inverse_cumulative(allowed, noise[..., 1 + i : 2 + i]))
        action = torch.where(noise[..., :1] >= 1.0, torch.cat(drawn, dim=-1), self.best(params))
        return self._shaped(action), torch.zeros_like(noise[..., 0])

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        """The best actions."""
        return self._shaped(self.best(params))

    def to_world(self, action: torch.Tensor) -> torch.Tensor:
        """What the world receives for an action of this head."""
        return action

    def _shaped(self, action: torch.Tensor) -> torch.Tensor:
        return (action.squeeze(-1) if self.flat else action).to(torch.int32)


class QPolicy(Policy):
    """What a group sees [batch, *seen] to Q-values [batch, choices]; `head` are settings of the QHead.

    With a `rnn` the policy remembers: it acts by `step` and learns by `sequence`, and what it knows of an episode is a
    state [batch, state_size], zeros at first.
    """

    head: QHead
    explores = True

    def __init__(self, group: Group, encoder: Encoder, normalize: bool, rnn: RNNMaker | None = None, **head):
        if reason := no_choices(group):
            raise ShoalError(f"{reason}.")
        super().__init__(group, encoder, normalize, rnn)
        flat = isinstance(group.action, Discrete)
        nvec, odds = ((group.action.n,), group.action.odds) if flat else (group.action.nvec, ())
        self.head = QHead(self.features, nvec, flat, odds=odds, **head)

    def q_logits(self, observation: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        """What the head tells of each choice, [batch, choices, width]; with an RNN, in a state."""
        features = self.policy_encoder(self._see(observation))
        if state is not None:
            assert self.rnn is not None
            features, _ = self.rnn.step(features, state)
        return self.head(features)

    def sequence(
        self, observation: torch.Tensor, state: torch.Tensor, ended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers [T, n, choices, width] along sequences [T, n, *seen], and the states [T, n, S] after each step.

        `ended` [T, n] tells where an episode ended with the step: the next observation is met with an empty state.
        """
        assert self.rnn is not None
        features, states = self.rnn.walk(self._features(observation), state, ended)
        return self.head(features), states

    def after(self, observation: torch.Tensor, state: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        """The state [n, S] that follows on sequences [T, n, *seen]."""
        assert self.rnn is not None
        _, states = self.rnn.walk(self._features(observation), state, ended)
        return states[-1].masked_fill(ended[-1].unsqueeze(-1), 0.0)

    def _features(self, observation: torch.Tensor) -> torch.Tensor:
        """Features [T, n, *] of what was seen [T, n, *seen]."""
        return self.policy_encoder(self._see(observation.flatten(0, 1))).unflatten(0, observation.shape[:2])

    def distribution(self, observation: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Q-values [batch, choices]."""
        return self.head.q_values(self.q_logits(observation), mask)

    def step(
        self, observation: torch.Tensor, state: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q-values, zeros for the values of states, which nobody needs, and the state after."""
        assert self.rnn is not None
        features, after = self.rnn.step(self.policy_encoder(self._see(observation)), state)
        return self.head.q_values(self.head(features), mask), torch.zeros_like(after[:, 0]), after

    def noise_plan(self, seed: int, stream: int, counter: torch.Tensor) -> Plan | None:
        if not isinstance(self.head.linear, NoisyLinear):
            return None
        noise = self.head.linear.noise
        place = torch.arange(noise.numel(), dtype=torch.int32, device=noise.device)
        arguments = dict(seed=seed & 0x7FFFFFFF, stream=stream, counter=Broadcast(counter), place=place, noise=noise)
        return bind("noisy", factor_noise, noise.device, noise.numel(), arguments)

    def zero_noise(self) -> None:
        if isinstance(self.head.linear, NoisyLinear):
            self.head.linear.noise.zero_()


def no_choices(group: Group) -> str:
    """Why Q-learning does not support the actions of a group; "" if it does."""
    if isinstance(group.action, (Discrete, MultiDiscrete)):
        return ""
    return f"Q-learning compares choices, but group {group.name!r} acts by {type(group.action).__name__}"
