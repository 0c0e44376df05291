"""Engines of the kernels, and what they are given; shared by the tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tracediff import kernels
from tracediff.trace.dtypes import DTYPES

BLOCK = kernels.BLOCK

try:
    with kernels.using("native"):
        BUILT = True
except ImportError:
    BUILT = False

needs_c = pytest.mark.skipif(not BUILT, reason="the C kernels are not built")


ENGINES = [pytest.param("native", marks=needs_c), "numpy"]


def used(name: str) -> Iterator[str]:
    """For a fixture of an engine."""
    with kernels.using(name):
        assert kernels.engine() == name
        yield name


def values(name: str, size: int, seed: int = 0) -> NDArray[Any]:
    """Elements of all magnitudes of a dtype: any bits at all in every seventh place."""
    rng = np.random.default_rng(seed + size)
    dtype = DTYPES[name]
    array = (rng.standard_normal(size) * 50).clip(-120, 120)
    array = (np.abs(array) if dtype.kind in "ub" or "e8m0" in name else array).astype(dtype)
    array[::7] = np.frombuffer(rng.bytes(size * dtype.itemsize), dtype)[::7]
    if dtype.kind == "b":
        array = rng.integers(0, 2, size).astype(bool)
    array[2::9] = array[2::9] if "e8m0" in name else 0
    return array


def statistics(array: NDArray[Any], full: bool = True) -> dict[str, float]:
    found = kernels.fingerprint(array, full=full)
    return dict(zip(kernels.STATISTICS, found, strict=True))


def exact(array: NDArray[Any]) -> list[float | int]:
    """The elements as Python's numbers, by way of no kernel."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = array if array.dtype.kind in "iub" else array.astype(np.float64)
    return [int(x) if isinstance(x, bool) else x for x in wide.tolist()]


def same(a: Any, b: Any) -> bool:
    """Equal bits, where NaN is NaN and zero is zero."""
    a, b = np.asarray(a, np.float64) + 0.0, np.asarray(b, np.float64) + 0.0
    return bool(np.array_equal(a, b, equal_nan=True))


def layouts(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Views of a 4-D array in all orders of its axes, and of parts of it."""
    for axes in itertools.permutations(range(4)):
        yield array.transpose(axes)
        yield array.transpose(axes)[::-1, 1:, ::2]
    yield array[:, :, :, 0]
    yield array[0, 0, 0].reshape(1, -1).T
    yield np.broadcast_to(array[:, :1], array.shape).swapaxes(1, 3)
    yield array[:, :0].T
    yield array[0, 0, 0, 0]
