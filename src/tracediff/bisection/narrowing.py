"""The smallest part of two spans that still computes something else from the same inputs.

Both spans are recomputed in float64 from the baseline's inputs, so that values of the one are equal
to values of the other or are not. From the exits back: where both end in one operation and all but
one of its operands are equal, they part in that operand. An operand that one side takes as it is,
and the other computes something with, is an operation that only one side has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from numpy.typing import NDArray

from tracediff.align.flow import Flow, Value, name_of
from tracediff.bisection.spans import Engine, Span, difference, is_float, norm, span_of
from tracediff.compare.figures import widened
from tracediff.compare.layouts import find_layout
from tracediff.events import Event

_COMMUTE: Final = frozenset({"add", "mul", "maximum", "minimum", "logical_and", "logical_or"})

Known = Mapping[int, NDArray[Any] | None]
"""Values in float64 by the order of their event."""


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Where two spans part.

    Attributes:
        exits: What both compute in each other's place.
        spans: The operations that make them from what is equal.
        inputs: What is equal on both sides and both start from.
        lacking: The side, 0 or 1, that takes the value as it is where the other computes with it.
        user: The lacking side's operation that does.
        error: Norm of the difference on the same inputs, over the norm of the baseline's value;
            None where neither lies over the other.
    """

    exits: tuple[Value, Value]
    spans: tuple[Span, Span]
    inputs: tuple[tuple[Value, Value], ...]
    lacking: int | None
    user: Event | None
    error: float | None


def narrow(
    spans: tuple[Span, Span],
    engines: tuple[Engine, Engine],
    given: Mapping[Value, NDArray[Any]],
    partner: tuple[Mapping[Value, Value], Mapping[Value, Value]],
    bound: float,
) -> Narrowed:
    """Narrows two spans of known operations whose exits differ on the same inputs.

    Args:
        given: The baseline's values for the target's frontier, in its layouts.
        bound: Relative difference (L2) up to which two values are equal.
    """
    known = engines[0].values(spans[0]), engines[1].values(spans[1], given)
    return _Narrowing(spans, engines, known, partner, bound).run()


