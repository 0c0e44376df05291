"""Losses that one side reduces in one call, and whose terms the other keeps to reduce by hand.

The terms are reduced as the other side does it, over the targets that it trains on, and compared
then. Labels are compared where that side trains: by hand, what is ignored is masked later on.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.views import Common, viewed
from tracediff.events import Event, Pair
from tracediff.trace import Trace

UNREDUCED: Final = "one side reduces this loss, the other keeps its terms"

_PHASES: Final = ("loss", "trajectory")

_Trained = NDArray[np.bool_]


def applied(traces: tuple[Trace, Trace], common: Common) -> Common:
    """The step with the unreduced terms of a loss reduced as the other side does it."""
    labels = {
        (pair.baseline.site.path, pair.baseline.site.call): pair
        for pair in common.alignment.pairs
        if pair.baseline.site.phase in _PHASES and pair.baseline.site.port == "labels"
    }
    views: tuple[dict[int, Event], dict[int, Event]] = ({}, {})
    for pair in common.alignment.pairs:
        side = _unreduced(pair)
        targets = labels.get((pair.baseline.site.path, pair.baseline.site.call))
        if side is None or targets is None:
            continue
        reduced, terms = _sides(pair, 1 - side)
        given, kept = _sides(targets, 1 - side)
        ignored = reduced.attributes.get("ignore_index")
        if not isinstance(ignored, int) or None in (terms.payload, given.payload, kept.payload):
            continue
        trained = traces[1 - side].array(given) != ignored
        if trained.size != np.prod(terms.shape):
            continue
        mean = reduced.attributes["reduction"] == "mean"
        reduce = partial(_reduced, trained=trained, mean=mean)
        whole = viewed(traces[side], terms, reduce)
        views[side][id(terms)] = replace(whole, op=f"{terms.op}, reduced here")
        if kept.shape == given.shape:
            hide = partial(_hidden, trained=trained, ignored=ignored)
            views[side][id(kept)] = viewed(traces[side], kept, hide)
    return common.replaced(views).apart(_why_not) if any(views) else common.apart(_why_not)


def _sides(pair: Pair, first: int) -> tuple[Event, Event]:
    """The events of a pair, that of side `first` first."""
    return (pair.target, pair.baseline) if first else (pair.baseline, pair.target)


def _unreduced(pair: Pair) -> int | None:
    """The side that keeps the terms of a loss which the other sums or averages, if one does."""
    if pair.baseline.site.phase not in _PHASES or pair.baseline.site.port != "out":
        return None
    reductions = [e.attributes.get("reduction") for e in (pair.baseline, pair.target)]
    if sorted(map(str, reductions)) not in (["mean", "none"], ["none", "sum"]):
        return None
    return reductions.index("none")


def _why_not(pair: Pair) -> str | None:
    unlike = pair.baseline.shape != pair.target.shape
    return UNREDUCED if unlike and _unreduced(pair) is not None else None


def _reduced(terms: NDArray[Any], trained: _Trained, mean: bool) -> NDArray[Any]:
    counted = terms.astype(np.float64).reshape(-1)[trained.reshape(-1)]
    value = counted.sum() / max(1, counted.size) if mean else counted.sum()
    return np.asarray(value, dtype=terms.dtype)


def _hidden(labels: NDArray[Any], trained: _Trained, ignored: int) -> NDArray[Any]:
    return np.where(trained, labels, np.asarray(ignored, labels.dtype))
