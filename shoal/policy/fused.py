"""Forward pass of a small policy as one Triton kernel: from observations to actions, log-probabilities and values.

Activations stay in registers; layer by layer, a batch of two million agents writes and reads them nine times. Supports
two hidden layers and discrete actions, in bf16 with float32 sums; other policies run layer by layer. Backward passes
use torch.
"""

from itertools import pairwise
from typing import Any, TypeGuard, cast

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with torch for GPUs
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import nn

from shoal.policy.actor_critic import ActorCritic
from shoal.policy.base import OBSERVATION_CLIP, Policy
from shoal.policy.heads import MASKED, CategoricalHead
from shoal.policy.mlp import MLP

KINDS: dict[type[nn.Module], int] = {nn.ReLU: 0, nn.Tanh: 1, nn.ELU: 2, nn.SiLU: 3}
MAX_WIDTH = 256
"""Maximum number of inputs, units of a layer and choices: these fit in on-chip memory."""

MANY_ROWS = 2**17


@triton.jit
def activate(x, KIND: tl.constexpr):
    """One of torch's activations."""
    if KIND == 0:
        y = tl.maximum(x, 0.0)
    elif KIND == 1:
        y = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    elif KIND == 2:
        y = tl.where(x > 0.0, x, tl.exp(tl.minimum(x, 0.0)) - 1.0)
    else:
        y = x * tl.sigmoid(x)
    return y


