"""What a recording keeps of each value, found once for each value of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracediff.kernels import every, native_memo, pack, packed
from tracediff.trace.summary import DETAIL_LIMIT, digest, fingerprint, sketch

SAMPLED: Final = 1 << 16
"""Bytes from which to take a digest costs more than to look at some of the elements."""
_ELEMENTS: Final = 8

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
    taken each time: memory can be written to in ways that no framework counts.

    Attributes:
        of: As `_Known.of`, which it is where the C code is not in use.
    """

    of: Callable[[NDArray[Any], bool], Summary]

    def __init__(self, brief: bool, sampled: bool = False) -> None:
        """
        Args:
            brief: Whether fingerprints are, see `trace.summary.fingerprint`.
            sampled: Whether to keep samples.
        """
        self._scratch = np.empty(0, np.uint8)
        known = _Known(brief, sampled)
        self.of = known.of
        self._known: list[Any] = [known]
        self._memo: Any = None
        if (memo := native_memo()) is not None:
            limit = -1 if brief else DETAIL_LIMIT
            self._memo = memo(Summary, digest, name_of, completed, known.of, limit, sampled)
            self.of = self._memo.of
            self._known.append(self._memo)

    def adder(
        self, kept: dict[Any, Any], emitted: dict[int, Summary], events: list[Any]
    ) -> Callable[..., bool]:
        """What `StepValues.add` does with the values that are nearly all, in C; see there.

        Args:
            kept, emitted, events: Of `StepValues`: what is kept of a value, summaries and events.

        Returns:
            A function of the arguments of `StepValues.add`, which says whether it did it: never
            where the C code is not in use.
        """
        if self._memo is None:
            return lambda *_: False
        self._memo.attach(kept, emitted, events)
        add: Callable[..., bool] = self._memo.add
        return add

    def advance(self) -> None:
        """Begins the next step."""
        for known in self._known:
            known.advance()

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


class _Known:
    """What was found of the values of a step and of the one before, of any array.

    The C code (`kernels/native/memo.c`) does the same for nearly all, in fewer passes over them.
    """

    def __init__(self, brief: bool, sampled: bool) -> None:
        self._brief = brief
        self._sampled = sampled
        self._now: dict[tuple[bytes, str], Summary] = {}
        self._before = self._now

    def advance(self) -> None:
        self._before, self._now = self._now, {}

    def of(self, array: NDArray[Any], sketched: bool) -> Summary:
        """The summary of an array, with its sketch if there is to be one."""
        array = np.ascontiguousarray(array)
        key = digest(array), name_of(array.dtype)
        known = self._now.get(key) or self._before.get(key)
        known = known or Summary(*key, packed(fingerprint(array, brief=self._brief)))
        known = completed(known, array, sketched, self._sampled)
        self._now[key] = known
        return known


def completed(known: Summary, array: NDArray[Any], sketched: bool, sampled: bool) -> Summary:
    """A summary with what is asked for and was not before."""
    if sampled and not known.sample and (sample := sample_of(array)):
        known = known._replace(sample=sample)
    if sketched and known.sketch is None:
        known = known._replace(sketch=sketch(array))
    return known


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
