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
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tracediff.events import Event
from tracediff.trace.samples import place_of
from tracediff.trace.summary import FINGERPRINT_FIELDS, SKETCHES

Marks = NDArray[np.float64]

OWN: Final = 2
"""Marks that every event has."""

FOLDED: Final = 4
"""Marks from a sketch."""

_LEFT_OUT: Final = frozenset({"environment", "rng"})
"""Stages that differ between runs that compute the same."""

_NAN, _INF, _ABS_MEAN, _L2 = (
    FINGERPRINT_FIELDS.index(name) for name in ("nan", "inf", "abs_mean", "l2")
)
_TINY: Final = 2.0**-1022
_NOT_FINITE: Final = 2048.0


def marked(events: Iterable[Event]) -> list[Event]:
    """The events that have marks, in the order of their marks: not those of rendered samples."""
    return [
        event
        for event in events
        if (phase := event.site.phase) not in _LEFT_OUT
        and (phase != "rendering" or place_of(event) is None)
    ]


def width(event: Event) -> int:
    """How many marks an event has."""
    return OWN + (FOLDED if _has_sketch(event) else 0)


def structure(events: Iterable[Event], samples: bytes = b"") -> str:
    """Digest of what the marks of a step belong to; marks of equal structures can be summed.

    Args:
        samples: Root of the rendered samples, so that only steps of equal samples are alike.
    """
    chosen = marked(events)
    names: tuple[tuple[object, ...], ...] = tuple(
        [
            (e.site.phase, e.site.path, e.site.call, e.site.port)
            + ((e.shard,) if e.shard else ())  # marks of different parts are not alike
            for e in chosen
        ]
    )
    return _structure(names, tuple(map(width, chosen)), samples)


@lru_cache(maxsize=8)
def _structure(names: tuple[tuple[object, ...], ...], widths: tuple[int, ...], rest: bytes) -> str:
    """The same in most steps."""
    text = f"({list(names)}, {list(widths)})".encode("utf-8", "backslashreplace")
    if max(widths, default=OWN) > OWN:  # marks of sketches of another definition are not alike
        text += b"%d" % SKETCHES
    return xxhash.xxh3_128_hexdigest(text + rest)


def marks(events: Iterable[Event]) -> Marks:
    """The marks of a step's events, one after the other: float64."""
    chosen = marked(events)
    widths = list(map(width, chosen))
    starts = [0, *accumulate(widths)]
    found = np.zeros(starts[-1])
    measured = [i for i, event in enumerate(chosen) if event.fingerprint]
    if measured:
        places = np.array([starts[i] for i in measured])[:, None] + np.arange(OWN)
        found[places] = _of_tensors([chosen[i].fingerprint for i in measured])
    for event, start, held in zip(chosen, starts, widths, strict=False):
        if not event.fingerprint:
            found[start] = _of_value(event)
        elif held > OWN:
            found[start + OWN : start + held] = _folded(event)
    return found


def sign(step: int) -> float:
    """The sign of a step in sums, the same in every run."""
    return 1.0 if xxhash.xxh3_64_intdigest(f"sign {step}".encode()) & 1 else -1.0


def _of_tensors(fingerprints: list[tuple[float, ...]]) -> Marks:
    """The two own marks of each: shape (tensors, 2)."""
    table = np.array([(f[_L2], f[_ABS_MEAN], f[_NAN] + f[_INF]) for f in fingerprints])
    sizes = np.abs(table[:, :OWN])
    with np.errstate(invalid="ignore"):
        logs: Marks = np.where(np.isfinite(sizes), np.log2(sizes + _TINY), _NOT_FINITE)
    logs[:, 0] += table[:, OWN]
    return logs


def _of_value(event: Event) -> float:
    if event.kind in ("setting", "scalar"):
        return _number(event.value)
    return int.from_bytes(event.digest[:6], "little") / 2**48


def _folded(event: Event) -> list[float]:
    sketch = event.sketch
    norm = event.fingerprint[_L2] if event.fingerprint else 0.0
    if sketch is None or not norm or not math.isfinite(norm):
        return [0.0] * FOLDED
    folded: list[float] = (sketch.reshape(-1, FOLDED).sum(axis=0) / norm).tolist()
    return folded


def _has_sketch(event: Event) -> bool:
    return event.site.phase == "optimizer" and event.sketch is not None


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
