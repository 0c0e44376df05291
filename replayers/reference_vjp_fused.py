"""Vector-Jacobian products of fused operations: norms, rotary embedding, softmax, attention."""

from __future__ import annotations

import math

import numpy as np

from tracediff.replayers import reference_gradients as gradients
from tracediff.replayers.reference_fused import Attention, mask_of
from tracediff.replayers.reference_operations import (
    FUNCTION,
    accumulated,
    argument,
    axes_of,
    roundoff,
    widen,
)
from tracediff.replayers.reference_reductions import softmax_of
from tracediff.replayers.reference_rounding import together
from tracediff.replayers.reference_vjp import Part, given, part, rule
from tracediff.replayers.reference_vjp_products import restored
from tracediff.replaying import Call, Floats, Use


@rule("rms_norm")
def _rms_norm(use: Use, grad: Floats) -> Part | None:
    return _of_module(use, grad, gradients.rms_norm, ("in", "weight"))


@rule("layer_norm")
def _layer_norm(use: Use, grad: Floats) -> Part | None:
    return _of_module(use, grad, gradients.layer_norm, ("in", "weight", "bias"))


@rule("rope")
def _rope(use: Use, grad: Floats) -> Part | None:
    if len(use.operation.inputs) != 1 or not argument(use.operation, "base"):
        return None
    return _of_module(use, grad, gradients.rotary, ("in",))


def _of_module(
    use: Use, grad: Floats, gradient: gradients.Gradient, ports: tuple[str, ...]
) -> Part | None:
    """By the formula of the module that computes the same."""
    operation = use.operation
    named = dict(zip(ports, operation.inputs, strict=False))
    call = Call(
        op=operation.canonical,
        inputs={"in": named.pop("in")},
        params=named,
        settings=operation.args,
        dtype=operation.dtype,
    )
    found = gradient(call, grad, ports[use.place])
    return None if found is None else Part(found.value, found.spread)


# ---- softmax ------------------------------------------------------------------------------------


def _softmax(use: Use) -> tuple[Floats, Floats, tuple[int, ...]]:
    """Softmax of the input, the relative spread of its elements, and its dimensions."""
    x = given(use)
    axes = axes_of(use.operation, x.ndim)
    p, shifted = softmax_of(x, axes)
    length = math.prod(x.shape[axis] for axis in axes)
    small = np.minimum(np.where(np.isfinite(shifted), -shifted, 0.0), 100.0)
    return p, roundoff(use.operation) * (FUNCTION + small + math.sqrt(length) / 3), axes


@rule("softmax")
def _softmax_back(use: Use, grad: Floats) -> Part | None:
    """`p (g - sum(g p))`."""
    p, relative, axes = _softmax(use)
    inner = (grad * p).sum(axis=axes, keepdims=True)
    squares = ((grad * p) ** 2).sum(axis=axes, keepdims=True)
    length = math.prod(p.shape[axis] for axis in axes)
    of_inner = together(
        accumulated(use.operation, inner, squares, length),
        np.sqrt(((grad * p * relative) ** 2).sum(axis=axes, keepdims=True)),
    )
    of_terms = 2 * roundoff(use.operation) * (np.abs(grad) + np.abs(inner))
    error = p * together(of_inner, of_terms, relative * np.abs(grad - inner))
    return part(p * (grad - inner), error)


@rule("log_softmax")
def _log_softmax_back(use: Use, grad: Floats) -> Part | None:
    """`g - p sum(g)`."""
    p, relative, axes = _softmax(use)
    total = grad.sum(axis=axes, keepdims=True)
    squares = (grad**2).sum(axis=axes, keepdims=True)
    length = math.prod(p.shape[axis] for axis in axes)
    of_sum = accumulated(use.operation, total, squares, length)
    return part(grad - p * total, p * together(of_sum, relative * np.abs(total)))


@rule("logsumexp")
def _logsumexp_back(use: Use, grad: Floats) -> Part | None:
    """`g p`; `exp(x - y)` errs by the rounding of y as well."""
    p, relative, axes = _softmax(use)
    top = np.abs(given(use)).max(axis=axes, keepdims=True)
    back = restored(use, grad)
    of_result = roundoff(use.operation) * top
    return part(back * p, np.abs(back) * p * together(relative, of_result))


# ---- attention ----------------------------------------------------------------------------------


@rule("attention")
def _attention_back(use: Use, grad: Floats) -> Part | None:
    operation = use.operation
    if argument(operation, "dropout_p", default=0.0) or len(operation.inputs) > 4 or use.place > 2:
        return None
    q, k, v = (widen(array) for array in operation.inputs[:3])
    found = Attention(operation, q, k, v, mask_of(operation, 3))
    return Part(*found.pulled_back(grad, found.p @ found.v, use.place))


@rule("nll_loss")
def _nll_loss_back(use: Use, grad: Floats) -> Part | None:
    """`-g / count` at the targets that count."""
    operation = use.operation
    if len(operation.inputs) != 2 or use.place != 0:
        return None
    logs, ids = given(use), operation.inputs[1].astype(np.int64)
    counted = ids != argument(operation, "ignore_index", default=-100)
    mean = int(argument(operation, "reduction", default=1)) == 1
    each = np.broadcast_to(-grad / (counted.sum() if mean else 1), ids.shape)
    value = np.zeros(logs.shape)
    chosen = np.where(counted, each, 0.0)[..., None]
    np.put_along_axis(value, np.where(counted, ids, 0)[..., None], chosen, axis=-1)
    return part(value, roundoff(operation) * np.abs(value))
