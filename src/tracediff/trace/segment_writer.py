"""Writes one step: payloads as they come, and the columns of its events when it is committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tracediff.events import Event
from tracediff.trace import columns
from tracediff.trace.columns import Encoder
from tracediff.trace.hierarchy import Hierarchy
from tracediff.trace.index import StepIndex, step_index
from tracediff.trace.manifest import FORMAT
from tracediff.trace.names import key_of
from tracediff.trace.rows import Row, Rows, head_of, row_of
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
        self.rows: list[Row] = []
        self._template = template
        self._encoder = encoder
        self._compress = compress
        self._file = Hierarchy(folder / f"{step:08d}.zip", template)
        self.samples = SampleWriter(self._file.add_chunk)
        self._stored: dict[tuple[bytes, str, tuple[int, ...]], str] = {}

    def add(self, event: Event, payload: NDArray[Any] | None) -> None:
        """Keeps the event, and writes its payload unless the segment has an equal one."""
        if event.site.phase == "rendering" and self.samples.take(event, payload):
            return
        key = None
        of_value = event.digest
        if payload is not None:
            of_value = of_value or digest(payload)
            site = event.site
            fields = site.step, site.phase, site.path, site.call, site.port
            key = self.store(fields, event.order, event.dims, of_value, event.dtype, payload)
        self.rows.append(as_written(row_of(event), of_value, key))

    def add_again(self, event: Event) -> None:
        """Keeps an event whose payload the segment has; KeyError where it has not."""
        key = self._stored[event.digest, event.dtype, event.shape]
        self.rows.append(as_written(row_of(event), event.digest, key))

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

    def commit(self) -> StepIndex:
        """Finishes the file and renames it; returns its index."""
        self.rows.sort(key=head_of)  # which begins with the order
        rows = Rows(self._template.outline(list(map(head_of, self.rows))), self.rows)
        attributes = {
            "format": FORMAT,
            "step": self.step,
            "rank": self.rank,
            "events": len(rows),
            "sketches": SKETCHES,
        }
        try:
            self._write_columns(rows)
            self._finish_samples()
            size = self._file.commit(attributes)
        except BaseException:
            self.abandon()
            raise
        return step_index(self.step, rows, size, (self.samples.rows, self.samples.root))

    def abandon(self) -> None:
        self._file.abandon()

    def _finish_samples(self) -> None:
        """Writes the rest of the table of samples, if there is one."""
        if self.samples.rows:
            nodes, attributes = self.samples.finish()
            self._file.describe(nodes, GROUP, {"tracediff": attributes})

    def _write_columns(self, rows: Rows) -> None:
        """Writes what is the same in most steps first: its place is then the same, too."""
        texts, numbers = self._encoder.encode(rows), columns.numbers(rows)
        for name in sorted(texts.keys() | numbers, key=lambda n: (n not in columns.OUTLINED, n)):
            path, dims = f"events/{name}", columns.DIMS.get(name, ("event",))
            if (text := texts.get(name)) is not None:
                self._file.add_strings(path, text.data, len(rows), packed=text.packed)
            elif name in columns.OUTLINED:
                self._file.add_constant(path, numbers[name], numbers[name].dtype.name, dims)
            else:
                packed, column = name in columns.PACKED, numbers[name]
                self._file.add_array(path, column, column.dtype.name, dims, packed=packed)


def as_written(row: Row, of_value: bytes, payload: str | None) -> Row:
    """The row as it is written: with its payload's place, and JSON types only."""
    head, _, statistics, sketch, _, value, attributes = row
    if type(attributes) is not Plain:
        attributes = plain(attributes) if attributes else {}
    return head, of_value, statistics, sketch, payload, plain(value), attributes
