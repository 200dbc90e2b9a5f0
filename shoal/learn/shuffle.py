"""Random permutations without a sort, as a keyed bijection of 0..n-1."""

from typing import no_type_check

import torch
import warp as wp

from shoal.core.kernels import Broadcast
from shoal.core.launch import Plan, bind


@wp.func
@no_type_check
def hash32(x: wp.uint32):
    """A 32-bit integer hash (two rounds of multiply and shift)."""
    x = x ^ (x >> wp.uint32(16))
    x = x * wp.uint32(0x7FEB352D)
    x = x ^ (x >> wp.uint32(15))
    x = x * wp.uint32(0x1B873593)
    return x ^ (x >> wp.uint32(16))


@wp.func
@no_type_check
def permuted(
    env: int,
    n: int,
    half_bits: int,
    seed: int,
    epoch: int,
    counter: wp.array[int],
    sample: wp.array[int],
    order: wp.array[int],
):
    """Position of a sample in the permutation, by a Feistel network over 2^(2 half_bits) >= n values.

    A Feistel network is a bijection for any round function. Cycle walking restricts it to 0..n-1: results of n or more
    are fed back until they are below n (Black & Rogaway 2002).
    """
    shift = wp.uint32(half_bits)
    low = (wp.uint32(1) << shift) - wp.uint32(1)
    key = hash32(wp.uint32(seed) ^ hash32(hash32(wp.uint32(counter[0])) + wp.uint32(epoch)))
    x = wp.uint32(sample[env])  # `env` is an index within a slice of the samples
    in_range = bool(False)
    while not in_range:
        left = x >> shift
        right = x & low
        for feistel_round in range(6):
            mixed = left ^ (hash32(right + key + wp.uint32(feistel_round) * wp.uint32(0x3C6EF372)) & low)
            left = right
            right = mixed
        x = (left << shift) | right
        in_range = x < wp.uint32(n)  # unsigned, since all 32 bits are used beyond 2^30 samples
    order[env] = int(x)


def order_plan(order: torch.Tensor, seed: int, epoch: int, counter: torch.Tensor) -> Plan:
    """Plan that fills `order` [n] with a permutation of 0..n-1 keyed by seed, epoch and a device counter."""
    n = order.shape[0]
    half_bits = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    sample = torch.arange(n, dtype=torch.int32, device=order.device)
    seed &= 0x7FFFFFFF
    arguments = dict(
        n=n, half_bits=half_bits, seed=seed, epoch=epoch, counter=Broadcast(counter), sample=sample, order=order
    )
    return bind("order", permuted, order.device, n, arguments)
