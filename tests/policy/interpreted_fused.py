"""Compare the Triton kernel of shoal/policy/fused.py, in Triton's interpreter on the CPU, with torch.

A separate program, since Triton reads TRITON_INTERPRET when it is imported. It prints one JSON line for each policy:
the share of equal actions, and the largest errors of log-probabilities and values.
"""

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from shoal.core.spaces import Box, Discrete, MultiDiscrete
from shoal.core.world import Group
from shoal.policy import ActorCritic, mlp_encoder
from shoal.policy.base import OBSERVATION_CLIP
from shoal.policy.fused import FusedActor, supports
from shoal.policy.heads import MASKED

ROWS = 150
"""Not a multiple of a program's rows."""


@dataclass(frozen=True)
class Case:
    """One policy."""

    inputs: int
    hidden: tuple[int, int]
    activation: str
    space: Any
    masked: bool = False
    normalize: bool = False
    shared_encoder: bool = True


CASES = {
    "discrete": Case(4, (64, 64), "tanh", Discrete(2), shared_encoder=False),
    "several": Case(7, (32, 48), "relu", MultiDiscrete((3, 4))),
    "masked": Case(20, (100, 17), "elu", Discrete(9), masked=True),
    "normalized": Case(33, (64, 32), "silu", MultiDiscrete((5, 2, 3)), normalize=True),
}


def emulate_bf16() -> None:
    """Patch the interpreter's bf16 to match a GPU: round to nearest, and multiply values, not bit patterns."""
    create_dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def wide(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self, a, b, *rest):
        return create_dot(self, wide(a), wide(b), *rest)

    def nearest(self, source, target):
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16).numpy()
            return TensorHandle(bits, tl.bfloat16)
        return cast(self, source, target)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = dot, nearest


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def reference(policy: ActorCritic, seen: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and values in fp32, with operands of products rounded to bf16."""
    first, act, second, _ = policy.policy_encoder.layers
    x = seen.flatten(1)
    if policy.normalize:
        x = ((x - policy.moments.mean) * policy.moments.scale()).clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)
    x = act(rounded(x) @ rounded(first.weight).T + first.bias)
    x = rounded(act(rounded(x) @ rounded(second.weight).T + second.bias))
    logits = x @ rounded(policy.head.linear.weight).T + policy.head.linear.bias
    if mask is not None:
        logits = logits.masked_fill(~mask.flatten(1), MASKED)
    return logits, x @ rounded(policy.value_head.weight[0]) + policy.value_head.bias


def sampled(logits: torch.Tensor, nvec: tuple[int, ...], noise: torch.Tensor, actions: torch.Tensor):
    """Actions by inverse transform sampling, and log-probabilities of `actions`."""
    own, total = [], torch.zeros(len(logits))
    for part, log_probs in enumerate(logits.split(nvec, 1)):
        log_probs = log_probs.log_softmax(1)
        running = log_probs.exp().cumsum(1)
        own.append((running <= noise[:, part : part + 1] * running[:, -1:]).sum(1))
        total += log_probs.gather(1, actions[:, part : part + 1].long()).squeeze(1)
    return torch.stack(own, 1), total


def measure(case: Case) -> dict[str, float]:
    """Act once, in the interpreter and with torch."""
    torch.manual_seed(0)
    group = Group("agent", Box(case.inputs), case.space, masked=case.masked)
    policy = ActorCritic(group, mlp_encoder(case.hidden, case.activation), case.shared_encoder, case.normalize, 0.0)
    assert supports(policy)
    nvec = tuple(policy.head.nvec)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        if case.normalize:
            policy.moments.merge(2 * torch.randn(1000, case.inputs) + 1)
        seen = torch.randn(ROWS, 1, case.inputs)
        mask = None
        if case.masked:
            mask = torch.rand(ROWS, 1, sum(nvec)) > 0.4
            mask[..., 0] = True
        noise = torch.rand(ROWS, len(nvec))
        action = torch.zeros(ROWS, len(nvec), dtype=torch.int32)
        log_prob, value = torch.zeros(ROWS), torch.zeros(ROWS)
        FusedActor(policy)(seen, mask, noise, action, log_prob, value)
        logits, expected_value = reference(policy, seen, mask)
        expected_action, expected_log_prob = sampled(logits, nvec, noise, action)
    return dict(
        equal_actions=float((action == expected_action).all(1).float().mean()),
        log_prob_error=float((log_prob - expected_log_prob).abs().max()),
        value_error=float((value - expected_value).abs().max()) if policy.shared_encoder else 0.0,
    )


if __name__ == "__main__":
    emulate_bf16()
    for name in sys.argv[1:] or CASES:
        print(json.dumps(dict(case=name, **measure(CASES[name]))), flush=True)
