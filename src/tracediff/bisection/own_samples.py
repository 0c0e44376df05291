"""Whether a side's text, IDs and batches are made of its own samples.

Each is held to the step before it: the text that is tokenized to the rendered template, the rows of
a batch to the IDs of the samples, labels and masks to the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.bisection.rendered import Sample
from tracediff.events import Event
from tracediff.trace import Trace

IGNORED: Final = -100
"""Label that loss functions leave out, by PyTorch's and transformers' convention."""

_IDS: Final = ("batch.input_ids", "batch.inputs", "batch.x")
_MASK: Final = "batch.attention_mask"
_LABELS: Final = ("batch.labels", "batch.targets")

Array = NDArray[Any]


def is_consistent(trace: Trace, event: Event) -> bool | None:
    """Whether a value of the rendering follows from the side's own value of the step before; None
    where that was not recorded, or more than one thing may follow."""
    path = event.site.path
    if path.startswith("sample["):
        return _of_sample(trace, event)
    if path in _IDS or path == _MASK:
        return _of_rows(trace, event)
    return _of_labels(trace, event) if path in _LABELS else None


def _of_sample(trace: Trace, event: Event) -> bool | None:
    sample = Sample(trace, event)
    if sample.step == "text" and (template := sample.find("template")):
        return bool(template.value == event.value)
    if sample.step == "ids" and event.payload is not None:
        ids = trace.array(event)
        twice = ids.size > 1 and ids[0] == ids[1]
        # Text of a chat template holds its special tokens; a tokenizer that adds its own doubles
        # the first one.
        added = event.attributes.get("add_special_tokens")
        template = sample.find("template")
        return None if template is None or added is None else not (twice and bool(added))
    return None


def _of_rows(trace: Trace, event: Event) -> bool | None:
    """Whether each row of a batch, as its mask has it, is a sample; one may be cut off at the
    length of the longest row."""
    events = trace.events(event.site.step, samples=False)
    ids = _same_batch(events, event, _IDS)
    if ids is None or ids.payload is None:
        return None
    samples = [found.tolist() for found in _samples(trace, event.site.step)]
    if not samples:
        return None
    rows, mask = trace.array(ids), _same_batch(events, event, (_MASK,))
    if rows.ndim != 2:
        return None
    if mask is None or mask.payload is None or mask.shape != ids.shape:
        return all(_is_padded_sample(row.tolist(), samples) for row in rows)
    keep = trace.array(mask).astype(bool)
    return all(_is_sample(*pair, samples) for pair in zip(rows, keep, strict=True))


def _is_sample(row: Array, keep: Array, samples: Sequence[list[int]]) -> bool:
    tokens, full = row[keep].tolist(), bool(keep.all())
    return any(s == tokens or (full and s[: len(tokens)] == tokens) for s in samples)


def _is_padded_sample(row: list[int], samples: Sequence[list[int]]) -> bool:
    return any(row == sample[: len(row)] for sample in samples) or (
        _padding(row, samples) is not None
    )


def _padding(row: list[int], samples: Sequence[list[int]]) -> slice | None:
    """Where a row is no sample but one token again and again, after a sample or before it."""
    for sample in sorted(samples, key=len, reverse=True):
        rest = len(row) - len(sample)
        if rest > 0 and row[: len(sample)] == sample and len(set(row[len(sample) :])) == 1:
            return slice(len(sample), None)
        if rest > 0 and row[rest:] == sample and len(set(row[:rest])) == 1:
            return slice(0, rest)
    return None


def _of_labels(trace: Trace, event: Event) -> bool | None:
    """Whether each label is its own token or left out, and padding always is."""
    events = trace.events(event.site.step, samples=False)
    ids, mask = _same_batch(events, event, _IDS), _same_batch(events, event, (_MASK,))
    if ids is None or event.shape != ids.shape or event.payload is None or ids.payload is None:
        return None
    labels, tokens = trace.array(event), trace.array(ids)
    counted = labels != IGNORED
    if not np.array_equal(labels[counted], tokens[counted]):
        return False
    if mask is not None and mask.shape == ids.shape and mask.payload is not None:
        return not bool(counted[~trace.array(mask).astype(bool)].any())
    samples = [found.tolist() for found in _samples(trace, event.site.step)]
    if not samples or tokens.ndim != 2:
        return None
    paddings = [_padding(row.tolist(), samples) for row in tokens]
    rows = zip(counted, paddings, strict=True)
    return not any(row[padding].any() for row, padding in rows if padding is not None)


def _same_batch(events: Sequence[Event], event: Event, paths: Sequence[str]) -> Event | None:
    for other in events:
        site = other.site
        same = (site.phase, site.call, site.port) == ("rendering", event.site.call, "out")
        if same and site.path in paths:
            return other
    return None


def _samples(trace: Trace, step: int) -> Iterator[Array]:
    """Token IDs of all samples rendered so far."""
    for before in [s for s in trace.steps if s <= step]:
        for event in trace.samples(before):
            if event.site.path.endswith("].ids") and event.payload is not None:
                yield trace.array(event)
