"""Events that one side lacks: which of them are a divergence, and how the rest are told."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from tracediff.align import Alignment, canonical
from tracediff.bisection import batches, given, placements, reductions, views
from tracediff.events import STAGE_RANK, Event, Site
from tracediff.verdict import Divergence, Unmatched

_DECISIVE: Final = ("loading", "forward", "loss", "backward", "optimizer")
_TRAINING: Final = ("forward", "backward", "optimizer")
_EXCUSED: Final = (
    batches.UNKNOWN,
    batches.UNKEPT,
    reductions.UNREDUCED,
    views.UNKEPT,
    *placements.REASONS,
)
"""Both sides have such an event, or may lack it; how to lay one over the other is not known."""
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=\[)\d+(?=\])")


def missing(alignment: Alignment, stacks: tuple[str, str]) -> list[Divergence]:
    """Divergences of kind `missing` (the target lacks it) and `extra` (only the target has it).

    Between runs of one stack every event has to be there, but for what a call may return besides
    its main output (attention weights, which one implementation has and another has not). Between
    stacks, modules differ by design, so an event counts as missing only if its like (the same name
    with another layer number) was matched: one layer out of four is missing, an activation module
    that the other stack has nowhere is not.
    """
    found = []
    sides = ((alignment.baseline_only, "missing"), (alignment.target_only, "extra"))
    for side, (events, kind) in enumerate(sides):
        likes = {
            (_like(stacks[side], _event(pair, side)), _event(pair, side).site.port)
            for pair in alignment.pairs
        }
        calls = {_call(_event(pair, side)) for pair in alignment.pairs}
        for event, reason in events:
            if event.site.phase not in _DECISIVE or reason.startswith("ignored"):
                continue
            if event.site.port == given.PORT or reason in _EXCUSED:
                continue
            if _is_optional(event) and _call(event) in calls:
                continue
            if stacks[0] == stacks[1] or (
                event.site.phase in ("loading", "forward")
                and event.site.call == 0
                and (_like(stacks[side], event), event.site.port) in likes
            ):
                found.append(_divergence(event, kind, reason))
    found += _step_of_one_side(alignment)
    return sorted(found, key=lambda d: (d.step, STAGE_RANK[d.stage], d.order))


def _step_of_one_side(alignment: Alignment) -> list[Divergence]:
    """A step in which one side trains and the other does not so much as run its model.

    It has evaluated after its last update, say, where the other goes on training.
    """
    if any(pair.baseline.site.phase in _TRAINING for pair in alignment.pairs):
        return []
    sides = alignment.baseline_only, alignment.target_only
    phases = [{event.site.phase for event, _ in events} for events in sides]
    found = []
    for side, kind in enumerate(("missing", "extra")):
        if "optimizer" in phases[side] and not phases[1 - side] & set(_TRAINING):
            step = sides[side][0][0].site.step
            site = Site(step, "trajectory", "step")
            event = Event(site=site, order=0)
            found.append(_divergence(event, kind, f"the other side makes no update in step {step}"))
    return found


def groups(alignments: Iterable[Alignment]) -> tuple[Unmatched, ...]:
    """All unmatched events, counted by side, stage and reason, with one of them as an example."""
    found: dict[tuple[str, str, str], list[Event]] = defaultdict(list)
    for alignment in alignments:
        for side, events in (
            ("baseline", alignment.baseline_only),
            ("target", alignment.target_only),
        ):
            for event, reason in events:
                found[side, event.site.phase, reason].append(event)
    rows = [
        Unmatched(
            side=side,
            example=str(events[0].site),
            count=len(events),
            reason=f"{stage}: {reason}",
        )
        for (side, stage, reason), events in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.side, -row.count)))


def _call(event: Event) -> tuple[str, str, int]:
    return event.site.phase, event.site.path, event.site.call


def _is_optional(event: Event) -> bool:
    """Whether a port is one beside the main one: `out.1`, `in.mask`, `grad_out.1`."""
    return event.site.phase in ("forward", "backward") and "." in event.site.port


def _like(stack: str, event: Event) -> tuple[str, str]:
    return event.site.phase, _NUMBER.sub("*", canonical(stack, event.site.path))


def _event(pair: object, side: int) -> Event:
    event: Event = getattr(pair, ("baseline", "target")[side])
    return event


def _divergence(event: Event, kind: str, reason: str) -> Divergence:
    site = event.site
    side = "baseline" if kind == "missing" else "target"
    return Divergence(
        stage=site.phase,
        step=site.step,
        site=str(site),
        path=site.path,
        port=site.port,
        kind=kind,
        call=site.call,
        order=event.order,
        op={side: event.op},
        meaning=f"only the {side} has it: {reason}",
        where={side: event.source},
        shapes={side: event.shape},
    )
