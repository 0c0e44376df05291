"""How a value came from others, where no module computed it: copied, summed, gated, attended to.

Nothing is known by name. Every value that the same code could have computed with (the data-flow
edges, on both sides) is tried in every relation; one that holds on a side within rounding, over
all elements that count, describes it. Two random tensors do not satisfy one by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection import attending
from tracediff.bisection.flow import Flow
from tracediff.bisection.relation import Attempt, Relation
from tracediff.compare.places import evenly
from tracediff.events import Event, Pair

Array = NDArray[Any]
View = tuple[Pair, tuple[Array, Array]]
"""A pair and both its arrays."""

Read = Callable[[int, Event, Event], Array]
_Operation = tuple[str, Mapping[str, Any], int, Sequence[tuple[View, ...]]]

_SAMPLE: Final = 256
"""Elements that a relation is tried on before all of them."""

_ENOUGH: Final = 1 << 16
"""Elements that are looked at where nothing looks wrong."""

_ACTIVATIONS: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("SiLU", {}),
    ("GELU", {"approximate": "tanh"}),
    ("GELU", {"approximate": "none"}),
)


def relations(attempt: Attempt, flow: Flow, read: Read) -> Iterator[Relation]:
    """Relations that hold for the pair of an attempt on at least one side, simple ones first.

    Args:
        read: Given the side, an event, and the one that is computed from it: the value.
    """
    if not attempt.values[0].ndim:
        return  # a single number is anything
    events = attempt.pair.baseline, attempt.pair.target
    sources = [
        (source, (read(0, source.baseline, events[0]), read(1, source.target, events[1])))
        for source in flow.sources(attempt.pair)
    ]
    yield from _between_elements(attempt, sources)
    masks = flow.masks(attempt.pair)
    a, b = (
        None if mask is None else read(which, mask, event)
        for which, (mask, event) in enumerate(zip(masks, events, strict=True))
    )
    of_masks = flow.of(masks[0]) if masks[0] and masks[1] else None
    further = {"mask": of_masks} if of_masks else {}
    for relation in attending.relations(attempt, sources, (a, b)):
        yield replace(relation, sources={**relation.sources, **further})


def _between_elements(attempt: Attempt, sources: Sequence[View]) -> Iterator[Relation]:
    shape = attempt.values[0].shape
    views: list[View] = []
    for source, arrays in sources:
        a, b = (_laid_out(array, shape) for array in arrays)
        if a is not None and b is not None:
            views.append((source, (a, b)))
    places = _sample(attempt)
    if not places[0].size:
        return
    few, rows = attempt.part(places), _rows(attempt)
    whole = attempt if rows is ... else attempt.part(rows)
    for op, settings, rank, choices in _plan(views):
        for choice in choices:
            if _tried(few, op, settings, rank, choice, places) is None:
                continue
            found = _tried(whole, op, settings, rank, choice, rows)
            if found is not None:
                yield found


def _tried(
    attempt: Attempt,
    op: str,
    settings: Mapping[str, Any],
    rank: int,
    choice: tuple[View, ...],
    places: Any,
) -> Relation | None:
    sources: dict[str, Pair] = {}
    inputs: tuple[dict[str, Array], dict[str, Array]] = ({}, {})
    for port, (source, arrays) in zip(("in", "other"), choice, strict=False):
        sources[port] = source
        for given, array in zip(inputs, arrays, strict=True):
            given[port] = array[places]
    return attempt.holds(op, settings, sources, inputs, rank)


def _plan(views: Sequence[View]) -> Iterator[_Operation]:
    """Operations, their settings and ranks, and what each is tried on."""
    one = [(view,) for view in views]
    yield "copy", {}, 0, one
    yield "add", {}, 0, list(combinations(views, 2))
    yield "multiply", {}, 0, list(combinations(views, 2))
    for name, settings in _ACTIVATIONS:
        yield name, settings, 1, one
    for name, settings in _ACTIVATIONS:
        yield f"gated {name}", settings, 1, list(permutations(views, 2))


def _sample(attempt: Attempt) -> tuple[NDArray[np.intp], ...]:
    """Indices of a few elements that count, spread over all of them."""
    shape, counts = attempt.values[0].shape, attempt.counts
    if counts is None:
        places = evenly(math.prod(shape), _SAMPLE)
    else:
        places = np.flatnonzero(np.broadcast_to(counts, shape))
        places = places[evenly(places.size, _SAMPLE)]
    return np.unravel_index(places, shape)


def _rows(attempt: Attempt) -> Any:
    """Index of all elements, or of rows of those that count where a part of them will do."""
    shape, counts = attempt.values[0].shape, attempt.counts
    if not attempt.spot or math.prod(shape) <= _ENOUGH:
        return ...
    rows = np.arange(math.prod(shape[:-1]))
    if counts is not None:
        rows = np.flatnonzero(np.broadcast_to(counts, shape).all(axis=-1))
    if not rows.size:
        return ...
    chosen = rows[evenly(rows.size, max(1, _ENOUGH // shape[-1]))]
    return np.unravel_index(chosen, shape[:-1])


def _laid_out(array: Array, shape: tuple[int, ...]) -> Array | None:
    """The array in this shape; heads may be split off, and moved before the sequence."""
    if array.shape == shape:
        return array
    if array.size != math.prod(shape) or len(shape) != 4:
        return None
    batch, first, second, last = shape
    if array.shape == (batch, first, second * last):
        return array.reshape(shape)
    if array.shape in ((batch, second, first * last), (batch, second, first, last)):
        return array.reshape(batch, second, first, last).swapaxes(1, 2)
    return None
