"""Writes a trace: one segment per step, committed by renaming it into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from tracediff.errors import TraceError
from tracediff.events import Event, Run, Site
from tracediff.forks import process_id
from tracediff.trace.columns import Encoder
from tracediff.trace.dtypes import DTYPES, storable
from tracediff.trace.index import Prefix, StepIndex, write_index
from tracediff.trace.manifest import (
    MANIFEST,
    SEGMENTS,
    SNAPSHOTS,
    sync_folder,
    write_manifest,
)
from tracediff.trace.placing import create, join
from tracediff.trace.rows import Row, event_of
from tracediff.trace.seal import Sealer
from tracediff.trace.segment_writer import SegmentWriter, SiteFields
from tracediff.trace.snapshot import Tree, snapshot_files, write_snapshot
from tracediff.trace.summary import FINGERPRINT_FIELDS
from tracediff.trace.template import Template


class TraceWriter:
    """Writes the events of one process of a run.

    Payloads go straight to the segment's temporary file; only the columns are kept in memory
    until `commit_step`. In a forked child every method does nothing, so that a data loader's
    workers cannot write into their parent's trace.

    Attributes:
        run: The manifest as last written.
        place: The trace as errors name it.
    """

    def __init__(
        self,
        path: str | Path,
        run: Run,
        *,
        overwrite: bool = False,
        rank: int = 0,
        compress: bool = False,
        seal: bool = False,
        on_refusal: Callable[[str], None] | None = None,
    ) -> None:
        """Creates the trace, with status `recording`.

        Args:
            path: Folder of the trace; its parents are created.
            overwrite: Replace a trace that is there, and only a trace. The old one stays until
                the new one has its manifest.
            rank: Rank of this process. Rank 0 creates the trace and owns its manifest, others
                join it.
            compress: Compress payloads and snapshots, for archives: their digests are the same.
            seal: Keep a SHA-256 of every file, see `seal`.
            on_refusal: Called once with one sentence when the file system refuses a write, such as
                on a full disk; from then on nothing is written and nothing raised. By default the
                error is raised.

        Raises:
            TraceExistsError: `path` holds something, or another process records into it.
            NotATraceError: `rank` is not 0, and rank 0 has not created the trace.
            TraceError: The file system refuses.
        """
        self.path = Path(path)
        self.place = str(path)
        self.run = replace(run, status="recording", error=None)
        self.rank = rank
        self._compress = compress
        self._root = self.path.resolve()
        self._folder = self._root / SEGMENTS / str(rank)
        self._pid = process_id()
        self._sealer = Sealer(self._root, rank) if seal else None
        self._snapshots: list[Path] = []
        self._segment: SegmentWriter | None = None
        self._encoder = Encoder()
        self._template = Template()
        self._last_step = -1
        self._committed = 0
        self._so_far = Prefix()
        self._finished = False
        self._on_refusal = on_refusal
        self._refused: TraceError | None = None
        with _writing(self.place):
            if rank:
                self._lock = join(self.path, self._folder, rank)
            else:
                self._lock = create(self.path, self.place, self.run, overwrite=overwrite, seal=seal)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.finish("failed", f"{type(error).__name__}: {error}".splitlines()[0])

    # ---- events ----------------------------------------------------------------------------

    def add(self, event: Event, payload: NDArray[Any] | None) -> None:
        """Adds an event to the step that is open, or opens its step.

        Args:
            payload: The event's value, of its dtype and shape, in any layout and byte order; or
                None to keep none. It has been read when this returns.

        Raises:
            TraceError: The payload's dtype cannot be stored, or the disk is full.
            ValueError: The event's step is not the open one, or event and payload disagree.
        """
        if process_id() != self._pid or (self._refused is not None and self._gave_up()):
            return
        self._check(event, payload)
        try:
            segment = self._segment or self._open(event.site.step)
            segment.add(event, payload)
        except (OSError, TraceError) as error:
            self._refuse(error)

    def store(
        self,
        site: SiteFields,
        order: int,
        dims: tuple[str, ...],
        digest: bytes,
        dtype: str,
        payload: NDArray[Any],
    ) -> str | None:
        """Writes the payload of an event that comes with `add_stored`.

        Args:
            dtype: The name of the payload's.

        Returns:
            Where it lies; None where nothing is written any more.

        Raises:
            As `add`.
        """
        if process_id() != self._pid or (self._refused is not None and self._gave_up()):
            return None
        segment = self._segment
        if segment is None or segment.step != site[0] or dtype not in DTYPES:
            storable(payload.dtype)
            self._check_step(Site(*site))
        try:
            segment = segment or self._open(site[0])
            return segment.store(site, order, dims, digest, dtype, payload)
        except (OSError, TraceError) as error:
            self._refuse(error)
            return None

    def add_stored(self, step: int, rows: Sequence[Row]) -> None:
        """Adds events of one step as they are: with what `store` returned as their payloads, their
        values and attributes of JSON types.

        Raises:
            As `add`.
        """
        if not rows or process_id() != self._pid or self._gave_up():
            return
        self._check_step(event_of(step, rows[0]).site)
        try:
            segment = self._segment or self._open(step)
        except OSError as error:
            self._refuse(error)
        else:
            segment.rows += rows

    def add_again(self, event: Event) -> None:
        """Adds an event whose value was added to the open step with its payload before.

        Raises:
            As `add` does, and KeyError where it was not.
        """
        if process_id() != self._pid or self._gave_up():
            return
        self._check(event, None)
        if self._segment is not None:
            self._segment.add_again(event)

    def _open(self, step: int) -> SegmentWriter:
        """Begins a step."""
        self._segment = SegmentWriter(
            self._folder, step, self.rank, self._encoder, self._template, self._compress
        )
        return self._segment

    def commit_step(self) -> None:
        """Writes the columns of the open step and gives its segment its final name.

        A step without events commits nothing.

        Raises:
            TraceError: The disk is full.
        """
        if self._segment is None or process_id() != self._pid:
            return
        segment, self._segment = self._segment, None
        with self._whole_steps():
            index = segment.commit()
            self._publish(self._folder / f"{segment.step:08d}.zip")
            self._last_step = segment.step
            self._committed += 1
            self._write_index(index)

    def adopt_step(self, step: int, segment: Path, index: StepIndex) -> None:
        """Copies a sound segment of another trace, to be a committed step of this one.

        Args:
            step: Its step, after all that were committed before.
        """
        with self._whole_steps():
            self._adopt(segment, self._folder / f"{step:08d}.zip")
            self._write_index(index)
        self._last_step = step
        self._committed += 1

    def adopt_snapshot(self, step: int, snapshot: Path) -> None:
        """Copies a sound snapshot of another trace."""
        with self._whole_steps():
            (self._root / SNAPSHOTS).mkdir(exist_ok=True)
            self._adopt(snapshot, self._root / SNAPSHOTS / f"{step:08d}.zip")

    def _adopt(self, file: Path, final: Path) -> None:
        temporary = final.with_name(f".{final.name}.tmp")
        shutil.copyfile(file, temporary)
        with temporary.open("rb") as copy:
            os.fsync(copy.fileno())
        temporary.rename(final)
        sync_folder(final.parent)
        self._publish(final)

    def _write_index(self, index: StepIndex) -> None:
        self._so_far = self._so_far.then(index)
        for file in write_index(self._root, self.rank, index, self._so_far):
            self._publish(file)

    def discard_step(self) -> None:
        """Forgets the events of the open step."""
        if self._segment is not None and process_id() == self._pid:
            self._segment.abandon()
            self._segment = None

    def add_snapshot(self, step: int, tree: Tree, keep: int | None = None) -> list[str]:
        """Writes a snapshot of the run before a step; see `snapshot.write_snapshot`.

        Only rank 0 keeps snapshots.

        Args:
            keep: How many of this run's snapshots stay, the latest ones; the others are removed
                once this one is complete. None keeps all.
        """
        if not self.rank and process_id() == self._pid and not self._gave_up():
            with self._whole_steps():
                lost = write_snapshot(self._root, step, tree, packed=self._compress)
                self._snapshots.append(snapshot_files(self._root)[step])
                self._publish(self._snapshots[-1])
                while keep is not None and len(self._snapshots) > keep:
                    self._remove(self._snapshots.pop(0))
                return lost
        return []

    # ---- the run ---------------------------------------------------------------------------

    def add_note(self, text: str) -> None:
        """Adds a sentence to the manifest at once, so that it outlives a kill."""
        self.run = replace(self.run, notes=(*self.run.notes, text))
        self._write_manifest()

    def finish(self, status: str = "finished", error: str | None = None) -> None:
        """Commits the open step, writes the final status and releases the lock.

        A second call does nothing. Where a step could not be written, the status is `failed`.

        Raises:
            TraceError: The last step or the manifest cannot be written.
        """
        if self._finished or process_id() != self._pid:
            return
        self._finished = True
        meant_well = status == "finished"
        try:
            with suppress(TraceError):  # raised below, once the manifest says it
                self.commit_step()
            if self._refused is not None:
                status, error = "failed", error or str(self._refused)
            self.run = replace(self.run, status=status, error=error)
            self._write_manifest(self._committed)
            if self._sealer is not None:
                with self._whole_steps():
                    self._sealer.add(self._root / MANIFEST)
                    self._publish(self._sealer.close())
        finally:
            self._lock.release()
        if meant_well:
            self._gave_up()

    def _gave_up(self) -> bool:
        """Whether the file system refused a write; raises that error unless it was told already."""
        if self._refused is not None and self._on_refusal is None:
            raise self._refused
        return self._refused is not None

    @contextmanager
    def _whole_steps(self) -> Iterator[None]:
        """Where part of a step cannot be written, that step is given up and no other begun."""
        try:
            yield
        except (OSError, TraceError) as error:
            self._refuse(error)

    def _refuse(self, cause: OSError | TraceError) -> None:
        """Gives up the open step and every later one; raises the error unless it is told."""
        error = cause if isinstance(cause, TraceError) else _refusal(self.place, cause)
        self.discard_step()
        first, self._refused = self._refused is None, error
        if self._on_refusal is None:
            raise error from cause
        if first:
            self._on_refusal(f"recording stopped: {error}")

    def _write_manifest(self, committed: int | None = None) -> None:
        if self.rank == 0 and process_id() == self._pid:
            with self._whole_steps():
                sealed = self._sealer is not None
                write_manifest(self._root, self.run, committed, sealed=sealed)
                self._publish(self._root / MANIFEST)

    def _publish(self, file: Path) -> None:
        """Called with each file once it is complete on the disk."""
        if self._sealer is not None and file.parent != self._root:
            self._sealer.add(file)

    def _remove(self, file: Path) -> None:
        """Removes a file that was published."""
        file.unlink(missing_ok=True)
        if self._sealer is not None:
            self._sealer.forget(file)

    def _check(self, event: Event, payload: NDArray[Any] | None) -> None:
        self._check_step(event.site)
        if event.fingerprint and len(event.fingerprint) != len(FINGERPRINT_FIELDS):
            raise ValueError(f"{event.site}: a fingerprint has {len(FINGERPRINT_FIELDS)} numbers")
        if payload is not None and (
            (storable(payload.dtype), payload.shape) != (event.dtype, event.shape)
        ):
            raise ValueError(
                f"{event.site} is {event.dtype} {event.shape}, and its payload is "
                f"{payload.dtype} {payload.shape}"
            )

    def _check_step(self, site: Site) -> None:
        """Checks that an event is of the step that is open, or may open its own."""
        segment = self._segment
        if segment is not None:
            if site.step != segment.step:
                raise ValueError(f"step {segment.step} is open: commit it before {site}")
            return
        if self._finished:
            raise ValueError(f"the trace is finished, and {site} came after it")
        if site.step <= self._last_step:
            raise ValueError(f"step {site.step} was committed already, and {site} came after it")


@contextmanager
def _writing(place: str) -> Iterator[None]:
    """Turns what the file system refuses into one sentence."""
    try:
        yield
    except OSError as error:
        raise _refusal(place, error) from error


def _refusal(place: str, error: OSError) -> TraceError:
    return TraceError(f"cannot write {place}: {error.strerror or error}")
