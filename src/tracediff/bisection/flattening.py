"""Values that one stack keeps as (batch, sequence, ...) and the other as (tokens, ...).

Which token is which row is known where the two leading sizes are those of a batch: a router or an
expert is given the tokens of all rows, one after the other.
"""

from __future__ import annotations

import math
from functools import partial

from tracediff.bisection.views import Common, reshaped, viewed
from tracediff.events import Event, Pair
from tracediff.trace import Trace

_PHASES = ("forward", "backward")


def applied(traces: tuple[Trace, Trace], common: Common) -> Common:
    """The step with the target's values in the baseline's shape where one side flattens tokens."""
    batches: set[tuple[int, ...]] = {
        event.shape
        for event in common.events[0]
        if event.site.phase == "rendering" and event.kind == "ids" and len(event.shape) == 2
    }
    views: dict[int, Event] = {}
    for pair in common.alignment.pairs:
        if _is_flattened(pair, batches):
            take = partial(reshaped, shape=pair.baseline.shape)
            views[id(pair.target)] = viewed(traces[1], pair.target, take)
    return common.replaced(({}, views)) if views else common


def _is_flattened(pair: Pair, batches: set[tuple[int, ...]]) -> bool:
    a, b = pair.baseline, pair.target
    if a.site.phase not in _PHASES or a.shape == b.shape or b.payload is None:
        return False
    whole, flat = sorted((a.shape, b.shape), key=len, reverse=True)
    return whole[:2] in batches and flat == (math.prod(whole[:2]), *whole[2:])
