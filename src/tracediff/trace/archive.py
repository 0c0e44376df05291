"""ZIP archives of stored, aligned entries: written in one pass, read through a memory map.

Python's `zipfile` can neither align an entry nor map one, and costs ten times as much per entry.
What is written here is plain ZIP (with ZIP64 where needed), which `zipfile`, `unzip` and
`zarr.storage.ZipStore` read.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tracediff.kernels import crc32
from tracediff.trace.direct import BLOCK, DirectWriter

ALIGNMENT: Final = 64

_LOCAL: Final = struct.Struct("<4s5H3I2H")
_CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
_END: Final = struct.Struct("<4s4H2IH")
_END64: Final = struct.Struct("<4sQ2H2I4Q")
_LOCATOR: Final = struct.Struct("<4sIQI")
_EXTRA: Final = struct.Struct("<2H")
_ALIGNED: Final = struct.Struct("<3H")
_LOCAL_SIGNATURE: Final = b"PK\3\4"
_CENTRAL_SIGNATURE: Final = b"PK\1\2"
_END_SIGNATURE: Final = b"PK\5\6"
_END64_SIGNATURE: Final = b"PK\6\6"
_LOCATOR_SIGNATURE: Final = b"PK\6\7"
_VERSION: Final = 20
_VERSION64: Final = 45
_DATE: Final = 0x21  # 1980-01-01: equal steps give equal segments
_ALIGNMENT_ID: Final = 0xD935  # extra field for aligned entries, as Android packages use it
_ZIP64_ID: Final = 0x0001
_MAX32: Final = 0xFFFFFFFF
_MAX16: Final = 0xFFFF
_MODE: Final = 0o100644 << 16

LONG: Final = 1 << 20
"""Bytes of a file that is read again soon, or hardly worth a second way of writing."""

_SMALL: Final = 1 << 14
"""Bytes of a part that waits for others: to copy it costs less than a write of its own."""
_MOST_HELD: Final = 1 << 16
_ZEROS: Final = bytes(ALIGNMENT)

Bytes = bytes | memoryview


class ArchiveWriter:
    """Writes entries straight to the file; only the directory is kept in memory.

    Past the first `LONG` bytes the file is long, and most of it is written past the page cache.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._held: list[bytes] = []
        self._held_size = 0
        self._written = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._directory: dict[str, Entry] = {}
        self._direct: DirectWriter | None = None

    def add(self, name: str, data: Bytes) -> None:
        """Appends one entry.

        Args:
            name: ASCII, unique within the archive.
            data: At most 4 GiB, bytes or a C-contiguous view of bytes.
        """
        self.add_all((name, data))

    def add_all(self, *entries: tuple[str, Bytes]) -> None:
        """Appends entries in one go."""
        parts: list[Bytes] = []
        at = self.size
        for name, data in entries:
            size = len(data)
            if size >= _MAX32:
                raise ValueError(f"entry {name} has {size} bytes: split it into chunks below 4 GiB")
            entry = self._directory[name] = Entry(at, size, crc32(data))
            header = _header(name, entry)
            parts += header, data
            at += len(header) + size
        self._write(*parts)

    def close(self) -> None:
        """Writes the central directory, sorted by name, and waits until all is on the disk."""
        self._write(_directory(self._directory, self.size))
        self._flush()
        if self._direct is not None:
            rest = self._direct.close()
            os.lseek(self._fd, self.size - len(rest), os.SEEK_SET)
            self._put(rest)
        os.fsync(self._fd)
        os.close(self._fd)

    def abandon(self) -> None:
        """Closes and removes the file."""
        if self._direct is not None:
            self._direct.abandon()
        os.close(self._fd)
        self.path.unlink(missing_ok=True)

    def _write(self, *parts: Bytes) -> None:
        """Appends all parts; small ones wait for more."""
        for part in parts:
            size = len(part)
            self.size += size
            if size <= _SMALL:
                self._held.append(bytes(part))
                self._held_size += size
            else:
                self._flush(part)
        if self._held_size > _MOST_HELD:
            self._flush()

    def _flush(self, *more: Bytes) -> None:
        """Writes what waits, and what comes after it."""
        parts = (b"".join(self._held), *more)
        written = self._written
        self._held, self._held_size = [], 0
        self._written += sum(map(len, parts))
        if self._direct is None and self._written <= LONG:
            self._put(*parts)
        else:
            self._write_long(written, parts)

    def _write_long(self, written: int, parts: Sequence[Bytes]) -> None:
        """Appends to a file that is long, or becomes so: then up to a whole block as before."""
        left = 0
        if self._direct is None:
            start = -(-written // BLOCK) * BLOCK
            self._direct = DirectWriter(self.path, start)
            left = start - written
        for data in parts:
            part = memoryview(data)
            if left:
                self._put(part[:left])
            self._direct.write(part[left:])
            left = max(0, left - len(part))

    def _put(self, *parts: Bytes) -> None:
        """Writes all parts, however many bytes the system takes at a time."""
        total = sum(map(len, parts))
        written = os.writev(self._fd, parts)
        if written < total:
            rest = memoryview(b"".join(parts))[written:]
            while rest:
                rest = rest[os.write(self._fd, rest) :]


class Entry(NamedTuple):
    """One line of the central directory."""

    offset: int
    size: int
    crc: int


def _header(name: str, entry: Entry) -> bytes:
    """The local header, padded so that the entry's bytes begin at a multiple of `ALIGNMENT`."""
    encoded = name.encode("ascii")
    padding = -(entry.offset + _LOCAL.size + len(encoded) + _ALIGNED.size) % ALIGNMENT
    sizes = (entry.crc, entry.size, entry.size, len(encoded), _ALIGNED.size + padding)
    fixed = _LOCAL.pack(_LOCAL_SIGNATURE, _VERSION, 0, 0, 0, _DATE, *sizes)
    extra = _ALIGNED.pack(_ALIGNMENT_ID, 2 + padding, ALIGNMENT)
    return b"".join((fixed, encoded, extra, _ZEROS[:padding]))


def _directory(entries: Mapping[str, Entry], start: int) -> bytes:
    """The central directory, sorted by name, and the end of an archive."""
    lines = b"".join(_line(name, entries[name]) for name in sorted(entries))
    return lines + _end(len(entries), start, len(lines))


def _line(name: str, entry: Entry) -> bytes:
    encoded = name.encode("ascii")
    extra = b""
    if entry.offset >= _MAX32:
        extra = _EXTRA.pack(_ZIP64_ID, 8) + struct.pack("<Q", entry.offset)
    version = _VERSION64 if extra else _VERSION
    sizes = (entry.crc, entry.size, entry.size, len(encoded), len(extra), 0, 0, 0)
    made_by = version | 3 << 8  # Unix, for the file mode
    offset = min(entry.offset, _MAX32)
    fixed = _CENTRAL.pack(
        _CENTRAL_SIGNATURE, made_by, version, 0, 0, 0, _DATE, *sizes, _MODE, offset
    )
    return fixed + encoded + extra


def _end(count: int, start: int, size: int) -> bytes:
    """The end of the archive, preceded by its ZIP64 form where a number does not fit."""
    small = (min(count, _MAX16), min(count, _MAX16), min(size, _MAX32), min(start, _MAX32))
    end = _END.pack(_END_SIGNATURE, 0, 0, *small, 0)
    if count < _MAX16 and start < _MAX32 and size < _MAX32:
        return end
    versions = (_VERSION64 | 3 << 8, _VERSION64)
    end64 = _END64.pack(
        _END64_SIGNATURE, _END64.size - 12, *versions, 0, 0, count, count, size, start
    )
    return end64 + _LOCATOR.pack(_LOCATOR_SIGNATURE, 0, start + size, 1) + end


class Archive:
    """A ZIP archive of stored entries, mapped into memory.

    Nothing in the file is believed: every offset and size is checked against the file's size
    before it is used, so that a damaged or hostile archive raises ValueError and nothing else.
    """

    def __init__(self, path: Path) -> None:
        """Opens the archive and reads its directory.

        Raises:
            ValueError: The file is no such archive; says what is wrong.
            OSError: It cannot be opened.
        """
        if path.stat().st_size < _END.size:
            raise ValueError("it is cut off or empty")
        self._map = _mapped(path)
        self.size = len(self._map)
        self.entries: dict[str, Entry] = self._read_directory()

    @classmethod
    def salvaged(cls, path: Path) -> Archive:
        """Opens an archive by its local headers, up to the first entry that is not whole.

        For files without a directory, as a kill leaves them.

        Raises:
            ValueError: The file is empty.
            OSError: It cannot be opened.
        """
        archive = cls.__new__(cls)
        archive._map = _mapped(path)
        archive.size = len(archive._map)
        archive.entries = {}
        archive._scan()
        return archive

    def _scan(self) -> None:
        at = 0
        while at + _LOCAL.size <= self.size:
            local = _LOCAL.unpack_from(self._map, at)
            name_at = at + _LOCAL.size
            name = self._map[name_at : name_at + local[9]]
            end = name_at + local[9] + local[10] + local[8]
            if local[0] != _LOCAL_SIGNATURE or not name.isascii() or end > self.size:
                break
            decoded = name.decode("ascii")
            self.entries[decoded] = Entry(at, local[8], local[6])
            try:
                self.check(decoded)
            except ValueError:
                del self.entries[decoded]
            at = end

    def view(self, name: str) -> tuple[mmap.mmap, int, int]:
        """The map, and offset and size of an entry's bytes in it.

        Raises:
            KeyError: There is no such entry.
            ValueError: Its local header is damaged.
        """
        entry = self.entries[name]
        encoded = name.encode("ascii")
        if entry.offset + _LOCAL.size > self.size:
            raise ValueError(f"entry {name} lies outside the file")
        local = _LOCAL.unpack_from(self._map, entry.offset)
        start = entry.offset + _LOCAL.size + len(encoded) + local[10]
        found = self._map[entry.offset + _LOCAL.size : entry.offset + _LOCAL.size + len(encoded)]
        if (local[0], local[6:9], local[9], found) != (
            _LOCAL_SIGNATURE,
            (entry.crc, entry.size, entry.size),
            len(encoded),
            encoded,
        ):
            raise ValueError(f"the header of entry {name} is damaged")
        if start + entry.size > self.size:
            raise ValueError(f"entry {name} is cut off")
        return self._map, start, entry.size

    def read(self, name: str) -> bytes:
        """The bytes of an entry, checked against their CRC-32.

        Raises:
            KeyError: There is no such entry.
            ValueError: It is damaged.
        """
        data, start, size = self.view(name)
        found = data[start : start + size]
        if crc32(found) != self.entries[name].crc:
            raise ValueError(f"the bytes of entry {name} do not match their checksum")
        return found

    def check(self, name: str) -> None:
        """Checks an entry's CRC-32 without copying it; raises as `read` does."""
        data, start, size = self.view(name)
        with memoryview(data) as whole, whole[start : start + size] as part:
            if crc32(part) != self.entries[name].crc:
                raise ValueError(f"the bytes of entry {name} do not match their checksum")

    def check_layout(self) -> None:
        """Checks that the file holds its entries and nothing else, byte for byte as written here.

        Raises:
            ValueError: A header or the directory has other bytes; names the entry.
        """
        at = 0
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1].offset):
            header = _header(name, entry)
            if entry.offset != at or self._map[at : at + len(header)] != header:
                raise ValueError(f"the header of entry {name} is damaged")
            at += len(header) + entry.size
        if self._map[at:] != _directory(self.entries, at):
            raise ValueError("its directory is damaged")

    def _read_directory(self) -> dict[str, Entry]:
        count, start, size = self._find_directory()
        entries: dict[str, Entry] = {}
        data = self._map[start : start + size]
        place = 0
        for _ in range(count):
            if place + _CENTRAL.size > size:
                raise ValueError("its directory is cut off")
            fields = _CENTRAL.unpack_from(data, place)
            name_size, extra_size, comment_size = fields[10:13]
            name_at = place + _CENTRAL.size
            place = name_at + name_size + extra_size + comment_size
            name = _entry_name(fields, data[name_at : name_at + name_size])
            offset = fields[16]
            if offset == _MAX32:
                offset = _wide_offset(data[name_at + name_size : place])
            if name in entries:
                raise ValueError(f"its directory names {name} twice")
            if offset + fields[8] > self.size:
                raise ValueError(f"entry {name} lies outside the file")
            entries[name] = Entry(offset, fields[8], fields[7])
        if place != size:
            raise ValueError("its directory is damaged")
        return entries

    def _find_directory(self) -> tuple[int, int, int]:
        """Number of entries, and offset and size of the central directory."""
        at = self.size - _END.size
        signature, *_, count, size, start, comment = _END.unpack_from(self._map, at)
        if signature != _END_SIGNATURE or comment:
            raise ValueError("it is cut off: it does not end as a ZIP archive does")
        end = at
        if count == _MAX16 or _MAX32 in (size, start):
            end, count, size, start = self._find_directory64(at)
        if start + size != end:
            raise ValueError("its directory is not where it should be")
        if count * _CENTRAL.size > size:
            raise ValueError("its directory is damaged")
        return count, start, size

    def _find_directory64(self, at: int) -> tuple[int, int, int, int]:
        locator_at = at - _LOCATOR.size
        if locator_at < 0:
            raise ValueError("its directory is damaged")
        signature, _, end, _ = _LOCATOR.unpack_from(self._map, locator_at)
        if signature != _LOCATOR_SIGNATURE or end + _END64.size != locator_at:
            raise ValueError("its directory is damaged")
        fields = _END64.unpack_from(self._map, end)
        if fields[0] != _END64_SIGNATURE:
            raise ValueError("its directory is damaged")
        return end, fields[7], fields[8], fields[9]


def _mapped(path: Path) -> mmap.mmap:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe waits for ever
        raise ValueError("it is no file")
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _entry_name(fields: Sequence[Any], encoded: bytes) -> str:
    if fields[0] != _CENTRAL_SIGNATURE:
        raise ValueError("its directory is damaged")
    if not encoded.isascii():
        raise ValueError("its directory holds a name that is not ASCII")
    name = encoded.decode("ascii")
    if fields[4] or fields[8] != fields[9]:
        raise ValueError(f"entry {name} is compressed, which this release does not read")
    return name


def _wide_offset(extra: bytes) -> int:
    if len(extra) < 12 or _EXTRA.unpack_from(extra) != (_ZIP64_ID, 8):
        raise ValueError("its directory is damaged")
    return int.from_bytes(extra[4:12], "little")
