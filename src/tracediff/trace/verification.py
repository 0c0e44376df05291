"""Checks that a trace is what its writer committed, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tracediff.errors import CorruptTraceError, TraceError
from tracediff.events import Event
from tracediff.trace.index import Prefix, StepIndex, index_file, load_index, step_index
from tracediff.trace.manifest import (
    INDEX,
    MANIFEST,
    SEGMENTS,
    SNAPSHOTS,
    committed_segments,
    is_sealed,
    read_manifest,
    size_of,
)
from tracediff.trace.reader import segment_files
from tracediff.trace.remote import local_copy
from tracediff.trace.rows import Rows
from tracediff.trace.samples import SampleRows
from tracediff.trace.seal import SEAL, Seal, load_seal
from tracediff.trace.segment import HierarchyReader, SegmentReader
from tracediff.trace.snapshot import SnapshotReader, snapshot_files
from tracediff.trace.summary import digest, digest_value


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was committed.

    Attributes:
        where: The file within the trace, and the site in it if one is known.
        what: What was found, and what was expected.
    """

    where: str
    what: str


@dataclass(slots=True)
class Verification:
    """What `verify` found.

    Attributes:
        status: Status of the run, from its manifest.
        damage: Everything that is wrong, in the order of the segments.
        unfinished: Files of steps that were never committed, as a kill leaves them; no damage.
        steps: Number of segments checked, and likewise events, bytes of segments, and snapshots.
        ranks: Number of segments by rank.
        seal: SHA-256 of the seal, if the trace has one and the run ended by itself.
    """

    status: str
    damage: list[Damage] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    steps: int = 0
    events: int = 0
    bytes: int = 0
    snapshots: int = 0
    ranks: dict[int, int] = field(default_factory=dict)
    seal: str | None = None

    @property
    def sound(self) -> bool:
        """Whether every committed step is as it was written."""
        return not self.damage

    @property
    def cut_off(self) -> bool:
        """Whether the run did not end by itself (or is still recording)."""
        return self.status == "recording"


def verify(path: str | Path, seal: str | None = None) -> Verification:
    """Checks every committed segment: its layout, all checksums, and every event's digest; every
    snapshot; and the seal of a trace that has one.

    Args:
        seal: SHA-256 of the seal as it was told when the trace was recorded, in hexadecimal.

    Raises:
        NotATraceError: The path is missing, or holds something else than a trace.
        TraceFormatError: The trace has a newer format.
        CorruptTraceError: The manifest is damaged.
    """
    with local_copy(path) as root:
        result = _verify(root)
    if seal is not None and result.seal != seal.lower():
        what = f"its SHA-256 is {result.seal}, and {seal} was asked for"
        result.damage.append(Damage(SEAL, what if result.seal else "the trace has no seal"))
    return result


def _verify(root: Path) -> Verification:
    result = Verification(read_manifest(root).status)
    for folder in sorted(root.glob(f"{SEGMENTS}/*")):
        if folder.name.isdecimal() and folder.is_dir():
            _check_rank(root, int(folder.name), folder, result)
        else:
            result.damage.append(Damage(_within(root, folder), "is no folder of a rank's segments"))
    committed = committed_segments(root)
    if committed is not None and committed != len(segment_files(root, 0)):
        found = len(segment_files(root, 0))
        what = f"{found} segments are there, and the run committed {committed}"
        result.damage.append(Damage(f"{SEGMENTS}/0", what))
    _check_snapshots(root, result)
    _check_seal(root, result)
    return result


def _check_rank(root: Path, rank: int, folder: Path, result: Verification) -> None:
    files = segment_files(root, rank)
    result.ranks[rank] = len(files)
    prefix: Prefix | None = Prefix()
    last = -1
    for step, file in files:
        where = _within(root, file)
        result.steps += 1
        result.bytes += size_of(file)
        checked = check_segment(file, step)
        result.events += checked.events
        result.damage += [Damage(f"{where} {site}".strip(), what) for site, what in checked.faults]
        # What comes after a step that cannot be read, or is gone, has a prefix nobody can tell.
        unbroken = prefix if step == last + 1 else None
        prefix = unbroken.then(checked.index) if unbroken and checked.index else None
        last = step
        if checked.index is not None:
            expected = replace(checked.index, prefix=prefix)
            result.damage += _check_index(root, rank, expected)
    known = {file for _, file in files}
    others = [file for file in sorted(folder.iterdir()) if file not in known]
    result.unfinished += [_within(root, file) for file in others]


def _check_snapshots(root: Path, result: Verification) -> None:
    known = snapshot_files(root)
    for step, file in known.items():
        where = _within(root, file)
        result.snapshots += 1
        result.damage += [Damage(where, what) for what in check_snapshot(file, step)]
    folder = root / SNAPSHOTS
    others = set(folder.iterdir()) - set(known.values()) if folder.is_dir() else ()
    result.unfinished += [_within(root, file) for file in sorted(others)]


