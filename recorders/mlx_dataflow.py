"""Which event holds the value of an array: data flow through Python objects, within one step."""

from __future__ import annotations

import weakref
from typing import Any

import mlx.core as mx
from numpy.typing import NDArray

from tracediff.trace.summary import digest

Value = tuple[bytes, str, tuple[int, ...]]
"""Digest, dtype and shape."""


class Arrays:
    """Knows arrays by their Python object.

    Where a transformation makes new objects of them (`checkpoint`, custom functions), they are
    known by their values.
    """

    def __init__(self) -> None:
        self._orders: dict[int, tuple[weakref.ref[mx.array], int]] = {}
        self._values: dict[Value, int] = {}
        self._made: dict[tuple[str, Value], int] = {}

    def clear(self) -> None:
        self._orders.clear()
        self._values.clear()
        self._made.clear()

    def order(self, array: mx.array) -> int | None:
        """Order of the event with the array's value."""
        reference, order = self._orders.get(id(array), (None, None))
        return order if reference is not None and reference() is array else None

    def hold(self, array: mx.array, order: int, values: NDArray[Any] | None = None) -> None:
        """Says that an event has the array's value."""
        self._orders[id(array)] = weakref.ref(array), order
        if values is not None and _tells(values):
            self._values[_value(values)] = order

    def equal(self, values: NDArray[Any]) -> int | None:
        """The latest event with the same value, unless it is one that many arrays have."""
        return self._values.get(_value(values)) if _tells(values) else None

    def make(self, operation: str, values: NDArray[Any], order: int) -> None:
        """Remembers what an operation made, for when a checkpoint repeats it."""
        self._made[operation, _value(values)] = order

    def made(self, operation: str, values: NDArray[Any]) -> int | None:
        """The event of an operation of this name that had this very result."""
        return self._made.get((operation, _value(values)))


def _value(values: NDArray[Any]) -> Value:
    return digest(values), values.dtype.name, values.shape


def _tells(values: NDArray[Any]) -> bool:
    """Whether a value is unlikely to be met twice by chance: not a mask, nor all zeros."""
    if values.dtype.kind in "biu" or values.size < 2:
        return False
    return bool((values != values.flat[0]).any())
