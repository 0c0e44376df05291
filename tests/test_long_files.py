"""Long files are written past the page cache, beside the program; what is in them is the same."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracediff.errors import TraceError
from tracediff.events import Event, Run, Site
from tracediff.trace import Trace, TraceWriter, direct, verify
from tracediff.trace.archive_writer import ArchiveWriter
from tracediff.trace.direct import BLOCK, LONG, PIECE

SIZES = [
    [LONG - 500, 300, 7, 400],
    [LONG - 300, PIECE - 500, 300, 7, 400],
    [PIECE + BLOCK + 1],
    [10, 3 * PIECE],
    [100_001] * 100,
    [PIECE // 2, 0, PIECE // 2, 1, 2 * PIECE, 5],
]
"""Of the entries: the short part and the pieces end within an entry, a header or between them."""


def contents(sizes: list[int]) -> list[bytes]:
    generator = np.random.default_rng(0)
    return [generator.bytes(size) for size in sizes]


def written(path: Path, entries: list[bytes], long: bool = False) -> None:
    writer = ArchiveWriter(path, long=long)
    for index, data in enumerate(entries):
        writer.add(f"e{index}", data)
    writer.close()
    assert writer.size == path.stat().st_size


def check(path: Path, entries: list[bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for index, data in enumerate(entries):
            assert archive.read(f"e{index}") == data, index


@pytest.mark.parametrize("long", [False, True], ids=["", "expected to be long"])
@pytest.mark.parametrize("sizes", [*SIZES, [3, 5]], ids=range(len(SIZES) + 1))
def test_every_byte_arrives(tmp_path: Path, sizes: list[int], long: bool) -> None:
    entries = contents(sizes)
    written(tmp_path / "x.zip", entries, long)
    check(tmp_path / "x.zip", entries)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no direct writes")
@pytest.mark.parametrize("long", [False, True], ids=["", "expected to be long"])
@pytest.mark.parametrize(("size", "direct_opens"), [(LONG // 2, 0), (LONG + 1, 1)])
def test_long_files_alone_are_opened_for_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, direct_opens: int, long: bool
) -> None:
    flags_seen: list[int] = []
    real = os.open

    def seen(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        flags_seen.append(flags)
        return real(path, flags, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(direct.os, "open", seen)
        written(tmp_path / "x.zip", contents([size]), long)
    assert sum(bool(flags & os.O_DIRECT) for flags in flags_seen) == direct_opens


def refusing_open(flag: int) -> Callable[..., int]:
    """As of a file system that cannot open a file for direct writes."""
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & flag:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **named)

    return refuse


def refusing_write(flag: int) -> Callable[..., int]:
    """As of one that opens it, and takes no direct write of this alignment."""
    real = os.pwrite

    def refuse(descriptor: int, data: Any, at: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & flag:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data, at)

    return refuse


def short_write(flag: int) -> Callable[..., int]:
    """As of a disk that takes a part, which ends within a block."""
    real = os.pwrite
    return lambda descriptor, data, at: real(descriptor, data[: 3 * BLOCK + 17], at)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no direct writes")
@pytest.mark.parametrize(
    ("name", "stand_in"),
    [("open", refusing_open), ("pwrite", refusing_write), ("pwrite", short_write)],
    ids=["not opened", "not written", "in part"],
)
def test_a_file_system_without_direct_writes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    stand_in: Callable[[int], Callable[..., int]],
) -> None:
    entries = contents([10, 3 * PIECE + 5])
    with monkeypatch.context() as patched:
        patched.setattr(direct.os, name, stand_in(os.O_DIRECT))
        written(tmp_path / "x.zip", entries)
    check(tmp_path / "x.zip", entries)


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Refuses files longer than two pieces and a half."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE * 5 // 2, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


def event(step: int, size: int) -> tuple[Event, np.ndarray[Any, Any]]:
    array = np.full(size, step, np.uint8)
    site = Site(step, "forward", "fc", 0, "out")
    return Event(site=site, order=0, kind="tensor", dtype="uint8", shape=array.shape), array


@pytest.mark.parametrize("pieces", [3, 6])
def test_a_disk_that_is_full_is_told_and_the_steps_before_stay(
    tmp_path: Path, small_disk: None, pieces: int
) -> None:
    """The piece that fails is the last one, or one with others behind it."""
    writer = TraceWriter(tmp_path / "run.zarr", Run(stack="pytorch"))
    writer.add(*event(0, 2 * PIECE))
    writer.commit_step()

    def second_step() -> None:
        writer.add(*event(1, pieces * PIECE))
        writer.commit_step()

    with pytest.raises(TraceError, match="File too large"):
        second_step()
    with pytest.raises(TraceError, match="File too large"):
        writer.finish()
    assert verify(tmp_path / "run.zarr").sound
    with Trace(tmp_path / "run.zarr") as trace:
        assert trace.steps == [0]
        assert trace.array(trace.events(0)[0]).sum() == 0
    assert not list((tmp_path / "run.zarr").rglob(".*.tmp"))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_can_record(tmp_path: Path) -> None:
    """It has none of the threads of its parent."""
    written(tmp_path / "parent.zip", contents([3 * PIECE]))
    child = os.fork()
    if not child:
        written(tmp_path / "child.zip", contents([3 * PIECE]))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    check(tmp_path / "child.zip", contents([3 * PIECE]))
