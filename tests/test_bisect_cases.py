"""Bisection of traces in which two right implementations differ, and of their faulty twins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tracediff.bisection import bisect
from tracediff.testing import build_trace


def adapter(path: Path, *, b: float, scale: float, heads: int, tokens: list[int]) -> Path:
    """A trace with what the checks of `not exercised` look at."""
    labels = [np.array([[-100] * (8 - n) + [5] * n]) for n in tokens]
    return build_trace(
        path,
        [
            ("0/environment/q_proj.scale:out", ("x", {"kind": "setting", "value": scale})),
            ("0/environment/config.num_attention_heads:out", 4),
            ("0/environment/config.num_key_value_heads:out", heads),
            ("0/environment/config.sliding_window:out", 16),
            *(
                (f"0/rendering/batch.labels#{i}", (row, {"kind": "labels"}))
                for i, row in enumerate(labels)
            ),
            ("0/loading/q_proj.lora_B.default.weight:param", np.full((4, 2), b, np.float32)),
            ("0/forward/q_proj#0:out", np.ones((2, 2), np.float32)),
        ],
    )


def test_what_the_input_cannot_show_is_told_by_name(tmp_path: Path) -> None:
    hiding = adapter(tmp_path / "a", b=0.0, scale=1.0, heads=1, tokens=[3, 3])
    twin = adapter(tmp_path / "b", b=0.0, scale=1.0, heads=1, tokens=[3, 3])
    told = " ".join(bisect(hiding, twin).warnings)
    for what in ("lora_B is zero", "alpha equals the rank", "key-value heads", "window", "tokens"):
        assert what in told


def test_what_the_input_can_show_is_not_told(tmp_path: Path) -> None:
    showing = adapter(tmp_path / "a", b=0.5, scale=2.0, heads=2, tokens=[3, 5])
    twin = adapter(tmp_path / "b", b=0.5, scale=2.0, heads=2, tokens=[3, 5])
    told = [w for w in bisect(showing, twin).warnings if "window" not in w]
    assert told == []


def masked(path: Path, mask: np.ndarray) -> Path:
    value = np.ones((1, 2, 3, 4), np.float32)
    return build_trace(
        path,
        [("0/forward/attn#0:in.attention_mask", mask), ("0/forward/attn#0:out", value)],
    )


CAUSAL = np.tril(np.ones((1, 1, 3, 3), bool))
ADDITIVE = np.where(CAUSAL, 0.0, np.finfo(np.float32).min).astype(np.float32)


@pytest.mark.parametrize("other", [ADDITIVE, np.where(CAUSAL, 0, -np.inf), CAUSAL.astype(int)])
def test_masks_are_compared_by_what_they_let_be_seen(tmp_path: Path, other: np.ndarray) -> None:
    a = masked(tmp_path / "a", CAUSAL)
    assert bisect(a, masked(tmp_path / "b", other)).exit_code == 0


@pytest.mark.parametrize("other", [~CAUSAL, np.ones_like(CAUSAL), np.zeros_like(ADDITIVE)])
def test_masks_of_another_meaning_diverge(tmp_path: Path, other: np.ndarray) -> None:
    # An inverted mask, and the two ways of hiding nothing.
    verdict = bisect(masked(tmp_path / "a", CAUSAL), masked(tmp_path / "b", other))
    assert verdict.first is not None
    assert verdict.first.site == "0/forward/attn#0:in.attention_mask"


def rotated(path: Path, offset: float, *, scores: float = 1.0) -> Path:
    """Queries and keys moved by an offset each, and scores that do not depend on it."""
    ones = np.ones((2, 3, 4, 4), np.float32)
    return build_trace(
        path,
        [
            ("0/forward/rotary#0:out", (ones + offset, {"inputs": ()})),
            ("0/forward/rope#0:out", (ones * 2 + offset, {"inputs": (0,)})),
            ("0/forward/rope#1:out", (ones * 3 + offset, {"inputs": (0,)})),
            ("0/forward/o_proj#0:in", (ones * scores, {"inputs": (1, 2)})),
            ("0/forward/root#0:out", (ones * scores, {"inputs": (3,)})),
        ],
    )


def test_a_divergence_that_heals_two_values_later_is_told_and_passed_over(tmp_path: Path) -> None:
    verdict = bisect(rotated(tmp_path / "a", 0.0), rotated(tmp_path / "b", 0.5))
    assert verdict.exit_code == 0
    assert any("healed" in warning for warning in verdict.warnings)


def test_one_that_reaches_the_output_does_not_heal(tmp_path: Path) -> None:
    target = rotated(tmp_path / "b", 0.5, scores=1.5)
    first = bisect(rotated(tmp_path / "a", 0.0), target).first
    assert first is not None
    assert first.site == "0/forward/rotary#0:out"


@pytest.mark.parametrize(("output", "kind"), [(1.0, None), (1.5, "missing")])
def test_a_module_computed_in_another_way_is_missing_only_if_its_parent_differs(
    tmp_path: Path, output: float, kind: str | None
) -> None:
    ones = np.ones((2, 3, 4), np.float32)
    inside = [("0/forward/mlp.gate#0:out", ones)]
    a = build_trace(tmp_path / "a", [*inside, ("0/forward/mlp#0:out", ones)])
    b = build_trace(tmp_path / "b", [("0/forward/mlp#0:out", ones * output)])
    verdict = bisect(a, b, min_coverage=0.0)
    assert (verdict.first.kind if verdict.first else None) == kind


def test_a_second_output_that_one_implementation_lacks_is_no_divergence(tmp_path: Path) -> None:
    ones = np.ones((2, 3), np.float32)
    main = ("0/forward/attn#0:out", ones)
    a = build_trace(tmp_path / "a", [main, ("0/forward/attn#0:out.1", ones)])
    b = build_trace(tmp_path / "b", [main])
    assert bisect(a, b, min_coverage=0.0).exit_code == 0
    gone = bisect(b, build_trace(tmp_path / "c", [("0/loss/loss:out", 1.0)]), min_coverage=0.0)
    assert gone.exit_code != 0


def test_a_gradient_that_adams_first_update_hides_is_named(tmp_path: Path) -> None:
    """Adam's first update has no scale: a factor in a gradient is gone from it, but not healed."""
    grad = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)

    def run(factor: float) -> list[tuple[str, object]]:
        scaled = grad * np.float32(factor)
        return [
            ("0/forward/up#0:out", grad),
            ("0/backward/mlp#0:grad_out", (grad, {"inputs": (0,)})),
            ("0/backward/up#0:grad_out", (scaled, {"inputs": (0, 1)})),
            ("0/backward/up.weight#0:grad", (scaled, {"inputs": (2,)})),
            ("0/optimizer/up.weight:grad", (scaled, {"inputs": (3,)})),
            ("0/optimizer/up.weight:state.exp_avg", (scaled, {"inputs": (4,)})),
            ("0/optimizer/up.weight:update", (np.sign(grad), {"inputs": (5,)})),
        ]

    paths = [build_trace(tmp_path / str(factor), run(factor)) for factor in (1.0, 1.01)]
    first = bisect(*paths).first
    assert first is not None
    assert first.site == "0/backward/up#0:grad_out"


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_step_in_which_one_side_only_evaluates_is_named(tmp_path: Path, evaluates: bool) -> None:
    value = np.ones(3, np.float32)
    training: list[tuple[str, object]] = [
        ("0/forward/root#0:out", value),
        ("0/optimizer/w:grad", value),
    ]
    evaluation: list[tuple[str, object]] = [("1/trajectory/eval.loss#0:out", value)]
    again = [(site.replace("0/", "1/", 1), value) for site, value in training]
    paths = [
        build_trace(tmp_path / "a", training + evaluation, stack="pytorch"),
        build_trace(tmp_path / "b", training + (evaluation if evaluates else again), stack="mlx"),
    ]
    found = bisect(*paths)
    assert (found.first is None) == evaluates
    if found.first is not None:
        assert (found.first.stage, found.first.step, found.first.path, found.first.kind) == (
            "trajectory",
            1,
            "step",
            "extra",
        )


def test_a_loss_that_is_reported_wrong_is_told_though_its_gradients_agree(tmp_path: Path) -> None:
    def values(loss: float) -> list[tuple[str, object]]:
        x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
        return [
            ("0/forward/fc#0:in", x),
            ("0/forward/fc#0:out", (x * 2, {"inputs": (0,)})),
            ("0/loss/loss#0", (loss, {"inputs": (1,)})),
            ("0/backward/fc#0:grad_out", (x * 0.1, {"inputs": (2,)})),
            ("0/trajectory/loss#0", loss),
        ]

    right = build_trace(tmp_path / "a", values(2.5))
    wrong = build_trace(tmp_path / "b", values(2.75))
    first = bisect(right, wrong).first
    assert first is not None
    assert first.site == "0/loss/loss#0:out"
