"""Which steps of two long runs must be looked at: those that differ are found by halving.

The index of a step holds a sum over the digests of all steps until then. Where two runs have equal
sums between two steps, they are bit-equal from one to the other, so the next step that differs is
found with about two logarithms of their distance in look-ups. A sum, and no chain, so that the
search goes on after a difference that has healed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from tracediff.bisection.course import Course
from tracediff.bisection.healing import Step
from tracediff.trace import Trace
from tracediff.trace.index import Prefix

_FEW: Final = 4
"""Runs up to this many steps are read step by step."""


_MANY: Final = 32
"""Runs of fewer steps are never judged by their marks."""

_WARM: Final = 2
"""Steps at the beginning that are judged: everything in them has a sketch."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A step to judge.

    Attributes:
        left_out: Whether steps before it were left out.
        resume: The step before it, whose parameters and optimizer state are to be taken as they
            are; None where they follow from what was judged, or are bit-equal.
    """

    step: int
    left_out: bool = False
    resume: int | None = None


class Halving:
    """The steps to judge, in order, and what is known of the others without opening them.

    Attributes:
        common: Steps that both traces have.
        proven: Number of events by stage in the steps left out so far; each is bit-equal.
    """

    def __init__(self, traces: tuple[Trace, Trace], *, by_marks: bool = True) -> None:
        """
        Args:
            by_marks: Whether steps may be left out that are not proven equal, but no further apart
                than the steps before them.
        """
        self._traces = traces
        self.common = sorted(set(traces[0].steps) & set(traces[1].steps))
        self.proven: Counter[str] = Counter()
        long = _aligned(traces) >= _MANY
        self.course = Course(traces, self.common) if by_marks and long else None

    def take(self, step: Step) -> None:
        """Takes a step that was judged and holds no divergence."""
        if self.course is not None:
            self.course.take(step)

    def visits(self) -> Iterator[Visit]:
        """Yields each step to judge.

        Of steps that are bit-equal, the first has the parameters and settings as loaded, and the
        last the parameters as they stood then; those between are left out.
        """
        count = _aligned(self._traces)
        at = 0 if len(self.common) > _FEW and count else len(self.common) - 1
        for step in self.common[: at + 1]:
            yield Visit(step)
        while at < count - 1:
            differing = _first(partial(self._differ, at), at + 1, count)
            if differing == at + 1 and self.course is not None and at >= _WARM:
                place = min(self.course.next(at, count), count - 1)
                self.course.leave_out(place - at - 1)
                before = self.common[place - 1] if place > at + 1 else None
                yield Visit(self.common[place], before is not None, before)
                at = place
                continue
            for place in range(max(at + 1, differing - 1), min(differing + 1, count)):
                left_out = place > at + 1
                if left_out:
                    self._prove(at, place - 1)
                yield Visit(self.common[place], left_out)
                at = place
        for step in self.common[max(at + 1, count) :]:
            yield Visit(step)

    def _differ(self, since: int, until: int) -> bool:
        """Whether any of the steps after one place and up to another differ."""
        a, b = (
            [trace.prefix(self.common[place]).values for place in (since, until)]
            for trace in self._traces
        )
        return (a[1] - a[0] - b[1] + b[0]) % Prefix.MODULUS != 0

    def _prove(self, since: int, until: int) -> None:
        first, last = (
            self._traces[0].prefix(self.common[place]).counts for place in (since, until)
        )
        self.proven += Counter(last) - Counter(first)


def generators_part(traces: tuple[Trace, Trace], path: str, until: int) -> int | None:
    """The first step, up to `until`, before which a generator is in another state."""
    steps = [step for step in traces[0].steps[: _aligned(traces)] if step <= until]

    def part(place: int) -> bool:
        a, b = (trace.prefix(steps[place]).generators.get(path) for trace in traces)
        return a != b

    found = _first(part, 0, len(steps))
    return steps[found] if found < len(steps) else None


def _aligned(traces: tuple[Trace, Trace]) -> int:
    """How many steps at the beginning of both have equal numbers."""
    pairs = enumerate(zip(traces[0].steps, traces[1].steps, strict=False))
    shorter = min(len(traces[0].steps), len(traces[1].steps))
    return next((i for i, (a, b) in pairs if a != b), shorter)


def _first(differs: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest place from `low` on that differs, or `high`; once different, all later ones are.

    Strides double at first: where all steps differ, one look-up for each is enough.
    """
    stride = 1
    while low < high:
        place = min(low + stride, high) - 1
        if differs(place):
            high = place
            break
        low, stride = place + 1, 2 * stride
    while low < high:
        middle = (low + high) // 2
        if differs(middle):
            high = middle
        else:
            low = middle + 1
    return low
