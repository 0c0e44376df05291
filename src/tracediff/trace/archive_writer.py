"""Writes ZIP archives of stored, aligned entries in one pass.

What is written here is plain ZIP (with ZIP64 where needed), which `zipfile`, `unzip` and
`zarr.storage.ZipStore` read. `zipfile` itself can neither align an entry nor map one, and costs ten
times as much per entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.kernels import crc32
from tracediff.trace.direct import Bytes, FileWriter
from tracediff.trace.zip_format import (
    ALIGNMENT,
    CRC_AT,
    MAX32,
    OFFSET_AT,
    SIZES_AT,
    Entry,
    directory,
    end_of_archive,
    header,
    line,
)

_FIELDS: Final = np.arange(SIZES_AT, SIZES_AT + 12)
_OFFSET: Final = np.arange(OFFSET_AT, OFFSET_AT + 4)
"""Where in a line of the directory there is what differs from archive to archive."""


class Fixed:
    """Entries whose bytes are known, and the name and size of one that comes after them.

    Archives that are alike have the same ones, whose headers are made once: but for the padding,
    which depends on where they come.
    """

    __slots__ = ("_entries", "crc_at", "crcs", "head", "names", "residue", "sizes", "starts")

    def __init__(self, entries: Sequence[tuple[str, bytes]], last: tuple[str, int] | None) -> None:
        """
        Args:
            entries: ASCII names and bytes.
            last: Name and size in bytes of the entry after them, if there is one.
        """
        self._entries = entries, last
        self.names = [name for name, _ in entries]
        self.sizes = [len(data) for _, data in entries]
        self.crcs = [crc32(data) for _, data in entries]
        if last is not None:
            self.names.append(last[0])
            self.sizes.append(last[1])
        self.residue = -1
        self.head = b""
        self.crc_at = 0
        self.starts: list[int] = []

    def moved(self, offset: int) -> bytes:
        """The bytes up to those of the last entry, where they begin at an offset; `crc_at` says
        where among them the last one's CRC-32 goes, and `starts` where each entry begins."""
        entries, last = self._entries
        self.residue = at = offset % ALIGNMENT
        parts: list[bytes] = []
        self.starts = []
        for (name, data), crc in zip(entries, self.crcs, strict=True):
            parts += header(name, Entry(at, len(data), crc)), data
            self.starts.append(at - self.residue)
            at += len(parts[-2]) + len(data)
        if last is not None:
            self.starts.append(at - self.residue)
            self.crc_at = self.starts[-1] + CRC_AT
            parts.append(header(last[0], Entry(at, last[1], 0)))
        self.head = b"".join(parts)
        return self.head


class Directory:
    """Writes the directories of archives that have mostly the same entries, one after another."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._order = self._starts = np.empty(0, np.intp)
        self._lines = np.empty(0, np.uint8)

    def encode(
        self, names: list[str], offsets: list[int], sizes: list[int], crcs: list[int], start: int
    ) -> bytes:
        """The directory, sorted by name, and the end of the archive.

        Args:
            start: Where in the file it begins.
        """
        if start >= MAX32:
            entries = map(Entry, offsets, sizes, crcs)
            return directory(dict(zip(names, entries, strict=True)), start)
        if names != self._names:
            self._learn(names)
        fields = np.array((crcs, sizes, sizes), "<u4").T[self._order]
        self._put(_FIELDS, fields)
        self._put(_OFFSET, np.array((offsets,), "<u4").T[self._order])
        return self._lines.tobytes() + end_of_archive(len(names), start, self._lines.size)

    def _learn(self, names: list[str]) -> None:
        order = sorted(range(len(names)), key=names.__getitem__)
        lines = [line(names[i], Entry(0, 0, 0)) for i in order]
        ends = np.cumsum([0, *map(len, lines)], dtype=np.intp)
        self._names, self._order = names, np.array(order, np.intp)
        self._starts, self._lines = ends[:-1, None], np.frombuffer(b"".join(lines), "u1").copy()

    def _put(self, places: NDArray[Any], values: NDArray[Any]) -> None:
        """Puts one row of values into each line."""
        self._lines[self._starts + places] = np.ascontiguousarray(values).view(np.uint8)


class ArchiveWriter:
    """Writes entries straight to the file; only the directory is kept in memory."""

    def __init__(
        self, path: Path, *, long: bool = False, directory: Directory | None = None
    ) -> None:
        """
        Args:
            long: Whether the file is expected to be long, see `FileWriter`.
            directory: What the directories of the archives before were written with.
        """
        self.path = path
        self.size = 0
        self._out = FileWriter(path, long=long)
        self._entries: list[tuple[str, Entry]] = []
        self._placed: list[tuple[Fixed, int, int]] = []
        self._directory = directory or Directory()

    def add(self, name: str, data: Bytes) -> None:
        """Appends one entry.

        Args:
            name: ASCII, unique within the archive.
            data: At most 4 GiB, bytes or a C-contiguous view of bytes.
        """
        size = len(data)
        if size >= MAX32:
            raise ValueError(f"entry {name} has {size} bytes: split it into chunks below 4 GiB")
        entry = Entry(self.size, size, crc32(data))
        self._entries.append((name, entry))
        head = header(name, entry)
        self.size += len(head) + size
        self._out.write(head)
        self._out.write(data)

    def add_all(self, *entries: tuple[str, Bytes]) -> None:
        """Appends entries, one after the other."""
        for name, data in entries:
            self.add(name, data)

    def place(self, fixed: Fixed, data: Any) -> None:
        """Appends entries that are known, and the one after them.

        Args:
            data: The last one's bytes: a C-contiguous buffer, of the size that `fixed` has. None
                where there is no such entry.
        """
        at = self.size
        head = fixed.head if at % ALIGNMENT == fixed.residue else fixed.moved(at)
        self.size = at + len(head)
        crc = 0
        if data is None:
            self._out.write(head)
        else:
            size = fixed.sizes[-1]
            self.size += size
            crc = self._out.place(head, fixed.crc_at, data, size)
        self._placed.append((fixed, at, crc))

    def close(self) -> None:
        """Writes the central directory, sorted by name, and waits until all is on the disk."""
        names = [name for name, _ in self._entries]
        offsets = [entry.offset for _, entry in self._entries]
        sizes = [entry.size for _, entry in self._entries]
        crcs = [entry.crc for _, entry in self._entries]
        for fixed, at, crc in self._placed:
            names += fixed.names
            offsets += [at + start for start in fixed.starts]
            sizes += fixed.sizes
            crcs += fixed.crcs
            if len(fixed.crcs) < len(fixed.names):
                crcs.append(crc)
        end = self._directory.encode(names, offsets, sizes, crcs, self.size)
        self.size += len(end)
        self._out.write(end)
        self._out.close()

    def abandon(self) -> None:
        """Closes and removes the file."""
        self._out.abandon()
        self.path.unlink(missing_ok=True)
