"""The shape of an error often names its cause: recognises the common shapes, with an estimate.

Each recogniser takes both arrays in float64 (or complex128) and returns a `Pattern` or None; the
first that explains the difference wins, from the most to the least specific.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.compare.figures import is_complex, is_float, unit_roundoff, widened

Floats = NDArray[np.float64]

_EXPLAINED: Final = 1e-3
"""A pattern explains a difference if it leaves less than this part of it."""

_AMONG_ROUNDING: Final = 0.1
"""A factor explains a difference if rounding leaves less than this part of it."""

_ROUNDINGS: Final = 2
"""Roundings of a value that may be left, in units of the unit roundoff."""

_REAL: Final = 1e-6
"""Part of a factor up to which an imaginary one is rounding."""

_NEAR: Final = 1e-4
_NEAREST: Final = 0.01
"""Relative and absolute distance from a whole number up to which a factor is told as one: a larger
one would be near one by chance."""

_BETAS: Final = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
"""Decay rates of moments in common use."""

_LIMIT: Final = 1 << 22
"""Elements above which patterns are judged on leading rows: a pattern shows on a part as well."""


@dataclass(frozen=True, slots=True)
class Pattern:
    name: str
    meaning: str
    detail: Mapping[str, Any] = field(default_factory=dict)


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def recognise(
    baseline: NDArray[Any], target: NDArray[Any], counts: NDArray[np.bool_] | None = None
) -> Pattern | None:
    """Names the shape of the difference of two arrays, or returns None.

    Args:
        counts: Boolean mask, broadcastable to the shape; where it is False, both sides are taken
            to be zero.
    """
    a, b = (widened(_trim(x)) for x in (baseline, target))
    if counts is not None and a.shape == baseline.shape == target.shape:
        a, b = np.where(counts, a, 0.0), np.where(counts, b, 0.0)
    a, b = np.nan_to_num(a), np.nan_to_num(b)
    if not a.size or not b.size:
        return None
    if not a.any() or not b.any():
        side = "target" if a.any() else "baseline"
        return Pattern("zero", f"every element is zero on the {side}", {"side": side})
    if a.shape != b.shape:
        return _transposed(a, b)
    difference = float(np.linalg.norm(a - b))
    if not difference:
        return None
    floats = [x.dtype.name for x in (baseline, target) if is_float(x.dtype)]
    if (pattern := _scaled(a, b, max(map(unit_roundoff, floats), default=0.0))) is not None:
        return pattern
    if is_complex(a) and is_complex(b) and _explains(b - a.conj(), a, b):
        return Pattern("conjugate", "the imaginary parts have the other sign on one side")
    for recogniser in (
        _byte_order,
        _transposed,
        _shifted,
        _permuted,
        _by_position,
        _sparse,
    ):
        pattern = (
            recogniser(a, b) if recogniser is not _byte_order else _byte_order(baseline, target)
        )
        if pattern is not None:
            return pattern
    return None


def _trim(x: NDArray[Any]) -> NDArray[Any]:
    return x[: max(1, _LIMIT // max(1, x[0].size))] if x.ndim and x.size > _LIMIT else x


def _explains(residual: Floats, a: Floats, b: Floats) -> bool:
    return float(np.linalg.norm(residual)) <= _EXPLAINED * float(np.linalg.norm(a - b))


def _scaled(a: Floats, b: Floats, roundoff: float) -> Pattern | None:
    """`b = factor * a`, the factor by least squares; what is left may be rounding."""
    times = np.vdot(a, b) / np.vdot(a, a)
    factor = float(times.real)
    left, apart, size = (float(np.linalg.norm(x)) for x in (b - times * a, a - b, a))
    rounding = left <= _ROUNDINGS * roundoff * size and left <= _AMONG_ROUNDING * apart
    if not (rounding or left <= _EXPLAINED * apart) or not np.isfinite(factor):
        return None
    if abs(times.imag) > _REAL * abs(times):
        parts = {"factor": [factor, float(times.imag)]}
        return Pattern("scaled", f"the target is the baseline times {complex(times):.6g}", parts)
    if abs(factor + 1) < 1e-3:
        return Pattern("sign", "the sign is flipped", {"factor": -1.0})
    return Pattern(
        "scaled",
        f"the target is the baseline times {factor:.6g}{_named_factor(factor)}",
        {"factor": factor},
    )


def _named_factor(factor: float) -> str:
    """Where a constant factor usually comes from, if it is a well-known one."""
    minus = "-" if factor < 0 else ""
    for value, over in ((factor, ""), (1 / factor if factor else 0.0, "1/")):
        size, sign = abs(value), f"{minus}{over}"
        for beta in _BETAS:
            if abs(size * (1 - beta) - 1) < _NEAR:
                return (
                    f" = {sign}{size:.4g}: 1/(1 - beta) for beta {beta:g}, a moment without its "
                    "bias correction or without its factor; or a scale applied on one side only"
                )
        if (whole := _whole(size)) >= 2:
            return (
                f" = {sign}{whole}: a scale applied on one side only, such as alpha instead of "
                "alpha/r, a mean instead of a sum, or a count of steps or ranks"
            )
        if (square := _whole(size * size)) >= 2:
            return (
                f" = {sign}sqrt({square}): rank-stabilised scaling, or a square root of a "
                "dimension on one side"
            )
    return ": a constant factor on one side, such as clipping, a scale or a learning rate"


def _whole(size: float) -> int:
    """The whole number that a size is near; 0 where it is near none, or too large to tell."""
    if not size < _NEAREST / unit_roundoff("float64"):
        return 0
    return round(size) if abs(size - round(size)) < min(_NEAR * size, _NEAREST) else 0


def _byte_order(baseline: NDArray[Any], target: NDArray[Any]) -> Pattern | None:
    if baseline.dtype != target.dtype or baseline.dtype.itemsize == 1:
        return None
    width = f"u{baseline.dtype.itemsize}"
    if baseline.dtype.itemsize not in (2, 4, 8) or baseline.shape != target.shape:
        return None
    a, b = (np.ascontiguousarray(x).reshape(-1).view(width) for x in (baseline, target))
    if np.array_equal(a.byteswap(), b) and not np.array_equal(a, b):
        return Pattern("byte order", "the bytes of each element are swapped on one side")
    return None


def _transposed(a: Floats, b: Floats) -> Pattern | None:
    if a.ndim != 2 or a.T.shape != b.shape:
        return None
    if np.allclose(a.T, b, rtol=1e-6, atol=0):
        return Pattern("transposed", "the target holds the baseline's transpose")
    return None


def _shifted(a: Floats, b: Floats) -> Pattern | None:
    for axis in range(a.ndim):
        for offset in (1, -1):
            if a.shape[axis] < 3:
                continue
            source = np.take(a, range(max(0, -offset), a.shape[axis] - max(0, offset)), axis)
            moved = np.take(b, range(max(0, offset), b.shape[axis] - max(0, -offset)), axis)
            if np.allclose(source, moved, rtol=1e-5, atol=1e-7 * float(np.abs(a).max())):
                return Pattern(
                    "shifted",
                    f"the target is the baseline moved by {offset:+d} along axis {axis}",
                    {"axis": axis, "offset": offset},
                )
    return None


def _permuted(a: Floats, b: Floats) -> Pattern | None:
    """Rows (or columns, heads) in another order: equal as multisets along an axis."""
    for axis in range(min(a.ndim, 3)):
        rows_a, rows_b = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (a, b))
        if rows_a.shape[0] < 2 or rows_a.shape[1] < 2:
            continue
        order_a, order_b = (np.lexsort(x.T[:4]) for x in (rows_a, rows_b))
        if np.array_equal(rows_a[order_a], rows_b[order_b]):
            moved = int(np.count_nonzero((rows_a != rows_b).any(axis=1)))
            order = np.empty(len(order_a), np.intp)
            order[order_b] = order_a
            block = _block_of(order)
            blocks = f", in blocks of {block}: heads or groups" if block > 1 else ""
            return Pattern(
                "permuted",
                f"axis {axis} holds the same {rows_a.shape[0]} slices in another order"
                f" ({moved} moved{blocks})",
                {"axis": axis, "moved": moved, "block": block},
            )
    return None


def _block_of(order: NDArray[np.intp]) -> int:
    """Largest number of neighbouring slices that are moved together throughout."""
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    block = int(np.gcd.reduce(breaks)) if breaks.size else len(order)
    return block if len(order) % block == 0 else 1


def _by_position(a: Floats, b: Floats) -> Pattern | None:
    """Error along the sequence axis: equal at the first position and growing from there on."""
    if a.ndim < 3 or a.shape[-2] < 4:
        return None
    delta, size = (np.moveaxis(x, -2, 0).reshape(x.shape[-2], -1) for x in (a - b, a))
    errors = np.linalg.norm(delta, axis=1)
    scale = float(np.linalg.norm(size, axis=1).max())
    if errors[0] > 1e-5 * scale or not (errors[1:] > 1e-4 * scale).any():
        return None
    first = int(np.argmax(errors > 1e-5 * scale))
    present = np.flatnonzero(np.linalg.norm(size, axis=1) > 0)
    grows = bool(errors[present[1:3]].mean() < errors[present[-3:]].mean())
    return Pattern(
        "grows with position" if grows else "later positions",
        f"position 0 is equal and positions from {first} on are not"
        + (", more so further on: a rotary base or position offset" if grows else ""),
        {"axis": a.ndim - 2, "first_position": first},
    )


def _sparse(a: Floats, b: Floats) -> Pattern | None:
    """A few elements or slices only."""
    differs = np.abs(a - b) > 1e-6 * float(np.abs(a).max())
    fraction = float(differs.mean())
    if not 0 < fraction <= 0.1:
        return None
    first = [int(i) for i in np.argwhere(differs)[0]]
    return Pattern(
        "few elements",
        f"{int(differs.sum())} of {differs.size} elements differ, the first at {tuple(first)}",
        {"fraction": fraction, "first": first},
    )
