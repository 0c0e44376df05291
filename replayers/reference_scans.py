"""Formulas of running sums and products."""

from __future__ import annotations

import math

import numpy as np

from tracediff.compare.figures import widened
from tracediff.replayers.reference_operations import (
    FUNCTION,
    LARGEST,
    accumulated,
    argument,
    formula,
    rounded,
    roundoff,
    squared,
    widen,
)
from tracediff.replaying import Operation, Replayed


@formula("cumsum", "cumprod", "logcumsumexp")
def _scan(operation: Operation) -> Replayed | None:
    """From the first element on, along one axis."""
    data = widen(operation.inputs[0])
    axis = int(argument(operation, "dim", "axis", default=0))
    if argument(operation, "reverse") or argument(operation, "inclusive", default=True) is False:
        return None
    length, unit = data.shape[axis], roundoff(operation)
    if operation.canonical == "cumsum":
        value = np.cumsum(data, axis=axis)
        squares = np.cumsum(squared(widened(data)), axis=axis)
        return rounded(operation, value, accumulated(operation, value, squares, length))
    if operation.canonical == "cumprod":
        value = np.cumprod(data, axis=axis)
        return rounded(operation, value, unit * math.sqrt(length) * np.abs(value))
    value = np.logaddexp.accumulate(data, axis=axis)
    return rounded(operation, value, unit * (FUNCTION + length / LARGEST + np.abs(value)))
