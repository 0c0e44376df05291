"""Damage is found and named, and a killed run leaves nothing damaged."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tracediff.bisection import bisect
from tracediff.errors import (
    CorruptTraceError,
    NotATraceError,
    TraceError,
    TraceFormatError,
)
from tracediff.testing import build_trace
from tracediff.trace import Trace, verify
from tracediff.trace.archive import Archive, ArchiveWriter
from tracediff.trace.compression import TEXTS, compress

KILLED_SCRIPT = """
import sys
import numpy as np
from tracediff.events import Run
from tracediff.testing import build_event
from tracediff.trace import TraceWriter

writer = TraceWriter(sys.argv[1], Run(stack="pytorch"))
for step in range(10**6):
    for order in range(20):
        array = np.full((50, order + 1), step, np.float32)
        writer.add(build_event(f"{step}/forward/m{order}#0:out", array, order), array)
    writer.commit_step()
    print(step, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    values: list[tuple[str, object]] = []
    for step in range(3):
        values += [(f"{step}/rendering/prompt.text", f"dose {step}")]
        values += [(f"{step}/forward/m{i}#0:out", np.arange(40.0) + i + step) for i in range(3)]
        values += [(f"{step}/trajectory/loss#0:out", float(step))]
    return build_trace(tmp_path / "t.zarr", values)


def segment(path: Path, step: int = 1) -> Path:
    return path / f"segments/0/{step:08d}.zip"


def flip(file: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1 << bit
    file.write_bytes(data)


def offset_of(file: Path, entry: str) -> int:
    with zipfile.ZipFile(file) as zipped, zipped.open(entry) as opened:
        return opened._orig_compress_start  # type: ignore[attr-defined]


# ---- sound traces ----------------------------------------------------------------------------


def test_a_sound_trace_is_sound(path: Path) -> None:
    found = verify(path)
    assert found.sound
    assert not found.cut_off
    assert (found.steps, found.events, found.unfinished) == (3, 15, [])
    assert (
        found.bytes
        == Trace(path).bytes_stored
        == sum(file.stat().st_size for file in path.glob("segments/0/*"))
    )


def test_killed_runs_leave_only_valid_segments(tmp_path: Path) -> None:
    for attempt in range(3):
        path = tmp_path / f"{attempt}.zarr"
        command = [sys.executable, "-c", KILLED_SCRIPT, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) == 2 + attempt:
                    break
            time.sleep(random.Random(attempt).random() * 0.02)
            os.kill(process.pid, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        found = verify(path)
        assert found.sound
        assert found.cut_off
        assert found.steps >= 3 + attempt
        trace = Trace(path)
        assert not trace.is_complete
        assert trace.steps == list(range(found.steps))
        for event in trace.events(trace.steps[-1]):
            assert (trace.array(event) == trace.steps[-1]).all()


def test_a_step_that_was_never_committed_is_named(path: Path) -> None:
    (path / "segments/0/.00000003.zip.tmp").write_bytes(b"PK\3\4torn")
    found = verify(path)
    assert found.sound
    assert found.unfinished == ["segments/0/.00000003.zip.tmp"]
    assert Trace(path).steps == [0, 1, 2]


# ---- damage ----------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_found_and_its_segment_named(path: Path) -> None:
    file = segment(path)
    original = file.read_bytes()
    generator = random.Random(0)
    places = [generator.randrange(len(original)) for _ in range(150)]
    places += range(len(original) - 200, len(original), 3)  # directory and end
    for place in places:
        flip(file, place, generator.randrange(8))
        found = verify(path)
        assert not found.sound, f"byte {place} of {len(original)}"
        assert {damage.where.split(" ")[0] for damage in found.damage} == {
            "segments/0/00000001.zip"
        }
        file.write_bytes(original)
    assert verify(path).sound


def test_a_flipped_payload_names_the_site(path: Path) -> None:
    file = segment(path)
    flip(file, offset_of(file, "tensors/forward/m2#0/out/c/0") + 17)
    found = verify(path)
    assert [damage.where for damage in found.damage] == [
        "segments/0/00000001.zip",
        "segments/0/00000001.zip 1/forward/m2#0:out",
    ]
    assert "tensors/forward/m2#0/out/c/0" in found.damage[0].what
    assert "digest" in found.damage[1].what
    assert found.steps == 3


def test_a_flipped_payload_is_never_compared(path: Path, tmp_path: Path) -> None:
    """A fault of the disk is no divergence of the models."""
    whole = shutil.copytree(path, tmp_path / "whole.zarr")
    flip(segment(path), offset_of(segment(path), "tensors/forward/m2#0/out/c/0") + 17)
    trace = Trace(path)
    for name in ("m0", "m1"):
        trace.array(trace.find(f"1/forward/{name}#0:out"))
    with pytest.raises(CorruptTraceError, match=r"payload of 1/forward/m2#0:out .* its digest"):
        trace.array(trace.find("1/forward/m2#0:out"))
    other = build_trace(tmp_path / "other.zarr", [("1/forward/m2#0:out", np.ones(40))])
    for pair in ((path, other), (other, path)):
        with pytest.raises(CorruptTraceError, match=r"00000001\.zip is damaged"):
            bisect(*pair)
    assert bisect(whole, other).outcome == "diverged"


def test_a_payload_exchanged_with_right_checksums_is_found(path: Path) -> None:
    """A payload that another program replaced, checksum and all, is caught by its digest."""
    source = Archive(segment(path))
    exchanged = path / "exchanged"
    writer = ArchiveWriter(exchanged)
    for name in sorted(source.entries, key=lambda name: source.entries[name].offset):
        data = source.read(name)
        if name == "tensors/forward/m0#0/out/c/0":
            data = np.zeros(40).tobytes()
        writer.add(name, data)
    writer.close()
    exchanged.rename(segment(path))
    found = verify(path)
    assert [d.where for d in found.damage] == ["segments/0/00000001.zip 1/forward/m0#0:out"]


def test_damaged_columns_are_refused_by_the_reader(path: Path) -> None:
    file = segment(path)
    flip(file, offset_of(file, "events/path/c/0") + 9)
    trace = Trace(path)
    assert len(trace.events(0)) == 5
    with pytest.raises(CorruptTraceError, match=r"00000001\.zip.*events/path"):
        trace.events(1)


@pytest.mark.parametrize("keep", [0, 1, 10, 500, -1, -22, -300])
def test_a_truncated_segment_is_found_and_refused(path: Path, keep: int) -> None:
    file = segment(path)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptTraceError, match=r"00000001\.zip"):
        Trace(path).events(1)
    found = verify(path)
    assert [damage.where for damage in found.damage] == ["segments/0/00000001.zip"]


def test_a_segment_of_another_step_is_refused(path: Path) -> None:
    segment(path, 1).write_bytes(segment(path, 2).read_bytes())
    with pytest.raises(CorruptTraceError, match=r"holds step 2.*expected step 1"):
        Trace(path).events(1)
    assert not verify(path).sound


def test_a_missing_segment_of_a_finished_run_is_found(path: Path) -> None:
    segment(path, 1).unlink()
    (damage,) = verify(path).damage
    assert "2 segments are there, and the run committed 3" in damage.what


def test_appended_bytes_are_found(path: Path) -> None:
    with segment(path).open("ab") as file:
        file.write(b"\0")
    assert not verify(path).sound


def test_an_index_that_lies_is_found_and_a_missing_one_made_again(path: Path) -> None:
    file = path / "index/0/00000001.json"
    honest = replace(Trace(path).index(1), prefix=None)
    document = json.loads(file.read_text())
    document["root"] = "0" * 32
    file.write_text(json.dumps(document))
    (damage,) = verify(path).damage
    assert damage.where == "index/0/00000001.json"
    for content in ("", "[]", "{", '{"step": 1}'):
        file.write_text(content)
        assert replace(Trace(path).index(1), prefix=None) == honest
    file.unlink()
    assert replace(Trace(path).index(1), prefix=None) == honest
    assert verify(path).sound


# ---- what is no trace ------------------------------------------------------------------------


def edit(path: Path, change: object) -> None:
    document = json.loads((path / "zarr.json").read_text())
    document["attributes"]["tracediff"].update(change)
    (path / "zarr.json").write_text(json.dumps(document))


@pytest.mark.parametrize("opens", [Trace, verify])
class TestNoTrace:
    def test_missing(self, tmp_path: Path, opens: type) -> None:
        with pytest.raises(NotATraceError, match="does not exist"):
            opens(tmp_path / "nothing")

    def test_file(self, tmp_path: Path, opens: type) -> None:
        (tmp_path / "x").write_text("x")
        with pytest.raises(NotATraceError, match="is no trace"):
            opens(tmp_path / "x")

    def test_other_folder(self, tmp_path: Path, opens: type) -> None:
        with pytest.raises(NotATraceError, match=r"no zarr\.json"):
            opens(tmp_path)

    @pytest.mark.parametrize("attributes", [{}, {"other": 1}, None, {"tracediff": 1}])
    def test_other_zarr_group(self, tmp_path: Path, opens: type, attributes: object) -> None:
        document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        (tmp_path / "zarr.json").write_text(json.dumps(document))
        with pytest.raises(NotATraceError, match="no trace"):
            opens(tmp_path)

    def test_newer_format(self, path: Path, opens: type) -> None:
        edit(path, {"format": 2, "run": {"unknown": 1}})
        with pytest.raises(TraceFormatError, match=r"format 2.*reads up to format 1.*upgrade"):
            opens(path)

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'"text"', b"null"]
    )
    def test_damaged_manifest(self, path: Path, opens: type, content: bytes) -> None:
        (path / "zarr.json").write_bytes(content)
        with pytest.raises(TraceError, match=r"zarr\.json|no trace"):
            opens(path)

    @pytest.mark.parametrize(
        "change",
        [
            {"format": "1"},
            {"format": 0},
            {"format": True},
            {"run": None},
            {"run": {}},
            {"run": {"stack": "x", "notes": 3}},
            {"run": {"stack": "x", "notes": [1]}},
            {"run": {"stack": "x", "status": None}},
            {"run": {"stack": "x", "versions": []}},
        ],
    )
    def test_impossible_manifest(self, path: Path, opens: type, change: object) -> None:
        edit(path, change)
        with pytest.raises(CorruptTraceError, match=r"zarr\.json"):
            opens(path)


