"""Losses of each element that PyTorch has as one operation, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from tracediff.replayers.reference_operations import (
    FUNCTION,
    argument,
    formula,
    operands,
    rounded,
    roundoff,
    sigmoid_of,
)
from tracediff.replayers.reference_reductions import summed
from tracediff.replayers.reference_rounding import together
from tracediff.replaying import Floats, Operation, Replayed

_NONE, _MEAN = 0, 1
"""Values of `reduction`."""

_LEAST_LOG: Final = -100.0
"""What PyTorch takes for the logarithm of zero."""

_Each = Callable[[Operation, Floats, Floats], tuple[Floats, Any]]
"""The loss of each element, or its derivative, and the size of the terms that it is made of."""


def _mse(operation: Operation, x: Floats, y: Floats) -> tuple[Floats, Any]:
    return (x - y) ** 2, (x - y) ** 2


def _smooth(operation: Operation, x: Floats, y: Floats) -> tuple[Floats, Any]:
    """Girshick, "Fast R-CNN", 2015, equation 3; `huber_loss` is `delta` times as large."""
    is_huber = "huber" in operation.op
    beta = float(argument(operation, "delta" if is_huber else "beta", default=1))
    apart = np.abs(x - y)
    value = np.where(apart < beta, 0.5 * apart**2, beta * (apart - 0.5 * beta))
    value = value if is_huber else value / beta
    return value, np.abs(value) + beta


def _smooth_slope(operation: Operation, x: Floats, y: Floats) -> tuple[Floats, Any]:
    is_huber = "huber" in operation.op
    beta = float(argument(operation, "delta" if is_huber else "beta", default=1))
    slope = np.clip(x - y, -beta, beta) / (1 if is_huber else beta)
    return slope, np.abs(slope)


def _soft_margin(operation: Operation, x: Floats, y: Floats) -> tuple[Floats, Any]:
    value = np.logaddexp(0.0, -x * y)
    return value, value + np.minimum(np.abs(x * y), 1.0)


def _soft_margin_slope(operation: Operation, x: Floats, y: Floats) -> tuple[Floats, Any]:
    slope = -y * sigmoid_of(-x * y)
    return slope, np.abs(slope) * (1 + np.abs(x * y))


def _entropy(operation: Operation, x: Floats, y: Floats) -> tuple[Floats, Any]:
    logs = np.maximum(np.log(x), _LEAST_LOG), np.maximum(np.log1p(-x), _LEAST_LOG)
    return -(y * logs[0] + (1 - y) * logs[1]), np.abs(y * logs[0]) + np.abs((1 - y) * logs[1]) + 1


def _entropy_slope(operation: Operation, x: Floats, y: Floats) -> tuple[Floats, Any]:
    slope = (x - y) / np.maximum((1 - x) * x, 1e-12)
    return slope, np.abs(slope) + 1 / np.maximum(1 - x, 1e-7)


def _entropy_of_logits(operation: Operation, x: Floats, y: Floats) -> tuple[Floats, Any]:
    value = (1 - y) * x + np.logaddexp(0.0, -x)
    return value, np.abs((1 - y) * x) + np.abs(x) + 1


_LOSSES: Final[Mapping[str, _Each]] = {
    "mse_loss": _mse,
    "smooth_l1_loss": _smooth,
    "huber_loss": _smooth,
    "soft_margin_loss": _soft_margin,
    "binary_cross_entropy": _entropy,
    "binary_cross_entropy_with_logits": _entropy_of_logits,
}
_SLOPES: Final[Mapping[str, _Each]] = {
    "mse_loss_backward": lambda _, x, y: (2 * (x - y), 2 * np.abs(x - y)),
    "smooth_l1_loss_backward": _smooth_slope,
    "huber_loss_backward": _smooth_slope,
    "soft_margin_loss_backward": _soft_margin_slope,
    "binary_cross_entropy_backward": _entropy_slope,
}


@formula(*_LOSSES)
def _loss(operation: Operation) -> Replayed | None:
    """Without weights: of more tensors than two it is not on record which they are."""
    x, y = operands(operation)
    each, size = _LOSSES[operation.canonical](operation, x, y)
    error = FUNCTION * roundoff(operation) * np.broadcast_to(size, each.shape)
    reduction = int(argument(operation, "reduction", default=_MEAN))
    if reduction == _NONE:
        return rounded(operation, each, error)
    value, walk = summed(operation, each, tuple(range(each.ndim)))
    terms = each.size if reduction == _MEAN else 1
    return rounded(operation, value / terms, together(walk, error.sum()) / terms)


@formula(*_SLOPES)
def _gradient(operation: Operation) -> Replayed | None:
    grad, x, y = operands(operation)
    slope, size = _SLOPES[operation.canonical](operation, x, y)
    terms = slope.size if int(argument(operation, "reduction", default=_MEAN)) == _MEAN else 1
    error = FUNCTION * roundoff(operation) * np.abs(grad) * size / terms
    return rounded(operation, grad * slope / terms, error)
