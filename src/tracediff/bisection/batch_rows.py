"""The rows of batches, followed from the first batch that differs on.

A difference in one batch does not say whether the sampler drew in another order, a record is
missing, or the batches are just cut elsewhere: the rows that come later do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.align.arrangement import Arrangement, arrangements
from tracediff.align.sequences import match
from tracediff.events import Event
from tracediff.trace import Trace
from tracediff.trace.summary import digest

_IDS: Final = ("input_ids", "inputs")
_MASKS: Final = ("attention_mask",)
_BATCHES: Final = 64
"""How many batches are read, at most, from the first one that differs on."""

_SAME: Final = 0.5
"""Share of rows that both sides must have for their order to mean anything."""

Row = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Finding:
    """What happened to the rows: `kind` and `pattern` as in a divergence."""

    kind: str
    pattern: str
    meaning: str
    detail: Mapping[str, Any] = field(default_factory=dict)


def find(traces: tuple[Trace, Trace], event: Event) -> Finding | None:
    """What happened to the rows of batches from the batch of an event on; None if nothing that a
    changed row would not explain as well.

    Args:
        event: A field of a batch that differs, of the baseline.
    """
    family = event.site.path.partition(".")[0]
    if family not in ("batch", "eval_batch") or event.site.phase != "rendering":
        return None
    batches = [list(islice(_batches(t, family, event), _BATCHES)) for t in traces]
    if not all(batches):
        return None
    rows = _without_padding(batches)
    sizes = tuple(len(side[0]) for side in batches)
    keys = [[row.tobytes() for row in side] for side in rows]
    shared = min(map(len, keys))
    if keys[0][:shared] == keys[1][:shared]:
        return _regrouped(sizes, shared)
    if packed := _packed(rows):
        return packed
    return _rearranged(traces, event, keys, rows)


def _batches(trace: Trace, family: str, start: Event) -> Iterator[list[Row]]:
    """The rows of each batch, from the step and call of an event on, without what a mask hides."""
    for step in trace.steps:
        if step < start.site.step:
            continue
        fields = {
            (event.site.path.partition(".")[2], event.site.call): event
            for event in trace.events(step, samples=False)
            if event.site.phase == "rendering" and event.site.path.startswith(f"{family}.")
        }
        for name, call in sorted(fields, key=lambda key: key[1]):
            if name in _IDS and (step > start.site.step or call >= start.site.call):
                ids = fields[name, call]
                if ids.payload is None or len(ids.shape) != 2:
                    return
                masks = (fields.get((mask, call)) for mask in _MASKS)
                mask = next((m for m in masks if m and m.payload and m.shape == ids.shape), None)
                values = trace.array(ids).astype(np.int64)
                seen = np.ones(ids.shape, bool) if mask is None else trace.array(mask).astype(bool)
                yield [row[kept] for row, kept in zip(values, seen, strict=True)]


def _without_padding(batches: Sequence[Sequence[Sequence[Row]]]) -> list[list[Row]]:
    """All rows of each side, without the values that fill rows up at either end.

    A value that some row repeats at its end is taken for filling, in all rows of both sides.
    """
    sides = [[row for batch in side for row in batch] for side in batches]
    ends = [(row[-1], row[0], row) for side in sides for row in side if len(row) > 1]
    right = {int(last) for last, _, row in ends if row[-2] == last}
    left = {int(first) for _, first, row in ends if row[1] == first}
    return [[_stripped(row, left, right) for row in side] for side in sides]


def _stripped(row: Row, left: set[int], right: set[int]) -> Row:
    start, stop = 0, len(row)
    while stop and int(row[stop - 1]) in right:
        stop -= 1
    while start < stop and int(row[start]) in left:
        start += 1
    return np.ascontiguousarray(row[start:stop])


def _regrouped(sizes: Sequence[int], shared: int) -> Finding | None:
    if sizes[0] == sizes[1]:
        return None
    meaning = (
        f"the baseline's batch has {sizes[0]} rows, the target's {sizes[1]}; the rows themselves "
        f"are the same in the same order ({shared} compared)"
    )
    detail = {"batch_sizes": list(sizes), "compared": shared}
    return Finding("shape", "batch size", meaning, detail)


def _packed(rows: Sequence[Sequence[Row]]) -> Finding | None:
    """Whether one side's first row holds several rows of the other side, one after the other."""
    for which, side in enumerate(("baseline", "target")):
        pack, rest = rows[which][0].tobytes(), rows[1 - which]
        at, held = 0, 0
        for row in rest:
            text = row.tobytes()
            place = pack.find(text, at)
            if not text or place < 0 or place % row.itemsize or (not held and place):
                break
            at, held = place + len(text), held + 1
        if held > 1 and held > _holds(rows[1 - which][0], rows[which]):
            meaning = f"the {side} packs samples: its first row holds {held} rows of the other side"
            return Finding("shape", "packed", meaning, {"side": side, "rows": held})
    return None


def _holds(pack: Row, rows: Sequence[Row]) -> int:
    text = pack.tobytes()
    return sum(len(row) > 0 and row.tobytes() in text for row in rows[:2])


def _rearranged(
    traces: tuple[Trace, Trace],
    event: Event,
    keys: Sequence[Sequence[bytes]],
    rows: Sequence[Sequence[Row]],
) -> Finding | None:
    partner = match(keys[0], keys[1])
    taken = [j for j in partner if j >= 0]
    if len(taken) < _SAME * min(map(len, keys)):
        return None
    # Rows after the last one that both have may only lie beyond what was read.
    ends = max((i for i, j in enumerate(partner) if j >= 0), default=-1), max(taken, default=-1)
    cut = partner[: ends[0] + 1], (keys[0][: ends[0] + 1], keys[1][: ends[1] + 1])
    found = arrangements(*cut)
    order = next((a for a in found if a.kind == "order"), None)
    lacking = {kind: sum(a.detail["count"] for a in found if a.kind == kind) for kind in _LACKING}
    chosen = order or next(iter(found), None)
    if chosen is None or (order is None and lacking["missing"] == lacking["extra"]):
        return None  # as many came as went: rows that were changed
    index = _sample(traces, event, rows[chosen.kind == "extra"][chosen.place])
    return _told(chosen, index)


_LACKING: Final = ("missing", "extra")


def _told(found: Arrangement, sample: int | None) -> Finding:
    count, place = found.detail["count"], found.place
    known = "" if sample is None else f", sample[{sample}]"
    meaning = {
        "shuffled": f"the same rows in another order: {count} of {found.detail.get('of')} rows "
        f"moved, first row {place} from here{known}",
        "dropped": f"the target leaves out {count} of the rows: first row {place} from here{known}",
        "duplicated": f"the target has {count} of the rows once more: its row {place} from "
        f"here{known}",
        "inserted": f"the target has {count} rows more: first its row {place} from here{known}",
    }[found.pattern]
    detail = {"row": place, "count": count}
    if sample is not None:
        detail["sample"] = sample
    return Finding(found.kind, found.pattern, meaning, detail)


def _sample(traces: tuple[Trace, Trace], event: Event, row: Row) -> int | None:
    """Index of the sample that was rendered with these IDs, of either side, as far as recorded."""
    wanted = np.frombuffer(digest(row), np.uint8)
    for trace in traces:
        for step in (s for s in trace.steps if s <= event.site.step):
            rows = trace.samples(step)
            found = np.flatnonzero((rows.digest == wanted).all(axis=1))
            if len(found):
                return int(rows.sample[found[0]])
    return None
