"""The kernels in C, called with the buffers of arrays. Importable where the extension was built."""

from __future__ import annotations

import zlib
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tracediff.kernels import _native, in_numpy

if _native.interface != 10:
    raise ImportError("the C kernels were built of other sources: install the package again")

_NAMES: Final = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
)
"""In the order of `values.h`."""
_CODES: Final = {np.dtype(getattr(ml_dtypes, name, name)): code for code, name in enumerate(_NAMES)}
_BFLOAT16: Final = _NAMES.index("bfloat16")
_CARRIERS: Final = {1: np.uint8, 2: np.float16, 4: np.float32, 8: np.float64}
"""A dtype with a buffer and a code for floats of each width; `largest_ulp` reads their bits."""
_BITS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}

stream: Final = _native.stream
crc32: Final = _native.crc32 if _native.has_crc32 else zlib.crc32
digest_of_blocks: Final = _native.digest_of_blocks
place: Final = _native.place if _native.has_crc32 else in_numpy.place


def _typed(flat: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """An array with a buffer, aligned and of the machine's byte order, and the code of its dtype.

    8-bit floats become float32, which holds them all.
    """
    code = _CODES.get(flat.dtype)
    if code is None:
        is_short = flat.dtype.itemsize == 1
        flat = flat.astype(np.float32 if is_short else flat.dtype.newbyteorder("="))
        code = _CODES[flat.dtype]
    if not flat.flags.aligned:
        flat = flat.copy()
    # ml_dtypes' arrays have no buffer of their own.
    return flat.view(np.uint16) if code == _BFLOAT16 else flat, code


def statistics(flat: NDArray[Any], full: bool) -> bytes:
    """See `tracediff.kernels.fingerprint`."""
    return _native.summary(*_typed(flat), full, False, None)[1]


def summary(
    flat: NDArray[Any], full: bool, total: NDArray[np.float64] | None
) -> tuple[bytes | None, bytes]:
    """See `tracediff.kernels.summary`."""
    code = _CODES.get(flat.dtype)
    hashed = code is not None  # else it is read as numbers of another width or byte order
    if code is None or code == _BFLOAT16 or not flat.flags.aligned:
        flat, code = _typed(flat)
    return _native.summary(flat, code, full, hashed, total)


def signed_buckets(flat: NDArray[Any]) -> NDArray[np.float64]:
    """See `tracediff.kernels.signed_buckets`."""
    total = np.empty(in_numpy.SKETCH_SIZE)
    _native.signed_buckets(*_typed(flat), total)
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
        _native.differences(*_typed(a), *_typed(b), keep, scale, rows)


def largest_ulp(a: NDArray[Any], b: NDArray[Any]) -> int:
    """See `tracediff.kernels.largest_ulp`."""
    carrier = _CARRIERS[a.dtype.itemsize]
    return _native.largest_ulp(*_typed(a.view(carrier)), *_typed(b.view(carrier)))


def within(a: NDArray[Any], b: NDArray[Any], relative: float, absolute: float) -> bool:
    """See `tracediff.kernels.within`; complex numbers are left to NumPy."""
    if "c" in (a.dtype.kind, b.dtype.kind):
        return in_numpy.within(a, b, relative, absolute)
    return _native.within(*_typed(a), *_typed(b), relative, absolute)


def pack(array: NDArray[Any], out: NDArray[Any]) -> None:
    """See `tracediff.kernels.pack`."""
    bits = _BITS.get(array.dtype.itemsize)
    if bits is None:
        in_numpy.pack(array, out)
    else:  # as bits, since ml_dtypes' arrays have no buffer of their own
        _native.pack(array.view(bits), out.view(bits))


def every(array: NDArray[Any], step: int) -> bytes:
    """See `tracediff.kernels.every`."""
    bits = _BITS.get(array.dtype.itemsize)
    if array.dtype.isbuiltin != 1:  # ml_dtypes' arrays have no buffer of their own
        if bits is None:
            return in_numpy.every(array, step)
        array = array.view(bits)
    return _native.every(array, step)
