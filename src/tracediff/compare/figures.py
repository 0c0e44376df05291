"""Error figures of two arrays: how far they are apart, over the elements that count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tracediff.verdict import Deviation, ErrorFigures

_BLOCK: Final = 1 << 15
"""Elements per block: two float64 blocks (512 KiB) stay in the cache."""

_INTEGER_OF_WIDTH: Final = {1: "i1", 2: "i2", 4: "i4", 8: "i8"}


@dataclass(frozen=True, slots=True)
class Figures:
    """Error figures and what they leave out.

    Attributes:
        nonfinite: Elements that are NaN or Inf on one side and not the same on the other.
        masked: Elements left out because they do not count (padding).
    """

    error: ErrorFigures
    nonfinite: int = 0
    masked: int = 0


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is floating point, ml_dtypes' bfloat16 and float8 included."""
    return dtype.kind in "fc" or dtype.name.startswith(("bfloat", "float"))


def measure(
    baseline: NDArray[Any], target: NDArray[Any], counts: NDArray[np.bool_] | None = None
) -> Figures:
    """Compares two arrays of equal shape element by element, in float64.

    Args:
        counts: Boolean array, broadcastable to the shape: False where an element is padding. NaN
            and Inf are counted there too.

    Returns:
        `rel_l2` is relative to the baseline's norm, or to the target's where the baseline is all
        zero. `max_rel` divides each difference by the larger of the element's own magnitude and
        the baseline's root mean square, so that a single wrong element shows among millions and
        one near zero does not.
    """
    if counts is not None:
        counts = np.broadcast_to(counts, baseline.shape).reshape(-1)
    a_flat, b_flat = _flat(baseline), _flat(target)
    sums = np.zeros(3)  # squares of the difference, of the baseline, of the target
    max_abs, different, nonfinite, used = 0.0, 0, 0, 0
    for a, b, keep in _blocks(a_flat, b_flat, counts):
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.all():
            nonfinite += int(np.count_nonzero(~finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))))
            keep = finite if keep is None else keep & finite
        if keep is not None:
            a, b = a[keep], b[keep]
        if not a.size:
            continue
        used += a.size
        delta = np.abs(a - b)
        max_abs = max(max_abs, float(delta.max()))
        different += int(np.count_nonzero(delta))
        sums += [_square(x) for x in (delta, a, b)]
    if {a_flat.dtype.kind, b_flat.dtype.kind} <= set("iub"):
        different, max_abs = _whole_numbers_apart(a_flat, b_flat, counts, max_abs)
    scale = np.sqrt(sums[1] or sums[2])
    rms = scale / np.sqrt(max(used, 1))
    error = ErrorFigures(
        max_abs=max_abs,
        rel_l2=float(np.sqrt(sums[0]) / scale) if scale else float(sums[0] > 0),
        max_rel=_max_relative(a_flat, b_flat, counts, rms) if different else 0.0,
        max_ulp=None,
        differing=different / used if used else 0.0,
    )
    return Figures(error, nonfinite, int(a_flat.size - used))


def _whole_numbers_apart(
    a: NDArray[Any], b: NDArray[Any], counts: NDArray[np.bool_] | None, max_abs: float
) -> tuple[int, float]:
    """How many integers differ, and by how much at most: above 2**53 float64 does not tell."""
    apart = (a != b) if counts is None else (a != b) & counts
    different = int(np.count_nonzero(apart))
    return different, max(max_abs, float(different > 0))


def max_ulp(baseline: NDArray[Any], target: NDArray[Any]) -> int | None:
    """Largest distance in units in the last place; None where the dtypes differ or are no floats.

    Floats of one format, read as sign-magnitude integers, are numbered along the real line.
    """
    if baseline.dtype != target.dtype or not is_float(baseline.dtype):
        return None
    integer = _INTEGER_OF_WIDTH.get(baseline.dtype.itemsize)
    if integer is None or baseline.dtype.kind == "c" or not baseline.size:
        return None

    def line(values: NDArray[Any]) -> NDArray[np.float64]:
        bits = np.ascontiguousarray(values).reshape(-1).view(integer).astype(np.int64)
        lowest = -(1 << (8 * values.dtype.itemsize - 1))
        return np.where(bits < 0, lowest - bits, bits).astype(np.float64)

    return int(np.abs(line(baseline) - line(target)).max())


