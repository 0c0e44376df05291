"""The kernels give the right values, and the same ones in C and in NumPy."""

from __future__ import annotations

import itertools
import math
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernel_values import (
    BLOCK,
    ENGINES,
    PROCESSORS,
    exact,
    layouts,
    needs_c,
    running,
    same,
    statistics,
    used,
    values,
)
from tracediff import kernels
from tracediff.compare import measure
from tracediff.kernels import unpacked
from tracediff.trace.dtypes import DTYPES
from tracediff.trace.summary import (
    FINGERPRINT_FIELDS,
    SKETCH_SIZE,
    fingerprint,
    sketch,
    sketched_distance,
    summary,
)

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
SUMS = ("mean", "abs_mean", "l2", "third_moment", "fourth_moment")
SIZES = (0, 1, 3, 127, 128, 129, 1023, 1024, 1025, 2 * BLOCK, 2 * BLOCK + 131)
REAL = sorted(name for name, dtype in DTYPES.items() if dtype.kind != "c")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from used(request.param)


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest) -> Iterator[str]:
    """The C code, as it runs on some processor."""
    yield from used(request.param)


@needs_c
@pytest.mark.parametrize("name", REAL)
def test_c_and_numpy_agree(processor: str, name: str) -> None:
    """To the bit, but for sums in fingerprints, whose rounding differs (see the next test)."""

    def everything(a: NDArray[Any], b: NDArray[Any]) -> list[Any]:
        keep = np.random.default_rng(1).random(a.size) < 0.7
        found: list[Any] = [kernels.signed_buckets(a)]
        for full in (True, False):
            known = statistics(a, full)
            found += [[known[name] for name in known if name not in SUMS]]
        for kept, scale in ((None, 1e-3), (keep, 30.0)):
            found.append(kernels.differences(a, b, kept, scale))
        found += [kernels.within(a, b, 1e-3, 1e-5), kernels.within(a, a.copy(), 0.0, 0.0)]
        return found + ([kernels.largest_ulp(a, b)] if a.size and a.dtype.kind not in "b" else [])

    for size in SIZES:
        a, b = values(name, size), values(name, size, seed=1)
        b[::2] = a[::2]
        native = everything(a, b)
        with kernels.using("numpy"):
            numpy = everything(a, b)
        for place, (found, expected) in enumerate(zip(native, numpy, strict=True)):
            assert same(found, expected), (size, place, found, expected)


@pytest.mark.parametrize("name", REAL)
def test_moments_are_those_of_exact_arithmetic(engine: str, name: str) -> None:
    for size in (0, 1, 1025, BLOCK + 300):
        elements = exact(values(name, size))
        finite = [float(x) for x in elements if math.isfinite(x)]
        found = statistics(values(name, size))
        assert found["count"] == size
        assert found["nan"] == sum(math.isnan(x) for x in elements)
        assert found["inf"] == sum(math.isinf(x) for x in elements)
        if not finite:
            assert list(found.values())[3:] == [0] * 13
            continue
        assert found["zero"] == sum(x == 0 for x in finite)
        assert (found["min"], found["max"]) == (min(finite), max(finite))
        means = found["mean"], found["l2"] ** 2, found["third_moment"], found["fourth_moment"]
        for power, mean in enumerate(means, 1):
            count = 1 if power == 2 else len(finite)
            powers = [math.prod([x] * power) / count for x in finite]
            if max(map(abs, powers)) < 1e300:  # no sum of them leaves float64
                sizes = math.fsum(map(abs, powers))
                assert mean == pytest.approx(math.fsum(powers), abs=1e-14 * sizes)
                assert power > 1 or found["abs_mean"] == pytest.approx(sizes, rel=1e-14)


@pytest.mark.parametrize("name", REAL)
def test_order_statistics_are_those_of_a_sorted_list(engine: str, name: str) -> None:
    for size in (0, 1, 25, 3000):
        array = values(name, size)
        ordered = sorted(x for x in exact(array) if math.isfinite(x))
        for field, q in QUANTILES.items() if ordered else ():
            assert statistics(array)[field] == float(ordered[int(q * (len(ordered) - 1))])


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.full(1000, -1.5, np.float32), id="all equal"),
        pytest.param(np.arange(1000, dtype=np.int64) + 2**60, id="apart in the last bits"),
        pytest.param(np.nextafter(1.0, 2, dtype=np.float64) + np.zeros(99), id="equal float64"),
        pytest.param(np.float64([1e-310, -5e-324, 0, 1e308, -1e308] * 20), id="extremes"),
    ],
)
def test_order_statistics_of_crowded_values(engine: str, array: NDArray[Any]) -> None:
    ordered = sorted(array.tolist())
    expected = {name: float(ordered[int(q * (array.size - 1))]) for name, q in QUANTILES.items()}
    assert statistics(array).items() >= expected.items()


