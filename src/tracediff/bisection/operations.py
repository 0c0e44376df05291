"""Bisection down to the operation, where both traces hold operations of a step.

Each operation is held to its float64 formula on its own recorded inputs, and the spans of a pair to
each other: on the same inputs, both have to compute the same. What errs in one of these ways, and
shows in the pair, has introduced a divergence there, however small or large the difference is that
came in. See docs/deciding.md.
"""

from __future__ import annotations

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
from tracediff.bisection.nonfinite import judge_nan
from tracediff.bisection.span_pairs import CONSTANTS, Mask, SpanPair
from tracediff.bisection.spans import Engine, Span, difference, is_float, norm, span_of
from tracediff.bisection.unattached import Unattached
from tracediff.compare.figures import unit_roundoff, widened
from tracediff.compare.layouts import Layout, find_layout
from tracediff.events import STAGE_RANK, Event
from tracediff.operations import ALIAS, CONSTANT, VIEWS
from tracediff.trace import Trace

_LEFT: Final = 1e-3
"""The part of an error that may be left where it has healed; more is dilution."""


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
        paired wrongly, or a consistent change makes no difference, such as a scale that one side
        applies to the queries and the other to the scores."""
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
                near = apart <= min(tolerance(dtypes), _LEFT * error)
                if not near and value.users and self._is_multiple(value, partner):
                    waiting.extend(value.users)
                else:
                    found.append(near)
        return bool(found) and all(found)

    def _is_multiple(self, value: Value, partner: Value) -> bool:
        from tracediff.compare.patterns import recognise

        values = self.values(ValuePair(value, partner, ""))
        pattern = recognise(*values) if values is not None and is_float(value.event) else None
        return pattern is not None and pattern.name in ("scaled", "sign")

    # ---- one pair --------------------------------------------------------------------------

    def _judge(self, pair: ValuePair) -> Finding | None:
        a, b = pair.baseline.event, pair.target.event
        numbers = all(is_float(event) or is_integer(event) for event in (a, b))
        if pair.layout != "whole" or not numbers or (a.digest == b.digest and a.dtype == b.dtype):
            return None
        if pair.baseline.is_leaf and pair.target.is_leaf:
            return self._judge_constant(pair)
        if _is_unread(pair.baseline) and _is_unread(pair.target):
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
        case = SpanPair(pair, spans, self._engines, self._partner, self._lay_over, self._counts(a))
        return case.finding()

    def _judge_constant(self, pair: ValuePair) -> Finding | None:
        """A table that the code brings along, such as angles that are no buffer: all else that no
        operation made is recorded, and judged, elsewhere."""
        a, b = pair.baseline.event, pair.target.event
        values = self.values(pair)
        are_constants = all(
            is_float(event) and event.attributes.get("name") == CONSTANT for event in (a, b)
        )
        if not are_constants or values is None or STAGE_RANK[a.site.phase] > STAGE_RANK["loss"]:
            return None
        wide = widened(values[0])
        error = norm(difference(wide, widened(values[1]))) / (norm(wide) or 1.0)
        bound = CONSTANTS * max(map(unit_roundoff, (a.dtype, b.dtype)))
        if error <= bound:
            return None
        return Finding(
            pair=pair,
            spans=(Span(pair.baseline, (), ()), Span(pair.target, (), ())),
            inputs=(),
            culprits=(None, None),
            checks={},
            error=error,
            bound=bound,
            derivation=f"a constant of {a.dtype}, rounded by each side",
            blame="undecided",
            note="no operation of the step made it",
        )

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


def _is_unread(value: Value) -> bool:
    """Whether memory was looked at and nothing computed from it: a part that is to be written to,
    which holds anything as long as it was not. What it holds afterwards is an alias of it."""
    return name_of(value.event) in VIEWS and all(
        name_of(user.event) == ALIAS or _is_unread(user) for user in value.users
    )
