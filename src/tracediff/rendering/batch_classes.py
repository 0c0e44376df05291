"""Classes of difference between batches: order, size, padding, positions, attention masks."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracediff.rendering.files import Vocabulary
from tracediff.rendering.text_classes import Class

Array = NDArray[Any]

_SIDES: Final = ("baseline", "target")


def classify_batch(
    a: Array,
    b: Array,
    what: str,
    counts: NDArray[np.bool_] | None = None,
    vocabulary: Vocabulary | None = None,
) -> Class | None:
    """The class of the difference of two fields of a batch; None where its values must say.

    Args:
        what: Name of the field: `position_ids`, `attention_mask`, `indices`, `input_ids` ...
        counts: False where a token is padding, of the common shape.
    """
    if a.shape != b.shape and a.ndim == b.ndim == 2:
        return _size(a, b, vocabulary)
    if what == "position_ids" and a.shape == b.shape and a.ndim == 2:
        return _positions(a, b, counts)
    if "mask" in what:
        return _visibility(a, b)
    if a.shape == b.shape and what in ("indices", "samples", "input_ids", "labels", ""):
        return _order(a, b)
    return None


def _order(a: Array, b: Array) -> Class | None:
    """The same rows (or the same samples, where there are numbers of them) in another order."""
    if len(a) < 2 or (a.ndim == 1 and len(np.unique(a)) == 1):
        return None
    rows = [sorted(map(tuple, side.reshape(len(side), -1).tolist())) for side in (a, b)]
    if rows[0] != rows[1]:
        return None
    first = next(i for i in range(len(a)) if not np.array_equal(a[i], b[i]))
    there = next(i for i in range(len(b)) if np.array_equal(a[first], b[i]))
    what = "rows" if a.ndim > 1 else "samples"
    meaning = f"the same {what} in another order: number {first} is number {there} in the target"
    return Class("order", meaning, {"row": first, "target_row": there})


def _size(a: Array, b: Array, vocabulary: Vocabulary | None) -> Class:
    shapes = {"shapes": [list(a.shape), list(b.shape)]}
    if len(a) != len(b):
        meaning = f"the baseline's batch has {len(a)} rows, the target's {len(b)}"
        return Class("batch size", meaning, shapes)
    width = min(a.shape[1], b.shape[1])
    longer = 0 if a.shape[1] > width else 1
    long, short = (a, b) if longer == 0 else (b, a)
    fillers = {0, -100} | ({vocabulary.pad, vocabulary.eos} if vocabulary else set())
    for side, kept, rest in (
        ("right", long[:, :width], long[:, width:]),
        ("left", long[:, -width:], long[:, :-width]),
    ):
        if np.array_equal(kept, short):
            name = "padded" if set(np.unique(rest).tolist()) <= fillers else "truncated"
            meaning = (
                f"the {_SIDES[longer]}'s rows go on for {rest.shape[1]} tokens of "
                f"{'padding' if name == 'padded' else 'content'} on the {side}"
            )
            return Class(name, meaning, {"side": side, **shapes})
    meaning = f"rows of {a.shape[1]} tokens against {b.shape[1]}"
    return Class("shape", meaning, shapes)


def _positions(a: Array, b: Array, counts: NDArray[np.bool_] | None) -> Class | None:
    row = int(np.flatnonzero((a != b).any(axis=-1))[0])
    if counts is not None and not counts[row, 0]:
        first = int(np.flatnonzero(counts[row])[0])
        starts = {side: int(x[row, first]) for side, x in zip(_SIDES, (a, b), strict=True)}
        meaning = (
            f"the first token of row {row} has position {starts['baseline']} in the baseline and "
            f"{starts['target']} in the target: one of them counts the {first} tokens of padding"
        )
        return Class("positions count padding", meaning, {"starts": starts, "padding": first})
    documents = [_documents(x[row]) for x in (a, b)]
    if documents[0] == documents[1]:
        return None
    side = _SIDES[0] if documents[0] < documents[1] else _SIDES[1]
    meaning = (
        f"row {row} holds {max(documents)} documents; the {side} resets the position IDs only for "
        f"{min(documents)} of them"
    )
    told = dict(zip(_SIDES, documents, strict=True))
    return Class("position IDs not reset", meaning, {"documents": told})


def _documents(positions: Array) -> int:
    """How many runs of rising positions there are."""
    return 1 + int((np.diff(positions) <= 0).sum())


def _visibility(a: Array, b: Array) -> Class | None:
    """Masks of which one separates the documents of a pack and the other does not."""
    if a.ndim == b.ndim == 2 and a.shape == b.shape:
        numbers = [len(np.unique(x[x > 0])) for x in (a, b)]
        if min(numbers) == 1 < max(numbers) and np.array_equal(a > 0, b > 0):
            return _no_boundary(_SIDES[numbers.index(1)], max(numbers))
        return None
    if min(a.ndim, b.ndim) < 3 or a.shape != b.shape:
        return None
    first, second = (x.reshape(-1, *x.shape[-2:]).astype(bool) for x in (a, b))
    for side, more, less in ((_SIDES[0], first, second), (_SIDES[1], second, first)):
        if not (less <= more).all() or np.array_equal(less, more):
            continue
        blocks = _blocks(less[int(np.flatnonzero((less != more).any(axis=(1, 2)))[0])])
        if blocks > 1:
            return _no_boundary(side, blocks)
    return None


def _no_boundary(side: str, documents: int) -> Class:
    meaning = (
        f"the {side} lets the tokens of {documents} packed documents see each other, the other "
        "side keeps them apart"
    )
    return Class("packing without a boundary", meaning, {"documents": documents})


def _blocks(seen: NDArray[np.bool_]) -> int:
    """How many different first visible tokens the rows of a causal mask have."""
    rows = seen[seen.any(axis=-1)]
    return len(np.unique(rows.argmax(axis=-1)))