class _Narrowing:
    def __init__(
        self,
        spans: tuple[Span, Span],
        engines: tuple[Engine, Engine],
        known: tuple[Known, Known],
        partner: tuple[Mapping[Value, Value], Mapping[Value, Value]],
        bound: float,
    ) -> None:
        self._spans = spans
        self._engines = engines
        self._known = known
        self._partner = partner
        self._bound = bound
        self._equal: dict[tuple[Value, Value], bool] = {}

    def run(self) -> Narrowed:
        exits = self._spans[0].exit, self._spans[1].exit
        lacking, user = None, None
        while lacking is None:
            found = self._parting(*exits)
            if found is None:
                break
            taken = next((side for side in (0, 1) if self._is_input(side, found[side])), None)
            if taken is not None:
                if not self._computes_with(found, taken):
                    break  # the two take different values, whatever is done with them
                lacking, user = taken, exits[taken].event
            exits = found
        starts = self._starts()
        spans = span_of(exits[0], starts), span_of(exits[1], set(starts.values()))
        if lacking is not None:
            empty = Span(exits[lacking], (), (exits[lacking],))
            spans = (empty, spans[1]) if lacking == 0 else (spans[0], empty)
        inputs = tuple((v, starts[v]) for v in spans[0].frontier if v in starts)
        return Narrowed(exits, spans, inputs, lacking, user, self._apart(*exits))

    def _parting(self, a: Value, b: Value) -> tuple[Value, Value] | None:
        """The one pair of operands that differs, if the two are otherwise the same operation of
        the same operands; not where both sides take their operand as it is."""
        ours, theirs = self._operands(0, a), self._operands(1, b)
        if len(ours) != len(theirs) or name_of(a.event) != name_of(b.event):
            return None
        orders = [theirs]
        if name_of(a.event) in _COMMUTE and len(theirs) == 2:
            orders.append(theirs[::-1])
        pairs = [[p for p in zip(ours, o, strict=True) if not self._are_equal(*p)] for o in orders]
        differing = min(pairs, key=len)
        if len(set(differing)) != 1 or not self._are_one_operation(a, b):
            return None
        found = differing[0]
        is_interior = [not self._is_input(side, found[side]) for side in (0, 1)]
        return found if any(is_interior) and is_float(found[0].event) else None

    def _computes_with(self, found: tuple[Value, Value], taken: int) -> bool:
        """Whether the other side's value is computed from the one that a side takes as it is."""
        partner = self._partner[taken].get(found[taken])
        computed = span_of(found[1 - taken], self._partner[1 - taken])
        return partner is not None and partner in computed.frontier

    def _are_one_operation(self, a: Value, b: Value) -> bool:
        """Whether the target's operation makes of the baseline's operands what the baseline's
        does."""
        own = self._recomputed(0, a, a.event)
        other = self._recomputed(0, a, b.event, self._engines[1])
        return own is not None and other is not None and self._is_near(own, other)

    def _recomputed(
        self, side: int, value: Value, event: Event, engine: Engine | None = None
    ) -> NDArray[Any] | None:
        """What the operation of an event makes of the operands of a value."""
        orders = self._engines[side].flow.inputs[value.event.order]
        arrays = [self._known[side].get(order) for order in orders]
        if any(array is None for array in arrays):
            return None
        shape = value.event.shape
        found = (engine or self._engines[side]).recompute(event, arrays, shape)
        return found.value if found is not None else None

    def _operands(self, side: int, value: Value) -> list[Value]:
        flow: Flow = self._engines[side].flow
        orders = flow.inputs[value.event.order]
        return [flow.of_order[order] for order in orders if order in flow.of_order]

    def _is_input(self, side: int, value: Value) -> bool:
        return value.is_leaf or value in self._spans[side].frontier

    def _are_equal(self, a: Value, b: Value) -> bool:
        if (a, b) not in self._equal:
            self._equal[a, b] = self._compare(a, b)
        return self._equal[a, b]

    def _compare(self, a: Value, b: Value) -> bool:
        if self._is_input(0, a) and self._is_input(1, b):
            return self._partner[0].get(a) is b or a.event.digest == b.event.digest
        if a.count != b.count or is_float(a.event) != is_float(b.event):
            return False
        if not is_float(a.event):
            return a.event.digest == b.event.digest
        apart = self._apart(a, b)
        return apart is not None and apart <= self._bound

    def _apart(self, a: Value, b: Value) -> float | None:
        x, y = self._known[0].get(a.event.order), self._known[1].get(b.event.order)
        layout = find_layout(x, y) if x is not None and y is not None else None
        if x is None or y is None or layout is None:
            return None
        wide = widened(x)
        return norm(difference(wide, widened(layout.apply(y)))) / (norm(wide) or 1.0)

    def _is_near(self, x: NDArray[Any], y: NDArray[Any]) -> bool:
        return norm(difference(x, y)) <= self._bound * (norm(x) or 1.0)

    def _starts(self) -> dict[Value, Value]:
        """What the spans may start from: their frontiers, and what is equal on both sides."""
        starts = {value: self._partner[0][value] for value in self._spans[0].frontier}
        starts |= {self._partner[1][value]: value for value in self._spans[1].frontier}
        inside = [_interior(self._engines[side].flow, self._spans[side]) for side in (0, 1)]
        for a in inside[0]:
            equal = next((b for b in inside[1] if self._are_equal(a, b)), None)
            if equal is not None:
                starts.setdefault(a, equal)
        return starts


def _interior(flow: Flow, span: Span) -> Sequence[Value]:
    """The values that a span computes on its way."""
    found = (flow.of_order.get(event.order) for event in span.operations)
    return [v for v in dict.fromkeys(found) if v is not None and v is not span.exit]
