"""`--seal`: what was altered after a trace was recorded is named, however well it was done."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.damage import rewrite
from tracediff.bisection import bisect
from tracediff.cli import main
from tracediff.errors import CorruptTraceError, TraceError
from tracediff.events import Run
from tracediff.testing import build_event, build_trace
from tracediff.trace import Trace, TraceWriter, repair, verify
from tracediff.trace.seal import Sealer
from tracediff.trace.summary import digest

SEGMENT = "segments/0/00000002.zip"
INDEX = "index/0/00000002.json"
VALUE = np.arange(40.0)


def record(path: Path, seal: bool = True) -> Path:
    values = []
    for step in range(3):
        values += [(f"{step}/forward/m#0:out", VALUE + step), (f"{step}/trajectory/loss#0", 1.5)]
    return build_trace(path, values, seal=seal)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return record(tmp_path / "t.zarr")


def forge(path: Path) -> None:
    """Changes a value of step 2 with all that guards it inside of the segment: digest and CRC."""
    forged = VALUE + 2
    forged[7] = 100.0
    rewrite(
        path,
        {
            "tensors/forward/m#0/out/c/0": forged.tobytes(),
            "events/digest/c/0/0": digests(path).replace(digest(VALUE + 2), digest(forged)),
        },
        step=2,
    )


def digests(path: Path) -> bytes:
    with Trace(path) as trace:
        return b"".join(event.digest for event in trace.events(2))


def test_it_is_what_sha256sum_checks(path: Path) -> None:
    done = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True, check=True
    )
    files = sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())
    assert sorted(line.removesuffix(": OK") for line in done.stdout.splitlines()) == [
        name for name in files if name != "SHA256SUMS"
    ]
    found = verify(path)
    assert found.sound
    assert found.seal == hashlib.sha256((path / "SHA256SUMS").read_bytes()).hexdigest()
    with Trace(path) as trace:
        assert trace.seal == found.seal


def test_a_forged_value_is_told_by_the_seal_alone(tmp_path: Path, path: Path) -> None:
    plain = record(tmp_path / "plain.zarr", seal=False)
    forge(plain)
    (plain / INDEX).unlink()  # it is made again
    assert verify(plain).sound, "the forgery is not as good as it should be"
    assert verify(plain).seal is None
    forge(path)
    damage = verify(path).damage
    assert [d.where for d in damage if "not the file that was sealed" in d.what] == [SEGMENT]


def test_bisect_refuses_what_was_altered(tmp_path: Path, path: Path) -> None:
    twin = record(tmp_path / "twin.zarr")
    assert bisect(path, twin).outcome == "identical"
    forge(path)
    (path / INDEX).unlink()
    with pytest.raises(CorruptTraceError, match=r"00000002\.zip is not the file that was sealed"):
        bisect(path, twin)
    assert main(["bisect", str(path), str(twin)]) == 2


def reword(file: Path) -> None:
    file.write_text(file.read_text().replace("pytorch", "another"))


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (lambda p: reword(p / "zarr.json"), "zarr.json", "not the file"),
        (lambda p: (p / SEGMENT).unlink(), SEGMENT, "is gone"),
        (lambda p: (p / INDEX).unlink(), INDEX, "is gone"),
        (
            lambda p: (p / INDEX).write_text("{}"),
            INDEX,
            "not the file",
        ),
        (
            lambda p: shutil.copy(p / SEGMENT, p / "segments/0/00000007.zip"),
            "segments/0/00000007.zip",
            "was added",
        ),
        (lambda p: (p / "SHA256SUMS").unlink(), "SHA256SUMS", "is gone"),
        (lambda p: (p / "SHA256SUMS").write_text("hello\n"), "SHA256SUMS", "holds the line"),
    ],
    ids=["manifest", "no segment", "no index", "index", "added", "no seal", "no list"],
)
def test_whatever_is_altered_is_named(
    path: Path, change: Callable[[Path], object], where: str, what: str
) -> None:
    change(path)
    assert any(item.where == where and what in item.what for item in verify(path).damage)


def test_a_new_seal_is_told_by_the_one_that_was_kept(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = verify(path).seal
    assert kept is not None
    assert main(["verify", str(path), "--seal", kept]) == 0
    forge(path)
    sums = path / "SHA256SUMS"
    old = next(line for line in sums.read_text().splitlines() if line.endswith(SEGMENT))[:64]
    new = hashlib.sha256((path / SEGMENT).read_bytes()).hexdigest()
    sums.write_text(sums.read_text().replace(old, new))
    (path / INDEX).unlink()
    sums.write_text("".join(x for x in sums.open() if INDEX not in x))
    assert verify(path).sound, "a seal proves nothing against who can write a new one"
    capsys.readouterr()
    assert main(["verify", str(path), "--seal", kept]) == 1
    assert kept in capsys.readouterr().out


def test_a_run_that_was_cut_off_is_sealed_as_far_as_it_came(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", Run(stack="pytorch"), seal=True)
    for step in range(3):
        writer.add(build_event(f"{step}/forward/m#0:out", VALUE + step), VALUE + step)
        writer.commit_step()
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "t", killed)
    writer.finish()
    found = verify(killed)
    assert found.sound
    assert found.seal is None
    with (killed / SEGMENT).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert [d.where for d in verify(killed).damage if "sealed" in d.what] == [SEGMENT]


def test_a_seal_for_which_there_was_no_room_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = TraceWriter(tmp_path / "t", Run(stack="pytorch"), seal=True)
    writer.add(build_event("0/forward/m#0:out", VALUE), VALUE)
    monkeypatch.setattr(Sealer, "close", full)
    with pytest.raises(TraceError, match="No space left"):
        writer.finish()
    with Trace(tmp_path / "t") as trace:
        assert trace.seal is None
        np.testing.assert_array_equal(trace.array(trace.events(0)[0]), VALUE)
    assert [(d.where, d.what) for d in verify(tmp_path / "t").damage] == [
        ("SHA256SUMS", "was never completed, and the run finished")
    ]


def test_only_the_latest_snapshots_are_sealed(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", Run(stack="pytorch"), seal=True) as writer:
        for step in range(4):
            writer.add_snapshot(step, {"weights": {"w": VALUE}}, keep=2)
    assert sorted(file.name for file in (tmp_path / "t/snapshots").iterdir()) == [
        "00000002.zip",
        "00000003.zip",
    ]
    assert verify(tmp_path / "t").sound
    assert verify(tmp_path / "t").snapshots == 2


def test_repair_tells_what_was_altered_and_seals_nothing(tmp_path: Path, path: Path) -> None:
    forge(path)
    result = repair(path, tmp_path / "new")
    assert result.altered == [SEGMENT]
    assert not result.whole
    found = verify(tmp_path / "new")
    assert found.sound
    assert found.seal is None
    document = json.loads((tmp_path / "new/zarr.json").read_text())
    assert "sealed" not in document["attributes"]["tracediff"]
