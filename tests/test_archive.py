"""The archives of segments: as large as they may be, and no others."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tracediff.trace.archive import Archive
from tracediff.trace.archive_writer import ArchiveWriter


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
    out = writer._out
    out._write_through(out._filled)
    writer.size = out._start = 5 << 30
    out._filled = out._written = 0
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
