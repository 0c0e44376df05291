"""ZIP archives of stored, aligned entries, read through a memory map.

Python's `zipfile` can neither align an entry nor map one, and costs ten times as much per entry.
"""

from __future__ import annotations

import mmap
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracediff.kernels import crc32
from tracediff.trace.zip_format import (
    CENTRAL,
    CENTRAL_SIGNATURE,
    END,
    END64,
    END64_SIGNATURE,
    END_SIGNATURE,
    EXTRA,
    LOCAL,
    LOCAL_SIGNATURE,
    LOCATOR,
    LOCATOR_SIGNATURE,
    MAX16,
    MAX32,
    ZIP64_ID,
    Entry,
    directory,
    header,
)


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
        if path.stat().st_size < END.size:
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
        while at + LOCAL.size <= self.size:
            local = LOCAL.unpack_from(self._map, at)
            name_at = at + LOCAL.size
            name = self._map[name_at : name_at + local[9]]
            end = name_at + local[9] + local[10] + local[8]
            if local[0] != LOCAL_SIGNATURE or not name.isascii() or end > self.size:
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
        if entry.offset + LOCAL.size > self.size:
            raise ValueError(f"entry {name} lies outside the file")
        local = LOCAL.unpack_from(self._map, entry.offset)
        start = entry.offset + LOCAL.size + len(encoded) + local[10]
        found = self._map[entry.offset + LOCAL.size : entry.offset + LOCAL.size + len(encoded)]
        if (local[0], local[6:9], local[9], found) != (
            LOCAL_SIGNATURE,
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
            expected = header(name, entry)
            if entry.offset != at or self._map[at : at + len(expected)] != expected:
                raise ValueError(f"the header of entry {name} is damaged")
            at += len(expected) + entry.size
        if self._map[at:] != directory(self.entries, at):
            raise ValueError("its directory is damaged")

    def _read_directory(self) -> dict[str, Entry]:
        count, start, size = self._find_directory()
        entries: dict[str, Entry] = {}
        data = self._map[start : start + size]
        place = 0
        for _ in range(count):
            if place + CENTRAL.size > size:
                raise ValueError("its directory is cut off")
            fields = CENTRAL.unpack_from(data, place)
            name_size, extra_size, comment_size = fields[10:13]
            name_at = place + CENTRAL.size
            place = name_at + name_size + extra_size + comment_size
            name = _entry_name(fields, data[name_at : name_at + name_size])
            offset = fields[16]
            if offset == MAX32:
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
        at = self.size - END.size
        signature, *_, count, size, start, comment = END.unpack_from(self._map, at)
        if signature != END_SIGNATURE or comment:
            raise ValueError("it is cut off: it does not end as a ZIP archive does")
        end = at
        if count == MAX16 or MAX32 in (size, start):
            end, count, size, start = self._find_directory64(at)
        if start + size != end:
            raise ValueError("its directory is not where it should be")
        if count * CENTRAL.size > size:
            raise ValueError("its directory is damaged")
        return count, start, size

    def _find_directory64(self, at: int) -> tuple[int, int, int, int]:
        locator_at = at - LOCATOR.size
        if locator_at < 0:
            raise ValueError("its directory is damaged")
        signature, _, end, _ = LOCATOR.unpack_from(self._map, locator_at)
        if signature != LOCATOR_SIGNATURE or end + END64.size != locator_at:
            raise ValueError("its directory is damaged")
        fields = END64.unpack_from(self._map, end)
        if fields[0] != END64_SIGNATURE:
            raise ValueError("its directory is damaged")
        return end, fields[7], fields[8], fields[9]


def _mapped(path: Path) -> mmap.mmap:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe waits for ever
        raise ValueError("it is no file")
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _entry_name(fields: Sequence[Any], encoded: bytes) -> str:
    if fields[0] != CENTRAL_SIGNATURE:
        raise ValueError("its directory is damaged")
    if not encoded.isascii():
        raise ValueError("its directory holds a name that is not ASCII")
    name = encoded.decode("ascii")
    if fields[4] or fields[8] != fields[9]:
        raise ValueError(f"entry {name} is compressed, which this release does not read")
    return name


def _wide_offset(extra: bytes) -> int:
    if len(extra) < 12 or EXTRA.unpack_from(extra) != (ZIP64_ID, 8):
        raise ValueError("its directory is damaged")
    return int.from_bytes(extra[4:12], "little")