def test_what_is_left_out_of_a_fingerprint_is_nan(engine: str) -> None:
    found = statistics(np.arange(5.0), full=False)
    assert {name for name, number in found.items() if math.isnan(number)} == {
        *QUANTILES,
        "third_moment",
        "fourth_moment",
    }


@pytest.mark.parametrize("name", ["int16", "bfloat16", "float32"])
def test_a_sketch_adds_signed_elements_to_hashed_buckets(engine: str, name: str) -> None:
    def word(row: int, number: int) -> int:
        z = (5 * row + number) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    array = (values("int16", 70_000) % 200).astype(DTYPES[name])
    expected = [0] * 256
    for index, element in enumerate(exact(array)):
        row, column = divmod(index, 256)
        is_taken = word(row, column // 64) >> column % 64 & 1
        expected[(word(row, 4) + column) % 256] += -element if is_taken else element
    assert sketch(array).tolist() == expected


@pytest.mark.parametrize("size", [256, 2048, 1 << 16, 1 << 18])
@pytest.mark.parametrize(
    "places",
    [slice(None), slice(None, 64), slice(5, None, 64), slice(7, None, 256), slice(3, None, 1000)],
    ids=["all", "the first", "a feature of each head", "a bucket of each row", "far apart"],
)
def test_distances_are_estimated_wherever_the_differences_lie(
    engine: str, places: slice, size: int
) -> None:
    """Over many tensors within a tenth, each within four standard deviations of 1/sqrt(512)."""
    rng = np.random.default_rng(size)
    ratios = []
    for _ in range(20):
        x = rng.normal(size=size)
        y = x.copy()
        y[places] += 1e-3 * rng.normal(size=y[places].shape)
        true = np.linalg.norm(x - y)
        ratios.append(sketched_distance(sketch(x), sketch(y)) / true)
    assert np.mean(ratios) == pytest.approx(1, abs=0.1)
    assert np.abs(np.array(ratios) - 1).max() < 0.18


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "complex64", "bool"])
def test_summaries_do_not_depend_on_the_layout_in_memory(engine: str, name: str) -> None:
    plain = values("float32" if name == "complex64" else name, 6 * 40)
    plain = plain.astype(DTYPES[name]).reshape(6, 40)
    buffer = np.zeros(plain.nbytes + 1, np.uint8)
    buffer[1:] = np.frombuffer(plain.tobytes(), np.uint8)
    frozen = plain.copy()
    frozen.flags.writeable = False
    layouts = {
        "transposed": np.asfortranarray(plain),
        "strided": np.repeat(plain, 2, axis=1)[:, ::2],
        "backwards": plain[::-1, ::-1].copy()[::-1, ::-1],
        "read-only": frozen,
        "unaligned": buffer[1:].view(plain.dtype).reshape(plain.shape),
    }
    if plain.dtype.itemsize > 1 and name != "bfloat16":
        layouts["big-endian"] = plain.astype(plain.dtype.newbyteorder(">"))
    expected = fingerprint(plain), sketch(plain)
    for layout, array in layouts.items():
        assert same(fingerprint(array), expected[0]), layout
        assert same(sketch(array), expected[1]), layout
        found = measure(array, plain)
        assert not found.error.differing, layout
        assert not found.nonfinite, layout


def test_a_fingerprint_has_no_negative_zero(engine: str) -> None:
    """Bits of one value: minimum and sum of -0.0 and 0.0 depend on the order otherwise."""
    for array in (np.array([-0.0, 0.0]), np.array([0.0, -0.0]), np.full(300, -0.0)):
        packed = struct.pack("<16d", *fingerprint(array))
        expected = (float(array.size), 0.0, 0.0, float(array.size), *[0.0] * 12)
        assert packed == struct.pack("<16d", *expected)
    assert len(FINGERPRINT_FIELDS) == 16


def test_scalars_and_nothing(engine: str) -> None:
    assert fingerprint(np.array(-3.0, np.float32))[3:] == (0, -3, 3, 3, -27, 81, *[-3] * 7)
    assert fingerprint(np.empty((0, 5), np.float16)) == (0.0,) * 16
    assert fingerprint(np.array([math.nan, math.inf])) == (2.0, 1.0, 1.0, *[0.0] * 13)
    assert measure(np.empty((0, 3)), np.empty((0, 3))).error.rel_l2 == 0.0


