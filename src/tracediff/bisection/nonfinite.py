"""NaN on one side: told wherever it is made, in padding too, since zero times NaN is NaN."""

from __future__ import annotations

from typing import Final

from tracediff.align.flow import Value
from tracediff.align.matching import ValuePair
from tracediff.bisection.findings import Finding
from tracediff.bisection.spans import Engine, Span, is_float
from tracediff.events import Event
from tracediff.trace.summary import FINGERPRINT_FIELDS

_NAN: Final = FINGERPRINT_FIELDS.index("nan")
_SIDES: Final = ("baseline", "target")


def judge_nan(
    pair: ValuePair,
    spans: tuple[Span, Span],
    engines: tuple[Engine, Engine],
    partner: dict[Value, Value],
) -> Finding | None:
    """The operation that makes NaN of values without any, where the other side has none; or the one
    before it that errs, such as a number that is negative by it, of which a root is taken."""
    holding = [_has_nan(value.event) for value in (pair.baseline, pair.target)]
    if holding[0] == holding[1]:
        return None
    side = holding.index(True)
    flow = engines[side].flow
    made = (
        event
        for event in spans[side].operations
        if _has_nan(event)
        and not any(_has_nan(flow.events[order]) for order in flow.inputs[event.order])
    )
    culprit = next(made, None)
    if culprit is None:
        return None
    engine, note = engines[side], f"NaN in the {_SIDES[side]} only, made of values without any"
    before = [e for e in spans[side].operations if e.order < culprit.order and is_float(e)]
    failing = (check for e in before if (check := engine.check(e)) is not None and check.ratio > 1)
    check = next(failing, None)
    if check is not None:
        made_by = f"of it {culprit.op} ({culprit.source}) makes NaN"
        note = f"{engine.told(check.event)} on its own recorded inputs; {made_by}"
        culprit = check.event
    return Finding(
        pair=pair,
        spans=spans,
        inputs=tuple((v, partner[v]) for v in spans[0].frontier if v in partner),
        culprits=(None, culprit) if side else (culprit, None),
        checks={} if check is None else {(side, culprit.order): check},
        error=1.0,
        bound=0.0,
        derivation="no NaN is rounding",
        blame="undecided" if check is None else _SIDES[side],
        note=note,
    )


def _has_nan(event: Event) -> bool:
    return bool(event.fingerprint) and event.fingerprint[_NAN] > 0
