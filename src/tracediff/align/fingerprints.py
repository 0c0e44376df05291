"""How far two fingerprints are apart, and an index that finds the near ones.

A fingerprint does not change when a tensor is transposed, reshaped or permuted, so two values of
one computation have the same one up to rounding, whatever operations made them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tracediff.compare.figures import unit_roundoff
from tracediff.trace.summary import FINGERPRINT_FIELDS

Fingerprint = tuple[float, ...]

_AT: Final = {name: place for place, name in enumerate(FINGERPRINT_FIELDS)}
_COUNT, _NAN, _INF, _ZERO = (_AT[name] for name in ("count", "nan", "inf", "zero"))
_MEAN, _ABS, _L2 = (_AT[name] for name in ("mean", "abs_mean", "l2"))
_CUBE, _FOURTH = (_AT[name] for name in ("third_moment", "fourth_moment"))
_ORDERED: Final = tuple(_AT[n] for n in ("min", "q05", "q25", "q50", "q75", "q95", "max"))

_SAME: Final = 1e-9
"""Relative: sums of one set of numbers in another order, accumulated in float64."""


def tolerance(dtypes: Iterable[str]) -> float:
    """Largest distance of the fingerprints of one value computed twice: `sqrt(u)` of the coarsest
    dtype, which is half of its digits.

    Rounding that accumulates over a whole model takes less than that (6e-5 over 30 layers in
    float32, docs/deciding.md), and two values of different meaning agree that well in some ten
    statistics at once only by being functions of the same data.
    """
    return math.sqrt(max((_roundoff(dtype) for dtype in dtypes), default=0.0))


def _roundoff(dtype: str) -> float:
    return unit_roundoff(dtype) if dtype.startswith(("float", "bfloat", "complex")) else 0.0


def distance(a: Fingerprint, b: Fingerprint) -> float:
    """How far two fingerprints of equally many elements are apart, in units of the elements.

    If every element of one tensor is within `e (rms + |element|)` of the other's, each order
    statistic moves by no more than that (sorting is a contraction in the largest norm), a mean by
    no more than `2 e rms`, and a moment of order p by about `2 p e rms |x|**(p-1)` on average. The
    distance is the largest such e over all statistics; infinite where the counts of elements, NaN
    or Inf differ.
    """
    if a == b:
        return 0.0
    if a[_COUNT] != b[_COUNT] or a[_NAN] != b[_NAN] or a[_INF] != b[_INF]:
        return math.inf
    finite = max(a[_COUNT] - a[_NAN] - a[_INF], 1.0)
    rms = max(a[_L2], b[_L2]) / math.sqrt(finite)
    if rms == 0:
        return 0.0
    if not math.isfinite(rms) or rms > 1e30:  # squares of the largest floats: order alone counts
        rms = max(abs(a[_AT["max"]]), abs(b[_AT["max"]]), abs(a[_AT["min"]]), abs(b[_AT["min"]]))
        moments: tuple[float, ...] = ()
    else:
        fourth = max(a[_FOURTH], b[_FOURTH])
        moments = (
            abs(a[_L2] - b[_L2]) / (2 * max(a[_L2], b[_L2])),
            abs(a[_MEAN] - b[_MEAN]) / (2 * rms),
            abs(a[_ABS] - b[_ABS]) / (2 * rms),
            abs(a[_CUBE] - b[_CUBE]) / (6 * rms * math.sqrt(fourth)),
            abs(a[_FOURTH] - b[_FOURTH]) / (8 * fourth),
        )
    worst = max(moments, default=0.0)
    for place in _ORDERED:
        x, y = a[place], b[place]
        if x == x and y == y:  # quantiles of very large tensors are NaN
            worst = max(worst, abs(x - y) / (rms + max(abs(x), abs(y))))
    return worst


def same_elements(a: Fingerprint, b: Fingerprint) -> bool:
    """Whether two fingerprints are of one set of numbers in some order, bit for bit."""
    if a == b:
        return True
    if a[: _ZERO + 1] != b[: _ZERO + 1]:
        return False
    for place in _ORDERED:
        if a[place] != b[place] and a[place] == a[place] and b[place] == b[place]:
            return False
    if a[_L2] > 1e30:
        return True
    scale = a[_L2] / math.sqrt(max(a[_COUNT], 1.0))
    brief = math.isnan(a[_CUBE]) or math.isnan(b[_CUBE])
    return (
        abs(a[_L2] - b[_L2]) <= _SAME * a[_L2]
        and abs(a[_MEAN] - b[_MEAN]) <= _SAME * scale
        and abs(a[_ABS] - b[_ABS]) <= _SAME * scale
        and (brief or abs(a[_CUBE] - b[_CUBE]) <= _SAME * max(a[_FOURTH], scale**3))
    )


def rescaled(a: Fingerprint, norm: float) -> Fingerprint:
    """The fingerprint of the same tensor times the factor that gives it another norm."""
    if not a[_L2] or not math.isfinite(a[_L2]):
        return a
    factor = norm / a[_L2]
    powers = {_MEAN: 1, _ABS: 1, _L2: 1, _CUBE: 3, _FOURTH: 4, **dict.fromkeys(_ORDERED, 1)}
    return tuple(x * factor ** powers.get(place, 0) for place, x in enumerate(a))


def fused(a: Fingerprint, b: Fingerprint) -> Fingerprint:
    """The fingerprint of two tensors of equally many elements side by side; its quantiles, which
    do not follow from theirs, are NaN."""
    total = [math.nan] * len(a)
    for place in (_COUNT, _NAN, _INF, _ZERO):
        total[place] = a[place] + b[place]
    for place in (_MEAN, _ABS, _CUBE, _FOURTH):
        total[place] = (a[place] + b[place]) / 2
    total[_L2] = math.hypot(a[_L2], b[_L2])
    total[_ORDERED[0]] = min(a[_ORDERED[0]], b[_ORDERED[0]])
    total[_ORDERED[-1]] = max(a[_ORDERED[-1]], b[_ORDERED[-1]])
    return tuple(total)


def norm(a: Fingerprint) -> float:
    """The Euclidean norm of the finite elements."""
    return a[_L2]


class Index:
    """Fingerprints by element count and norm: near ones are found in logarithmic time.

    Args:
        fingerprints: In the order of execution.
    """

    def __init__(self, fingerprints: Sequence[Fingerprint]) -> None:
        by_count: dict[float, list[tuple[float, int]]] = defaultdict(list)
        for place, each in enumerate(fingerprints):
            by_count[each[_COUNT]].append((each[_L2], place))
        self._sorted = {count: sorted(found) for count, found in by_count.items()}
        self._fingerprints = fingerprints

    def near(self, wanted: Fingerprint, limit: float) -> Iterator[tuple[float, int]]:
        """Distance and place of every fingerprint within a distance."""
        found = self._sorted.get(wanted[_COUNT], ())
        width = 2.5 * limit * wanted[_L2]  # a norm moves by 2 limits at most, of the larger one
        start = bisect_left(found, (wanted[_L2] - width, -1))
        for at in range(start, len(found)):
            length, place = found[at]
            if length > wanted[_L2] + width:
                return
            apart = distance(wanted, self._fingerprints[place])
            if apart <= limit:
                yield apart, place
