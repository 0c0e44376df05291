"""How rounding errors add up: the pieces that the spreads of all formulas are made of.

One rounding of a result y errs by at most u|y| and, over many results, evenly in between: its
standard deviation is `u|y| / sqrt(3)`. Errors of separate roundings are taken to be independent
with mean zero, as in Higham and Mary, "A new approach to probabilistic rounding error analysis",
SIAM J. Sci. Comput. 41 (2019), and "Sharper probabilistic backward error analysis for basic linear
algebra kernels with random data", SIAM J. Sci. Comput. 42 (2020).
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.compare.figures import unit_roundoff
from tracediff.replaying import Call, Floats

ROUNDING: Final = 1 / math.sqrt(3)
"""Standard deviation of one rounding, in units of the largest."""

LARGEST: Final = 6.0
"""Spreads that no error of many small ones exceeds: once in 1e9 for normal errors."""

_LOWEST: Final = {
    "float16": 2.0**-25,
    "float32": float(np.finfo(np.float32).tiny),
    "float64": float(np.finfo(np.float64).tiny),
}

_SINGLE: Final = unit_roundoff("float32")


def storage(call: Call) -> float:
    """Unit roundoff of the recorded output."""
    return unit_roundoff(call.dtype)


def arithmetic(call: Call) -> float:
    """Unit roundoff of the arithmetic: of float32 for 16-bit types, which both stacks widen."""
    return min(unit_roundoff(call.dtype), _SINGLE)


def is_narrow(call: Call) -> bool:
    """Whether results are stored with fewer bits than they are computed with."""
    return storage(call) > arithmetic(call)


def stored(call: Call, value: Floats, times: float = 1.0) -> Floats:
    """Spread of rounding `value` to the output's dtype, once or a number of times.

    Below the smallest normal number the spacing is constant, or values are flushed to zero.
    """
    result: Floats = np.abs(value)
    result *= math.sqrt(times) * ROUNDING * storage(call)
    result += _lowest(call)
    return result


def half_spacing(call: Call, value: Floats, error: Floats | float = 0.0) -> Floats:
    """Largest error of rounding `value`, known up to `error`, to the nearest of the output's dtype.

    Half the distance of neighbouring floats, which is constant between powers of two: a 16-bit
    result that is off by 1% in all elements shows, whatever the sum over them.
    """
    largest = np.abs(value) + error
    _, exponent = np.frexp(largest)
    # Zero is exact, and `frexp` would give it the spacing of numbers near one.
    spacing = np.where(largest > 0, np.ldexp(storage(call), exponent - 1), 0.0)
    return spacing + _lowest(call)


def reach_of(call: Call, value: Floats, spread: Floats, *roundings: Floats) -> Floats | None:
    """Largest error of a result that is stored, with what it was computed from stored or not.

    Args:
        spread: Of the arithmetic alone.
        roundings: Largest errors of storing what the result is computed from, as they show in it.

    Returns:
        None where results are stored with all the bits that they are computed with: the arithmetic
        is all there is then, and of that only the spread is known.
    """
    if not is_narrow(call):
        return None
    reach = LARGEST * spread
    for rounding in roundings:
        reach = reach + rounding
    return reach + half_spacing(call, value, reach)


def _lowest(call: Call) -> float:
    return _LOWEST.get(call.dtype, _LOWEST["float32"])


def together(*spreads: Floats) -> Floats:
    """Spread of the sum of independent errors."""
    total = np.square(spreads[0])
    for spread in spreads[1:]:
        squares = np.square(spread)
        if squares.shape == total.shape:
            total += squares
        else:
            total = total + squares
    return np.sqrt(total, out=total) if total.ndim else np.sqrt(total)


def random_walk(length: Any, squares: NDArray[Any], total: Floats) -> Floats:
    """Variance of a sum's rounding, over `u**2`: of `length` terms with squared sum `squares`.

    Rounding errs at each of the K partial sums s_k by up to `u |s_k|`, so the variance is
    `u**2 / 3 * sum_k s_k**2`. With the terms p_i in no particular order, the partial sums are a
    random walk with the drift `k/K y`: `E s_k**2 <= k/K Q + (k/K)**2 y**2`, where Q is the sum of
    `p_i**2`. That gives `u**2 K (Q/6 + y**2/9)`. But terms have an order: one that weighs most may
    come first, and then all partial sums have it, so `Q/3` is allowed, twice the average.
    """
    variance: Floats = length * (squares / 3 + np.square(total) / 9)
    return variance


def wide(array: NDArray[Any]) -> Floats:
    return array.astype(np.float64)


def positive_sum(roundoff: float, length: int) -> float:
    """Relative spread of a sum of `length` terms of one sign.

    The partial sums grow evenly to the total S, each rounded by `u k/K S`: the variance is
    `u**2 / 3 * K / 3`. Kernels that add in blocks stay below it.
    """
    return roundoff * math.sqrt(length) / 3
