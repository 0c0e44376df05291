"""Faults of a recorder: what makes a comparison say nothing about the models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tracediff.bisection.inheritance import Judged
from tracediff.trace import Trace


def recorder_fault(traces: tuple[Trace, Trace], judged: Sequence[Judged]) -> str | None:
    """The fault in one sentence; None where there is none."""
    if traces[0].identity == traces[1].identity:
        return "both arguments are the same trace; give two recordings"
    zero: dict[int, int] = defaultdict(int)
    outputs = [j.pair for j in judged if j.event.site.phase == "forward" and j.event.fingerprint]
    for pair in outputs:
        for side, event in enumerate((pair.baseline, pair.target)):
            count, zeros = event.fingerprint[0], event.fingerprint[3]
            zero[side] += bool(count) and zeros == count
    for side, name in enumerate(("baseline", "target")):
        if len(outputs) >= 4 and zero[side] > 0.5 * len(outputs):
            return f"{zero[side]} of {len(outputs)} forward values of the {name} are all zero"
    return None
