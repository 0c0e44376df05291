"""Reads a trace, lazily."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from tracediff.errors import TraceError
from tracediff.events import Event, Run, Site, sample_step
from tracediff.trace.index import (
    SUMS,
    Prefix,
    StepIndex,
    index_file,
    load_index,
    load_sums,
    step_index,
)
from tracediff.trace.manifest import (
    MANIFEST,
    SEGMENTS,
    SNAPSHOTS,
    is_sealed,
    read_manifest,
    size_of,
)
from tracediff.trace.remote import Mirror, place, url_of
from tracediff.trace.rows import Rows
from tracediff.trace.samples import SampleRows, place_of
from tracediff.trace.seal import load_seal
from tracediff.trace.segment import SegmentReader
from tracediff.trace.sums import Marks

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import RenderableType

    from tracediff.trace.snapshot import Tree

CACHED_STEPS: Final = 16
"""Segments that are kept open, and whose events are kept in memory, at a time."""

_RANK: Final = re.compile(r"0|[1-9][0-9]{0,8}")

_T = TypeVar("_T")


class Trace:
    """A recorded run, opened read-only. A context manager.

    Attributes:
        path: Folder of the trace; of one on object storage, of what was fetched so far.
        place: The trace as the user named it.
        run: The run manifest.
        rank: Rank of the process whose segments are read.
        steps: Numbers of the committed steps, ascending.
        bytes_read: Bytes of payloads and columns that were read so far.
    """

    def __init__(self, path: str | Path, *, rank: int = 0) -> None:
        """Opens the trace and lists its steps; reads no segment.

        Raises:
            NotATraceError: The path is missing, or holds something else.
            TraceFormatError: The trace has a newer format than this release reads.
            CorruptTraceError: The manifest is damaged.
        """
        url = url_of(path)
        self._mirror = Mirror(url) if url else None
        self.place = place(path)
        self.path = self._mirror.folder if self._mirror else Path(path)
        self.run: Run = read_manifest(self.path)
        self.rank = rank
        self._seal = load_seal(
            self.path, sealed=is_sealed(self.path), finished=self.run.status != "recording"
        )
        if self._seal is not None and self._seal.closed:
            self._seal.require(self.path / MANIFEST)
        self._segments = dict(segment_files(self.path, rank, self._mirror))
        self.steps: list[int] = list(self._segments)
        self.bytes_read = 0
        self._prefixes: dict[int, Prefix] = {}
        self._open: OrderedDict[int, SegmentReader] = OrderedDict()
        self._events: OrderedDict[int, list[Event]] = OrderedDict()

    def of_rank(self, rank: int) -> Trace:
        """The same trace, read at another rank.

        Raises:
            TraceError: It has no such rank.
        """
        if rank not in self.ranks:
            raise TraceError(f"{self.place} has no rank {rank}: it has {_listed(self.ranks)}")
        return Trace(self.place, rank=rank)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens a trace; the same as `Trace(path)`."""
        return cls(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        steps = f"{len(self.steps)} step{'' if len(self.steps) == 1 else 's'}"
        return f"<Trace {Path(self.place).name}: {self.run.stack}, {steps}, {self.run.status}>"

    def close(self) -> None:
        """Lets go of the open segments. Arrays that were read stay valid."""
        self._open.clear()
        self._events.clear()

    # ---- what there is ---------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """Equal for two readers of one trace, whatever its path was called."""
        return self.place if self._mirror else str(self.path.resolve())

    @property
    def ranks(self) -> list[int]:
        """Ranks of the processes that recorded into the trace, ascending."""
        if self._mirror is not None:
            names = [file.parent.name for file in self._mirror.files(SEGMENTS)]
        else:
            names = [folder.name for folder in (self.path / SEGMENTS).glob("*")]
        found = {int(name) for name in names if _RANK.fullmatch(name)}
        return sorted(found | {0})

    @property
    def is_complete(self) -> bool:
        """Whether the run ended by itself; false while it records or after it was killed."""
        return self.run.status != "recording"

    @property
    def seal(self) -> str | None:
        """SHA-256 of the seal of a trace that was recorded with one and ended by itself."""
        return self._seal.digest if self._seal is not None and self._seal.closed else None

    @property
    def bytes_stored(self) -> int:
        """Size of all segments in bytes."""
        return sum(map(self._size, self._segments.values()))

    def events(self, step: int | None = None, *, samples: bool = True) -> list[Event]:
        """Events of a step, or of all steps, in execution order.

        Args:
            samples: Whether to make the events of the rendered samples too. Of a whole data set,
                `samples()` takes a fraction of the memory.

        Raises:
            TraceError: There is no such step.
            CorruptTraceError: A segment is damaged.
        """
        if step is None:
            return [event for each in self.steps for event in self.events(each, samples=samples)]
        found = self._columns(step)
        if not samples:
            return [event for event in found if place_of(event) is None]
        rows = self._segment(step).samples()
        return sorted([*found, *rows], key=lambda event: event.order) if len(rows) else list(found)

    def samples(self, step: int) -> SampleRows:
        """The rendered samples of a step as columns, whose events are made one at a time.

        Raises:
            TraceError: There is no such step.
            CorruptTraceError: The segment is damaged.
        """
        segment = self._segment(step)
        before = segment.column_bytes
        rows = segment.samples()
        self.bytes_read += segment.column_bytes - before
        if len(rows):
            return rows
        return SampleRows.of_events(self._columns(step))

    def find(self, site: Site | str) -> Event:
        """The event at a site, given as a `Site` or as it is printed.

        Raises:
            TraceError: The text is no site, or the trace has no event there.
        """
        try:
            wanted = Site.parse(site) if isinstance(site, str) else site
        except ValueError as error:
            raise TraceError(str(error)) from None
        for event in self.events(wanted.step, samples=False):
            if event.site == wanted:
                return event
        if wanted.phase == "rendering" and (place := sample_step(wanted.path)):
            rows = self.samples(wanted.step)
            for row in np.flatnonzero(rows.sample == place[0]):
                if (event := rows.event(int(row))).site == wanted:
                    return event
        raise TraceError(
            f"{self.place} has no event at {wanted}: list the sites with `tracediff show "
            f"{self.place}`"
        )

    def index(self, step: int) -> StepIndex:
        """Digests and learning curve of a step, from the index if it is there.

        Raises:
            TraceError: There is no such step.
            CorruptTraceError: The index is missing and the segment is damaged.
        """
        size = self._size(self._file(step))
        if self._mirror:
            self._mirror.fetch(index_file(self.path, self.rank, step))
        found = load_index(self.path, self.rank, step, size)
        if found is not None:
            if self._seal is not None:
                self._seal.require(index_file(self.path, self.rank, step))
            self.bytes_read += index_file(self.path, self.rank, step).stat().st_size
            return found
        rows = self._segment(step).samples()
        return step_index(step, Rows.of_events(self._columns(step)), size, (len(rows), rows.root))

    def prefix(self, step: int) -> Prefix:
        """All steps up to and including this one, in short; read from one index file as a rule.

        Raises:
            TraceError: There is no such step.
            CorruptTraceError: An index is missing and its segment is damaged.
        """
        waiting = []
        found: Prefix | None = None
        for earlier in reversed(self.steps[: self.steps.index(step) + 1]):
            if found := self._prefixes.get(earlier):
                break
            index = self.index(earlier)
            if index.prefix is not None:
                found = self._prefixes[earlier] = index.prefix
                break
            waiting.append(index)
        found = found or Prefix()
        for index in reversed(waiting):
            found = self._prefixes[index.step] = found.then(index)
        return found

    def sums(self, step: int) -> Marks | None:
        """Sums of the marks of all steps like this one until then, see `trace.sums`.

        Returns:
            float64, one per mark; None where they were not kept or do not agree with the index.
        """
        prefix = self.prefix(step)
        file = index_file(self.path, self.rank, step).with_suffix(SUMS)
        if self._mirror:
            self._mirror.fetch(file)
        found = load_sums(self.path, self.rank, step, prefix) if prefix.sums else None
        self.bytes_read += found.nbytes if found is not None else 0
        return found

    # ---- snapshots -------------------------------------------------------------------------

    @property
    def snapshots(self) -> list[int]:
        """Steps before which there is a snapshot, ascending."""
        return list(self._snapshot_files())

    def snapshot(self, step: int) -> Tree:
        """What the run was made of before a step; arrays are read-only.

        Raises:
            TraceError: There is no snapshot of this step.
            CorruptTraceError: It is damaged.
        """
        file = self._snapshot_files().get(step)
        if file is None:
            raise TraceError(f"{self.place} has no snapshot of step {step}")
        from tracediff.trace.snapshot import load_snapshot

        with self._fetched(file):
            return load_snapshot(file, step)

    def _snapshot_files(self) -> dict[int, Path]:
        from tracediff.trace.snapshot import snapshot_files, snapshots_among

        if self._mirror is not None:
            return snapshots_among(self._mirror.files(SNAPSHOTS))
        return snapshot_files(self.path)

    # ---- values ----------------------------------------------------------------------------

    def array(self, event: Event) -> NDArray[Any]:
        """The payload of an event, read-only and mapped from the file where it is one chunk.

        Its digest is checked when it is first read.

        Returns:
            An array of the event's shape and dtype; bfloat16 and float8 as ml_dtypes types.

        Raises:
            TraceError: No payload was kept, or the event is not of this trace.
            CorruptTraceError: The payload is damaged, or is not what its digest says.
        """
        if event.payload is None:
            hint = (
                "its value is in event.value"
                if event.value is not None
                else ("record the run at --level module to keep it")
            )
            raise TraceError(f"{self.place} keeps no payload of {event.site}: {hint}")
        if event.view is not None:
            return event.view.take(self.array(event.view.whole))
        array = self._segment(event.site.step).array(event)
        self.bytes_read += array.nbytes
        return array

    def read(self, event: Event) -> xr.DataArray:
        """The payload of an event with its dimensions named, for notebooks.

        Returns:
            A DataArray named after the site; raises as `array` does.
        """
        import xarray as xr

        array = self.array(event)
        attributes = {"op": event.op, "source": event.source, "kind": event.kind}
        if event.shard:
            attributes["shard"] = event.shard
        return xr.DataArray(array, dims=dims_of(event), name=str(event.site), attrs=attributes)

    def to_datatree(self) -> xr.DataTree:
        """The trace as a tree that mirrors the module tree, read when values are asked for.

        A module's node holds a variable per phase and port, such as `forward_out`, with a leading
        `step` dimension. See `tracediff.trace.datatree`.
        """
        from tracediff.trace.datatree import build_tree

        return build_tree(self)

    def summary(self) -> RenderableType:
        """An overview for `rich.print`: the run, its steps, events by stage, sizes and notes."""
        from tracediff.trace.overview import overview

        return overview(self)

    # ---- segments --------------------------------------------------------------------------

    def _file(self, step: int) -> Path:
        try:
            return self._segments[step]
        except KeyError:
            raise TraceError(
                f"{self.place} has no step {step}: it has {_ranges(self.steps)}"
            ) from None

    def _segment(self, step: int) -> SegmentReader:
        return _cached(self._open, step, lambda: self._open_segment(step))

    def _open_segment(self, step: int) -> SegmentReader:
        with self._fetched(self._file(step)) as file:
            return SegmentReader(file, step)

    @contextmanager
    def _fetched(self, file: Path) -> Iterator[Path]:
        """A file of the trace, on the local disk for the block; what is mapped stays readable."""
        if self._mirror is not None:
            self._mirror.fetch(file)
        if self._seal is not None:
            self._seal.require(file)
        yield file
        if self._mirror is not None:
            file.unlink()

    def _size(self, file: Path) -> int:
        return self._mirror.size(file) if self._mirror else size_of(file)

    def _columns(self, step: int) -> list[Event]:
        """The events of a step that stand one by one, which are all but those of a table."""
        return _cached(self._events, step, lambda: self._read_events(step))

    def _read_events(self, step: int) -> list[Event]:
        segment = self._segment(step)
        before = segment.column_bytes
        events = segment.events()
        self.bytes_read += segment.column_bytes - before
        return events


def dims_of(event: Event) -> tuple[str, ...]:
    """Names for all dimensions of an event, each one once: `dim_0` ... where it has none."""
    names = event.dims if len(event.dims) == len(event.shape) else ("",) * len(event.shape)
    unique = [
        name if name and name not in names[:axis] else f"{name or 'dim'}_{axis}"
        for axis, name in enumerate(names)
    ]
    return (
        tuple(unique)
        if len(set(unique)) == len(unique)
        else tuple(f"dim_{axis}" for axis in range(len(names)))
    )


def segment_files(path: Path, rank: int, mirror: Mirror | None = None) -> list[tuple[int, Path]]:
    """Committed segments by step; what has another name was never committed."""
    folder = path / SEGMENTS / str(rank)
    files: Iterable[Path] = folder.iterdir() if folder.is_dir() else ()
    if mirror is not None:
        files = mirror.files(SEGMENTS, str(rank))
    named = [file for file in files if file.suffix == ".zip" and _is_number(file.stem)]
    return sorted((int(file.stem), file) for file in named)


def _is_number(stem: str) -> bool:
    return stem.isascii() and stem.isdecimal() and 8 <= len(stem) <= 18


def _cached(cache: OrderedDict[int, _T], step: int, make: Callable[[], _T]) -> _T:
    """The cached value of a step, made if need be; the one used longest ago makes room."""
    if step not in cache:
        cache[step] = make()
        if len(cache) > CACHED_STEPS:
            cache.popitem(last=False)
    cache.move_to_end(step)
    return cache[step]


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]} only" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _ranges(steps: list[int]) -> str:
    if not steps:
        return "no steps"
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]} only"
