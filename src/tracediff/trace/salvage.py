"""Salvages what can be read of a damaged or cut-off trace into a new one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from tracediff.errors import CorruptTraceError, NotATraceError, TraceError
from tracediff.events import Event, Run, Site
from tracediff.trace.archive import Archive
from tracediff.trace.manifest import MANIFEST, SEGMENTS, SNAPSHOTS, is_sealed, read_manifest
from tracediff.trace.names import payload_site
from tracediff.trace.reader import segment_files
from tracediff.trace.remote import local_copy
from tracediff.trace.seal import SEAL, load_seal
from tracediff.trace.segment import HierarchyReader, SegmentReader
from tracediff.trace.snapshot import snapshot_files
from tracediff.trace.summary import digest, fingerprint
from tracediff.trace.verification import altered, check_segment, check_snapshot, digest_of
from tracediff.trace.writer import TraceWriter

_KINDS: Final = {"rng": "state", "rendering": "ids"}


@dataclass(slots=True)
class Repair:
    """What `repair` did.

    Attributes:
        copied: Segments that were sound.
        rebuilt: Committed segments of which a part was lost: file -> what.
        salvaged: Steps that were never committed: file -> how many values were found. They have
            no data flow, source lines or texts, which are written when a step is committed.
        lost: Files of which nothing could be read: file -> why. Of a snapshot all is lost if
            anything is.
        altered: Of a trace that was sealed, files that are not what was sealed.
        snapshots: How many were sound, and copied.
    """

    copied: int = 0
    rebuilt: dict[str, list[str]] = field(default_factory=dict)
    salvaged: dict[str, int] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    altered: list[str] = field(default_factory=list)
    snapshots: int = 0

    @property
    def whole(self) -> bool:
        """Whether the new trace has all that was ever committed."""
        return not self.rebuilt and not self.lost and not self.altered


def repair(path: str | Path, output: str | Path, *, stack: str | None = None) -> Repair:
    """Writes a new trace of all that can be read of another, which is left as it is.

    Every value of the new trace matches its digest. Where a committed value does not, its event
    keeps the digest and loses the value. The new trace has no seal.

    Args:
        stack: The stack of the run, for a trace whose manifest is lost.

    Raises:
        NotATraceError: There are no segments, or the manifest is lost and no stack is given.
        TraceExistsError: `output` holds something.
        TraceError: `output` cannot be written.
    """
    with local_copy(path) as root:
        return _repair(root, output, _manifest(root, stack))


def _repair(root: Path, output: str | Path, run: Run) -> Repair:
    result = Repair()
    packed = bool(run.settings.get("compress"))
    with TraceWriter(output, run, compress=packed) as first:
        for folder in sorted(root.glob(f"{SEGMENTS}/*"), key=lambda folder: folder.name):
            if not folder.name.isdecimal():
                continue
            rank = int(folder.name)
            writer = first if rank == 0 else TraceWriter(output, run, rank=rank, compress=packed)
            _repair_rank(root, folder, writer, result)
            if rank:
                writer.finish()
        _repair_snapshots(root, first, result)
        _check_seal(root, result)
        if result.rebuilt or result.salvaged or result.lost or result.altered:
            first.add_note(f"repaired: {_summary(result)}")
        status = "failed" if run.status == "recording" else run.status
        first.finish(status, run.error or ("the run was cut off" if status == "failed" else None))
    return result


def _repair_snapshots(root: Path, writer: TraceWriter, result: Repair) -> None:
    for step, file in snapshot_files(root).items():
        faults = check_snapshot(file, step)
        if faults:
            result.lost[str(file.relative_to(root))] = faults[0]
        else:
            writer.adopt_snapshot(step, file)
            result.snapshots += 1


def _check_seal(root: Path, result: Repair) -> None:
    try:
        finished = read_manifest(root).status != "recording"
        seal = load_seal(root, sealed=is_sealed(root), finished=finished)
        result.altered += altered(root, seal) if seal is not None else ()
    except (NotATraceError, CorruptTraceError):
        result.altered.append(SEAL)


def _manifest(root: Path, stack: str | None) -> Run:
    try:
        return read_manifest(root)
    except (NotATraceError, CorruptTraceError):
        if not (root / SEGMENTS).is_dir():
            raise
        if stack is None:
            raise NotATraceError(
                f"{root / MANIFEST} is lost or damaged: give --stack, such as pytorch, to repair "
                "the trace without it"
            ) from None
        return Run(stack=stack)


def _repair_rank(root: Path, folder: Path, writer: TraceWriter, result: Repair) -> None:
    committed = dict(segment_files(root, int(folder.name)))
    torn = {
        int(name): file
        for file in folder.glob(".*.zip.tmp")
        if (name := file.name[1:].removesuffix(".zip.tmp")).isdecimal()
    }
    for step in sorted(committed.keys() | torn.keys()):
        file = committed.get(step) or torn[step]
        name = str(file.relative_to(root))
        checked = check_segment(file, step) if step in committed else None
        if checked is not None and checked.index is not None and not checked.faults:
            writer.adopt_step(step, file, checked.index)
            result.copied += 1
        elif checked is not None and checked.index is not None:
            result.rebuilt[name] = _rebuild(SegmentReader(file, step), writer)
        elif found := _salvage(file, step, writer):
            if checked is None:
                result.salvaged[name] = found
            else:
                why = checked.faults[-1][1]
                result.rebuilt[name] = [f"{why}; values found without their events: {found}"]
        else:
            result.lost[name] = checked.faults[-1][1] if checked else "it holds no whole value"


def _rebuild(segment: SegmentReader, writer: TraceWriter) -> list[str]:
    """Writes a step again without what does not match its digest; returns what that is."""
    lost: list[str] = []
    for event in _events(segment, lost):
        try:
            payload = segment.array(event) if event.payload is not None else None
            sound = digest_of(segment, event) == event.digest
        except TraceError:
            payload, sound = None, False
        if not sound:
            lost.append(f"value of {event.site}")
            payload = None
            event = replace(event, value=None)
        writer.add(replace(event, payload=None), payload)
    writer.commit_step()
    return lost or ["its layout or an entry that no event refers to"]


def _events(segment: SegmentReader, lost: list[str]) -> Iterator[Event]:
    """All events that can be read, by order; an order that comes twice is kept once."""
    rows = segment.samples()
    rendered = []
    for row in range(len(rows)):
        try:
            rendered.append(rows.event(row))
        except CorruptTraceError:
            lost.append(f"row {row} of samples")
    seen: set[int] = set()
    for event in sorted([*segment.events(), *rendered], key=lambda event: event.order):
        if event.order in seen:
            lost.append(f"{event.site}, whose order is taken")
        else:
            seen.add(event.order)
            yield event


def _salvage(file: Path, step: int, writer: TraceWriter) -> int:
    """Writes a step of the arrays found in a file without a directory; returns their number."""
    try:
        arrays = list(_Torn(file).arrays(step))
    except (CorruptTraceError, OSError, ValueError):
        return 0
    for order, (site, array) in enumerate(arrays):
        event = Event(
            site=site,
            order=order,
            kind=_KINDS.get(site.phase, "tensor"),
            dtype=array.dtype.name,
            shape=array.shape,
            digest=digest(array),
            fingerprint=fingerprint(array),
        )
        writer.add(event, array)
    writer.commit_step()
    return len(arrays)


class _Torn(HierarchyReader):
    """A file that was never committed, or has lost its directory."""

    def _opened(self, file: Path) -> Archive:
        return Archive.salvaged(file)

    def arrays(self, step: int) -> Iterator[tuple[Site, NDArray[Any]]]:
        """Payloads whose metadata and bytes are whole, in the order of writing."""
        for name in self.archive.entries:
            key = name.removesuffix(f"/{MANIFEST}")
            site = payload_site(key, step) if key != name else None
            if site is None or key.startswith("events/"):
                continue
            try:
                yield site, self._payload(key, self._info(key), checked=True)
            except (ValueError, KeyError):
                continue


def _summary(result: Repair) -> str:
    parts = (
        (len(result.rebuilt), "rebuilt in part"),
        (len(result.salvaged), "salvaged before its commit"),
        (len([name for name in result.lost if name.startswith(SEGMENTS)]), "lost"),
    )
    told = [f"{number} steps {what}" for number, what in parts if number]
    snapshots = len([name for name in result.lost if name.startswith(SNAPSHOTS)])
    told += [f"{snapshots} snapshots lost"] if snapshots else []
    told += [f"{len(result.altered)} files altered since the seal"] if result.altered else []
    return ", ".join(told)
