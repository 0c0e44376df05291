"""A trace on object storage behaves as one on disk, on moto's S3 server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.s3 import s3_server
from tracediff.bisection import bisect
from tracediff.cli import main
from tracediff.errors import (
    CorruptTraceError,
    NotATraceError,
    TraceError,
    TraceExistsError,
    UsageError,
)
from tracediff.events import Run
from tracediff.testing import build_event
from tracediff.trace import Trace, TraceWriter, create_trace, repair, verify
from tracediff.trace.remote import Prefix, url_of


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as url:
        yield url


def fill(writer: TraceWriter, steps: int, fault: float = 0.0) -> None:
    for step in range(steps):
        x = np.arange(24, dtype=np.float32).reshape(4, 6) + step
        for order, (path, array) in enumerate((("a", x), ("b", x * 2 + fault * (step == 1)))):
            site = f"{step}/forward/{path}#0:out"
            writer.add(build_event(site, array, order, inputs=tuple(range(order))), array)
        writer.commit_step()


def record(path: str | Path, steps: int = 3, fault: float = 0.0) -> None:
    with create_trace(path, Run(stack="pytorch", argv=("train.py",))) as writer:
        fill(writer, steps, fault)


def test_it_reads_back_as_the_same_trace_on_disk_does(bucket: str, tmp_path: Path) -> None:
    record(f"{bucket}/same.zarr")
    record(tmp_path / "same.zarr")
    with Trace(f"{bucket}/same.zarr") as there, Trace(tmp_path / "same.zarr") as here:
        assert there.run == here.run
        assert there.steps == here.steps == [0, 1, 2]
        assert there.events() == here.events()
        assert there.bytes_stored == here.bytes_stored
        for event in here.events():
            np.testing.assert_array_equal(there.array(event), here.array(event))
        assert [there.index(step) for step in there.steps] == [
            here.index(step) for step in here.steps
        ]
        assert repr(there) == repr(here)
    assert verify(f"{bucket}/same.zarr").sound
    objects = Prefix(f"{bucket}/same.zarr").sizes().keys()
    local = {str(p.relative_to(tmp_path / "same.zarr")) for p in tmp_path.rglob("*") if p.is_file()}
    assert objects == local


def test_no_part_of_a_step_is_visible_before_its_commit(bucket: str) -> None:
    url = f"{bucket}/growing.zarr"
    writer = create_trace(url, Run(stack="mlx"))
    fill(writer, 2)
    array = np.ones(3, np.float32)
    writer.add(build_event("2/forward/a#0:out", array, 0), array)
    with Trace(url) as trace:
        assert trace.steps == [0, 1]
        assert not trace.is_complete
    writer.finish()
    with Trace(url) as trace:
        assert trace.steps == [0, 1, 2]
        assert trace.is_complete


def test_bisect_reads_only_the_segments_it_needs(bucket: str) -> None:
    record(f"{bucket}/a.zarr", steps=6)
    record(f"{bucket}/b.zarr", steps=6, fault=0.5)
    with Trace(f"{bucket}/a.zarr") as a, Trace(f"{bucket}/b.zarr") as b:
        verdict = bisect(a, b)
        assert verdict.first is not None
        assert verdict.first.site == "1/forward/b#0:out"
        assert not list(b.path.rglob("segments/*/*.zip")), "fetched files are kept"


def test_commands_take_urls(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(f"{bucket}/c.zarr")
    assert main(["verify", f"{bucket}/c.zarr"]) == 0
    assert f"{bucket}/c.zarr" in capsys.readouterr().out
    assert main(["bisect", f"{bucket}/c.zarr", f"{bucket}/c.zarr"]) in (0, 125)
    assert main(["show", f"{bucket}/none.zarr"]) == 2
    assert f"{bucket}/none.zarr is no trace" in capsys.readouterr().err
    assert repair(f"{bucket}/c.zarr", tmp_path / "copy.zarr").copied == 3
    assert verify(tmp_path / "copy.zarr").sound


def test_what_is_there_is_never_overwritten(bucket: str) -> None:
    url = f"{bucket}/once.zarr"
    record(url)
    before = Prefix(url).sizes()
    with pytest.raises(TraceExistsError, match="already holds a trace"):
        create_trace(url, Run(stack="pytorch"))
    with pytest.raises(UsageError, match="delete the trace there first"):
        create_trace(url, Run(stack="pytorch"), overwrite=True)
    assert Prefix(url).sizes() == before


def test_a_store_that_refuses_is_one_sentence(bucket: str) -> None:
    with pytest.raises(TraceError, match=r"cannot (read|write) s3://no-such-bucket"):
        create_trace("s3://no-such-bucket/run.zarr", Run(stack="pytorch"))
    with pytest.raises((NotATraceError, TraceError)):
        Trace("s3://no-such-bucket/run.zarr")


def test_an_object_that_could_leave_the_folder_is_refused(bucket: str) -> None:
    url = f"{bucket}/hostile.zarr"
    record(url)
    Prefix(url).put("segments/0/a b;c.zip", b"x")
    with pytest.raises(CorruptTraceError, match="holds an object named"):
        Trace(url)


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match=r"pip install 'tracediff-ml\[remote\]'"):
        Trace("s3://bucket/run.zarr")


@pytest.mark.parametrize(
    ("path", "url"),
    [
        (Path("s3://bucket/a/run.zarr"), "s3://bucket/a/run.zarr"),
        ("gs://bucket/run.zarr/", "gs://bucket/run.zarr"),
        (Path("run.zarr"), None),
        ("/s3:/x", None),
        ("s3:", None),
    ],
)
def test_urls_survive_being_paths(path: str | Path, url: str | None) -> None:
    assert url_of(path) == url
