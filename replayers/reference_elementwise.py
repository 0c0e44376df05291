"""Activations, and modules that hand their input through."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tracediff.replayers.reference_functions import erf
from tracediff.replayers.reference_functions import sigmoid as logistic
from tracediff.replayers.reference_rounding import (
    ROUNDING,
    arithmetic,
    is_narrow,
    reach_of,
    storage,
    stored,
    together,
    wide,
)
from tracediff.replaying import Call, Floats, Replayed

_TANH_SCALE: Final = math.sqrt(2 / math.pi)
_TANH_CUBIC: Final = 0.044715
_FUNCTION: Final = 2.0
"""Spread of one evaluation of exp, tanh or erf, in units of the unit roundoff: libraries promise
one to four units in the last place."""

_SIGMOID_STORES: Final = 3
"""16-bit kernels may store the exponential, its sum with 1 and the quotient."""


def silu(call: Call) -> Replayed:
    """`x / (1 + exp(-x))`. Elfwing, Uchibe and Doya, 2018 (as SiL unit); swish with beta 1.

    The relative error of `exp(-x)` is that of its argument, `|x| u`, and of the function.
    """
    data = wide(call.inputs["in"])
    condition = 1 + np.abs(data) / _FUNCTION
    return _rounded(call, data * logistic(data), condition, stores=_SIGMOID_STORES + 1)


def quick_gelu(call: Call) -> Replayed:
    """`x sigmoid(1.702 x)`. Hendrycks and Gimpel, "Gaussian error linear units", 2016."""
    data = wide(call.inputs["in"])
    condition = 1 + np.abs(data)
    return _rounded(call, data * logistic(1.702 * data), condition, stores=_SIGMOID_STORES + 2)


def gelu(call: Call) -> Replayed | None:
    """`x Phi(x)`, exactly (`approximate` is none), by the tanh formula (tanh) or as
    `x sigmoid(1.702 x)` (sigmoid). Hendrycks and Gimpel, "Gaussian error linear units", 2016,
    section 2.

    For negative x, 1 + erf cancels: the error is relative to `|x|`, not to the result.
    """
    approximate = call.settings.get("approximate", "none")
    if approximate == "sigmoid":
        return quick_gelu(call)
    if approximate not in ("none", "tanh"):
        return None
    data = wide(call.inputs["in"])
    if approximate == "tanh":
        inner = np.tanh(_TANH_SCALE * (data + _TANH_CUBIC * data**3))
    else:
        inner = erf(data / math.sqrt(2))
    value = 0.5 * data * (1 + inner)
    # Where the function has saturated, an error of its argument does not show.
    slope = (1 - np.abs(inner)) * np.abs(data)
    spread = _FUNCTION * arithmetic(call) * np.abs(data) * (0.5 + slope)
    once = reach_of(call, value, spread)
    if is_narrow(call):  # composed of operations that each store their result
        spread = together(spread, stored(call, 0.5 * data), stored(call, data * slope, 4))
    spread = together(spread, stored(call, value, 2 if is_narrow(call) else 1))
    return Replayed(value, spread, f"{call.op} {approximate} {call.dtype}", once=once)


def relu(call: Call) -> Replayed:
    """`max(x, 0)`: exact."""
    value = np.maximum(wide(call.inputs["in"]), 0.0)
    return Replayed(value, np.zeros_like(value), f"{call.op} exact")


def tanh(call: Call) -> Replayed:
    """`tanh x`, to the accuracy of the library's function."""
    value = np.tanh(wide(call.inputs["in"]))
    return _rounded(call, value, np.ones_like(value), stores=1)


def sigmoid(call: Call) -> Replayed:
    """`1 / (1 + exp(-x))`."""
    data = wide(call.inputs["in"])
    return _rounded(call, logistic(data), 1 + np.abs(data) / _FUNCTION, stores=_SIGMOID_STORES)


def handed_through(call: Call) -> Replayed | None:
    """The input itself: Identity, and Dropout whose probability is zero; with a mask,
    `x mask / (1 - p)`. Srivastava et al., "Dropout", 2014, scaled in training as both stacks do.

    Args:
        call: `in`, and for a dropout that is on `mask`: False where an element was dropped.
    """
    share = call.settings.get("p")
    if "mask" in call.inputs and isinstance(share, float) and 0 < share < 1:
        kept: Floats = wide(call.inputs["in"]) * call.inputs["mask"] / (1 - share)
        error = 3 * ROUNDING * arithmetic(call) * np.abs(kept)
        spread = together(error, stored(call, kept, 2 if is_narrow(call) else 1))
        return Replayed(kept, spread, f"{call.op} p={share:g} {call.dtype}")
    if call.op != "Identity" and share != 0:
        return None
    value = wide(call.inputs["in"])
    return Replayed(value, np.zeros_like(value), f"{call.op} hands its input through")


def _rounded(call: Call, value: Floats, condition: Floats, stores: int) -> Replayed:
    spread = _FUNCTION * arithmetic(call) * condition * np.abs(value)
    reach = None
    if is_narrow(call):
        on_the_way = (stores - 1) * storage(call) * condition * np.abs(value)
        reach = reach_of(call, value, spread, on_the_way)
    return Replayed(
        value,
        together(spread, stored(call, value, stores if is_narrow(call) else 1)),
        f"{call.op} {call.dtype}",
        reach,
    )
