"""What the pairs of one step can have been computed from, by the data-flow edges of both sides."""

from __future__ import annotations

from collections.abc import Sequence

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
                found.setdefault((source.baseline.digest, source.target.digest), source)
        return list(found.values())

    def copied(self, pair: Pair) -> Pair | None:
        """A source that is bit for bit the same value on both sides."""
        for source in self.sources(pair):
            sides = (pair.baseline, source.baseline), (pair.target, source.target)
            if all((a.digest, a.dtype, a.shape) == (b.digest, b.dtype, b.shape) for a, b in sides):
                return source
        return None

    def mask(self, which: int, event: Event) -> Event | None:
        """The attention mask that the code around an event was given, where one was recorded."""
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


def _is_usable(pair: Pair) -> bool:
    return pair.layout == "same" and all(
        event.kind == "tensor" and event.payload is not None and "float" in event.dtype
        for event in (pair.baseline, pair.target)
    )
