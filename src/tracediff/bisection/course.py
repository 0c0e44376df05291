"""Which steps of two runs that differ by rounding have to be looked at.

No two values of such runs are bit-equal, so nothing is found by digests. The index of a step holds
sums of marks over all steps until then (`trace.sums`). Over a range of steps the sums of two runs
grow apart by the root of the sum of squares of what the single steps are apart, so a range that is
no further apart than a few times what its start is, holds no step that is: also none that heals.
Such a range is left out. What exceeds that is found by halving, as the root grows with the range,
and judged from its values. Rounding may grow from step to step, so what a range that was left out
was apart on average is the measure for the next one.

Single values go up and down from step to step (a sum over a few elements may come out equal), the
worst of those of one kind hardly: it grew by at most 7 between two steps of a PyTorch and an MLX
run that differ by rounding (a Llama of two layers, 280 steps).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.healing import Step
from tracediff.bisection.values import is_float
from tracediff.compare.figures import unit_roundoff
from tracediff.events import EXACT_KINDS, Event, Pair, Site
from tracediff.trace import Trace
from tracediff.trace.sums import OWN, marked, marks, width

JUMP: Final = 8.0
"""How many times further apart than before a value may be in a step that nobody looks at."""

CLEAR: Final = JUMP**2
"""How many times further apart than before a value is told of, though its bound allows it."""

_SETTLED: Final = 3
"""Steps after which values are as far apart as a matter of course: the first updates part them."""

_SHORTEST: Final = 4
_LONGEST: Final = 64
"""Steps of a range: the root of the sum of so many squares is `JUMP` times what one step adds."""
_KEPT: Final = 128
"""Sums that are kept in memory, of both sides."""

_EXACT: Final = 1e-8
"""What counts as equal between marks of settings, which are apart by a rounding to float32."""

_MADE_FROM: Final = {"loss": ("forward",), "trajectory": ("forward", "loss", "backward")}
"""Stages of few single numbers, which may come out equal by chance, and what these are made of."""

_Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Marks of both sides that belong to each other.

    Attributes:
        sites: Of each value, in order.
        places: Their places among the marks of each side.
        starts: Where among them a value's begin: its own, or those from its sketch.
        floor: What rounding may make each value apart, however close it was before.
        kinds: For each kind of value, which values are held to the worst of which.
    """

    sites: tuple[Site, ...]
    places: tuple[_Array, _Array]
    starts: _Array
    floor: _Array
    kinds: tuple[tuple[_Array, _Array], ...]

    def apart(self, a: _Array, b: _Array) -> _Array:
        """How far each value is apart, given the marks of both sides, or sums of them."""
        squares = np.square(a[self.places[0]] - b[self.places[1]])
        return np.sqrt(np.add.reduceat(squares, self.starts))

    def usual(self, apart: _Array) -> _Array:
        """What each value may be apart as a matter of course, given what all are apart."""
        found = self.floor.copy()
        for members, measures in self.kinds:
            found[members] = np.maximum(found[members], apart[measures].max())
        return found


