"""Events of the open step that are summarised, and not handed to the writer yet.

One by one, between the calls of the framework that is recorded, each would find the caches of the
processor full of the framework's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from numpy.typing import NDArray

from tracediff.summaries import Summary
from tracediff.trace import BufferedWriter, TraceWriter
from tracediff.trace.rows import About, Row, event_of
from tracediff.trace.summary import SHORT_SKETCH, SKETCH_SIZE

_BUCKETS: Final = {"": 0, "short": SHORT_SKETCH, "whole": SKETCH_SIZE}

Summarised = tuple[int, About, str, tuple[int, ...], Any, Summary, str, Mapping[str, Any]]
"""An event but for its step: order, what is known of it before its value, kind, shape, value (JSON
types that nobody changes; None for an array), summary, which sketch is kept (`whole`, `short`, or
"" for none) and attributes."""


class Unwritten:
    """Events of one step, in their order. A payload is written before its event."""

    def __init__(self, writer: TraceWriter | BufferedWriter) -> None:
        self._writer = writer
        self._store = writer.store if isinstance(writer, TraceWriter) else None
        self._step = 0
        self._events: list[tuple[Summarised, str | None]] = []

    def add(
        self, step: int, phase: str, event: Summarised, payload: NDArray[Any] | None = None
    ) -> None:
        """Keeps an event, and hands over what cannot wait: payloads are written, or copied, and
        what is rendered goes to a table of its own.

        Args:
            payload: The value that is kept, if it is.
        """
        self._step = step
        if payload is None and phase != "rendering":
            self._events.append((event, None))
        elif payload is None or self._store is None or phase == "rendering":
            self.hand_over()
            self._writer.add(event_of(step, _row(event, None)), payload)
        else:
            order, (_, path, call, port, _, _, dims, _, _), _, _, _, summary, _, _ = event
            site = step, phase, path, call, port
            place = self._store(site, order, dims, summary.digest, summary.dtype, payload)
            self._events.append((event, place))

    def hand_over(self) -> None:
        """Gives the events so far to the writer."""
        events, self._events = self._events, []
        self._writer.add_stored(self._step, [_row(event, place) for event, place in events])


def _row(event: Summarised, place: str | None) -> Row:
    """The event as a writer takes it.

    Args:
        place: Where its payload lies, if it does.
    """
    order, about, kind, shape, value, summary, sketches, attributes = event
    of_value, dtype, statistics, sketch, _ = summary
    buckets = _BUCKETS[sketches] if sketch is not None else 0
    head = order, about, kind, dtype, shape, buckets
    return head, of_value, statistics, sketch, place, value, attributes
