"""The kernels in C, called with arrays. Importable where the extension was built."""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.kernels import _native, in_numpy

if _native.interface != 13:
    raise ImportError("the C kernels were built of other sources: install the package again")

_CARRIERS: Final = {1: np.uint8, 2: np.float16, 4: np.float32, 8: np.float64}
"""A dtype that C code reads for floats of each width; `largest_ulp` reads their bits."""

_PACKED: Final = (1, 2, 4, 8, 16)
"""Widths of elements that C code copies."""

stream: Final = _native.stream
crc32: Final = _native.crc32 if _native.has_crc32 else zlib.crc32
digest_of_blocks: Final = _native.digest_of_blocks
place: Final = _native.place if _native.has_crc32 else in_numpy.place
memo: Final = _native.Memo
exchanged: Final = _native.exchanged
every: Final = _native.every


def _readable(flat: NDArray[Any]) -> NDArray[Any]:
    """An array that C code reads as it lies: aligned and of the machine's byte order. 8-bit floats
    become float32, which holds them all."""
    dtype = flat.dtype.newbyteorder("=")
    if flat.dtype.isbuiltin != 1 and flat.dtype.itemsize == 1:
        dtype = np.dtype(np.float32)
    return np.require(flat, dtype, ["C", "A"])


def statistics(flat: NDArray[Any], full: bool) -> bytes:
    """See `tracediff.kernels.fingerprint`."""
    return summary(flat, full, None)[1]


def summary(
    flat: NDArray[Any], full: bool, total: NDArray[np.float64] | None
) -> tuple[bytes | None, bytes]:
    """See `tracediff.kernels.summary`."""
    found: tuple[bytes | None, bytes] | None = _native.summary(flat, full, total)
    if found is None:  # the bytes that are read are not those of the array
        found = None, _native.summary(_readable(flat), full, total)[1]
    return found


def signed_buckets(flat: NDArray[Any]) -> NDArray[np.float64]:
    """See `tracediff.kernels.signed_buckets`."""
    total = np.empty(in_numpy.SKETCH_SIZE)
    _native.signed_buckets(_readable(flat), total)
    return total


def differences(
    a: NDArray[Any],
    b: NDArray[Any],
    keep: NDArray[np.bool_] | None,
    scale: float,
    rows: NDArray[np.float64],
) -> None:
    """See `tracediff.kernels.differences`; complex numbers are left to NumPy."""
    if "c" in (a.dtype.kind, b.dtype.kind):
        in_numpy.differences(a, b, keep, scale, rows)
    else:
        _native.differences(_readable(a), _readable(b), keep, scale, rows)


def largest_ulp(a: NDArray[Any], b: NDArray[Any]) -> int:
    """See `tracediff.kernels.largest_ulp`."""
    carrier = _CARRIERS[a.dtype.itemsize]
    return _native.largest_ulp(_readable(a.view(carrier)), _readable(b.view(carrier)))


def within(a: NDArray[Any], b: NDArray[Any], relative: float, absolute: float) -> bool:
    """See `tracediff.kernels.within`; complex numbers are left to NumPy."""
    if "c" in (a.dtype.kind, b.dtype.kind):
        return in_numpy.within(a, b, relative, absolute)
    return _native.within(_readable(a), _readable(b), relative, absolute)


def pack(array: NDArray[Any], out: NDArray[Any]) -> None:
    """See `tracediff.kernels.pack`."""
    if array.dtype.itemsize in _PACKED:
        _native.pack(array, out)
    else:
        in_numpy.pack(array, out)
