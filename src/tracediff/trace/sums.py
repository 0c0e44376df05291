"""Marks of a step's values, small enough to be summed over a run and compared between stacks.

Two runs that differ by rounding have no digest in common. Their marks are as far apart as their
values are, and so are sums of marks over steps: with a random sign for each step, the squared
difference of two sums is on average the sum over the steps of squared differences. A range of
steps whose sums are close therefore holds no step that is far apart, whatever comes after it.

An event has two marks: of a tensor, the logarithms of its norm and of its mean absolute value,
which do not depend on layout; of a setting, what its numbers come to; of a text, its digest. An
optimizer's tensor with a sketch has four more, the sketch folded and divided by the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tracediff.events import Event, Site
from tracediff.trace.rows import Outline, Rows
from tracediff.trace.samples import place_at
from tracediff.trace.summary import FINGERPRINT_FIELDS, SKETCHES

Marks = NDArray[np.float64]

OWN: Final = 2
"""Marks that every event has."""

FOLDED: Final = 4
"""Marks from a sketch."""

_LEFT_OUT: Final = frozenset({"environment", "rng"})
"""Stages that differ between runs that compute the same."""

_COUNT, _NAN, _INF, _ABS_MEAN, _L2 = (
    FINGERPRINT_FIELDS.index(name) for name in ("count", "nan", "inf", "abs_mean", "l2")
)
_OWN: Final = np.arange(OWN)
_FOLDED: Final = np.arange(OWN, OWN + FOLDED)
_TINY: Final = 2.0**-1022
_NOT_FINITE: Final = 2048.0


def marked(events: Iterable[Event]) -> list[Event]:
    """The events that have marks, in the order of their marks."""
    return [event for event in events if _is_marked(event.site)]


def width(event: Event) -> int:
    """How many marks an event has."""
    return _width(event.site.phase, event.sketch is not None)


def _is_marked(site: Site) -> bool:
    """Whether an event has marks: those of rendered samples have none."""
    phase = site.phase
    return phase not in _LEFT_OUT and (phase != "rendering" or place_at(site) is None)


def _width(phase: str, is_sketched: bool) -> int:
    return OWN + (FOLDED if is_sketched and phase == "optimizer" else 0)


def marks(events: Iterable[Event]) -> Marks:
    """The marks of a step's events in their order, one after the other: float64."""
    rows = Rows.of_events(events)
    return Layout(rows.outline).marks(rows)


class Layout:
    """Where the marks of a step's values are: the same in all steps that have one outline."""

    def __init__(self, outline: Outline) -> None:
        of = outline.fields
        sites = zip(of.phase, of.path, of.call, of.port, strict=True)
        self._marked = [place for place, site in enumerate(sites) if _is_marked(Site(0, *site))]
        self._places = np.array(self._marked, np.intp)
        widths = [_width(of.phase[place], of.buckets[place] > 0) for place in self._marked]
        *starts, self._size = accumulate(widths, initial=0)
        self._starts = np.array(starts, np.intp)
        self._numbers = frozenset(
            place for place in self._marked if of.kind[place] in ("setting", "scalar")
        )
        self._folds = {}
        for size, places in outline.sketched.items():
            row_of = {place: row for row, place in enumerate(places.tolist())}
            chosen = [
                (row_of[place], start)
                for place, start, wide in zip(self._marked, starts, widths, strict=True)
                if wide > OWN and place in row_of
            ]
            if chosen:
                self._folds[size] = np.array(chosen, np.intp).T
        names = [
            (of.phase[place], of.path[place], of.call[place], of.port[place])
            + ((of.shard[place],) if of.shard[place] else ())  # other parts have other marks
            for place in self._marked
        ]
        self._text = f"({names}, {widths})".encode("utf-8", "backslashreplace")
        if max(widths, default=OWN) > OWN:  # marks of sketches of another definition are not alike
            self._text += b"%d" % SKETCHES

    def structure(self, samples: bytes = b"") -> str:
        """Digest of what the marks belong to; marks of equal structures can be summed.

        Args:
            samples: Root of the rendered samples, so that only steps of equal samples are alike.
        """
        return xxhash.xxh3_128_hexdigest(self._text + samples)

    def marks(self, rows: Rows) -> Marks:
        """The marks of a step's events, one after the other: float64."""
        found = np.zeros(self._size)
        of_marked = rows.statistics[self._places]
        is_measured = ~np.isnan(of_marked[:, _COUNT])
        found[self._starts[is_measured][:, None] + _OWN] = _of_tensors(of_marked[is_measured])
        if not is_measured.all():
            for place, start, known in zip(self._marked, self._starts, is_measured, strict=True):
                if not known:
                    found[start] = self._of_value(rows, place)
        for size, (chosen, starts) in self._folds.items():
            norms = rows.statistics[rows.outline.sketched[size][chosen], _L2]
            sketches = rows.sketches[size][chosen]
            found[starts[:, None] + _FOLDED] = _of_sketches(sketches, norms)
        return found

    def _of_value(self, rows: Rows, place: int) -> float:
        if place in self._numbers:
            return _number(rows.values[place])
        return int.from_bytes(rows.digests[place][:6], "little") / 2**48


def sign(step: int) -> float:
    """The sign of a step in sums, the same in every run."""
    return 1.0 if xxhash.xxh3_64_intdigest(f"sign {step}".encode()) & 1 else -1.0


def _of_tensors(statistics: NDArray[np.float64]) -> Marks:
    """The two own marks of each: shape (tensors, 2).

    Args:
        statistics: Shape (tensors, statistics).
    """
    sizes = np.abs(statistics[:, [_L2, _ABS_MEAN]])
    with np.errstate(invalid="ignore"):
        logs: Marks = np.where(np.isfinite(sizes), np.log2(sizes + _TINY), _NOT_FINITE)
    logs[:, 0] += statistics[:, _NAN] + statistics[:, _INF]
    return logs


def _of_sketches(sketches: NDArray[np.float64], norms: NDArray[np.float64]) -> Marks:
    """The further marks of each: shape (sketches, 4).

    Args:
        norms: Of what the sketches were made of; NaN where that is not known.
    """
    is_usable = np.isfinite(norms) & (norms != 0)
    folded = sketches.reshape(len(sketches), -1, FOLDED).sum(axis=1)
    marks: Marks = np.where(is_usable, folded.T / np.where(is_usable, norms, 1), 0.0).T
    return marks


def _log(value: float) -> float:
    return math.log2(abs(value) + _TINY) if math.isfinite(value) else _NOT_FINITE


def _number(value: Any) -> float:
    """What a setting comes to: every relative change of a number shows, and types do not. What is
    off (zero, false, none) comes to nothing: the other stack need not have such a switch."""
    if isinstance(value, Mapping):
        items = ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        items = ((str(key), item) for key, item in enumerate(value))
    elif isinstance(value, bool | int | float):
        return math.copysign(_log(value) + 1024, value) / 1024 if value else 0.0
    else:
        return _weight(str(value)) if value else 0.0
    return sum(_weight(key) * _number(item) for key, item in items)


def _weight(key: str) -> float:
    return 1 + xxhash.xxh3_64_intdigest(key.encode("utf-8", "replace")) / 2**64
