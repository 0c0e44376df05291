"""Figures, patterns and settings, against values worked out by hand."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from tracediff.compare import max_ulp, measure, recognise
from tracediff.compare.bounds import cross_entropy
from tracediff.compare.figures import (
    largest_deviations,
    one_conversion_apart,
    unit_roundoff,
)
from tracediff.compare.optimizers import adam_step, adam_update
from tracediff.compare.padding import Padding
from tracediff.compare.settings import equal
from tracediff.events import Event, Site


def test_figures_of_a_known_difference() -> None:
    figures = measure(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    assert figures.error.max_abs == 0.5
    assert figures.error.rel_l2 == pytest.approx(0.5 / 5)
    assert figures.error.max_rel == pytest.approx(0.5 / 4)
    assert figures.error.differing == 0.5


def test_one_wrong_element_among_millions_shows() -> None:
    baseline = np.ones((1000, 2000), np.float32)
    target = baseline.copy()
    target[999, 1999] = 2.0
    error = measure(baseline, target).error
    assert error.rel_l2 == pytest.approx(1 / math.sqrt(2e6), rel=1e-6)
    assert error.max_rel == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("a", "b", "nonfinite"),
    [
        ([np.nan, 1.0], [np.nan, 1.0], 0),
        ([np.inf, 1.0], [np.inf, 1.0], 0),
        ([np.inf, 1.0], [-np.inf, 1.0], 1),
        ([np.nan, 1.0], [0.0, 1.0], 1),
    ],
)
def test_what_is_not_finite_is_told_unless_both_sides_have_it(
    a: list[float], b: list[float], nonfinite: int
) -> None:
    assert measure(np.array(a), np.array(b)).nonfinite == nonfinite


def test_padding_is_left_out_but_nan_in_it_is_told() -> None:
    baseline, target = np.ones((2, 3)), np.ones((2, 3))
    target[1, 2] = 7.0
    counts = np.array([[True] * 3, [True, True, False]])
    assert measure(baseline, target, counts).error.rel_l2 == 0.0
    target[1, 2] = np.nan
    assert measure(baseline, target, counts).nonfinite == 1


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", 2.0**-24), ("float16", 2.0**-11), ("bfloat16", 2.0**-8), ("float64", 2.0**-53)],
)
def test_unit_roundoff(dtype: str, expected: float) -> None:
    # Higham, Accuracy and Stability of Numerical Algorithms, table 2.1: u = 2**-p with p bits of
    # significand, the hidden one included: 24, 11, 8 and 53.
    assert unit_roundoff(dtype) == expected


def test_ulp_distance_crosses_zero() -> None:
    tiny = np.float32(np.finfo(np.float32).smallest_subnormal)
    assert max_ulp(np.array([tiny]), np.array([-tiny])) == 2
    one = np.array([1.0], ml_dtypes.bfloat16)
    assert max_ulp(one, np.array([1.0078125], ml_dtypes.bfloat16)) == 1
    assert max_ulp(np.array([1]), np.array([2])) is None


def test_largest_deviations_come_with_their_indices() -> None:
    baseline, target = np.zeros((2, 3)), np.zeros((2, 3))
    target[1, 2], target[0, 1] = -5.0, 3.0
    first, second = largest_deviations(baseline, target, limit=5)
    assert (first.index, first.target) == ((1, 2), -5.0)
    assert (second.index, second.target) == ((0, 1), 3.0)


RANDOM = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)


@pytest.mark.parametrize(
    ("target", "name", "detail"),
    [
        (RANDOM * 4, "scaled", {"factor": 4.0}),
        (RANDOM * np.float32(math.sqrt(8)), "scaled", {"factor": math.sqrt(8)}),
        (-RANDOM, "sign", {"factor": -1.0}),
        (RANDOM.T, "transposed", {}),
        (np.roll(RANDOM, 1, axis=0), "shifted", {"axis": 0, "offset": 1}),
        (RANDOM[[3, 1, 0, 2, 5, 4]], "permuted", {"axis": 0, "moved": 5}),
        (RANDOM.byteswap(), "byte order", {}),
        (np.zeros_like(RANDOM), "zero", {"side": "target"}),
    ],
)
def test_patterns_are_named_with_their_estimate(
    target: np.ndarray, name: str, detail: dict[str, float | str]
) -> None:
    pattern = recognise(RANDOM, target)
    assert pattern is not None
    assert pattern.name == name
    for key, value in detail.items():
        found = pattern.detail[key]
        assert found == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5))


def test_the_square_root_of_the_rank_is_spelled_out() -> None:
    pattern = recognise(RANDOM, RANDOM * np.float32(math.sqrt(8)))
    assert pattern is not None
    assert "sqrt(8)" in pattern.meaning


def test_a_rotation_by_another_base_grows_with_position() -> None:
    positions, half = np.arange(32), 8
    x = np.random.default_rng(1).normal(size=(1, 2, 32, 2 * half))

    def rotated(base: float) -> np.ndarray:
        angle = positions[:, None] * base ** (-np.arange(half) / half)
        cos, sin = np.cos(angle), np.sin(angle)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    pattern = recognise(rotated(1e5), rotated(1e4))
    assert pattern is not None
    assert pattern.name in ("grows with position", "later positions")
    assert pattern.detail["first_position"] == 1


@pytest.mark.parametrize(
    ("factor", "said"),
    [(10.0, "1/(1 - beta) for beta 0.9"), (0.001, "1/(1 - beta) for beta 0.999")],
)
def test_a_lost_factor_of_a_moment_is_named(factor: float, said: str) -> None:
    pattern = recognise(RANDOM, RANDOM * np.float32(factor))
    assert pattern is not None
    assert said in pattern.meaning


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (8192.0, "= 8192:"),
        (1 / 8192, "= 1/8192:"),
        (-7.0, "= -7:"),
        (5000.3, "5000.3: a constant factor"),  # within 1e-4 of 5000, as every number is of one
        (70.9, "70.9: a constant factor"),  # and of the root of 5027
        (1e200, "1e+200: a constant factor"),  # whose square is no number
        (1e-310, "1e-310: a constant factor"),  # whose reciprocal is none
    ],
)
def test_a_factor_is_told_as_whole_where_that_is_no_chance(factor: float, said: str) -> None:
    wide = RANDOM.astype(np.float64)
    pattern = recognise(wide, wide * factor)
    assert pattern is not None
    assert said in pattern.meaning


def test_a_small_factor_is_seen_among_rounding() -> None:
    noise = 1 + 1e-7 * np.random.default_rng(6).normal(size=RANDOM.shape)
    pattern = recognise(RANDOM, (RANDOM * noise * 1.0001).astype(np.float32))
    assert pattern is not None
    assert pattern.detail["factor"] == pytest.approx(1.0001, abs=1e-6)
    assert recognise(RANDOM, (RANDOM * noise).astype(np.float32)) is None


def test_heads_in_another_order_are_told_from_rows() -> None:
    heads = np.random.default_rng(7).normal(size=(4, 8, 16)).astype(np.float32)
    pattern = recognise(heads.reshape(32, 16), heads[[2, 0, 3, 1]].reshape(32, 16))
    assert pattern is not None
    assert (pattern.name, pattern.detail["block"]) == ("permuted", 8)
    rows = recognise(RANDOM, RANDOM[::-1].copy())
    assert rows is not None
    assert rows.detail["block"] == 1


def test_unrelated_tensors_have_no_pattern() -> None:
    other = np.random.default_rng(5).normal(size=(6, 6)).astype(np.float32)
    assert recognise(RANDOM, other) is None


HYPER = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "step": 1}


def test_adam_by_hand() -> None:
    # One weight, gradient 0.5, first step: m = 0.05, v = 2.5e-4; both corrections undo the
    # decay, so the update is -lr * 0.5 / 0.5. Without them it is -lr * 0.05 / sqrt(2.5e-4).
    m, v, p = np.array([0.05]), np.array([2.5e-4]), np.array([1.0])
    assert adam_update(m, v, p, HYPER)[0] == pytest.approx(-0.1, rel=1e-6)
    uncorrected = adam_update(m, v, p, HYPER | {"bias_correction": False})[0]
    assert uncorrected == pytest.approx(-0.1 * 3.1622776, rel=1e-5)


def test_updates_that_flip_with_a_rounded_gradient_are_explained_by_their_states() -> None:
    rng = np.random.default_rng(2)
    gradient = rng.normal(size=1000) * 10.0 ** rng.uniform(-12, 0, size=1000)
    noisy = gradient + 1e-9 * rng.normal(size=1000)
    param = rng.normal(size=1000).astype(np.float32)
    states = [(0.1 * g, 0.001 * g * g) for g in (gradient, noisy)]
    predicted = tuple(adam_update(m, v, param, HYPER) for m, v in states)
    after = tuple((param + u).astype(np.float32) for u in predicted)
    updates = tuple((a - param).astype(np.float32) for a in after)
    assert np.linalg.norm(updates[0] - updates[1]) > 0.01 * np.linalg.norm(updates[0])
    for update, (m, v) in zip(updates, states, strict=True):
        step = adam_step(m, v, param, HYPER, 2.0**-24)
        excess = np.abs(update - step.value) / step.spread
        assert excess.max() < 6
        assert (np.abs(update * np.float32(1.01) - step.value) / step.spread).max() > 6


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1e-4, float(np.float32(1e-4)), True),
        (1e-4, 1.001e-4, False),
        (True, 1, False),
        (None, 0, False),
        ([1, 2], (1, 2), True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ("sdpa", "eager", False),
    ],
)
def test_settings_are_equal_up_to_spelling(a: object, b: object, same: bool) -> None:
    assert equal(a, b) is same


def test_one_wrong_weight_in_bfloat16_is_no_conversion() -> None:
    weight = (np.random.default_rng(3).normal(size=(64, 64)) / 8).astype(ml_dtypes.bfloat16)
    assert one_conversion_apart(weight, weight.astype(np.float32))
    assert one_conversion_apart(RANDOM, RANDOM.astype(ml_dtypes.bfloat16))
    wrong = weight.astype(np.float32)
    wrong[5, 7] += 0.05
    assert not one_conversion_apart(weight, wrong.astype(ml_dtypes.bfloat16))


def test_padding_never_hides_labels_or_masks() -> None:
    padding = Padding([np.array([[1, 1, 0]])])
    site = Site(0, "rendering", "batch.labels")
    assert padding.counts(Event(site=site, order=0, kind="labels"), (1, 3)) is None
    assert padding.counts(Event(site=site, order=0, kind="mask"), (1, 3)) is None
    counts = padding.counts(Event(site=site, order=0, kind="ids"), (1, 3))
    assert counts is not None
    assert counts.tolist() == [[True, True, False]]


def test_logits_of_ignored_targets_do_not_count() -> None:
    trained = {("loss.cross_entropy", 0): np.array([True, False, True])}
    padding = Padding([], trained=trained)
    event = Event(site=Site(0, "loss", "loss.cross_entropy", 0, "in"), order=0)
    counts = padding.counts(event, (3, 7))
    assert counts is not None
    assert counts[:, 0].tolist() == [True, False, True]
    assert padding.counts(event, (4, 7)) is None


def mean_cross_entropy(logits: np.ndarray) -> float:
    """Of target 0 at each row, in float64."""
    highest = logits.max(axis=-1, keepdims=True)
    total = np.log(np.exp(logits - highest).sum(axis=-1)) + highest[..., 0]
    return float(np.mean(total - logits[..., 0]))


@pytest.mark.parametrize("apart", [1e-6, 1e-3, 1e-1])
def test_the_bound_of_a_cross_entropy_holds_and_is_not_loose(apart: float) -> None:
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(64, 100)) * 4
    other = logits + apart * rng.choice([-1.0, 1.0], size=logits.shape)
    loss = mean_cross_entropy(logits)
    bound = cross_entropy((logits, other), None, loss).rel_l2
    assert abs(mean_cross_entropy(other) - loss) <= bound * loss
    assert bound < 0.25  # a loss that is halved stands out, also in bfloat16
