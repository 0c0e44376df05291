"""Spans of operations between paired values, recomputed in float64.

The span of a paired value holds, on each side, the operations that made it from other paired values
and the unpaired ones in between: one fused operation of one stack against the several that another
needs. `Engine` recomputes what a span computes, from what was recorded or from other inputs.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff import stacks
from tracediff.align.flow import Flow, Value
from tracediff.bisection.cotangents import Cotangents, is_cotangent, operation_of
from tracediff.compare.figures import is_complex, widened
from tracediff.events import Event
from tracediff.replaying import Floats, Replayed, Replayer
from tracediff.trace import Trace

_LARGEST: Final = 6.0
"""Spreads that no element exceeds by chance: once in 1e9 for normal errors."""

_TYPICAL: Final = 2.0
"""Spreads that the root mean square of many elements stays below: 1 by derivation."""

_OTHERS: Final = 8
"""Calls of an operation that show whether its formula describes it."""

_NONE: Final = 1e-3
"""Part of a gradient up to which it is told as missing."""

_KEPT: Final = 1 << 16
"""Bytes up to which a payload is kept once it was read."""


@dataclass(frozen=True, slots=True)
class Span:
    """The operations of one side that make a paired value.

    Attributes:
        operations: In the order of execution, those that lay the value out anew last.
        frontier: The paired values that they start from.
    """

    exit: Value
    operations: tuple[Event, ...]
    frontier: tuple[Value, ...]


def span_of(value: Value, paired: Container[Value]) -> Span:
    """The span of a value back to the nearest paired ones."""
    events, frontier, seen, waiting = list(value.members), [], {value}, list(value.inputs)
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        if each in paired:
            frontier.append(each)
            continue
        events.extend(event for event in each.members)
        waiting.extend(each.inputs)
    operations = sorted((e for e in events if not is_leaf(e)), key=lambda e: e.order)
    return Span(value, tuple(operations), tuple(sorted(frontier, key=lambda v: v.index)))


def is_leaf(event: Event) -> bool:
    return bool(event.attributes.get("leaf"))


@dataclass(frozen=True, slots=True)
class Check:
    """One operation held to its formula, on its own recorded inputs.

    Attributes:
        ratio: Its error over what rounding allows; above 1 it computed something else.
        error: Norm of the error over that of the exact result.
        bound: What rounding explains, in the same unit.
    """

    event: Event
    ratio: float
    error: float
    bound: float
    derivation: str


@dataclass(slots=True)
class Engine:
    """Recomputes the operations of one side."""

    trace: Trace
    flow: Flow
    cotangents: Cotangents = field(init=False)
    _checks: dict[int, Check | None] = field(default_factory=dict)
    _arrays: dict[int, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cotangents = Cotangents(self.flow)

    def array(self, event: Event) -> NDArray[Any] | None:
        """The payload of an event. Small ones are kept: each is asked for several times."""
        if event.payload is None:
            return None
        found = self._arrays.get(event.order)
        if found is None:
            found = self.trace.array(event)
            if found.nbytes <= _KEPT:
                self._arrays[event.order] = found
        return found

    # ---- one operation ---------------------------------------------------------------------

    def check(self, event: Event) -> Check | None:
        """Holds an operation to its formula; None where there is none or a payload is missing."""
        if event.order not in self._checks:
            self._checks[event.order] = self._check(event)
        return self._checks[event.order]

    def _check(self, event: Event) -> Check | None:
        found = self.array(event)
        inputs = [self.array(self.flow.events[order]) for order in self.flow.inputs[event.order]]
        if found is None or any(array is None for array in inputs):
            return None
        exact = self.recompute(event, inputs)
        if exact is None or exact.value.shape != found.shape:
            return None
        # An endless spread: implementations do as they like there.
        error = np.where(np.isinf(exact.spread), 0.0, difference(widened(found), exact.value))
        scale = norm(exact.value) or 1.0
        rows = max(1, math.prod(found.shape[:-1]))
        return Check(
            event=event,
            ratio=ratio(error, exact.spread, rows),
            error=norm(error) / scale,
            bound=limit(rows) * norm(exact.spread) / scale,
            derivation=exact.derivation,
        )

    def recompute(
        self, event: Event, inputs: list[Any], shape: tuple[int, ...] | None = None
    ) -> Replayed | None:
        """The formula of an operation on given inputs.

        Args:
            shape: Of the result, where it is not that of the event.
        """
        if is_cotangent(event):
            known = dict(zip(self.flow.inputs[event.order], inputs, strict=True))
            return self.cotangents.pull_back(_reference(), event, known)
        if is_leaf(event):
            return None
        return _reference().recompute(operation_of(event, self.flow, inputs, shape))

    def told(self, event: Event) -> str:
        """What an operation that is beyond its bound has done, for people."""
        found = self.array(event)
        if not is_cotangent(event) or not self.cotangents.reads(event) or found is None:
            return f"{event.op} does not give what its formula gives"
        known = {o: self.array(self.flow.events[o]) for o in self.flow.inputs[event.order]}
        given = {order: array for order, array in known.items() if array is not None}
        reads, factor = self.cotangents.suspects(_reference(), event, given, found)
        lines = dict.fromkeys(f"{read.event.op} ({read.event.source})" for read in reads)
        who, does = f"the backward pass of {' and '.join(lines)}", "does not give"
        if factor != 1.0:
            does = f"gives {factor:.6g} times" if abs(factor) > _NONE else "gives nothing of"
        return f"{who} {does} what its formula gives"

    def keeps_elsewhere(self, event: Event) -> bool:
        """Whether an operation keeps to its formula wherever else it is executed: then the formula
        describes it rightly, and an error here is its own."""
        others = [e for e in self.flow.events.values() if e.op == event.op and e is not event]
        near = sorted(others, key=lambda e: abs(e.order - event.order))[:_OTHERS]
        checks = [check for e in near if (check := self.check(e)) is not None]
        return bool(checks) and all(check.ratio <= 1 for check in checks)

    # ---- a whole span ----------------------------------------------------------------------

    def evaluate(
        self,
        span: Span,
        given: Mapping[Value, NDArray[Any]] | None = None,
        kept: Event | None = None,
    ) -> Floats | None:
        """What a span makes of its inputs in float64.

        Args:
            given: Values of the frontier, in the layout of their first event, in place of those
                that were recorded.
            kept: An operation whose recorded result is taken as it is.

        Returns:
            The exit in the layout of its first event; None where a formula is missing on the way.
        """
        return self.values(span, given, kept)[span.exit.event.order]

    def values(
        self,
        span: Span,
        given: Mapping[Value, NDArray[Any]] | None = None,
        kept: Event | None = None,
    ) -> dict[int, NDArray[Any] | None]:
        """As `evaluate`, with all values on the way, by the order of their event."""
        known: dict[int, NDArray[Any] | None] = {}
        for value, array in (given or {}).items():
            known[value.event.order] = array
        inside = {event.order for event in span.operations}
        first = {value.event.order for value in span.frontier}
        if kept is not None:
            known[kept.order] = self.array(kept)
        self._add(span.exit.event.order, known, inside, first)
        return known

    def _add(
        self,
        order: int,
        known: dict[int, NDArray[Any] | None],
        inside: set[int],
        frontier: set[int],
    ) -> None:
        """Adds the value of an event, recomputed inside the span and in layouts of its frontier,
        and those that it needs.

        Integers and booleans are taken as they were recorded: they choose, and are judged
        elsewhere.
        """
        waiting = [order]
        while waiting:
            current = waiting[-1]
            if current in known:
                waiting.pop()
                continue
            event = self.flow.events[current]
            recorded = current in frontier or self._is_given(event) or not is_float(event)
            of = self.flow.of_order.get(current)
            moved = of is not None and of.event.order in frontier  # another layout of an input
            if recorded or not (current in inside or moved):
                known[current] = self.array(event)
                continue
            inputs = self.flow.inputs[event.order]
            missing = [each for each in inputs if each not in known]
            if missing:
                waiting.extend(missing)
                continue
            arrays = [known[each] for each in inputs]
            found = None if any(a is None for a in arrays) else self.recompute(event, arrays)
            known[current] = found.value if found is not None else None

    def _is_given(self, event: Event) -> bool:
        """Whether no operation made a value: parameters, and what a backward pass begins with."""
        begins = is_cotangent(event) and event.shape != () and not self.cotangents.reads(event)
        return is_leaf(event) or begins


def is_float(event: Event) -> bool:
    """Whether the elements are rounded: floating-point or complex numbers."""
    return event.dtype.startswith(("float", "bfloat", "complex"))


def norm(x: Floats) -> float:
    """The Euclidean norm of the finite elements, without waking the threads of BLAS."""
    flat = x.reshape(-1)
    flat = flat[np.isfinite(flat)]
    flat = np.abs(flat) if is_complex(flat) else flat
    return math.sqrt(float(np.einsum("i,i->", flat, flat)))


def difference(a: Floats, b: Floats) -> Floats:
    """`a - b`, zero where both are the same infinity or NaN."""
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        result: Floats = np.where(same, 0.0, a - b)
    return result


def ratio(error: Floats, spread: Floats, rows: int) -> float:
    """An error over what rounding allows it, by element and in the mean."""
    if not error.size:
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.where(error == 0, 0.0, np.abs(error) / spread)
    largest = float(np.nan_to_num(each, nan=np.inf, posinf=np.inf).max()) / _LARGEST
    scale = norm(np.broadcast_to(spread, error.shape))
    return max(largest, norm(error) / (limit(rows) * scale) if scale else 0.0)


def limit(rows: int) -> float:
    """How far a root mean square may be above the spread: errors of a row have a common part."""
    return _TYPICAL + (_LARGEST - _TYPICAL) / math.sqrt(rows)


@cache
def _reference() -> Replayer:
    return stacks.load_replayer("reference")()
