"""Large arrays are shared among the threads of PyTorch's OpenMP, which changes no number."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from tests.kernel_values import PROCESSORS, needs_c, used, values
from tracediff import kernels

torch = pytest.importorskip("torch")

UNIT = 2 * kernels.BLOCK
SIZES = (
    *(2 * UNIT, 2 * UNIT + 1, 3 * UNIT - 1, 8 * UNIT + 77),
    *(64 * UNIT + 1, 65 * UNIT - 3),  # more than is worked on at a time
)

pytestmark = [
    needs_c,
    pytest.mark.skipif(sys.platform != "linux", reason="threads are shared on Linux only"),
]


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from used(request.param)


@pytest.fixture
def with_threads() -> Iterator[Callable[[int], None]]:
    def choose(count: int) -> None:
        from tracediff.kernels import _native

        torch.set_num_threads(count)
        assert _native.threads() == count

    before = torch.get_num_threads()
    yield choose
    torch.set_num_threads(before)


def found(array: NDArray[Any], sketched: bool) -> tuple[Any, ...]:
    buckets = np.empty(kernels.SKETCH_SIZE) if sketched else None
    digest, statistics = kernels.summary(array, False, buckets)
    # Which NaN it is that two make depends on their order, which the compiler chooses.
    sketch = None if buckets is None else np.where(np.isnan(buckets), np.nan, buckets).tobytes()
    return digest, statistics, sketch


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "int16", "bool"])
@pytest.mark.parametrize("size", SIZES)
def test_threads_change_no_summary(
    processor: str, with_threads: Callable[[int], None], name: str, size: int
) -> None:
    array = values(name, size)  # with NaN and infinities
    with np.errstate(invalid="ignore"):
        finite = np.where(np.isfinite(array), array, array.dtype.type(1))
    for each in (array, finite):
        for sketched in (True, False):
            with_threads(1)
            alone = found(each, sketched)
            for count in (2, 3):
                with_threads(count)
                assert found(each, sketched) == alone
            if processor != "portable":
                assert alone[0] == xxhash.xxh3_128_digest(each.tobytes())


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((1024, 700), (1, 0)),
        ((3, 500, 513), (2, 1, 0)),
        ((1, 1000, 999), (0, 2, 1)),
        ((4, 8, 256, 64), (0, 2, 1, 3)),
        ((600_000, 3), (1, 0)),
        ((1, 900_000, 1), (2, 1, 0)),
    ],
)
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "complex128"])
def test_threads_change_no_copy(
    with_threads: Callable[[int], None], shape: tuple[int, ...], axes: tuple[int, ...], dtype: str
) -> None:
    array = values(dtype, int(np.prod(shape))).reshape(shape).transpose(axes)
    assert array.nbytes >= 1 << 19
    for each in (array, array[..., ::-1]):
        expected = np.ascontiguousarray(each).tobytes()
        for count in (1, 2, 3):
            with_threads(count)
            copy = np.zeros(each.shape, each.dtype)
            kernels.pack(each, copy)
            assert copy.tobytes() == expected


def test_a_forked_process_waits_for_no_thread(with_threads: Callable[[int], None]) -> None:
    """Threads are not forked; GCC's OpenMP waits for those that the parent had."""
    with_threads(2)
    array = values("float32", 8 * UNIT)
    expected = found(array, sketched=True)
    context: Any = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        assert pool.apply_async(found, (array, True)).get(timeout=20) == expected
