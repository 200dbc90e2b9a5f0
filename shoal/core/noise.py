"""Noise for sampling actions: standard normal or uniform numbers, keyed by seed, env and rollout."""

from typing import no_type_check

import torch
import warp as wp

from shoal.core.kernels import Broadcast
from shoal.core.launch import Plan, bind
from shoal.core.random import ACTION_STREAM, philox, unit_float, unit_normal, vec4u

STREAM = wp.constant(wp.uint32(ACTION_STREAM))


@wp.func
@no_type_check
def noise_words(env: int, part: int, block: int, seed: int, env_id: wp.array[int], counter: wp.array[int]):
    """Four random words, keyed by (seed, env, rollout, block of steps, part of the actions)."""
    position = vec4u(wp.uint32(env_id[env]), wp.uint32(counter[0]), wp.uint32(block), STREAM + wp.uint32(part))
    return philox(position, wp.uint64(seed))


@wp.func
@no_type_check
def uniform_noise(
    env: int, agent: int, seed: int, env_id: wp.array[int], counter: wp.array[int], noise: wp.array3d[float]
):
    """Uniform numbers in [0, 1) for every step of a rollout, four per draw."""
    for block in range((noise.shape[1] + 3) // 4):
        words = noise_words(env, agent, block, seed, env_id, counter)
        for k in range(4):
            t = block * 4 + k
            if t < noise.shape[1]:
                noise[env, t, agent] = unit_float(words[k])


@wp.func
@no_type_check
def normal_noise(
    env: int, agent: int, seed: int, env_id: wp.array[int], counter: wp.array[int], noise: wp.array3d[float]
):
    """Standard normal numbers for every step of a rollout, two per draw."""
    for block in range((noise.shape[1] + 1) // 2):
        words = noise_words(env, agent, block, seed, env_id, counter)
        for k in range(2):
            t = block * 2 + k
            if t < noise.shape[1]:
                noise[env, t, agent] = unit_normal(words[2 * k], words[2 * k + 1])


def noise_plan(noise: torch.Tensor, gaussian: bool, seed: int, env_id: torch.Tensor, counter: torch.Tensor) -> Plan:
    """A plan that fills `noise` [T, N, parts]; `counter` [1] is the index of the rollout."""
    function = normal_noise if gaussian else uniform_noise
    arguments = dict(seed=seed, env_id=env_id, counter=Broadcast(counter), noise=noise.transpose(0, 1))
    return bind("noise", function, noise.device, noise.shape[1], arguments, agents=noise.shape[2])
