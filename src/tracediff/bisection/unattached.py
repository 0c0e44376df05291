"""Operations that lead to no paired value: a step's number, which Python makes a learning rate of.

They belong to no span, and nothing on the other side is in their place. One that is beyond its
formula's bound, and keeps to it wherever else it is executed, errs.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from tracediff.align.flow import Flow, Value
from tracediff.align.matching import ValuePair
from tracediff.bisection.findings import Finding
from tracediff.bisection.spans import Check, Engine, Span, is_float, is_leaf
from tracediff.events import STAGE_RANK

_SIDES = ("baseline", "target")


class Unattached:
    """The operations of both sides that no pair depends on."""

    def __init__(
        self,
        flows: tuple[Flow, Flow],
        engines: tuple[Engine, Engine],
        partner: tuple[Container[Value], Container[Value]],
    ) -> None:
        self._flows, self._engines, self._partner = flows, engines, partner

    def findings(self, until: Finding | None = None) -> Iterator[Finding]:
        """Those that err, and are executed before what another finding is about."""
        for side in (0, 1):
            last = None if until is None else (until.pair.baseline, until.pair.target)[side]
            for value in self._values(side):
                if last is not None and _place(value) >= _place(last):
                    continue
                for event in value.members:
                    check = self._engines[side].check(event) if is_float(event) else None
                    errs = check is not None and check.ratio > 1
                    if check and errs and self._engines[side].keeps_elsewhere(event):
                        yield _finding(side, value, check)

    def _values(self, side: int) -> Iterator[Value]:
        partner, flow = self._partner[side], self._flows[side]
        needed: set[Value] = set()
        waiting = [v for value in flow.values if value in partner for v in value.inputs]
        while waiting:
            value = waiting.pop()
            if value not in needed and value not in partner:
                needed.add(value)
                waiting.extend(value.inputs)
        for value in flow.values:
            if not (value in partner or value in needed or is_leaf(value.event)):
                yield value


def _place(value: Value) -> tuple[int, int]:
    return STAGE_RANK[value.phase], value.event.order


def _finding(side: int, value: Value, check: Check) -> Finding:
    span, none = Span(value, (check.event,), ()), Span(value, (), ())
    return Finding(
        pair=ValuePair(value, value, ""),
        spans=(span, none) if side == 0 else (none, span),
        inputs=(),
        culprits=(check.event, None) if side == 0 else (None, check.event),
        checks={(side, check.event.order): check},
        error=check.error,
        bound=check.bound,
        derivation=check.derivation,
        blame=_SIDES[side],
        note=f"{check.event.op} does not give what its formula gives on its own recorded inputs",
        lacking=1 - side,
    )
