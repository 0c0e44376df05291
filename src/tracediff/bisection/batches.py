"""Batches that hold the same rows, padded to another length or in another order.

Nothing that a model computes of a token depends on how far its row is padded or where in the batch
it stands. Both sides are therefore brought to the same rows, cut to the columns that both have, and
everything computed from them is compared there. Rows count as the same by their tokens alone: one
that was truncated or lost a token has no like, and nothing is cropped. Padding on another side is
no such case: it moves every token to another position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.views import Common, Take, viewed
from tracediff.events import Event, Pair
from tracediff.trace import Trace

UNKNOWN: Final = "padded to another length: no axis of it is known to be the sequence"
UNKEPT: Final = "padded to another length, and no payload was kept to crop"

_IGNORED: Final = -100
_PHASES: Final = ("rendering", "forward", "loss", "backward", "trajectory")
_Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Where one side keeps the rows that both have.

    Attributes:
        order: This side's row for each row of the baseline.
        length: Columns that this side's batch has.
        common: Columns that are compared.
        left: Whether they are the last ones, since it is on the left that rows are padded.
    """

    order: _Array
    length: int
    common: int
    left: bool = False

    @property
    def is_ordered(self) -> bool:
        return bool((self.order == np.arange(self.order.size)).all())

    @property
    def is_whole(self) -> bool:
        """Whether they are the batch as it is."""
        return self.is_ordered and self.common == self.length

    def take(self, event: Event) -> Take | None:
        """What brings a value computed from the batch to these rows; None where nothing does."""
        shape, rows = event.shape, self.order.size
        for shift in (0, 1):  # a loss function is given one position less
            length = self.length - shift
            if axes := _sequence_axes(event, length, (1, rows)):
                return partial(self._cut, axes=axes, shift=shift)
            if shape and shape[0] == rows * length:
                return partial(self._cut_flat, shift=shift)
            if rows > 1 and shape == (length,):
                return partial(self._cut, axes=(0,), shift=shift)
        return self._in_order if shape and shape[0] == rows > 1 else None

    def _in_order(self, array: _Array) -> _Array:
        return array if self.is_ordered else np.take(array, self.order, axis=0)

    def _cut(self, array: _Array, axes: Sequence[int], shift: int) -> _Array:
        kept = slice(self.length - self.common, None) if self.left else slice(self.common - shift)
        for axis in axes:
            array = np.moveaxis(np.moveaxis(array, axis, 0)[kept], 0, axis)
        has_rows = 0 not in axes and array.shape[0] == self.order.size
        return self._in_order(array) if has_rows else array

    def _cut_flat(self, array: _Array, shift: int) -> _Array:
        apart = array.reshape(self.order.size, self.length - shift, *array.shape[1:])
        taken = self._cut(apart, (1,), shift)
        flat: _Array = taken.reshape(-1, *array.shape[1:])
        return flat


