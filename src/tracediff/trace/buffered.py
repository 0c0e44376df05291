"""Writes a trace beside the program that is recorded: from a bounded buffer, on its own thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.events import Event, Run
from tracediff.forks import process_id
from tracediff.trace.rows import Row, event_of, row_of
from tracediff.trace.segment_writer import as_written
from tracediff.trace.snapshot import Tree
from tracediff.trace.summary import Plain
from tracediff.trace.writer import TraceWriter

ON_FULL: Final = ("wait", "drop")

_EVENT_BYTES: Final = 4096
"""What an event without payload counts for: a sketch takes half of it."""
_BATCH: Final = 1 << 20
"""Bytes that are handed over at a time: each time the threads take turns."""

_Payload = NDArray[Any] | None
_Job = Callable[[], object]


class BufferedWriter:
    """Hands copies of values to a thread, which gives them to a `TraceWriter` in their order.

    Digests and statistics are taken before, so that the buffer holds payloads that are to be
    written and nothing that is to be computed. A process that is killed loses what is in the
    buffer; steps that are committed are whole, as ever. An error of the thread is raised by the
    next call.

    In a forked child every method does nothing, as those of `TraceWriter`.
    """

    def __init__(self, writer: TraceWriter, limit: int, on_full: str = "wait") -> None:
        """
        Args:
            limit: Size of the buffer in bytes. A single value that is larger is let in alone.
            on_full: `wait` until there is room, or `drop` payloads of tensors, never their
                digests: such an event has the attribute `dropped`, and the manifest a note.
        """
        self._writer = writer
        self._limit = max(limit, _BATCH)
        self._on_full = on_full
        self._pid = process_id()
        self._batch: list[tuple[Event, _Payload]] = []
        self._batch_bytes = 0
        self._stored: set[tuple[bytes, str, tuple[int, ...]]] = set()
        self._dropped = 0, 0
        self._jobs: deque[tuple[int, _Job]] = deque()
        self._held = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def run(self) -> Run:
        return self._writer.run

    @property
    def place(self) -> str:
        return self._writer.place

    # ---- events ----------------------------------------------------------------------------

    def add(self, event: Event, payload: NDArray[Any] | None) -> None:
        """As `TraceWriter.add`; everything has been copied when this returns."""
        if process_id() != self._pid:
            return
        if self._stopping:
            self._writer.add(event, payload)  # which refuses it
        if not is_plain(event):
            event = event_of(event.site.step, as_written(row_of(event), event.digest, None))
        size = _EVENT_BYTES
        if payload is not None:
            event, payload = self._admitted(event, payload)
            size += payload.nbytes if payload is not None else 0
        self._batch.append((event, payload))
        self._batch_bytes += size
        if self._batch_bytes >= _BATCH:
            self._hand_over()

    def add_stored(self, step: int, rows: Iterable[Row]) -> None:
        """Adds events of one step, without payloads."""
        for row in rows:
            self.add(event_of(step, row), None)

    def _admitted(self, event: Event, payload: NDArray[Any]) -> tuple[Event, _Payload]:
        """The event, and a copy of its payload unless the step has it or it is dropped."""
        identity = (event.digest, event.dtype, event.shape)
        if identity in self._stored:
            return event, _STORED
        if not self._has_room(event, payload.nbytes):
            count, size = self._dropped
            self._dropped = count + 1, size + payload.nbytes
            return replace(event, attributes={**event.attributes, "dropped": True}), None
        if event.site.phase != "rendering":  # which may go to the table of samples
            self._stored.add(identity)
        return event, np.array(payload, order="C")

    def _has_room(self, event: Event, size: int) -> bool:
        """Makes room for a payload, or says that it is to be dropped."""
        if self._held + self._batch_bytes + size <= self._limit:
            return True
        if self._on_full == "drop" and event.kind == "tensor":
            return False
        self._hand_over()
        with self._changed:
            while self._held and self._held + size > self._limit and self._error is None:
                self._changed.wait()
        return True

    def commit_step(self) -> None:
        """As `TraceWriter.commit_step`, which is called by the thread."""
        if process_id() == self._pid:
            self._hand_over()
            self._put(0, self._writer.commit_step)
            self._stored.clear()

    def discard_step(self) -> None:
        """Forgets the events of the open step."""
        if process_id() == self._pid:
            self._flush()
            self._stored.clear()
            self._writer.discard_step()

    # ---- what waits for the buffer ---------------------------------------------------------

    def add_snapshot(self, step: int, tree: Tree, keep: int | None = None) -> list[str]:
        """As `TraceWriter.add_snapshot`, once the buffer is empty."""
        if process_id() != self._pid:
            return []
        self._flush()
        return self._writer.add_snapshot(step, tree, keep)

    def add_note(self, text: str) -> None:
        """As `TraceWriter.add_note`, once the buffer is empty."""
        if process_id() == self._pid:
            self._flush()
            self._writer.add_note(text)

    def finish(self, status: str = "finished", error: str | None = None) -> None:
        """Writes what is in the buffer, ends the thread, and does as `TraceWriter.finish`.

        Raises:
            TraceError: The rest, the last step or the manifest cannot be written.
        """
        if process_id() != self._pid:
            return
        failure: BaseException | None = None
        try:
            self._flush()
        except BaseException as raised:
            failure = raised
        self._stop()
        if failure is None:
            self._tell_dropped()
            self._writer.finish(status, error)
        elif status != "finished":
            self._writer.finish(status, error)
        else:
            self._writer.finish("failed", f"{type(failure).__name__}: {failure}".splitlines()[0])
            raise failure

    def _tell_dropped(self) -> None:
        (count, size), self._dropped = self._dropped, (0, 0)
        if count:
            self._writer.add_note(
                f"{count} payloads ({size / 1e6:.1f} MB) were dropped because the buffer was full: "
                "only their digests are kept"
            )

    # ---- the thread ------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Gives the events so far to the thread."""
        batch, size = self._batch, self._batch_bytes
        self._batch, self._batch_bytes = [], 0
        if batch:
            self._put(size, lambda: self._add_all(batch))

    def _put(self, size: int, job: _Job) -> None:
        with self._changed:
            self._raise()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="tracediff-writer", daemon=True
                )
                self._thread.start()
            self._jobs.append((size, job))
            self._held += size
            self._changed.notify_all()

    def _flush(self) -> None:
        """Waits until everything so far is written."""
        self._hand_over()
        with self._changed:
            while self._jobs and self._error is None:
                self._changed.wait()
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._stopping:
                    self._changed.wait()
                if not self._jobs or self._error is not None:
                    return
                size, job = self._jobs[0]  # stays there until it is done
            try:
                job()
            except BaseException as error:  # raised by the next call
                self._error = error
            with self._changed:
                self._jobs.popleft()
                self._held -= size
                self._changed.notify_all()

    def _add_all(self, batch: list[tuple[Event, _Payload]]) -> None:
        for event, payload in batch:
            if payload is _STORED:
                self._writer.add_again(event)
            else:
                self._writer.add(event, payload)


def is_plain(event: Event) -> bool:
    """Whether the event holds JSON types only, as far as that is easily seen."""
    attributes = event.attributes
    return event.value is None and (type(attributes) is Plain or not attributes)


_STORED: Final[NDArray[Any]] = np.empty(0)
"""Stands for a payload that the step has already."""
