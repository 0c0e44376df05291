"""Starts a trace, on the local disk or on object storage."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tracediff.errors import UsageError
from tracediff.events import Run
from tracediff.trace.buffered import BufferedWriter
from tracediff.trace.manifest import MANIFEST
from tracediff.trace.remote import Prefix, url_of
from tracediff.trace.writer import TraceWriter


class RemoteWriter(TraceWriter):
    """Writes each step locally, uploads it when it is committed, and removes the local file."""

    def __init__(self, url: str, run: Run, **options: Any) -> None:
        """Creates the trace; `options` are those of `TraceWriter`.

        Raises:
            TraceExistsError: There is a trace; one on object storage is never overwritten.
            UsageError: See `Prefix`; or `overwrite` was asked for.
            TraceError: The store refuses.
        """
        if options.get("overwrite"):
            raise UsageError(f"--overwrite does not reach {url}: delete the trace there first")
        self._prefix = Prefix(url)
        self._spool = tempfile.TemporaryDirectory(prefix="tracediff-")
        folder = Path(self._spool.name) / "trace"
        super().__init__(folder, run, **options)
        self.place = url
        self._prefix.put(MANIFEST, (folder / MANIFEST).read_bytes(), new=True)

    def finish(self, status: str = "finished", error: str | None = None) -> None:
        try:
            super().finish(status, error)
        finally:
            self._spool.cleanup()

    def _publish(self, file: Path) -> None:
        super()._publish(file)
        self._prefix.put(file.relative_to(self._root).as_posix(), file)
        if file.suffix == ".zip":
            file.unlink()

    def _remove(self, file: Path) -> None:
        super()._remove(file)
        self._prefix.delete(file.relative_to(self._root).as_posix())


def create_trace(
    path: str | Path, run: Run, *, max_buffer: int = 0, on_full: str = "wait", **options: Any
) -> TraceWriter | BufferedWriter:
    """Starts a trace on the local disk or on object storage, as its path says.

    Args:
        max_buffer: Bytes that may wait to be written beside the program; 0 writes at once.
        on_full: See `BufferedWriter`.
        options: Those of `TraceWriter`.

    Raises:
        As `TraceWriter` and `RemoteWriter` do.
    """
    url = url_of(path)
    writer = RemoteWriter(url, run, **options) if url else TraceWriter(path, run, **options)
    return BufferedWriter(writer, max_buffer, on_full) if max_buffer else writer
