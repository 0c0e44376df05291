"""Bounds of what nothing recomputes, against errors that are made on purpose."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tracediff.compare.masks import see_as_many
from tracediff.compare.optimizers import of_noise
from tracediff.events import Event, Site
from tracediff.trace.summary import FINGERPRINT_FIELDS, fingerprint

ROUNDING = 1e-6


def first_updates(grad: np.ndarray) -> np.ndarray:
    """Adam's: the sign, whatever the size."""
    return np.sign(grad)


@pytest.mark.parametrize("part", [0.0, 1 / 3, 0.9])
def test_updates_of_gradients_part_of_which_is_rounding(part: float) -> None:
    """Such elements are of the size of the difference, with signs of their own on each side."""
    rng = np.random.default_rng(0)
    size = 3 * 4096
    noisy = rng.random(size) < part
    true = np.where(noisy, 0.0, rng.normal(size=size))
    sides = [true + ROUNDING * rng.normal(size=size) for _ in range(2)]
    inherited = np.linalg.norm(sides[0] - sides[1]) / np.linalg.norm(sides[0])
    updates = [first_updates(grad) for grad in sides]
    apart = np.linalg.norm(updates[0] - updates[1]) / np.linalg.norm(updates[0])
    allowed = of_noise(fingerprint(sides[0], brief=True), float(inherited))
    assert apart <= allowed
    # An update the other way round is apart by 2, one of another gradient by the root of 2.
    assert allowed <= np.sqrt(2)


def test_a_gradient_of_one_size_has_no_elements_below_it() -> None:
    grad = np.where(np.arange(1000) % 2, 1.0, -1.0)
    assert of_noise(fingerprint(grad, brief=True), ROUNDING) == pytest.approx(0, abs=0.01)


def test_elements_that_are_zero_are_no_noise() -> None:
    """Rows of an embedding that no token looks up."""
    grad = np.zeros(10_000)
    grad[:100] = 1.0
    assert of_noise(fingerprint(grad, brief=True), ROUNDING) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("name", ["abs_mean", "l2", "count"])
@pytest.mark.parametrize("value", [0.0, math.nan, -1.0])
def test_statistics_that_contradict_each_other_allow_nothing(name: str, value: float) -> None:
    """As a trace may hold that was tampered with."""
    known = fingerprint(np.ones(100), brief=True)
    place = FINGERPRINT_FIELDS.index(name)
    assert of_noise((*known[:place], value, *known[place + 1 :]), ROUNDING) == 0.0


def mask(array: np.ndarray) -> Event:
    return Event(
        site=Site(0, "forward", "layer", 0, "in.mask"),
        order=0,
        kind="tensor",
        dtype=array.dtype.name,
        shape=array.shape,
        fingerprint=fingerprint(array, brief=True),
    )


@pytest.mark.parametrize("hidden", [-np.inf, np.finfo(np.float32).min])
def test_masks_that_let_as_many_keys_be_seen(hidden: float) -> None:
    seen = np.tril(np.ones((8, 8), bool))
    additive = np.where(seen, 0.0, hidden).astype(np.float32)
    assert see_as_many(mask(seen), mask(additive))
    assert see_as_many(mask(additive), mask(seen))
    fewer = additive.copy()
    fewer[7, 0] = hidden
    assert not see_as_many(mask(seen), mask(fewer))
    assert not see_as_many(mask(seen), mask(seen.astype(np.float32)))  # 1 where a key is seen
