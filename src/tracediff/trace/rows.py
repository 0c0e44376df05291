"""The events of a step as a writer has them: each one's head, and its values.

Steps are alike: the heads of a step are nearly always those of the step before, and what is made of
them need not be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tracediff.events import Event, Site
from tracediff.kernels import packed, unpacked
from tracediff.trace.summary import FINGERPRINT_FIELDS, shortened

About = tuple[str, str, int, str, str, str, tuple[str, ...], str, tuple[int, ...]]
"""What is known of an event before its value: phase, path, call and port of its site, then op,
source, dims, shard and inputs."""

Head = tuple[int, About, str, str, tuple[int, ...], int]
"""What of an event is the same in steps that are alike: order, what is known before its value,
kind, dtype, shape, and the buckets of its sketch (0 for none)."""

Row = tuple[
    Head,
    bytes,
    bytes,
    NDArray[np.float64] | None,
    str | None,
    Any,
    Mapping[str, Any],
]
"""An event: its head, then its digest, fingerprint (as `kernels.packed`, empty for none), sketch,
the place of its payload, its value and its attributes. The sketch may be a whole one where the head
says that a short one is kept."""

head_of: Final[Callable[[Row], Head]] = itemgetter(0)

_WIDTH: Final = len(FINGERPRINT_FIELDS)
_NO_STATISTICS: Final = packed([float("nan")] * _WIDTH)


class Fields(NamedTuple):
    """Fields of heads, each of all events of a step; see `Head`."""

    order: tuple[int, ...]
    phase: tuple[str, ...]
    path: tuple[str, ...]
    call: tuple[int, ...]
    port: tuple[str, ...]
    kind: tuple[str, ...]
    op: tuple[str, ...]
    source: tuple[str, ...]
    dtype: tuple[str, ...]
    shape: tuple[tuple[int, ...], ...]
    dims: tuple[tuple[str, ...], ...]
    shard: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]
    buckets: tuple[int, ...]


def _fields(heads: list[Head]) -> Fields:
    if not heads:
        return Fields(*[()] * len(Fields._fields))
    order, about, kind, dtype, shape, buckets = zip(*heads, strict=True)
    phase, path, call, port, op, source, dims, shard, inputs = zip(*about, strict=True)
    return Fields(
        order, phase, path, call, port, kind, op, source, dtype, shape, dims, shard, inputs, buckets
    )


class Outline:
    """What a step is but for the values of its events: equal to itself only, so that what is made
    of it can be kept.

    Attributes:
        orders, calls: As int64.
        sketched: Buckets of a sketch -> places of the events that have one, int64.
    """

    def __init__(self, heads: list[Head]) -> None:
        self.heads = heads
        self.fields = fields = _fields(heads)
        self.orders = np.array(fields.order, np.int64)
        self.calls = np.array(fields.call, np.int64)
        held = np.array(fields.buckets, np.int64)
        self.sketched = {size: np.flatnonzero(held == size) for size in set(fields.buckets) if size}


class Rows:
    """The events of a step in their order, field by field.

    Attributes:
        statistics: Fingerprints as float64 of shape (events, statistics), NaN where there is none.
        sketches: Buckets -> sketches, float64 of shape (sketches, buckets), of the events that
            `Outline.sketched` has.
    """

    def __init__(self, outline: Outline, rows: Sequence[Row]) -> None:
        """
        Args:
            rows: With the heads of the outline.
        """
        self.outline = outline
        fields: Iterable[Any] = zip(*rows, strict=True) if rows else [()] * 7
        (
            _,
            self.digests,
            self.fingerprints,
            sketches,
            self.payloads,
            self.values,
            self.attributes,
        ) = fields
        table = b"".join([found or _NO_STATISTICS for found in self.fingerprints])
        self.statistics = np.frombuffer(table).reshape(len(rows), _WIDTH)
        self.sketches = {
            size: _table([sketches[place] for place in places.tolist()], size)
            for size, places in outline.sketched.items()
        }

    @classmethod
    def of_events(cls, events: Iterable[Event]) -> Self:
        """Of events in any order."""
        rows = sorted(map(row_of, events), key=head_of)
        return cls(Outline(list(map(head_of, rows))), rows)

    def __len__(self) -> int:
        return len(self.digests)


def _table(found: list[NDArray[np.float64]], size: int) -> NDArray[np.float64]:
    """Sketches of that many buckets, from these or larger ones."""
    if len({each.size for each in found}) > 1:
        found = [each if each.size == size else shortened(each) for each in found]
    table = np.concatenate(found).reshape(len(found), -1)
    return table if table.shape[1] == size else shortened(table)


def row_of(event: Event) -> Row:
    """An event as a row."""
    site, sketch = event.site, event.sketch
    about = (
        site.phase,
        site.path,
        site.call,
        site.port,
        event.op,
        event.source,
        event.dims,
        event.shard,
        event.inputs,
    )
    size = 0 if sketch is None else sketch.size
    head = event.order, about, event.kind, event.dtype, event.shape, size
    statistics = packed(event.fingerprint) if event.fingerprint else b""
    values = event.digest, statistics, sketch, event.payload, event.value, event.attributes
    return head, *values


def event_of(step: int, row: Row) -> Event:
    """Undoes `row_of`."""
    head, digest, statistics, sketch, payload, value, attributes = row
    order, about, kind, dtype, shape, size = head
    phase, path, call, port, op, source, dims, shard, inputs = about
    if sketch is not None and sketch.size != size:
        sketch = shortened(sketch) if size else None
    return Event(
        site=Site(step, phase, path, call, port),
        order=order,
        kind=kind,
        op=op,
        source=source,
        dtype=dtype,
        shape=shape,
        dims=dims,
        shard=shard,
        digest=digest,
        fingerprint=unpacked(statistics) if statistics else (),
        sketch=sketch,
        inputs=inputs,
        payload=payload,
        value=value,
        attributes=attributes,
    )
