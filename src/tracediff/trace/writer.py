"""Writes a trace: one segment per step, committed by renaming it into place."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from numpy.typing import NDArray

from tracediff.errors import NotATraceError, TraceError, TraceExistsError
from tracediff.events import Event, Run, Site
from tracediff.forks import process_id
from tracediff.trace.columns import Encoder
from tracediff.trace.dtypes import storable
from tracediff.trace.index import Prefix, StepIndex, step_index, write_index
from tracediff.trace.manifest import (
    INDEX,
    MANIFEST,
    SEGMENTS,
    SNAPSHOTS,
    Lock,
    is_trace,
    sync_folder,
    write_manifest,
)
from tracediff.trace.seal import Sealer, is_seal
from tracediff.trace.segment_writer import SegmentWriter
from tracediff.trace.snapshot import Tree, snapshot_files, write_snapshot
from tracediff.trace.summary import FINGERPRINT_FIELDS

_OURS: Final = frozenset({MANIFEST, f".{MANIFEST}.tmp", SEGMENTS, INDEX, SNAPSHOTS})


def _is_ours(name: str) -> bool:
    return name in _OURS or is_seal(name)


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
        self._last_step = -1
        self._committed = 0
        self._so_far = Prefix()
        self._finished = False
        self._on_refusal = on_refusal
        self._refused: TraceError | None = None
        with _writing(self.place):
            if rank:
                self._lock = self._join()
            else:
                self._lock = self._create(overwrite)

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
        self._segment = SegmentWriter(self._folder, step, self.rank, self._encoder, self._compress)
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
            size = segment.commit()
            self._publish(self._folder / f"{segment.step:08d}.zip")
            self._last_step = segment.step
            self._committed += 1
            rendered = segment.samples.rows, segment.samples.root
            index = step_index(segment.step, segment.events, size, rendered)
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
        for file in write_index(self._root, self.rank, replace(index, prefix=self._so_far)):
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
        segment = self._segment
        if segment is None:
            self._check_new(event.site)
        elif event.site.step != segment.step:
            raise ValueError(f"step {segment.step} is open: commit it before {event.site}")
        if event.fingerprint and len(event.fingerprint) != len(FINGERPRINT_FIELDS):
            raise ValueError(f"{event.site}: a fingerprint has {len(FINGERPRINT_FIELDS)} numbers")
        if payload is not None and (
            (storable(payload.dtype), payload.shape) != (event.dtype, event.shape)
        ):
            raise ValueError(
                f"{event.site} is {event.dtype} {event.shape}, and its payload is "
                f"{payload.dtype} {payload.shape}"
            )

    def _check_new(self, site: Site) -> None:
        """Checks the first event of a step."""
        if self._finished:
            raise ValueError(f"the trace is finished, and {site} came after it")
        if site.step <= self._last_step:
            raise ValueError(f"step {site.step} was committed already, and {site} came after it")

    # ---- creating --------------------------------------------------------------------------

    def _create(self, overwrite: bool) -> Lock:
        """Creates the trace under a temporary name, then renames it into place."""
        root = self._root
        occupied = root.exists() and (not root.is_dir() or any(root.iterdir()))
        old = self._replaceable(overwrite) if occupied else None
        new = root.with_name(f".{root.name}.{secrets.token_hex(4)}.new")
        lock = None
        try:
            (new / SEGMENTS / "0").mkdir(parents=True)
            lock = Lock(new)
            write_manifest(new, self.run, sealed=self._sealer is not None)
            _put(new, root, replacing=old is not None)
        except BaseException:
            if lock is not None:
                lock.release()
            shutil.rmtree(new, ignore_errors=True)
            raise
        finally:
            if old is not None:
                old.release()
        return lock

    def _replaceable(self, overwrite: bool) -> Lock:
        """Locks the trace that is there, if it may be replaced."""
        if not overwrite:
            raise TraceExistsError(
                f"{self.place} already holds something: choose another path, or overwrite it with "
                "--overwrite if it is a trace"
            )
        if not is_trace(self._root):
            raise TraceExistsError(
                f"{self.path} is no trace, so it is not overwritten: choose another path"
            )
        foreign = sorted(item.name for item in self._root.iterdir() if not _is_ours(item.name))
        if foreign:
            raise TraceExistsError(
                f"{self.path} holds {foreign[0]!r}, which is no part of a trace, so it is not "
                "overwritten: move that elsewhere"
            )
        return Lock(self._root)

    def _join(self) -> Lock:
        if not is_trace(self._root):
            raise NotATraceError(
                f"{self.path} is no trace that rank {self.rank} could join: start rank 0 first"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        if any(self._folder.iterdir()):
            raise TraceExistsError(f"{self.path} already holds segments of rank {self.rank}")
        return Lock(self._folder)


def _put(new: Path, root: Path, *, replacing: bool) -> None:
    """Gives a new trace its place. What it replaces is set aside first and removed last."""
    old = root.with_name(f".{root.name}.{secrets.token_hex(4)}.old")
    if replacing:
        root.rename(old)
    try:
        new.rename(root)
    except OSError as error:
        if replacing:
            old.rename(root)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise TraceExistsError(
                f"{root} was created by another process meanwhile: choose another path"
            ) from None
        raise
    sync_folder(root.parent)
    if replacing:
        shutil.rmtree(old)


@contextmanager
def _writing(place: str) -> Iterator[None]:
    """Turns what the file system refuses into one sentence."""
    try:
        yield
    except OSError as error:
        raise _refusal(place, error) from error


def _refusal(place: str, error: OSError) -> TraceError:
    return TraceError(f"cannot write {place}: {error.strerror or error}")
