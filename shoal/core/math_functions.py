"""Branch-free math functions for kernels: CPU compilers vectorize them, GPU threads do not diverge.

`wp.sin` and `wp.cos` call the C library once per env on a CPU, which costs more than the rest of a cart-pole step.
These functions agree with them to float32 rounding for |x| up to about 10,000.
"""

from typing import no_type_check

import warp as wp


@wp.func
@no_type_check
def sincos_small(x: float):
    """Sine and cosine of an angle within an eighth of a turn, |x| <= pi / 4 [rad] (minimax polynomials)."""
    x2 = x * x
    sine = x + x * x2 * (-1.6666654611e-1 + x2 * (8.3321608736e-3 - x2 * 1.9515295891e-4))
    tail = 4.166664568298827e-2 + x2 * (-1.388731625493765e-3 + x2 * 2.443315711809948e-5)
    return sine, 1.0 - 0.5 * x2 + x2 * x2 * tail


@wp.func
@no_type_check
def sincos(x: float):
    """Sine and cosine of `x` [rad] together (Cody-Waite reduction by quarter turns)."""
    quarter = int(x * 0.6366197723675814 + wp.where(x >= 0.0, 0.5, -0.5))
    k = float(quarter)
    r = ((x - k * 1.5703125) - k * 4.837512969970703e-4) - k * 7.549789948768648e-8
    s, c = sincos_small(r)
    swap = (quarter & 1) != 0
    sine = wp.where(swap, c, s)
    cosine = wp.where(swap, s, c)
    sine = wp.where((quarter & 2) != 0, -sine, sine)
    cosine = wp.where(((quarter + 1) & 2) != 0, -cosine, cosine)
    return sine, cosine


@wp.func
@no_type_check
def wrap_angle(x: float):
    """The angle `x` [rad] in [-pi, pi)."""
    turns = x * 0.15915494309189535 + 0.5
    whole = float(int(turns))
    whole = wp.where(whole > turns, whole - 1.0, whole)
    return x - whole * 6.283185307179586
