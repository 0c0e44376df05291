"""How a value was made of others between modules, and by what its gradient is multiplied for them.

Recognised on a few rows: a sum, a product, an activation, and a product with one factor activated
(Shazeer, "GLU variants improve transformer", 2020). Rounding allows a few units of the stored
dtype, and random values do not fit by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.compare.figures import unit_roundoff, widened
from tracediff.compare.places import evenly
from tracediff.replaying import Call, Floats, Replayer

Array = NDArray[Any]
Slope = Callable[[Array, Array], tuple[Floats, Floats]]
"""Given both values: the factor that the gradient of their combination gets, and its error."""

_TINY: Final = float(np.finfo(np.float32).tiny)

_PROBE: Final = 16
"""Elements that are tried before the others."""

_ACTIVATIONS: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("SiLU", {}),
    ("GELU", {"approximate": "tanh"}),
    ("GELU", {"approximate": "none"}),
)


class Part:
    """A value, or a few rows of it, with its activations, each computed when first asked for."""

    def __init__(self, array: Array, reference: Replayer) -> None:
        self.wide: Floats = widened(array)
        self.array = array
        self._reference = reference
        self._activated: dict[int, tuple[Floats, Floats]] = {}

    def activated(self, which: int) -> tuple[Floats, Floats]:
        """By one of `_ACTIVATIONS`, see `_activated`."""
        if which not in self._activated:
            found = _activated(*_ACTIVATIONS[which], self._reference, self.array)
            self._activated[which] = found
        return self._activated[which]

    @cached_property
    def probe(self) -> Part:
        """A few of the elements: what does not fit shows on nearly any."""
        flat = self.array.reshape(-1)
        return Part(flat[evenly(flat.size, _PROBE)], self._reference)


_Made = Callable[[Part, Part], tuple[Floats, Floats]]
"""Given two parts: what is made of them, and the size of its rounding errors."""


def of_two(whole: Part, own: Part, other: Part, reference: Replayer) -> Iterator[Slope]:
    """How `whole` can be made of two values, with respect to `own`, activations left out."""
    if _fits(whole, own, other, _sum):
        yield lambda a, b: (np.ones(a.shape), np.zeros(a.shape))
    if _fits(whole, own, other, _product):
        yield lambda a, b: (widened(b), np.zeros(a.shape))
    for which, (op, settings) in enumerate(_ACTIVATIONS):
        if _fits(whole, other, own, partial(_gated, which)):
            yield partial(_by_activated, op, settings, reference)


def of_activated(whole: Part, own: Part, other: Part, reference: Replayer) -> Iterator[Slope]:
    """How `whole` can be made of an activation of `own`, alone or times `other`."""
    for which, (op, settings) in enumerate(_ACTIVATIONS):
        if _fits(whole, own, other, partial(_activation, which)):
            yield partial(_alone, op, settings, reference)
        if _fits(whole, own, other, partial(_gated, which)):
            yield partial(_through, op, settings, reference)


def _sum(own: Part, other: Part) -> tuple[Floats, Floats]:
    return own.wide + other.wide, np.abs(own.wide) + np.abs(other.wide)


def _product(own: Part, other: Part) -> tuple[Floats, Floats]:
    value = own.wide * other.wide
    return value, np.abs(value)


def _activation(which: int, own: Part, other: Part) -> tuple[Floats, Floats]:
    return own.activated(which)


def _gated(which: int, own: Part, other: Part) -> tuple[Floats, Floats]:
    value, scale = own.activated(which)
    return value * other.wide, scale * np.abs(other.wide)


def _fits(whole: Part, own: Part, other: Part, made: _Made) -> bool:
    """Whether `whole` is what is made of two parts. On single elements, functions may round
    otherwise than on many."""
    if not _matches(whole.probe, *made(own.probe, other.probe), slack=2.0):
        return False
    return _matches(whole, *made(own, other))


def _matches(whole: Part, value: Floats, scale: Floats, slack: float = 1.0) -> bool:
    roundoff = 4 * unit_roundoff(whole.array.dtype.name) * slack
    return bool((np.abs(whole.wide - value) <= roundoff * scale + _TINY).all())


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
