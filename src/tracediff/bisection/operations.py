"""Bisection down to the operation, where both traces hold operations of a step.

Each operation is held to its float64 formula on its own recorded inputs, and the spans of a pair to
each other: on the same inputs, both have to compute the same. What errs in one of these ways, and
shows in the pair, has introduced a divergence there, however small or large the difference is that
came in. See docs/deciding.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.align import Alignment
from tracediff.align.fingerprints import distance, tolerance
from tracediff.align.flow import Flow, Value, name_of
from tracediff.align.matching import ValuePair
from tracediff.align.names import Rules
from tracediff.align.operations import align_operations
from tracediff.bisection.choices import is_integer, judge_integers
from tracediff.bisection.findings import Finding
from tracediff.bisection.narrowing import narrow
from tracediff.bisection.nonfinite import judge_nan
from tracediff.bisection.spans import (
    Check,
    Engine,
    Span,
    difference,
    is_float,
    norm,
    span_of,
)
from tracediff.bisection.unattached import Unattached
from tracediff.compare import bounds
from tracediff.compare.figures import unit_roundoff
from tracediff.compare.layouts import Layout, find_layout
from tracediff.events import STAGE_RANK, Event
from tracediff.replaying import Floats
from tracediff.trace import Trace

_SHOWS: Final = 1 / 4
"""An error of an operation is real if this part of it is there in the pair: what a formula
describes wrongly, it describes wrongly on both sides, and cancels."""

_CONSTANTS: Final = 16.0
"""Units of roundoff by which two spans may differ on the same inputs: constants (a scale, a table
of angles) are rounded by each stack."""

_HIDDEN: Final = 16.0
"""How much larger the rounding of operations that were not recorded may be than that of the other
side's."""

_LEFT: Final = 1e-3
"""The part of an error that may be left where it has healed; more is dilution."""

Mask = NDArray[np.bool_]