class Course:
    """What two runs are apart by, from step to step.

    Attributes:
        left_out: Number of pairs by stage in the steps left out so far.
        steps: Number of those steps.
    """

    def __init__(self, traces: tuple[Trace, Trace], steps: Sequence[int]) -> None:
        self._traces = traces
        self._steps = steps
        self._rows: _Rows | None = None
        self._usual = np.zeros(0)
        self._phases: Counter[str] = Counter()
        self._kept: dict[tuple[bool, int], _Array | None] = {}
        self._taken = 0
        self._jumps: list[tuple[Site, float]] = []
        self.left_out: Counter[str] = Counter()
        self.steps = 0

    def take(self, step: Step) -> None:
        """Takes a step that was judged and found free of divergence for the measure of the next."""
        events = [trace.events(step.number, samples=False) for trace in self._traces]
        self._rows = _rows(step.alignment.pairs, events)
        if self._rows is None:
            return
        apart = self._rows.apart(*map(marks, events))
        exact = self._rows.floor == _EXACT
        if (apart[exact] > _EXACT).any():
            self._rows = None  # equal in meaning only: its marks say nothing
            return
        self._look(self._rows, apart)
        self._usual = self._rows.usual(apart)
        self._phases = Counter(pair.baseline.site.phase for pair in step.alignment.pairs)

    def _look(self, rows: _Rows, apart: _Array) -> None:
        """Looks for the first value that is clearly further apart than in the steps before."""
        self._taken += 1
        if self._taken > _SETTLED and apart.size == self._usual.size:
            places = np.flatnonzero(apart > CLEAR * self._usual)
            if places.size:
                first = int(places[0])
                self._jumps.append((rows.sites[first], float(apart[first] / self._usual[first])))

    def next(self, at: int, end: int) -> int:
        """The place of the first step after the one at `at` that has to be judged; `end` if none
        before that place has."""
        low, stride = at, _SHORTEST
        while self._rows is not None and low < end - 1:
            high = min(low + stride, end - 1)
            if self._close(low, high):
                low, stride = high, min(2 * stride, _LONGEST)
            elif high > low + 1:
                stride = (high - low) // 2
            else:
                return high
        return end if self._rows is not None else at + 1

    def leave_out(self, count: int) -> None:
        """Counts steps as compared."""
        self.steps += count
        for phase, pairs in self._phases.items():
            self.left_out[phase] += count * pairs

    def told(self) -> list[str]:
        """What was not looked at value by value, and what its bound allows but no step before, in
        sentences."""
        jumps = [
            f"{site} is {ratio:.2g} times as far apart as such values were in the steps before, "
            "which its bound allows as it has grown with the run: replay the step, or record its "
            "values"
            for site, ratio in self._jumps
        ]
        if not self.steps:
            return jumps
        return [
            f"{self.steps} steps were compared by sums of their norms and sketches, not value by "
            f"value: in none of them is anything more than {JUMP:g} times as far apart as before",
            *jumps,
        ]

    def _close(self, since: int, until: int) -> bool:
        """Whether no step after one place and up to another is further apart than usual.

        If so, what they are apart on average is the measure for the steps after them.
        """
        assert self._rows is not None
        grown = [self._growth(trace, since, until) for trace in self._traces]
        if grown[0] is None or grown[1] is None:
            return False
        apart = self._rows.apart(grown[0], grown[1])
        if not (apart <= JUMP * self._usual).all():
            return False
        self._usual = np.maximum(self._usual, self._rows.usual(apart / math.sqrt(until - since)))
        return True

    def _growth(self, trace: Trace, since: int, until: int) -> _Array | None:
        """By what the sums grow, or None where the steps do not all record the same events."""
        first, last = (trace.prefix(self._steps[place]) for place in (since, until))
        if not last.is_uniform(first, until - since):
            return None
        a, b = (self._sums(trace, self._steps[place]) for place in (since, until))
        return None if a is None or b is None or a.shape != b.shape else b - a

    def _sums(self, trace: Trace, step: int) -> _Array | None:
        """The sums up to a step; those of the latest steps are kept."""
        key = trace is self._traces[0], step
        if key not in self._kept:
            if len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = trace.sums(step)
        return self._kept[key]


def _rows(pairs: Sequence[Pair], events: Sequence[Sequence[Event]]) -> _Rows | None:
    """The marks that pairs have on both sides; None where marks cannot tell of some pair."""
    offsets = [_offsets(side) for side in events]
    places: tuple[list[int], list[int]] = ([], [])
    sites: list[Site] = []
    starts: list[int] = []
    floors: list[float] = []
    kinds: list[tuple[str, ...]] = []
    for pair in pairs:
        a, b = pair.baseline, pair.target
        if a.site.phase in ("environment", "rng"):
            continue
        if a.view is not None or b.view is not None or a.attributes.get("level") == "op":
            return None
        at = offsets[0][a.order], offsets[1][b.order]
        groups = [(0, OWN)]
        if width(a) == width(b) > OWN and pair.layout == "same":
            groups.append((OWN, width(a)))
        for begin, end in groups:
            sites.append(a.site)
            starts.append(len(places[0]))
            floors.append(_floor(a, b))
            kinds.append((a.site.phase, a.site.port.partition(".")[0], str(begin)))
            for side, start in enumerate(at):
                places[side].extend(range(start + begin, start + end))
    if not starts:
        return None
    floor = np.array(floors)
    places_of = np.array(places[0]), np.array(places[1])
    return _Rows(tuple(sites), places_of, np.array(starts), floor, tuple(_kinds(kinds, floor)))


def _kinds(kinds: Sequence[tuple[str, ...]], floor: _Array) -> Iterator[tuple[_Array, _Array]]:
    """Which values are held to which: those of one port to each other, scalars to what they are
    made from, and exact values to none."""
    phases = np.array([kind[0] for kind in kinds])
    for kind in set(kinds):
        alike = np.array([other == kind for other in kinds])
        measures = alike | np.isin(phases, _MADE_FROM.get(kind[0], ()))
        inexact = floor > _EXACT
        if (alike & inexact).any():
            yield np.flatnonzero(alike & inexact), np.flatnonzero(measures & inexact)


def _floor(a: Event, b: Event) -> float:
    if a.kind in EXACT_KINDS or not (is_float(a) and is_float(b)):
        return _EXACT
    return 4 * max(unit_roundoff(dtype) for dtype in (a.dtype, b.dtype, "float32"))


def _offsets(events: Sequence[Event]) -> dict[int, int]:
    """Order of an event -> place of its first mark."""
    found, place = {}, 0
    for event in marked(events):
        found[event.order] = place
        place += width(event)
    return found
