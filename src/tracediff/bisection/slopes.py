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


def of_two(whole: Array, own: Array, other: Array, reference: Replayer) -> Iterator[Slope]:
    """How `whole` can be made of two values, with respect to `own`, activations left out."""
    x, y = own.astype(np.float64), other.astype(np.float64)
    if _matches(whole, x + y, np.abs(x) + np.abs(y)):
        yield lambda a, b: (np.ones(a.shape), np.zeros(a.shape))
    if _matches(whole, x * y, np.abs(x * y)):
        yield lambda a, b: (b.astype(np.float64), np.zeros(a.shape))
    for op, settings in _ACTIVATIONS:
        value, scale = _activated(op, settings, reference, other)
        if _matches(whole, x * value, np.abs(x) * scale):
            yield partial(_by_activated, op, settings, reference)


def of_activated(whole: Array, own: Array, other: Array, reference: Replayer) -> Iterator[Slope]:
    """How `whole` can be made of an activation of `own`, alone or times `other`."""
    y = other.astype(np.float64)
    for op, settings in _ACTIVATIONS:
        value, scale = _activated(op, settings, reference, own)
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
