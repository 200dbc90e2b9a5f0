"""Settings of a policy's network."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shoal.core.errors import ShoalError
from shoal.core.settings import Bounds, check_settings

MAX_WIDTH, MAX_LAYERS = 2**16, 256
"""Limits of a network's layers."""

Width = Annotated[int, Bounds(ge=1, le=MAX_WIDTH)]


@dataclass(frozen=True)
class PolicyConfig:
    """Settings of the network. Groups may have different ones (`--group-settings`)."""

    encoder: str = "auto"
    """Encoder: mlp, nature (CNN), impala (ResNet), se-resnet9, se-resnet9-small, auto (nature for images, else mlp), or
    your own nn.Module as my_file.py:Net, built as Net(observation_shape)."""
    hidden: tuple[Width, ...] = (64, 64)
    """Widths of the MLP's layers."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Activation of the MLP."""
    shared_encoder: bool = False
    """Share one encoder between policy and value function."""
    rnn: Literal["none", "lstm", "gru"] = "none"
    """Recurrent network between encoder and heads; policy and value function then share one encoder."""
    rnn_size: Width = 256
    """Hidden size of the RNN."""
    rnn_layers: Annotated[int, Bounds(ge=1, le=MAX_LAYERS)] = 1
    """Stacked layers of the RNN."""
    log_std_init: float = 0.0
    """Initial log standard deviation of Box actions; std 1 is half the action range."""
    normalize_obs: bool = False
    """Normalize observations by their running mean and standard deviation."""

    def __post_init__(self):
        check_settings(self)
        if len(self.hidden) > MAX_LAYERS:
            raise ShoalError(f"--hidden must hold at most {MAX_LAYERS} widths, got {len(self.hidden)}.")
