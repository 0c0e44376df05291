"""What is computed on every element of every tensor, in one pass: in C, or the same in NumPy.

The C code is an optional extension: where no compiler was at hand when the package was installed,
NumPy does the work. Counts, extremes, order statistics, sketches and distances in units in the last
place are the same in both. Sums are taken in float64: in C in one order, whatever the machine and
the number of threads (element i of a block of `BLOCK` is added to a lane, in order of i; the lanes
of a block are folded in halves). `differences` has that order in NumPy as well; `fingerprint`
differs there by the rounding of the sums.

Arrays are flat (or C-contiguous, where only one is given) and of any dtype that a trace can hold.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tracediff.kernels import in_numpy

VARIABLE: Final = "TRACEDIFF_KERNELS"
"""Environment variable: `numpy` leaves the C code unused."""

BLOCK: Final = in_numpy.BLOCK
SKETCH_SIZE: Final = in_numpy.SKETCH_SIZE

_T = TypeVar("_T")

_SHARE: Final = 1 << 19
"""Elements below which a second thread is not worth its start."""
_THREADS: Final = 8
"""More of them wait for the memory."""


STATISTICS: Final = (
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
"""What `fingerprint` finds, in order. Moments and quantiles are of the finite elements."""

_NUMBERS: Final = struct.Struct(f"{len(STATISTICS)}d")

FIGURES: Final = ("max_abs", "delta", "a", "b", "worst", "different", "nonfinite", "used")
"""What `differences` finds for each block. All but `nonfinite` leave out what is not finite on both
sides, or does not count.

