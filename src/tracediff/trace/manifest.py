"""The root of a trace: its `zarr.json` with the run manifest, and the lock of a writer."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from tracediff.errors import CorruptTraceError, NotATraceError, TraceExistsError, TraceFormatError
from tracediff.events import Run
from tracediff.trace.documents import load_json
from tracediff.trace.metadata import group_json
from tracediff.trace.summary import plain

FORMAT: Final = 1
MANIFEST: Final = "zarr.json"
SEGMENTS: Final = "segments"
INDEX: Final = "index"
SNAPSHOTS: Final = "snapshots"

_TUPLES: Final = frozenset({"argv", "notes"})
_MAPPINGS: Final = frozenset({"versions", "settings"})


def read_manifest(path: Path) -> Run:
    """Reads the run manifest of the trace at `path`.

    Raises:
        NotATraceError: There is nothing, or something else than a trace.
        TraceFormatError: The trace has a newer format.
        CorruptTraceError: The manifest lacks what it must hold.
    """
    if not path.exists():
        raise NotATraceError(f"{path} does not exist: give the path of a recorded trace")
    attributes = _attributes(path)
    found = attributes.get("format")
    if type(found) is not int or found < 1:
        raise CorruptTraceError(f"{path / MANIFEST} has format {found!r}, expected {FORMAT}")
    if found > FORMAT:
        raise TraceFormatError(
            f"{path} has trace format {found}, and this release reads up to format {FORMAT}: "
            "upgrade tracediff-ml"
        )
    run = attributes.get("run")
    if not isinstance(run, dict) or not isinstance(run.get("stack"), str):
        raise CorruptTraceError(f"{path / MANIFEST} holds no run manifest: record the run again")
    return _run(path, run)


def committed_segments(path: Path) -> int | None:
    """How many segments the run committed, as its manifest says; None if it was cut off."""
    found = _attributes(path).get("segments")
    return found if type(found) is int else None


def is_sealed(path: Path) -> bool:
    """Whether the run was recorded with a seal, as its manifest says."""
    return _attributes(path).get("sealed") is True


def is_trace(path: Path) -> bool:
    """Whether a folder holds a trace of any format version, damaged or not."""
    try:
        _attributes(path)
    except (NotATraceError, CorruptTraceError):
        return False
    return True


def _attributes(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not path.is_dir() or not file.is_file():
        raise NotATraceError(
            f"{path} is no trace (it has no {MANIFEST}): give the folder that tracediff recorded"
        )
    try:
        document = load_json(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptTraceError(f"{file} is damaged ({error}): record the run again") from None
    attributes = document.get("attributes") if isinstance(document, dict) else None
    found = attributes.get("tracediff") if isinstance(attributes, dict) else None
    if not isinstance(found, dict):
        raise NotATraceError(f"{path} is a Zarr group, but no trace that tracediff recorded")
    return found


def _run(path: Path, found: Mapping[str, Any]) -> Run:
    """A Run of the fields that this release knows; newer ones are ignored."""
    known: dict[str, Any] = {}
    for name in (field.name for field in fields(Run) if field.name in found):
        value = found[name]
        if name in _TUPLES:
            valid = isinstance(value, list) and all(isinstance(item, str) for item in value)
            value = tuple(value) if valid else value
        elif name in _MAPPINGS:
            valid = isinstance(value, dict)
        else:
            valid = isinstance(value, str) or (name == "error" and value is None)
        if not valid:
            raise CorruptTraceError(f"{path / MANIFEST}: {name} is {value!r:.60}")
        known[name] = value
    return Run(**known)


def write_manifest(
    path: Path, run: Run, segments: int | None = None, *, sealed: bool = False
) -> None:
    """Replaces the manifest atomically: a reader sees the old one or the new one.

    Args:
        segments: How many segments were committed, known once the run has ended.
        sealed: Whether the trace has a seal, or will have one.
    """
    manifest = {field.name: getattr(run, field.name) for field in fields(run)}
    # The manifest is read by other programs, and NaN is no JSON: it becomes a string here.
    strict = json.loads(json.dumps(plain(manifest)), parse_constant=str)
    attributes: dict[str, Any] = {"format": FORMAT, "run": strict}
    if segments is not None:
        attributes["segments"] = segments
    if sealed:
        attributes["sealed"] = True
    write_atomically(path / MANIFEST, group_json({"tracediff": attributes}).encode("ascii"))


def write_atomically(file: Path, data: bytes) -> None:
    """Writes a file under a temporary name, waits for the disk, and renames it."""
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)
    sync_folder(file.parent)


def size_of(file: Path) -> int:
    """Bytes of a file that a folder lists; 0 where there is none, as behind a link to nothing."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def sync_folder(folder: Path) -> None:
    """Waits until renames within a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether there is a trace that a process is recording into now."""
    if not is_trace(path):
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False  # it is being replaced
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


_TRIES: Final = 5
_PAUSE: Final = 0.01
"""Seconds."""


class Lock:
    """An advisory lock on a folder, which the system releases if the process dies."""

    def __init__(self, folder: Path) -> None:
        """Takes the lock.

        Raises:
            TraceExistsError: Another writer holds it.
        """
        self._fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        for tries_left in reversed(range(_TRIES)):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if tries_left:  # it may only be looked at, see `is_locked`
                    time.sleep(_PAUSE)
        os.close(self._fd)
        raise TraceExistsError(
            f"another process is recording into {folder}: wait for it, or choose another path"
        )

    def release(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)
