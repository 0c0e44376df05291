"""Operations that draw: runs of one stack whose generators agree before a step draw the same."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from tracediff.align.fingerprints import distance, tolerance
from tracediff.align.flow import is_operation, module_of
from tracediff.compare.figures import largest_deviations, measure
from tracediff.consumers import OPERATION_PORT, is_draw
from tracediff.events import Event
from tracediff.trace import Trace
from tracediff.verdict import Divergence, OperationSpan, SpanOperation

_SIDES = ("baseline", "target")

_GAIN = 16.0
"""How much further apart than its inputs the result of an operation may be that draws as well."""

Traces = tuple[Trace, Trace]
Sides = tuple[Sequence[Event], Sequence[Event]]


def first_draw(traces: Traces, events: Sides) -> tuple[Divergence, tuple[int, int]] | None:
    """The first operation of a step that draws other numbers on the two sides, or that draws on one
    side only and shifts what is drawn after it; and its orders on both sides.

    None where no numbers differ, or a generator differs before the step: then that is told.
    """
    if traces[0].run.stack != traces[1].run.stack or not _same_states(events):
        return None
    pair = _first_pair(traces, events)
    if pair is None:
        return None
    draws = [_draws(side, until) for side, until in zip(events, pair, strict=True)]
    extra = _extra(draws)
    if extra is not None:
        return _only_on(*extra)
    return _drawn_otherwise(traces, *pair), (pair[0].order, pair[1].order)


def _same_states(events: Sides) -> bool:
    """Whether all generators that operations drew from were in the same state before the step."""
    drawn = {e.site.path for side in events for e in side if is_draw(e, OPERATION_PORT)}
    states = [
        {
            e.site.path: e.digest
            for e in side
            if (e.site.phase, e.site.port) == ("rng", "state") and e.site.path in drawn
        }
        for side in events
    ]
    return states[0] == states[1]


def _first_pair(traces: Traces, events: Sides) -> tuple[Event, Event] | None:
    """The first operation that draws, at one site on both sides, with another result."""
    found = [
        {(e.site, e.op): e for e in side if is_operation(e) and e.attributes.get("rng") is True}
        for side in events
    ]
    by_order = [{event.order: event for event in side} for side in events]
    for key, event in found[0].items():
        other = found[1].get(key)
        if other is None or other.digest == event.digest:
            continue
        inputs = [
            [known[order] for order in each.inputs if order in known]
            for each, known in zip((event, other), by_order, strict=True)
        ]
        if not _are_explained(traces, (event, other), inputs):
            return event, other
    return None


def _are_explained(
    traces: Traces, pair: tuple[Event, Event], inputs: Sequence[Sequence[Event]]
) -> bool:
    """Whether two results may be apart because inputs are, which the numbers drawn were mixed with:
    dropout in a fused kernel. Other numbers change a good part of a result."""
    given = list(zip(*inputs, strict=False))
    apart = [_apart(traces, a, b) for a, b in given if a.digest != b.digest]
    found = _apart(traces, *pair)
    dtypes = (pair[0].dtype, pair[1].dtype)
    return bool(apart) and found <= max(tolerance(dtypes), _GAIN * max(apart))


def _apart(traces: Traces, a: Event, b: Event) -> float:
    """How far two values are apart (L2, relative), by their statistics where they are not kept."""
    if a.shape != b.shape or not (a.fingerprint and b.fingerprint):
        return math.inf
    if a.payload is None or b.payload is None:
        return distance(a.fingerprint, b.fingerprint)
    return measure(traces[0].array(a), traces[1].array(b)).error.rel_l2


def _draws(events: Sequence[Event], until: Event) -> list[Event]:
    """What is drawn in the step until an operation has drawn."""
    states = [e.order for e in events if (e.site.phase, e.site.port) == ("rng", "state")]
    start = max(states, default=-1)
    found = [e for e in events if is_draw(e, OPERATION_PORT) and e.order > start]
    # An operation's draw is recorded after its result.
    own = min((e.order for e in found if e.order > until.order), default=sys.maxsize)
    return [e for e in found if e.order <= own]


def _extra(draws: Sequence[Sequence[Event]]) -> tuple[int, Event] | None:
    """The side that draws once more, and the first draw that the other does not have."""
    keys = [[(e.op, e.value["by"]) for e in side] for side in draws]
    if len(keys[0]) == len(keys[1]):
        return None
    side = int(len(keys[1]) > len(keys[0]))
    more, fewer = keys[side], keys[1 - side]
    place = next((i for i, (a, b) in enumerate(zip(more, fewer, strict=False)) if a != b), None)
    return side, draws[side][len(fewer) if place is None else place]


def _only_on(side: int, event: Event) -> tuple[Divergence, tuple[int, int]]:
    orders = [sys.maxsize, sys.maxsize]
    orders[side] = event.order
    found = Divergence(
        stage="rng",
        step=event.site.step,
        site=str(event.site),
        path=event.site.path,
        port=event.site.port,
        kind="extra" if side else "missing",
        call=event.site.call,
        order=event.order,
        op={_SIDES[side]: event.op},
        where={_SIDES[side]: event.source},
        meaning=f"{event.op} ({event.source or 'line unknown'}) draws from {event.site.path} in "
        f"{event.value['by']}, and what is drawn after it comes out otherwise",
    )
    return found, (orders[0], orders[1])


def _drawn_otherwise(traces: Traces, a: Event, b: Event) -> Divergence:
    found = Divergence(
        stage=a.site.phase,
        step=a.site.step,
        site=str(a.site),
        path=module_of(a),
        port=a.site.port,
        kind="value",
        call=a.site.call,
        order=a.order,
        target_site=str(b.site),
        op={"baseline": a.op, "target": b.op},
        where={"baseline": a.source, "target": b.source},
        shapes={"baseline": a.shape, "target": b.shape},
        meaning="it draws other numbers, and the generators were in the same state before the step",
        span=OperationSpan(baseline=_alone(a), target=_alone(b), matched_by="name"),
    )
    if None in (a.payload, b.payload) or a.shape != b.shape:
        return found
    values = traces[0].array(a), traces[1].array(b)
    return replace(found, error=measure(*values).error, deviations=largest_deviations(*values))


def _alone(event: Event) -> tuple[SpanOperation]:
    site, shape = str(event.site), event.shape
    return (
        SpanOperation(site=site, op=event.op, where=event.source, shape=shape, dtype=event.dtype),
    )
