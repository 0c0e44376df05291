"""Brings one step of both sides into a common form, before anything in it is judged."""

from __future__ import annotations

from tracediff.align import align
from tracediff.bisection import accumulation, flattening, placements, reductions, relayouts
from tracediff.bisection.batches import Batches
from tracediff.bisection.inheritance import State
from tracediff.bisection.options import Options
from tracediff.bisection.samples import Rendered, rendered
from tracediff.bisection.views import UNKEPT, Common, filled
from tracediff.checkpoint import is_of_checkpoint
from tracediff.events import Event, Pair
from tracediff.trace import Trace


def common_form(
    traces: tuple[Trace, Trace], step: int, state: State, options: Options, every_sample: bool
) -> tuple[Common, Rendered]:
    """Aligns a step and lays the sides over each other.

    Args:
        every_sample: Whether samples that are equal are wanted too, of which there may be many.
        state: Carried over from the step before; layouts of weights are added to it, and whether
            the runs place tensors differently.
    """
    events = _compared(traces[0], step), _compared(traces[1], step)
    stacks = traces[0].run.stack, traces[1].run.stack
    samples = rendered(traces, step, events, options.rules, every_sample)
    alignment = align(*events, stacks, options.rules)
    common = Common(alignment.with_samples(samples.alignment, options.rules), events)
    common, state.placed_differently = placements.applied(common, state.placed_differently)
    common = _parts(traces, common)
    common = Batches(traces, common).applied(common)
    common = flattening.applied(traces, common)
    state.relayouts |= relayouts.found(traces, common)
    common = relayouts.applied(traces, common, state.relayouts)
    common = reductions.applied(traces, common)
    common = accumulation.applied(traces, common)
    return common.apart(lambda pair: _incomparable(pair, stacks)), samples


def _compared(trace: Trace, step: int) -> list[Event]:
    """The events at module boundaries, without single operations and what is evidence only.

    Rendered samples have an alignment of their own.
    """
    return [
        event
        for event in trace.events(step, samples=False)
        if event.attributes.get("level") != "op"
        and not is_of_checkpoint(event)
        # States before a step decide; what was drawn in it explains.
        and (event.site.phase != "rng" or event.site.port == "state")
    ]


def _parts(traces: tuple[Trace, Trace], common: Common) -> Common:
    """Parts of fused tensors, which the alignment knows by shape alone, with their values.

    They take the place of fused gradients and optimizer states, which would count twice.
    """
    views: tuple[dict[int, Event], dict[int, Event]] = ({}, {})
    known = {id(event) for side in common.events for event in side}
    parts: tuple[list[Event], list[Event]] = ([], [])
    for pair in common.alignment.pairs:
        for side, event in enumerate((pair.baseline, pair.target)):
            if event.view is not None and event.payload is not None:
                views[side][id(event)] = filled(traces[side], event)
            if id(event) not in known:
                parts[side].append(event)
    taken = [{event.order for event in side} for side in parts]
    sides = [
        [e for e in side if e.order not in orders or e.site.phase not in ("backward", "optimizer")]
        for side, orders in zip(common.events, taken, strict=True)
    ]
    whole = Common(
        common.alignment, ([*sides[0], *parts[0]], [*sides[1], *parts[1]]), common.notes
    ).replaced(views)
    return whole.apart(_without_payload)


def _without_payload(pair: Pair) -> str | None:
    if any(e.view is not None and e.payload is None for e in (pair.baseline, pair.target)):
        return UNKEPT
    return None


def _incomparable(pair: Pair, stacks: tuple[str, str]) -> str | None:
    """Why a pair says nothing, or None. Ambiguous pairs are never forced by reshaping."""
    a, b = pair.baseline, pair.target
    untouched = a.attributes.get("touched") is b.attributes.get("touched") is False
    if a.site.phase == "rng" and untouched and a.digest != b.digest:
        return "neither seeded nor drawn from"
    if stacks[0] != stacks[1] and _laid_out_differently(pair):
        return "ambiguous: laid out differently by the two stacks"
    return None


def _laid_out_differently(pair: Pair) -> bool:
    a, b = pair.baseline, pair.target
    shape = b.shape[::-1] if pair.layout == "transposed" else b.shape
    if a.shape == shape or a.kind not in ("tensor", "labels", "mask", "ids"):
        return False
    return a.site.phase in ("loss", "trajectory") or _count(a) == _count(b)


def _count(event: Event) -> int:
    count = 1
    for size in event.shape:
        count *= size
    return count
