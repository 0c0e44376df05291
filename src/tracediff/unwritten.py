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


class Unwritten:
    """Events of one step, in their order. A payload is written before its event."""

    def __init__(self, writer: TraceWriter | BufferedWriter) -> None:
        self._writer = writer
        self._store = writer.store if isinstance(writer, TraceWriter) else None
        self._step = 0
        self._rows: list[Row] = []

    def add(
        self,
        step: int,
        order: int,
        about: About,
        kind: str,
        shape: tuple[int, ...],
        value: Any,
        summary: Summary,
        sketches: str,
        attributes: Mapping[str, Any],
        payload: NDArray[Any] | None,
    ) -> None:
        """Keeps what is known of an event, and hands over what cannot wait: payloads are written,
        or copied, and what is rendered goes to a table of its own.

        Args:
            value: JSON types that nobody changes; None for an array.
            sketches: `whole`, `short`, or "" for none.
            payload: The value that is kept, if it is.
        """
        self._step = step
        of_value, dtype, statistics, sketch, _ = summary
        place, rendered = None, about[0] == "rendering"
        if payload is not None and self._store is not None and not rendered:
            phase, path, call, port, _, _, dims, _, _ = about
            site = step, phase, path, call, port
            place = self._store(site, order, dims, of_value, dtype, payload)
            payload = None
        buckets = _BUCKETS[sketches] if sketch is not None else 0
        head = order, about, kind, dtype, shape, buckets
        row = head, of_value, statistics, sketch, place, value, attributes
        if payload is None and not rendered:
            self._rows.append(row)
        else:
            self.hand_over()
            self._writer.add(event_of(step, row), payload)

    def hand_over(self) -> None:
        """Gives the events so far to the writer."""
        rows, self._rows = self._rows, []
        self._writer.add_stored(self._step, rows)
