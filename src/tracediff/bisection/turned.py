"""Choices that rounding turned: the experts that a router takes, where scores nearly tie.

Integers are exact, but these follow from floats that are not: scores that are apart by rounding
choose otherwise where two of them are as close as that. Both choices are right, each for its own
side's scores, and what is computed from them may be as far apart as two experts are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.inheritance import Judged, Ledger
from tracediff.bisection.values import is_float, norm, read_pair
from tracediff.events import Event, Pair
from tracediff.trace import Trace
from tracediff.trace.summary import sketched_distance

_HEADROOM: Final = 2.0
"""More choices than expected that scores may turn that are known to be as far apart."""
_BOUND_HEADROOM: Final = 8.0
"""The same of scores of which only a bound is known."""
_FEW: Final = 4
"""Choices that may be turned however close the scores are; see `_expected`."""

_Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Turned:
    """Choices that went another way.

    Attributes:
        count: How many rows of scores; estimated, where the values were not kept.
        rows: Of how many.
        apart: Relative difference (L2) of the scores.
        margin: Largest difference of two scores that changed places; None where none were kept, or
            they are not all that counts.
    """

    count: int
    rows: int
    apart: float
    margin: float | None


class Choices:
    """The integers of a step that were chosen by scores."""

    def __init__(self, traces: tuple[Trace, Trace], pairs: Iterable[Pair], ledger: Ledger) -> None:
        self._traces = traces
        self._ledger = ledger
        self._scores: dict[int, Pair] = {}
        self._calls: dict[tuple[str, int], list[int]] = {}
        for pair in pairs:
            event = pair.baseline
            if event.site.phase == "forward" and is_float(event) and pair.layout == "same":
                self._scores[event.order] = pair
                self._calls.setdefault((event.site.path, event.site.call), []).append(event.order)
        self._found: dict[tuple[bytes, bytes], Turned] = {}

    def turned(self, pair: Pair) -> Turned | None:
        """What is known of integers that differ, if scores chose them that agree.

        None where no scores did, they do not agree themselves, a side has not chosen the largest
        ones, or more choices differ than rounding turns.
        """
        a, b = pair.baseline, pair.target
        if a.site.phase != "forward" or not _are_indices(a, b) or pair.layout != "same":
            return None
        same = self._found.get((a.digest, b.digest))
        if same is not None:
            return same  # handed on
        values, candidates = read_pair(self._traces, pair), [*self._candidates(a)]
        # Hidden states have the shape of scores, too, and are wider.
        candidates.sort(key=lambda each: each.baseline.shape[-1])
        if values is not None:
            seen = [*filter(None, (self._seen(values, each) for each in candidates))]
            found = next(filter(None, (each.by_size() for each in seen)), None)
            if found is None and seen:
                found = seen[0].by_count()
        else:
            found = self._estimated(pair, candidates[0]) if candidates else None
        if found is not None:
            self._found[a.digest, b.digest] = found
        return found

    def _candidates(self, event: Event) -> Iterator[Pair]:
        """Scores that agree, of the same call or among what the integers were computed from."""
        call = self._calls.get((event.site.path, event.site.call), ())
        for order in dict.fromkeys((*call, *event.inputs)):
            scores = self._scores.get(order)
            if scores is None or order >= event.order or not _choose(scores.baseline, event):
                continue
            if scores.baseline.shape == scores.target.shape and not (
                self._ledger.level(scores).tainted
            ):
                yield scores

    def _seen(self, chosen: tuple[_Array, _Array], scores: Pair) -> _Seen | None:
        """The choices of both sides, from the values; None where they are none among the scores."""
        read = read_pair(self._traces, scores)
        if read is None:
            return None
        a, b = (_rows(values.astype(np.float64), values.shape[-1]) for values in read)
        picked = [_picked(ids, each.shape) for ids, each in zip(chosen, (a, b), strict=True)]
        if picked[0] is None or picked[1] is None:
            return None
        return _Seen(a, b, picked[0], picked[1])

    def _estimated(self, pair: Pair, scores: Pair) -> Turned | None:
        """From sketches or norms: no more choices differ than scores that far apart may turn."""
        a, b = pair.baseline, pair.target
        options, rows = scores.baseline.shape[-1], math.prod(scores.baseline.shape[:-1])
        apart, headroom = self._apart(scores)
        if a.sketch is not None and b.sketch is not None:
            distance = sketched_distance(a.sketch, b.sketch)
            squares = distance * distance
        else:
            squares = abs(norm(a) * norm(a) - norm(b) * norm(b))
        # Two numbers below n, taken at random, differ by the root of (n^2 - 1) / 6.
        count = squares * 6 / max(1, options**2 - 1)
        if not count <= _FEW + headroom * _expected(apart, options, rows):  # NaN, too
            return None
        return Turned(max(1, min(rows, round(count))), rows, apart, None)

    def _apart(self, scores: Pair) -> tuple[float, float]:
        """How far scores are apart (L2, relative) by their sketches, or else may be by rounding,
        and the head-room that this takes."""
        a, b = scores.baseline, scores.target
        if a.sketch is None or b.sketch is None or not (size := norm(a)):
            return self._ledger.level(scores).carry, _BOUND_HEADROOM
        return sketched_distance(a.sketch, b.sketch) / size, _HEADROOM


class _Seen(NamedTuple):
    """Scores and what each side chose among them: shape (rows, options)."""

    a: _Array
    b: _Array
    picked_a: NDArray[np.bool_]
    picked_b: NDArray[np.bool_]

    @property
    def differ(self) -> NDArray[np.bool_]:
        """Rows that choose otherwise."""
        found: NDArray[np.bool_] = (self.picked_a != self.picked_b).any(axis=-1)
        return found

    @property
    def apart(self) -> float:
        return float(np.linalg.norm(self.a - self.b)) / (float(np.linalg.norm(self.a)) or 1.0)

    def by_size(self) -> Turned | None:
        """Where on each side the chosen scores are the largest."""
        if not (_are_largest(self.a, self.picked_a) and _are_largest(self.b, self.picked_b)):
            return None
        differ, margin = self.differ, 0.0
        if differ.any():
            left = np.where(self.picked_a & ~self.picked_b, self.a, -np.inf).max(axis=-1)
            came = np.where(self.picked_b & ~self.picked_a, self.a, np.inf).min(axis=-1)
            margin = float((left - came)[differ].max())
        return Turned(int(differ.sum()), len(differ), self.apart, margin)

    def by_count(self) -> Turned | None:
        """Where they are on neither, as of a router that adds a bias or takes the best groups of
        experts first, and no more choices differ than scores that far apart turn."""
        if _are_largest(self.a, self.picked_a) or _are_largest(self.b, self.picked_b):
            return None
        count, (rows, options) = int(self.differ.sum()), self.a.shape
        if count > _FEW + _HEADROOM * _expected(self.apart, options, rows):
            return None
        return Turned(count, rows, self.apart, None)


def told(judged: Iterable[Judged]) -> list[str]:
    """What was turned, in one sentence; none where nothing was."""
    found: Mapping[tuple[bytes, bytes], Judged] = {
        (j.event.digest, j.pair.target.digest): j for j in reversed([*judged]) if j.turned
    }
    if not found:
        return []
    first = min(found.values(), key=lambda each: each.place)
    turned = first.turned
    assert turned is not None
    how = "" if turned.margin is None else f", by a margin of at most {turned.margin:.1e}"
    about = "about " if turned.margin is None else ""
    return [
        f"rounding turned choices of {len(found)} values, first at {first.event.site}: {about}"
        f"{turned.count} of {turned.rows} choose otherwise among scores that are "
        f"{turned.apart:.1e} apart{how}; what is computed from them is held to its own inputs only"
    ]


def _are_indices(a: Event, b: Event) -> bool:
    return all(e.dtype.startswith(("int", "uint")) and e.shape for e in (a, b)) and (
        a.shape == b.shape
    )


def _choose(scores: Event, chosen: Event) -> bool:
    """Whether the shapes are those of scores and of what is chosen among them in each row."""
    shape, options = scores.shape[:-1], scores.shape[-1] if scores.shape else 0
    count = math.prod(chosen.shape) // max(1, math.prod(shape))
    return options > 1 and 0 < count < options and chosen.shape in (shape, (*shape, count))


def _expected(apart: float, options: int, rows: int) -> float:
    """How many choices scores that far apart may turn.

    The scores of a row lie about 1/n of their spread from the next one, with density n where they
    touch: a difference of `apart` turns the fraction n * apart.
    """
    return options * apart * rows


def _rows(values: _Array, width: int) -> _Array:
    rows: _Array = values.reshape(-1, width)
    return rows


def _picked(chosen: _Array, shape: Sequence[int]) -> NDArray[np.bool_] | None:
    """Which scores each row chooses; None where an index is out of range or comes twice."""
    rows, options = shape
    indices = chosen.reshape(rows, -1).astype(np.int64)
    if indices.size and not (indices.min() >= 0 and indices.max() < options):
        return None
    picked = np.zeros((rows, options), np.bool_)
    np.put_along_axis(picked, indices, True, axis=-1)
    return picked if int(picked.sum()) == indices.size else None


def _are_largest(scores: _Array, picked: NDArray[np.bool_]) -> bool:
    """Whether no score that was left is larger than one that was taken."""
    taken = np.where(picked, scores, np.inf).min(axis=-1)
    left = np.where(picked, -np.inf, scores).max(axis=-1)
    return bool((taken >= left).all())
