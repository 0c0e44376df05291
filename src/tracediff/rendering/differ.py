"""Where two texts or two rows of token IDs first part, and what such a difference usually is."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.rendering.batch_classes import classify_batch
from tracediff.rendering.files import Vocabulary
from tracediff.rendering.id_classes import classify_ids, classify_labels
from tracediff.rendering.text_classes import TextPair, classify_text

_CONTEXT: Final = 40
_IDS_CONTEXT: Final = 8
_SEARCH: Final = 20_000
"""Characters (or IDs) after the first difference that are searched for the end of it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two sequences.

    Attributes:
        pattern: Class of the difference (docs/rendering.md lists them), or the bare kind of edit:
            inserted, deleted, replaced, truncated, shifted.
        meaning: One sentence on it.
        detail: `index`, and for texts `baseline_context`, `target_context`; for IDs
            `baseline_ids`, `target_ids`, and `row` where there are rows.
    """

    pattern: str
    meaning: str
    detail: Mapping[str, Any] = field(default_factory=dict)


def differ_text(
    baseline: str,
    target: str,
    vocabulary: Vocabulary | None = None,
    has_system: bool | None = None,
) -> Difference:
    """Describes the first difference of two unequal texts.

    Args:
        vocabulary: Tells which strings are BOS and EOS; without it, those classes are not told.
        has_system: Whether the record has a system message of its own, where that is known.
    """
    index = _first_difference(baseline, target)
    removed, added = _edit(baseline[index:], target[index:])
    whole = baseline[:index] + added + baseline[index + len(removed) :] == target
    found = classify_text(
        TextPair(baseline, target, index, removed, added, whole, vocabulary, has_system)
    )
    start = max(0, index - _CONTEXT)
    detail = {
        "index": index,
        "baseline_context": baseline[start : index + _CONTEXT],
        "target_context": target[start : index + _CONTEXT],
        "context_start": start,
        "removed": removed[:_CONTEXT],
        "added": added[:_CONTEXT],
        "lengths": [len(baseline), len(target)],
        **found.detail,
    }
    return Difference(found.name, found.meaning, detail)


def differ_ids(
    baseline: NDArray[Any],
    target: NDArray[Any],
    counts: NDArray[np.bool_] | None = None,
    vocabulary: Vocabulary | None = None,
    what: str = "",
) -> Difference | None:
    """Describes the first difference of two arrays of IDs, labels or masks; None if equal.

    Args:
        what: Name of the field (`labels`, `position_ids`, `attention_mask` ...), where it is known.
        counts: Boolean array of the common shape: False where an element is padding.
        vocabulary: Tells which IDs are special and what the others spell; without it, only the
            classes that the numbers alone show are told.
    """
    if baseline.shape != target.shape:
        if baseline.ndim == target.ndim == 1:
            return _differ_row(baseline.tolist(), target.tolist(), {}, vocabulary)
        found_batch = classify_batch(baseline, target, what, None, vocabulary)
        if found_batch:
            return Difference(found_batch.name, found_batch.meaning, dict(found_batch.detail))
        return Difference(
            "shape",
            f"shape {baseline.shape} against {target.shape}",
            {"shapes": [list(baseline.shape), list(target.shape)]},
        )
    differs = baseline != target
    if counts is not None:
        differs &= counts
    if not differs.any():
        return None
    if counts is not None:
        target = np.where(counts, target, baseline)
    # One row per sample; a row by itself, or a single number, is one row.
    a, b = (side.reshape(-1, side.shape[-1] if side.ndim else 1) for side in (baseline, target))
    rows = np.flatnonzero((a != b).any(axis=1))
    row = int(rows[0])
    extra = {"row": row, "rows": len(rows)} if baseline.ndim > 1 else {"rows": 1}
    found = _differ_row(a[row].tolist(), b[row].tolist(), extra, vocabulary)
    of_row = counts.reshape(a.shape) if counts is not None and counts.size == a.size else None
    whole = (a, b) if baseline.ndim == 2 else (baseline, target)
    named = classify_batch(*whole, what, of_row, vocabulary) if what or a.ndim == 2 else None
    if named is None and what in ("", "labels", "targets"):
        named = classify_labels(a, b, vocabulary, known=bool(what))
    if named is None:
        return found
    return Difference(named.name, named.meaning, {**found.detail, **named.detail})


def _differ_row(
    a: Sequence[int],
    b: Sequence[int],
    extra: Mapping[str, Any],
    vocabulary: Vocabulary | None = None,
) -> Difference:
    index = _first_difference(a, b)
    removed, added = _edit(a[index:], b[index:])
    start = max(0, index - _IDS_CONTEXT)
    detail = {
        "index": index,
        "baseline_ids": list(a[start : index + _IDS_CONTEXT]),
        "target_ids": list(b[start : index + _IDS_CONTEXT]),
        "context_start": start,
        "removed": list(removed[:_IDS_CONTEXT]),
        "added": list(added[:_IDS_CONTEXT]),
        "lengths": [len(a), len(b)],
        **extra,
    }
    if len(a) == len(b) and len(a) > 2 and (a[1:] == b[:-1] or a[:-1] == b[1:]):
        offset = -1 if a[1:] == b[:-1] else 1
        detail["offset"] = offset
        return Difference("shifted", f"the whole row is moved by {offset:+d}", detail)
    found = classify_ids(a, b, vocabulary)
    if found:
        return Difference(found.name, found.meaning, {**detail, **found.detail})
    name = "inserted" if not removed else "deleted" if not added else "replaced"
    size = max(len(removed), len(added))
    return Difference(name, f"{size} {name} at index {index}", detail)


def _first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def _edit(a: Any, b: Any) -> tuple[Any, Any]:
    """What the first edit removes and adds, where both sides part at their first element."""
    a_part, b_part = a[:_SEARCH], b[:_SEARCH]
    tail = 0
    limit = min(len(a), len(b))
    while tail < limit and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    whole = a[: len(a) - tail], b[: len(b) - tail]
    if min(len(whole[0]), len(whole[1])) == 0 or max(map(len, whole)) > 2000:
        return whole
    opcodes = difflib.SequenceMatcher(None, a_part, b_part, autojunk=False).get_opcodes()
    _, a_start, a_stop, b_start, b_stop = next(op for op in opcodes if op[0] != "equal")
    return a_part[a_start:a_stop], b_part[b_start:b_stop]
