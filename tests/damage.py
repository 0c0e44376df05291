"""A small trace, and ways to damage it; shared by the tests."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np

from tracediff.testing import build_trace
from tracediff.trace.archive import Archive
from tracediff.trace.archive_writer import ArchiveWriter


def three_steps(path: Path) -> Path:
    values: list[tuple[str, object]] = []
    for step in range(3):
        values += [(f"{step}/rendering/prompt.text", f"dose {step}")]
        values += [(f"{step}/forward/m{i}#0:out", np.arange(40.0) + i + step) for i in range(3)]
        values += [(f"{step}/trajectory/loss#0:out", float(step))]
    return build_trace(path, values)


def segment(path: Path, step: int = 1) -> Path:
    return path / f"segments/0/{step:08d}.zip"


def flip(file: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1 << bit
    file.write_bytes(data)


def offset_of(file: Path, entry: str) -> int:
    with zipfile.ZipFile(file) as zipped, zipped.open(entry) as opened:
        return opened._orig_compress_start  # type: ignore[attr-defined]


def rewrite(path: Path, changes: dict[str, object], step: int = 1) -> None:
    """Writes a segment anew with other entries, all checksums right."""
    source = Archive(segment(path, step))
    entries = {name: source.read(name) for name in source.entries}
    for name, change in changes.items():
        if callable(change):
            entries[name] = json.dumps(change(json.loads(entries[name]))).encode()
        elif change is None:
            del entries[name]
        else:
            entries[name] = change  # type: ignore[assignment]
    writer = ArchiveWriter(segment(path, step))
    for name, data in entries.items():
        writer.add(name, data)
    writer.close()
