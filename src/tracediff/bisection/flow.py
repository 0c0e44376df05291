"""What the pairs of one step can have been computed from, by the data-flow edges of both sides."""

from __future__ import annotations

from collections.abc import Sequence

from tracediff.bisection.views import around
from tracediff.compare.masks import is_mask_port
from tracediff.events import Event, Pair


class Flow:
    """The edges of one step.

    Args:
        pairs: Of the step.
        events: Of both sides.
    """

    def __init__(
        self, pairs: Sequence[Pair], events: tuple[Sequence[Event], Sequence[Event]]
    ) -> None:
        self._pairs = {pair.baseline.order: pair for pair in pairs}
        self._events = tuple({event.order: event for event in of_side} for of_side in events)
        self._ins: tuple[dict[tuple[str, int], list[int]], ...] = ({}, {})
        for ins, of_side in zip(self._ins, events, strict=True):
            for event in of_side:
                if event.site.phase == "forward" and event.site.port.startswith("in"):
                    ins.setdefault((event.site.path, event.site.call), []).append(event.order)

    def sources(self, pair: Pair) -> list[Pair]:
        """Floating-point pairs that this one can be made of, latest first, each value once."""
        found: dict[tuple[bytes, bytes], Pair] = {}
        on_target = self._available(1, pair.target)
        for order in sorted(self._available(0, pair.baseline), reverse=True):
            source = self._pairs.get(order)
            if source and source.target.order in on_target and _is_usable(source):
                key = around(source.baseline).digest, around(source.target).digest
                found.setdefault(key, source)
        return list(found.values())

    def copied(self, pair: Pair) -> Pair | None:
        """A source that is bit for bit the same value on both sides."""
        sides = [(pair.baseline, pair.target)]
        sides += [(source.baseline, source.target) for source in self.sources(pair)]
        value, *others = [tuple(_identity(around(event)) for event in side) for side in sides]
        return self.sources(pair)[others.index(value)] if value in others else None

    def masks(self, pair: Pair) -> tuple[Event | None, Event | None]:
        """The attention mask that the code of each side was given, where one was recorded."""
        return self._mask(0, pair.baseline), self._mask(1, pair.target)

    def of(self, baseline: Event) -> Pair | None:
        """The pair of an event of the baseline."""
        return self._pairs.get(baseline.order)

    def _mask(self, which: int, event: Event) -> Event | None:
        events = (self._events[which].get(order) for order in event.inputs)
        masks = [e for e in events if e and is_mask_port(e.site.port) and len(e.shape) == 4]
        return masks[-1] if masks and masks[-1].payload is not None else None

    def _available(self, which: int, event: Event) -> set[int]:
        """Orders of an event's inputs, and of what the calls among them were given: a sum may be
        recorded only where it goes into the next module."""
        found = set(event.inputs)
        for order in event.inputs:
            other = self._events[which].get(order)
            if other is not None and other.site.port.startswith("out"):
                found.update(self._ins[which].get((other.site.path, other.site.call), ()))
        return {order for order in found if order < event.order}


def _identity(event: Event) -> tuple[bytes, str, tuple[int, ...]]:
    return event.digest, event.dtype, event.shape


def _is_usable(pair: Pair) -> bool:
    return pair.layout == "same" and all(
        event.kind == "tensor" and event.payload is not None and "float" in event.dtype
        for event in (pair.baseline, pair.target)
    )
