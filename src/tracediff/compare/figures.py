"""Error figures of two arrays: how far they are apart, over the elements that count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tracediff.kernels import BLOCK, FIGURES, differences, largest_ulp, within
from tracediff.verdict import Deviation, ErrorFigures

_MAX_ABS: Final = FIGURES.index("max_abs")
_WORST: Final = FIGURES.index("worst")
_WHOLE: Final = frozenset("iu")

_SAMPLE: Final = 1 << 12
"""Elements that tell about how large the others are, to a percent or so."""
_BELOW: Final = 0.97
_SLACK: Final = 1.0 + 1e-9
"""More than the rounding of a bound."""
_TINY: Final = float(np.finfo(np.float64).tiny)


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


def is_complex(array: NDArray[Any]) -> bool:
    return array.dtype.kind == "c"


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """The elements in float64; complex ones in complex128."""
    return array.astype(np.complex128 if is_complex(array) else np.float64)


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
    a, b = _flat(baseline), _flat(target)
    keep = None if counts is None else np.broadcast_to(counts, baseline.shape).ravel()
    guess = _guess(a, keep) if a.size > BLOCK else 1.0  # one block is seen again anyway
    rows = differences(a, b, keep, guess)
    _, delta, of_a, of_b, _, different, nonfinite, used = rows.sum(axis=0).tolist()
    max_abs = float(rows[:, _MAX_ABS].max(initial=0.0))
    if {a.dtype.kind, b.dtype.kind} <= _WHOLE and max(a.itemsize, b.itemsize) == 8:
        different, max_abs = _whole_numbers_apart(a, b, keep, max_abs)
    norm = math.sqrt(of_a or of_b)
    scale = norm / math.sqrt(max(used, 1)) or _TINY
    error = ErrorFigures(
        max_abs=max_abs,
        rel_l2=math.sqrt(delta) / norm if norm else float(delta > 0),
        max_rel=_max_relative(a, b, keep, rows[:, _WORST], (guess, scale)) if different else 0.0,
        max_ulp=None,
        differing=different / used if used else 0.0,
    )
    return Figures(error, int(nonfinite), a.size - int(used))


def _guess(a: NDArray[Any], keep: NDArray[np.bool_] | None) -> float:
    """A little less than the root mean square of the elements that count, from some of them."""
    places = slice(None, None, -(-a.size // _SAMPLE) or 1)
    with np.errstate(invalid="ignore", over="ignore"):
        some = np.abs(widened(a[places]))
        some = some[np.isfinite(some) if keep is None else np.isfinite(some) & keep[places]]
        return _BELOW * math.sqrt(float(np.square(some).sum()) / max(some.size, 1)) or _TINY


def _max_relative(
    a: NDArray[Any],
    b: NDArray[Any],
    keep: NDArray[np.bool_] | None,
    worsts: NDArray[np.float64],
    scales: tuple[float, float],
) -> float:
    """Largest difference of an element over max(its magnitude, the scale).

    The scale is known only after all elements were seen once, with a guess of it. What a block's
    largest is at a smaller scale is the most that it can be, so that only the first few blocks
    need to be seen again. (At a larger one it can be more by the ratio of the scales.)
    """
    guess, scale = scales
    at_most = worsts if guess <= scale else worsts * (guess / scale) * _SLACK
    worst = 0.0
    for block in np.argsort(-at_most).tolist():
        if at_most[block] <= worst:
            break
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        kept = None if keep is None else keep[part]
        again = differences(a[part], b[part], kept, scale)
        worst = max(worst, float(again[0, _WORST]))
    return worst


def _whole_numbers_apart(
    a: NDArray[Any], b: NDArray[Any], counts: NDArray[np.bool_] | None, max_abs: float
) -> tuple[int, float]:
    """How many integers differ, and by how much at least: above 2**53 float64 does not tell."""
    apart = (a != b) if counts is None else (a != b) & counts
    different = int(np.count_nonzero(apart))
    return different, max(max_abs, float(different > 0))


def max_ulp(baseline: NDArray[Any], target: NDArray[Any]) -> int | None:
    """Largest distance in units in the last place; None where the dtypes differ or are no floats.

    Floats of one format, read as sign-magnitude integers, are numbered along the real line.
    """
    if baseline.dtype != target.dtype or not is_float(baseline.dtype):
        return None
    if baseline.dtype.itemsize > 8 or baseline.dtype.kind == "c" or not baseline.size:
        return None
    return largest_ulp(_flat(baseline), _flat(target))


def largest_deviations(
    baseline: NDArray[Any],
    target: NDArray[Any],
    counts: NDArray[np.bool_] | None = None,
    limit: int = 5,
) -> tuple[Deviation, ...]:
    """The elements that deviate most, largest first, with their indices and both values.

    Of complex numbers, real (0) and imaginary parts (1) by themselves, along one more axis.
    """
    if is_complex(baseline) or is_complex(target):
        baseline, target = (np.stack([x.real, x.imag], axis=-1) for x in (baseline, target))
        counts = None if counts is None else counts[..., None]
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


@cache
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
    return within(_flat(baseline), _flat(target), 2 * roundoff, 2 * tiny)


def _smallest(dtype: str) -> float:
    info = ml_dtypes.finfo(np.dtype(getattr(ml_dtypes, dtype, dtype)))  # type: ignore[no-untyped-call]
    return float(info.smallest_subnormal)


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    """The elements in C order, in the byte order of the machine."""
    flat = array.ravel()
    return flat if flat.dtype.isnative else flat.astype(flat.dtype.newbyteorder("="))
