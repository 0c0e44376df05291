"""Classes of difference between two rows of token IDs, and between two arrays of labels."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.rendering.files import Vocabulary
from tracediff.rendering.provenance import IGNORED
from tracediff.rendering.text_classes import Class, bos_class, eos_class

_SHORTEST_OVERLAP: Final = 4
_SHOWN: Final = 60


def classify_ids(
    baseline: Sequence[int], target: Sequence[int], vocabulary: Vocabulary | None
) -> Class | None:
    """The class of the difference of two unequal rows; None where only the bare edit can be told.

    Without a vocabulary only what the numbers alone show: which end was cut off.
    """
    if vocabulary is not None:
        found = _special(baseline, target, vocabulary) or _spelling(baseline, target, vocabulary)
        if found:
            return found
    return _truncation_side(baseline, target)


def classify_labels(
    baseline: NDArray[Any],
    target: NDArray[Any],
    vocabulary: Vocabulary | None,
    known: bool = False,
) -> Class | None:
    """The class of the difference of two arrays of labels of one shape, (row, position).

    None where no label is ignored on either side, unless they are `known` to be labels: those
    rows may be something else.
    """
    trained = baseline != IGNORED, target != IGNORED
    if not known and trained[0].all() and trained[1].all():
        return None
    rows = np.flatnonzero((baseline != target).any(axis=-1))
    counts = [int(side.sum()) for side in trained]
    detail = {"trained": {"baseline": counts[0], "target": counts[1]}}
    for side, mine, other in (("baseline", *trained), ("target", *trained[::-1])):
        empty = [int(row) for row in rows if not mine[row].any() and other[row].any()]
        if empty:
            meaning = f"no token of row {empty[0]} is trained in the {side}: all are {IGNORED}"
            return Class("no trained tokens", meaning, detail)
    shift = _label_shift(baseline[rows], target[rows])
    if shift:
        meaning = f"the labels are moved by {shift:+d}: one side shifts them before the loss does"
        return Class("label shift twice", meaning, {**detail, "offset": shift})
    found = _mask_class(baseline, target, vocabulary)
    return Class(found.name, found.meaning, detail) if found else None


def _special(a: Sequence[int], b: Sequence[int], vocabulary: Vocabulary) -> Class | None:
    bos, eos = vocabulary.bos, vocabulary.eos
    if bos is not None:
        counts = [_leading(row, bos) for row in (a, b)]
        if counts[0] != counts[1] and list(a[counts[0] :]) == list(b[counts[1] :]):
            return bos_class(counts[0], counts[1], vocabulary.token(bos))
    if eos is not None and [i for i in a if i != eos] == [i for i in b if i != eos]:
        return eos_class(list(a).count(eos), list(b).count(eos), vocabulary.token(eos))
    return None


def _spelling(a: Sequence[int], b: Sequence[int], vocabulary: Vocabulary) -> Class | None:
    """Classes of edits after which the same text, or nearly the same, is spelled otherwise."""
    start, removed, added = _middle(a, b)
    for side, one, other in (("baseline", removed, added), ("target", added, removed)):
        control = [i for i in one if i in vocabulary.control and i not in other]
        if control and vocabulary.text(one) == _plain_text(other, vocabulary):
            token = vocabulary.token(control[0])
            meaning = f"the text {token!r} became the control token {control[0]} in the {side} only"
            return Class("content becomes a control token", meaning, {"token": token})
    texts = vocabulary.text(removed), vocabulary.text(added)
    shown = f"{texts[0][:_SHOWN]!r} against {texts[1][:_SHOWN]!r}"
    if texts[0] == texts[1]:
        pieces = [[vocabulary.token(i) for i in row[:8]] for row in (removed, added)]
        meaning = f"the same text {texts[0][:_SHOWN]!r} is cut into other pieces"
        return Class("split pattern", meaning, {"pieces": pieces})
    after_special = start == 0 or a[start - 1] in vocabulary.control
    if texts[0].lstrip(" ") == texts[1].lstrip(" ") and after_special:
        return Class(
            "prefix space", f"a space before the first word after a special token: {shown}"
        )
    for form in ("NFC", "NFKC"):
        if unicodedata.normalize(form, texts[0]) == unicodedata.normalize(form, texts[1]):
            meaning = f"the tokens' texts are the same after {form}: {shown}"
            return Class("unicode normalisation", meaning, {"form": form})
    return None


def _plain_text(ids: Sequence[int], vocabulary: Vocabulary) -> str:
    """Text of IDs, or "" where one of them is a control token too."""
    return "" if any(i in vocabulary.control for i in ids) else vocabulary.text(ids)


def _truncation_side(a: Sequence[int], b: Sequence[int]) -> Class | None:
    """One row keeps the start of what the other keeps the end of, or is one end of it."""
    short, long = sorted((list(a), list(b)), key=len)
    shorter = "baseline" if len(a) < len(b) else "target"
    if short and len(short) < len(long):
        for side, part in (("right", long[: len(short)]), ("left", long[-len(short) :])):
            if part == short:
                lost = len(long) - len(short)
                meaning = f"the {shorter} lacks {lost} IDs at the {side} end"
                # A single ID at one end may as well have been inserted: no class of its own.
                return Class("truncated", meaning, {"side": side}) if lost > 1 else None
        return None
    for first, second, side in ((a, b, "left"), (b, a, "right")):
        overlap = _overlap(first, second)
        if len(a) - overlap > 1 and overlap >= max(_SHORTEST_OVERLAP, len(a) // 4):
            meaning = f"the target was cut on the {side}, the baseline on the other side"
            return Class("truncation side", meaning, {"side": side})
    return None


def _overlap(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest end of `first` that `second` begins with."""
    size = min(len(first), len(second))
    lengths = (n for n in range(size - 1, 0, -1) if first[len(first) - n] == second[0])
    return next((n for n in lengths if list(first[-n:]) == list(second[:n])), 0)


