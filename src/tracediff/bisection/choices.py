"""Operations on integers: indices, ids, counts. They are exact, and so is the comparison.

A choice among values (top-k, argmax) that rounding turns is told as such, with the margin by which
it was made. Where equal values are chosen, it does not matter which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.align.fingerprints import same_elements
from tracediff.align.flow import Value, name_of
from tracediff.align.matching import ValuePair
from tracediff.bisection.findings import Finding
from tracediff.bisection.spans import Check, Engine, Span
from tracediff.compare.layouts import find_layout
from tracediff.events import Event

_CHOICES: Final = frozenset({"argmax", "argmin", "topk", "sort", "argsort"})

_TURNED: Final = 0.05
"""Largest relative difference (L2) of the values chosen among that may be rounding, of any dtype;
what is further apart was named before."""


def is_integer(event: Event) -> bool:
    """Booleans are none: two stacks may mean opposite things by the same mask."""
    return event.dtype.startswith(("int", "uint"))


@dataclass(frozen=True, slots=True)
class _Difference:
    """Integers that differ, in the baseline's layout."""

    baseline: NDArray[Any]
    target: NDArray[Any]

    @property
    def fraction(self) -> float:
        return float((self.baseline != self.target).mean())


def judge_integers(
    pair: ValuePair,
    spans: tuple[Span, Span],
    engines: tuple[Engine, Engine],
    partner: dict[Value, Value],
) -> Finding | None:
    """What is found of a pair of integers: an operation that errs, a choice that goes another way,
    or nothing."""
    apart = _difference(pair, engines)
    if apart is None:
        return None
    checks = {
        (side, event.order): check
        for side in (0, 1)
        for event in spans[side].operations
        if (check := engines[side].check(event)) is not None
    }
    failing = [_failing(span, side, checks) for side, span in enumerate(spans)]
    if any(failing):
        wrong = next(check for check in failing if check is not None)
        blame = "both" if all(failing) else "baseline" if failing[0] else "target"
        note = f"{wrong.event.op} does not give what its formula gives on its own recorded inputs"
    else:
        blame, note = "undecided", _choice(pair, engines, apart) or ""
        if not note:
            return None
    culprits = [check.event if check else None for check in failing]
    return Finding(
        pair=pair,
        spans=spans,
        inputs=tuple((v, partner[v]) for v in spans[0].frontier if v in partner),
        culprits=(culprits[0], culprits[1]),
        checks=checks,
        error=apart.fraction,
        bound=0.0,
        derivation="integers are exact",
        blame=blame,
        note=note,
    )


def _difference(pair: ValuePair, engines: tuple[Engine, Engine]) -> _Difference | None:
    """None where the integers are the same, if need be in another order, or cannot be told."""
    events = pair.baseline.event, pair.target.event
    if same_elements(events[0].fingerprint, events[1].fingerprint):
        return None
    a, b = (engine.array(event) for engine, event in zip(engines, events, strict=True))
    layout = find_layout(a, b) if a is not None and b is not None else None
    if a is None or b is None or layout is None:
        return None
    found = _Difference(a, layout.apply(b))
    return found if found.fraction else None


def _failing(span: Span, side: int, checks: dict[tuple[int, int], Check]) -> Check | None:
    found = (checks.get((side, event.order)) for event in span.operations)
    return next((check for check in found if check is not None and check.ratio > 1), None)


def _choice(pair: ValuePair, engines: tuple[Engine, Engine], apart: _Difference) -> str | None:
    """How a choice came to go another way, if values were chosen among that are not equal."""
    events = pair.baseline.event, pair.target.event
    if name_of(events[0]) != name_of(events[1]) or name_of(events[0]) not in _CHOICES:
        return None
    data = [_chosen_among(engine, event) for engine, event in zip(engines, events, strict=True)]
    if data[0] is None or data[1] is None or data[0].shape != data[1].shape:
        return None
    a, b = (each.astype(np.float64) for each in data if each is not None)
    scale = float(np.linalg.norm(a.ravel())) or 1.0
    between = float(np.linalg.norm((a - b).ravel())) / scale
    if not between <= _TURNED:
        return None
    margin = _margin(events[0], a, apart)
    if margin is None or not margin > 0:
        return None
    how = "the same values" if between == 0 else f"values that are {between:.1e} apart"
    return f"another choice among {how}, made by a margin of {margin:.1e} at most"


def _chosen_among(engine: Engine, event: Event) -> NDArray[Any] | None:
    inputs = engine.flow.inputs[event.order]
    return engine.array(engine.flow.events[inputs[0]]) if inputs else None


def _margin(event: Event, data: NDArray[np.float64], apart: _Difference) -> float | None:
    """Largest difference between what the two choices take of the baseline's values."""
    args = event.attributes.get("args", {})
    axis = args.get("dim", args.get("axis", -1)) or 0
    if not isinstance(axis, int):
        return None
    indices = [apart.baseline, apart.target]
    if name_of(event) in ("argmax", "argmin") and indices[0].ndim < data.ndim:
        indices = [np.expand_dims(index, axis) for index in indices]
    try:
        taken = [np.take_along_axis(data, index.astype(np.int64), axis) for index in indices]
    except (IndexError, ValueError):
        return None
    return float(np.abs(taken[0] - taken[1]).max(initial=0.0))
