"""The kernels in NumPy, a part that fits the cache at a time: what the C code computes."""

from __future__ import annotations

import math
import struct
import zlib
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BLOCK: Final = 1 << 15
LANES: Final = 64
SKETCH_SIZE: Final = 256

_PART: Final = 1 << 13
"""Fits the cache, and is below the 10,000 elements from which OpenBLAS uses threads."""
_ONES: Final = np.ones(_PART)
_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
_SKETCH_BLOCK: Final = 1 << 16
_SKETCH_SEED: Final = 0x9E3779B97F4A7C15
_INTEGER_OF_WIDTH: Final = {1: "i1", 2: "i2", 4: "i4", 8: "i8"}


def statistics(array: NDArray[Any], full: bool) -> bytes:
    """See `tracediff.kernels.fingerprint`. Sums differ from those of the C code by their rounding:
    in its order they would take three times as long here."""
    flat = array.reshape(-1)
    found = _Moments(full)
    buffers = np.empty((2, min(flat.size, _PART)))
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat.size, _PART):
            found.add(flat[start : start + _PART], buffers)
    count = flat.size - found.nan - found.inf
    if not count:
        return struct.pack("16d", flat.size, found.nan, found.inf, *[0.0] * 13)
    numbers = (
        found.zero,
        found.sum / count,
        found.abs / count,
        math.sqrt(found.square),
        found.cube / count if full else math.nan,
        found.fourth / count if full else math.nan,
        found.low,
        *(_order_statistics(flat) if full else [math.nan] * len(_QUANTILES)),
        found.high,
    )
    # Adding zero makes -0.0 the 0.0 that it equals, so that one value has one fingerprint.
    return struct.pack(
        "16d", flat.size, found.nan, found.inf, *[number + 0.0 for number in numbers]
    )


def exchanged(api: Any, tensor: Any) -> None:
    """See `tracediff.kernels.array_of`."""


def summary(
    array: NDArray[Any], full: bool, total: NDArray[np.float64] | None
) -> tuple[bytes | None, bytes]:
    """See `tracediff.kernels.summary`."""
    if total is not None:
        total[:] = signed_buckets(array)
    return None, statistics(array, full)


def digest_of_blocks(sums: NDArray[Any], tail: NDArray[Any], size: int) -> None:
    """See `tracediff.kernels.digest_of_blocks`."""


class _Moments:
    """Counts, extremes and power sums of the finite elements, one part at a time."""

    def __init__(self, full: bool) -> None:
        self._full = full
        self.nan = self.inf = self.zero = 0
        self.sum = self.abs = self.square = self.cube = self.fourth = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, part: NDArray[Any], buffers: NDArray[np.float64]) -> None:
        """Adds a part; `buffers` (2, at least its size) are overwritten."""
        wide, square = buffers[0, : part.size], buffers[1, : part.size]
        ones = _ONES[: part.size]
        np.copyto(wide, part, casting="unsafe")
        # Products of parts this small stay on this thread: BLAS wakes the others only for longer
        # ones, to fight with those of the framework that is being recorded.
        squares = float(wide.dot(wide))
        if not math.isfinite(squares) and not (finite := np.isfinite(wide)).all():
            nan = int(np.count_nonzero(np.isnan(wide)))
            self.nan += nan
            self.inf += wide.size - int(np.count_nonzero(finite)) - nan
            if finite.any():
                self.add(wide[finite], np.empty((2, wide.size)))
            return
        self.square += squares
        self.sum += float(wide.dot(ones))
        low, high = float(wide.min()), float(wide.max())
        self.low, self.high = min(self.low, low), max(self.high, high)
        if self._full:
            np.multiply(wide, wide, out=square)
            self.cube += float(square.dot(wide))
            self.fourth += float(square.dot(square))
        np.abs(wide, out=wide)
        self.abs += float(wide.dot(ones))
        if low <= 0 <= high and wide.min() == 0:
            self.zero += wide.size - int(np.count_nonzero(wide))


