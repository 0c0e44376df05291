"""Vector-Jacobian products of matrix products and reductions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tracediff.replayers.reference_operations import (
    FUNCTION,
    accumulated,
    argument,
    axes_of,
    product,
    widen,
)
from tracediff.replayers.reference_rounding import together
from tracediff.replayers.reference_vjp import Part, given, part, reduced, rule, times
from tracediff.replaying import Floats, Use

# ---- products -----------------------------------------------------------------------------------


@rule("matmul")
def _matmul(use: Use, grad: Floats) -> Part | None:
    if use.operation.op.startswith(("aten.linear", "mlx.inner")):
        return None
    a, b = (widen(array) for array in use.operation.inputs)
    return _of_product(use, grad, a, b, use.place)


@rule("addmm")
def _addmm(use: Use, grad: Floats) -> Part | None:
    """Of `beta c + alpha a b`."""
    _, a, b = (widen(array) for array in use.operation.inputs)
    alpha, beta = (float(argument(use.operation, n, default=1)) for n in ("alpha", "beta"))
    if use.place == 0:
        return times(use, grad, beta)
    found = _of_product(use, grad, a, b, use.place - 1)
    return Part(alpha * found.value, abs(alpha) * found.error)


def _of_product(use: Use, grad: Floats, a: Floats, b: Floats, place: int) -> Part:
    """`da = g b^T`, `db = a^T g`, with vectors as rows (a) or columns (b)."""
    shape = (a, b)[place].shape
    if a.ndim == 1:
        a, grad = a[None], np.expand_dims(grad, -2 if b.ndim > 1 else 0)
    if b.ndim == 1:
        b, grad = b[:, None], grad[..., None]
    wanted = (a, b)[place].shape
    if place == 0:
        left, right = grad, b.swapaxes(-1, -2)
    elif b.ndim == 2:  # one product over all rows, as kernels compute it
        left, right = a.reshape(-1, a.shape[-1]).T, grad.reshape(-1, grad.shape[-1])
    else:
        left, right = a.swapaxes(-1, -2), grad
    found = reduced(use, Part(*product(use.operation, left, right)), wanted)
    return Part(found.value.reshape(shape), found.error.reshape(shape))


@rule("gather_matmul")
def _gather_matmul(use: Use, grad: Floats) -> Part | None:
    """Of rows times the matrix of their expert: to each row from its experts, to each matrix from
    its rows."""
    operation = use.operation
    if operation.op != "mlx.gather_mm" or len(operation.inputs) != 3 or use.place > 1:
        return None
    rows, matrices = (widen(array) for array in operation.inputs[:2])
    chosen = operation.inputs[2].astype(np.int64)
    places = np.arange(math.prod(rows.shape[:-2])).reshape(rows.shape[:-2])
    left = np.broadcast_to(places, chosen.shape).reshape(-1)
    flat, right = rows.reshape(-1, *rows.shape[-2:])[left], chosen.reshape(-1)
    back = grad.reshape(-1, *grad.shape[-2:])
    if use.place == 0:
        found = product(operation, back, matrices[right].swapaxes(-1, -2))
        return _scattered(use, *found, left)
    return _scattered(use, *product(operation, flat.swapaxes(-1, -2), back), right)


def _scattered(use: Use, value: Floats, error: Floats, places: Any) -> Part:
    """Adds up what goes to the same place along the first axis."""
    shape = use.operation.inputs[use.place].shape
    total, squares, errors = (np.zeros((math.prod(shape[:-2]), *shape[-2:])) for _ in range(3))
    np.add.at(total, places, value)
    np.add.at(squares, places, value**2)
    np.add.at(errors, places, error**2)
    most = int(np.bincount(places).max(initial=1))
    walk = accumulated(use.operation, total, squares, most)
    return Part(total.reshape(shape), together(walk, np.sqrt(errors)).reshape(shape))


# ---- reductions ---------------------------------------------------------------------------------


def restored(use: Use, reduced_array: Floats) -> Floats:
    """A reduced array with the dimensions that were summed over, of length one."""
    shape = list(use.operation.inputs[use.place].shape)
    for axis in axes_of(use.operation, len(shape)):
        shape[axis] = 1
    return reduced_array.reshape(shape)


@rule("sum", "mean")
def _sum(use: Use, grad: Floats) -> Part | None:
    x = given(use)
    count = math.prod(x.shape[axis] for axis in axes_of(use.operation, x.ndim))
    share = 1.0 if use.operation.canonical == "sum" else 1.0 / count
    return times(use, np.broadcast_to(restored(use, grad), x.shape), share)


@rule("max", "min")
def _extreme(use: Use, grad: Floats) -> Part | None:
    """To the largest; stacks differ in who gets how much of a tie."""
    x = given(use)
    axes = axes_of(use.operation, x.ndim)
    function = np.max if use.operation.canonical == "max" else np.min
    won = x == function(x, axis=axes, keepdims=True)
    back = np.where(won, restored(use, grad), 0.0)
    tied = won.sum(axis=axes, keepdims=True) > 1
    return part(back, np.where(tied, np.abs(back), 0.0))


@rule("norm")
def _norm(use: Use, grad: Floats) -> Part | None:
    x = given(use)
    if float(argument(use.operation, "ord", default=2)) != 2:
        return None
    axes = axes_of(use.operation, x.ndim)
    length = np.sqrt((x**2).sum(axis=axes, keepdims=True))
    steps = 2 * FUNCTION + math.sqrt(math.prod(x.shape[axis] for axis in axes))
    return times(use, restored(use, grad), x / length, steps)


@rule("cumsum")
def _cumsum(use: Use, grad: Floats) -> Part | None:
    operation, axis = use.operation, int(argument(use.operation, "dim", "axis", default=0))
    if argument(operation, "reverse") or argument(operation, "inclusive", default=True) is False:
        return None
    turned = np.flip(grad, axis)
    value = np.cumsum(turned, axis=axis)
    squares = np.cumsum(turned**2, axis=axis)
    error = accumulated(operation, value, squares, grad.shape[axis])
    return part(np.flip(value, axis), np.flip(error, axis))