def _label_shift(a: NDArray[Any], b: NDArray[Any]) -> int:
    if a.shape[-1] > 2 and np.array_equal(a[:, 1:], b[:, :-1]):
        return -1
    if a.shape[-1] > 2 and np.array_equal(a[:, :-1], b[:, 1:]):
        return 1
    return 0


def _mask_class(a: NDArray[Any], b: NDArray[Any], vocabulary: Vocabulary | None) -> Class | None:
    """Where labels differ only in which of them are ignored."""
    differs = a != b
    one, other = a == IGNORED, b == IGNORED
    if not (one | other)[differs].all():
        return None
    side = "target" if other[differs].all() else "baseline" if one[differs].all() else ""
    if not side:
        return None
    full, masked = (a, b) if side == "target" else (b, a)
    values = np.unique(full[differs])
    if len(values) == 1 and _is_padding(int(values[0]), full, masked, differs, vocabulary):
        meaning = (
            f"the {side} masks every label {values[0]}: padding is found by its ID, which is also "
            "the ID that ends an answer, so the model never learns to stop"
        )
        return Class("pad equals EOS", meaning)
    found = _packing(full, differs, vocabulary) or _past_the_end(full, masked, side, vocabulary)
    if found:
        return found
    rows = np.flatnonzero(differs.any(axis=-1))
    edges = {_edge(full[row], differs[row]) for row in rows}
    if len(edges) == 1 and (edge := edges.pop()):
        meaning = (
            f"the {side} trains one token fewer, the {edge} of the other's, in {len(rows)} row(s)"
        )
        return Class("mask off by one", meaning)
    return _more_trained(full, masked, side)


def _packing(
    full: NDArray[Any], differs: NDArray[np.bool_], vocabulary: Vocabulary | None
) -> Class | None:
    """Labels that are ignored on one side where a document of a pack begins, after an EOS."""
    if vocabulary is None or vocabulary.eos is None or not differs[:, 1:].any():
        return None
    begins = np.zeros_like(differs)
    begins[:, 1:] = full[:, :-1] == vocabulary.eos
    if (differs & ~begins)[:, 1:].any() or (full[differs] == vocabulary.eos).any():
        return None
    count = int(differs[:, 1:].sum())
    meaning = (
        f"only one side ignores the {count} label(s) at which a packed document begins: the other "
        "trains them on the end of the document before"
    )
    return Class("packing without a boundary", meaning)


def _past_the_end(
    full: NDArray[Any], masked: NDArray[Any], side: str, vocabulary: Vocabulary | None
) -> Class | None:
    """Labels that one side trains behind the last one of the other: padding, or what was cut."""
    extra = full != masked
    last = _last_trained(masked)[:, None]
    behind = np.arange(full.shape[-1])[None, :] > last
    known = vocabulary is not None and vocabulary.pad not in (None, vocabulary.eos)
    padding = known and vocabulary is not None and bool((full[extra] == vocabulary.pad).all())
    if not padding and ((extra & ~behind).any() or extra.sum(axis=-1).max() < 2):
        return None
    trains = "target" if side == "baseline" else "baseline"
    what = "labels of padding" if padding else "labels past the end of the other's"
    return Class("mask past the end", f"the {trains} trains {int(extra.sum())} {what}")


def _more_trained(full: NDArray[Any], masked: NDArray[Any], side: str) -> Class | None:
    """One side trains what comes before the answer too."""
    extra = full != masked
    first = (masked != IGNORED).argmax(axis=-1)[:, None]
    before = np.arange(full.shape[-1])[None, :] < first
    if (extra & ~before).any():
        return None
    trains = "target" if side == "baseline" else "baseline"
    meaning = f"the {trains} also trains {int(extra.sum())} tokens before those of the other"
    return Class("prompt trained", meaning)


def _last_trained(labels: NDArray[Any]) -> NDArray[np.intp]:
    trained = labels != IGNORED
    last: NDArray[np.intp] = trained.shape[-1] - 1 - trained[:, ::-1].argmax(axis=-1)
    return np.where(trained.any(axis=-1), last, -1)


def _is_padding(
    value: int,
    full: NDArray[Any],
    masked: NDArray[Any],
    differs: NDArray[np.bool_],
    vocabulary: Vocabulary | None,
) -> bool:
    """Whether one value is masked because it is the padding's.

    Known special IDs decide; without them, the same value must be masked in several places.
    """
    if (masked == value).any():
        return False
    if vocabulary is not None:
        return value == vocabulary.eos == vocabulary.pad
    return int((differs & (full == value)).sum()) > 1


def _edge(full: NDArray[Any], differs: NDArray[np.bool_]) -> str:
    trained = np.flatnonzero(full != IGNORED)
    places = np.flatnonzero(differs)
    if len(places) != 1 or len(trained) < 2:
        return ""
    return {int(trained[0]): "first", int(trained[-1]): "last"}.get(int(places[0]), "")


def _middle(a: Sequence[int], b: Sequence[int]) -> tuple[int, Sequence[int], Sequence[int]]:
    """Index of the first difference, and both rows between their common start and common end."""
    limit = min(len(a), len(b))
    start = next((i for i in range(limit) if a[i] != b[i]), limit)
    end = 0
    while end < limit - start and a[-1 - end] == b[-1 - end]:
        end += 1
    return start, a[start : len(a) - end], b[start : len(b) - end]


def _leading(row: Sequence[int], value: int) -> int:
    return next((i for i, item in enumerate(row) if item != value), len(row))