class OperationJudge:
    """Judges the operations of one step of two runs.

    Args:
        traces: Baseline and target.
        alignment: Of the module-level events of the step.
        padding: Attention mask of the step's batch (batch, sequence), if there is one.
    """

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        events: tuple[Sequence[Event], Sequence[Event]],
        alignment: Alignment,
        rules: Rules | None = None,
        padding: NDArray[Any] | None = None,
    ) -> None:
        stacks = traces[0].run.stack, traces[1].run.stack
        baseline, target, self.pairs = align_operations(
            *events, stacks, alignment.paths, rules, alignment.pairs
        )
        self.flows: tuple[Flow, Flow] = baseline, target
        self._engines = Engine(traces[0], baseline), Engine(traces[1], target)
        self._partner: tuple[dict[Value, Value], dict[Value, Value]] = (
            {p.baseline: p.target for p in self.pairs if p.layout == "whole"},
            {p.target: p.baseline for p in self.pairs if p.layout == "whole"},
        )
        self._unattached = Unattached(self.flows, self._engines, self._partner)
        self._padding = padding
        self._layouts: dict[Value, Layout | None] = {}

    def findings(self) -> Iterator[Finding]:
        """The divergences that were introduced, in the order of stages and execution."""
        for pair in sorted(
            self.pairs, key=lambda p: (STAGE_RANK[p.baseline.phase], p.baseline.index)
        ):
            finding = self._judge(pair)
            if finding is None or (not any(finding.culprits) and self._heals(pair, finding.error)):
                continue
            yield from self._unattached.findings(until=finding)
            yield finding
        yield from self._unattached.findings()

    # ---- what a report asks for ------------------------------------------------------------

    def values(self, pair: ValuePair) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Both values of a pair in the layout of the baseline's first event."""
        a, b, layout = self._laid_over(pair)
        return None if layout is None else (a, layout.apply(b))

    def layout_of(self, pair: ValuePair) -> str:
        """How the target's value lies over the baseline's, "" where it does not."""
        layout = self._laid_over(pair)[2] if pair.layout == "whole" else None
        return layout.name if layout else pair.layout.replace("whole", "")

    def _laid_over(self, pair: ValuePair) -> tuple[Any, Any, Layout | None]:
        if pair.baseline is pair.target:  # only one side has it
            return None, None, None
        events = pair.baseline.event, pair.target.event
        a, b = (engine.array(e) for engine, e in zip(self._engines, events, strict=True))
        return a, b, find_layout(a, b) if a is not None and b is not None else None

    def counterpart(self, finding: Finding, side: int) -> Event | None:
        """The operation of a side that a finding is about: its culprit, or that which the other
        side's culprit is paired with; None for the exit of the span."""
        culprit, other = finding.culprits[side], finding.culprits[1 - side]
        if culprit is not None or other is None:
            return culprit
        of = self.flows[1 - side].of_order[other.order]
        partner = self._partner[1 - side].get(of)
        members = partner.members if partner else finding.spans[side].operations
        alike = [e for e in members if (name_of(e), e.shape) == (name_of(other), other.shape)]
        if partner is None:
            return alike[0] if len(alike) == 1 else None
        return next(iter(alike), partner.event)

    def _heals(self, pair: ValuePair, error: float) -> bool:
        """Whether next to nothing is left of an error in what is computed from a pair: it was
        paired wrongly, or a consistent change makes no difference."""
        found, seen, waiting = [], set(), list(pair.baseline.users)
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            partner = self._partner[0].get(value)
            if partner is None:
                waiting.extend(value.users)
            else:
                dtypes = (value.event.dtype, partner.event.dtype)
                apart = distance(value.event.fingerprint, partner.event.fingerprint)
                found.append(apart <= min(tolerance(dtypes), _LEFT * error))
        return bool(found) and all(found)

    # ---- one pair --------------------------------------------------------------------------

    def _judge(self, pair: ValuePair) -> Finding | None:
        a, b = pair.baseline.event, pair.target.event
        both_leaves = pair.baseline.is_leaf and pair.target.is_leaf
        numbers = all(is_float(event) or is_integer(event) for event in (a, b))
        if both_leaves or pair.layout != "whole" or not numbers:
            return None
        if a.digest == b.digest and a.dtype == b.dtype:
            return None
        spans = (
            span_of(pair.baseline, self._partner[0]),
            span_of(pair.target, self._partner[1]),
        )
        if not (spans[0].operations or spans[1].operations):
            return None
        known = pair, spans, self._engines, self._partner[0]
        if is_integer(a) or is_integer(b):
            return judge_integers(*known)
        if (made := judge_nan(*known)) is not None:
            return made
        case = _Case(pair, spans, self._engines, self._partner, self._lay_over, self._counts(a))
        return case.finding()

    def _lay_over(self, value: Value) -> Layout | None:
        """How the partner of a baseline's value lies over it."""
        if value not in self._layouts:
            a = self._engines[0].array(value.event)
            b = self._engines[1].array(self._partner[0][value].event)
            found = None if a is None or b is None else find_layout(a, b)
            self._layouts[value] = found
        return self._layouts[value]

    def _counts(self, event: Event) -> Mask | None:
        """False where an element is of a padded position; None where the shape does not tell."""
        if self._padding is None or self._padding.all():
            return None
        mask = self._padding.astype(bool)
        batch, length = mask.shape
        shape = event.shape
        if shape[:2] == (batch, length):
            return np.broadcast_to(mask.reshape(mask.shape + (1,) * (len(shape) - 2)), shape)
        if len(shape) >= 2 and shape[0] == batch * length:
            return np.broadcast_to(mask.reshape(-1, *(1,) * (len(shape) - 1)), shape)
        if len(shape) == 4 and (shape[0], shape[2]) == (batch, length):
            return np.broadcast_to(mask[:, None, :, None], shape)
        if len(shape) == 3 and shape[0] % batch == 0 and shape[1] == length:
            heads = np.repeat(mask, shape[0] // batch, axis=0)
            return np.broadcast_to(heads[:, :, None], shape)
        return None


class _Case:
    """One pair with its spans, while it is judged."""

    def __init__(
        self,
        pair: ValuePair,
        spans: tuple[Span, Span],
        engines: tuple[Engine, Engine],
        partner: tuple[dict[Value, Value], dict[Value, Value]],
        lay_over: Any,
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
        if values is None:
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
        """Where the values have too little in common to lay one over the other: an operation that
        errs is to blame if the statistics of the exits are apart as well."""
        a, b = self.pair.baseline.event, self.pair.target.event
        apart = distance(a.fingerprint, b.fingerprint)
        if not any(failing) or apart <= tolerance((a.dtype, b.dtype)):
            return None
        return self._wrong_operation(failing, [check is not None for check in failing])

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
        return None if a is None or b is None else (a.astype(np.float64), b.astype(np.float64))

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
            if side == 0:
                array = self._in_baseline_layout(value)
            else:
                layout, array = self.lay_over(partner), self.engines[0].array(partner.event)
                if layout is not None and array is not None:
                    array = layout.inverse(value.event.shape).apply(array)
            if array is not None and (side == 0 or self.lay_over(partner) is not None):
                given[value] = array.astype(np.float64)
        return given

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
                layout = self.lay_over(self.pair.baseline)
                explained = -layout.apply(explained)
            result: Floats = apart - explained
            return result
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
            effect = self.lay_over(self.pair.baseline).apply(effect)
        size = norm(self._counted(effect))
        return size > 0 and seen >= _SHOWS * size

    def _wrong_operation(self, failing: Sequence[Check | None], real: Sequence[bool]) -> Finding:
        found = [c if yes else None for c, yes in zip(failing, real, strict=True)]
        culprits = [check.event if check else None for check in found]
        worst = max((check for check in found if check), key=lambda check: check.ratio)
        engine = self.engines[found.index(worst)]
        blame = "both" if all(real) else "baseline" if real[0] else "target"
        note = f"{engine.told(worst.event)} on its own recorded inputs"
        return Finding(
            pair=self.pair,
            spans=self.spans,
            inputs=self._inputs(),
            culprits=(culprits[0], culprits[1]),
            checks=self.checks,
            error=worst.error,
            bound=worst.bound,
            derivation=worst.derivation,
            blame=blame,
            note=note,
        )

    def _other_formula(self, scale: float) -> Finding | None:
        """Both sides compute what their operations say; do they say the same?"""
        given = self._given(1)
        own = self.engines[0].evaluate(self.spans[0])
        other = self.engines[1].evaluate(self.spans[1], given)
        layout = self.lay_over(self.pair.baseline)
        if own is None or other is None or layout is None:
            return None
        apart = norm(self._counted(difference(own, layout.apply(other)))) / scale
        bound = self._constants()
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
        return max(_CONSTANTS * roundoff, *spreads, between)

    def _spread(self, side: int) -> float:
        check = self.checks.get((side, self.spans[side].exit.event.order))
        return check.bound if check is not None else 0.0

    def _beyond_rounding(
        self, unexplained: Floats | None, apart: Floats, scale: float, known: Sequence[bool]
    ) -> Finding | None:
        """Where a side's operations are not known: what is left of the difference, and rounding."""
        a, b = self.pair.baseline.event, self.pair.target.event
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
        return norm(difference(found.astype(np.float64), exact)) / scale

    def _apart(self, value: Value) -> float:
        a, b = self.engines[0].array(value.event), self._in_baseline_layout(value)
        if a is None or b is None or not is_float(value.event):
            return 0.0
        wide = a.astype(np.float64)
        return norm(difference(wide, b.astype(np.float64))) / (norm(wide) or 1.0)

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
