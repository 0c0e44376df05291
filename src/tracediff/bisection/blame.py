"""Which side is wrong at the first divergence: each is held to what it was itself given.

The referee blames where a formula decides. Here are the other witnesses: the weight files that a
side loaded and the configuration next to them. A side that departs from its own is wrong; where
both or neither do, nobody is blamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tracediff.bisection.configuration import departures, follows_rotary_base, is_rotary_table
from tracediff.bisection.inheritance import Judged
from tracediff.bisection.weights import Files
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
