"""Events of the open step that are summarised, and not handed to the writer yet.

One by one, between the calls of the framework that is recorded, each would find the caches of the
processor full of the framework's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from numpy.typing import NDArray

from tracediff.summaries import Summary
from tracediff.trace import BufferedWriter, TraceWriter
from tracediff.trace.rows import Row, event_of
from tracediff.trace.summary import SHORT_SKETCH, SKETCH_SIZE

Recorded = tuple[
    tuple[int, str, str, int, str],
    int,
    str,
    str,
    str,
    Sequence[str],
    str,
    tuple[int, ...],
    Mapping[str, Any],
    int | None,
]
"""What is known of an event before its value: the fields of its site, then order, kind, op, source,
dims, shard, inputs, attributes, and the event that has the same value."""


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
        recorded: Recorded,
        kind: str,
        shape: tuple[int, ...],
        value: Any,
        summary: Summary,
        sketches: str,
        payload: NDArray[Any] | None,
    ) -> None:
        """Keeps what is known of an event, and hands over what cannot wait: payloads are written,
        or copied, and what is rendered goes to a table of its own.

        Args:
            kind: Of the value that came, which is not always what was recorded before.
            value: JSON types that nobody changes; None for an array.
            sketches: `whole`, `short`, or "" for none.
            payload: The value that is kept, if it is.
        """
        site, order, _, op, source, dims, shard, inputs, attributes, _ = recorded
        self._step, phase, path, call, port = site
        of_value, dtype, fingerprint, sketch, _ = summary
        dims = tuple(dims)
        place = None
        if payload is not None and self._store is not None and phase != "rendering":
            place = self._store(site, order, dims, of_value, dtype, payload)
            payload = None
        buckets = _BUCKETS[sketches] if sketch is not None else 0
        head = (
            order, phase, path, call, port, kind, op, source, dtype, shape, dims, shard, inputs,
            buckets,
        )  # fmt: skip
        row = head, of_value, fingerprint, sketch, place, value, attributes
        if payload is None and phase != "rendering":
            self._rows.append(row)
        else:
            self.hand_over()
            self._writer.add(event_of(self._step, row), payload)

    def hand_over(self) -> None:
        """Gives the events so far to the writer."""
        rows, self._rows = self._rows, []
        self._writer.add_stored(self._step, rows)
