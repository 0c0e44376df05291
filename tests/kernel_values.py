"""Engines of the kernels, and what they are given; shared by the tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
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


PROCESSORS = ("portable", "avx2", "avx512")
"""What the C code makes use of, in the order of `values.h`."""

ENGINES = [*(pytest.param(name, marks=needs_c) for name in PROCESSORS), "numpy"]


def used(name: str) -> Iterator[str]:
    """For a fixture of an engine: NumPy, or the C code as it runs on some processor."""
    with running(name) as runs:
        if not runs:
            pytest.skip("this processor has no such instructions")
        yield name


@contextmanager
def running(name: str) -> Iterator[bool]:
    """Switches to an engine for a while; says whether this processor can run it."""
    with kernels.using("numpy" if name == "numpy" else "native"):
        assert kernels.engine() == ("numpy" if name == "numpy" else "native")
        if name == "numpy":
            yield True
            return
        from tracediff.kernels import _native

        level = PROCESSORS.index(name)
        try:
            yield _native.restrict(level) >= level
        finally:
            _native.restrict(len(PROCESSORS))


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
    yield array[0, 0, 0, :1].reshape(())