def _sequence_axes(event: Event, length: int, rows: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a value that run along the sequence."""
    shape = event.shape
    if len(shape) < 2 or shape[0] not in rows:
        return ()
    if "sequence" in event.dims:
        axis = event.dims.index("sequence")
        return (axis,) if shape[axis] == length else ()
    if len(shape) == 4:  # (batch, heads, queries, keys) or (batch, heads, sequence, head_dim)
        return tuple(axis for axis in (2, 3) if shape[axis] == length)
    return (1,) if shape[1] == length else ()


def same_rows(
    ids: tuple[_Array, _Array],
    masks: tuple[_Array | None, _Array | None],
    labels: tuple[_Array | None, _Array | None] = (None, None),
) -> tuple[Rows, Rows] | None:
    """How two batches hold the same rows; None where they do not, or hold them alike already.

    Args:
        ids: Token IDs of baseline and target, (batch, sequence) each.
        masks: Attention masks of these shapes, non-zero at tokens. Without one, a row is a row of
            the other side with a single token ID before or after it; where neither side has one,
            the narrower batch is taken to hold no padding.
        labels: Labels of these shapes; outside of the tokens they have to be ignored.
    """
    if any(x.ndim != 2 for x in ids) or ids[0].shape[0] != ids[1].shape[0]:
        return None
    if ids[0].shape == ids[1].shape and np.array_equal(*ids):
        return None
    spans = _spans(ids, masks)
    if spans is None:
        return None
    if not all(_ignored_outside(x, span) for x, span in zip(labels, spans, strict=True)):
        return None
    strings = [_strings(x, span) for x, span in zip(ids, spans, strict=True)]
    order = _pairing(*strings)
    if order is None:
        return None
    common = min(x.shape[1] for x in ids)
    widths = [x.shape[1] for x in ids]
    left = _is_padded_left(spans, widths)
    if left is None:
        return None
    a = Rows(np.arange(order.size), widths[0], common, left)
    b = Rows(order, widths[1], common, left)
    return None if a.is_whole and b.is_whole else (a, b)


_Spans = NDArray[np.int64]
"""(batch, 2): first column of each row's tokens, and how many there are."""


def _spans(
    ids: tuple[_Array, _Array], masks: tuple[_Array | None, _Array | None]
) -> tuple[_Spans, _Spans] | None:
    known = [
        mask if mask is not None and mask.shape == x.shape else None
        for mask, x in zip(masks, ids, strict=True)
    ]
    if known[0] is None and known[1] is None:
        narrow = int(ids[1].shape[1] < ids[0].shape[1])
        known[narrow] = np.ones_like(ids[narrow])
    found = [None if m is None else _tokens(m.astype(bool)) for m in known]
    for side in (0, 1):
        if known[side] is None:
            found[side] = _search(ids[side], _strings(ids[1 - side], found[1 - side]))
    a, b = found
    return None if a is None or b is None else (a, b)


def _is_padded_left(spans: tuple[_Spans, _Spans], widths: Sequence[int]) -> bool | None:
    """The side on which both batches are padded; None where they are on different ones."""
    if all((span[:, 0] == 0).all() for span in spans):
        return False
    ends = zip(spans, widths, strict=True)
    return True if all((span.sum(axis=1) == width).all() for span, width in ends) else None


def _tokens(mask: NDArray[np.bool_]) -> _Spans | None:
    """Where a mask has the tokens of each row; None where they are not in one piece."""
    starts, counts = mask.argmax(axis=1), mask.sum(axis=1)
    inside = np.arange(mask.shape[1]) - starts[:, None]
    whole = (inside >= 0) & (inside < counts[:, None])
    return np.stack([starts, counts], axis=1) if np.array_equal(whole, mask) else None


def _strings(ids: _Array, spans: _Spans | None) -> list[bytes]:
    if spans is None:
        return []
    rows = zip(ids.astype(np.int64), spans, strict=True)
    return [row[start : start + count].tobytes() for row, (start, count) in rows]


def _search(ids: _Array, strings: Sequence[bytes]) -> _Spans | None:
    """Spans that hold the given rows in any order, with one and the same token ID outside."""
    wanted, found = Counter(strings), []
    pads: set[int] = set()
    for row in ids.astype(np.int64):
        for text in sorted(wanted, key=len, reverse=True):
            count = len(text) // row.itemsize
            starts = [s for s in (0, row.size - count) if row[s : s + count].tobytes() == text]
            if not wanted[text] or count > row.size or not starts:
                continue
            outside = {*row[: starts[0]].tolist(), *row[starts[0] + count :].tolist()}
            if len(pads | outside) <= 1:
                pads |= outside
                wanted[text] -= 1
                found.append((starts[0], count))
                break
        else:
            return None
    return np.array(found)


def _ignored_outside(labels: _Array | None, spans: _Spans) -> bool:
    """Whether the loss ignores whatever is no token, as far as labels were recorded."""
    if labels is None or labels.ndim != 2 or labels.shape[0] != spans.shape[0]:
        return True
    columns = np.arange(labels.shape[1])
    inside = (columns >= spans[:, :1]) & (columns < spans.sum(axis=1)[:, None])
    return bool((labels[~inside] == _IGNORED).all())


def _pairing(a: Sequence[bytes], b: Sequence[bytes]) -> _Array | None:
    """For each row of the baseline, the target's equal one, at the same place where it is there."""
    if Counter(a) != Counter(b):
        return None
    free = [j for j in range(len(b)) if a[j] != b[j]]
    order = np.arange(len(a))
    for i in [i for i in range(len(a)) if a[i] != b[i]]:
        match = next(j for j in free if b[j] == a[i])
        free.remove(match)
        order[i] = match
    return order


class Batches:
    """The batches of one step that hold the same rows in another form.

    Args:
        traces, events: Of both sides; without payloads of the batches nothing is brought together.
    """

    def __init__(self, traces: tuple[Trace, Trace], common: Common) -> None:
        self._traces = traces
        self._rows = {family: self._related(common, family) for family in ("batch", "eval_batch")}
        self._calls = [
            Counter(
                event.site.path
                for event in side
                if (event.site.phase, event.site.port) == ("forward", "out")
            )
            for side in common.events
        ]

        self._by_hand = [
            {
                (event.site.path, event.site.call)
                for event in side
                if event.site.port == "out" and event.attributes.get("reduction") == "none"
            }
            for side in common.events
        ]
        """Losses whose terms are masked later on: any label may stand at padding."""

    def applied(self, common: Common) -> Common:
        """The step with views of all that was computed from such batches."""
        if not any(rows for family in self._rows.values() for rows in family):
            return common
        views: tuple[dict[int, Event], dict[int, Event]] = ({}, {})
        for side, events in enumerate(common.events):
            for event in events:
                if (view := self._view(side, event)) is not None:
                    views[side][id(event)] = view
        result = common.replaced(views).apart(self._apart)
        result.notes += self._notes()
        return result

    def _related(self, common: Common, family: str) -> list[tuple[Rows, Rows] | None]:
        """For each batch of a family, how the sides hold its rows."""
        pairs = [
            pair
            for pair in common.alignment.pairs
            if pair.baseline.kind == "ids"
            and pair.baseline.site.path.startswith(f"{family}.")
            and pair.baseline.payload
            and pair.target.payload
        ]
        found = []
        for pair in sorted(pairs, key=lambda pair: pair.baseline.site.call):
            sides = pair.baseline, pair.target
            ids = [trace.array(e) for trace, e in zip(self._traces, sides, strict=True)]
            masks, labels = (
                [
                    self._of_batch(common, side, f"{family}.{name}", event.site.call)
                    for side, event in enumerate(sides)
                ]
                for name in ("attention_mask", "labels")
            )
            found.append(same_rows((ids[0], ids[1]), (masks[0], masks[1]), (labels[0], labels[1])))
        return found

    def _of_batch(self, common: Common, side: int, path: str, call: int) -> _Array | None:
        for event in common.events[side]:
            site = event.site
            if (site.phase, site.path, site.call) == ("rendering", path, call) and event.payload:
                return self._traces[side].array(event)
        return None

    def _rows_of(self, side: int, event: Event) -> tuple[Rows, Rows] | None:
        """How both sides hold the rows of the batch that a value was computed from."""
        site = event.site
        if site.phase not in _PHASES or site.port in ("param", "buffer", "grad"):
            return None
        if site.phase == "rendering" and "batch." not in site.path:
            return None
        evaluation = site.phase == "trajectory" or site.path.startswith("eval_batch.")
        related = self._rows["eval_batch" if evaluation else "batch"]
        if not related:
            return None
        calls = 1 if evaluation else self._calls[side].get(site.path, 1)
        per_batch = max(1, calls // len(related))
        return related[min(site.call // per_batch, len(related) - 1)]

    def _view(self, side: int, event: Event) -> Event | None:
        related = self._rows_of(side, event)
        if related is None or related[side].is_whole:
            return None
        if event.payload is None:
            return replace(event, sketch=None)  # it depends on the order of the rows
        take = related[side].take(event)
        trace = self._traces[side]
        if take is None:
            return None
        if event.kind == "labels" and (event.site.path, event.site.call) not in self._by_hand[side]:
            labels = trace.array(event)
            if not _cuts_padding(labels, take):
                return None
        view = viewed(trace, event, take)
        if not related[side].left or event.op != "RoPE":
            return view
        # Columns are positions, also those that padding takes.
        first = related[side].length - related[side].common
        return replace(view, attributes={**event.attributes, "offset": first})

    def _apart(self, pair: Pair) -> str | None:
        """Why a pair cannot be compared: it holds the padding, and nobody knows where."""
        related = self._rows_of(0, pair.baseline)
        a, b = pair.baseline, pair.target
        if related is None or not a.shape or a.kind == "labels":
            return None
        if a.payload is None or b.payload is None:
            return UNKEPT if related[0].length != related[1].length else None
        if a.shape == b.shape or len(a.shape) != len(b.shape):
            return None
        lengths = [rows.length for rows in related]
        by_length = all(
            x * lengths[1] == y * lengths[0]
            for x, y in zip(a.shape, b.shape, strict=True)
            if x != y
        )
        return UNKNOWN if by_length else None

    def _notes(self) -> Iterator[str]:
        for family, related in self._rows.items():
            for call, rows in enumerate(related):
                if rows is None:
                    continue
                name = f"{family} {call}"
                a, b = rows
                if not b.is_ordered:
                    yield (
                        f"order: {name} holds the same {b.order.size} rows in another order, "
                        "which a sum over the batch does not show; compared row by row"
                    )
                if a.length != b.length:
                    yield (
                        f"padding: {name} has {a.length} columns in the baseline and {b.length} "
                        f"in the target; compared over the {a.common} that both have"
                    )


def _cuts_padding(labels: _Array, take: Take) -> bool:
    """Whether labels that are left out are ignored: otherwise they are a difference to be told."""
    trained = np.count_nonzero(labels != _IGNORED)
    return bool(trained == np.count_nonzero(take(labels) != _IGNORED))
