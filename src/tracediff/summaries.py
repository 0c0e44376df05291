"""What a recording keeps of each value, found once for each value of a step."""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracediff.kernels import pack
from tracediff.trace.summary import digest, fingerprint, sketch

LARGEST_SCRATCH: Final = 64 << 20
"""Bytes of the memory that is kept for copies of what does not lie in C order."""


class Summary(NamedTuple):
    """What is known of a value, see `trace.summary`; the sketch is a whole one."""

    digest: bytes
    dtype: str = ""
    fingerprint: tuple[float, ...] = ()
    sketch: NDArray[np.float64] | None = None


class Summaries:
    """Summarises arrays, each value once in a step and the one after it.

    Most values pass several ports unchanged, and frozen weights stay as they are. The digest is
    taken each time: memory can be written to in ways that no framework counts.
    """

    def __init__(self, brief: bool) -> None:
        """
        Args:
            brief: Whether fingerprints are, see `trace.summary.fingerprint`.
        """
        self._brief = brief
        self._known: dict[tuple[bytes, str], Summary] = {}
        self._known_before = self._known
        self._scratch = np.empty(0, np.uint8)

    def advance(self) -> None:
        """Begins the next step."""
        self._known_before, self._known = self._known, {}

    def of(self, array: NDArray[Any], sketched: bool) -> Summary:
        """The summary of an array in C order, with its sketch if there is to be one."""
        of_value, dtype = digest(array), name_of(array.dtype)
        key = of_value, dtype
        known = self._known.get(key)
        if known is None:
            known = self._known_before.get(key)
            if known is None:
                known = Summary(of_value, dtype, fingerprint(array, brief=self._brief))
            self._known[key] = known
        if sketched and known.sketch is None:
            known = self._known[key] = known._replace(sketch=sketch(array))
        return known

    def packed(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array in C order, once for all that is done with it.

        A copy lasts until the next one, in the same memory: new memory costs as much as copying.
        """
        if array.flags.c_contiguous:
            return array
        if array.nbytes > LARGEST_SCRATCH:
            return np.ascontiguousarray(array)
        if array.nbytes > self._scratch.size:
            self._scratch = np.empty(max(array.nbytes, 1 << 20), np.uint8)
        copy = self._scratch[: array.nbytes].view(array.dtype).reshape(array.shape)
        pack(array, copy)
        return copy


@functools.lru_cache
def name_of(dtype: np.dtype[Any]) -> str:
    """As `dtype.name`, which takes a microsecond to find."""
    return dtype.name
