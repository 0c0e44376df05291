"""The kernels in NumPy, block by block: what the C code computes, to the bit."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BLOCK: Final = 1 << 15
LANES: Final = 64
SKETCH_SIZE: Final = 256

_SKETCH_BLOCK: Final = 1 << 16
_SKETCH_SEED: Final = 0x9E3779B97F4A7C15
_INTEGER_OF_WIDTH: Final = {1: "i1", 2: "i2", 4: "i4", 8: "i8"}


def moments(flat: NDArray[Any], full: bool) -> tuple[float, ...]:
    """See `tracediff.kernels.moments`."""
    nan = inf = zero = 0
    sums = np.zeros(5)
    low, high = math.inf, -math.inf
    for start in range(0, flat.size, BLOCK):
        with np.errstate(over="ignore", invalid="ignore"):
            wide = flat[start : start + BLOCK].astype(np.float64)
            finite = np.isfinite(wide)
            kept = wide
            if not finite.all():
                no_number = int(np.count_nonzero(np.isnan(wide)))
                nan += no_number
                inf += int(np.count_nonzero(~finite)) - no_number
                kept = wide[finite]
                wide[~finite] = 0.0
            if kept.size:
                low, high = min(low, float(kept.min())), max(high, float(kept.max()))
            zero += kept.size - int(np.count_nonzero(kept))
            sums += _power_sums(wide, full)
    return (nan, inf, zero, *sums.tolist(), low, high)


def _power_sums(wide: NDArray[np.float64], full: bool) -> NDArray[np.float64]:
    square = wide * wide
    powers = [wide, np.abs(wide), square]
    if full:
        powers += [square * wide, square * square]
    found = np.zeros(5)
    found[: len(powers)] = _lane_sums(powers)
    return found


def _lane_sums(blocks: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The sum of each of some blocks of equal size, in the order that the C code adds in."""
    lanes = np.zeros((len(blocks), LANES))
    for lane, block in zip(lanes, blocks, strict=True):
        whole = block.size // LANES * LANES
        # Along the first axis NumPy adds row after row; along the last it would add in pairs.
        np.add.reduce(block[:whole].reshape(-1, LANES), axis=0, out=lane)
        lane[: block.size - whole] += block[whole:]
    while (half := lanes.shape[1] // 2) > 0:
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def order_statistics(flat: NDArray[Any], quantiles: tuple[float, ...]) -> tuple[float, ...]:
    """See `tracediff.kernels.order_statistics`."""
    values = flat.astype(np.float32 if flat.dtype.itemsize < 4 else flat.dtype, copy=True)
    if values.dtype.kind == "f":
        values = values[np.isfinite(values)]
    if not values.size:
        return (math.nan,) * len(quantiles)
    values.sort()  # vectorised, and far quicker here than a partition at five ranks
    return tuple(float(values[int(q * (values.size - 1))]) for q in quantiles)


def signed_buckets(flat: NDArray[Any]) -> NDArray[np.float64]:
    """See `tracediff.kernels.signed_buckets`."""
    total = np.zeros(SKETCH_SIZE)
    for start in range(0, flat.size, _SKETCH_BLOCK):
        buckets, signs = _buckets(start)
        with np.errstate(invalid="ignore"):
            signed = flat[start : start + _SKETCH_BLOCK].astype(np.float64)
            signed *= signs[: signed.size]
            total += np.bincount(buckets[: signed.size], signed, SKETCH_SIZE)
    return total


@lru_cache(maxsize=64)
def _buckets(start: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Bucket and sign of the elements of the block from `start` on (splitmix64 of the index)."""
    with np.errstate(over="ignore"):
        z = np.arange(start, start + _SKETCH_BLOCK, dtype=np.uint64) * np.uint64(_SKETCH_SEED)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    buckets = (z & np.uint64(SKETCH_SIZE - 1)).astype(np.intp)
    signs = np.where(z >> np.uint64(63), -1.0, 1.0)
    return buckets, signs


def differences(
    a: NDArray[Any],
    b: NDArray[Any],
    keep: NDArray[np.bool_] | None,
    scale: float,
    rows: NDArray[np.float64],
) -> None:
    """See `tracediff.kernels.differences`; fills rows (blocks, figures). Complex numbers too."""
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    for row, start in zip(rows, range(0, a.size, BLOCK), strict=True):
        part = slice(start, start + BLOCK)
        with np.errstate(all="ignore"):
            x, y = a[part].astype(wide), b[part].astype(wide)
            row[:] = _figures(x, y, None if keep is None else keep[part], scale)


def _figures(
    x: NDArray[Any], y: NDArray[Any], keep: NDArray[np.bool_] | None, scale: float
) -> tuple[float, ...]:
    used = np.isfinite(x) & np.isfinite(y)
    nonfinite = 0
    if not used.all():
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        nonfinite = int(np.count_nonzero(~used & ~same))
    if keep is not None:
        used &= keep
    counted = int(np.count_nonzero(used))
    if counted < x.size:
        x[~used] = y[~used] = 0.0
    delta, size = np.abs(x - y), np.abs(x)
    squares = delta * delta, size * size, np.square(np.abs(y))
    return (
        float(delta.max()),
        *_lane_sums(list(squares)).tolist(),
        # A NaN here is of an infinite scale or difference: such elements tell nothing.
        float(np.fmax.reduce(delta / np.maximum(size, scale), initial=0.0)),
        int(np.count_nonzero(x != y)),
        nonfinite,
        counted,
    )


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
