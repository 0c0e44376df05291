"""A slice of `benchmarks/fuzz.py`: traces that someone made to hurt."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.fuzz import fuzz
from tests.damage import rewrite
from tracediff.bisection import bisect
from tracediff.errors import CorruptTraceError
from tracediff.events import STAGE_RANK, Run
from tracediff.policy import Policy
from tracediff.replayers import reference_operations
from tracediff.replaying import Operation
from tracediff.tape import Tape
from tracediff.testing import build_trace
from tracediff.trace import Trace, TraceWriter, repair, verify
from tracediff.trace.archive import Archive
from tracediff.trace.archive_writer import ArchiveWriter
from tracediff.trace.columns import encode_strings
from tracediff.trace.compression import TEXTS, compress


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mutated_traces_end_in_a_verdict_or_one_sentence() -> None:
    endings, broken = fuzz(300, forked=False)
    assert not broken
    # Both kinds of answer were met: mutants that read, and mutants that do not.
    assert any(ending.startswith("diverged") for ending in endings)
    assert any(ending.startswith("CorruptTraceError") for ending in endings)


@pytest.mark.parametrize("name", ["index/0/00000000.json", "segments/0/00000000.zip"])
@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        Path.mkdir,
        lambda file: file.symlink_to("/dev/zero"),
        lambda file: file.symlink_to("nothing"),
    ],
    ids=["a pipe", "a folder", "a device", "a link to nothing"],
)
def test_what_is_no_file_is_never_opened(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    """Opening a pipe waits for a writer for ever, and a device never ends."""
    path = build_trace(tmp_path / "t", [("0/forward/fc#0:out", np.ones((2, 3)))])
    whole = Trace(path).index(0)
    (path / name).unlink()
    make(path / name)
    with Trace(path) as trace:
        if name.startswith("index"):
            assert replace(trace.index(0), prefix=None) == replace(whole, prefix=None)
        else:
            for read in (trace.events, trace.index, trace.prefix):
                with pytest.raises(CorruptTraceError, match="is damaged"):
                    read(0)
            assert not verify(path).sound


@pytest.mark.parametrize(
    "change",
    [
        {"prefix": {"values": "1", "generators": {}, "counts": {}}},
        {"prefix": {"values": 1, "generators": {"numpy": []}, "counts": {}}},
        {"prefix": {"values": 1, "generators": [], "counts": {}}},
        {"counts": {"forward": None}},
        {"counts": 7},
        {"values": 1},
        {"root": ["x"]},
        {"states": {"rng": 1}},
        {"events": 1e308},
    ],
    ids=str,
)
def test_an_index_of_another_form_is_made_again(tmp_path: Path, change: dict[str, Any]) -> None:
    values = [(f"{step}/forward/fc#0:out", np.ones(3) + step) for step in range(3)]
    path, twin = (build_trace(tmp_path / name, values) for name in "ab")
    whole = Trace(path).index(1)
    file = path / "index/0/00000001.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert replace(Trace(path).index(1), prefix=None) == replace(whole, prefix=None)
    assert bisect(path, twin).outcome == "identical"


def test_an_empty_array_of_absurd_length_takes_no_memory(tmp_path: Path) -> None:
    path = build_trace(tmp_path / "t", [("0/forward/fc#0:out", np.ones((0, 3), np.float32))])
    shape = compress(np.frombuffer(encode_strings([f"[0, {1 << 57}]"]), np.uint8), TEXTS)
    key = "tensors/forward/fc#0/out/zarr.json"
    grid = {"name": "regular", "configuration": {"chunk_shape": [1, 1]}}
    change = {"shape": [0, 1 << 57], "chunk_grid": grid}
    rewrite(path, {"events/shape/c/0": shape, key: lambda d: d | change}, step=0)
    with Trace(path) as trace:
        (event,) = trace.events()
        assert trace.array(event).shape == (0, 1 << 57)


def test_an_empty_array_of_absurd_length_is_salvaged(tmp_path: Path) -> None:
    path = build_trace(tmp_path / "t", [("0/forward/fc#0:out", np.ones((0, 1 << 57), np.uint8))])
    assert repair(path, tmp_path / "copy").whole
    with Trace(tmp_path / "copy") as trace:
        assert trace.array(trace.events(0)[0]).shape == (0, 1 << 57)


def test_operations_of_an_unknown_stage_are_judged_last() -> None:
    assert sorted(["later", "trajectory", "forward"], key=STAGE_RANK.__getitem__) == [
        "forward",
        "trajectory",
        "later",
    ]
    assert "later" not in STAGE_RANK


def test_operands_that_are_not_there_make_no_formula() -> None:
    operation = Operation(canonical="mul", inputs=(np.ones(2),), operands=(None, None), shape=(2,))
    assert reference_operations.recompute(operation) is None


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
        ("attributes", '{"args":"dim"}'),
        ("attributes", '{"operands":{}}'),
        ("attributes", '{"aliases":[[]]}'),
        ("attributes", '{"max_norm":"1"}'),
        ("attributes", '{"forward_order":[]}'),
        # Larger than every float: arithmetic would raise.
        pytest.param("value", "1" + "0" * 308, id="a huge value"),
        pytest.param("value", '{"lr":[-1' + "0" * 308 + "]}", id="a huge value inside"),
        pytest.param("attributes", '{"dim":1' + "0" * 308 + "}", id="a huge attribute"),
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


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        pytest.param(1 << 1024, hex(1 << 1024), id="alone"),
        pytest.param([1, -(1 << 5000)], [1, hex(-(1 << 5000))], id="in a list"),
        pytest.param(Path("data"), "data", id="no number"),
    ],
)
def test_what_json_cannot_hold_is_kept_as_text(tmp_path: Path, given: Any, kept: Any) -> None:
    with TraceWriter(tmp_path / "t", Run(stack="pytorch")) as writer:
        tape = Tape(writer, Policy())
        tape.emit("environment", "config.n", "out", given, kind="setting")
        tape.finish()
    with Trace(tmp_path / "t") as trace:
        assert [event.value for event in trace.events(0)] == [kept]
    assert verify(tmp_path / "t").sound
