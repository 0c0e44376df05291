"""Float64 formulas of the gradients that PyTorch has as operations of their own."""

from __future__ import annotations

import math

import numpy as np

from tracediff.replayers.reference_operations import (
    FUNCTION,
    accumulated,
    argument,
    axes_of,
    exact,
    formula,
    rounded,
    roundoff,
    sigmoid_of,
    widen,
)
from tracediff.replayers.reference_rounding import together
from tracediff.replayers.reference_statistics import asked, centred_gradient, narrowing
from tracediff.replaying import Floats, Operation, Replayed


def _times(operation: Operation, grad: Floats, slope: Floats, size: Floats) -> Replayed:
    """`grad * slope`, where the terms of the slope add up to `size` in magnitude."""
    return rounded(operation, grad * slope, FUNCTION * roundoff(operation) * np.abs(grad) * size)


@formula("silu_backward")
def _silu_backward(operation: Operation) -> Replayed | None:
    grad, x = (widen(array) for array in operation.inputs)
    s = sigmoid_of(x)
    return _times(operation, grad, s * (1 + x * (1 - s)), s * (1 + np.abs(x)) * (1 + np.abs(x) / 2))


@formula("gelu_backward")
def _gelu_backward(operation: Operation) -> Replayed | None:
    grad, x = (widen(array) for array in operation.inputs)
    if argument(operation, "approximate", default="none") == "tanh":
        scale = math.sqrt(2 / math.pi)
        inner = np.tanh(scale * (x + 0.044715 * x**3))
        slope = 0.5 * (1 + inner) + 0.5 * x * (1 - inner**2) * scale * (1 + 3 * 0.044715 * x**2)
    else:
        cdf = 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))
        slope = cdf + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return _times(operation, grad, slope, 1 + x**2)


@formula("tanh_backward")
def _tanh_backward(operation: Operation) -> Replayed | None:
    grad, y = (widen(array) for array in operation.inputs)
    return _times(operation, grad, 1 - y**2, 1 + y**2)


@formula("sigmoid_backward")
def _sigmoid_backward(operation: Operation) -> Replayed | None:
    grad, y = (widen(array) for array in operation.inputs)
    return _times(operation, grad, y * (1 - y), np.abs(y))


@formula("relu_backward")
def _relu_backward(operation: Operation) -> Replayed | None:
    grad, x = (widen(array) for array in operation.inputs)
    return exact(
        operation, np.where(x > float(argument(operation, "threshold", default=0)), grad, 0)
    )


@formula("softmax_backward")
def _softmax_backward(operation: Operation) -> Replayed | None:
    """`p (g - sum(g p))`."""
    grad, p = (widen(array) for array in operation.inputs)
    axes = axes_of(operation, p.ndim)
    inner = (grad * p).sum(axis=axes, keepdims=True)
    length = math.prod(p.shape[axis] for axis in axes)
    squares = ((grad * p) ** 2).sum(axis=axes, keepdims=True)
    error = together(
        accumulated(operation, inner, squares, length),
        2 * roundoff(operation) * (np.abs(grad) + np.abs(inner)),
    )
    return rounded(operation, p * (grad - inner), p * error)


@formula("log_softmax_backward")
def _log_softmax_backward(operation: Operation) -> Replayed | None:
    """`g - exp(y) sum(g)`."""
    grad, y = (widen(array) for array in operation.inputs)
    axes = axes_of(operation, y.ndim)
    total = grad.sum(axis=axes, keepdims=True)
    p = np.exp(y)
    length = math.prod(y.shape[axis] for axis in axes)
    of_sum = accumulated(operation, total, (grad**2).sum(axis=axes, keepdims=True), length)
    of_exp = roundoff(operation) * (FUNCTION + np.abs(y)) * np.abs(total)
    return rounded(operation, grad - p * total, p * together(of_sum, of_exp))


@formula("layer_norm_backward")
def _layer_norm_backward(operation: Operation) -> Replayed | None:
    """Gradients of the input, the weight and the bias (outputs 0, 1, 2). With the normalised
    x and h = g w: `(h - mean(h) - x mean(h x)) / sigma`."""
    if len(argument(operation, "normalized_shape", default=[0])) != 1:
        return None
    grad, data, mean, scale = (widen(array) for array in operation.inputs[:4])
    weight = widen(operation.inputs[4]) if len(operation.inputs) > 4 else 1.0
    x = (data - mean) * scale
    unit, rows = roundoff(operation), tuple(range(grad.ndim - 1))
    off = unit * (np.abs(data) + np.abs(mean)) * scale
    which = asked(operation)
    if which:
        terms = grad * x if which == 1 else grad
        value = terms.sum(axis=rows)
        count = math.prod(grad.shape[:-1])
        error = together(
            accumulated(operation, value, (terms**2).sum(axis=rows), count) * narrowing(operation),
            np.sqrt(((off * grad) ** 2).sum(axis=rows)) * (which == 1),
        )
        return rounded(operation, value, error)
    value, error = centred_gradient(grad * weight, x, off, unit)
    return rounded(operation, value * scale, error * scale)


@formula("embedding_backward")
def _embedding_backward(operation: Operation) -> Replayed | None:
    """Adds the gradients of the rows that were looked up."""
    grad, ids = operation.inputs[:2]
    rows = int(argument(operation, "num_weights"))
    padding = int(argument(operation, "padding_idx", default=-1))
    flat, places = widen(grad).reshape(ids.size, -1), ids.reshape(-1).astype(np.int64)
    keep = places != padding if padding >= 0 else np.ones(places.size, bool)
    value, squares = (np.zeros((rows, flat.shape[1])) for _ in range(2))
    np.add.at(value, places[keep], flat[keep])
    np.add.at(squares, places[keep], flat[keep] ** 2)
    largest = int(np.bincount(places).max(initial=1))
    return rounded(operation, value, accumulated(operation, value, squares, largest))


@formula("nll_loss_backward")
def _nll_loss_backward(operation: Operation) -> Replayed | None:
    """`-g w / total` at the targets that count, zero elsewhere; w is the weight of the class, if
    there is one."""
    grad, logs, targets, *weights, total = operation.inputs
    ids = targets.astype(np.int64)
    counted = ids != argument(operation, "ignore_index", default=-100)
    ids = np.where(counted, ids, 0)
    value = np.zeros(logs.shape)
    each = -widen(grad) / (widen(total) if argument(operation, "reduction", default=1) == 1 else 1)
    if weights:
        each = each * widen(weights[0])[ids]
    chosen = np.broadcast_to(np.where(counted, each, 0.0), ids.shape)
    np.put_along_axis(value, ids[..., None], chosen[..., None], axis=-1)
    return rounded(operation, value, roundoff(operation) * np.abs(value) if weights else 0.0)


@formula("slice_backward")
def _slice_backward(operation: Operation) -> Replayed | None:
    grad = widen(operation.inputs[0])
    value = np.zeros([int(n) for n in argument(operation, "input_sizes")])
    where: list[slice | int] = [slice(None)] * value.ndim
    start, end, step = (argument(operation, name) for name in ("start", "end", "step"))
    index = argument(operation, "index")
    place = int(argument(operation, "dim", default=0))
    where[place] = slice(start, end, step) if index is None else int(index)
    value[tuple(where)] = grad
    return exact(operation, value)
