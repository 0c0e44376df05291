"""Sparse mixtures of experts, from their input and all their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.replayers.reference_elementwise import silu
from tracediff.replayers.reference_functions import sigmoid
from tracediff.replayers.reference_products import product
from tracediff.replayers.reference_rounding import (
    LARGEST,
    ROUNDING,
    arithmetic,
    is_narrow,
    positive_sum,
    random_walk,
    storage,
    stored,
    together,
    wide,
)
from tracediff.replaying import Call, Floats, Replayed

Array = NDArray[Any]
Weights = tuple[Array, Array, Array]
"""Gate, up and down projection of all experts, (experts, out, in) each."""

_JOINED: Final = "experts.gate_up_proj"
_PARTS: Final = (f"{_JOINED}[gate_proj]", f"{_JOINED}[up_proj]")
_DOWN: Final = "experts.down_proj"
_APART: Final = tuple(f"switch_mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
_ROUTER: Final = "gate.weight"

ROUTED: Final = ("in.top_k_index", "in.top_k_weights")
"""Ports at which a module of experts is given its router's choice."""

_STORED_SHARES: Final = 2
"""16-bit implementations store the weight of an expert before and after it is normalised."""


def sparse_moe(call: Call) -> Replayed | None:
    """`sum_j w_j E_j(x)` over the k experts of the largest router logits, w their softmax,
    normalised over these k or over all experts. Shazeer et al., "Outrageously large neural
    networks", 2017, equations 1 and 3; each expert is `(silu(x G^T) * (x U^T)) D^T` (Shazeer, "GLU
    variants improve transformer", 2020, equation 6).

    A logit's error e_i moves the output by `p_i e_i (E_i - y)`, where E_i is zero if the expert is
    not chosen, and p is the softmax over those that it is normalised over. Where a logit is as near
    to the last that is chosen as rounding may bring it, the choice is open, and the output may move
    by what the expert adds to it.

    Args:
        call: `in` (..., hidden); the router's and the experts' weights, as transformers or mlx-lm
            name them. Settings of the configuration: `num_experts_per_tok`, `norm_topk_prob`.
    """
    weights, count = _experts(call.params), call.settings.get("config.num_experts_per_tok")
    normalised = call.settings.get("config.norm_topk_prob")
    if weights is None or not isinstance(normalised, bool) or not isinstance(count, int):
        return None
    if call.settings.get("config.hidden_act", "silu") != "silu":
        return None
    x = call.inputs["in"]
    rows, router = x.reshape(-1, x.shape[-1]), call.params[_ROUTER]
    if not 0 < count < len(router) or router.shape[-1] != rows.shape[-1]:
        return None
    routing = _route(call, rows, router, count, normalised)
    value, spread = _mixed(call, rows, weights, routing)
    derivation = f"{count} of {len(router)} experts, K={x.shape[-1]} {call.dtype}"
    return Replayed(value.reshape(x.shape), spread.reshape(x.shape), derivation)


def routed_experts(call: Call) -> Replayed | None:
    """`sum_j w_j E_j(x)` over the experts that a router chose, with its weights: transformers' own
    modules of experts, see `sparse_moe`.

    Args:
        call: `in` (rows, hidden), `in.top_k_index` and `in.top_k_weights` (rows, k), the weights of
            all experts.
    """
    x, chosen, shares = (call.inputs[name] for name in ("in", *ROUTED))
    weights = _projections(call.params)
    if weights is None or call.settings.get("config.hidden_act", "silu") != "silu":
        return None
    fits = x.ndim == 2 and chosen.shape == shares.shape and len(chosen) == len(x)
    count = len(weights[0])
    if not fits or chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() >= count:
        return None
    share = np.zeros((len(x), count))
    np.put_along_axis(share, chosen.astype(np.int64), wide(shares), axis=-1)
    settled = np.zeros_like(share)
    value, spread = _mixed(call, x, weights, _Routing(share, settled, settled))
    return Replayed(value, spread, f"{chosen.shape[-1]} of {count} experts, {call.dtype}")


# ---- routing -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Routing:
    """Which experts rows go to, (rows, experts) each.

    Attributes:
        share: Weight of an expert in the sum, zero where it is not chosen.
        moved: What an error of its logit moves the output by, over `E_i - y`: in one spread.
        open: What it adds if rounding has it chosen, or takes if not, where that may be: else zero.
    """

    share: Floats
    moved: Floats
    open: Floats


def _route(call: Call, rows: Array, router: Array, count: int, normalised: bool) -> _Routing:
    logits, error = product(call, rows, router.T)
    error = together(error, stored(call, logits))
    order = np.argsort(-logits, axis=-1, kind="stable")
    chosen = np.zeros(logits.shape, bool)
    np.put_along_axis(chosen, order[:, :count], True, axis=-1)
    below = logits.max(axis=-1, keepdims=True) - logits
    parts = np.exp(-below)
    total = np.where(chosen, parts, 0.0) if normalised else parts
    parts /= total.sum(axis=-1, keepdims=True)
    taken = np.where(chosen, parts, 0.0)
    of_exp = arithmetic(call) * (2 + np.minimum(below, 1e3))
    moved = (taken if normalised else parts) * together(error, of_exp)
    return _Routing(taken, moved, np.where(_is_open(logits, error, order, count), parts, 0.0))


