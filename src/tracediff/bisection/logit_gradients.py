"""The gradient of the logits, held to that of a mean or sum of cross-entropies.

It is `c (softmax(z) - onehot(y))` at every position that counts and zero elsewhere. The labels are
where it is negative; the factor c, which a loss may be scaled with, is the one that fits all
positions best. Where the two sides have other labels or another factor, it is not for this rule to
say which is right: the loss is held to its own logits elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.held import Finding, finding, held
from tracediff.bisection.trial import Side
from tracediff.compare.figures import unit_roundoff
from tracediff.events import Event
from tracediff.replaying import Call, Floats, Replayer

_ELEMENTS: Final = 1 << 22
"""Logits that are looked at; of more, those of the positions that are furthest apart."""

_SAME_FACTOR: Final = 64.0
"""Units of roundoff by which the two factors may differ: each is fitted, and rounded."""

_NAME: Final = "gradient of cross_entropy in"


@dataclass(frozen=True, slots=True)
class _Fit:
    side: Side
    factor: float


def rule(
    events: tuple[Event, Event],
    logits: tuple[NDArray[Any], NDArray[Any]],
    values: tuple[NDArray[Any], NDArray[Any]],
    reference: Replayer,
) -> Finding | None:
    """Rules on a pair of gradients of logits; None where they are not of a cross-entropy.

    Args:
        events: The gradients.
        logits, values: Logits and gradients of both sides (..., V), in one layout.
    """
    flat = [_rows(array) for array in (*logits, *values)]
    if len({array.shape for array in flat}) != 1:
        return None
    z, g = flat[:2], [array.astype(np.float64) for array in flat[2:]]
    counted = g[0].any(axis=-1)
    labels = [each.argmin(axis=-1) for each in g]
    if not counted.any() or not np.array_equal(counted, g[1].any(axis=-1)):
        return None
    if not np.array_equal(labels[0][counted], labels[1][counted]):
        return None
    rows = _looked_at(np.flatnonzero(counted), g)
    found = [
        _fitted(reference, event.dtype, zs[rows], gs[rows], labels[0][rows])
        for event, zs, gs in zip(events, z, g, strict=True)
    ]
    a, b = found
    if a is None or b is None:
        return None
    if a.side.holds and b.side.holds and not _agree(a.factor, b.factor, events):
        return None
    return finding(a.side, b.side, _NAME)


def _rows(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(-1, array.shape[-1])


def _looked_at(counted: NDArray[np.intp], g: Sequence[Floats]) -> NDArray[np.intp]:
    few = max(1, _ELEMENTS // g[0].shape[-1])
    if counted.size <= few:
        return counted
    apart = np.abs(g[0][counted] - g[1][counted]).max(axis=-1)
    return np.sort(counted[np.argsort(-apart)[:few]])


def _fitted(
    reference: Replayer, dtype: str, z: NDArray[Any], g: Floats, labels: NDArray[np.intp]
) -> _Fit | None:
    """One side at the positions that count, held to the direction of the gradient."""
    call = Call(op="cross_entropy", inputs={"in": z, "labels": labels}, dtype=dtype)
    found = reference.gradient(call, np.ones(labels.shape), "in")
    if found is None:
        return None
    factor = _factor(found.value, g, labels)
    if not math.isfinite(factor) or factor <= 0:
        return None
    return _Fit(held(g, factor * found.value, factor * found.spread), factor)


def _factor(value: Floats, g: Floats, labels: NDArray[np.intp]) -> float:
    """The factor c that `g` is `value` times, whatever the logarithms of the sums err by.

    Such an error e of a row, common to all its probabilities, makes its gradient
    `c ((1 + e) p - onehot)`. With p of the label, and S the sum of the others' elements,
    `S = c (1 + e) (1 - p)`, so that the label's own element is `S p / (1 - p) - c`. A row counts by
    how little the division takes from it.
    """
    rows = np.arange(len(labels))
    left = -value[rows, labels]
    own = g[rows, labels]
    rest = g.sum(axis=-1) - own
    with np.errstate(divide="ignore", invalid="ignore"):
        each = rest * (1 - left) / left - own
    known = (left > 0) & np.isfinite(each)
    weights = np.square(left[known])
    total = float(weights.sum())
    return float((weights * each[known]).sum()) / total if total else math.nan


def _agree(a: float, b: float, events: tuple[Event, Event]) -> bool:
    roundoff = max(unit_roundoff(event.dtype) for event in events)
    return abs(a - b) <= _SAME_FACTOR * roundoff * max(a, b)