@pytest.mark.parametrize("size", [0, 1, 63, 64, 127, 128, 200, 4096, 200_003])
def test_bytes_past_the_caches_are_the_same(engine: str, size: int) -> None:
    data = np.random.default_rng(size).bytes(size + 3)
    for start, to in itertools.product((0, 3), (0, 1, 48)):
        out = bytearray(b"-" * (size + 64))
        kernels.stream(memoryview(data)[start : start + size], memoryview(out)[to : to + size])
        assert out == b"-" * to + data[start : start + size] + b"-" * (64 - to)


@pytest.mark.parametrize("size", [*range(0, 200, 7), 4096, 100_003])
def test_crc32_is_that_of_zlib(engine: str, size: int) -> None:
    data = np.random.default_rng(size).bytes(size + 3)
    for start in range(4):
        part = memoryview(data)[start : start + size]
        assert kernels.crc32(part) == zlib.crc32(part)
    assert kernels.crc32(b"123456789") == 0xCBF43926  # the check value of CRC-32


@pytest.mark.parametrize("size", [0, 1, 15, 63, 127, 128, 129, 200, 4096, 16_400, 200_003])
def test_an_entry_is_placed_with_its_checksum(engine: str, size: int) -> None:
    """Wherever it comes to lie, and whatever the processor has."""
    data = np.frombuffer(np.random.default_rng(size).bytes(size + 3), np.uint8)
    for start, to, length in itertools.product((0, 3), (0, 1, 96), (4, 64)):
        part, end = data[start : start + size], to + length + size
        piece, head = bytearray(b"-" * (end + 64)), bytes(range(length))
        crc_at = length - 4
        expected = zlib.crc32(part)
        assert kernels.place(piece, to, head, crc_at, part) == expected
        assert piece[: to + crc_at] == b"-" * to + head[:crc_at]
        assert piece[to + crc_at : to + length] == expected.to_bytes(4, "little")
        assert piece[to + length : end] == part.tobytes()
        assert piece[end:] == b"-" * 64


@needs_c
@pytest.mark.parametrize(("at", "crc_at"), [(90, 0), (101, 0), (0, 1), (1 << 62, 0)])
def test_an_entry_beyond_the_piece_is_refused(at: int, crc_at: int) -> None:
    piece = bytearray(100)
    with pytest.raises(ValueError, match="do not belong together"):
        kernels.place(piece, at, b"head", crc_at, b"some data")
    assert piece == bytes(100)


def test_threads_change_nothing(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SHARE", BLOCK)
    a = values("float32", 7 * BLOCK + 5)
    b = a.copy()
    b[-1] += 1
    found = []
    for processors in (1, 3):
        monkeypatch.setattr(kernels, "_processors", lambda count=processors: count)
        figures = kernels.differences(a, b, None, 1.0)
        found.append((figures, kernels.largest_ulp(a, b), kernels.within(a, b, 0, 0)))
    assert same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert found[0][2] is False


@needs_c
def test_arrays_that_do_not_belong_together_are_refused() -> None:
    from tracediff.kernels import _native

    a, rows = np.zeros(10), np.zeros((1, 8))
    for wrong in (
        (a, a[:9], None, 1.0, rows),
        (a, a, np.zeros(9, bool), 1.0, rows),
        (a, a, None, 1.0, np.zeros((2, 8))),
        (a, a.astype(">f8"), None, 1.0, rows),
        (a, a.astype("S3"), None, 1.0, rows),
        (a, a[::2], None, 1.0, rows),
        (a, list(a), None, 1.0, rows),
    ):
        with pytest.raises(ValueError, match=r"belong together|aligned numbers"):
            _native.differences(*wrong)
    for call in (
        lambda: _native.summary(a, True, np.zeros(255)),
        lambda: _native.signed_buckets(a, None),
    ):
        with pytest.raises(ValueError, match="256 float64"):
            call()
    assert _native.summary(np.zeros(17, np.uint8)[1:].view(np.float64), True, None) is None
    assert _native.summary("text", True, None) is None


def test_the_environment_can_leave_the_c_code_unused() -> None:
    program = "from tracediff import kernels; print(kernels.engine())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, kernels.VARIABLE: "numpy"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["numpy"]


@pytest.mark.parametrize("name", ["bool", "bfloat16", "float32", "float64", "complex128", "S3"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 70, 1, 130), (3, 16, 33, 64)])
def test_packing_is_what_numpy_does(engine: str, name: str, shape: tuple[int, ...]) -> None:
    dtype = DTYPES.get(name) or np.dtype(name)
    plain = np.frombuffer(np.random.default_rng(0).bytes(math.prod(shape) * dtype.itemsize), dtype)
    for array in layouts(plain.reshape(shape)):
        packed = np.empty(array.shape, dtype)
        kernels.pack(array, packed)
        assert packed.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", ["bool", "bfloat16", "float8_e5m2", "float32", "complex128", "S3"])
