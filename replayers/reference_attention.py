"""Scaled dot-product attention, from queries and keys as they are after rotation."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.replayers.reference_rounding import (
    ROUNDING,
    arithmetic,
    is_narrow,
    positive_sum,
    random_walk,
    storage,
    stored,
    wide,
)
from tracediff.replaying import Call, Floats, Replayed

_HIDDEN: Final = -1e30
"""Score of a key that may not be seen; a row that sees none is averaged over all, as stacks do."""

_SCORE_STORES: Final = 3
"""16-bit implementations store the product, the scaled product and its sum with the mask."""


def attention(call: Call) -> Replayed | None:
    """`softmax(s Q K^T + mask) V`. Vaswani et al., "Attention is all you need", 2017, equation 1;
    each key-value head serves as many query heads as there are of them to one (Ainslie et al.,
    "GQA", 2023).

    A score's error e_ij moves the output by `P_ij e_ij (v_j - o_i)`: the derivative of softmax.
    With all e_ij independent the variance is `sum_j P_ij**2 var(e_ij) (v_j - o_i)**2`. To this
    come the product with V, and in 16 bits the storing of the weights, normalised or not.

    Args:
        call: `in` (batch, heads, queries, head_dim), `key` and `value` (batch, key-value heads,
            keys, head_dim), and `mask`, broadcastable to (batch, heads, queries, keys): boolean,
            True where a key may be seen, or added to the scores. Setting: `scale`.

    Returns:
        Of shape (batch, queries, heads * head_dim), as the output projection is given it.
    """
    query, key, value = (wide(call.inputs[port]) for port in ("in", "key", "value"))
    scale, groups = float(call.settings["scale"]), query.shape[1] // key.shape[1]
    key, value = (np.repeat(array, groups, axis=1) for array in (key, value))
    roundoff, length = arithmetic(call), key.shape[-2]
    scores = scale * query @ key.swapaxes(-1, -2)
    if call.value_only:
        out = _joined(_weights(_masked(scores, call.inputs["mask"]))[0] @ value)
        return Replayed(out, np.broadcast_to(np.zeros(()), out.shape), "attention")
    squares = scale**2 * query**2 @ key.swapaxes(-1, -2) ** 2
    error = roundoff**2 * random_walk(query.shape[-1], squares, scores)
    cut = float(call.settings["operand_roundoff"])
    error += 2 * (ROUNDING * cut) ** 2 * squares
    if is_narrow(call):
        error += (ROUNDING * storage(call)) ** 2 * (_SCORE_STORES * scores**2 + squares)
    scores = _masked(scores, call.inputs["mask"])
    weights, below = _weights(scores)
    error += roundoff**2 * (2 + np.minimum(below, 1e3)) ** 2  # exp, and its argument
    out = weights @ value
    variance = _through_softmax(weights**2 * error, value, out)
    terms = weights**2 @ value**2
    variance += roundoff**2 * random_walk(length, terms, out)
    variance += ((positive_sum(roundoff, length) + 4 * ROUNDING * roundoff) * out) ** 2
    variance += 2 * (ROUNDING * cut) ** 2 * terms
    if is_narrow(call):
        variance += 2 * (ROUNDING * storage(call)) ** 2 * terms
    spread = np.sqrt(variance + stored(call, out, 2 if is_narrow(call) else 1) ** 2)
    name = f"attention K={query.shape[-1]} over {length} keys {call.dtype}"
    return Replayed(_joined(out), _joined(spread), name)


def _masked(scores: Floats, mask: NDArray[Any]) -> Floats:
    if mask.dtype.kind == "b":
        return np.where(mask, scores, _HIDDEN)
    return np.maximum(scores + np.maximum(wide(mask), _HIDDEN), _HIDDEN)


def _weights(scores: Floats) -> tuple[Floats, Floats]:
    """The softmax of scores, and how far each is below the largest of its row."""
    below = scores.max(axis=-1, keepdims=True) - scores
    weights = np.exp(-below)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights, below


def _through_softmax(moved: Floats, value: Floats, out: Floats) -> Floats:
    """`sum_j moved_ij (v_j - o_i)**2`."""
    total = moved.sum(axis=-1, keepdims=True)
    found: Floats = np.maximum(moved @ value**2 - 2 * out * (moved @ value) + total * out**2, 0.0)
    return found


def _joined(heads: Floats) -> Floats:
    """(batch, heads, queries, head_dim) -> (batch, queries, heads * head_dim)."""
    batch, _, queries, _ = heads.shape
    return heads.swapaxes(1, 2).reshape(batch, queries, -1)
