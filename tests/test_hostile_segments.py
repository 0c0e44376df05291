"""Segments whose checksums are right and whose contents are not are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.damage import rewrite, three_steps
from tracediff.errors import CorruptTraceError, TraceError
from tracediff.testing import build_trace
from tracediff.trace import Trace, repair, verify
from tracediff.trace.compression import TEXTS, compress


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return three_steps(tmp_path / "t.zarr")


PAYLOAD = "tensors/forward/m0#0/out"


@pytest.mark.parametrize(
    "changes",
    [
        {"zarr.json": b"{"},
        {"zarr.json": b"[]"},
        {"zarr.json": None},
        {"zarr.json": lambda d: {**d, "attributes": {"tracediff": {"events": 10**12}}}},
        {"events/path/c/0": None},
        {"events/path/c/0": b"\xff\xff\xff\xff"},
        {"events/path/c/0": b"\5\0\0\0" + b"\xff\xff\xff\x7f" * 9},
        {"events/path/c/0": b"\5\0\0\0" + b"\1\0\0\0\xff" * 5},
        {"events/shape/c/0": b"\5\0\0\0" + b"\1\0\0\0{" * 5},
        {"events/shape/c/0": b"\5\0\0\0" + b"\2\0\0\0{}" * 5},
        {"events/order/zarr.json": lambda d: {**d, "shape": [4]}},
        {"events/order/zarr.json": lambda d: {**d, "shape": [1 << 62]}},
        {"events/order/zarr.json": lambda d: {**d, "shape": [-5]}},
        {"events/order/zarr.json": lambda d: {**d, "data_type": "float64"}},
        {"events/order/zarr.json": lambda d: {**d, "data_type": ["x"]}},
        {"events/order/zarr.json": lambda d: {**d, "codecs": [{"name": "pickle"}]}},
        {"events/order/zarr.json": lambda d: {**d, "chunk_grid": 1}},
        {"events/sketch/zarr.json": lambda d: {**d, "shape": [10**9, 256]}},
        {"events/sketch_index/zarr.json": lambda d: {**d, "shape": [3], "chunk_grid": {}}},
    ],
    ids="+".join,
)
def test_hostile_columns_are_refused(path: Path, changes: dict[str, object]) -> None:
    rewrite(path, changes)
    with pytest.raises(CorruptTraceError, match=r"00000001\.zip"):
        Trace(path).events(1)
    found = verify(path)
    assert not found.sound
    assert found.damage[0].where == "segments/0/00000001.zip"


@pytest.mark.parametrize(
    "change",
    [
        {"events/shard/c/0": None},
        {"events/shard/c/0": b"\2\0\0\0" + b"\xff\xff\xff\x7f" * 9},
        {"events/shard/zarr.json": lambda d: {**d, "shape": [2]}},
        {"events/shard/zarr.json": lambda d: {**d, "data_type": "float64"}},
    ],
    ids=["missing", "lengths", "shape", "type"],
)
def test_a_hostile_column_of_shards_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    value = (np.ones(3), {"shard": "0=2@0|S(0)|6|0"})
    path = build_trace(tmp_path / "t", [("0/loading/w:param", value)])
    rewrite(path, change, step=0)
    with pytest.raises(CorruptTraceError, match=r"00000000\.zip"):
        Trace(path).events(0)
    assert not verify(path).sound


def chunked(document: dict[str, object], shape: list[int], chunk: list[int]) -> dict[str, object]:
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    return {**document, "shape": shape, "chunk_grid": grid}


@pytest.mark.parametrize(
    "changes",
    [
        {f"{PAYLOAD}/c/0": None},
        {f"{PAYLOAD}/c/0": b""},
        {f"{PAYLOAD}/c/0": bytes(319)},
        {f"{PAYLOAD}/zarr.json": None},
        {f"{PAYLOAD}/zarr.json": b"{}"},
        {f"{PAYLOAD}/zarr.json": lambda d: {**d, "data_type": "int64"}},
        {f"{PAYLOAD}/zarr.json": lambda d: {**d, "data_type": {"name": "float64"}}},
        {f"{PAYLOAD}/zarr.json": lambda d: chunked(d, [40], [1])},
        {f"{PAYLOAD}/zarr.json": lambda d: chunked(d, [40], [0])},
        {f"{PAYLOAD}/zarr.json": lambda d: chunked(d, [40], [10**15])},
        {f"{PAYLOAD}/zarr.json": lambda d: chunked(d, [10**15], [40])},
        {f"{PAYLOAD}/zarr.json": lambda d: chunked(d, [0] * 100, [1] * 100)},
        {f"{PAYLOAD}/zarr.json": lambda d: chunked(d, [40, 1], [40])},
    ],
    ids="+".join,
)
def test_hostile_payloads_are_refused(path: Path, changes: dict[str, object]) -> None:
    rewrite(path, changes)
    trace = Trace(path)
    event = trace.find("1/forward/m0#0:out")
    with pytest.raises(TraceError, match=r"00000001\.zip"):
        trace.array(event)
    assert not verify(path).sound


def test_repair_leaves_out_a_payload_whose_type_is_none(path: Path, tmp_path: Path) -> None:
    rewrite(
        path,
        {
            "events/order/zarr.json": None,
            f"{PAYLOAD}/zarr.json": lambda d: {**d, "data_type": {"name": "float64"}},
        },
    )
    repair(path, tmp_path / "new.zarr")
    with Trace(tmp_path / "new.zarr") as repaired:
        sites = [str(event.site) for event in repaired.events(1)]
    assert sites
    assert "1/forward/m0#0:out" not in sites


def test_a_huge_shape_that_the_columns_claim_too_is_refused(path: Path) -> None:
    size = 10**11
    shapes = ["", f"[{size}]", "[40]", "[40]", ""]
    column = b"\5\0\0\0" + b"".join(
        len(text).to_bytes(4, "little") + text.encode() for text in shapes
    )
    rewrite(
        path,
        {
            "events/shape/c/0": compress(np.frombuffer(column, np.uint8), TEXTS),
            f"{PAYLOAD}/zarr.json": lambda d: chunked(d, [size], [1]),
        },
    )
    trace = Trace(path)
    with pytest.raises(CorruptTraceError, match="does not fit"):
        trace.array(trace.find("1/forward/m0#0:out"))


def test_a_payload_reference_cannot_leave_the_segment(path: Path) -> None:
    escape = "../../../../../etc/passwd"
    texts = ["", escape, "x", "zarr.json", ""]
    column = b"\5\0\0\0" + b"".join(
        len(text).to_bytes(4, "little") + text.encode() for text in texts
    )
    packed = compress(np.frombuffer(column, np.uint8), TEXTS)
    rewrite(path, {"events/payload/c/0": packed})
    trace = Trace(path)
    for event in trace.events(1)[1:4]:
        with pytest.raises(TraceError, match="holds no payload"):
            trace.array(event)
    assert len(verify(path).damage) == 3
