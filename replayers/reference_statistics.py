"""Variances, and the norms whose statistics are of channels or groups, with their gradients.

A norm is worked out on rows of what is normalised together: (rows, K). For the errors see
`reference_norms.layer_norm`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracediff.compare.figures import unit_roundoff
from tracediff.replayers.reference_operations import (
    FUNCTION,
    accumulated,
    argument,
    axes_of,
    formula,
    rounded,
    roundoff,
    widen,
)
from tracediff.replayers.reference_rounding import positive_sum, together
from tracediff.replaying import Floats, Operation, Replayed


@formula("var", "std")
def _variance(operation: Operation) -> Replayed | None:
    """`sum (x - mean)**2 / (n - c)`, with c = 1 in PyTorch and 0 in MLX by default, or its root."""
    data = widen(operation.inputs[0])
    axes = axes_of(operation, data.ndim)
    keep = bool(argument(operation, "keepdim", "keepdims", default=False))
    count = math.prod(data.shape[axis] for axis in axes)
    usual = 0 if operation.op.startswith("mlx") or operation.args.get("unbiased") is False else 1
    terms = max(count - float(argument(operation, "correction", "ddof", default=usual)), 0.0)
    value = data.var(axis=axes, keepdims=keep) * count / terms
    # Some kernels take it as `E x**2 - mean**2`.
    squares = (data**2).mean(axis=axes, keepdims=keep) * count / terms
    error = (positive_sum(roundoff(operation), count) + 2 * roundoff(operation)) * squares
    if operation.canonical == "var":
        return rounded(operation, value, error)
    root = np.sqrt(value)
    return rounded(operation, root, error / (2 * root) + FUNCTION * roundoff(operation) * root)


# ---- norms --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """What is normalised, by rows.

    Attributes:
        lay: Lays an array of the input's shape out in rows.
        back: Undoes that.
        spread: Gives one number per channel to each element, in rows.
        channels: Sums over all but the channels of what lies in rows.
    """

    lay: Callable[[Any], Floats]
    back: Callable[[Any], Floats]
    spread: Callable[[Any], Floats]
    channels: Callable[[Any], Floats]


def _by_channel(shape: tuple[int, ...]) -> Rows:
    """Rows of all that a channel, the second dimension, has in a batch."""
    turned = (shape[1], shape[0], *shape[2:])

    def lay(x: Any) -> Floats:
        return np.asarray(np.swapaxes(x, 0, 1).reshape(shape[1], -1))

    return Rows(
        lay=lay,
        back=lambda rows: np.swapaxes(rows.reshape(turned), 0, 1),
        spread=lambda each: np.asarray(each).reshape(shape[1], 1),
        channels=lambda rows: rows.sum(axis=1),
    )


def _by_group(shape: tuple[int, ...], groups: int) -> Rows:
    """Rows of all that a group of channels has in a sample."""
    count = shape[0] * groups
    per_channel = math.prod(shape[2:])

    def spread(each: Any) -> Floats:
        whole = np.repeat(np.asarray(each).reshape(shape[1]), per_channel)
        return np.tile(whole.reshape(groups, -1), (shape[0], 1))

    return Rows(
        lay=lambda x: np.asarray(x).reshape(count, -1),
        back=lambda rows: rows.reshape(shape),
        spread=spread,
        channels=lambda rows: rows.reshape(shape[0], shape[1], -1).sum(axis=(0, 2)),
    )


def _normed(
    operation: Operation, rows: Rows, data: Floats, weight: Any, bias: Any, eps: float
) -> Replayed | None:
    """`w (x - mu) / sqrt(var + eps) + b`; outputs 1 and 2 are mu and 1 / sqrt(var + eps)."""
    x, unit = rows.lay(data), roundoff(operation)
    mean = x.mean(axis=1, keepdims=True)
    variance = np.mean((x - mean) ** 2, axis=1, keepdims=True) + eps
    scale = 1 / np.sqrt(variance)
    sums = positive_sum(unit, x.shape[1]) + unit
    of_mean = sums * np.mean(np.abs(x), axis=1, keepdims=True)
    of_scale = sums * np.mean(x**2, axis=1, keepdims=True) / variance / 2 + FUNCTION * unit
    if operation.output:
        found = (mean, of_mean) if operation.output == 1 else (scale, of_scale * scale)
        return rounded(operation, *(each.reshape(operation.shape) for each in found))
    return _scaled(operation, rows, data, (mean, of_mean), (scale, of_scale), weight, bias)


def _scaled(
    operation: Operation, rows: Rows, data: Floats, mean: Any, scale: Any, weight: Any, bias: Any
) -> Replayed:
    """`w (x - mu) s + b`.

    Args:
        mean, scale: Each with its error: of the mean as it is, of the scale relative to it.
    """
    x = rows.lay(data)
    gain = scale[0] * (1.0 if weight is None else rows.spread(weight))
    scaled = gain * (x - mean[0])
    error = together(
        np.abs(gain) * together(mean[1], roundoff(operation) * np.abs(x)),
        scale[1] * np.abs(scaled),
    )
    value = scaled + (0.0 if bias is None else rows.spread(bias))
    return rounded(operation, rows.back(value), rows.back(error))


@formula("group_norm")
def _group_norm(operation: Operation) -> Replayed | None:
    """Wu and He, "Group normalization", 2018."""
    data, *rest = (widen(array) for array in operation.inputs)
    weight, bias = (*rest, None, None)[:2]
    rows = _by_group(data.shape, int(operation.args["group"]))
    return _normed(operation, rows, data, weight, bias, float(operation.args["eps"]))


@formula("batch_norm")
def _batch_norm(operation: Operation) -> Replayed | None:
    """Ioffe and Szegedy, "Batch normalization", 2015. Of a call with two more tensors in training
    it is not on record whether they are weight and bias or the running statistics."""
    data, *rest = (widen(array) for array in operation.inputs)
    weight, bias = rest[:2] if len(rest) == 4 else (None, None)
    rows, eps = _by_channel(data.shape), float(operation.args["eps"])
    if operation.args["training"]:
        return _normed(operation, rows, data, weight, bias, eps) if len(rest) in (0, 4) else None
    if len(rest) not in (2, 4) or operation.output:
        return None
    mean, variance = (each.reshape(-1, 1) for each in rest[-2:])
    unit = roundoff(operation)
    scale = 1 / np.sqrt(variance + eps), (FUNCTION + 1) * unit
    return _scaled(operation, rows, data, (mean, unit * np.abs(mean)), scale, weight, bias)


@formula("native_group_norm_backward")
def _group_norm_backward(operation: Operation) -> Replayed | None:
    grad, data, mean, scale, *rest = (widen(array) for array in operation.inputs)
    rows = _by_group(data.shape, int(operation.args["group"]))
    return _differentiated(operation, rows, grad, data, mean, scale, rest[0] if rest else None)


@formula("native_batch_norm_backward")
def _batch_norm_backward(operation: Operation) -> Replayed | None:
    """What is given besides: the weight if there is one, running statistics likewise, and those of
    the batch, which are empty in evaluation."""
    grad, data, *rest = (widen(array) for array in operation.inputs)
    weight = rest[0] if len(rest) in (3, 5) else None
    mean, scale = rest[-2:]
    training = bool(operation.args["train"])
    if not training:
        mean, scale = rest[-4], 1 / np.sqrt(rest[-3] + float(operation.args["eps"]))
    rows = _by_channel(data.shape)
    return _differentiated(operation, rows, grad, data, mean, scale, weight, own=training)


def _differentiated(
    operation: Operation,
    rows: Rows,
    grad: Floats,
    data: Floats,
    mean: Floats,
    scale: Floats,
    weight: Floats | None,
    own: bool = True,
) -> Replayed | None:
    """Gradients of the input, the weight and the bias.

    Args:
        own: Whether mean and scale are those of the input itself.
    """
    which = asked(operation)
    g, x = rows.lay(grad), rows.lay(data)
    mean, scale = mean.reshape(-1, 1), scale.reshape(-1, 1)
    normed, unit = (x - mean) * scale, roundoff(operation)
    off = unit * (np.abs(x) + np.abs(mean)) * scale  # of the normalised value
    if which:
        terms = g * normed if which == 1 else g
        value, squares = rows.channels(terms), rows.channels(terms**2)
        walk = accumulated(operation, value, squares, terms.size // value.size)
        walk = walk * narrowing(operation)
        error = np.sqrt(rows.channels((off * g) ** 2)) if which == 1 else 0.0
        return rounded(operation, value, together(walk, np.asarray(error)))
    h = g * (1.0 if weight is None else rows.spread(weight))
    value, error = centred_gradient(h, normed, off, unit) if own else (h, 2 * unit * np.abs(h))
    return rounded(operation, rows.back(scale * value), rows.back(scale * error))


def asked(operation: Operation) -> int:
    """Which of the gradients an output is: those that are not asked for are no outputs."""
    mask = argument(operation, "output_mask")
    if mask is None:
        return operation.output
    return [place for place, wanted in enumerate(mask) if wanted][operation.output]


def narrowing(operation: Operation) -> float:
    """How much more a sum errs that a kernel keeps in the type of what it adds up: under autocast
    PyTorch does so with the gradients of weights that are wider."""
    types = [x.dtype.name for x in operation.inputs[:2] if x.dtype.kind not in "iub"]
    return max(1.0, *(unit_roundoff(name) / roundoff(operation) for name in types))


def centred_gradient(h: Floats, x: Floats, off: Floats, unit: float) -> tuple[Floats, Floats]:
    """`h - mean(h) - x mean(h x)` over the last dimension, and its error.

    Args:
        h: Gradient of the normalised value.
        x: The normalised value.
        off: Its error.
        unit: Unit roundoff of the arithmetic.
    """
    first = h.mean(axis=-1, keepdims=True)
    second = (h * x).mean(axis=-1, keepdims=True)
    sums = np.sqrt((h**2).mean(axis=-1, keepdims=True) / 3)
    cross = np.sqrt(((h * x) ** 2).mean(axis=-1, keepdims=True) / 3)
    size = 2 * np.abs(h) + np.abs(first) + 3 * np.abs(x * second) + sums + np.abs(x) * cross
    return h - first - x * second, unit * size + off * np.abs(second)
