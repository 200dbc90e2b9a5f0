"""RNNs between a policy's encoder and its heads."""

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import nn

from shoal.policy.mlp import linear, orthogonal

GATES = {"lstm": 4, "gru": 3}
"""Kind of RNN -> gates per output."""


class RNNLayer(nn.Module):
    """One layer of an LSTM (Hochreiter & Schmidhuber 1997) or GRU (Cho et al. 2014), gates ordered as in torch.

    The state is the output [batch, size]; an LSTM appends the cell [batch, size].
    """

    def __init__(self, kind: Literal["lstm", "gru"], features: int, size: int):
        super().__init__()
        self.kind, self.size = kind, size
        self.state_size = 2 * size if kind == "lstm" else size
        self.input = orthogonal(nn.Linear(features, GATES[kind] * size), 1.0)
        self.recurrent = orthogonal(nn.Linear(size, GATES[kind] * size), 1.0)

    def step(self, features: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The next state: (output,) of a GRU, (output, cell) of an LSTM."""
        return self._cell_step(self._project_input(features), state.split(self.size, dim=-1))

    # torch.compile would unroll the whole loop, which takes minutes, so only the body is compiled.
    @torch.compiler.disable(recursive=False)
    def unroll(
        self, features: torch.Tensor, state: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
        """Outputs [T, n, size] and the state after each step; the state is zeroed before steps in `starts` [T, n].

        Input projections need no state, so one product covers all steps.
        """
        # Contiguous as in later steps, so that the body is compiled only once.
        parts, after = tuple(part.contiguous() for part in state.split(self.size, dim=-1)), []
        for projected, start in zip(self._project_input(features).unbind(), starts.unsqueeze(-1).unbind(), strict=True):
            parts = self._sequence_step(projected, parts, start)
            after.append(parts)
        return torch.stack([step[0] for step in after]), after

    def activations(self) -> int:
        """Number of activations per sample and step kept for the backward pass."""
        return 3 * GATES[self.kind] * self.size + 2 * self.state_size

    def _project_input(self, features: torch.Tensor) -> torch.Tensor:
        return linear(features, self.input.weight, self.input.bias).float()

    def _sequence_step(
        self, projected: torch.Tensor, parts: tuple[torch.Tensor, ...], start: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """One step of `unroll`."""
        return self._cell_step(projected, tuple(part.masked_fill(start, 0.0) for part in parts))

    def _cell_step(self, projected: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        recurrent = linear(parts[0], self.recurrent.weight, self.recurrent.bias).float()
        if self.kind == "lstm":
            input_gate, forget_gate, new, output_gate = (projected + recurrent).chunk(4, dim=-1)
            cell = torch.sigmoid(forget_gate) * parts[1] + torch.sigmoid(input_gate) * torch.tanh(new)
            return torch.sigmoid(output_gate) * torch.tanh(cell), cell
        (reset, update, new), (reset_h, update_h, new_h) = projected.chunk(3, dim=-1), recurrent.chunk(3, dim=-1)
        candidate = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
        return (candidate + torch.sigmoid(update + update_h) * (parts[0] - candidate),)


class RNN(nn.Module):
    """A stack of LSTM or GRU layers of one width.

    The state is one float32 tensor [batch, state_size], the states of the layers concatenated; it is zero at an
    episode's start.
    """

    def __init__(self, kind: Literal["lstm", "gru"], features: int, size: int, layers: int = 1):
        super().__init__()
        self.kind, self.size = kind, size
        made = [RNNLayer(kind, size if i else features, size) for i in range(layers)]
        self.layers = nn.ModuleList(made)
        self.state_size = sum(layer.state_size for layer in made)

    def step(self, features: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance by one step: features [n, *] and state [n, S] to output [n, size] and next state [n, S]."""
        after: list[torch.Tensor] = []
        for layer, own in zip(self._layers(), self._states(state), strict=True):
            parts = layer.step(features, own)
            features = parts[0]
            after += parts
        return features, torch.cat(after, dim=-1)

    @torch.compiler.disable(recursive=False)  # as in the layers
    def sequence(self, features: torch.Tensor, state: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        """Outputs [T, n, size] of features [T, n, *], starting from the state [n, S].

        The state is zeroed after steps where `ended` [T, n] is set. Each layer runs over the whole sequence before the
        next one.
        """
        starts = _episode_starts(ended)
        for layer, own in zip(self._layers(), self._states(state), strict=True):
            features, _ = layer.unroll(features, own, starts)
        return features

    @torch.compiler.disable(recursive=False)
    def unroll(
        self, features: torch.Tensor, state: torch.Tensor, ended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `sequence`; also returns the states [T, n, S] after each step, before they are zeroed."""
        starts, states = _episode_starts(ended), []
        for layer, own in zip(self._layers(), self._states(state), strict=True):
            features, after = layer.unroll(features, own, starts)
            states += [torch.stack(parts) for parts in zip(*after, strict=True)]
        return features, torch.cat(states, dim=-1)

    def activations(self) -> int:
        """Number of activations per sample and step kept for the backward pass."""
        return sum(layer.activations() for layer in self._layers())

    def _layers(self) -> list[RNNLayer]:
        return cast(list[RNNLayer], list(self.layers))

    def _states(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return state.split(self._layers()[0].state_size, dim=-1)


def _episode_starts(ended: torch.Tensor) -> torch.Tensor:
    """bool [T, n]: steps that follow an episode's end within the sequence."""
    return torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])


RNNMaker = Callable[[int], RNN]
"""Factory of an RNN, called with the width of the encoder's features."""


def rnn_maker(kind: Literal["none", "lstm", "gru"], size: int, layers: int = 1) -> RNNMaker | None:
    """A factory of RNNs of a kind, width and number of layers (None: no RNN)."""
    return None if kind == "none" else lambda features: RNN(kind, features, size, layers)
