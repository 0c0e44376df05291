"""The values of the open step: each is summarised as it comes, and its payload is written.

Events wait for the end of the step: one by one, between the calls of the framework that is
recorded, each would find the caches of the processor full of the framework's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracediff.events import sample_step
from tracediff.policy import Policy
from tracediff.summaries import Found, Summaries, Summary, completed, name_of, still
from tracediff.trace import BufferedWriter, TraceWriter
from tracediff.trace.rows import About, Row, event_of
from tracediff.trace.summary import Plain, digest, digest_value, plain

Kept = tuple[bool, bool, int]
"""What is kept of values of one kind: whether nothing but the summary of an array, whether the
payload, and how many buckets of a sketch."""

Entry = tuple[int, About, str, tuple[int, ...], Any, Summary, int, Mapping[str, Any]]
"""An event but for its step: order, what is known of it before its value, kind, shape, value (JSON
types that nobody changes; None for an array), summary, how many buckets of its sketch are kept, and
attributes."""


class StepValues:
    """Summaries of the values of one step after the other, and the events that wait.

    Attributes:
        summaries: Those of the open step, by the order of their event.
        add_directly: As `add`, in C where that is in use, for arrays of which nothing but a summary
            is kept; says whether the value was one.
        loaded: Digest and dtype of each parameter as loaded, by its path.
        seen_samples: Whether a rendered sample was among the values.
    """

    def __init__(self, writer: TraceWriter | BufferedWriter, policy: Policy) -> None:
        self.summaries: dict[int, Summary] = {}
        self.loaded: dict[str, tuple[bytes, str]] = {}
        self.seen_samples = False
        self._writer = writer
        self._store = writer.store if isinstance(writer, TraceWriter) else None
        self._policy = policy
        self._step = 0
        self._kept: dict[tuple[str, str, str], Kept] = {}
        self._entries: list[Entry] = []
        self._places: dict[int, str | None] = {}
        self._found = Summaries(policy.brief, policy.only_digests)
        self.add_directly = self._found.adder(self._kept, self.summaries, self._entries)

    def begin(self, step: int) -> None:
        """Forgets the step before, of which all was handed over."""
        self._step = step
        self.summaries.clear()
        self._kept.clear()
        self._found.advance()

    def add(
        self,
        value: Any,
        order: int,
        about: About,
        kind: str,
        attributes: Plain,
        twin: int | None,
    ) -> None:
        """Summarises a value, and hands its event to the writer or keeps it to be handed over.

        Args:
            twin: See `Tape.emit`.
        """
        kept = self._kept.get((about[0], kind, about[3])) or self._keeps(about, kind)
        is_common, _, buckets = kept
        if is_common and type(value) is np.ndarray:  # as `add_directly`
            # A payload must have its digest, even where memory was written to unseen since.
            known = None if twin is None else still(self.summaries.get(twin), value)
            if known is None:
                known = self._found.of(value, buckets > 0)
            elif buckets:
                known = completed(known, value, sketched=True, sampled=False)
            self.summaries[order] = known
            self._entries.append(
                (order, about, kind, value.shape, None, known, buckets, attributes)
            )
        else:
            self._add_other(value, order, about, kind, attributes, kept)

    def _add_other(
        self, value: Any, order: int, about: About, kind: str, attributes: Plain, kept: Kept
    ) -> None:
        """As `add`, of what is no array or has a payload, is rendered or loaded."""
        phase, path, _, port, *_ = about
        _, keep, buckets = kept
        is_sample = phase == "rendering" and sample_step(path) is not None
        self.seen_samples |= is_sample
        shape: tuple[int, ...] = ()
        payload = other = None
        if isinstance(value, np.ndarray):
            shape = value.shape
            array = value if value.flags.c_contiguous else self._found.packed(value)
            payload = array if keep else None
            if is_sample:
                summary = Summary(digest(array), name_of(array.dtype))
            else:
                summary = self._found.of(array, buckets > 0)
        elif type(value) is Found:
            shape, summary = value
        else:
            if value is None and kind == "tensor":
                kind = "setting"  # it was deferred, and turned out to have no values
            other, buckets = plain(value), 0
            summary = Summary(digest_value(other))
        self.summaries[order] = summary
        if phase == "loading" and port == "param":
            self.loaded[path] = summary.digest, summary.dtype
        self._keep((order, about, kind, shape, other, summary, buckets, attributes), payload)

    def _keeps(self, about: About, kind: str) -> Kept:
        phase, path, _, port, *_ = about
        keep = self._policy.keeps_payload(self._step, phase, kind, path)
        is_sketched = kind == "tensor" and not keep
        buckets = self._policy.buckets(self._step, phase, port) if is_sketched else 0
        is_common = not keep and phase not in ("rendering", "loading")
        kept = is_common, keep, buckets
        if self._policy.only is None:  # it is the same for all paths
            self._kept[phase, kind, port] = kept
        return kept

    def _keep(self, entry: Entry, payload: NDArray[Any] | None) -> None:
        """Keeps an event, and hands over what cannot wait: payloads are written, or copied, and
        what is rendered goes to a table of its own."""
        order, (phase, path, call, port, _, _, dims, *_), _, _, _, summary, _, _ = entry
        if phase == "rendering" or (payload is not None and self._store is None):
            self.hand_over()
            [row] = _rows([entry], {})
            self._writer.add(event_of(self._step, row), payload)
            return
        if payload is not None and self._store is not None:
            site = self._step, phase, path, call, port
            of_value, dtype = summary.digest, summary.dtype
            self._places[order] = self._store(site, order, dims, of_value, dtype, payload)
        self._entries.append(entry)

    def hand_over(self) -> None:
        """Gives the events so far to the writer."""
        if self._entries:
            rows = _rows(self._entries, self._places)
            self._entries.clear()
            self._places.clear()
            self._writer.add_stored(self._step, rows)


def _rows(entries: list[Entry], places: Mapping[int, str | None]) -> list[Row]:
    """Events as a writer takes them, made column by column.

    Args:
        places: Where their payloads lie, by order.
    """
    order, about, kind, shape, value, summary, buckets, attributes = zip(*entries, strict=True)
    of_value, dtype, statistics, sketch, _ = zip(*summary, strict=True)
    heads = zip(order, about, kind, dtype, shape, buckets, strict=True)
    payload = map(places.get, order)
    return list(zip(heads, of_value, statistics, sketch, payload, value, attributes, strict=True))
