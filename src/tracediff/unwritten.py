"""Events of the open step that are summarised, and not handed to the writer yet.

One by one, between the calls of the framework that is recorded, each would find the caches of the
processor full of the framework's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracediff.events import Event, Site
from tracediff.summaries import Summary
from tracediff.trace import BufferedWriter, TraceWriter
from tracediff.trace.summary import shortened

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


class Unwritten:
    """Events in their order, the last of which may come with a payload."""

    def __init__(self, writer: TraceWriter | BufferedWriter) -> None:
        self._writer = writer
        self._events: list[tuple[Recorded, str, tuple[int, ...], Any, Summary, str]] = []

    def add(
        self,
        recorded: Recorded,
        kind: str,
        shape: tuple[int, ...],
        value: Any,
        summary: Summary,
        sketches: str,
    ) -> None:
        """Keeps what is known of an event.

        Args:
            kind: Of the value that came, which is not always what was recorded before.
            value: JSON types that nobody changes; None for an array.
            sketches: `whole`, `short`, or "" for none.
        """
        self._events.append((recorded, kind, shape, value, summary, sketches))

    def hand_over(self, payload: NDArray[Any] | None = None) -> None:
        """Gives the events so far to the writer, and the last one's payload."""
        events, self._events = self._events, []
        for count, each in enumerate(events, 1):
            self._writer.add(_event(*each), payload if count == len(events) else None)


def _event(
    recorded: Recorded,
    kind: str,
    shape: tuple[int, ...],
    value: Any,
    summary: Summary,
    sketches: str,
) -> Event:
    site, order, _, op, source, dims, shard, inputs, attributes, _ = recorded
    return Event(
        site=Site(*site),
        order=order,
        kind=kind,
        op=op,
        source=source,
        dtype=summary.dtype,
        shape=shape,
        dims=tuple(dims),
        shard=shard,
        digest=summary.digest,
        fingerprint=summary.fingerprint,
        sketch=_kept_sketch(summary, sketches),
        inputs=inputs,
        value=value,
        attributes=attributes,
    )


def _kept_sketch(summary: Summary, sketches: str) -> NDArray[np.float64] | None:
    """The sketch of a value that is kept: a whole one, a short one, or none."""
    whole = summary.sketch if sketches else None
    return shortened(whole) if whole is not None and sketches == "short" else whole
