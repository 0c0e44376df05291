"""The values of a pair: its payloads in one layout, or what is known of them without."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.compare.figures import Figures
from tracediff.errors import TraceError
from tracediff.events import Event, Pair
from tracediff.trace import Trace
from tracediff.trace.summary import FINGERPRINT_FIELDS, SHORT_SKETCH, sketched_distance
from tracediff.verdict import ErrorFigures

_L2: Final = FINGERPRINT_FIELDS.index("l2")
_ABS_MEAN: Final = FINGERPRINT_FIELDS.index("abs_mean")


def read_pair(traces: tuple[Trace, Trace], pair: Pair) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Both payloads in the baseline's layout, or None where a side kept none."""
    if pair.baseline.payload is None or pair.target.payload is None:
        return None
    a, b = traces[0].array(pair.baseline), traces[1].array(pair.target)
    if np.void in (a.dtype.type, b.dtype.type):
        raise TraceError(f"{pair.baseline.site}: the payload's dtype is unknown")
    return a, b.T if pair.layout == "transposed" else b


def estimate(pair: Pair) -> Figures:
    """Error figures without the values: from sketches, or else from fingerprints."""
    a, b = pair.baseline, pair.target
    scale = norm(a) or norm(b) or 1.0
    if a.sketch is not None and b.sketch is not None and is_sketched(pair):
        distance = sketched_distance(a.sketch, b.sketch) / scale
    else:
        distance = abs(norm(a) - norm(b)) / scale
        if a.fingerprint and b.fingerprint and a.fingerprint[_ABS_MEAN]:
            change = abs(a.fingerprint[_ABS_MEAN] - b.fingerprint[_ABS_MEAN])
            distance = max(distance, change / a.fingerprint[_ABS_MEAN])
    nonfinite = 0
    if a.fingerprint and b.fingerprint:
        nonfinite = int(sum(abs(a.fingerprint[i] - b.fingerprint[i]) for i in (1, 2)))
    error = ErrorFigures(rel_l2=distance, max_ulp=None, differing=1.0, estimated=True)
    return Figures(error, nonfinite)


def is_sketched(pair: Pair) -> bool:
    """Whether the distance of a pair can be estimated. From fingerprints alone it is not: they
    give what it is at least, and miss an error in a random direction but for a fraction of
    1/sqrt(elements)."""
    events = pair.baseline, pair.target
    return pair.layout == "same" and all(event.sketch is not None for event in events)


def headroom(pair: Pair) -> float:
    """How much larger than its bound an estimated distance may be by chance: four standard
    deviations of an estimate from a short sketch, which that of the step before may be."""
    return 1 + 4 / math.sqrt(2 * SHORT_SKETCH) if is_sketched(pair) else 1.0


def norm(event: Event) -> float:
    """The Euclidean norm of a tensor, from its fingerprint; 0 where it has none."""
    return event.fingerprint[_L2] if event.fingerprint else 0.0


def is_float(event: Event) -> bool:
    """Whether an event is a tensor of floating-point numbers."""
    return event.dtype.startswith(("float", "bfloat", "complex"))
