"""The parts of a ZIP archive of stored, aligned entries: what is written, and checked when read."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

ALIGNMENT: Final = 64

LOCAL: Final = struct.Struct("<4s5H3I2H")
CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
END: Final = struct.Struct("<4s4H2IH")
END64: Final = struct.Struct("<4sQ2H2I4Q")
LOCATOR: Final = struct.Struct("<4sIQI")
EXTRA: Final = struct.Struct("<2H")
_ALIGNED: Final = struct.Struct("<3H")
LOCAL_SIGNATURE: Final = b"PK\3\4"
CENTRAL_SIGNATURE: Final = b"PK\1\2"
END_SIGNATURE: Final = b"PK\5\6"
END64_SIGNATURE: Final = b"PK\6\6"
LOCATOR_SIGNATURE: Final = b"PK\6\7"
_VERSION: Final = 20
_VERSION64: Final = 45
_DATE: Final = 0x21  # 1980-01-01: equal steps give equal segments
_ALIGNMENT_ID: Final = 0xD935  # extra field for aligned entries, as Android packages use it
ZIP64_ID: Final = 0x0001
CRC_AT: Final = 14
"""Where in a local header the CRC-32 is."""
SIZES_AT: Final = 16
"""Where in a line of the directory CRC-32 and both sizes are."""
OFFSET_AT: Final = 42

MAX32: Final = 0xFFFFFFFF
MAX16: Final = 0xFFFF
_MODE: Final = 0o100644 << 16

_ZEROS: Final = bytes(ALIGNMENT)


class Entry(NamedTuple):
    """One line of the central directory."""

    offset: int
    size: int
    crc: int


def header(name: str, entry: Entry) -> bytes:
    """The local header, padded so that the entry's bytes begin at a multiple of `ALIGNMENT`."""
    encoded = name.encode("ascii")
    padding = -(entry.offset + LOCAL.size + len(encoded) + _ALIGNED.size) % ALIGNMENT
    sizes = (entry.crc, entry.size, entry.size, len(encoded), _ALIGNED.size + padding)
    fixed = LOCAL.pack(LOCAL_SIGNATURE, _VERSION, 0, 0, 0, _DATE, *sizes)
    extra = _ALIGNED.pack(_ALIGNMENT_ID, 2 + padding, ALIGNMENT)
    return b"".join((fixed, encoded, extra, _ZEROS[:padding]))


def directory(entries: Mapping[str, Entry], start: int) -> bytes:
    """The central directory, sorted by name, and the end of an archive."""
    lines = b"".join(line(name, entries[name]) for name in sorted(entries))
    return lines + end_of_archive(len(entries), start, len(lines))


def line(name: str, entry: Entry) -> bytes:
    encoded = name.encode("ascii")
    extra = b""
    if entry.offset >= MAX32:
        extra = EXTRA.pack(ZIP64_ID, 8) + struct.pack("<Q", entry.offset)
    version = _VERSION64 if extra else _VERSION
    sizes = (entry.crc, entry.size, entry.size, len(encoded), len(extra), 0, 0, 0)
    made_by = version | 3 << 8  # Unix, for the file mode
    offset = min(entry.offset, MAX32)
    fixed = CENTRAL.pack(CENTRAL_SIGNATURE, made_by, version, 0, 0, 0, _DATE, *sizes, _MODE, offset)
    return fixed + encoded + extra


def end_of_archive(count: int, start: int, size: int) -> bytes:
    """The end of the archive, preceded by its ZIP64 form where a number does not fit."""
    small = (min(count, MAX16), min(count, MAX16), min(size, MAX32), min(start, MAX32))
    end = END.pack(END_SIGNATURE, 0, 0, *small, 0)
    if count < MAX16 and start < MAX32 and size < MAX32:
        return end
    versions = (_VERSION64 | 3 << 8, _VERSION64)
    end64 = END64.pack(END64_SIGNATURE, END64.size - 12, *versions, 0, 0, count, count, size, start)
    return end64 + LOCATOR.pack(LOCATOR_SIGNATURE, 0, start + size, 1) + end
