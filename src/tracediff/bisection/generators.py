"""Where the generators of two runs part: before which step, by whose draws, and by how many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tracediff.bisection.halving import generators_part
from tracediff.consumers import OPERATION_PORT, PORT, UNWATCHED, is_draw
from tracediff.draws import Position, counts, position
from tracediff.events import Event
from tracediff.trace import Trace

Traces = tuple[Trace, Trace]


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a generator parts.

    Attributes:
        told: One sentence, "" where nothing is known.
        step: The step in which it does, or before whose first call.
        op, where: The operation that draws otherwise and its line, by side, where operations were
            recorded.
    """

    told: str = ""
    step: int = -1
    op: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one generator did in one run between two recorded states.

    Attributes:
        drawn: Its consumers, in the order in which they left it.
        drew: The operations that drew, where they were recorded.
    """

    path: str
    start: NDArray[Any]
    drawn: list[Event]
    drew: list[Event]
    end: NDArray[Any]

    def draws(self) -> dict[str, int | None]:
        """Numbers drawn by each consumer, in the order in which they first drew."""
        places = _places(self.drawn)
        last = position(self.path, self.end)
        if last is not None and (not places or places[-1][1] != last):
            places.append((UNWATCHED, last))
        found: dict[str, int | None] = {}
        for (by, _), more in zip(places, self._numbers(places), strict=True):
            known = found.get(by, 0)
            found[by] = None if known is None or more is None else known + more
        return found

    def operations(self, by: str) -> list[tuple[str, str, int | None]]:
        """Operations by which a consumer (or any, "") drew: name, line, and how many numbers."""
        places = _places(self.drew)
        return [
            (event.op, event.source, more)
            for event, (who, _), more in zip(self.drew, places, self._numbers(places), strict=True)
            if by in (who, "")
        ]

    def _numbers(self, places: Sequence[tuple[str, Position]]) -> Iterator[int | None]:
        """How many numbers were drawn on the way to each place."""
        before: int | None = 0
        for until in counts(self.path, self.start, [place for _, place in places]):
            yield None if until is None or before is None else until - before
            before = until


def _places(drawn: Sequence[Event]) -> list[tuple[str, Position]]:
    return [(e.value["by"], Position(*e.value["at"])) for e in drawn]


def parting(traces: Traces, path: str, until: int, replays: Traces | None = None) -> Parting:
    """Where a generator parts that differs before a step.

    Args:
        path: Path of the generator's events, the same in both.
        until: A step before which it is not in the same state in both.
        replays: Of the step in which it parts, with operations; those of `traces` by default.
    """
    step = generators_part(traces, path, until)
    if step is None or any(path not in _events(trace, step, "state") for trace in traces):
        return Parting()
    place = traces[0].steps.index(step)
    if place == 0:
        told = f"generator {path} differs from the beginning: it was seeded or drawn from otherwise"
        return Parting(told)
    before = traces[0].steps[place - 1]
    both = tuple(zip(traces, replays or traces, strict=True))
    after = [_events(trace, before, "after").get(path) for trace in traces]
    if (after[0] and after[0].digest) != (after[1] and after[1].digest):
        where = f"in step {before}"
        return _parting(before, where, path, [_inside(*side, path, before) for side in both])
    where = f"between the update of step {before} and the first call of step {step}"
    return _parting(step, where, path, [_between(*side, path, before, step) for side in both])


def generator_parting(
    baseline: Path,
    target: Path,
    path: str,
    until: int,
    replays: tuple[Path, Path] | None = None,
) -> Parting:
    """As `parting`, of traces that are opened for it."""
    with ExitStack() as stack:
        opened = [stack.enter_context(Trace(p)) for p in (baseline, target, *(replays or ()))]
        detailed = (opened[2], opened[3]) if replays else None
        return parting((opened[0], opened[1]), path, until, detailed)


def _parting(step: int, where: str, path: str, stretches: Sequence[Stretch]) -> Parting:
    baseline, target = stretches
    told, consumer = _told(path, baseline, target)
    op, lines = _operation(consumer, baseline, target)
    told += "".join(f", by {op[side]} ({lines[side]})" for side in op)
    return Parting(f"the generators part {where}, {told}", step, op, lines)


def _told(path: str, baseline: Stretch, target: Stretch) -> tuple[str, str]:
    """What is drawn otherwise, and by which consumer ("" if unknown)."""
    a, b = baseline.draws(), target.draws()
    for by in dict.fromkeys((*a, *b)):
        one, other = a.get(by, 0), b.get(by, 0)
        if one == other and one is not None:
            continue
        if one is None or other is None:
            return f"in {by}: {path} was seeded anew, or drawn from too often to be counted", by
        more, side = abs(one - other), "target" if other > one else "baseline"
        return (
            f"in {by}: {more} extra draw{'s' * (more > 1)} from {path} in the {side} "
            f"({one} against {other})"
        ), by
    return f"by draws of another kind or order from {path}", ""


def _operation(
    by: str, baseline: Stretch, target: Stretch
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The first operation of a consumer that one side has and the other does not, and its line.

    Lines are no evidence where the scripts have none in common.
    """
    sides = [stretch.operations(by) for stretch in (baseline, target)]
    lines = [{line for _, line, _ in side} for side in sides]
    if not (lines[0] & lines[1]):
        keys = [[(op, "", count) for op, _, count in side] for side in sides]
    else:
        keys = sides
    shared = 0
    while shared < min(map(len, keys)) and keys[0][shared] == keys[1][shared]:
        shared += 1
    longer = len(keys[1]) >= len(keys[0])
    side, name = sides[longer], ("baseline", "target")[longer]
    if shared >= len(side):
        return {}, {}
    return {name: side[shared][0]}, {name: side[shared][1]}


def _inside(trace: Trace, replay: Trace, path: str, step: int) -> Stretch:
    """From the state before a step to that after its update."""
    state, after = _events(trace, step, "state")[path], _events(trace, step, "after").get(path)
    drawn = _drawn(replay, path, step, before_it=False)
    return Stretch(path, trace.array(state), *drawn, trace.array(after or state))


def _between(trace: Trace, replay: Trace, path: str, before: int, step: int) -> Stretch:
    """From the update of a step to the first call of the next one."""
    after = _events(trace, before, "after").get(path) or _events(trace, before, "state")[path]
    state = _events(trace, step, "state")[path]
    drawn = _drawn(replay, path, step, before_it=True)
    return Stretch(path, trace.array(after), *drawn, trace.array(state))


def _events(trace: Trace, step: int, port: str) -> dict[str, Event]:
    return {
        e.site.path: e
        for e in trace.events(step, samples=False)
        if (e.site.phase, e.site.port) == ("rng", port)
    }


def _drawn(
    trace: Trace, path: str, step: int, *, before_it: bool
) -> tuple[list[Event], list[Event]]:
    """Who drew in a step or on the way to it, and by which operations."""
    start = _events(trace, step, "state")[path].order
    events = [
        e
        for e in trace.events(step, samples=False)
        if e.site.path == path and (e.order < start) == before_it
    ]
    who, what = ([e for e in events if is_draw(e, port)] for port in (PORT, OPERATION_PORT))
    return who, what
