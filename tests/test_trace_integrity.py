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
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.damage import flip, offset_of, segment, three_steps
from tracediff.bisection import bisect
from tracediff.errors import CorruptTraceError, NotATraceError, TraceError, TraceFormatError
from tracediff.testing import build_trace
from tracediff.trace import Trace, verify
from tracediff.trace.archive import Archive
from tracediff.trace.archive_writer import ArchiveWriter

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
    return three_steps(tmp_path / "t.zarr")


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
