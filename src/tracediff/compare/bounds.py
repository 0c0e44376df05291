"""How large an error rounding can explain at a place, given the errors of what it was made from.

Two parts. The **floor** is the rounding committed at the place itself: a reduction of length K in
arithmetic of unit roundoff u errs by about `u * sqrt(K)` relative to its data (Higham and Mary, "A
new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019), and storing
the result adds one rounding of the output dtype. The **gain** is how much a place may amplify the
relative error of its inputs before that counts as an error of its own.

The gains are first-order limits per stage, chosen with head-room over what a clean pair of real
runs shows (see docs/deciding.md for the measurement), not derived per operation.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.compare.figures import unit_roundoff
from tracediff.events import Event
from tracediff.verdict import Bound

GAIN: Final = {
    "forward": 16.0,
    "loss": 64.0,
    "backward": 64.0,
    "optimizer": 16.0,
    "trajectory": 16.0,
}
DEFAULT_GAIN: Final = 64.0

ELEMENT_HEADROOM: Final = 64.0
"""Largest relative error of one element over that of the whole tensor, for rounding."""

SETTING_TOLERANCE: Final = 2.0**-20
"""Relative: a learning rate computed in float32 on one side and in float64 on the other."""

_FLOOR_CONSTANT: Final = 8.0


def floor(event: Event, other: Event) -> tuple[float, str]:
    """Relative error that rounding at the place itself can cause, and its derivation.

    K is the length of the last dimension, the one that matrix products, norms and softmax reduce
    over; accumulation is taken to be in float32 for 16-bit types, as both stacks do.
    """
    dtype = max((event.dtype, other.dtype), key=unit_roundoff)
    storage = unit_roundoff(dtype)
    accumulation = min(storage, unit_roundoff("float32"))
    length = max((*event.shape[-1:], *other.shape[-1:], 1))
    value = _FLOOR_CONSTANT * accumulation * math.sqrt(length)
    if storage > accumulation:
        value += 4 * storage
    return value, f"{event.op or 'value'} K={length} {dtype}"


def cross_entropy(
    logits: tuple[NDArray[Any], NDArray[Any]], counts: NDArray[np.bool_] | None, loss: float
) -> Bound:
    """Bound of the relative difference of two mean cross-entropies, from the logits of both sides.

    The gradient of a token's loss with respect to its logits is softmax minus one-hot, of absolute
    sum at most 2, so the loss moves by at most twice the largest difference of a logit. To this
    comes the sum of K exponentials: some kernels accumulate it one term after the other, with an
    error of one sign, so the deterministic `gamma_K = K u` is allowed (Higham, "Accuracy and
    Stability of Numerical Algorithms", 2002, section 4.2), in float32.

    Args:
        logits: Both sides' (..., K).
        counts: Boolean mask broadcastable to the logits: False where a token is padding.
        loss: The baseline's loss. A larger one than log K is taken for a sum over tokens.
    """
    a, b = (values.astype(np.float64) for values in logits)
    apart = np.abs(a - b)
    if counts is not None:
        apart = np.where(counts, apart, 0.0)
    length = a.shape[-1]
    roundoff = unit_roundoff("float32")
    largest = float(apart.max(initial=0.0))
    absolute = 2 * largest + length * roundoff + roundoff * float(np.abs(a).max(initial=0.0))
    scale = min(abs(loss), math.log(length)) or 1.0
    derivation = f"cross-entropy of {length} classes, logits apart by at most {largest:.1e}"
    return Bound(rel_l2=absolute / scale, derivation=derivation)


def bound(event: Event, other: Event, inherited: float, cancelled: float = 1.0) -> Bound:
    """Bound of the relative L2 error of a tensor, given the largest error it inherits.

    Args:
        cancelled: How much larger the terms are that it is a sum of.
    """
    local, derivation = floor(event, other)
    gain = GAIN.get(event.site.phase, DEFAULT_GAIN)
    if inherited:
        derivation += f", inputs apart by {inherited:.1e} x{gain:g}"
    if cancelled > 1:
        derivation += f", terms that cancel, {cancelled:.1e} times as large"
    return Bound(rel_l2=cancelled * (local + gain * inherited), derivation=derivation)
