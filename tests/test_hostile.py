"""A slice of `benchmarks/fuzz.py`: traces that someone made to hurt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.fuzz import fuzz
from tracediff.errors import CorruptTraceError
from tracediff.testing import build_trace
from tracediff.trace import Trace
from tracediff.trace.archive import Archive, ArchiveWriter
from tracediff.trace.columns import encode_strings


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mutated_traces_end_in_a_verdict_or_one_sentence() -> None:
    endings, broken = fuzz(400)
    assert not broken
    # Both kinds of answer were met: mutants that read, and mutants that do not.
    assert any(ending.startswith("diverged") for ending in endings)
    assert any(ending.startswith("CorruptTraceError") for ending in endings)


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("shape", '[{"a":1}]'),
        ("shape", "[2.5]"),
        ("shape", "[true]"),
        ("shape", "[-1]"),
        ("dims", "[1,2]"),
        ("inputs", '[{"a":1}]'),
        ("inputs", '{"a":1}'),
        ("attributes", "[1]"),
    ],
)
def test_fields_of_another_type_are_refused(tmp_path: Path, column: str, text: str) -> None:
    path = build_trace(tmp_path / "t", [("0/forward/fc#0:out", np.ones((2, 3)))])
    file = path / "segments/0/00000000.zip"
    archive = Archive(file)
    entries = {name: archive.read(name) for name in archive.entries}
    entries[f"events/{column}/c/0"] = encode_strings([text])
    file.unlink()
    writer = ArchiveWriter(file)
    for name, data in entries.items():
        writer.add(name, data)
    writer.close()
    with pytest.raises(CorruptTraceError, match="is damaged"), Trace(path) as trace:
        trace.events(0)
