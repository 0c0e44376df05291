"""Float64 formulas of fused operations: products by expert, norms, rotary embedding, attention and
losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracediff.replayers.reference_operations import (
    FUNCTION,
    argument,
    formula,
    product,
    rounded,
    roundoff,
    widen,
)
from tracediff.replayers.reference_reductions import softmax_of
from tracediff.replayers.reference_rounding import ROUNDING, positive_sum, random_walk, together
from tracediff.replaying import Floats, Operation, Replayed


@formula("gather_matmul")
def _gather_matmul(operation: Operation) -> Replayed | None:
    """Rows times the matrix of their expert: by offsets (`_grouped_mm`) or by indices
    (`gather_mm`)."""
    rows, matrices = (widen(array) for array in operation.inputs[:2])
    if operation.op.startswith("aten"):
        if len(operation.inputs) != 3 or rows.ndim != 2:
            return None
        if matrices.ndim == 2:  # sums over the rows of each expert: gradients of its matrix
            ends = operation.inputs[2]
            parts = [slice(*ends_of) for ends_of in zip((0, *ends), ends, strict=False)]
            found = [product(operation, rows[:, part], matrices[part]) for part in parts]
            return rounded(operation, *(np.stack(each) for each in zip(*found, strict=True)))
        expert = np.searchsorted(operation.inputs[2], np.arange(len(rows)), side="right")
        value, spread = product(operation, rows[:, None, :], matrices[expert])
        return rounded(operation, value[:, 0], spread[:, 0])
    if operation.op != "mlx.gather_mm" or len(operation.inputs) != 3 or rows.shape[-2] != 1:
        return None
    chosen = operation.inputs[2].astype(np.int64)
    flat = rows.reshape(-1, *rows.shape[-2:])
    left = np.arange(len(flat)).reshape(rows.shape[:-2])
    value, spread = product(operation, flat[np.broadcast_to(left, chosen.shape)], matrices[chosen])
    return rounded(operation, value, spread)


@formula("rms_norm")
def _rms_norm(operation: Operation) -> Replayed | None:
    """`w x / sqrt(mean(x**2) + eps)`. Zhang and Sennrich, 2019, equation 4."""
    data = widen(operation.inputs[0])
    weight = widen(operation.inputs[1]) if len(operation.inputs) > 1 else 1.0
    eps = argument(operation, "eps")
    if eps is None or operation.output:
        return None
    value = weight * data / np.sqrt(np.mean(data**2, axis=-1, keepdims=True) + float(eps))
    unit = roundoff(operation)
    relative = positive_sum(unit, data.shape[-1]) / 2 + (FUNCTION + 2) * unit
    return rounded(operation, value, relative * np.abs(value))


@formula("layer_norm")
def _layer_norm(operation: Operation) -> Replayed | None:
    """`w (x - mu) / sqrt(var + eps) + b`; outputs 1 and 2 are mu and 1 / sqrt(var + eps). Ba, Kiros
    and Hinton, 2016; for the errors see `reference_norms.layer_norm`."""
    data, *rest = (widen(array) for array in operation.inputs)
    eps, unit = argument(operation, "eps"), roundoff(operation)
    if eps is None or len(argument(operation, "normalized_shape", default=[0])) != 1:
        return None
    weight = rest[0] if rest else 1.0
    bias = rest[1] if len(rest) > 1 else 0.0
    mean = data.mean(axis=-1, keepdims=True)
    centred = data - mean
    variance = np.mean(centred**2, axis=-1, keepdims=True) + float(eps)
    scale = 1 / np.sqrt(variance)
    sums = positive_sum(unit, data.shape[-1]) + unit
    of_mean = sums * np.mean(np.abs(data), axis=-1, keepdims=True)
    of_scale = sums * np.mean(data**2, axis=-1, keepdims=True) / variance / 2 + FUNCTION * unit
    if operation.output == 1:
        return rounded(operation, mean, of_mean)
    if operation.output == 2:
        return rounded(operation, scale, of_scale * scale)
    scaled = weight * centred * scale
    error = together(
        np.abs(weight * scale) * together(of_mean, unit * np.abs(data)),
        of_scale * np.abs(scaled),
    )
    return rounded(operation, scaled + bias, error)


@formula("rope")
def _rope(operation: Operation) -> Replayed | None:
    """Su et al., 2021, equation 34; for the errors see `reference_rope.rope`."""
    data, dims = widen(operation.inputs[0]), argument(operation, "dims")
    base, offset = argument(operation, "base"), argument(operation, "offset", default=0)
    if len(operation.inputs) != 1 or not isinstance(base, int | float):
        return None
    scale = float(argument(operation, "scale", default=1.0))
    exponents = np.arange(0, int(dims), 2, dtype=np.float64) / int(dims)
    positions = int(offset) + np.arange(data.shape[-2], dtype=np.float64)
    angles = scale * positions[:, None] * float(base) ** -exponents
    half = int(dims) // 2
    traditional = bool(argument(operation, "traditional", default=False))
    places = (
        (slice(0, int(dims), 2), slice(1, int(dims), 2))
        if traditional
        else (slice(0, half), slice(half, int(dims)))
    )
    first, second = data[..., places[0]], data[..., places[1]]
    value, spread = data.copy(), np.zeros_like(data)
    value[..., places[0]] = first * np.cos(angles) - second * np.sin(angles)
    value[..., places[1]] = second * np.cos(angles) + first * np.sin(angles)
    unit = roundoff(operation)
    error = np.abs(angles) * unit * (2 + exponents * math.log(float(base))) + FUNCTION * unit
    spread[..., places[0]] = spread[..., places[1]] = np.hypot(first, second) * error
    return rounded(operation, value, spread)


# ---- attention ----------------------------------------------------------------------------------


class Attention:
    """Scaled dot-product attention of one call: scores, probabilities, and what went into them.

    Queries are (..., heads, queries, dim), keys and values (..., key heads, keys, dim).
    """

    def __init__(self, operation: Operation, q: Any, k: Any, v: Any, mask: Any) -> None:
        self.q = q
        self.groups = q.shape[-3] // k.shape[-3]
        self.k, self.v = (np.repeat(x, self.groups, axis=-3) for x in (k, v))
        scale = argument(operation, "scale")
        self.scale = float(scale) if scale is not None else 1 / math.sqrt(q.shape[-1])
        products = q @ self.k.swapaxes(-1, -2)
        scores = products * self.scale
        rows, columns = scores.shape[-2:]
        named = argument(operation, "mask")
        if argument(operation, "is_causal", default=False) or named == "causal":
            shift = columns - rows if named == "causal" else 0  # bottom right, or top left
            hidden = np.triu(np.ones((rows, columns), bool), 1 + shift)
            scores = np.where(hidden, -np.inf, scores)
        if mask is not None:
            boolean = mask.dtype.kind == "b"
            scores = np.where(mask, scores, -np.inf) if boolean else scores + widen(mask)
        self.scores = scores
        self.blind = np.isneginf(scores).all(axis=-1, keepdims=True)
        """Queries that may see no key: zero, NaN, or the mean of the values."""
        self.p, shifted = softmax_of(scores, (-1,))
        self.unit = unit = roundoff(operation)
        length = q.shape[-1]
        squares = (q**2) @ (self.k**2).swapaxes(-1, -2)
        walk = random_walk(length, squares, products)
        small = np.minimum(np.where(np.isfinite(shifted), -shifted, 0.0), 100.0)
        steps = unit * (FUNCTION + small + math.sqrt(columns) / 3)
        self.of_p = together(self.scale * unit * np.sqrt(walk), steps) * self.p

    def pulled_back(self, grad: Floats, out: Floats, wrt: int) -> tuple[Floats, Floats]:
        """Gradient of queries (0), keys (1) or values (2) and its spread, with
        `dS = P (dP - sum(dO O))`. Dao et al., "FlashAttention", 2022, appendix B.2.

        Args:
            grad: Gradient of the output.
            out: The output.
        """
        if wrt == 2:
            turned, left, right = self.p.swapaxes(-1, -2), self.of_p.swapaxes(-1, -2), grad
        else:
            of_p = grad @ self.v.swapaxes(-1, -2)
            total = (grad * out).sum(axis=-1, keepdims=True)
            scores = self.scale * self.p * (of_p - total)
            around = np.sqrt((grad**2) @ (self.v**2).swapaxes(-1, -2))
            around = around * math.sqrt(self.q.shape[-1])
            error = self.scale * together(
                self.unit * self.p * (around + np.abs(total)), self.of_p * np.abs(of_p - total)
            )
            turned, left, right = scores, error, self.k
            if wrt == 1:
                turned, left, right = scores.swapaxes(-1, -2), error.swapaxes(-1, -2), self.q
        value = turned @ right
        size = np.sqrt((turned**2) @ (right**2))
        walk = self.unit * math.sqrt(self.p.shape[-1]) * size
        spread = together(np.sqrt((left**2) @ (right**2)), walk)
        if wrt and self.groups > 1:
            value = self.summed(value)
            spread = np.sqrt(self.summed(spread**2))
        return value, spread

    def summed(self, per_head: Floats) -> Floats:
        """Adds up the query heads that share a key head."""
        *batch, heads, rows, width = per_head.shape
        grouped = per_head.reshape(*batch, heads // self.groups, self.groups, rows, width)
        result: Floats = grouped.sum(axis=-3)
        return result


def mask_of(operation: Operation, place: int) -> NDArray[Any] | None:
    rest = operation.inputs[place:]
    return rest[0] if rest else None


@formula("attention")
def _attention(operation: Operation) -> Replayed | None:
    """`softmax(q k^T / sqrt(d) + mask) v`; output 1 is the logarithm of the softmax's denominator.
    Vaswani et al., 2017, equation 1."""
    if argument(operation, "dropout_p", default=0.0) or len(operation.inputs) > 4:
        return None
    q, k, v = (widen(array) for array in operation.inputs[:3])
    found = Attention(operation, q, k, v, mask_of(operation, 3))
    if operation.output == 1:
        top = found.scores.max(axis=-1)
        value = top + np.log(np.exp(found.scores - top[..., None]).sum(axis=-1))
        length = k.shape[-1] * k.shape[-2]
        error = roundoff(operation) * (length / 2 + np.abs(value))
        blind = found.blind[..., 0]
        return rounded(operation, np.where(blind, 0.0, value), np.where(blind, np.inf, error))
    value = found.p @ found.v
    common = positive_sum(roundoff(operation), k.shape[-2])
    squares = (found.p**2) @ (found.v**2)
    walk = roundoff(operation) * np.sqrt(random_walk(k.shape[-2], squares, value))
    error = together(np.sqrt((found.of_p**2) @ (found.v**2)), walk, common * np.abs(value))
    return rounded(
        operation, np.where(found.blind, 0.0, value), np.where(found.blind, np.inf, error)
    )


@formula("attention_backward")
def _attention_backward(operation: Operation) -> Replayed | None:
    """Gradients of queries, keys and values: outputs 0, 1, 2."""
    if len(operation.inputs) < 6 or argument(operation, "dropout_p", default=0.0):
        return None
    grad, q, k, v, out = (widen(array) for array in operation.inputs[:5])
    found = Attention(operation, q, k, v, mask_of(operation, 6))
    return rounded(operation, *found.pulled_back(grad, out, operation.output))


# ---- losses -------------------------------------------------------------------------------------

_MEAN, _SUM = 1, 2


@formula("nll_loss")
def _nll_loss(operation: Operation) -> Replayed | None:
    """Output 0 is minus the mean (1), the sum (2) or each (0) of the targets' log-probabilities,
    times the weight of their class if there is one; output 1 how much all targets weigh."""
    logs, targets = widen(operation.inputs[0]), operation.inputs[1].astype(np.int64)
    counted = targets != argument(operation, "ignore_index", default=-100)
    ids = np.where(counted, targets, 0)
    weights = counted.astype(np.float64)
    if len(operation.inputs) > 2:
        weights = weights * widen(operation.inputs[2])[ids]
    unit, count = roundoff(operation), max(1, int(counted.sum()))
    reduction = int(argument(operation, "reduction", default=_MEAN))
    if operation.output == 1 and reduction:  # of each, it is not filled
        return rounded(operation, weights.sum(), unit * math.sqrt(count) * weights.sum())
    if operation.output:
        return None
    chosen = np.take_along_axis(logs, ids[..., None], axis=-1)[..., 0]
    each = np.where(counted, -weights * chosen, 0.0)  # of one that is ignored, it may be infinite
    if reduction == 0:
        return rounded(operation, each)
    number = weights.sum() if reduction == _MEAN else 1
    value = each.sum() / number
    spread = unit * math.sqrt(count) * np.abs(each).sum() / number
    return rounded(operation, value, spread + ROUNDING * unit * abs(value))
