"""The one codec of compressed arrays: Blosc with Zstandard, which every reader of Zarr v3 has."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from numcodecs import Blosc  # type: ignore[import-untyped]
from numpy.typing import NDArray

CHUNK_BYTES: Final = 1 << 20
"""Size of a chunk before compression. One Blosc block each: a block is what Zstandard sees at once,
and with several of them the order in the file would depend on threads."""

LARGEST_CHUNK: Final = 64 << 20
"""Larger chunks are refused: their size is read from the file."""

LARGEST_TEXT: Final = 16 << 20
"""Longer columns of strings are stored as they are: there are 13 of them in a segment, and each is
unpacked as a whole."""

LARGEST_PAYLOAD: Final = 256 << 20
"""Larger payloads are stored as they are, so that no file of a few kilobytes can make a reader
fill its memory."""

SMALLEST_PAYLOAD: Final = 1024
"""Smaller payloads gain nothing."""

_HEADER: Final = 16
"""Bytes of a Blosc header; bytes 4 to 8 hold the size before compression, 12 to 16 after."""


class Compression(NamedTuple):
    """How hard to compress.

    Attributes:
        level: Blosc's, 1 to 9.
        shuffle: Whether to sort the bytes of the elements by significance before: good for numbers
            that grow or share their exponents, bad for token IDs, whose repeated sequences it
            breaks up.
    """

    level: int
    shuffle: bool

    def codec_json(self, itemsize: int) -> dict[str, Any]:
        """The codec's entry in the metadata of an array."""
        configuration = {
            "cname": "zstd",
            "clevel": self.level,
            "shuffle": "shuffle" if self.shuffle else "noshuffle",
            "typesize": itemsize,
            "blocksize": CHUNK_BYTES,
        }
        return {"name": "blosc", "configuration": configuration}


TEXTS: Final = Compression(5, shuffle=False)
NUMBERS: Final = Compression(5, shuffle=True)
PAYLOADS: Final = Compression(1, shuffle=True)


def compress(chunk: NDArray[Any], how: Compression) -> bytes:
    """The bytes of one chunk, C-contiguous and little-endian, at most `LARGEST_CHUNK`."""
    mode = Blosc.SHUFFLE if how.shuffle else Blosc.NOSHUFFLE
    if chunk.dtype.kind != "c":  # the types of ml_dtypes have no buffer
        chunk = chunk.reshape(-1).view(f"u{chunk.dtype.itemsize}")
    return bytes(Blosc("zstd", how.level, mode, blocksize=CHUNK_BYTES).encode(chunk))


def stated_size(data: bytes) -> int:
    """How many bytes a compressed chunk says it holds; `decompress` checks it."""
    return int.from_bytes(data[4:8], "little")


def decompress(data: bytes, size: int) -> bytes:
    """Undoes `compress`.

    Raises:
        ValueError: The bytes are damaged, or do not hold `size` bytes.
    """
    found = stated_size(data)
    if len(data) < _HEADER or int.from_bytes(data[12:16], "little") != len(data):
        raise ValueError("a compressed chunk is cut off")
    if found != size or size > LARGEST_CHUNK:
        raise ValueError(f"a compressed chunk holds {found} bytes, expected {size}")
    try:
        unpacked: bytes = Blosc().decode(data)
    except RuntimeError as error:
        raise ValueError(f"a compressed chunk is damaged: {error}") from None
    return unpacked
