"""Where two texts or two rows of token IDs first part, and what such a difference usually is."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_CONTEXT: Final = 40
_IDS_CONTEXT: Final = 8
_SEARCH: Final = 20_000
"""Characters (or IDs) after the first difference that are searched for the end of it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two sequences.

    Attributes:
        pattern: Class of the difference: newline, whitespace, unicode normalisation, inserted,
            deleted, replaced, truncated, shifted.
        meaning: One sentence on it.
        detail: `index`, and for texts `baseline_context`, `target_context`; for IDs
            `baseline_ids`, `target_ids`, and `row` where there are rows.
    """

    pattern: str
    meaning: str
    detail: Mapping[str, Any] = field(default_factory=dict)


def differ_text(baseline: str, target: str) -> Difference:
    """Describes the first difference of two unequal texts."""
    index = _first_difference(baseline, target)
    removed, added = _edit(baseline[index:], target[index:])
    pattern, meaning = _classify_text(baseline, target, removed, added)
    start = max(0, index - _CONTEXT)
    detail = {
        "index": index,
        "baseline_context": baseline[start : index + _CONTEXT],
        "target_context": target[start : index + _CONTEXT],
        "context_start": start,
        "removed": removed[:_CONTEXT],
        "added": added[:_CONTEXT],
        "lengths": [len(baseline), len(target)],
    }
    return Difference(pattern, meaning, detail)


def differ_ids(
    baseline: NDArray[Any], target: NDArray[Any], counts: NDArray[np.bool_] | None = None
) -> Difference | None:
    """Describes the first difference of two arrays of IDs, labels or masks; None if equal.

    Args:
        counts: Boolean array of the common shape: False where an element is padding.
    """
    if baseline.shape != target.shape:
        if baseline.ndim == target.ndim == 1:
            return _differ_row(baseline.tolist(), target.tolist(), {})
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
    if baseline.ndim < 2:
        return _differ_row(
            np.atleast_1d(baseline).tolist(), np.atleast_1d(target).tolist(), {"rows": 1}
        )
    flat = [x.reshape(-1, x.shape[-1]) for x in (baseline, target, differs)]
    row = int(np.argmax(flat[2].any(axis=1)))
    rows = int(flat[2].any(axis=1).sum())
    return _differ_row(flat[0][row].tolist(), flat[1][row].tolist(), {"row": row, "rows": rows})


def _differ_row(a: Sequence[int], b: Sequence[int], extra: Mapping[str, Any]) -> Difference:
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


def _classify_text(baseline: str, target: str, removed: str, added: str) -> tuple[str, str]:
    """The first class whose normalisation makes both texts equal."""
    forms: Sequence[tuple[str, str, Callable[[str], str]]] = (
        ("newline", "only line breaks differ", lambda text: _without(text, "\r\n")),
        ("trailing whitespace", "only whitespace at the end differs", str.rstrip),
        ("whitespace", "only white space differs", lambda text: "".join(text.split())),
        ("NFC", "", lambda text: unicodedata.normalize("NFC", text)),
        ("NFKC", "", lambda text: unicodedata.normalize("NFKC", text)),
    )
    for name, meaning, normalise in forms:
        if normalise(baseline) == normalise(target):
            if name.startswith("NF"):
                return (
                    "unicode normalisation",
                    f"both texts are the same after {name}: one side normalises, one does not",
                )
            return name, f"{meaning}: {_what(removed, added)}"
    if target.startswith(baseline) or baseline.startswith(target):
        longer, end = ("target", added) if len(target) > len(baseline) else ("baseline", removed)
        return "truncated", f"the {longer} goes on where the other ends: {end[:_CONTEXT]!r}"
    return ("inserted" if not removed else "deleted" if not added else "replaced"), _what(
        removed, added
    )


def _what(removed: str, added: str) -> str:
    if not added:
        return f"the target lacks {removed[:_CONTEXT]!r}"
    if not removed:
        return f"the target has {added[:_CONTEXT]!r} more"
    return f"{removed[:_CONTEXT]!r} against {added[:_CONTEXT]!r}"


def _without(text: str, characters: str) -> str:
    return text.translate({ord(character): None for character in characters})
