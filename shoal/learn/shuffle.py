"""A random order without a sort: a keyed bijection of 0..n-1, computed where it is needed."""

import torch
import warp as wp

from shoal.core.kernels import Broadcast
from shoal.core.launch import Plan, bind


@wp.func
def mix(x: wp.uint32):
    """A 32-bit integer hash (two rounds of multiply and shift)."""
    x = x ^ (x >> wp.uint32(16))
    x = x * wp.uint32(0x7FEB352D)
    x = x ^ (x >> wp.uint32(15))
    x = x * wp.uint32(0x1B873593)
    return x ^ (x >> wp.uint32(16))


@wp.func
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
    """Place of a sample in the order: a Feistel network over 2^(2 half_bits) >= n values.

    A Feistel network is a bijection whatever its round function. Values of n and above are walked on until they fall
    inside, which keeps it one (Black & Rogaway 2002).
    """
    shift = wp.uint32(half_bits)
    low = (wp.uint32(1) << shift) - wp.uint32(1)
    key = mix(wp.uint32(seed) ^ mix(mix(wp.uint32(counter[0])) + wp.uint32(epoch)))
    x = wp.uint32(sample[env])  # `env` counts within a slice of the samples; this is the number of the whole
    inside = bool(False)
    while not inside:
        left = x >> shift
        right = x & low
        for turn in range(6):
            mixed = left ^ (mix(right + key + wp.uint32(turn) * wp.uint32(0x3C6EF372)) & low)
            left = right
            right = mixed
        x = (left << shift) | right
        inside = x < wp.uint32(n)  # unsigned: beyond 2^30 samples the network works on all 32 bits
    order[env] = int(x)


def order_plan(order: torch.Tensor, seed: int, epoch: int, counter: torch.Tensor) -> Plan:
    """Fills `order` [n] with a random order of 0..n-1 that depends on the seed, the epoch and the device's counter."""
    n = order.shape[0]
    half_bits = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    sample = torch.arange(n, dtype=torch.int32, device=order.device)
    seed &= 0x7FFFFFFF
    arguments = dict(
        n=n, half_bits=half_bits, seed=seed, epoch=epoch, counter=Broadcast(counter), sample=sample, order=order
    )
    return bind("order", permuted, order.device, n, arguments)
