"""One pair of operation spans, judged: does an operation err, or do both compute something else?

The operations are held to their float64 formulas, and the spans to each other on the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.align.fingerprints import distance, tolerance
from tracediff.align.flow import Value, name_of
from tracediff.align.matching import ValuePair
from tracediff.bisection.findings import Finding
from tracediff.bisection.narrowing import narrow
from tracediff.bisection.spans import Check, Engine, Span, difference, is_float, norm
from tracediff.compare import bounds
from tracediff.compare.figures import unit_roundoff, widened
from tracediff.compare.layouts import Layout
from tracediff.events import Event
from tracediff.operations import ALIAS
from tracediff.replaying import Floats

_SHOWS: Final = 1 / 4
"""An error of an operation is real if this part of it is there in the pair: what a formula
describes wrongly, it describes wrongly on both sides, and cancels."""

CONSTANTS: Final = 16.0
"""Units of roundoff by which two spans may differ on the same inputs: constants (a scale, a table
of angles) are rounded by each stack."""

_HIDDEN: Final = 16.0
"""How much larger the rounding of operations that were not recorded may be than that of the other
side's."""

_UNLIKE: Final = 0.5
"""Distance (L2, relative) from which on two values have nothing in common place by place."""

Mask = NDArray[np.bool_]


class SpanPair:
    """One pair with its spans, while it is judged.

    Args:
        lay_over: How the partner of a baseline's value lies over it.
        counts: False where an element of the pair is of a padded position.
    """

    def __init__(
        self,
        pair: ValuePair,
        spans: tuple[Span, Span],
        engines: tuple[Engine, Engine],
        partner: tuple[dict[Value, Value], dict[Value, Value]],
        lay_over: Callable[[Value], Layout | None],
        counts: Mask | None,
    ) -> None:
        self.pair = pair
        self.spans = spans
        self.engines = engines
        self.partner = partner
        self.lay_over = lay_over
        self.counts = counts
        self.checks = {
            (side, event.order): check
            for side in (0, 1)
            for event in spans[side].operations
            if (check := engines[side].check(event)) is not None
        }

    def finding(self) -> Finding | None:
        values = self._values()
        failing = [self._failing(side) for side in (0, 1)]
        if values is None or (any(failing) and self._are_disordered(self.pair.baseline)):
            return self._without_layout(failing)
        apart = difference(*values)
        unexplained = self._unexplained(apart)
        scale = norm(self._counted(values[0])) or 1.0
        real = [
            check is not None and self._shows(side, check, unexplained, apart)
            for side, check in enumerate(failing)
        ]
        if any(real):
            return self._wrong_operation(failing, real)
        known = [self._is_known(side) for side in (0, 1)]
        if all(known) and not any(failing):
            return self._other_formula(scale)
        if any(failing):
            return None  # described wrongly, on both sides alike
        return self._beyond_rounding(unexplained, apart, scale, known)

    def _without_layout(self, failing: Sequence[Check | None]) -> Finding | None:
        """Where neither value lies over the other, as rows in another order: an operation that errs
        is to blame if the statistics of the exits are apart as well, or if only one side errs and
        its formula holds elsewhere."""
        a, b = self.pair.baseline.event, self.pair.target.event
        real = [check is not None for check in failing]
        if distance(a.fingerprint, b.fingerprint) <= tolerance((a.dtype, b.dtype)):
            real = [
                check is not None and not all(failing) and engine.keeps_elsewhere(check.event)
                for check, engine in zip(failing, self.engines, strict=True)
            ]
        return self._wrong_operation(failing, real) if any(real) else None

    def _failing(self, side: int) -> Check | None:
        """The first operation of a side that is beyond its bound."""
        operations = self.spans[side].operations
        found = (self.checks.get((side, event.order)) for event in operations)
        return next((check for check in found if check is not None and check.ratio > 1), None)

    def _is_known(self, side: int) -> bool:
        """Whether every operation of a side's span on real numbers has a formula."""
        operations = [e for e in self.spans[side].operations if is_float(e)]
        return bool(operations) and all((side, e.order) in self.checks for e in operations)

    # ---- values ----------------------------------------------------------------------------

    def _values(self) -> tuple[Floats, Floats] | None:
        """Both exits in the layout of the baseline's first event."""
        a = self.engines[0].array(self.pair.baseline.event)
        b = self._in_baseline_layout(self.pair.baseline)
        return None if a is None or b is None else (widened(a), widened(b))

    def _in_baseline_layout(self, value: Value) -> NDArray[Any] | None:
        layout = self.lay_over(value)
        array = self.engines[1].array(self.partner[0][value].event)
        return None if layout is None or array is None else layout.apply(array)

    def _given(self, side: int) -> dict[Value, NDArray[Any]]:
        """The other side's values for the frontier of a side, in this side's layout."""
        given: dict[Value, NDArray[Any]] = {}
        for value in self.spans[side].frontier:
            partner = self.partner[side].get(value)
            if partner is None or not is_float(value.event) or not is_float(partner.event):
                continue
            if self._are_disordered(value if side == 0 else partner):
                continue
            if side == 0:
                array = self._in_baseline_layout(value)
            else:
                layout, array = self.lay_over(partner), self.engines[0].array(partner.event)
                if layout is not None and array is not None:
                    array = layout.inverse(value.event.shape).apply(array)
            if array is not None and (side == 0 or self.lay_over(partner) is not None):
                given[value] = widened(array)
        return given

    def _are_disordered(self, value: Value) -> bool:
        """Whether a baseline's value and its partner, as it is laid over it, have the same elements
        at other places."""
        a, b = value.event, self.partner[0][value].event
        if not is_float(a) or distance(a.fingerprint, b.fingerprint) > tolerance(
            (a.dtype, b.dtype)
        ):
            return False
        return self._apart(value) > _UNLIKE

    def _laid_over(self, array: Floats) -> Floats:
        """What lies as the target's exit, in the layout of the baseline's."""
        layout = self.lay_over(self.pair.baseline)
        assert layout is not None, "only exits that lie over each other are compared"
        return layout.apply(array)

    def _counted(self, array: Floats) -> Floats:
        return array if self.counts is None else array[self.counts]

    def _unexplained(self, apart: Floats) -> Floats | None:
        """The difference of the exits less that which the inputs explain, by either side's span."""
        for side in (0, 1):
            own = self.engines[side].evaluate(self.spans[side])
            other = self.engines[side].evaluate(self.spans[side], self._given(side))
            if own is None or other is None:
                continue
            explained = difference(own, other)
            if side == 1:
                explained = -self._laid_over(explained)
            return difference(apart, explained)
        return None

    # ---- verdicts --------------------------------------------------------------------------

    def _shows(self, side: int, check: Check, unexplained: Floats | None, apart: Floats) -> bool:
        """Whether the error of an operation is there in the pair."""
        engine, span = self.engines[side], self.spans[side]
        exact, kept = engine.evaluate(span), engine.evaluate(span, kept=check.event)
        seen = norm(self._counted(unexplained if unexplained is not None else apart))
        if exact is None or kept is None:
            return seen > 0 and check.ratio > 1
        effect = difference(kept, exact)
        if side == 1:
            effect = self._laid_over(effect)
        size = norm(self._counted(effect))
        if not size:  # what was kept for the backward pass, whose formula computes it anew
            scale = norm(self._counted(exact))
            return seen > self._constants() * (scale or 1.0)
        return seen >= _SHOWS * size

    def _wrong_operation(self, failing: Sequence[Check | None], real: Sequence[bool]) -> Finding:
        found = [c if yes else None for c, yes in zip(failing, real, strict=True)]
        culprits = [check.event if check else None for check in found]
        worst = max((check for check in found if check), key=lambda check: check.ratio)
        at = found.index(worst)
        engine = self.engines[at]
        blame = "both" if all(real) else "baseline" if real[0] else "target"
        note = f"{engine.told(worst.event)} on its own recorded inputs"
        pair, spans, inputs = self._laid_out_anew(at, worst.event) or (
            self.pair,
            self.spans,
            self._inputs(),
        )
        return Finding(
            pair=pair,
            spans=spans,
            inputs=inputs,
            culprits=(culprits[0], culprits[1]),
            checks=self.checks,
            error=worst.error,
            bound=worst.bound,
            derivation=worst.derivation,
            blame=blame,
            note=note,
        )

    def _laid_out_anew(
        self, side: int, event: Event
    ) -> tuple[ValuePair, tuple[Span, Span], tuple[tuple[Value, Value], ...]] | None:
        """The part of the spans in which an operation errs that should have laid a paired value out
        anew: that operation, and the other side's value as it is; None for any other operation."""
        engine, partner = self.engines[side], self.partner[side]
        own = engine.flow.of_order[event.order]
        inputs = [engine.array(engine.flow.events[o]) for o in engine.flow.inputs[event.order]]
        sources = [v for v in own.inputs if v in partner and v.count == own.count]
        if own in partner or own.event is not event or any(array is None for array in inputs):
            return None
        exact = engine.recompute(event, inputs)
        for source in sources:
            array = engine.array(source.event)
            if array is None or exact is None or not _are_same_numbers(array, exact.value):
                continue
            spans = Span(own, (event,), (source,)), Span(partner[source], (), (partner[source],))
            both = (own, partner[source]), (source, partner[source])
            if side == 1:
                return ValuePair(*both[0][::-1], ""), spans[::-1], (both[1][::-1],)
            return ValuePair(*both[0], ""), spans, (both[1],)
        return None

    def _other_formula(self, scale: float) -> Finding | None:
        """Both sides compute what their operations say; do they say the same?"""
        given = self._given(1)
        own = self.engines[0].evaluate(self.spans[0])
        other = self.engines[1].evaluate(self.spans[1], given)
        layout = self.lay_over(self.pair.baseline)
        if own is None or other is None or layout is None:
            return None
        apart = norm(self._counted(difference(own, layout.apply(other)))) / scale
        bound = max(self._constants(), self._unplaced())
        if apart <= bound:
            return None
        note = "each side keeps to its own formula, but the two formulas are not the same"
        found = self._undecided(apart, bound, "the same inputs in float64", note)
        return found.narrowed(narrow(self.spans, self.engines, given, self.partner, bound))

    def _constants(self) -> float:
        """What two spans may differ by on the same inputs: rounding of constants, and of what lies
        between inputs that are not the same on both sides."""
        event = self.pair.baseline.event
        roundoff = (
            unit_roundoff("float32") if event.dtype != "float64" else unit_roundoff("float64")
        )
        spreads = [self._spread(side) for side in (0, 1)]
        starts = [
            {v for v in self.spans[side].frontier if is_float(v.event) and not v.is_leaf}
            for side in (0, 1)
        ]
        between = 0.0
        if {self.partner[0].get(v) for v in starts[0]} != starts[1]:
            steps = len(self.spans[0].operations) + len(self.spans[1].operations)
            between = bounds.floor(event, self.pair.target.event)[0] * math.sqrt(steps)
        return max(CONSTANTS * roundoff, *spreads, between)

    def _unplaced(self) -> float:
        """How far inputs may be apart that have no common layout, as rows in another order: as far
        as statistics tell."""
        given, allowed = self._given(1), 0.0
        for value in self.spans[1].frontier:
            partner = self.partner[1].get(value)
            if partner is None or value in given or not is_float(value.event):
                continue
            limit = tolerance((partner.event.dtype, value.event.dtype))
            near = distance(partner.event.fingerprint, value.event.fingerprint) <= limit
            allowed = max(allowed, limit if near else math.inf)
        return allowed

    def _spread(self, side: int) -> float:
        check = self.checks.get((side, self.spans[side].exit.event.order))
        return check.bound if check is not None else 0.0

    def _beyond_rounding(
        self, unexplained: Floats | None, apart: Floats, scale: float, known: Sequence[bool]
    ) -> Finding | None:
        """Where a side's operations are not known: what is left of the difference, and rounding."""
        a, b = self.pair.baseline.event, self.pair.target.event
        if ALIAS in (name_of(a), name_of(b)):
            return None  # of what was written to a part of it, that part is judged
        steps = max(1, *(len(span.operations) for span in self.spans))
        floor, derivation = bounds.floor(a, b)
        if unexplained is not None:
            side = 0 if known[0] else 1
            bound = max(floor, _HIDDEN * self._residual(side, scale)) * math.sqrt(steps)
            error = norm(self._counted(unexplained)) / scale
        else:
            inherited = max((self._apart(value) for value in self.spans[0].frontier), default=0.0)
            gain = bounds.GAIN.get(a.site.phase, bounds.DEFAULT_GAIN)
            bound = floor * math.sqrt(steps) + gain * inherited
            error = norm(self._counted(apart)) / scale
            if not inherited and not self.spans[0].frontier:
                return None  # made from nothing that could be compared
        bound = max(bound, self._unplaced())
        if error <= bound:
            return None
        note = "the difference is more than the inputs and rounding explain"
        return self._undecided(error, bound, derivation, note)

    def _residual(self, side: int, scale: float) -> float:
        """The rounding of a whole span, measured on the side whose formulas are known."""
        exact = self.engines[side].evaluate(self.spans[side])
        found = self.engines[side].array(self.spans[side].exit.event)
        if exact is None or found is None:
            return 0.0
        return norm(difference(widened(found), exact)) / scale

    def _apart(self, value: Value) -> float:
        a, b = self.engines[0].array(value.event), self._in_baseline_layout(value)
        if a is None or b is None or not is_float(value.event):
            return 0.0
        wide = widened(a)
        return norm(difference(wide, widened(b))) / (norm(wide) or 1.0)

    def _inputs(self) -> tuple[tuple[Value, Value], ...]:
        return tuple((v, self.partner[0][v]) for v in self.spans[0].frontier)

    def _undecided(self, error: float, bound: float, derivation: str, note: str) -> Finding:
        return Finding(
            pair=self.pair,
            spans=self.spans,
            inputs=self._inputs(),
            culprits=(None, None),
            checks=self.checks,
            error=error,
            bound=bound,
            derivation=derivation,
            blame="undecided",
            note=note,
        )


def _are_same_numbers(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two arrays hold the same numbers in any order."""
    one, other = (np.sort(widened(x), axis=None) for x in (a, b))
    return np.array_equal(one, other)
