"""Events whose value is read out of another's payload: made here, with digest and fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from numpy.typing import NDArray

from tracediff.align import Alignment
from tracediff.events import Event, Pair, View
from tracediff.trace import Trace
from tracediff.trace.summary import digest, fingerprint

UNKEPT: Final = "part of a fused tensor, and no payload was kept to take it from"

Take = Callable[[NDArray[Any]], NDArray[Any]]

Sides = tuple[Sequence[Event], Sequence[Event]]


@dataclass(slots=True)
class Common:
    """One step of both sides, brought into a form in which their values can be compared.

    Attributes:
        events: All events of both sides; views in place of what they are read from, and the parts
            of fused tensors after the others.
        notes: What was done, one sentence each.
    """

    alignment: Alignment
    events: Sides
    notes: list[str] = field(default_factory=list)

    def replaced(self, views: tuple[Mapping[int, Event], Mapping[int, Event]]) -> Common:
        """The same with views in place of events, by `id` of the event on each side."""
        pairs = tuple(
            replace(
                pair,
                baseline=views[0].get(id(pair.baseline), pair.baseline),
                target=views[1].get(id(pair.target), pair.target),
            )
            for pair in self.alignment.pairs
        )
        events = tuple(
            [found.get(id(event), event) for event in side]
            for found, side in zip(views, self.events, strict=True)
        )
        return Common(replace(self.alignment, pairs=pairs), (events[0], events[1]), self.notes)

    def apart(self, why: Callable[[Pair], str | None]) -> Common:
        """The same without the pairs that say nothing, whose events are listed with the reason."""
        reasons = [(pair, why(pair)) for pair in self.alignment.pairs]
        apart = [(pair, reason) for pair, reason in reasons if reason]
        if not apart:
            return self
        alignment = replace(
            self.alignment,
            pairs=tuple(pair for pair, reason in reasons if not reason),
            baseline_only=(
                *self.alignment.baseline_only,
                *((pair.baseline, reason) for pair, reason in apart),
            ),
            target_only=(
                *self.alignment.target_only,
                *((pair.target, reason) for pair, reason in apart),
            ),
        )
        return Common(alignment, self.events, self.notes)


def reshaped(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return array.reshape(shape)


def viewed(trace: Trace, event: Event, take: Take, *, alone: bool = False) -> Event:
    """An event with the value that `take` makes of another's, which has a payload."""
    return filled(trace, replace(event, view=View(event, take, alone)))


def around(event: Event) -> Event:
    """An event in the layout that the values around its module have."""
    return event.view.whole if event.view is not None and event.view.alone else event


def filled(trace: Trace, view: Event) -> Event:
    """A view with its shape, digest and fingerprint, which are those of its own value."""
    array = trace.array(view)
    return replace(
        view,
        shape=array.shape,
        dims=view.dims if len(view.dims) == array.ndim else (),
        digest=digest(array),
        fingerprint=fingerprint(array) if array.dtype.kind != "c" else (),
        sketch=None,
    )
