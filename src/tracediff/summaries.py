"""What a recording keeps of each value, found once for each value of a step."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracediff.kernels import every, pack, packed
from tracediff.trace.summary import SKETCH_SIZE, digest, fingerprint, sketch, summary

SAMPLED: Final = 1 << 16
"""Bytes from which to take a digest costs more than to look at some of the elements."""
_ELEMENTS: Final = 8

_SKETCHES: Final = 64
"""For how many sketches memory is allocated at a time."""

LARGEST_SCRATCH: Final = 64 << 20
"""Bytes of the memory that is kept for copies of what does not lie in C order."""


class Summary(NamedTuple):
    """What is known of a value, see `trace.summary`; the sketch is a whole one.

    Attributes:
        statistics: The fingerprint as `kernels.packed`, of an array.
        sample: As `sample_of`, where that was asked for.
    """

    digest: bytes
    dtype: str = ""
    statistics: bytes = b""
    sketch: NDArray[np.float64] | None = None
    sample: bytes = b""


class Found(NamedTuple):
    """A tensor whose summary was found where it lies, and whose elements stay there.

    Attributes:
        summary: With a sketch.
    """

    shape: tuple[int, ...]
    summary: Summary


class Summaries:
    """Summarises arrays, each value once in a step and the one after it.

    Most values pass several ports unchanged, and frozen weights stay as they are. The digest is
    taken each time: memory can be written to in ways that no framework counts. Of a value that is
    expected to be new, all is found in one pass over the memory: steps are alike, so one is new
    where the step before had a new one.
    """

    def __init__(self, brief: bool, sampled: bool = False) -> None:
        """
        Args:
            brief: Whether fingerprints are, see `trace.summary.fingerprint`.
            sampled: Whether to keep samples.
        """
        self._brief = brief
        self._sampled = sampled
        self._known: dict[tuple[bytes, str], Summary] = {}
        self._known_before = self._known
        self._is_new: list[bool] = []
        self._was_new = iter(self._is_new)
        self._scratch = np.empty(0, np.uint8)
        self._rows: Iterator[NDArray[np.float64]] = iter(())

    def advance(self) -> None:
        """Begins the next step."""
        self._known_before, self._known = self._known, {}
        self._was_new, self._is_new = iter(self._is_new), []

    def of(self, array: NDArray[Any], sketched: bool, sampled: bool = True) -> Summary:
        """The summary of an array in C order, with its sketch if there is to be one.

        Args:
            sampled: Whether the value may come again in another shape, where samples are kept.
        """
        dtype, statistics, total = name_of(array.dtype), None, None
        if next(self._was_new, True):
            total = self._buckets() if sketched else None
            of_value, statistics = summary(array, brief=self._brief, buckets=total)
        else:
            of_value = digest(array)
        key = of_value, dtype
        known = self._known.get(key) or self._known_before.get(key)
        self._is_new.append(known is None)
        if known is None:
            statistics = statistics or packed(fingerprint(array, brief=self._brief))
            sample = sample_of(array) if sampled and self._sampled else b""
            known = Summary(of_value, dtype, statistics, total, sample)
        elif sampled and self._sampled and not known.sample and (sample := sample_of(array)):
            known = known._replace(sample=sample)
        if sketched and known.sketch is None:
            known = known._replace(sketch=sketch(array) if total is None else total)
        self._known[key] = known
        return known

    def _buckets(self) -> NDArray[np.float64]:
        """Memory for a sketch, which is allocated for many at a time: small pieces that are kept
        would lie scattered between the framework's tensors, and tear up the room that these leave.
        """
        row = next(self._rows, None)
        if row is None:
            self._rows = iter(np.empty((_SKETCHES, SKETCH_SIZE)))
            row = next(self._rows)
        return row

    def packed(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy in C order of an array that is not, once for all that is done with it.

        It lasts until the next one, in the same memory: new memory costs as much as copying.
        """
        if array.nbytes > LARGEST_SCRATCH:
            return np.ascontiguousarray(array)
        if array.nbytes > self._scratch.size:
            self._scratch = np.empty(max(array.nbytes, 1 << 20), np.uint8)
        copy = self._scratch[: array.nbytes].view(array.dtype).reshape(array.shape)
        pack(array, copy)
        return copy


def sample_of(array: NDArray[Any]) -> bytes:
    """Some elements of an array from all over it, in C order; of a small one none."""
    if array.nbytes < SAMPLED:
        return b""
    return every(array, array.size // _ELEMENTS | 1)  # odd: of all columns


def still(known: Summary | None, array: NDArray[Any]) -> Summary | None:
    """The summary, unless the array is small or seen to have another value than it is of."""
    return known if known and known.sample and known.sample == sample_of(array) else None


@functools.lru_cache
def name_of(dtype: np.dtype[Any]) -> str:
    """As `dtype.name`, which takes a microsecond to find."""
    return dtype.name