def test_fields_of_a_later_minor_version_are_ignored(path: Path) -> None:
    edit(path, {"extra": 1, "run": {"stack": "jax", "status": "finished", "later": [1]}})
    assert Trace(path).run.stack == "jax"


# ---- hostile segments ------------------------------------------------------------------------


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


# ---- the archive -----------------------------------------------------------------------------


def test_more_entries_than_zip_can_count_use_zip64(tmp_path: Path) -> None:
    file = tmp_path / "many.zip"
    writer = ArchiveWriter(file)
    for i in range(66_000):
        writer.add(f"n/{i:05d}", b"")
    writer.close()
    assert len(Archive(file).entries) == 66_000
    Archive(file).check_layout()
    with zipfile.ZipFile(file) as zipped:
        assert len(zipped.namelist()) == 66_000


def test_offsets_beyond_four_gigabytes_use_zip64(tmp_path: Path) -> None:
    """A hole in the file stands for the first 5 GiB, so that nothing large is written."""
    file = tmp_path / "wide.zip"
    writer = ArchiveWriter(file)
    writer.add("near", b"first")
    writer._flush()
    writer.size = writer._written = os.lseek(writer._fd, 5 << 30, os.SEEK_SET)
    writer.add("far", b"second" * 100)
    writer.close()
    found = Archive(file)
    assert found.entries["far"].offset == 5 << 30
    assert (found.read("near"), found.read("far")) == (b"first", b"second" * 100)
    with zipfile.ZipFile(file) as zipped:
        assert zipped.read("far") == b"second" * 100


def test_an_entry_of_four_gigabytes_is_refused(tmp_path: Path) -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 1 << 32

    writer = ArchiveWriter(tmp_path / "x.zip")
    with pytest.raises(ValueError, match="4 GiB"):
        writer.add("x", Huge())
    writer.abandon()
    assert not (tmp_path / "x.zip").exists()


def test_deflated_entries_are_refused_by_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("entry", b"a" * 1000)
    with pytest.raises(ValueError, match="entry is compressed"):
        Archive(tmp_path / "x.zip")
