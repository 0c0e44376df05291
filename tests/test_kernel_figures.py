"""Figures of how far two arrays are apart: the right ones, and the same in C and in NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernel_values import BLOCK, ENGINES, used, values
from tracediff.compare import max_ulp, measure
from tracediff.compare.figures import one_conversion_apart
from tracediff.trace.dtypes import DTYPES


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from used(request.param)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32", "complex64"])
def test_error_figures_are_those_of_exact_arithmetic(engine: str, name: str, masked: bool) -> None:
    """Elements of very different sizes from block to block, with NaN and infinities."""
    rng = np.random.default_rng(5)
    size = 3 * BLOCK + 77
    a = rng.standard_normal(size) * np.repeat([1e-3, 1.0, 100.0, 5.0], BLOCK)[:size]
    b = a * (1 + 1e-2 * rng.standard_normal(size) * (rng.random(size) < 0.5))
    a, b = a.astype(DTYPES[name]), b.astype(DTYPES[name])
    if a.dtype.kind not in "iu":
        a[5], b[5], b[6], b[7], a[7] = np.nan, np.nan, np.inf, -np.inf, -np.inf
    counts = rng.random(size) < 0.6 if masked else None
    wide = np.clongdouble if name == "complex64" else np.longdouble
    wide_a, wide_b = (np.array(x.tolist()).astype(wide) for x in (a, b))
    used = np.isfinite(wide_a) & np.isfinite(wide_b)
    nonfinite = int(~used[5]) + int(~used[6]) - 1 if not used.all() else 0
    used &= counts if counts is not None else True
    x, y = wide_a[used], wide_b[used]
    apart = np.abs(x - y)
    norm = np.sqrt(np.sum(np.abs(x) ** 2))
    found = measure(a, b, counts)
    assert found.nonfinite == nonfinite
    assert found.masked == size - x.size
    assert found.error.max_abs == apart.max()
    assert found.error.differing == np.count_nonzero(apart) / x.size
    assert found.error.rel_l2 == pytest.approx(float(np.sqrt(np.sum(apart**2)) / norm), rel=1e-12)
    worst = (apart / np.maximum(np.abs(x), norm / np.sqrt(x.size))).max()
    assert found.error.max_rel == pytest.approx(float(worst), rel=1e-12)


def test_the_largest_relative_error_is_found_wherever_it_is(engine: str) -> None:
    """One element in five blocks, far larger than a sample of the others tells."""
    rng = np.random.default_rng(2)
    for size in (2.0, 1e6):
        a = rng.standard_normal(5 * BLOCK).astype(np.float32)
        a[3 * BLOCK + 1] = size
        b = a * np.float32(1 + 2**-20)
        b[4 * BLOCK + 17] += np.float32(0.25)
        apart = np.abs(a.astype(float) - b)
        rms = math.sqrt(math.fsum(x * x for x in a.tolist()) / a.size)
        expected = max((apart / np.maximum(np.abs(a.astype(float)), rms)).tolist())
        assert measure(a, b).error.max_rel == pytest.approx(expected, rel=1e-12)


def test_integers_beyond_float64_are_told_apart(engine: str) -> None:
    a = np.array([2**60, 5], np.int64)
    found = measure(a, a + np.array([1, 0]))
    assert (found.error.max_abs, found.error.differing) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        pytest.param(np.float64(1), np.nextafter(1.0, 2), 1, id="neighbours in float64"),
        pytest.param(np.float64(-1), np.float64(1), 2 * 0x3FF0000000000000, id="signs in float64"),
        pytest.param(np.float32(-0.0), np.float32(0), 0, id="zeros"),
        pytest.param(np.float16(-6e-8), np.float16(6e-8), 2, id="subnormals"),
        pytest.param(ml_dtypes.bfloat16(1), ml_dtypes.bfloat16(2), 128, id="a binade in bfloat16"),
        pytest.param(
            ml_dtypes.float8_e4m3fn(1), ml_dtypes.float8_e4m3fn(-1), 2 * 0x38, id="signs in float8"
        ),
    ],
)
def test_units_in_the_last_place(engine: str, a: Any, b: Any, apart: int) -> None:
    for x, y in ((a, b), (b, a)):
        ones, others = np.full(BLOCK + 3, x), np.full(BLOCK + 3, x)
        assert max_ulp(ones, others) == 0
        others[-1] = y
        assert max_ulp(ones, others) == apart


def test_ulp_of_any_bits(engine: str) -> None:
    bits = np.random.default_rng(0).integers(-(2**63), 2**63, (2, 500), np.int64)
    line = [[-(2**63) - x if x < 0 else x for x in row] for row in bits.tolist()]
    expected = max(abs(x - y) for x, y in zip(*line, strict=True))
    assert max_ulp(*bits.view(np.float64)) == expected


@pytest.mark.parametrize("name", ["float32", "complex64"])
def test_one_rounding_is_told_from_two_in_any_place(engine: str, name: str) -> None:
    a = np.nan_to_num(values("float32", 2 * BLOCK).clip(-1e30, 1e30))
    a = a + (1j * a if name == "complex64" else 0)
    b = a.astype(np.complex64 if name == "complex64" else ml_dtypes.bfloat16)
    assert one_conversion_apart(a.astype(DTYPES[name]), b)
    b = b.copy()
    b[-5] = b[-5] * 1.05 + 1
    assert not one_conversion_apart(a.astype(DTYPES[name]), b)
