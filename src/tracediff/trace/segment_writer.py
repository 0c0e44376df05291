"""Writes one step: payloads as they come, and the columns of its events when it is committed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tracediff.events import Event
from tracediff.trace import columns
from tracediff.trace.columns import Encoder
from tracediff.trace.hierarchy import Hierarchy
from tracediff.trace.manifest import FORMAT
from tracediff.trace.names import key_of
from tracediff.trace.sample_writer import SampleWriter
from tracediff.trace.samples import GROUP
from tracediff.trace.summary import SKETCHES, Plain, digest, plain
from tracediff.trace.template import Template

SiteFields = tuple[int, str, str, int, str]
"""Those of a `Site`, in its order."""


class SegmentWriter:
    """One step while it is written: its events' columns, and their payloads."""

    def __init__(
        self,
        folder: Path,
        step: int,
        rank: int,
        encoder: Encoder,
        template: Template,
        compress: bool = False,
    ) -> None:
        """
        Args:
            encoder: The one that encodes all steps of the process.
            template: The one that knows the steps before.
            compress: Whether payloads are compressed.
        """
        self.step = step
        self.rank = rank
        self.events: list[Event] = []
        self._encoder = encoder
        self._compress = compress
        self._file = Hierarchy(folder / f"{step:08d}.zip", template)
        self.samples = SampleWriter(self._file.add_chunk)
        self._stored: dict[tuple[bytes, str, tuple[int, ...]], str] = {}

    def add(self, event: Event, payload: NDArray[Any] | None) -> None:
        """Keeps the event, and writes its payload unless the segment has an equal one."""
        if event.site.phase == "rendering" and self.samples.take(event, payload):
            return
        if payload is not None:
            of_value = event.digest or digest(payload)
            site = event.site
            fields = site.step, site.phase, site.path, site.call, site.port
            key = self.store(fields, event.order, event.dims, of_value, event.dtype, payload)
            event = as_written(event, of_value, key)
        elif event.payload is not None or not is_plain(event):
            event = as_written(event, event.digest, None)
        self.events.append(event)

    def add_again(self, event: Event) -> None:
        """Keeps an event whose payload the segment has; KeyError where it has not."""
        key = self._stored[event.digest, event.dtype, event.shape]
        self.events.append(as_written(event, event.digest, key))

    def store(
        self,
        site: SiteFields,
        order: int,
        dims: tuple[str, ...],
        of_value: bytes,
        dtype: str,
        payload: NDArray[Any],
    ) -> str:
        """Writes a payload unless the segment has an equal one; returns where it lies.

        Args:
            order: That of the event; it tells apart events that share a site.
            of_value: The payload's digest.
            dtype: Its name.
        """
        identity = of_value, dtype, payload.shape
        key = self._stored.get(identity)
        if key is None:
            _, phase, path, call, port = site
            key = key_of(phase, path, call, port)
            if key in self._file.nodes:
                key = f"{key}%@{order}"
            self._stored[identity] = key
            self._file.add_array(key, payload, dtype, dims, packed=self._compress)
        return key

    def commit(self) -> int:
        """Finishes the file and renames it; returns its size in bytes."""
        attributes = {
            "format": FORMAT,
            "step": self.step,
            "rank": self.rank,
            "events": len(self.events),
            "sketches": SKETCHES,
        }
        try:
            self._write_columns()
            self._finish_samples()
            return self._file.commit(attributes)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        self._file.abandon()

    def _finish_samples(self) -> None:
        """Writes the rest of the table of samples, if there is one."""
        if self.samples.rows:
            nodes, attributes = self.samples.finish()
            self._file.describe(nodes, GROUP, {"tracediff": attributes})

    def _write_columns(self) -> None:
        count = len(self.events)
        for name, texts in self._encoder.encode(self.events).items():
            self._file.add_strings(f"events/{name}", texts.data, count, packed=texts.packed)
        for name, column in columns.numbers(self.events).items():
            dims = columns.DIMS.get(name, ("event",))
            packed = name in columns.PACKED
            self._file.add_array(f"events/{name}", column, column.dtype.name, dims, packed=packed)


def is_plain(event: Event) -> bool:
    """Whether the event holds JSON types only, as far as that is easily seen."""
    attributes = event.attributes
    return event.value is None and (type(attributes) is Plain or not attributes)


def as_written(event: Event, of_value: bytes, payload: str | None) -> Event:
    """The event as it is written: with its payload's place, and JSON types only.

    By hand, as `dataclasses.replace` takes three times as long.
    """
    attributes: Mapping[str, Any] = event.attributes
    if type(attributes) is not Plain:
        attributes = plain(attributes) if attributes else {}
    return Event(
        site=event.site,
        order=event.order,
        kind=event.kind,
        op=event.op,
        source=event.source,
        dtype=event.dtype,
        shape=event.shape,
        dims=event.dims,
        shard=event.shard,
        digest=of_value,
        fingerprint=event.fingerprint,
        sketch=event.sketch,
        inputs=event.inputs,
        payload=payload,
        value=plain(event.value),
        attributes=attributes,
    )
