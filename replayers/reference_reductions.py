"""Formulas of sums, extremes, norms and softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tracediff.compare.figures import widened
from tracediff.replayers.reference_operations import (
    FUNCTION,
    LARGEST,
    accumulated,
    argument,
    axes_of,
    exact,
    formula,
    rounded,
    roundoff,
    squared,
    widen,
)
from tracediff.replayers.reference_rounding import together
from tracediff.replaying import Floats, Operation, Replayed


@formula("sum", "mean")
def _sum(operation: Operation) -> Replayed | None:
    data = widened(operation.inputs[0])
    axes = axes_of(operation, data.ndim)
    keep = bool(argument(operation, "keepdim", "keepdims", default=False))
    value, spread = summed(operation, data, axes, keep)
    terms = math.prod(data.shape[axis] for axis in axes) if operation.canonical == "mean" else 1
    return rounded(operation, value / terms, spread / terms)


def summed(
    operation: Operation, data: Floats, axes: tuple[int, ...], keep: bool = False
) -> tuple[Floats, Floats]:
    """The sum over axes, and the spread of its error."""
    length = math.prod(data.shape[axis] for axis in axes)
    value = data.sum(axis=axes, keepdims=keep)
    spread = accumulated(operation, value, squared(data).sum(axis=axes, keepdims=keep), length)
    # Small terms that are added to a large sum one by one are all rounded one way: K u |y| / 4.
    return value, together(spread, roundoff(operation) * length * np.abs(value) / 4 / LARGEST)


@formula("max", "min")
def _extreme(operation: Operation) -> Replayed | None:
    if len(operation.inputs) != 1 or operation.output:
        return None
    data = widen(operation.inputs[0])
    keep = bool(argument(operation, "keepdim", "keepdims", default=False))
    function = np.max if operation.canonical == "max" else np.min
    return exact(operation, function(data, axis=axes_of(operation, data.ndim), keepdims=keep))


@formula("norm")
def _norm(operation: Operation) -> Replayed | None:
    order = argument(operation, "ord", default=2)
    data = widen(operation.inputs[0])
    axes = axes_of(operation, data.ndim)
    keep = bool(argument(operation, "keepdim", "keepdims", default=False))
    if float(order) != 2:
        return None
    value = np.sqrt(squared(data).sum(axis=axes, keepdims=keep))
    length = math.prod(data.shape[axis] for axis in axes)
    relative = roundoff(operation) * (math.sqrt(length) / 6 + FUNCTION)
    return rounded(operation, value, relative * value)


@formula("softmax")
def _softmax(operation: Operation) -> Replayed | None:
    """The error of an exponential is that of its argument, the difference from the largest."""
    data = widen(operation.inputs[0])
    axes = axes_of(operation, data.ndim)
    value, shifted = softmax_of(data, axes)
    length = math.prod(data.shape[axis] for axis in axes)
    small = np.minimum(np.where(np.isfinite(shifted), -shifted, 0.0), 100.0)
    relative = roundoff(operation) * (FUNCTION + small + math.sqrt(length) / 3)
    return rounded(operation, value, relative * value)


def softmax_of(data: Floats, axes: Sequence[int]) -> tuple[Floats, Floats]:
    """Softmax, and the arguments of its exponentials."""
    shifted = data - data.max(axis=tuple(axes), keepdims=True)
    weights = np.exp(shifted)
    return weights / weights.sum(axis=tuple(axes), keepdims=True), shifted


@formula("log_softmax", "logsumexp")
def _log_softmax(operation: Operation) -> Replayed | None:
    """Small terms of the sum of exponentials may all be rounded one way: K u is allowed, which is
    six spreads."""
    data = widen(operation.inputs[0])
    axes = axes_of(operation, data.ndim)
    top = data.max(axis=axes, keepdims=True)
    log = np.log(np.exp(data - top).sum(axis=axes, keepdims=True))
    length = math.prod(data.shape[axis] for axis in axes)
    unit = roundoff(operation)
    if operation.canonical == "logsumexp":
        value = top + log
        if not argument(operation, "keepdim", "keepdims", default=False):
            value = value.squeeze(axes)
        return rounded(operation, value, unit * (length / LARGEST + np.abs(value)))
    shifted = data - top
    error = unit * (length / LARGEST + np.abs(shifted) + np.abs(log))
    return rounded(operation, shifted - log, error)
