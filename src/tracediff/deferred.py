"""Values that are computed after they were recorded, many at once.

A lazy framework takes far longer to compute a hundred small arrays one by one than together.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

LARGEST_WAIT: Final = 4 << 20
"""Bytes that may wait: what waits is kept in memory, and large arrays gain nothing by it."""
_SMALL: Final = 1 << 12
"""Bytes of an array that is copied rather than have others computed before their time."""

Recorded = TypeVar("Recorded")


@dataclass(slots=True)
class Deferred:
    """An array of a framework that nothing will alter, and that is not computed yet."""

    array: Any
    nbytes: int


class Waiting(Generic[Recorded]):
    """Values that are recorded and not written, in the order in which they came.

    Attributes:
        read: Computes and reads arrays of the framework: NumPy arrays, or what `Tape.emit` takes in
            their place; None for one that has no values.
        values: Those that wait.
        limit: Bytes that may wait.
    """

    def __init__(self) -> None:
        self.read: Callable[[list[Any]], Sequence[Any]] = list
        self.values: deque[tuple[Any, Recorded]] = deque()
        self.limit = LARGEST_WAIT
        self._bytes = 0
        self._thread = 0

    def __bool__(self) -> bool:
        return bool(self.values)

    def must_wait(self, value: Any) -> bool:
        """Whether a value is to be kept back, and not written after those that wait.

        That of another thread is: arrays are computed by the thread that works with them.
        """
        if isinstance(value, Deferred):
            return True
        if not self.values:
            return False
        return getattr(value, "nbytes", 0) <= _SMALL or threading.get_ident() != self._thread

    def add(self, value: Any, recorded: Recorded) -> bool:
        """Keeps a value back; returns whether all are to be written now."""
        if not self.values:
            self._thread = threading.get_ident()
        if isinstance(value, Deferred):
            self._bytes += value.nbytes
        else:
            value = deepcopy(value)  # it may be a view of memory that changes
        self.values.append((value, recorded))
        return self._bytes > self.limit

    def take(self) -> Iterator[tuple[Any, Recorded]]:
        """The values as they are to be written; each waits until it is taken."""
        if not self.values:
            return
        arrays = iter(self.read([v.array for v, _ in self.values if isinstance(v, Deferred)]))
        self.values = deque(
            (next(arrays) if isinstance(value, Deferred) else value, recorded)
            for value, recorded in self.values
        )
        self._bytes = 0
        while self.values:
            yield self.values.popleft()
