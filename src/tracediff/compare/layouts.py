"""How one array holds the elements of another in a different layout, found from the values.

Nothing is forced: a layout is taken only if the values agree in it far better than in any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.compare.figures import widened
from tracediff.compare.places import evenly

_DIMENSIONS: Final = 5
"""Most dimensions whose orders are all tried: 120."""

_SAMPLE: Final = 1 << 14
"""Elements that decide between layouts."""

_AGREES: Final = 0.5
"""Largest relative difference (L2) of two values that are taken for the same at all; unrelated ones
of equal norm are 1.4 apart."""

_CLEARLY: Final = 0.5
"""A layout is the right one if any other leaves the values twice as far apart."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How to lay an array over another: split into dimensions, reorder them, and reshape.

    Attributes:
        name: same, reshape, transpose, or head split where dimensions are split (or merged) and
            reordered.
    """

    name: str
    split: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array in the other's layout."""
        return array.reshape(self.split).transpose(self.order).reshape(self.shape)

    def inverse(self, shape: tuple[int, ...]) -> Layout:
        """The layout that takes an array of the other's layout to `shape`."""
        turned = tuple(self.split[axis] for axis in self.order)
        back = tuple(int(i) for i in np.argsort(self.order))
        return Layout(self.name, turned, back, shape)


def find_layout(a: NDArray[Any], b: NDArray[Any]) -> Layout | None:
    """How `b` has to be laid out to lie over `a`; None where no layout, or more than one, fits.

    Candidates are all orders of the dimensions of the array that has more of them, which includes
    transposes, reshapes, and heads that are split off or merged. One that leaves the elements in
    place is taken if it fits, without a look at the others, and also where shapes are equal and no
    layout fits: the values have nothing in common then.
    """
    if a.size != b.size:
        return None
    plain = Layout("same" if a.shape == b.shape else "reshape", b.shape, _identity(b.ndim), a.shape)
    if not a.size:
        return plain
    places = evenly(a.size, _SAMPLE)
    wanted = widened(a.reshape(-1)[places])
    flat = b.reshape(-1)

    def apart(layout: Layout) -> float:
        index = layout.apply(np.arange(b.size).reshape(b.shape)).reshape(-1)[places]
        return _apart(wanted, widened(flat[index]))

    in_place = _apart(wanted, widened(flat[places]))
    if in_place <= _AGREES * _CLEARLY:
        return plain
    ranked = sorted(
        ((apart(layout), place, layout) for place, layout in enumerate(_candidates(a, b))),
        key=lambda found: found[:2],
    )
    fallback = plain if in_place <= _AGREES or a.shape == b.shape else None
    if not ranked or ranked[0][0] > _AGREES or in_place < ranked[0][0]:
        return fallback
    best = ranked[0]
    others = [distance for distance, *_ in ranked[1:]] + [in_place]
    clear = all(best[0] <= _CLEARLY * distance or distance == best[0] for distance in others)
    return best[2] if clear else fallback


def _candidates(a: NDArray[Any], b: NDArray[Any]) -> Iterator[Layout]:
    shape_a, shape_b = (tuple(n for n in x.shape if n != 1) for x in (a, b))
    atoms = shape_a if len(shape_a) >= len(shape_b) else shape_b
    if not 2 <= len(atoms) <= _DIMENSIONS:
        return
    reordered = sorted(shape_a) == sorted(shape_b)
    for order in permutations(range(len(atoms))):
        if order == _identity(len(atoms)):
            continue
        if atoms == shape_b:  # reorder b's dimensions and merge them
            split, turn = shape_b, order
        else:  # split b into a's dimensions in another order, and put them into a's
            split, turn = tuple(shape_a[i] for i in order), tuple(map(int, np.argsort(order)))
        turned = tuple(split[axis] for axis in turn)
        if _merges(split, shape_b) and _merges(turned, shape_a):
            name = "transpose" if reordered else "head split"
            yield Layout(name, split, turn, a.shape)


def _merges(parts: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether consecutive dimensions multiply up to those of `whole`."""
    waiting = list(parts)
    for size in whole:
        product = 1
        while waiting and product < size:
            product *= waiting.pop(0)
        if product != size:
            return False
    return not waiting


def _identity(rank: int) -> tuple[int, ...]:
    return tuple(range(rank))


def _apart(a: NDArray[Any], b: NDArray[Any]) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.isfinite(a) & np.isfinite(b)
        if not (finite == np.isfinite(a)).all():
            return math.inf
        scale = max(_norm(a[finite]), _norm(b[finite]))
        return _norm(a[finite] - b[finite]) / scale if scale else 0.0


def _norm(x: NDArray[Any]) -> float:
    sizes = np.abs(x)
    top = float(sizes.max(initial=0.0))
    sizes /= top or 1.0
    return top * math.sqrt(float(np.einsum("i,i->", sizes, sizes)))
