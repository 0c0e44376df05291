"""Gives a new trace its place on the local disk: empty, another trace's, or that of rank 0."""

from __future__ import annotations

import errno
import secrets
import shutil
from pathlib import Path
from typing import Final

from tracediff.errors import NotATraceError, TraceExistsError
from tracediff.events import Run
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
from tracediff.trace.seal import is_seal

_OURS: Final = frozenset({MANIFEST, f".{MANIFEST}.tmp", SEGMENTS, INDEX, SNAPSHOTS})


def create(path: Path, place: str, run: Run, *, overwrite: bool, seal: bool) -> Lock:
    """Creates a trace under a temporary name, then renames it into place.

    Args:
        path: As given, possibly through links.
        place: The trace as errors name it.
        run: What its manifest says.
        overwrite: Whether it may replace another trace.
        seal: Whether it is to be sealed.

    Raises:
        TraceExistsError: There is something that it may not replace.
        OSError: The file system refuses.
    """
    root = path.resolve()
    occupied = root.exists() and (not root.is_dir() or any(root.iterdir()))
    old = _replaceable(path, place, overwrite) if occupied else None
    new = root.with_name(f".{root.name}.{secrets.token_hex(4)}.new")
    lock = None
    try:
        (new / SEGMENTS / "0").mkdir(parents=True)
        lock = Lock(new)
        write_manifest(new, run, sealed=seal)
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


def join(path: Path, folder: Path, rank: int) -> Lock:
    """Joins the trace that rank 0 created.

    Args:
        folder: Where the segments of this rank go.

    Raises:
        NotATraceError: There is none.
        TraceExistsError: It holds segments of this rank already.
        OSError: The file system refuses.
    """
    if not is_trace(path.resolve()):
        raise NotATraceError(f"{path} is no trace that rank {rank} could join: start rank 0 first")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise TraceExistsError(f"{path} already holds segments of rank {rank}")
    return Lock(folder)


def _replaceable(path: Path, place: str, overwrite: bool) -> Lock:
    """Locks the trace that is there, if it may be replaced."""
    root = path.resolve()
    if not overwrite:
        raise TraceExistsError(
            f"{place} already holds something: choose another path, or overwrite it with "
            "--overwrite if it is a trace"
        )
    if not is_trace(root):
        raise TraceExistsError(f"{path} is no trace, so it is not overwritten: choose another path")
    names = sorted(item.name for item in root.iterdir())
    foreign = [name for name in names if name not in _OURS and not is_seal(name)]
    if foreign:
        raise TraceExistsError(
            f"{path} holds {foreign[0]!r}, which is no part of a trace, so it is not "
            "overwritten: move that elsewhere"
        )
    return Lock(root)


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
