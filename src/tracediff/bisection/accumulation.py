"""Micro-batches whose losses are divided by their number, or whose gradients are, once summed.

Either way the optimizer is given the same gradient, so a factor of exactly the number of
micro-batches in all losses and gradients of a step is no divergence, as long as it is gone from the
accumulated gradient. Where it is not, the factor stays and is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.views import Common, viewed
from tracediff.compare.figures import widened
from tracediff.events import Event, Pair
from tracediff.trace import Trace
from tracediff.trace.summary import FINGERPRINT_FIELDS

_MEAN: Final = FINGERPRINT_FIELDS.index("mean")
_L2: Final = FINGERPRINT_FIELDS.index("l2")
_CLOSE: Final = 0.05
"""Relative: tells a factor of two or more apart from none, whatever rounding does to a loss."""


def applied(traces: tuple[Trace, Trace], common: Common) -> Common:
    """The step with the target's losses and gradients divided by such a factor, if there is one."""
    factor = _factor(common)
    if factor is None:
        return common
    views = {
        id(pair.target): viewed(traces[1], pair.target, partial(_scaled, factor=1 / factor))
        for pair in common.alignment.pairs
        if _is_scaled(pair, factor)
    }
    result = common.replaced(({}, views))
    count = round(max(factor, 1 / factor))
    result.notes.append(
        f"healed: losses and gradients of the {count} micro-batches are {factor:g} times the "
        "baseline's, which the accumulated gradients are not"
    )
    return result


def _factor(common: Common) -> float | None:
    """The number of micro-batches, or one over it, where it is undone in the gradients."""
    losses = [_ratio(p) for p in common.alignment.pairs if _is_loss(p.baseline)]
    count = len(losses)
    if count < 2:
        return None
    for factor in (float(count), 1.0 / count):
        if all(_is(ratio, factor) for ratio in losses):
            summed = [r for r in _summed(common) if r is not None]
            return factor if summed and all(_is(ratio, 1.0) for ratio in summed) else None
    return None


def _is_loss(event: Event) -> bool:
    return (event.site.phase, event.site.path, event.site.port) == ("loss", "loss", "out")


def _summed(common: Common) -> Iterator[float | None]:
    """The ratios of the gradients that the optimizer was given, and of their norm."""
    for pair in common.alignment.pairs:
        site = pair.baseline.site
        if site.phase == "optimizer" and (site.port == "grad" or site.path == "clip_grad_norm"):
            yield _ratio(pair)


def _is_scaled(pair: Pair, factor: float) -> bool:
    site = pair.baseline.site
    if pair.target.payload is None or not pair.target.dtype.startswith(("float", "bfloat")):
        return False
    if site.phase == "backward":
        return True
    is_loss = site.phase == "loss" or (site.phase, site.path) == ("trajectory", "loss")
    return is_loss and _is(_ratio(pair), factor)


def _ratio(pair: Pair) -> float | None:
    """The target's size over the baseline's; None where that says nothing."""
    a, b = pair.baseline.fingerprint, pair.target.fingerprint
    if not a or not b or not a[_L2] or not b[_L2]:
        return None
    sign = math.copysign(1.0, a[_MEAN] * b[_MEAN]) if pair.baseline.shape == () else 1.0
    return sign * b[_L2] / a[_L2]


def _is(ratio: float | None, factor: float) -> bool:
    return ratio is not None and abs(ratio - factor) <= _CLOSE * factor


def _scaled(array: NDArray[Any], factor: float) -> NDArray[Any]:
    return np.asarray(widened(array) * factor, dtype=array.dtype)
