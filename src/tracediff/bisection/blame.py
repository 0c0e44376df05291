"""Which side is wrong at the first divergence: each is held to what it was itself given.

The referee blames where a formula decides. Here are the other witnesses: the weight files that a
side loaded and the configuration next to them, its own samples, its own logits and next tokens,
what its attention passes back, the number of its latest update. A side that departs from its own is
wrong; where both or neither do, nobody is blamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tracediff.bisection.configuration import departures, follows_rotary_base, is_rotary_table
from tracediff.bisection.inheritance import Judged
from tracediff.bisection.weights import Files
from tracediff.errors import TraceError
from tracediff.events import Event, Site
from tracediff.trace import Trace
from tracediff.verdict import Divergence

Traces = tuple[Trace, Trace]
_SIDES = ("baseline", "target")


def assign(found: Divergence, first: Judged | Divergence, traces: Traces) -> Divergence:
    """The divergence with the side that is wrong, where a witness can tell."""
    if found.blame != "undecided" or found.origin == "inherited":
        return found
    if found.stage == "loading":
        if isinstance(first, Judged):
            found = _of_loaded(found, first, traces)
        elif found.kind in ("missing", "extra"):
            found = _of_missing(found, traces)
    elif found.stage == "rendering":
        found = _of_rendering(found, traces)
    elif isinstance(first, Judged) and found.stage == "loss":
        found = _of_loss(found, first, traces)
    elif isinstance(first, Judged) and (found.stage, found.port) == ("optimizer", "hyper"):
        found = _of_count(found, first, traces)
    elif (found.stage, found.port) in (("backward", "grad"), ("backward", "grad_out")):
        found = _of_values(found, traces)
    if found.blame == "undecided" and found.stage in ("loading", "forward"):
        found = _of_configuration(found, traces)
    return found


def _of_loaded(found: Divergence, first: Judged, traces: Traces) -> Divergence:
    if found.port == "param":
        return _of_parameter(found, first, traces)
    if is_rotary_table(first.event):
        events = first.pair.baseline, first.pair.target
        known = [follows_rotary_base(t, e) for t, e in zip(traces, events, strict=True)]
        return _told(found, known, "on the {} it is not the table of its own rotary base")
    return found


def _of_parameter(found: Divergence, first: Judged, traces: Traces) -> Divergence:
    """A parameter is wrong on the side on which it is not the checkpoint's."""
    pair = first.pair
    events = pair.baseline, pair.target
    names = [[e.site.path, *e.attributes.get("aliases", ())] for e in events]
    known = [
        Files(trace).match(
            event,
            (*names[side], *names[1 - side]),
            turned=pair.layout == "transposed" and not event.dims,
        )
        for side, (trace, event) in enumerate(zip(traces, events, strict=True))
    ]
    if known == [True, True]:
        return _noted(found, "each side holds what its own weight file holds: the files differ")
    return _told(found, known, "on the {} it is not what its weight file holds")


def _of_missing(found: Divergence, traces: Traces) -> Divergence:
    """A parameter is missing on a side whose own weight file has it."""
    lacking = found.kind == "missing"
    if not Files(traces[lacking]).have([found.path]):
        return found
    return _blamed(found, _SIDES[lacking], f"the weight file of the {_SIDES[lacking]} has it")


def _of_rendering(found: Divergence, traces: Traces) -> Divergence:
    """Text, IDs, labels or masks are wrong on the side on which they do not follow from its own
    samples."""
    from tracediff.bisection.own_samples import is_consistent

    sites = found.site, found.target_site or found.site
    known: list[bool | None] = []
    for trace, site in zip(traces, sites, strict=True):
        try:
            known.append(is_consistent(trace, trace.find(site)))
        except TraceError:
            return found
    return _told(found, known, "on the {} it does not follow from its own samples")


def _of_loss(found: Divergence, first: Judged, traces: Traces) -> Divergence:
    """A loss is wrong on the side on which it is not that of its own logits and next tokens."""
    from tracediff.bisection.losses import examine

    examined = [
        examine(t, e.site.step, e.site.call) for t, e in zip(traces, _events(first), strict=True)
    ]
    labels = [loss.is_of_next_tokens for loss in examined]
    found = _told(found, labels, "on the {} the labels are not the next tokens of its own batch")
    if found.blame != "undecided":
        return found
    means = [loss.is_mean for loss in examined]
    return _told(found, means, "on the {} it is not the mean over the tokens with a gradient")


def _of_values(found: Divergence, traces: Traces) -> Divergence:
    """The gradient of attention's values is wrong on the side on which it does not sum to what
    attention passes back."""
    from tracediff.bisection.attention_gradients import examine

    sites = Site.parse(found.site), Site.parse(found.target_site or found.site)
    why = "on the {} the gradient of the values does not sum to what attention passes back"
    return _told(found, examine(traces, sites), why)


def _of_count(found: Divergence, first: Judged, traces: Traces) -> Divergence:
    """An optimizer that has lost count of its updates has lost its state."""
    if found.step not in traces[0].steps[1:]:
        return found
    known = [_counts_on(t, e) for t, e in zip(traces, _events(first), strict=True)]
    return _told(found, known, "the {} has lost count of its updates, and with it its state")


def _counts_on(trace: Trace, event: Event) -> bool | None:
    """Whether the number of an update follows that of the step before."""
    before = trace.steps[trace.steps.index(event.site.step) - 1]
    for other in trace.events(before, samples=False):
        site = other.site
        if (site.phase, site.path, site.port) == ("optimizer", event.site.path, "hyper"):
            values = [e.value for e in (other, event) if isinstance(e.value, Mapping)]
            counts = [int(value["step"]) for value in values if "step" in value]
            return counts[1] == counts[0] + 1 if len(counts) == 2 else None
    return None


def _events(first: Judged) -> tuple[Event, Event]:
    return first.pair.baseline, first.pair.target


def _of_configuration(found: Divergence, traces: Traces) -> Divergence:
    """A setting is wrong on the side on which it is not what lay next to its weight file."""
    departing = departures(found, traces)
    if bool(departing[0]) == bool(departing[1]):
        return found
    side = _SIDES[bool(departing[1])]
    what = ", ".join(
        f"{name} is {own!r} and not {filed!r}"
        for name, (own, filed) in (departing[0] or departing[1]).items()
    )
    return _blamed(found, side, f"on the {side} {what}, as next to its weight file")


def _told(found: Divergence, known: Sequence[bool | None], why: str) -> Divergence:
    """Blames the side that does not hold if the other one does."""
    if True not in known or False not in known:
        return found
    wrong = _SIDES[known.index(False)]
    return _blamed(found, wrong, why.format(wrong))


def _blamed(found: Divergence, side: str, why: str) -> Divergence:
    return replace(_noted(found, why), blame=side)


def _noted(found: Divergence, why: str) -> Divergence:
    return replace(found, meaning="; ".join(part for part in (found.meaning, why) if part))
