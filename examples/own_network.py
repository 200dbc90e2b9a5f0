"""A custom network in place of the MLP. `shoal train cartpole --encoder examples/own_network.py:Residual`."""

import math

import torch
from torch import nn


class Residual(nn.Module):
    """Two residual layers: maps observations [batch, *shape] to features [batch, 64]."""

    def __init__(self, observation_shape: tuple[int, ...]):
        super().__init__()
        self.first = nn.Linear(math.prod(observation_shape), 64)
        self.second = nn.Linear(64, 64)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Features that the action head and the value head read."""
        features = torch.tanh(self.first(observation.flatten(1)))
        return features + torch.tanh(self.second(features))


if __name__ == "__main__":
    import shoal

    run = shoal.train("cartpole", encoder=f"{__file__}:Residual", total_steps=5e5)
    print(run.evaluate(episodes=20))
