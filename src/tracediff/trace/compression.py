"""The one codec of compressed arrays: Blosc with Zstandard, which every reader of Zarr v3 has."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numcodecs import Blosc  # type: ignore[import-untyped]
from numpy.typing import NDArray

CHUNK_BYTES: Final = 1 << 20
"""Size of a chunk before compression. One Blosc block each: a block is what Zstandard sees at once,
and with several of them the order in the file would depend on threads."""

LARGEST_CHUNK: Final = 64 << 20
"""Larger chunks are refused: their size is read from the file."""

_LEVEL: Final = 5
_HEADER: Final = 16
"""Bytes of a Blosc header; bytes 4 to 8 hold the size before compression, 12 to 16 after."""


def codec_json(itemsize: int, shuffle: bool) -> dict[str, Any]:
    """The codec's entry in the metadata of an array."""
    configuration = {
        "cname": "zstd",
        "clevel": _LEVEL,
        "shuffle": "shuffle" if shuffle else "noshuffle",
        "typesize": itemsize,
        "blocksize": CHUNK_BYTES,
    }
    return {"name": "blosc", "configuration": configuration}


def compress(chunk: NDArray[Any], *, shuffle: bool) -> bytes:
    """The bytes of one chunk, C-contiguous and little-endian, at most `LARGEST_CHUNK`.

    Args:
        shuffle: Whether to sort the bytes of the elements by significance before: good for numbers
            that grow, bad for token IDs, whose repeated sequences it breaks up.
    """
    mode = Blosc.SHUFFLE if shuffle else Blosc.NOSHUFFLE
    return bytes(Blosc("zstd", _LEVEL, mode, blocksize=CHUNK_BYTES).encode(chunk))


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
        return bytes(np.frombuffer(Blosc().decode(data), np.uint8).data)
    except RuntimeError as error:
        raise ValueError(f"a compressed chunk is damaged: {error}") from None
