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


_Known = tuple[Recorded, str, tuple[int, ...], Any, Summary, str, str | None]
"""What is known of an event, in the order of `Unwritten.add`; at last where its payload lies."""


class Unwritten:
    """Events in their order. A payload is written before its event."""

    def __init__(self, writer: TraceWriter | BufferedWriter) -> None:
        self._writer = writer
        self._store = writer.store if isinstance(writer, TraceWriter) else None
        self._events: list[_Known] = []

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
        site, order, _, _, _, dims, *_ = recorded
        is_rendered = site[1] == "rendering"
        place = None
        if payload is not None and self._store is not None and not is_rendered:
            place = self._store(site, order, tuple(dims), summary.digest, summary.dtype, payload)
            payload = None
        known = recorded, kind, shape, value, summary, sketches, place
        if payload is None and not is_rendered:
            self._events.append(known)
        else:
            self.hand_over()
            self._writer.add(_event(*known), payload)

    def hand_over(self) -> None:
        """Gives the events so far to the writer."""
        known, self._events = self._events, []
        self._writer.add_stored([_event(*each) for each in known])


def _event(
    recorded: Recorded,
    kind: str,
    shape: tuple[int, ...],
    value: Any,
    summary: Summary,
    sketches: str,
    place: str | None,
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
        payload=place,
        value=value,
        attributes=attributes,
    )


def _kept_sketch(summary: Summary, sketches: str) -> NDArray[np.float64] | None:
    """The sketch of a value that is kept: a whole one, a short one, or none."""
    whole = summary.sketch if sketches else None
    return shortened(whole) if whole is not None and sketches == "short" else whole
