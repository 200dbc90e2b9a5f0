"""Recurrent networks: what a policy remembers of its episode, between its encoder and its heads."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from shoal.policy.mlp import linear, orthogonal

GATES = {"lstm": 4, "gru": 3}
"""Kind of rnn -> gates per output."""


class RNNLayer(nn.Module):
    """One layer of an LSTM (Hochreiter & Schmidhuber 1997) or GRU (Cho et al. 2014), with torch's order of gates.

    Its state is the output [batch, size] and beside it, in an LSTM, the cell.
    """

    def __init__(self, kind: Literal["lstm", "gru"], features: int, size: int):
        super().__init__()
        self.kind, self.size = kind, size
        self.state_size = 2 * size if kind == "lstm" else size
        self.input = orthogonal(nn.Linear(features, GATES[kind] * size), 1.0)
        self.recurrent = orthogonal(nn.Linear(size, GATES[kind] * size), 1.0)

    def step(self, features: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The state after one step: the output, and perhaps the cell."""
        return self._advance(self._project(features), state.split(self.size, dim=-1))

    # Compiled as a whole, the loop would be unrolled, which takes minutes; so its body is compiled instead.
    @torch.compiler.disable(recursive=False)
    def walk(
        self, features: torch.Tensor, state: torch.Tensor, fresh: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
        """Outputs [T, n, size] and the parts of the state after each step; before `fresh` ones [T, n] all is forgotten.

        The products with the inputs need no state and so are one for all steps.
        """
        # Contiguous like those that follow: the compiled body is then one and the same.
        parts, after = tuple(part.contiguous() for part in state.split(self.size, dim=-1)), []
        for projected, new in zip(self._project(features).unbind(), fresh.unsqueeze(-1).unbind(), strict=True):
            parts = self._turn(projected, parts, new)
            after.append(parts)
        return torch.stack([step[0] for step in after]), after

    def activations(self) -> int:
        """Numbers that one step of a sample leaves behind."""
        return 3 * GATES[self.kind] * self.size + 2 * self.state_size

    def _project(self, features: torch.Tensor) -> torch.Tensor:
        return linear(features, self.input.weight, self.input.bias).float()

    def _turn(
        self, projected: torch.Tensor, parts: tuple[torch.Tensor, ...], fresh: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """A step within sequences."""
        return self._advance(projected, tuple(part.masked_fill(fresh, 0.0) for part in parts))

    def _advance(self, projected: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        recalled = linear(parts[0], self.recurrent.weight, self.recurrent.bias).float()
        if self.kind == "lstm":
            keep_in, keep, new, show = (projected + recalled).chunk(4, dim=-1)
            cell = torch.sigmoid(keep) * parts[1] + torch.sigmoid(keep_in) * torch.tanh(new)
            return torch.sigmoid(show) * torch.tanh(cell), cell
        (reset, keep, new), (reset_, keep_, new_) = projected.chunk(3, dim=-1), recalled.chunk(3, dim=-1)
        fresh = torch.tanh(new + torch.sigmoid(reset + reset_) * new_)
        return (fresh + torch.sigmoid(keep + keep_) * (parts[0] - fresh),)


class RNN(nn.Module):
    """Layers of one kind and width, each on top of the outputs of the one before.

    The state is one tensor [batch, state_size]: the states of the layers, one after the other. An episode starts with
    zeros. States are float32 whatever type the products have.
    """

    def __init__(self, kind: Literal["lstm", "gru"], features: int, size: int, layers: int = 1):
        super().__init__()
        self.kind, self.size = kind, size
        self.layers = nn.ModuleList(RNNLayer(kind, size if i else features, size) for i in range(layers))
        self.state_size = sum(layer.state_size for layer in self.layers)

    def step(self, features: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of a batch: features [n, *] and state [n, S] to output [n, size] and the state after it."""
        after: list[torch.Tensor] = []
        for layer, own in zip(self.layers, self._states(state), strict=True):
            parts = layer.step(features, own)
            features = parts[0]
            after += parts
        return features, torch.cat(after, dim=-1)

    @torch.compiler.disable(recursive=False)  # as in the layers
    def sequence(self, features: torch.Tensor, state: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        """Outputs [T, n, size] over features [T, n, *], from the state [n, S] before the first of them.

        Where an episode `ended` [T, n] with a step, the next one starts with zeros. Layer by layer: each goes through
        the whole sequence before the next one begins.
        """
        fresh = _fresh(ended)
        for layer, own in zip(self.layers, self._states(state), strict=True):
            features, _ = layer.walk(features, own, fresh)
        return features

    @torch.compiler.disable(recursive=False)
    def walk(
        self, features: torch.Tensor, state: torch.Tensor, ended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and beside the outputs the states [T, n, S] after each step, not yet forgotten."""
        fresh, states = _fresh(ended), []
        for layer, own in zip(self.layers, self._states(state), strict=True):
            features, after = layer.walk(features, own, fresh)
            states += [torch.stack(parts) for parts in zip(*after, strict=True)]
        return features, torch.cat(states, dim=-1)

    def activations(self) -> int:
        """Numbers that one step of a sample leaves behind."""
        return sum(layer.activations() for layer in self.layers)

    def _states(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return state.split(self.layers[0].state_size, dim=-1)


def _fresh(ended: torch.Tensor) -> torch.Tensor:
    """Before which steps [T, n] of sequences all is forgotten: those after an end."""
    return torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])


RNNMaker = Callable[[int], RNN]
"""Makes an RNN for the width of a encoder's features."""


def rnn_maker(kind: Literal["none", "lstm", "gru"], size: int, layers: int = 1) -> RNNMaker | None:
    """A maker of recurrent networks of a kind, width and number of layers (None: the policy has no memory)."""
    return None if kind == "none" else lambda features: RNN(kind, features, size, layers)