- max_abs: largest absolute difference;
- delta: sum of squared differences; a, b: those of the sides;
- worst: largest difference of an element over max(its magnitude in a, the scale);
- different: number of elements that differ;
- nonfinite: elements that are NaN or Inf on one side and not the same on the other;
- used: number of elements that count.
"""


def _c_code() -> ModuleType | None:
    try:
        from tracediff.kernels import in_c
    except ImportError:
        return None
    return in_c


_engine: ModuleType = in_numpy if os.environ.get(VARIABLE) == "numpy" else _c_code() or in_numpy


def engine() -> str:
    """What is in use: `native` or `numpy`."""
    return "numpy" if _engine is in_numpy else "native"


@contextmanager
def using(name: str) -> Iterator[None]:
    """Switches to `native` or `numpy` for a while, in all threads.

    Raises:
        ImportError: The C code was not built.
    """
    global _engine
    before, chosen = _engine, in_numpy if name == "numpy" else _c_code()
    if chosen is None:
        raise ImportError("the C kernels are not built: install the package with a C compiler")
    _engine = chosen
    try:
        yield
    finally:
        _engine = before


def native_memo() -> Any:
    """The class in C of what was found of the values of two steps, see `tracediff.summaries`; None
    where the C code is not in use."""
    return getattr(_engine, "memo", None)


array_of: Final[Callable[[Any, Any], NDArray[Any] | None]] = _engine.exchanged
"""Called with what a class of tensors has as `__dlpack_c_exchange_api__`, and a tensor: an array
that is a view of its memory and cannot be written to (DLPack 1.3, https://github.com/dmlc/dlpack).

None where the C code is not in use, and for a tensor that is not on the CPU, has no memory of its
own, or is of a type that is read by bits (8-bit floats) or not at all.
"""


def fingerprint(flat: NDArray[Any], *, full: bool) -> tuple[float, ...]:
    """One number per name in `STATISTICS`; all but the counts are 0 without finite elements.

    Args:
        full: Whether to find the third and fourth moment, and of n finite elements those of rank
            `int(q * (n - 1))` for each quantile q. They are NaN otherwise.
    """
    return unpacked(_engine.statistics(flat, full))


def unpacked(statistics: bytes) -> tuple[float, ...]:
    """The numbers that `summary` finds."""
    return _NUMBERS.unpack(statistics)


def packed(numbers: Sequence[float]) -> bytes:
    """Undoes `unpacked`."""
    return _NUMBERS.pack(*numbers)


def summary(
    flat: NDArray[Any], full: bool, buckets: NDArray[np.float64] | None
) -> tuple[bytes | None, bytes]:
    """All of an array in one pass over the memory: what is found of a part stays in the cache.

    Args:
        buckets: Where what `signed_buckets` finds is put, if that is wanted: (SKETCH_SIZE,).

    Returns:
        xxh3-128 of the bytes, or None where it has to be taken otherwise: the C code has it for
        more than 240 bytes on processors with AVX2. What `fingerprint` finds, as `packed`, which is
        one piece of memory for each value that is recorded.
    """
    found: tuple[bytes | None, bytes] = _engine.summary(flat, full, buckets)
    return found


def digest_of_blocks(sums: NDArray[np.uint64], tail: NDArray[np.uint8], size: int) -> bytes | None:
    """xxh3-128 of bytes that lie elsewhere, of which the device did most of the work.

    Args:
        sums: What each block of 1024 bytes but the last, which may be whole, adds to the
            accumulators: shape ((size - 1) // 1024, 8). As the specification has it, this depends
            on the bytes of the block alone (https://github.com/Cyan4973/xxHash,
            doc/xxhash_spec.md, XXH3 for long inputs).
        tail: The bytes after those blocks, or more of the last ones: 64 at least.
        size: Number of bytes, more than 240.

    Returns:
        The digest; None where the C code is not in use, or the processor has no AVX2.

    Raises:
        ValueError: The sizes do not belong together.
    """
    found: bytes | None = _engine.digest_of_blocks(sums, tail, size)
    return found


def signed_buckets(flat: NDArray[Any]) -> NDArray[np.float64]:
    """The sums of `SKETCH_SIZE` signed buckets; see `tracediff.trace.summary.sketch`."""
    found: NDArray[np.float64] = _engine.signed_buckets(flat)
    return found


def differences(
    a: NDArray[Any], b: NDArray[Any], keep: NDArray[np.bool_] | None, scale: float
) -> NDArray[np.float64]:
    """Error figures of two arrays of equal size.

    Args:
        keep: False where an element does not count; of the same size.
        scale: Above 0; see `FIGURES`.

    Returns:
        One row (blocks, figures) for each block, in the order of `FIGURES`.
    """
    rows = np.empty((-(-a.size // BLOCK), len(FIGURES)))

    def work(part: slice) -> None:
        kept = None if keep is None else keep[part]
        to = rows[part.start // BLOCK : -(-part.stop // BLOCK)]
        _engine.differences(a[part], b[part], kept, scale, to)

    _share(work, a.size)
    return rows


def largest_ulp(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Largest distance of floats of one dtype in units in the last place."""
    return max(_share(lambda part: int(_engine.largest_ulp(a[part], b[part])), a.size))


def within(a: NDArray[Any], b: NDArray[Any], relative: float, absolute: float) -> bool:
    """Whether each pair is equal, or apart by `relative` of the larger plus `absolute` at most."""
    return all(
        _share(lambda part: bool(_engine.within(a[part], b[part], relative, absolute)), a.size)
    )


def pack(array: NDArray[Any], out: NDArray[Any]) -> None:
    """Copies an array of any layout into one of its shape and dtype that is C-contiguous."""
    _engine.pack(array, out)


def every(array: NDArray[Any], step: int) -> bytes:
    """Every `step`th element of an array of any layout, in C order."""
    found: bytes = _engine.every(array, step)
    return found


def stream(data: memoryview, out: memoryview) -> None:
    """Copies bytes that nobody reads again soon, past the caches."""
    _engine.stream(data, out)


def crc32(data: bytes | memoryview) -> int:
    """CRC-32 of bytes, as `zlib.crc32`."""
    found: int = getattr(_engine, "crc32", zlib.crc32)(data)
    return found


def place(piece: Any, at: int, head: bytes, crc_at: int, data: Any) -> int:
    """Copies what comes before an entry's bytes, and these, to where they go; finds their CRC-32.

    Args:
        piece: Memory to write in; its bytes from `at` are overwritten.
        head: What comes first.
        crc_at: Where in `head` the CRC-32 of `data` goes, as four bytes.
        data: A C-contiguous buffer.

    Returns:
        The CRC-32 of `data`.
    """
    found: int = _engine.place(piece, at, head, crc_at, data)
    return found


def _share(work: Callable[[slice], _T], size: int) -> list[_T]:
    """Does the work on parts of whole blocks, each in a thread of its own where that pays."""
    if size < 2 * _SHARE or (threads := min(_processors(), _THREADS, size // _SHARE)) < 2:
        return [work(slice(0, size))]
    part = -(-size // threads // BLOCK) * BLOCK
    parts = [slice(start, min(start + part, size)) for start in range(0, size, part)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, parts))


def _processors() -> int:
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(usable(0)) if usable else os.cpu_count() or 1
