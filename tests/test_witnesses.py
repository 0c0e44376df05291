"""Losses, batches and labels held to what a side was itself given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tracediff.bisection.losses import Loss, examine
from tracediff.bisection.own_samples import is_consistent
from tracediff.testing import build_trace
from tracediff.trace import Trace

Array = NDArray[Any]

# ---- losses -------------------------------------------------------------------------------------

IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
LOGITS = np.random.default_rng(0).normal(size=(2, 5, 12)).astype(np.float32)


def loss_and_gradient(labels: Array, counted: Array) -> tuple[float, Array]:
    """Mean cross-entropy by hand, and its gradient."""
    z = LOGITS.astype(np.float64)
    p = np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)
    chosen = np.take_along_axis(p, labels[..., None], axis=-1)[..., 0]
    loss = float(-np.log(chosen)[counted].mean())
    grad = (p - np.eye(12)[labels]) * counted[..., None] / counted.sum()
    return loss, grad.astype(np.float32)


def run(path: Path, factor: float = 1.0, shift: int = 1, smoothing: float = 0.0) -> Trace:
    counted = np.ones((2, 5), bool)
    counted[:, -1] = counted[0, 0] = False
    loss, grad = loss_and_gradient(np.roll(IDS, -shift, axis=1), counted)
    settings = {"attributes": {"label_smoothing": smoothing}}
    values = [
        ("0/rendering/batch.input_ids:out", (IDS, {"kind": "ids"})),
        ("0/forward/root:out", LOGITS),
        ("0/loss/loss.cross_entropy#0:out", (np.float32([1.0]), settings)),
        ("0/loss/loss:out", np.asarray(np.float32(loss * factor))),
        ("0/backward/root:grad_out", (grad * factor).astype(np.float32)),
    ]
    return Trace(build_trace(path, values))


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ({}, Loss(True, True)),
        ({"factor": 1.0001}, Loss(True, False)),
        ({"factor": 0.5}, Loss(True, False)),
        ({"shift": 2}, Loss(False, True)),
        ({"shift": 0}, Loss(False, True)),
        ({"smoothing": 0.1}, Loss(None, None)),
    ],
)
def test_a_loss_is_held_to_its_own_logits(tmp_path: Path, how: dict[str, Any], found: Loss) -> None:
    with run(tmp_path / "run", **how) as trace:
        assert examine(trace, 0, 0) == found


# ---- samples ------------------------------------------------------------------------------------

A, B = np.array([1, 5, 6, 7, 8, 2]), np.array([1, 9, 4, 2])
ROWS = np.array([[1, 5, 6, 7, 8, 2], [1, 9, 4, 2, 0, 0]])
MASK = np.array([[1] * 6, [1] * 4 + [0] * 2])
LABELS = np.where(np.arange(6) < 2, -100, np.where(MASK == 1, ROWS, -100))


def consistent(
    path: Path, field: str, rows: Array = ROWS, mask: Array | None = MASK, labels: Array = LABELS
) -> bool | None:
    kinds = {"input_ids": "ids", "attention_mask": "mask", "labels": "labels"}
    fields = {"input_ids": rows, "labels": labels}
    if mask is not None:
        fields["attention_mask"] = mask
    values: list[tuple[str, Any]] = [
        (f"0/rendering/sample[{i}].ids:out", (ids, {"kind": "ids"})) for i, ids in enumerate((A, B))
    ]
    values += [
        (f"0/rendering/batch.{name}:out", (value, {"kind": kinds[name]}))
        for name, value in fields.items()
    ]
    with Trace(build_trace(path, values)) as trace:
        return is_consistent(trace, trace.find(f"0/rendering/batch.{field}:out"))


def changed(array: Array, place: tuple[int, int], value: int) -> Array:
    copy = array.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize("mask", [MASK, None])
def test_rows_are_the_samples_padded_or_cut(tmp_path: Path, mask: Array | None) -> None:
    def rows(name: str, values: Array, of: Array | None) -> bool | None:
        return consistent(tmp_path / name, "input_ids", values, of, values)

    assert rows("right", ROWS, mask) is True
    assert rows("replaced", changed(ROWS, (0, 3), 4), mask) is False
    cut = None if mask is None else mask[:, :4]
    assert rows("cut", ROWS[:, :4], cut) is True
    lost = changed(ROWS, (1, 3), 0)
    assert rows("lost", lost, None if mask is None else changed(mask, (1, 3), 0)) is False
    left = np.roll(ROWS, (0, 2), axis=(0, 1)) if mask is None else ROWS
    left[0] = ROWS[0]
    assert rows("left", left, mask) is True


def test_a_mask_that_shows_padding(tmp_path: Path) -> None:
    assert consistent(tmp_path / "a", "attention_mask") is True
    assert consistent(tmp_path / "b", "attention_mask", mask=np.ones_like(MASK)) is False


@pytest.mark.parametrize("mask", [MASK, None])
def test_labels_are_their_own_tokens_or_left_out(tmp_path: Path, mask: Array | None) -> None:
    def labels(name: str, values: Array) -> bool | None:
        return consistent(tmp_path / name, "labels", mask=mask, labels=values)

    assert labels("right", LABELS) is True
    assert labels("all", np.where(MASK == 1, ROWS, -100)) is True
    assert labels("shifted", np.roll(LABELS, -1, axis=1)) is False
    assert labels("padding", np.where(MASK == 1, LABELS, ROWS)) is False


@pytest.mark.parametrize(
    ("ids", "added", "found"),
    [([1, 5, 6], False, True), ([1, 1, 5, 6], True, False), ([1, 5, 6], True, True)],
)
def test_a_first_token_that_was_added_twice(
    tmp_path: Path, ids: list[int], added: bool, found: bool
) -> None:
    fields = {"kind": "ids", "attributes": {"add_special_tokens": added}}
    values = [
        ("0/rendering/sample[0].template:out", "<s> a b"),
        ("0/rendering/sample[0].text:out", "<s> a b"),
        ("0/rendering/sample[0].ids:out", (np.array(ids), fields)),
    ]
    with Trace(build_trace(tmp_path / "run", values)) as trace:
        assert is_consistent(trace, trace.find("0/rendering/sample[0].text:out")) is True
        assert is_consistent(trace, trace.find("0/rendering/sample[0].ids:out")) is found