def _is_open(logits: Floats, error: Floats, order: Array, count: int) -> NDArray[np.bool_]:
    """Experts that rounding may have chosen, or not, in the place of others."""

    def at(array: Floats, place: int) -> Floats:
        return np.take_along_axis(array, order[:, place, None], axis=-1)

    chosen = logits >= at(logits, count - 1)
    nearest = np.where(chosen, at(logits, count), at(logits, count - 1))
    of_nearest = np.where(chosen, at(error, count), at(error, count - 1))
    found: NDArray[np.bool_] = np.abs(logits - nearest) <= LARGEST * together(error, of_nearest)
    return found


# ---- experts -------------------------------------------------------------------------------------


def _mixed(call: Call, rows: Array, weights: Weights, routing: _Routing) -> tuple[Floats, Floats]:
    """The sum over experts, and its spread."""
    value = np.zeros((len(rows), weights[2].shape[1]))
    own, opened, terms = (np.zeros_like(value) for _ in range(3))
    once, twice = np.zeros_like(value), np.zeros_like(value)
    for index, places in _used(routing):
        out, error = _expert(call, rows[places], [matrix[index] for matrix in weights])
        share, moved = (array[places, index, None] for array in (routing.share, routing.moved))
        value[places] += share * out
        own[places] += (share * error) ** 2
        terms[places] += (share * out) ** 2
        chosen = out * (share > 0)
        once[places] += moved**2 * chosen
        twice[places] += (moved * chosen) ** 2
        opened[places] += routing.open[places, index, None] * np.abs(out)
    if call.value_only:
        return value, np.broadcast_to(np.zeros(()), value.shape)
    # The sum over i of `moved_i**2 (E_i - y)**2`.
    total = np.square(routing.moved).sum(axis=-1, keepdims=True)
    variance = own + np.maximum(twice - 2 * value * once + total * value**2, 0.0)
    variance += _summed(call, value, terms, routing)
    return value, together(np.sqrt(variance), stored(call, value), opened)


def _summed(call: Call, value: Floats, terms: Floats, routing: _Routing) -> Floats:
    """Variance of normalising the weights, of the products with them, and of their sum, which
    16-bit implementations may store after each term: a random walk, as in `product`."""
    length, roundoff = int((routing.share[0] > 0).sum()), storage(call)
    stores = 1 + (_STORED_SHARES if is_narrow(call) else 1)
    variance = roundoff**2 * (random_walk(length, terms, value) + stores * terms / 3)
    common = positive_sum(arithmetic(call), routing.share.shape[-1]) + 2 * ROUNDING * roundoff
    return variance + (common * value) ** 2


def _used(routing: _Routing) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Each expert that is chosen, or may be, and the rows it is for."""
    used = (routing.share > 0) | (routing.open > 0)
    for index in np.flatnonzero(used.any(axis=0)):
        yield int(index), np.flatnonzero(used[:, index])


def _expert(call: Call, x: Array, weights: Sequence[Array]) -> tuple[Floats, Floats]:
    """`(silu(x G^T) * (x U^T)) D^T`, and its spread: each product is stored."""
    gate, of_gate = _product(call, x, weights[0])
    up, of_up = _product(call, x, weights[1])
    active = silu(replace(call, inputs={"in": gate}))
    hidden = active.value * up
    out, spread = _product(call, hidden, weights[2])
    if call.value_only:
        return out, spread
    logistic = sigmoid(gate)
    slope = logistic * (1 + gate * (1 - logistic))
    error = together(active.spread * up, slope * of_gate * up, active.value * of_up)
    error = together(error, stored(call, hidden))
    return out, together(spread, np.sqrt(error**2 @ wide(weights[2]).T ** 2))


def _product(call: Call, x: Array, weight: Array) -> tuple[Floats, Floats]:
    value, spread = product(call, x, weight.T)
    return value, spread if call.value_only else together(spread, stored(call, value))


def _experts(params: Mapping[str, Array]) -> Weights | None:
    """Weights of all experts; None where there are others, or some of another shape."""
    found = None
    if set(params) == {_ROUTER, *_APART}:
        found = tuple(params[name] for name in _APART)
    elif {_ROUTER, _DOWN} <= set(params) <= {_ROUTER, _DOWN, _JOINED, *_PARTS}:
        found = (*(_taken_apart(params) or ()), params[_DOWN])
    if found is None or len(found) != 3 or found[0].ndim != 3:
        return None
    gate, up, down = found
    count, width, hidden = gate.shape
    fits = up.shape == gate.shape and down.shape == (count, hidden, width)
    return (gate, up, down) if fits and params[_ROUTER].shape == (count, hidden) else None


def _projections(params: Mapping[str, Array]) -> Weights | None:
    """Weights of all experts, from a module that has no others."""
    stem = "experts."
    held = {f"{stem}{name}": array for name, array in params.items()}
    apart, down = _taken_apart(held), held.get(_DOWN)
    if apart is None or down is None or not set(held) <= {_DOWN, _JOINED, *_PARTS}:
        return None
    count, width, hidden = apart[0].shape
    return (*apart, down) if down.shape == (count, hidden, width) else None


def _taken_apart(params: Mapping[str, Array]) -> tuple[Array, Array] | None:
    """Gate and up projection, which transformers joins; where an alignment has taken them apart, it
    is the parts that are paired, and they have to be those of what is joined."""
    joined = params.get(_JOINED)
    if any(name in params for name in _PARTS):
        parts = [params[name] for name in _PARTS if name in params]
        same = joined is None or np.array_equal(joined, np.concatenate(parts, axis=1))
        return (parts[0], parts[1]) if len(parts) == 2 and same else None
    if joined is None or joined.ndim != 3 or joined.shape[1] % 2:
        return None
    gate, up = np.split(joined, 2, axis=1)
    return gate, up
