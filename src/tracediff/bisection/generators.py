"""Where the generators of two runs part: before which step, by whose draws, and by how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from tracediff.bisection.halving import generators_part
from tracediff.consumers import PORT, UNWATCHED
from tracediff.draws import Position, count, position
from tracediff.events import Event
from tracediff.trace import Trace

Traces = tuple[Trace, Trace]


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one generator did in one run between two recorded states."""

    path: str
    start: NDArray[Any]
    drawn: list[Event]
    end: NDArray[Any]

    def draws(self) -> dict[str, int | None]:
        """Numbers drawn by each consumer, in the order in which they first drew."""
        found: dict[str, int | None] = {}
        places = [(e.value["by"], Position(*e.value["at"])) for e in self.drawn]
        last = position(self.path, self.end)
        if last is not None and (not places or places[-1][1] != last):
            places.append((UNWATCHED, last))
        before: int | None = 0
        for by, place in places:
            until = count(self.path, self.start, place)
            more = None if until is None or before is None else until - before
            known = found.get(by, 0)
            found[by] = None if known is None or more is None else known + more
            before = until
        return found


def parting(traces: Traces, path: str, until: int) -> str:
    """One sentence on where a generator parts that differs before a step; "" if unknown.

    Args:
        path: Path of the generator's events, the same in both.
        until: A step before which it is not in the same state in both.
    """
    step = generators_part(traces, path, until)
    if step is None or any(path not in _events(trace, step, "state") for trace in traces):
        return ""
    place = traces[0].steps.index(step)
    if place == 0:
        return f"generator {path} differs from the beginning: it was seeded or drawn from otherwise"
    before = traces[0].steps[place - 1]
    after = [_events(trace, before, "after").get(path) for trace in traces]
    if (after[0] and after[0].digest) != (after[1] and after[1].digest):
        where = f"in step {before}"
        stretches = [_inside(trace, path, before) for trace in traces]
    else:
        where = f"between the update of step {before} and the first call of step {step}"
        stretches = [_between(trace, path, before, step) for trace in traces]
    return f"the generators part {where}, {_told(path, *stretches)}"


def _told(path: str, baseline: Stretch, target: Stretch) -> str:
    a, b = baseline.draws(), target.draws()
    for by in dict.fromkeys((*a, *b)):
        one, other = a.get(by, 0), b.get(by, 0)
        if one == other and one is not None:
            continue
        if one is None or other is None:
            return f"in {by}: {path} was seeded anew, or drawn from too often to be counted"
        more, side = abs(one - other), "target" if other > one else "baseline"
        return (
            f"in {by}: {more} extra draw{'s' * (more > 1)} from {path} in the {side} "
            f"({one} against {other})"
        )
    return f"by draws of another kind or order from {path}"


def _inside(trace: Trace, path: str, step: int) -> Stretch:
    """From the state before a step to that after its update."""
    state, after = _events(trace, step, "state")[path], _events(trace, step, "after").get(path)
    drawn = [e for e in _drawn(trace, path, step) if e.order > state.order]
    return Stretch(path, trace.array(state), drawn, trace.array(after or state))


def _between(trace: Trace, path: str, before: int, step: int) -> Stretch:
    """From the update of a step to the first call of the next one."""
    after = _events(trace, before, "after").get(path) or _events(trace, before, "state")[path]
    state = _events(trace, step, "state")[path]
    drawn = [e for e in _drawn(trace, path, step) if e.order < state.order]
    return Stretch(path, trace.array(after), drawn, trace.array(state))


def _events(trace: Trace, step: int, port: str) -> dict[str, Event]:
    return {
        e.site.path: e
        for e in trace.events(step, samples=False)
        if (e.site.phase, e.site.port) == ("rng", port)
    }


def _drawn(trace: Trace, path: str, step: int) -> list[Event]:
    events = trace.events(step, samples=False)
    return [e for e in events if (e.site.phase, e.site.path, e.site.port) == ("rng", path, PORT)]
