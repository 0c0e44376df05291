"""Recorded outputs held to recomputed ones: what rounding explains of their distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.replaying import Floats, Replayed

Values = tuple[NDArray[Any], NDArray[Any]]
Counts = NDArray[np.bool_] | None

_LARGEST: Final = 6.0
"""Spreads that no element exceeds by chance: once in 1e9 for normal errors."""

_TYPICAL: Final = 2.0
"""Spreads that the root mean square of many elements stays below: 1 by derivation."""


@dataclass(frozen=True)
class Side:
    """One side's recorded output and the recomputed one, flat, over the elements that count.

    Here and in `Trial`, what takes all elements and is asked for more than once is kept.

    Attributes:
        reach: Largest error of each element, where the formula knows all roundings.
        rows: Number of rows that the elements lie in.
    """

    out: Floats
    exact: Floats
    spread: Floats
    reach: Floats | None
    rows: int

    @property
    def error(self) -> Floats:
        return self.out - self.exact

    @cached_property
    def off(self) -> float:
        return norm(self.error)

    @cached_property
    def excess(self) -> float:
        """The error over what rounding allows: a correct result is at 1 or below."""
        if self.reach is None:
            return ratio(self.error, self.spread, self.rows)
        return float(np.nanmax(np.abs(self.error) / self.reach, initial=0.0))

    @property
    def holds(self) -> bool:
        return self.excess <= 1

    @property
    def distance(self) -> float:
        """Of the output from the recomputed one, relative to this."""
        return self.off / (norm(self.exact) or 1.0)


def side(out: NDArray[Any], replayed: Replayed, counts: Counts = None) -> Side:
    return Side(
        counted(out, counts),
        counted(replayed.value, counts),
        counted(replayed.spread, counts),
        None if replayed.reach is None else counted(replayed.reach, counts),
        max(1, _count_rows(out.shape, counts)),
    )


def counted(array: NDArray[Any], counts: Counts) -> Floats:
    """The elements that count, flat."""
    wide = array.astype(np.float64, copy=False)
    return wide.reshape(-1) if counts is None else wide[np.broadcast_to(counts, array.shape)]


def _count_rows(shape: tuple[int, ...], counts: Counts) -> int:
    if counts is None or not shape:
        return math.prod(shape[:-1])
    return int(np.broadcast_to(counts, shape).any(axis=-1).sum())


@dataclass(frozen=True)
class Trial:
    """Both sides, recomputed by the same formula, each from its own inputs."""

    sides: tuple[Side, Side]

    @property
    def holding(self) -> tuple[bool, bool]:
        return self.sides[0].holds, self.sides[1].holds

    @property
    def is_described(self) -> bool:
        """Whether the formula is nearer to one of them than they are to each other."""
        nearest = min(s.off for s in self.sides)
        return nearest <= self._apart or nearest <= _LARGEST * self._scale

    @cached_property
    def ratio(self) -> float:
        """What is left unexplained over what rounding allows; beyond 1 something was introduced.

        Where all roundings are known each side is judged by itself, and one that errs beyond them
        while the other does not is at fault. Otherwise the test is on the difference of the sides.
        """
        if all(s.reach is not None for s in self.sides):
            excess = self.sides[0].excess, self.sides[1].excess
            if min(excess) <= 1:
                return max(excess)
        a, b = self.sides
        unexplained = self._difference - (a.exact - b.exact)
        return ratio(unexplained, self._spread, a.rows)

    @cached_property
    def rounding(self) -> float:
        """How far rounding at the place itself takes both apart, relative to the baseline."""
        return self._scale / self._size

    def explained(self, found: float) -> float:
        """What inputs and rounding explain, relative to the baseline's norm.

        Where a single element gives the case away and the norm does not, the error is told as
        `found` (the ratio) times the bound all the same.
        """
        a, b = self.sides
        total = norm(a.exact - b.exact) / self._size + limit(a.rows) * self.rounding
        return min(total, self._apart / self._size / found) if found > 1 else total

    @property
    def _difference(self) -> Floats:
        return self.sides[0].out - self.sides[1].out

    @cached_property
    def _size(self) -> float:
        return norm(self.sides[0].out) or 1.0

    @cached_property
    def _apart(self) -> float:
        return norm(self._difference)

    @cached_property
    def _scale(self) -> float:
        return norm(self._spread)

    @cached_property
    def _spread(self) -> Floats:
        return np.hypot(self.sides[0].spread, self.sides[1].spread)


def ratio(error: Floats, spread: Floats, rows: int) -> float:
    """An error over what rounding allows it, by element and in the mean."""
    if not error.size:
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = np.abs(error)
        quotients /= spread
        largest = quotients.max()  # several times as quick as `nanmax`, and NaN if there is one
        if np.isnan(largest):
            quotients[error == 0] = 0.0  # also where the spread is
            largest = np.nanmax(quotients)
        largest /= _LARGEST
    scale = norm(spread)
    mean = norm(error) / (limit(rows) * scale) if scale else 0.0
    return max(float(largest), mean)


def norm(x: Floats) -> float:
    """Not by BLAS, which would wake all its threads for every small array."""
    return math.sqrt(float(np.einsum("i,i->", x, x)))


def limit(rows: int) -> float:
    """How far the root mean square may be above the spread: errors of a row have a common part (a
    norm's divisor), so it is the number of rows that averages them."""
    return _TYPICAL + (_LARGEST - _TYPICAL) / math.sqrt(rows)
