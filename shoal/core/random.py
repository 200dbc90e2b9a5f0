"""Counter-based random numbers (Philox 4x32-10): a pure function of (seed, env, episode, step, stream).

Nothing is stored and nothing depends on the batch: env 7 draws the same numbers in a batch of 8 and in one of
80,000, on CPU and on GPU. A kernel takes a parameter `rng: Random` and numbers its draws by `stream`.
Reference: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from typing import no_type_check

import warp as wp

vec4u = wp.types.vector(length=4, dtype=wp.uint32)

MUL_A = wp.constant(wp.uint32(0xD2511F53))
MUL_B = wp.constant(wp.uint32(0xCD9E8D57))
WEYL_A = wp.constant(wp.uint32(0x9E3779B9))
WEYL_B = wp.constant(wp.uint32(0xBB67AE85))

ACTION_STREAM = 1 << 30
"""First stream of the noise for sampling actions; worlds use lower streams."""


@wp.struct
class Random:
    """Position of an env in its random sequence. Give each draw of a kernel call a different stream number."""

    seed: wp.uint64
    env: wp.uint32
    episode: wp.uint32
    step: wp.uint32


@wp.func
@no_type_check
def random_at(seed: wp.uint64, env: int, episode: int, step: int):
    """The position of an env in its random sequence."""
    r = Random()
    r.seed = seed
    r.env = wp.uint32(env)
    r.episode = wp.uint32(episode)
    r.step = wp.uint32(step)
    return r


@wp.func
@no_type_check
def philox(counter: vec4u, seed: wp.uint64):
    """Ten rounds of Philox 4x32: four random 32-bit words for one 128-bit counter and one 64-bit key."""
    c0 = counter[0]
    c1 = counter[1]
    c2 = counter[2]
    c3 = counter[3]
    k0 = wp.uint32(seed)
    k1 = wp.uint32(seed >> wp.uint64(32))
    for _i in range(10):
        p0 = wp.uint64(c0) * wp.uint64(MUL_A)
        p1 = wp.uint64(c2) * wp.uint64(MUL_B)
        c0 = wp.uint32(p1 >> wp.uint64(32)) ^ c1 ^ k0
        c1 = wp.uint32(p1)
        c2 = wp.uint32(p0 >> wp.uint64(32)) ^ c3 ^ k1
        c3 = wp.uint32(p0)
        k0 = k0 + WEYL_A
        k1 = k1 + WEYL_B
    return vec4u(c0, c1, c2, c3)


@wp.func
@no_type_check
def random_words(rng: Random, stream: int):
    """Four random words."""
    return philox(vec4u(rng.env, rng.episode, rng.step, wp.uint32(stream)), rng.seed)


@wp.func
@no_type_check
def unit_float(word: wp.uint32):
    """A float in [0, 1) from the top 24 bits of a word."""
    return float(word >> wp.uint32(8)) * 5.9604644775390625e-8


@wp.func
@no_type_check
def unit_normal(a: wp.uint32, b: wp.uint32):
    """A standard normal number from two words (Box-Muller)."""
    return wp.sqrt(-2.0 * wp.log(1.0 - unit_float(a))) * wp.cos(6.283185307179586 * unit_float(b))


@wp.func
@no_type_check
def uniform(rng: Random, stream: int, low: float, high: float):
    """A float in [low, high)."""
    words = random_words(rng, stream)
    return low + (high - low) * unit_float(words[0])


@wp.func
@no_type_check
def uniform4(rng: Random, stream: int, low: float, high: float):
    """Four floats in [low, high) from one draw."""
    words = random_words(rng, stream)
    scale = high - low
    return wp.vec4(
        low + scale * unit_float(words[0]),
        low + scale * unit_float(words[1]),
        low + scale * unit_float(words[2]),
        low + scale * unit_float(words[3]),
    )


@wp.func
@no_type_check
def normal(rng: Random, stream: int):
    """A standard normal float."""
    words = random_words(rng, stream)
    return unit_normal(words[0], words[1])


@wp.func
@no_type_check
def below(word: wp.uint32, n: int) -> int:
    """An integer in [0, n) from a random word."""
    return int((wp.uint64(word) * wp.uint64(n)) >> wp.uint64(32))


@wp.func
@no_type_check
def integer(rng: Random, stream: int, n: int):
    """An integer in [0, n)."""
    words = random_words(rng, stream)
    return below(words[0], n)


@wp.kernel(enable_backward=False, module="unique", module_options={"fuse_fp": False})
@no_type_check
def draw_kernel(
    seed: wp.array[wp.uint64],
    env_id: wp.array[int],
    episode: wp.array[int],
    step_count: wp.array[int],
    stream: int,
    gaussian: bool,
    low: float,
    high: float,
    out: wp.array2d[float],
):
    """For worlds written with torch: one number per element of a tensor [env, i]; element i uses `stream` + i."""
    env, i = wp.tid()
    rng = random_at(seed[env], env_id[env], episode[env], step_count[env])
    if gaussian:
        out[env, i] = normal(rng, stream + i)
    else:
        out[env, i] = uniform(rng, stream + i, low, high)
