"""How a value was made of others between modules, and by what its gradient is multiplied for them.

Recognised on a few rows: a sum, a product, an activation, and a product with one factor activated
(Shazeer, "GLU variants improve transformer", 2020). Rounding allows a few units of the stored
dtype, and random values do not fit by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.compare.figures import unit_roundoff
from tracediff.replaying import Call, Floats, Replayer

Array = NDArray[Any]
Slope = Callable[[Array, Array], tuple[Floats, Floats]]
"""Given both values: the factor that the gradient of their combination gets, and its error."""

_ACTIVATIONS: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("SiLU", {}),
    ("GELU", {"approximate": "tanh"}),
    ("GELU", {"approximate": "none"}),
)


class Part:
    """A value, or a few rows of it, with its activations, each computed when first asked for."""

    def __init__(self, array: Array, reference: Replayer) -> None:
        self.wide: Floats = array.astype(np.float64)
        self._array = array
        self._reference = reference
        self._activated: dict[int, tuple[Floats, Floats]] = {}

    def activated(self, which: int) -> tuple[Floats, Floats]:
        """By one of `_ACTIVATIONS`, see `_activated`."""
        if which not in self._activated:
            found = _activated(*_ACTIVATIONS[which], self._reference, self._array)
            self._activated[which] = found
        return self._activated[which]


def of_two(whole: Array, own: Part, other: Part, reference: Replayer) -> Iterator[Slope]:
    """How `whole` can be made of two values, with respect to `own`, activations left out."""
    x, y = own.wide, other.wide
    if _matches(whole, x + y, np.abs(x) + np.abs(y)):
        yield lambda a, b: (np.ones(a.shape), np.zeros(a.shape))
    if _matches(whole, x * y, np.abs(x * y)):
        yield lambda a, b: (b.astype(np.float64), np.zeros(a.shape))
    for which, (op, settings) in enumerate(_ACTIVATIONS):
        value, scale = other.activated(which)
        if _matches(whole, x * value, np.abs(x) * scale):
            yield partial(_by_activated, op, settings, reference)


def of_activated(whole: Array, own: Part, other: Part, reference: Replayer) -> Iterator[Slope]:
    """How `whole` can be made of an activation of `own`, alone or times `other`."""
    y = other.wide
    for which, (op, settings) in enumerate(_ACTIVATIONS):
        value, scale = own.activated(which)
        if _matches(whole, value, scale):
            yield partial(_alone, op, settings, reference)
        if _matches(whole, value * y, scale * np.abs(y)):
            yield partial(_through, op, settings, reference)


def _matches(whole: Array, value: Floats, scale: Floats) -> bool:
    roundoff, tiny = 4 * unit_roundoff(whole.dtype.name), float(np.finfo(np.float32).tiny)
    return bool(np.all(np.abs(whole.astype(np.float64) - value) <= roundoff * scale + tiny))


def _activated(
    op: str, settings: Mapping[str, Any], reference: Replayer, x: Array
) -> tuple[Floats, Floats]:
    """An activation's value, and the size of its rounding errors in units of the roundoff."""
    call = Call(op=op, inputs={"in": x}, settings=settings, dtype=x.dtype.name)
    found = reference.replay(call)
    if found is None:
        raise ValueError(f"the reference does not know {op}")
    return found.value, np.abs(found.value) + 6 * found.spread / unit_roundoff(x.dtype.name)


def _by_activated(
    op: str, settings: Mapping[str, Any], reference: Replayer, own: Array, other: Array
) -> tuple[Floats, Floats]:
    value, scale = _activated(op, settings, reference, other)
    return value, scale * unit_roundoff(other.dtype.name)


def _through(
    op: str, settings: Mapping[str, Any], reference: Replayer, own: Array, other: Array
) -> tuple[Floats, Floats]:
    call = Call(op=op, inputs={"in": own}, settings=settings, dtype=own.dtype.name)
    found = reference.gradient(call, other, "in")
    if found is None:
        raise ValueError(f"the reference does not know the gradient of {op}")
    return found.value, found.spread


def _alone(
    op: str, settings: Mapping[str, Any], reference: Replayer, own: Array, other: Array
) -> tuple[Floats, Floats]:
    return _through(op, settings, reference, own, np.ones_like(own))