def largest_deviations(
    baseline: NDArray[Any],
    target: NDArray[Any],
    counts: NDArray[np.bool_] | None = None,
    limit: int = 5,
) -> tuple[Deviation, ...]:
    """The elements that deviate most, largest first, with their indices and both values."""
    a, b = baseline.astype(np.float64), target.astype(np.float64)
    with np.errstate(invalid="ignore"):
        delta = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    delta = np.where(same, 0.0, np.where(np.isnan(delta), np.inf, delta))
    if counts is not None:
        delta = np.where(np.broadcast_to(counts, delta.shape), delta, 0.0)
    flat = delta.reshape(-1)
    top = np.argsort(-flat, kind="stable")[:limit]
    return tuple(
        Deviation(
            index=tuple(int(i) for i in np.unravel_index(place, delta.shape)),
            baseline=float(a.reshape(-1)[place]),
            target=float(b.reshape(-1)[place]),
        )
        for place in top
        if flat[place] > 0
    )


def unit_roundoff(dtype: str) -> float:
    """Half the spacing of the floats at 1: `2**-24` for float32, `2**-8` for bfloat16.

    Raises:
        TypeError: The dtype is not a floating-point type.
    """
    resolved = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if resolved.kind == "c":
        resolved = np.dtype(f"f{resolved.itemsize // 2}")
    return float(ml_dtypes.finfo(resolved).eps) / 2  # type: ignore[no-untyped-call]


def one_conversion_apart(baseline: NDArray[Any], target: NDArray[Any]) -> bool:
    """Whether each element of one array is the other's after one rounding to the coarser dtype.

    Element by element, so that one wrong weight among millions shows; two units in the last place
    are allowed for, and two of the smallest subnormals.
    """
    coarser = max((baseline.dtype.name, target.dtype.name), key=unit_roundoff)
    roundoff, tiny = unit_roundoff(coarser), _smallest(coarser)
    for a, b, _ in _blocks(_flat(baseline), _flat(target), None):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            close = np.abs(a - b) <= 2 * roundoff * np.maximum(np.abs(a), np.abs(b)) + 2 * tiny
        if not (same | close).all():
            return False
    return True


def _smallest(dtype: str) -> float:
    info = ml_dtypes.finfo(np.dtype(getattr(ml_dtypes, dtype, dtype)))  # type: ignore[no-untyped-call]
    return float(info.smallest_subnormal)


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).reshape(-1)


def _square(x: NDArray[Any]) -> float:
    """Sum of squared magnitudes. Not by BLAS, which would wake all its threads for each block."""
    return float(np.einsum("i,i->", x, x) if x.dtype.kind == "f" else (np.abs(x) ** 2).sum())


def _blocks(a: NDArray[Any], b: NDArray[Any], counts: NDArray[np.bool_] | None) -> Any:
    """Yields both sides as float64 (complex128 for complex) with the mask, block by block."""
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    for start in range(0, a.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        yield a[part].astype(wide), b[part].astype(wide), None if counts is None else counts[part]


def _max_relative(
    a_flat: NDArray[Any], b_flat: NDArray[Any], counts: NDArray[np.bool_] | None, rms: float
) -> float:
    worst = 0.0
    for a, b, keep in _blocks(a_flat, b_flat, counts):
        finite = np.isfinite(a) & np.isfinite(b)
        keep = finite if keep is None else keep & finite
        a, b = a[keep], b[keep]
        if a.size:
            scale = np.maximum(np.abs(a), rms or np.finfo(np.float64).tiny)
            worst = max(worst, float((np.abs(a - b) / scale).max()))
    return worst