def test_every_so_many_elements_of_any_layout(engine: str, name: str) -> None:
    dtype = DTYPES.get(name) or np.dtype(name)
    plain = np.frombuffer(np.random.default_rng(0).bytes(210 * dtype.itemsize), dtype)
    for array in layouts(plain.reshape(2, 3, 5, 7)):
        for step in (1, 2, 7, 9, 500):
            assert kernels.every(array, step) == array.reshape(-1)[::step].tobytes()


@needs_c
def test_packing_into_another_size_is_refused() -> None:
    from tracediff.kernels import _native

    for to in (np.zeros(15), np.zeros((4, 4)).T[:, ::-1], np.zeros(16, np.float32)):
        with pytest.raises(ValueError, match="packed"):
            _native.pack(np.zeros((4, 4)).T, to)


def summed(elements: NDArray[np.float64]) -> float:
    """The sum in the order that the kernels promise, whatever the processor."""
    total = 0.0
    for start in range(0, elements.size, BLOCK):
        block = elements[start : start + BLOCK]
        rows = np.append(block, np.zeros(-block.size % 64)).reshape(-1, 64)
        lanes = np.zeros(64)
        for row in rows:
            lanes += row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        total += float(lanes[0])
    return total


@needs_c
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "int32"])
def test_sums_have_one_order_on_all_processors(processor: str, name: str, full: bool) -> None:
    rng = np.random.default_rng(0)
    for size in (63, 4096, BLOCK + 4096 + 17, 3 * BLOCK):
        array = (rng.standard_normal(size) * 100).astype(DTYPES[name])
        array[::50] = 0
        if name != "int32":
            array[size // 2 :: 5000] = np.inf
            array[size // 3 :: 5000] = np.nan
        x = array.astype(np.float64)
        finite = x[np.isfinite(x)]
        x[~np.isfinite(x)] = 0
        found = statistics(array, full)
        assert found["mean"] == summed(x) / finite.size
        assert found["abs_mean"] == summed(np.abs(x)) / finite.size
        assert found["l2"] == math.sqrt(summed(x * x))
        assert (found["min"], found["max"]) == (finite.min(), finite.max())
        assert found["zero"] == np.count_nonzero(finite == 0)
        if full:
            assert found["third_moment"] == summed(x * x * x) / finite.size
            assert found["fourth_moment"] == summed((x * x) * (x * x)) / finite.size


def test_details_are_of_small_tensors_only(engine: str) -> None:
    for name in ("third_moment", "q50"):
        at = FINGERPRINT_FIELDS.index(name)
        small, large = (fingerprint(np.zeros(size, np.float32))[at] for size in (16_384, 16_385))
        assert small == 0
        assert math.isnan(large)


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_one_pass_finds_what_each_finds_alone(engine: str, name: str, brief: bool) -> None:
    for size in (0, 1, 31, 60, 61, 241, 1024, 4097, 16_384, BLOCK + 4096 + 17, 3 * BLOCK + 64):
        array = values(name, size) if name in REAL else np.zeros(size, DTYPES[name])
        total = np.full(SKETCH_SIZE, np.nan)
        of_bytes, statistics = summary(array, brief=brief, buckets=total)
        assert of_bytes == xxhash.xxh3_128_digest(array.tobytes()), size
        assert same(unpacked(statistics), fingerprint(array, brief=brief))
        assert np.array_equal(total, sketch(array), equal_nan=True)
        assert summary(array, brief=brief)[0] == of_bytes


@needs_c
@given(size=st.integers(0, 5000), more=st.integers(0, 40), seed=st.integers(0, 9))
@pytest.mark.parametrize("name", ["uint8", "bfloat16", "float32"])
def test_digests_are_those_of_xxhash(name: str, size: int, more: int, seed: int) -> None:
    """Around the lengths of its stripes (64 bytes), blocks (1,024) and of our tiles (16 KiB)."""
    count = (size + 1024 * more) // DTYPES[name].itemsize
    array = (np.random.default_rng(seed).random(count) * 200).astype(DTYPES[name])
    for processor in PROCESSORS:
        with running(processor):
            buckets = np.empty(SKETCH_SIZE) if seed % 2 else None
            found = summary(array, brief=True, buckets=buckets)[0]
        assert found == xxhash.xxh3_128_digest(array.tobytes())
