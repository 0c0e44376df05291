"""Values at the edges of what dtypes hold, and divergences that heal or only seem to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tracediff.bisection import bisect
from tracediff.testing import build_trace
from tracediff.verdict import Verdict

Array = NDArray[Any]
ONES = np.ones((4, 8), np.float32)
INF, NAN = np.inf, np.nan
DENORMAL = np.full((4, 8), 1e-42, np.float32)


def verdict_of(tmp_path: Path, a: Array, b: Array, site: str = "0/forward/block#0:out") -> Verdict:
    """Of two traces that have one value in common and differ in another, if at all."""
    paths = []
    for name, value in (("a", a), ("b", b)):
        events = [("0/forward/first#0:out", ONES), (site, (value, {"op": "Block"}))]
        paths.append(build_trace(tmp_path / name, events))
    return bisect(*paths)


def with_first(value: float, like: Array = ONES) -> Array:
    changed = like.copy()
    changed.flat[0] = value
    return changed


@pytest.mark.parametrize(
    ("a", "b", "outcome"),
    [
        (0 * ONES, 0 * ONES, "identical"),
        (0 * ONES, -0.0 * ONES, "equivalent"),
        (with_first(NAN), with_first(NAN), "identical"),
        (with_first(NAN), with_first(-NAN), "equivalent"),
        (with_first(NAN), ONES, "diverged"),
        (with_first(INF), with_first(INF), "identical"),
        (with_first(INF), with_first(-INF), "diverged"),
        (with_first(INF), with_first(np.finfo(np.float32).max), "diverged"),
        (DENORMAL, DENORMAL, "identical"),
        (DENORMAL, 0 * ONES, "equivalent"),  # flushed to zero
        (with_first(1e-42), with_first(0.0), "equivalent"),
        (with_first(1e-30, 0 * ONES), 0 * ONES, "diverged"),
        (ONES[:0], ONES[:0], "identical"),
        (ONES[:0], ONES[:1], "diverged"),
        (ONES * 1.001, (ONES * 1.001).astype(ml_dtypes.bfloat16), "equivalent"),
        (ONES * 1.1, (ONES * 1.2).astype(ml_dtypes.bfloat16), "diverged"),
        (ONES.astype(np.int64), ONES * 1.5, "diverged"),
    ],
)
def test_values_at_the_edges(tmp_path: Path, a: Array, b: Array, outcome: str) -> None:
    verdict = verdict_of(tmp_path, a, b)
    assert verdict.outcome == outcome, verdict.reason


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.array([2**53], np.int64), np.array([2**53 + 1], np.int64)),  # one float64
        (np.array([-1], np.int64), np.array([2**64 - 1], np.uint64)),  # one pattern of bits
        (np.array([200], np.uint8), np.array([-56], np.int8)),  # overflown
        (np.array([2**31], np.int64), np.array([-(2**31)], np.int32)),
    ],
)
def test_integers_are_compared_as_integers(tmp_path: Path, a: Array, b: Array) -> None:
    verdict = verdict_of(tmp_path, a, b, "0/rendering/batch.input_ids")
    assert verdict.first is not None
    assert verdict.first.site == "0/rendering/batch.input_ids"


def test_integers_of_another_width_are_equal(tmp_path: Path) -> None:
    a, b = np.array([1, 2**31 - 1], np.int64), np.array([1, 2**31 - 1], np.int32)
    assert verdict_of(tmp_path, a, b, "0/rendering/batch.input_ids").exit_code == 0


# ---- what heals ---------------------------------------------------------------------------------

LOGITS = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
LABELS = np.array([1, -100, 3, 5])


def model(path: Path, logits: Array, ignored: int = -100) -> Path:
    """Logits, and their cross-entropy over the labels that it does not ignore."""
    wide = logits.astype(np.float64)
    each = np.log(np.exp(wide).sum(-1)) - wide[np.arange(4), np.maximum(LABELS, 0)]
    counts = ignored != LABELS
    loss = np.asarray(each[counts].mean(), np.float32)
    settings = {"ignore_index": ignored, "reduction": "mean"}
    given: dict[str, Any] = {"op": "cross_entropy"}
    return build_trace(
        path,
        [
            ("0/forward/root#0:in", ONES),
            ("0/forward/root#0:out", (logits, {"inputs": (0,)})),
            ("0/loss/loss.cross_entropy#0:in", (logits, given | {"inputs": (1,)})),
            ("0/loss/loss.cross_entropy#0:labels", (LABELS, given | {"kind": "labels"})),
            (
                "0/loss/loss.cross_entropy#0:out",
                (loss, given | {"inputs": (2, 3), "attributes": settings}),
            ),
            ("0/loss/loss#0:out", (loss, {"inputs": (4,)})),
        ],
    )


def test_a_position_that_the_loss_ignores_is_told(tmp_path: Path) -> None:
    changed = LOGITS.copy()
    changed[1] += np.linspace(0, 1, 8, dtype=np.float32)
    verdict = bisect(model(tmp_path / "a", LOGITS), model(tmp_path / "b", changed))
    assert verdict.first is not None
    assert verdict.first.site == "0/forward/root#0:out"


def test_a_shift_of_all_logits_of_a_row_heals(tmp_path: Path) -> None:
    shifted = LOGITS + np.arange(4, dtype=np.float32)[:, None]
    verdict = bisect(model(tmp_path / "a", LOGITS, -1), model(tmp_path / "b", shifted, -1))
    assert verdict.exit_code == 0, verdict.reason
    assert any("healed" in warning for warning in verdict.warnings)


def test_what_the_mean_averages_away_is_told(tmp_path: Path) -> None:
    """Two logits of a row change places, neither of which is the label's: the same loss."""
    changed = LOGITS.copy()
    changed[0, [2, 3]] = changed[0, [3, 2]]
    verdict = bisect(model(tmp_path / "a", LOGITS, -1), model(tmp_path / "b", changed, -1))
    assert verdict.first is not None
    assert verdict.first.site == "0/forward/root#0:out"