def check_snapshot(file: Path, step: int) -> list[str]:
    """What is wrong with a snapshot: its layout, checksums, tree, and the digests of weights."""
    faults: list[str] = []
    try:
        snapshot = SnapshotReader(file)
        faults += _check_bytes(snapshot)
        tree = snapshot.tree(step)
        with snapshot.reading():
            faults += _other_weights(tree, "")
    except CorruptTraceError as error:
        faults.append(str(error.__cause__ or error))
    return faults


def _other_weights(tree: Mapping[Any, Any], place: str) -> Iterator[str]:
    """Values in a snapshot's tree that do not have the digest that stands beside them."""
    value = tree.get("value")
    if isinstance(value, np.ndarray) and tree.get("digest") not in (None, digest(value).hex()):
        yield f"{place} does not have its digest"
    for name, below in tree.items():
        if isinstance(below, Mapping):
            yield from _other_weights(below, f"{place}.{name}".removeprefix("."))


def _check_seal(root: Path, result: Verification) -> None:
    try:
        seal = load_seal(root, sealed=is_sealed(root), finished=not result.cut_off)
    except CorruptTraceError as error:
        result.damage.append(Damage(SEAL, str(error)))
        return
    if seal is None:
        return
    result.damage += [Damage(name, what) for name, what in altered(root, seal).items()]
    result.seal = seal.digest if seal.closed else None
    if result.status == "finished" and not seal.closed:
        result.damage.append(Damage(SEAL, "was never completed, and the run finished"))


def altered(root: Path, seal: Seal) -> dict[str, str]:
    """Files that are not what was sealed: name -> what is wrong."""
    folders = (root / name for name in (SEGMENTS, INDEX, SNAPSHOTS))
    there = {
        _within(root, file)
        for folder in folders
        for file in folder.rglob("*")
        if not file.name.startswith(".") and not file.is_dir()
    }
    names = sorted(there | seal.sums.keys() | ({MANIFEST} if seal.closed else set()))
    return {name: what for name in names if (what := seal.fault(root / name)) is not None}


@dataclass(frozen=True, slots=True)
class CheckedSegment:
    """One committed file, read whole.

    Attributes:
        faults: Site ("" for the file itself) and what is wrong there.
        index: What its index has to say; None where its events cannot be read.
    """

    faults: list[tuple[str, str]]
    events: int = 0
    index: StepIndex | None = None


def check_segment(file: Path, step: int) -> CheckedSegment:
    """Checks layout, checksums and every event's digest of one segment."""
    faults: list[tuple[str, str]] = []
    try:
        segment = SegmentReader(file, step)
        faults += [("", what) for what in _check_bytes(segment)]
        events = segment.events()
        rows = segment.samples()
    except CorruptTraceError as error:
        return CheckedSegment([*faults, ("", str(error.__cause__ or error))])
    faults += _faults(segment, chain(events, _rows(rows)))
    index = step_index(step, Rows.of_events(events), file.stat().st_size, (len(rows), rows.root))
    return CheckedSegment(faults, len(events) + len(rows), index)


def _check_bytes(segment: HierarchyReader) -> Iterator[str]:
    """Checksums of all entries, and that nothing else is in the file."""
    for name in segment.archive.entries:
        try:
            segment.archive.check(name)
        except ValueError as error:
            yield str(error)
    try:
        segment.archive.check_layout()
        segment.check_metadata()
    except (ValueError, KeyError) as error:
        yield str(error)


def _rows(rows: SampleRows) -> Iterator[Event | tuple[str, str]]:
    """The events of all samples, or what is wrong where one cannot be read."""
    for row in range(len(rows)):
        try:
            yield rows.event(row)
        except CorruptTraceError as error:
            yield f"row {row} of samples", str(error.__cause__ or error)


def _faults(
    segment: SegmentReader, events: Iterable[Event | tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Events that disagree with their payload, their value or each other."""
    orders: set[int] = set()
    for event in events:
        if isinstance(event, tuple):
            yield event
            continue
        try:
            found = digest_of(segment, event)
        except TraceError as error:
            yield str(event.site), str(error.__cause__ or error)
            continue
        if found != event.digest:
            yield (
                str(event.site),
                f"its digest is {found.hex()}, and {event.digest.hex() or 'none'} was recorded",
            )
        if event.order in orders:
            yield str(event.site), f"another event has its place in the order, {event.order}"
        orders.add(event.order)


def digest_of(segment: SegmentReader, event: Event) -> bytes:
    """The digest of what is kept of an event; the recorded one where nothing is kept."""
    if event.payload is not None:
        return digest(segment.payload(event))
    keeps_value = event.value is not None and event.digest
    return digest_value(event.value) if keeps_value else event.digest


def _check_index(root: Path, rank: int, expected: StepIndex) -> list[Damage]:
    """An index that is missing or stale is made again; one that lies would mislead a reader."""
    found = load_index(root, rank, expected.step, expected.segment_bytes)
    if found is not None and None in (found.prefix, expected.prefix):
        found, expected = replace(found, prefix=None), replace(expected, prefix=None)
    if found is None or repr(found) == repr(expected):  # NaN is a value like any other here
        return []
    where = _within(root, index_file(root, rank, expected.step))
    return [Damage(where, "does not agree with its segment: delete it, it is made again")]


def _within(root: Path, file: Path) -> str:
    return str(file.relative_to(root))
