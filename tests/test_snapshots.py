"""Snapshots as files: damage in them is named, and they live on object storage too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.damage import flip, offset_of
from tests.s3 import s3_server
from tracediff.errors import CorruptTraceError, TraceError
from tracediff.events import Run
from tracediff.rerun import Rerun
from tracediff.testing import build_event
from tracediff.trace import Trace, create_trace, repair, verify
from tracediff.trace.remote import Prefix
from tracediff.trace.snapshot import Tree
from tracediff.trace.summary import digest

WEIGHT = np.arange(64, dtype=np.float32)


def tree(step: int, *, right: bool = True) -> Tree:
    value = WEIGHT + step
    known = digest(value if right else WEIGHT).hex()
    return {
        "weights": {"model": {"fc.weight": {"digest": known, "value": value}}},
        "optimizers": [{"class": "AdamW", "state": {0: {"exp_avg": WEIGHT * 0.1}}}],
    }


def record(path: str | Path, keep: int | None = None) -> None:
    with create_trace(path, Run(stack="pytorch")) as writer:
        for step in range(6):
            if step in (2, 3, 5):
                writer.add_snapshot(step, tree(step), keep)
            event = build_event(f"{step}/forward/fc#0:out", WEIGHT * step)
            writer.add(event, WEIGHT * step)
            writer.commit_step()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    record(tmp_path / "t.zarr")
    return tmp_path / "t.zarr"


def test_sound_snapshots_are_counted(path: Path) -> None:
    found = verify(path)
    assert found.sound
    assert found.snapshots == 3


@pytest.mark.parametrize("entry", ["arrays/0/c/0", "arrays/1/c/0", "arrays/0/zarr.json"])
def test_a_flipped_byte_is_named(path: Path, entry: str) -> None:
    file = path / "snapshots/00000003.zip"
    flip(file, offset_of(file, entry) + 5)
    damage = verify(path).damage
    assert {item.where for item in damage} == {"snapshots/00000003.zip"}
    assert entry in damage[0].what


def test_a_weight_without_its_digest_is_named(path: Path) -> None:
    with create_trace(path.with_name("other"), Run(stack="mlx")) as writer:
        writer.add_snapshot(1, tree(1, right=False))
    (damage,) = verify(path.with_name("other")).damage
    assert damage.where == "snapshots/00000001.zip"
    assert damage.what == "weights.model.fc.weight does not have its digest"


def test_a_torn_snapshot_is_told(path: Path) -> None:
    file = path / "snapshots/00000005.zip"
    whole = file.read_bytes()
    file.rename(file.with_name(".00000005.zip.tmp"))  # as a kill leaves it
    file.with_name(".00000005.zip.tmp").write_bytes(whole[:300])
    found = verify(path)
    assert found.sound
    assert found.unfinished == ["snapshots/.00000005.zip.tmp"]
    file.write_bytes(whole[:300])  # as a file system that lost what was written leaves it
    assert [item.where for item in verify(path).damage] == ["snapshots/00000005.zip"]
    with Trace(path) as trace, pytest.raises(CorruptTraceError, match=r"snapshots/00000005\.zip"):
        trace.snapshot(5)


def test_repair_keeps_what_is_sound(path: Path, tmp_path: Path) -> None:
    file = path / "snapshots/00000003.zip"
    flip(file, offset_of(file, "arrays/0/c/0"))
    result = repair(path, tmp_path / "new")
    assert list(result.lost) == ["snapshots/00000003.zip"]
    assert (result.snapshots, result.copied, result.whole) == (2, 6, False)
    with Trace(tmp_path / "new") as trace:
        assert trace.snapshots == [2, 5]
        assert "1 snapshots lost" in trace.run.notes[0]
        assert Rerun(trace, 4).start == 2
    assert verify(tmp_path / "new").sound


# ---- object storage --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as url:
        yield url


def test_they_are_written_and_read_on_object_storage(bucket: str) -> None:
    url = f"{bucket}/run.zarr"
    record(url)
    assert verify(url).snapshots == 3
    with Trace(url) as trace:
        assert trace.snapshots == [2, 3, 5]
        rerun = Rerun(trace, 4)
        assert rerun.start == 3
        value = rerun.snapshot()["weights"]["model"]["fc.weight"]["value"]
        np.testing.assert_array_equal(value, WEIGHT + 3)
        with pytest.raises(TraceError, match=f"{url} has no snapshot of step 4"):
            trace.snapshot(4)
        assert not list(trace.path.rglob("snapshots/*.zip")), "fetched files are kept"


def test_only_the_latest_stay_on_object_storage(bucket: str) -> None:
    url = f"{bucket}/kept.zarr"
    record(url, keep=2)
    names = sorted(name for name in Prefix(url).sizes() if name.startswith("snapshots/"))
    assert names == ["snapshots/00000003.zip", "snapshots/00000005.zip"]
    assert verify(url).sound


def test_a_seal_reaches_object_storage(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/sealed.zarr"
    with create_trace(url, Run(stack="pytorch"), seal=True) as writer:
        writer.add(build_event("0/forward/fc#0:out", WEIGHT), WEIGHT)
        writer.add_snapshot(0, tree(0), 1)
        writer.add_snapshot(1, tree(1), 1)
    found = verify(url)
    assert found.sound
    assert found.seal is not None
    segment = "segments/0/00000000.zip"
    Prefix(url).put(segment, Prefix(url).get(segment)[:-1] + b"x")
    assert segment in {item.where for item in verify(url).damage}
    with Trace(url) as trace, pytest.raises(CorruptTraceError, match="not the file that was"):
        trace.events(0)