@triton.jit
def act_kernel(
    observation,
    mean,
    scale,
    weight1,
    bias1,
    weight2,
    bias2,
    head_weight,
    head_bias,
    value_weight,
    value_bias,
    allowed,
    parts,
    noise,
    action,
    log_prob,
    value,
    rows,
    INPUTS: tl.constexpr,
    INPUTS_PADDED: tl.constexpr,
    HIDDEN1: tl.constexpr,
    HIDDEN1_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    HIDDEN2: tl.constexpr,
    HIDDEN2_PADDED: tl.constexpr,
    CHOICES: tl.constexpr,
    CHOICES_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CLIP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    MASKED_LOGIT: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS agents per program. Each CHUNK of the first layer's columns is consumed at once by the second layer."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    k = tl.arange(0, INPUTS_PADDED)
    x = tl.load(
        observation + row[:, None] * INPUTS + k[None, :], mask=live[:, None] & (k < INPUTS)[None, :], other=0.0
    ).to(tl.float32)
    if NORMALIZE:
        shift = tl.load(mean + k, mask=k < INPUTS, other=0.0)
        inv_std = tl.load(scale + k, mask=k < INPUTS, other=0.0)
        x = (x - shift[None, :]) * inv_std[None, :]
        x = tl.minimum(tl.maximum(x, -CLIP), CLIP)
    x = x.to(tl.bfloat16)

    h = tl.arange(0, HIDDEN2_PADDED)
    total = tl.zeros((ROWS, HIDDEN2_PADDED), tl.float32)
    for start in tl.static_range(0, HIDDEN1_PADDED, CHUNK):
        c = start + tl.arange(0, CHUNK)
        w = tl.load(
            weight1 + c[None, :] * INPUTS + k[:, None], mask=(c < HIDDEN1)[None, :] & (k < INPUTS)[:, None], other=0.0
        ).to(tl.bfloat16)
        first = tl.dot(x, w) + tl.load(bias1 + c, mask=c < HIDDEN1, other=0.0)[None, :]
        first = activate(first, KIND).to(tl.bfloat16)
        w = tl.load(
            weight2 + h[None, :] * HIDDEN1 + c[:, None], mask=(h < HIDDEN2)[None, :] & (c < HIDDEN1)[:, None], other=0.0
        ).to(tl.bfloat16)
        total = tl.dot(first, w, total)
    total = total + tl.load(bias2 + h, mask=h < HIDDEN2, other=0.0)[None, :]
    features = activate(total, KIND).to(tl.bfloat16)

    if HAS_VALUE:
        w = tl.load(value_weight + h, mask=h < HIDDEN2, other=0.0).to(tl.bfloat16).to(tl.float32)
        v = tl.sum(features.to(tl.float32) * w[None, :], axis=1) + tl.load(value_bias)
        tl.store(value + row, v, mask=live)

    n = tl.arange(0, CHOICES_PADDED)
    w = tl.load(
        head_weight + n[None, :] * HIDDEN2 + h[:, None], mask=(n < CHOICES)[None, :] & (h < HIDDEN2)[:, None], other=0.0
    ).to(tl.bfloat16)
    logits = tl.dot(features, w) + tl.load(head_bias + n, mask=n < CHOICES, other=0.0)[None, :]
    if HAS_MASK:
        may = tl.load(
            allowed + row[:, None] * CHOICES + n[None, :], mask=live[:, None] & (n < CHOICES)[None, :], other=0
        )
        logits = tl.where(may != 0, logits, MASKED_LOGIT)

    chosen = tl.zeros((ROWS,), tl.float32)
    for part in tl.static_range(PARTS):
        begin = tl.load(parts + 2 * part)
        end = tl.load(parts + 2 * part + 1)
        inside = ((n >= begin) & (n < end))[None, :]
        z = tl.where(inside, logits, -float("inf"))
        top = tl.max(z, axis=1)
        e = tl.exp(z - top[:, None])
        running = tl.cumsum(e, axis=1)
        whole = tl.max(running, axis=1)
        # The first choice whose running sum exceeds the level. Choices of probability 0 are excluded, and the level
        # stays a few roundings below the total, so that the last possible choice exceeds it.
        level = tl.load(noise + row * PARTS + part, mask=live, other=0.0) * (0.999999 * whole)
        passed = (running > level[:, None]) & (e > 0.0)
        pick = tl.min(tl.where(passed, n[None, :], CHOICES_PADDED), axis=1)
        here = n[None, :] == pick[:, None]
        chosen += tl.sum(tl.where(here, z, 0.0), axis=1) - top - tl.log(whole)
        tl.store(action + row * PARTS + part, pick - begin, mask=live)
    tl.store(log_prob + row, chosen, mask=live)


class FusedActor:
    """Runs a policy as one kernel, which reads the weights from the optimizer's memory."""

    def __init__(self, policy: ActorCritic):
        self.policy = policy
        encoder, head = cast(MLP, policy.policy_encoder), policy.head
        first, activation, second, _ = encoder.layers
        self.first, self.second = cast(nn.Linear, first), cast(nn.Linear, second)
        starts = [sum(head.nvec[:i]) for i in range(len(head.nvec) + 1)]
        pairs = [number for pair in pairwise(starts) for number in pair]
        self.parts = torch.tensor(pairs, dtype=torch.int32, device=head.linear.weight.device)
        hidden2 = _padded(self.second.out_features)
        choices = _padded(starts[-1])
        self.sizes: dict[str, Any] = dict(
            INPUTS=self.first.in_features,
            INPUTS_PADDED=_padded(self.first.in_features),
            HIDDEN1=self.first.out_features,
            HIDDEN1_PADDED=_padded(self.first.out_features),
            CHUNK=min(64, _padded(self.first.out_features)),
            HIDDEN2=self.second.out_features,
            HIDDEN2_PADDED=hidden2,
            CHOICES=starts[-1],
            CHOICES_PADDED=choices,
            PARTS=len(head.nvec),
            KIND=KINDS[type(activation)],
            NORMALIZE=policy.normalize,
            CLIP=OBSERVATION_CLIP,
            MASKED_LOGIT=MASKED,
            HAS_VALUE=policy.shared_encoder,
        )
        self.narrow = max(hidden2, self.sizes["HIDDEN1_PADDED"], self.sizes["INPUTS_PADDED"]) <= 64

    def __call__(
        self,
        observation: torch.Tensor,
        mask: torch.Tensor | None,
        noise: torch.Tensor,
        action: torch.Tensor,
        log_prob: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Fill `action`, `log_prob` and, with a shared encoder, `value` for contiguous observations [N, A, *shape]."""
        policy, rows = self.policy, log_prob.numel()
        options = self.options(rows, mask is not None)
        scale = policy.moments.scale() if policy.normalize else policy.moments.mean
        kernel: Any = act_kernel  # its type is unknown where Triton is not installed
        kernel[(triton.cdiv(rows, options["ROWS"]),)](
            observation,
            policy.moments.mean,
            scale,
            self.first.weight,
            self.first.bias,
            self.second.weight,
            self.second.bias,
            policy.head.linear.weight,
            policy.head.linear.bias,
            policy.value_head.weight,
            policy.value_head.bias,
            noise if mask is None else mask.view(torch.uint8),
            self.parts,
            noise,
            action,
            log_prob,
            value,
            rows,
            **options,
        )

    def options(self, rows: int, masked: bool) -> dict[str, Any]:
        """The kernel's compile-time constants and `num_warps`."""
        many = self.narrow and rows >= MANY_ROWS  # enough programs even with more rows per load of the weights
        return dict(
            HAS_MASK=masked,
            ROWS=256 if many else 64,
            num_warps=4 if self.narrow and not many else 8,
            **self.sizes,
        )


def supports(policy: Policy) -> TypeGuard[ActorCritic]:
    """Whether the kernel supports a policy: two narrow hidden layers, discrete actions, no frame stack, no RNN."""
    encoder, head = policy.policy_encoder, policy.head
    if policy.group.stack > 1 or policy.rnn is not None:
        return False
    if type(encoder) is not MLP or not isinstance(head, CategoricalHead) or len(encoder.layers) != 4:
        return False
    first, second = cast(nn.Linear, encoder.layers[0]), cast(nn.Linear, encoder.layers[2])
    widths = (first.in_features, first.out_features, second.out_features, sum(head.nvec))
    return type(encoder.layers[1]) in KINDS and max(widths) <= MAX_WIDTH


def _padded(size: int) -> int:
    """The next power of two, at least 16, as tensor cores need."""
    return max(16, 1 << (size - 1).bit_length())