def _rows_to_add(count: int, size: int) -> NDArray[np.float64]:
    """Zeros (count, 1 + rows, lanes): the lanes of some sums so far, and a part to add to them."""
    return np.zeros((count, 1 - (-min(size, _PART) // LANES), LANES))


def _add_rows(rows: NDArray[np.float64]) -> None:
    # Along this axis NumPy adds row after row; along the last it would add in pairs.
    rows[:, 0] = np.add.reduce(rows, axis=1)


def _folded(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums of the lanes, which are set to zero again."""
    lanes = rows[:, 0].copy()
    rows[:, 0] = 0.0
    while (half := lanes.shape[1] // 2) > 0:
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _order_statistics(flat: NDArray[Any]) -> list[float]:
    """The finite elements at `_QUANTILES`; there is one."""
    values = flat.astype(np.float32 if flat.dtype.itemsize < 4 else flat.dtype, copy=True)
    if values.dtype.kind == "f":
        values = values[np.isfinite(values)]
    values.sort()  # vectorised, and far quicker here than a partition at five ranks
    return [float(values[int(q * (values.size - 1))]) for q in _QUANTILES]


def signed_buckets(array: NDArray[Any]) -> NDArray[np.float64]:
    """See `tracediff.kernels.signed_buckets`."""
    flat = array.reshape(-1)
    total = np.zeros(SKETCH_SIZE)
    for start in range(0, flat.size, _SKETCH_BLOCK):
        places, signs = _places(start // SKETCH_SIZE)
        with np.errstate(invalid="ignore"):
            signed = flat[start : start + _SKETCH_BLOCK].astype(np.float64)
            signed *= signs[: signed.size]
            twice = np.bincount(places[: signed.size], signed, 2 * SKETCH_SIZE)
            total += twice[:SKETCH_SIZE] + twice[SKETCH_SIZE:]
    return total


@lru_cache(maxsize=64)
def _places(first: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Bucket, before those from `SKETCH_SIZE` on come round to the first, and sign of each element
    of a block that begins with row `first`: from five numbers a row (splitmix64 of their index)."""
    rows = _SKETCH_BLOCK // SKETCH_SIZE
    with np.errstate(over="ignore"):
        z = np.arange(5 * first, 5 * (first + rows), dtype=np.uint64) * np.uint64(_SKETCH_SEED)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    words = z.reshape(rows, 5)
    starts = (words[:, 4:] % np.uint64(SKETCH_SIZE)).astype(np.intp)
    bits = np.unpackbits(words[:, :4].astype("<u8").view(np.uint8), axis=1, bitorder="little")
    signs = np.where(bits.reshape(-1), -1.0, 1.0)
    return (starts + np.arange(SKETCH_SIZE)).reshape(-1), signs


def differences(
    a: NDArray[Any],
    b: NDArray[Any],
    keep: NDArray[np.bool_] | None,
    scale: float,
    rows: NDArray[np.float64],
) -> None:
    """See `tracediff.kernels.differences`; fills rows (blocks, figures). Complex numbers too."""
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    squares = _rows_to_add(3, a.size)
    for row, start in zip(rows, range(0, a.size, BLOCK), strict=True):
        top = worst = 0.0
        different = nonfinite = used = 0
        with np.errstate(all="ignore"):
            for at in range(start, min(start + BLOCK, a.size), _PART):
                part = slice(at, min(at + _PART, start + BLOCK))
                x, y = a[part].astype(wide), b[part].astype(wide)
                odd, counted = _left_out(x, y, None if keep is None else keep[part])
                found = _figures(x, y, scale, squares)
                top, worst = max(top, found[0]), max(worst, found[1])
                different, nonfinite, used = different + found[2], nonfinite + odd, used + counted
            sums = _folded(squares).tolist()
        row[:] = (top, *sums, worst, different, nonfinite, used)


def _left_out(x: NDArray[Any], y: NDArray[Any], keep: NDArray[np.bool_] | None) -> tuple[int, int]:
    """Sets what does not count to zero; returns how much is not finite on one side, or differs in
    that, and how much counts."""
    counts = np.isfinite(x)
    counts &= np.isfinite(y)
    nonfinite = 0
    if not counts.all():
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        nonfinite = int(np.count_nonzero(~counts & ~same))
    if keep is not None:
        counts &= keep
    used = int(np.count_nonzero(counts))
    if used < x.size:
        x[~counts] = y[~counts] = 0.0
    return nonfinite, used


def _figures(
    x: NDArray[Any], y: NDArray[Any], scale: float, squares: NDArray[np.float64]
) -> tuple[float, float, int]:
    """Largest absolute and relative difference, and how many differ; adds the squares."""
    delta, size = np.abs(x - y), np.abs(x)
    for rows, values in zip(squares, (delta, size, np.abs(y)), strict=True):
        to = rows[1:].reshape(-1)
        np.multiply(values, values, out=to[: x.size])
        to[x.size :] = 0.0
    _add_rows(squares)
    top, different = float(delta.max()), int(np.count_nonzero(x != y))
    delta /= np.maximum(size, scale, out=size)
    # A NaN here is of an infinite scale or difference: such elements tell nothing.
    return top, float(np.fmax.reduce(delta, initial=0.0)), different


def largest_ulp(a: NDArray[Any], b: NDArray[Any]) -> int:
    """See `tracediff.kernels.largest_ulp`: floats read as sign and magnitude are numbered along
    the real line."""
    found = 0
    for start in range(0, a.size, BLOCK):
        v, w = (_line(x[start : start + BLOCK]) for x in (a, b))
        # Distances of float64 take 64 bits without a sign.
        apart = np.maximum(v, w).view(np.uint64) - np.minimum(v, w).view(np.uint64)
        found = max(found, int(apart.max()))
    return found


def _line(values: NDArray[Any]) -> NDArray[np.int64]:
    bits = values.view(_INTEGER_OF_WIDTH[values.dtype.itemsize]).astype(np.int64)
    lowest = np.int64(-(1 << (8 * values.dtype.itemsize - 1)))
    return np.where(bits < 0, lowest - bits, bits)


def within(a: NDArray[Any], b: NDArray[Any], relative: float, absolute: float) -> bool:
    """See `tracediff.kernels.within`. Complex numbers too."""
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    for start in range(0, a.size, BLOCK):
        with np.errstate(invalid="ignore", over="ignore"):
            x, y = (values[start : start + BLOCK].astype(wide) for values in (a, b))
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            close = np.abs(x - y) <= relative * np.maximum(np.abs(x), np.abs(y)) + absolute
        if not (same | close).all():
            return False
    return True


def stream(data: memoryview, out: memoryview) -> None:
    """See `tracediff.kernels.stream`."""
    out[:] = data


def place(piece: Any, at: int, head: bytes, crc_at: int, data: Any) -> int:
    """See `tracediff.kernels.place`."""
    whole, start = memoryview(piece), at + len(head)
    with memoryview(data) as view:
        flat = view.cast("B")
        found = zlib.crc32(flat)
        whole[start : start + len(flat)] = flat
    whole[at:start] = head
    whole[at + crc_at : at + crc_at + 4] = found.to_bytes(4, "little")
    return found


def every(array: NDArray[Any], step: int) -> bytes:
    """See `tracediff.kernels.every`."""
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    return flat[::step].tobytes()


def pack(array: NDArray[Any], out: NDArray[Any]) -> None:
    """See `tracediff.kernels.pack`."""
    np.copyto(out, array)
