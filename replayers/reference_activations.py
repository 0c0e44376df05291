"""Activations and functions of one number that are less common, and their gradients in PyTorch.

Each function gives its value and the size of the terms that it is made of, which decides how far
rounding takes it; see the documentation of `torch.nn` for the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from tracediff.replayers.reference_operations import (
    FUNCTION,
    argument,
    exact,
    formula,
    operands,
    rounded,
    roundoff,
    sigmoid_of,
    widen,
)
from tracediff.replaying import Floats, Operation, Replayed

_Sized = tuple[Any, Any]
"""A value, or a slope, and the size of its terms."""

_Function = Callable[[Operation, Floats], _Sized]

_lgamma: Final = np.vectorize(math.lgamma, otypes=[np.float64])


def _softplus_of(x: Floats) -> Floats:
    result: Floats = np.logaddexp(x, 0.0)
    return result


def _softplus(operation: Operation, x: Floats) -> _Sized:
    beta = float(argument(operation, "beta", default=1))
    is_linear = x * beta > float(argument(operation, "threshold", default=20))
    value = np.where(is_linear, x, _softplus_of(x * beta) / beta)
    return value, np.abs(value) + np.minimum(np.abs(x), 1 / beta)


def _softplus_slope(operation: Operation, x: Floats) -> _Sized:
    beta = float(argument(operation, "beta", default=1))
    is_linear = x * beta > float(argument(operation, "threshold", default=20))
    slope = np.where(is_linear, 1.0, sigmoid_of(x * beta))
    return slope, slope * (1 + np.abs(x * beta))


def _leaky_relu(operation: Operation, x: Floats) -> _Sized:
    value = np.where(x > 0, x, float(argument(operation, "negative_slope", default=0.01)) * x)
    return value, np.abs(value)


def _leaky_relu_slope(operation: Operation, x: Floats) -> _Sized:
    slope = np.where(x > 0, 1.0, float(argument(operation, "negative_slope", default=0.01)))
    return slope, np.abs(slope)


def _elu_factors(operation: Operation) -> tuple[float, float, float]:
    alpha, scale, inner = (
        float(argument(operation, name, default=1)) for name in ("alpha", "scale", "input_scale")
    )
    return alpha * scale, scale, inner


def _elu(operation: Operation, x: Floats) -> _Sized:
    low, high, inner = _elu_factors(operation)
    value = np.where(x > 0, high * x, low * np.expm1(inner * np.minimum(x, 0)))
    return value, np.where(x > 0, np.abs(value), abs(low))  # exp - 1 cancels


def _elu_slope(operation: Operation, x: Floats) -> _Sized:
    low, high, inner = _elu_factors(operation)
    if argument(operation, "is_result", default=False):
        slope = np.where(x > 0, high, inner * (x + low))
    else:
        slope = np.where(x > 0, high, inner * low * np.exp(inner * np.minimum(x, 0)))
    return slope, np.where(x > 0, abs(high), abs(inner * low) * (1 + np.abs(inner * x)))


def _hardtanh_slope(operation: Operation, x: Floats) -> _Sized:
    inside = (x > operation.args["min_val"]) & (x < operation.args["max_val"])
    return inside.astype(np.float64), 0.0


def _hardsigmoid(operation: Operation, x: Floats) -> _Sized:
    return np.clip(x + 3, 0, 6) / 6, np.abs(x) + 1.0


def _hardswish(operation: Operation, x: Floats) -> _Sized:
    return x * np.clip(x + 3, 0, 6) / 6, np.abs(x) * np.minimum(np.abs(x) + 3, 6) / 6


def _hardswish_slope(operation: Operation, x: Floats) -> _Sized:
    slope = np.where(x <= -3, 0.0, np.where(x < 3, x / 3 + 0.5, 1.0))
    return slope, np.minimum(np.abs(x) / 3 + 0.5, 1.5)


def _mish(operation: Operation, x: Floats) -> _Sized:
    value = x * np.tanh(_softplus_of(x))
    return value, np.abs(value) * (1 + np.minimum(np.abs(x), 100.0) / 2)


def _mish_slope(operation: Operation, x: Floats) -> _Sized:
    inner = np.tanh(_softplus_of(x))
    return inner + x * sigmoid_of(x) * (1 - inner**2), 1 + np.abs(x) * (1 - inner**2)


def _log_sigmoid(operation: Operation, x: Floats) -> _Sized:
    value = -_softplus_of(-x)
    return value, np.abs(value) + np.minimum(np.abs(x), 1.0)


_FUNCTIONS: Final[Mapping[str, _Function]] = {
    "softplus": _softplus,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "mish": _mish,
    "log_sigmoid": _log_sigmoid,
    "tan": lambda _, x: (np.tan(x), 1 + np.tan(x) ** 2),
    "arcsin": lambda _, x: (np.arcsin(x), np.ones_like(x)),
    "arccos": lambda _, x: (np.arccos(x), np.ones_like(x)),
    "arctan": lambda _, x: (np.arctan(x), np.abs(np.arctan(x))),
    "lgamma": lambda _, x: (_lgamma(x), 1 + np.abs(_lgamma(x))),
}
_SLOPES: Final[Mapping[str, _Function]] = {
    "softplus_backward": _softplus_slope,
    "leaky_relu_backward": _leaky_relu_slope,
    "elu_backward": _elu_slope,
    "hardtanh_backward": _hardtanh_slope,
    "hardsigmoid_backward": lambda _, x: (np.where(np.abs(x) < 3, 1 / 6, 0.0), 1 / 6),
    "hardswish_backward": _hardswish_slope,
    "mish_backward": _mish_slope,
    "log_sigmoid_backward": lambda _, x: (sigmoid_of(-x), sigmoid_of(-x) * (1 + np.abs(x))),
}


@formula(*_FUNCTIONS)
def _forward(operation: Operation) -> Replayed | None:
    if operation.output:
        return None  # what is kept for the backward pass, in a form of the kernel's own
    value, size = _FUNCTIONS[operation.canonical](operation, widen(operation.inputs[0]))
    return rounded(operation, value, FUNCTION * roundoff(operation) * size)


@formula(*_SLOPES)
def _backward(operation: Operation) -> Replayed | None:
    """`g f'(x)`."""
    grad, x = (widen(array) for array in operation.inputs[:2])
    slope, size = _SLOPES[operation.canonical](operation, x)
    return rounded(operation, grad * slope, FUNCTION * roundoff(operation) * np.abs(grad) * size)


@formula("hardtanh")
def _hardtanh(operation: Operation) -> Replayed | None:
    low = argument(operation, "min_val", default=-1.0)
    high = argument(operation, "max_val", default=1.0)
    return exact(operation, np.clip(widen(operation.inputs[0]), low, high))


@formula("arctan2")
def _arctan2(operation: Operation) -> Replayed | None:
    value = np.arctan2(*operands(operation))
    return rounded(operation, value, FUNCTION * roundoff(operation) * np.abs(value))


@formula("logaddexp")
def _logaddexp(operation: Operation) -> Replayed | None:
    a, b = operands(operation)
    value = np.logaddexp(a, b)
    return rounded(operation, value, FUNCTION * roundoff(operation) * (1 + np.abs(value)))


@formula("_prelu_kernel")
def _prelu(operation: Operation) -> Replayed | None:
    x, weight = operands(operation)
    return rounded(operation, np.where(x > 0, x, weight * x))


@formula("_prelu_kernel_backward")
def _prelu_backward(operation: Operation) -> Replayed | None:
    """Gradients of the input and, element by element, of the weight."""
    grad, x, weight = operands(operation)
    if operation.output:
        return rounded(operation, np.where(x > 0, 0.0, x * grad))
    return rounded(operation, np.where(x > 0, grad, weight * grad))


@formula("glu")
def _glu(operation: Operation) -> Replayed | None:
    x, gate = _halves(operation, operation.inputs[0])
    size = (1 + np.abs(gate) / 2) * np.abs(x) * sigmoid_of(gate)
    return rounded(operation, x * sigmoid_of(gate), FUNCTION * roundoff(operation) * size)


@formula("glu_backward")
def _glu_backward(operation: Operation) -> Replayed | None:
    grad = widen(operation.inputs[0])
    x, gate = _halves(operation, operation.inputs[1])
    s = sigmoid_of(gate)
    parts = (grad * s, grad * x * s * (1 - s))
    sizes = (np.abs(parts[0]) * (1 + np.abs(gate) / 2), np.abs(grad * x) * s * (1 + np.abs(gate)))
    axis = int(argument(operation, "dim", default=-1))
    value, size = (np.concatenate(both, axis=axis) for both in (parts, sizes))
    return rounded(operation, value, FUNCTION * roundoff(operation) * size)


def _halves(operation: Operation, array: Any) -> list[Floats]:
    return np.split(widen(array), 2, axis=int(argument(operation, "dim", default=-1)))
