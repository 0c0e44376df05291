"""Batches that differ: the rows that come later say whether they were changed or rearranged."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracediff import bisect
from tracediff.testing import build_trace
from tracediff.verdict import Divergence

PAD = 0
ROWS = [list(range(10 * i + 1, 10 * i + 4 + i % 4)) for i in range(24)]


def training(path: Path, rows: Sequence[Sequence[int]], size: int, masked: bool) -> Path:
    """A trace of a run that renders all samples, then trains on them batch by batch."""
    values: list[tuple[str, Any]] = [
        (f"0/rendering/sample[{i}].ids", (np.array(row), {"kind": "ids"}))
        for i, row in enumerate(ROWS)
    ]
    for step, start in enumerate(range(0, len(rows), size)):
        batch = rows[start : start + size]
        width = max(map(len, batch))
        padded = np.array([[*row, *[PAD] * (width - len(row))] for row in batch])
        if masked:
            mask = (padded != PAD).astype(np.int64)
            values += [(f"{step}/rendering/batch.attention_mask", (mask, {"kind": "mask"}))]
        values += [(f"{step}/rendering/batch.input_ids", (padded, {"kind": "ids"}))]
        values += [(f"{step}/forward/root#0:out", np.full(3, float(padded.sum())))]
    return build_trace(path, values)


Compare = Callable[..., Divergence]


@pytest.fixture(params=[True, False], ids=["masked", "bare"])
def compare(tmp_path: Path, request: pytest.FixtureRequest) -> Compare:
    def run(target: Sequence[Sequence[int]], size: int = 4) -> Divergence:
        a = training(tmp_path / "a", ROWS, 4, request.param)
        b = training(tmp_path / "b", target, size, request.param)
        first = bisect(a, b).first
        assert first is not None
        assert first.stage == "rendering"
        assert first.path.startswith("batch.")
        return first

    return run


def test_another_order_over_all_batches(compare: Compare) -> None:
    shuffled = list(ROWS)
    random.Random(1).shuffle(shuffled)
    found = compare(shuffled)
    assert (found.kind, found.pattern) == ("order", "shuffled")
    assert found.detail["sample"] == next(i for i in range(24) if shuffled[i] != ROWS[i])


def test_another_batch_size(compare: Compare) -> None:
    found = compare(ROWS, size=8)
    assert (found.kind, found.pattern) == ("shape", "batch size")
    assert found.detail["batch_sizes"] == [4, 8]
    assert "same order" in found.meaning


def test_a_dropped_row(compare: Compare) -> None:
    found = compare([*ROWS[:9], *ROWS[10:]])
    assert (found.kind, found.pattern, found.step) == ("missing", "dropped", 2)
    assert (found.detail["row"], found.detail["sample"]) == (1, 9)


def test_a_row_twice_and_a_new_row(compare: Compare) -> None:
    found = compare([*ROWS[:9], ROWS[2], *ROWS[9:]])
    assert found.kind == "extra"
    assert (found.detail["row"], found.detail["sample"]) == (1, 2)


def test_a_new_row(compare: Compare) -> None:
    found = compare([*ROWS[:9], [7, 8, 9], *ROWS[9:]])
    assert (found.kind, found.pattern, found.detail["row"]) == ("extra", "inserted", 1)


def test_packed_rows(compare: Compare) -> None:
    packed = [[token for row in ROWS[i : i + 3] for token in row] for i in range(0, 24, 3)]
    found = compare(packed)
    assert (found.kind, found.pattern) == ("shape", "packed")
    assert found.detail["side"] == "target"
    assert found.detail["rows"] == 3


def test_a_changed_row_is_no_rearrangement(compare: Compare) -> None:
    changed = [list(row) for row in ROWS]
    changed[9][1] += 500
    found = compare(changed)
    assert (found.kind, found.step, found.detail["row"]) == ("ids", 2, 1)
    assert found.pattern == "replaced"


def test_other_data_is_no_rearrangement(compare: Compare) -> None:
    found = compare([[token + 1000 for token in row] for row in ROWS])
    assert found.kind == "ids"
