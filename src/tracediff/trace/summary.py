"""Digest, fingerprint and sketch of an array: what an event keeps when it keeps no payload.

All three are functions of the logical value alone (shape, dtype, elements in C order), so the same
tensor gives the same summary on every stack and device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

FINGERPRINT_FIELDS: Final = (
    "count",
    "nan",
    "inf",
    "zero",
    "mean",
    "abs_mean",
    "l2",
    "third_moment",
    "fourth_moment",
    "min",
    "q05",
    "q25",
    "q50",
    "q75",
    "q95",
    "max",
)
"""Fields of a fingerprint, in order. Moments and quantiles are of the finite elements."""

SKETCH_SIZE: Final = 256
SHORT_SKETCH: Final = 32
"""Buckets of a short sketch: every eighth of a whole one's, summed."""

QUANTILE_LIMIT: Final = 1 << 20
"""Quantiles of larger tensors are NaN: sorting them would cost more than recording them."""

_ATOMS: Final = frozenset({type(None), bool, int, float, str})
"""Types of which a list is JSON as it stands."""

_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
_NO_QUANTILES: Final = (float("nan"),) * len(_QUANTILES)
_BLOCK: Final = 1 << 16
_MOMENT_BLOCK: Final = 1 << 13
"""Fits the cache, and is below the 10,000 elements from which OpenBLAS uses threads."""
_ONES: Final = np.ones(_MOMENT_BLOCK)
_NAN: Final = float("nan")
_SKETCH_SEED: Final = 0x9E3779B97F4A7C15


def digest(array: NDArray[Any]) -> bytes:
    """xxh3-128 of the elements in C order, little-endian: 16 bytes.

    Shape and dtype are no part of it; they are compared as fields of the event.
    """
    contiguous = np.ascontiguousarray(array)
    if contiguous.dtype.byteorder == ">":
        contiguous = contiguous.astype(contiguous.dtype.newbyteorder("<"))
    return xxhash.xxh3_128_digest(contiguous.reshape(-1).view(np.uint8).data)


def plain(value: Any) -> Any:
    """The JSON value that stands for `value`: what a trace keeps of texts, scalars and settings.

    Mappings get string keys, tuples and sets become lists, NumPy scalars and arrays their Python
    values, and anything else its `str`.
    """
    if value is None or isinstance(value, bool | int | float | str):
        # Subclasses (enumerations, NumPy's float64) print in their own ways.
        for base in (bool, int, float, str):
            if isinstance(value, base):
                return base(value) if base is not str else str.__str__(value)
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        if _ATOMS.issuperset(map(type, value)):
            return list(value)
        return [plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist()) if value.dtype.kind in "biufSU" else str(value)
    return str(value)


def digest_value(value: Any) -> bytes:
    """xxh3-128 of a text (UTF-8, lone surrogates kept) or of the canonical JSON of a value."""
    text = value if isinstance(value, str) else json.dumps(plain(value), sort_keys=True)
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


def fingerprint(array: NDArray[Any], *, brief: bool = False) -> tuple[float, ...]:
    """Statistics that do not change when a tensor is transposed, reshaped or permuted.

    Args:
        brief: Leave third and fourth moment and the quantiles NaN. They tell apart operations
            that have no names; where values are paired by name, a sixth of the cost is enough.

    Returns:
        One float64 per name in `FINGERPRINT_FIELDS`. Sums are accumulated in float64 over blocks,
        so that a re-layout changes them by rounding in float64 only.
    """
    flat = _flat(array)
    total = _Moments(brief)
    buffers = np.empty((2, min(flat.size, _MOMENT_BLOCK)))
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat.size, _MOMENT_BLOCK):
            total.add(flat[start : start + _MOMENT_BLOCK], buffers)
    count = flat.size - total.nan - total.inf
    if not count:
        return (float(flat.size), float(total.nan), float(total.inf), *([0.0] * 13))
    return (
        float(flat.size),
        float(total.nan),
        float(total.inf),
        float(total.zero),
        total.sum / count,
        total.abs / count,
        math.sqrt(total.square),
        _NAN if brief else total.cube / count,
        _NAN if brief else total.fourth / count,
        total.low,
        *(_NO_QUANTILES if brief else _quantiles(flat)),
        total.high,
    )


class _Moments:
    """Counts and power sums of the finite elements, one block at a time."""

    def __init__(self, brief: bool) -> None:
        self._brief = brief
        self.nan = self.inf = self.zero = 0
        self.sum = self.abs = self.square = self.cube = self.fourth = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, block: NDArray[Any], buffers: NDArray[np.float64]) -> None:
        """Adds a block; `buffers` (2, at least its size) are overwritten."""
        wide, square = buffers[0, : block.size], buffers[1, : block.size]
        ones = _ONES[: block.size]
        np.copyto(wide, block, casting="unsafe")
        # Products of blocks this small stay on this thread: BLAS wakes the others only for longer
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
        if not self._brief:
            np.multiply(wide, wide, out=square)
            self.cube += float(square.dot(wide))
            self.fourth += float(square.dot(square))
        np.abs(wide, out=wide)
        self.abs += float(wide.dot(ones))
        if low <= 0 <= high and wide.min() == 0:
            self.zero += wide.size - int(np.count_nonzero(wide))


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    """The elements in C order; a complex one counts as two, so that its phase shows."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat


def _quantiles(flat: NDArray[Any]) -> tuple[float, ...]:
    """Order statistics (no interpolation) of the finite elements, NaN above `QUANTILE_LIMIT`."""
    if flat.size > QUANTILE_LIMIT:
        return _NO_QUANTILES
    values = flat.astype(np.float32 if flat.dtype.itemsize < 4 else flat.dtype, copy=True)
    if values.dtype.kind == "f":
        values = values[np.isfinite(values)]
    values.sort()  # vectorised, and far quicker here than a partition at five ranks
    return tuple(float(values[int(q * (values.size - 1))]) for q in _QUANTILES)


def sketch(array: NDArray[Any]) -> NDArray[np.float64]:
    """A linear random projection onto 256 signed buckets, accumulated in float64.

    The Euclidean norm of the difference of two sketches estimates that of the tensors
    (the count sketch of Charikar, Chen and Farach-Colton, 2002). Bucket and sign of an element
    come from a hash of its place in C order with a seed fixed by the trace format.
    """
    flat = _flat(array)
    total = np.zeros(SKETCH_SIZE)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK].astype(np.float64)
        buckets, signs = _buckets(start)
        total += np.bincount(
            buckets[: block.size], weights=block * signs[: block.size], minlength=SKETCH_SIZE
        )
    return total


def shortened(whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """The short sketch of what a sketch was made of; a short one as it is.

    A distance is then good to 1/sqrt(2 * 32) = 12% (standard deviation) instead of 4.4%.
    """
    short: NDArray[np.float64] = whole.reshape(-1, SHORT_SKETCH).sum(axis=0)
    return short


def sketched_distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Estimates the Euclidean distance of two tensors from sketches, each whole or short."""
    if a.size != b.size:
        a, b = shortened(a), shortened(b)
    return float(np.linalg.norm(a - b))


@lru_cache(maxsize=64)
def _buckets(start: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Bucket and sign of the `_BLOCK` elements from `start` on (splitmix64 of the index)."""
    with np.errstate(over="ignore"):
        z = np.arange(start, start + _BLOCK, dtype=np.uint64) * np.uint64(_SKETCH_SEED)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    buckets = (z & np.uint64(SKETCH_SIZE - 1)).astype(np.intp)
    signs = np.where(z >> np.uint64(63), -1.0, 1.0)
    return buckets, signs
